"""What an old checkpoint becomes, and the run directory it is written as.

An importer is a module with three names, which `subquad.interop.checkpoints.registry.IMPORTERS` lists:

    SUPPORTED                               a few words that say what it reads
    recognises(contents)                    whether `read_pickle` gave a checkpoint of this program
    convert(contents, folder, texts)        the checkpoint as an `ImportedRun`; ValueError: why it cannot be one

folder: where the checkpoint lies; texts: files that the user named, for importers that need dictionaries.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from subquad.data.text.store import FIELDS, prepared_for
from subquad.data.tokenizers import Tokenizer
from subquad.files import write_json
from subquad.models import Model
from subquad.models.presets import merged
from subquad.tasks.base import TOKENIZERS, write_inputs
from subquad.train.checkpoint import Checkpoint, TrainState, checkpoint_folder, save_checkpoint
from subquad.train.recipe import Recipe
from subquad.train.run import IMPORTED, RECIPE, open_run

FORMAT = 1
RATE = 1e-4
"""The learning rate of a run whose original says none."""


@dataclass(frozen=True)
class TextFiles:
    """Files of text that the user named.

    codes: where they are not named, those beside the checkpoint are taken, unless the text is in `pieces` already.
    moses: text is split by Moses before the codes are applied.
    """

    dict_source: Path | None = None
    dict_target: Path | None = None
    codes: Path | None = None
    moses: bool = True
    pieces: bool = False


class Importer(Protocol):
    """A module that reads the checkpoints of one program."""

    SUPPORTED: str

    def recognises(self, contents: Any) -> bool: ...

    def convert(self, contents: Any, folder: Path, texts: TextFiles) -> "ImportedRun": ...


@dataclass(frozen=True)
class ImportedRun:
    """A checkpoint of another program as a model of ours, with what else its run needs.

    origin: program and architecture, for people. task: as in recipes. tokenizers: by side (source and target, or text);
    a task on images has none. inputs: what else inputs.json says (see `Task.inputs`). recipe: sections or parts of
    them; what is missing gets defaults, and names of files that the user replaces. optimizer: its state by our names
    (see `optimizer_state`). update, epoch: how many are done. notes: lines that tell the user what was not taken.
    """

    origin: str
    task: str
    model: Model
    tokenizers: Mapping[str, Tokenizer] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)
    update: int = 0
    epoch: int = 0
    notes: Sequence[str] = ()


def write_run(imported: ImportedRun, out: str | Path) -> Path:
    """Writes an ordinary run directory: recipe, environment, inputs, tokenizers and one checkpoint.

    The recipe comes last: a folder with one is complete. Until the run is trained further, everything in the recipe but
    task and model may still be changed.
    """
    out = Path(out)
    if (out / RECIPE).exists():
        raise ValueError(f"{out} holds a run already; give another --out")
    expected = set(FIELDS.get(prepared_for(imported.task), ()))
    assert set(imported.tokenizers) == expected, f"{imported.task} has the tokenizers {sorted(expected)}"
    recipe = Recipe.parse("the imported recipe", _recipe(imported, out))
    out.mkdir(parents=True, exist_ok=True)
    # The recipe has the whole model: nothing of it is left to the data.
    write_inputs(out, imported.task, imported.tokenizers, {}, imported.inputs)
    state = TrainState(
        update=imported.update,
        epoch=imported.epoch,
        epoch_end=True,
        cursor={"epoch": imported.epoch, "batch": 0},
        extra={"bad_validations": 0, "best": None, "minutes": 0.0},
    )
    weights = {name: value.detach() for name, value in imported.model.state_dict().items()}
    # No generators: training goes on from the recipe's seed.
    save_checkpoint(checkpoint_folder(out), Checkpoint(weights, dict(imported.optimizer), state, rng={}))
    write_json(out / IMPORTED, {"format": FORMAT, "origin": imported.origin, "notes": list(imported.notes)})
    open_run(recipe, out)
    return out


def _recipe(imported: ImportedRun, out: Path) -> dict[str, Any]:
    """All sections of the recipe. Training ends where the checkpoint stands, unless the original says more."""
    defaults = {
        "task": imported.task,
        "data": _data(imported, out),
        "model": imported.model.config.model_dump(mode="json"),
    }
    if "schedule" not in imported.recipe:
        defaults["schedule"] = {"kind": "constant", "lr": RATE}
    train = imported.recipe.get("train", {})
    if not {"updates", "epochs", "minutes"} & train.keys():
        defaults["train"] = {"updates": max(1, imported.update)}
    return merged(defaults, imported.recipe)


def _data(imported: ImportedRun, out: Path) -> dict[str, Any]:
    """Where the data would be: no checkpoint holds it, so these names are for the user to replace."""
    splits = ("train", "valid")
    if not imported.tokenizers:
        return {"images": {split: f"data/{split}" for split in splits}}
    saved = {side: {"kind": "saved", "path": str(out.resolve() / TOKENIZERS / side)} for side in imported.tokenizers}
    if "text" in saved:
        return {"splits": {split: [f"data/{split}.txt"] for split in splits}, "tokenizer": saved["text"]}
    source, target = imported.tokenizers["source"], imported.tokenizers["target"]
    shared = source.fingerprint() == target.fingerprint()
    return {
        "splits": {split: [f"data/{split}.source", f"data/{split}.target"] for split in splits},
        "tokenizer": saved["source"],
        "target_tokenizer": None if shared else saved["target"],
    }
