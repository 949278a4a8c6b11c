"""Counts the functions of subquad between a model and the work of its kernels, in one traced pass.

    python -m tools.call_depth

An encoder of EVA reads a padded batch under Python's profiler. Whenever a kernel calls one of torch's products or
softmaxes, the functions of subquad on the stack are counted, from the model's `forward` to the one that calls. torch's
own functions (`Module.__call__`, the dispatcher of operations) are not counted, and neither are functions that have
returned. It runs on one thread: with more, the innermost function runs in a pool, one level below the same others.
"""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import subquad
from subquad.models import Model, build_model

WORK = {"bmm", "softmax"}
SOURCES = str(Path(subquad.__file__).parent)
KERNELS = str(Path(SOURCES) / "kernels")
ENCODER = {"layers": 1, "heads": 2, "ffn_dim": 24, "mixer": {"name": "eva", "window": 4, "landmarks": 4}}

Chain = tuple[str, ...]
"""Functions from the outermost to the innermost, each as file:function."""


def encoders() -> dict[str, tuple[Model, tuple[torch.Tensor, ...], dict[str, torch.Tensor]]]:
    """Small models with an EVA encoder, by name, with a padded batch for each."""
    torch.manual_seed(0)
    tokens = torch.randint(2, 40, (3, 12))
    padding = torch.arange(12) >= torch.tensor([[12], [7], [3]])
    classifier = build_model("text-classifier", vocab=40, num_classes=2, dim=16, encoder=ENCODER)
    decoder = {**ENCODER, "mixer": "lightconv"}
    translator = build_model(
        "encoder-decoder", source_vocab=40, target_vocab=40, dim=16, encoder=ENCODER, decoder=decoder
    )
    return {
        "text classifier": (classifier, (tokens,), {"padding": padding}),
        "encoder-decoder": (translator, (tokens, tokens), {"source_padding": padding}),
    }


def chains(model: Model, *inputs: torch.Tensor, **options: torch.Tensor) -> set[Chain]:
    """The ways from the model's `forward` to where kernels work, in one pass."""
    found: set[Chain] = set()

    def notice(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and getattr(called, "__name__", "") in WORK and _file(frame).startswith(KERNELS):
            found.add(_chain(frame))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sys.setprofile(notice)
    try:
        model(*inputs, **options)
    finally:
        sys.setprofile(None)
        torch.set_num_threads(threads)
    return found


def _chain(frame: FrameType | None) -> Chain:
    names = []
    while frame is not None:
        if _file(frame).startswith(SOURCES):
            names.append(f"{Path(_file(frame)).relative_to(SOURCES)}:{frame.f_code.co_qualname}")
        frame = frame.f_back
    return tuple(reversed(names))


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def main() -> None:
    for name, (model, inputs, options) in encoders().items():
        for chain in sorted(chains(model, *inputs, **options), key=len, reverse=True):
            print(f"{name}: {len(chain)} levels")
            print("\n".join(f"  {number:2d}  {function}" for number, function in enumerate(chain, 1)))


if __name__ == "__main__":
    main()
