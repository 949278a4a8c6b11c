"""Compares mechanisms on your own text: which one models it best, and what each costs by length.

    python examples/compare_text.py my.txt
    python examples/compare_text.py my.txt --mixers softmax,lightconv,eva,primal --updates 2000 --seeds 3

The lines of the file are dealt out: every tenth to validation, every tenth to the test, the others to training. A small
language model is then trained with each mechanism by `subquad compare`, which prints a table and a verdict and writes
OUT/comparison/report.html. The same command goes on after an interruption.

Models read pieces of 256 tokens, of a short text smaller ones: quality is compared over the pieces of the test, and a
handful would say nothing. Windows shrink with them. Thousands of lines say more than hundreds.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from subquad.cli.main import run

LONGEST, SHORTEST, PIECES = 256, 32, 20
"""Tokens of a piece, and how many pieces the test should have."""
BATCH, READINGS = 16, 20
"""Pieces of a batch, and how often a short text is read."""
CHARACTERS = 4
"""Of a token, about."""
PARTS = ["valid", "test", *["train"] * 8]


def deal_out(text: Path, folder: Path) -> dict[str, str]:
    """Writes the lines of the text as three files; their names by split."""
    lines = [line for line in text.read_text().splitlines() if line.strip()]
    if len(lines) < len(PARTS):
        raise ValueError(f"{text} has {len(lines)} lines of text; at least {len(PARTS)} are needed")
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for split in dict.fromkeys(PARTS):
        own = [line for number, line in enumerate(lines) if PARTS[number % len(PARTS)] == split]
        path = folder / f"{split}.txt"
        content = "\n".join(own) + "\n"
        if not path.exists() or path.read_text() != content:  # a comparison that goes on keeps its data
            path.write_text(content)
        files[split] = str(path.resolve())
    return files


def piece_of(test: str) -> int:
    """Tokens of a piece: as many as leave the test enough of them."""
    piece = LONGEST
    while piece > SHORTEST and Path(test).stat().st_size < PIECES * piece * CHARACTERS:
        piece //= 2
    return piece


def updates_of(train: str, piece: int) -> int:
    """500, or fewer where that would be many readings of a short text."""
    reading = Path(train).stat().st_size // (CHARACTERS * BATCH * piece)
    return min(500, max(100, READINGS * reading))


def recipe_of(files: dict[str, str], piece: int, updates: int) -> dict[str, Any]:
    return {
        "task": "language-model",
        "data": {
            "splits": files,
            "tokenizer": {"kind": "bpe", "vocab_size": 4000},
            "blocks": {"tokens_per_sample": piece, "breaks": "none"},
        },
        "model": {"preset": "lm_small"},
        "optim": {"name": "adam", "betas": [0.9, 0.98], "clip": 1.0},
        "schedule": {"kind": "cosine", "lr": 2e-3, "warmup_updates": max(1, updates // 10)},
        "train": {
            "updates": updates,
            "budget": {"max_tokens": BATCH * piece},
            "validate_every": max(1, updates // 10),
        },
    }


def options_of(mixer: str, piece: int) -> list[str]:
    """Windows that see a part of a piece, and summaries of the rest."""
    window = f"{mixer}.window={max(8, piece // 8)}"
    return {"eva": [window, "eva.chunk_size=8"], "local": [window]}.get(mixer, [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("--mixers", default="softmax,lightconv,eva", help="causal mechanisms, see `subquad info`")
    parser.add_argument("--updates", type=int, help="of each training (default: 500, fewer for a short text)")
    parser.add_argument("--seeds", default="1", help="how many (default: 1); several tell luck from difference")
    parser.add_argument("--lengths", default="256,1024", help='to measure costs at (default: 256,1024; "": none)')
    parser.add_argument("--out", type=Path, default=Path("runs/my-text"))
    given = parser.parse_args()
    files = deal_out(given.text, given.out / "text")
    piece = piece_of(files["test"])
    updates = updates_of(files["train"], piece) if given.updates is None else given.updates
    recipe = recipe_of(files, piece, updates)
    print(f"{given.text}: pieces of {piece} tokens, {updates} updates of {BATCH} pieces each", flush=True)
    (given.out / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    words = ["compare", str(given.out / "recipe.yaml"), "--mixers", given.mixers, "--seeds", given.seeds]
    words += ["--lengths", given.lengths, "--out", str(given.out / "comparison")]
    for mixer in given.mixers.split(","):
        words += [word for option in options_of(mixer, piece) for word in ("--set", option)]
    return run(words)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"compare_text: {error}")
