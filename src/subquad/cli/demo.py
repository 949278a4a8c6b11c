"""`subquad demo`: a comparison of three mechanisms on an embedded set, in a few minutes."""

from pathlib import Path
from typing import Annotated, Any

import typer

from subquad.cli.compare import parse_seeds, show_result
from subquad.processes import interruptible

MIXERS = ("softmax", "lightconv", "eva")
OPTIONS: dict[str, dict[str, Any]] = {
    "lightconv": {"kernel_size": [3, 7]},
    "eva": {"window": 2, "landmarks": 4, "relative": "table", "dims": 2},
}
TOKENS, MAX_SECONDS = 4096, 5
WARMUP = 50
RECIPE: dict[str, Any] = {
    "task": "image-classification",
    "data": {"embedded": "digits"},
    "model": {"preset": "vision_small", "patch_size": 2, "dim": 64, "encoder": {"heads": 4, "ffn_dim": 128}},
    "optim": {"name": "adamw", "betas": [0.9, 0.999], "weight_decay": 0.05, "decay_vectors": False},
    "schedule": {"kind": "cosine", "lr": 2e-3, "warmup_updates": WARMUP},
}


def demo(
    updates: Annotated[int, typer.Option(min=WARMUP + 1, help="How many updates each training takes.")] = 250,
    seeds: Annotated[str, typer.Option(help="How many seeds each mechanism is trained with, or which (1,2).")] = "3",
    out: Annotated[Path, typer.Option(help="The folder of the comparison.")] = Path("runs/demo"),
) -> None:
    """Compare three mechanisms on embedded images of digits.

    The result is a table, and a page that opens offline. It is what `subquad compare` does, with settings for two cores
    and a few minutes. The same command goes on after an interruption.

    Examples:
    subquad demo
    subquad demo --updates 100 --seeds 1 --out runs/quick
    """
    from subquad import api

    train = {"updates": updates, "budget": {"max_sentences": 64}, "smoothing": 0.1, "validate_every": 50}
    with interruptible():
        result = api.compare(
            {**RECIPE, "train": train},
            MIXERS,
            out=out,
            options=OPTIONS,
            seeds=parse_seeds(seeds),
            tokens=TOKENS,
            max_seconds=MAX_SECONDS,
            title="Demo: handwritten digits",
            command="subquad demo",
        )
    show_result(result, out)
