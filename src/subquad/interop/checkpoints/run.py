"""The result of converting a checkpoint, and how it is written as a run directory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from subquad.config import merge_options
from subquad.data.tokenizers import Tokenizer
from subquad.files import write_json
from subquad.models import Model
from subquad.tasks.base import write_inputs
from subquad.train.checkpoint import Checkpoint, TrainState, checkpoint_folder, save_checkpoint
from subquad.train.recipe import Recipe
from subquad.train.run import IMPORTED, open_run
from subquad.train.run_folder import RECIPE

FORMAT = 1
DEFAULT_LR = 1e-4
"""The learning rate of a run if the original does not say one."""


@dataclass(frozen=True)
class TextFiles:
    """Dictionaries, codes and a tokenizer that the user named.

    codes: if they are not named, those beside the checkpoint are used, unless the text is in `pieces` already.
    moses: whether Moses splits the text before the codes are applied. languages: of source and target, where they are
    not those that the checkpoint names. remove_bpe: how pieces become words where there are no codes (see
    `DecodeOptions`). tokenizer: the tokenizer.json of a model whose checkpoint has ids only.
    """

    dict_source: Path | None = None
    dict_target: Path | None = None
    codes: Path | None = None
    moses: bool = True
    pieces: bool = False
    languages: tuple[str | None, str | None] = (None, None)
    remove_bpe: str | None = None
    tokenizer: Path | None = None


@dataclass(frozen=True)
class ConvertedRun:
    """A checkpoint of another program as a model of ours, with everything else that its run needs.

    origin: program and architecture, for people to read. task: as in recipes. tokenizers: by field (source and target,
    or text); image tasks have none. inputs: what else inputs.json says (see `Task.inputs`). recipe: sections or parts
    of sections; the rest gets defaults. data: the whole section `data`; None: names of files that the user replaces.
    Either way it is read with the tokenizers that are saved in the run. optimizer: its state by our names (see
    `optimizer_state`). update, epoch: how many are done. notes: lines that tell the user what was not converted.
    """

    origin: str
    task: str
    model: Model
    tokenizers: Mapping[str, Tokenizer] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] | None = None
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)
    update: int = 0
    epoch: int = 0
    notes: Sequence[str] = ()


def write_run(converted: ConvertedRun, out: str | Path) -> Path:
    """Writes an ordinary run directory: recipe, environment, inputs, tokenizers and one checkpoint.

    The recipe is written last, so a folder with a recipe is complete. Until the run is trained further, everything in
    the recipe except task and model may still be changed.
    """
    out = Path(out)
    if (out / RECIPE).exists():
        raise ValueError(f"{out} holds a run already; give another --out")
    recipe = Recipe.parse("the imported recipe", _full_recipe(converted))
    if converted.tokenizers:
        recipe = recipe.model_copy(update={"data": recipe.data.with_run_tokenizers()})
    out.mkdir(parents=True, exist_ok=True)
    # The recipe has the whole model config; nothing follows from the data.
    write_inputs(out, converted.task, converted.tokenizers, {}, converted.inputs)
    state = TrainState(
        update=converted.update,
        epoch=converted.epoch,
        epoch_end=True,
        cursor={"epoch": converted.epoch, "batch": 0},
        extra={"bad_validations": 0, "best": None, "minutes": 0.0},
    )
    weights = {name: value.detach() for name, value in converted.model.state_dict().items()}
    # There are no random states: training continues from the seed of the recipe.
    save_checkpoint(checkpoint_folder(out), Checkpoint(weights, dict(converted.optimizer), state, rng={}))
    write_json(out / IMPORTED, {"format": FORMAT, "origin": converted.origin, "notes": list(converted.notes)})
    open_run(recipe, out)
    return out


def _full_recipe(converted: ConvertedRun) -> dict[str, Any]:
    """Returns all sections of the recipe. Training ends at the checkpoint's update, unless the original says more."""
    defaults = {
        "task": converted.task,
        "data": _data_section(converted),
        "model": converted.model.config.model_dump(mode="json"),
    }
    if "schedule" not in converted.recipe:
        defaults["schedule"] = {"kind": "constant", "lr": DEFAULT_LR}
    train = converted.recipe.get("train", {})
    if not {"updates", "epochs", "minutes"} & train.keys():
        defaults["train"] = {"updates": max(1, converted.update)}
    return merge_options(defaults, converted.recipe)


def _data_section(converted: ConvertedRun) -> dict[str, Any]:
    """Returns the data section. A checkpoint holds no data, so its file names are for the user to replace."""
    if converted.data is not None:
        return dict(converted.data)
    splits = ("train", "valid")
    if not converted.tokenizers:
        return {"images": {split: f"data/{split}" for split in splits}}
    if "text" in converted.tokenizers:
        files = {split: [f"data/{split}.txt"] for split in splits}
    else:
        files = {split: [f"data/{split}.source", f"data/{split}.target"] for split in splits}
    return {"splits": files}
