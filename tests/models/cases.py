"""Small models of every kind, and tiny versions of every preset, with any mechanism that can stand in each place."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.mixers import available, mixer_class
from subquad.models import PRESETS, Model, ModelOutput, build_model

TINY_DIM, TINY_HEADS = 16, 2
OPTIONS: dict[str, dict[str, Any]] = {
    "performer": {"features": 8},
    "eva": {"window": 4, "landmarks": 4},
    "lara": {"landmarks": 4},
    "local": {"window": 4},
    "scatterbrain": {"window": 4, "features": 4},
    "linformer": {"proj_k": 4, "max_length": 256},
    "primal": {"rank": 4, "rank_multiple": 2},
}
"""Options that make a mechanism small; those without have none."""


class Place(NamedTuple):
    """Where a mechanism can stand in a preset: encoder, causal decoder, cross-attention, stages of a pyramid."""

    preset: str
    where: str


def able(where: str) -> list[str]:
    """Mechanisms that can stand there."""
    has = {name: mixer_class(name).capabilities for name in available()}
    needed = {"decoder": "causal", "cross": "cross"}.get(where, "bidirectional")
    return [name for name in has if getattr(has[name], needed)]


def places() -> Iterator[Place]:
    for name, data in PRESETS.items():
        for where in ("encoder", "decoder", "stages"):
            if where in data:
                yield Place(name, where)
        if data["kind"] == "encoder-decoder":
            yield Place(name, "cross")


def tiny(name: str, where: str | None = None, mechanism: str | None = None) -> Model:
    """A preset shrunk to a few layers of a few channels, with a mechanism in one of its places."""
    data = shrunk(PRESETS[name])
    if where is not None and mechanism is not None:
        choice = {"name": mechanism, **OPTIONS.get(mechanism, {})}
        if where == "stages":
            data["stages"] = [{**stage, "mixer": choice} for stage in data["stages"][:-1]] + data["stages"][-1:]
        elif where == "cross":
            data["decoder"] = {**data["decoder"], "cross": choice}
        else:
            data[where] = {**data[where], "mixer": choice}
    return build_model(data.pop("kind"), **data)


def shrunk(data: dict[str, Any]) -> dict[str, Any]:
    """The same architecture, small: two layers (the pattern's first and last), few channels, words and pixels."""
    small = dict(data)
    for key in ("vocab", "source_vocab", "target_vocab"):
        if key in small:
            small[key] = 40
    small |= {"dim": TINY_DIM} if "dim" in small else {}
    small |= {"image_size": 4 * small["patch_size"]} if "image_size" in small else {}
    for key in ("embedding", "head"):
        if small.get(key, {}).get("cutoffs"):
            small[key] = {**small[key], "cutoffs": [10, 20], "factor": 2}
    for key in ("encoder", "decoder"):
        if key in small:
            small[key] = shrunk_stack(small[key])
    if "stages" in small:
        small["stages"] = [shrunk_stack(stage) | {"dim": TINY_DIM, "layers": 1} for stage in small["stages"]]
    return small


def shrunk_stack(stack: dict[str, Any]) -> dict[str, Any]:
    small = {**stack, "layers": 2, "heads": TINY_HEADS, "ffn_dim": 24}
    for key in ("mixer", "cross"):
        if isinstance(small.get(key), dict):
            choice = {k: ([v[0], v[-1]] if isinstance(v, list) else v) for k, v in small[key].items()}
            small[key] = choice | {"name": small[key]["name"].replace("softmax*5", "softmax")}
    return small


def inputs(model: Model, batch: int = 2, time: int = 12) -> tuple[Tensor, ...]:
    """What the model's forward takes, without padding."""
    generator = torch.Generator().manual_seed(0)
    config = model.config
    if config.kind in ("vision", "pyramid"):
        side = config.image_size if config.kind == "vision" else 64
        return (torch.randn(batch, config.channels, side, side, generator=generator),)
    if config.kind == "encoder-decoder":
        sizes = ((config.source_vocab, time), (config.target_vocab, time - 3))
        return tuple(torch.randint(2, vocab, (batch, length), generator=generator) for vocab, length in sizes)
    return (torch.randint(2, config.vocab, (batch, time), generator=generator),)


def run(model: Model) -> ModelOutput:
    return model(*inputs(model))
