"""`subquad demo`: a comparison of three mechanisms on an embedded set, in a few minutes."""

from pathlib import Path
from typing import Annotated, Any

import typer

from subquad.cli.compare import parse_seeds, show_result
from subquad.processes import interruptible

MIXERS = ("softmax", "lightconv", "eva")
OPTIONS: dict[str, dict[str, Any]] = {
    "softmax": {"rotary": True},
    "lightconv": {"kernel_size": [7, 15]},
    "eva": {"window": 32, "chunk_size": 8, "rotary": True},
}
LENGTHS, TOKENS, MAX_SECONDS = (2048,), 2048, 5
WARMUP = 50
RECIPE: dict[str, Any] = {
    "task": "language-model",
    "data": {
        "embedded": "speeches",
        "options": {"held_out": 150},
        "tokenizer": {"kind": "bytes"},
        "blocks": {"tokens_per_sample": 256},
    },
    "model": {"preset": "lm_small", "dim": 64, "decoder": {"layers": 2, "heads": 4, "ffn_dim": 128}},
    "optim": {"name": "adam", "betas": [0.9, 0.98]},
    "schedule": {"kind": "cosine", "lr": 5e-3, "warmup_updates": WARMUP},
}


def demo(
    updates: Annotated[int, typer.Option(min=WARMUP + 1, help="How many updates each training takes.")] = 300,
    seeds: Annotated[str, typer.Option(help="How many seeds each mechanism is trained with, or which (1,2).")] = "3",
    out: Annotated[Path, typer.Option(help="The folder of the comparison.")] = Path("runs/demo"),
) -> None:
    """Compare three mechanisms in a language model of bytes.

    The text is embedded: addresses of presidents, read in blocks of 256 bytes. The result is a table, and a page that
    opens offline. It is what `subquad compare` does, with settings for two cores and a few minutes. The same command
    goes on after an interruption.

    Examples:
    subquad demo
    subquad demo --updates 100 --seeds 1 --out runs/quick
    """
    from subquad import api

    train = {"updates": updates, "budget": {"max_tokens": 1024}, "validate_every": max(1, updates // 6)}
    with interruptible():
        result = api.compare(
            {**RECIPE, "train": train},
            MIXERS,
            out=out,
            options=OPTIONS,
            seeds=parse_seeds(seeds),
            lengths=LENGTHS,
            tokens=TOKENS,
            max_seconds=MAX_SECONDS,
            title="Demo: a language model of bytes",
            command="subquad demo",
        )
    show_result(result, out)
