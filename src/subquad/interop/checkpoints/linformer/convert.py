"""Checkpoints of crybot/linformer: translation models, which know nothing of their options or tokens.

    checkpoint.pt      model_state_dict, optimizer_state_dict, and the state of the training loop
    NAME.yaml          the config that the model was trained with, beside it: it says how many heads there are

The original begins a source and a target with <s>; here a target begins with </s>, and a source with its first token.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad.data.tokenizers.simple import IdTokenizer
from subquad.files import read_yaml
from subquad.interop.checkpoints.linformer import models as linformer_models
from subquad.interop.checkpoints.run import ImportedRun, TextFiles
from subquad.models import Model, Seq2Seq
from subquad.models import model_from as build_model_from

SUPPORTED = "crybot/linformer (translation; its YAML config beside the checkpoint)"
SYMBOLS = {"bos": 0, "pad": 1, "eos": 2, "unk": 3}
"""Of BART's tokenizer, which the original uses."""
DECODE = {"beam": 1, "max_len_a": 0.0, "max_len_b": 256, "min_len": 0}
"""What the original does: the likeliest token at each step."""
WEIGHTS = "model_state_dict"


def recognises(contents: Any) -> bool:
    """Whether a file holds a model of this program, also one that cannot be imported."""
    state = contents.get(WEIGHTS) if isinstance(contents, Mapping) else None
    return isinstance(state, Mapping) and "model.encoder.stacked.0.attention.qkv_proj.weight" in state


def convert(contents: Mapping[str, Any], folder: Path, texts: TextFiles) -> ImportedRun:  # noqa: ARG001
    """The checkpoint as a run of ours."""
    state: Mapping[str, Tensor] = contents[WEIGHTS]
    if "linear.weight" not in state or not any(name.startswith("model.decoder.") for name in state):
        raise ValueError("this encoder of crybot/linformer stands alone: only its translation models are supported")
    config = _config(folder)
    found = linformer_models.model_from({**config, "pad": SYMBOLS["pad"]}, state).module
    tokenizer = IdTokenizer(state["linear.weight"].shape[0], SYMBOLS)
    return ImportedRun(
        origin=f"crybot/linformer, {config['model'].get('type', 'model')}",
        task="translation",
        model=_begun_with_eos(found),
        tokenizers={"source": tokenizer, "target": tokenizer},
        recipe={"decode": DECODE},
        notes=[
            "text goes in and comes out as numbers of BART's tokenizer: a source is 0 (its <s>) and its tokens, "
            "without the end",
            "source and target have a table of embeddings each, alike but for the symbol that a target begins with",
            "the optimiser's state is not taken: training goes on with a fresh one, at a constant learning rate",
        ],
    )


def _config(folder: Path) -> dict[str, Any]:
    """The config that lies beside the checkpoint; several must agree about the heads."""
    paths = sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml"))
    configs = [config for config in (read_yaml(path, "config") for path in paths) if _heads(config) is not None]
    if len({_heads(config) for config in configs}) != 1:
        which = (
            "several configs with other numbers of heads lie" if configs else "no YAML config with model.n_heads lies"
        )
        raise ValueError(f"{which} in {folder}: put the config that the model was trained with beside the checkpoint")
    return configs[0]


def _heads(config: Mapping[str, Any]) -> int | None:
    model = config.get("model")
    return model.get("n_heads") if isinstance(model, Mapping) else None


def _begun_with_eos(model: Model) -> Model:
    """The same model for targets that begin with </s> instead of <s>.

    A decoder never reads </s> but at the beginning, so in a table of its own that row can be the one of <s>.
    """
    assert isinstance(model, Seq2Seq)
    alike = build_model_from(model.config.model_dump(mode="json") | {"shared_embedding": False})
    weights = dict(model.state_dict())
    table = weights["target.tokens.weight"]
    weights |= {"source.tokens.weight": table, "target.tokens.weight": table.clone()}
    weights["target.tokens.weight"][SYMBOLS["eos"]] = table[SYMBOLS["bos"]]
    with torch.no_grad():
        alike.load_state_dict(weights)
    return alike
