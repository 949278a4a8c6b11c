"""Converts translation models of crybot/linformer. Their checkpoints contain neither options nor tokens.

    checkpoint.pt      model_state_dict, optimizer_state_dict, and the state of the training loop
    NAME.yaml          the config that the model was trained with, beside the checkpoint: it has the number of heads

In the original, source and target begin with <s>. Here a target begins with </s>, and a source with its first token.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad.data.tokenizers import Tokenizer, TokenizerConfig, build_tokenizer
from subquad.data.tokenizers.simple import IdTokenizer
from subquad.data.tokenizers.subword import FilledTokenizer
from subquad.files import read_yaml
from subquad.interop.checkpoints.linformer.models import convert_model
from subquad.interop.checkpoints.run import ConvertedRun, TextFiles
from subquad.models import Model, Seq2Seq, build_from_config

SUPPORTED = "crybot/linformer (translation; its YAML config beside the checkpoint)"
SPECIAL_IDS = {"bos": 0, "pad": 1, "eos": 2, "unk": 3}
"""The special ids of BART's tokenizer, which the original uses."""
DECODE = {"beam": 1, "max_len_a": 0.0, "max_len_b": 256, "min_len": 0}
"""How the original decodes: it takes the likeliest token at each step."""
IDS_NOTE = (
    "text goes in and comes out as ids of BART's tokenizer, unless --tokenizer names its tokenizer.json: a source is 0 "
    "(its <s>) and its tokens, without the end"
)
WEIGHTS = "model_state_dict"


def recognises(contents: Any) -> bool:
    """Whether this is a model of crybot/linformer, including those that cannot be imported."""
    state = contents.get(WEIGHTS) if isinstance(contents, Mapping) else None
    return isinstance(state, Mapping) and "model.encoder.stacked.0.attention.qkv_proj.weight" in state


def convert(contents: Mapping[str, Any], folder: Path, texts: TextFiles) -> ConvertedRun:
    """Converts a checkpoint to a run of ours."""
    state: Mapping[str, Tensor] = contents[WEIGHTS]
    if "linear.weight" not in state or not any(name.startswith("model.decoder.") for name in state):
        raise ValueError("this is an encoder of crybot/linformer alone, but only its translation models are supported")
    config = _read_config(folder)
    found = convert_model({**config, "pad": SPECIAL_IDS["pad"]}, state).module
    size = state["linear.weight"].shape[0]
    return ConvertedRun(
        origin=f"crybot/linformer, {config['model'].get('type', 'model')}",
        task="translation",
        model=_begin_with_eos(found),
        tokenizers=_tokenizers(size, texts.tokenizer),
        recipe={"decode": DECODE},
        notes=[
            *([IDS_NOTE] if texts.tokenizer is None else []),
            "source and target have a table of embeddings each, which differ in the token that a target begins with",
            "the state of the optimiser is not converted: training continues with a fresh one and a constant rate",
        ],
    )


def _tokenizers(size: int, path: Path | None) -> dict[str, Tokenizer]:
    """Of source and target: those of the file, or ids. size: the rows of the model's tables."""
    if path is None:
        # <s> is a token of sources like any other, so that it is kept where a table of tokens begins with it
        source = {role: number for role, number in SPECIAL_IDS.items() if role != "bos"}
        return {"source": IdTokenizer(size, source), "target": IdTokenizer(size, SPECIAL_IDS)}
    read = build_tokenizer(TokenizerConfig(kind="file", path=str(path)))
    found = {role: getattr(read, role) for role in SPECIAL_IDS}
    if found != SPECIAL_IDS:
        raise ValueError(
            f"{path} has the special ids {found}, but BART's, with which the model works, are {SPECIAL_IDS}"
        )
    content = read.files()["tokenizer.json"]
    return {
        side: FilledTokenizer(content, str(path), SPECIAL_IDS, size, begun=side == "source")
        for side in ("source", "target")
    }


def _read_config(folder: Path) -> dict[str, Any]:
    """Returns the config beside the checkpoint. If there are several, they must agree about the number of heads."""
    paths = sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml"))
    configs = [config for config in map(_read_sections, paths) if _num_heads(config) is not None]
    if len({_num_heads(config) for config in configs}) != 1:
        found = "several configs with different numbers of heads" if configs else "no YAML config with model.n_heads"
        raise ValueError(f"{folder} has {found}: put the config of the model, and no other, beside the checkpoint")
    return configs[0]


def _read_sections(path: Path) -> dict[str, Any]:
    """Reads a config, also as Weights & Biases stores that of a run: each section is {value: SECTION}."""
    config = read_yaml(path, "config")
    return {
        name: section["value"] if isinstance(section, Mapping) and "value" in section else section
        for name, section in config.items()
    }


def _num_heads(config: Mapping[str, Any]) -> int | None:
    model = config.get("model")
    return model.get("n_heads") if isinstance(model, Mapping) else None


def _begin_with_eos(model: Model) -> Model:
    """Returns the same model for targets that begin with </s> instead of <s>.

    A decoder reads </s> only at the beginning, so in a table of its own that row can be the one of <s>.
    """
    assert isinstance(model, Seq2Seq)
    other = build_from_config(model.config.model_dump(mode="json") | {"shared_embedding": False})
    weights = dict(model.state_dict())
    table = weights["target.tokens.weight"]
    weights |= {"source.tokens.weight": table, "target.tokens.weight": table.clone()}
    weights["target.tokens.weight"][SPECIAL_IDS["eos"]] = table[SPECIAL_IDS["bos"]]
    with torch.no_grad():
        other.load_state_dict(weights)
    return other
