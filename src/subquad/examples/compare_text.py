"""Compares mechanisms on your own text: which one models it best, and what each costs by length.

    python -m subquad.examples.compare_text my.txt
    python -m subquad.examples.compare_text my.txt --mixers softmax,lightconv,eva,primal --updates 2000 --seeds 5

The lines of the file are dealt out: every tenth to validation, every tenth to the test, the others to training. A small
language model is then trained with each mechanism by `subquad.compare`. The conclusions are printed, and
OUT/comparison/report.html has everything. The same command goes on after an interruption.

Models read pieces of 256 tokens, of a short text smaller ones: quality is compared over the pieces of the test, and a
handful would say nothing. Windows shrink with them. Thousands of lines say more than hundreds.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import subquad

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


def options_of(mixers: list[str], piece: int) -> dict[str, dict[str, Any]]:
    """Windows that see a part of a piece, and summaries of the rest."""
    window = max(8, piece // 8)
    fitting: dict[str, dict[str, Any]] = {"eva": {"window": window, "chunk_size": 8}, "local": {"window": window}}
    return {mixer: options for mixer, options in fitting.items() if mixer in mixers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("--mixers", default="softmax,lightconv,eva", help="causal mechanisms, see `subquad info`")
    parser.add_argument("--updates", type=int, help="of each training (default: 500, fewer for a short text)")
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: 3); one tells no luck from difference")
    parser.add_argument("--lengths", default="256,1024", help='to measure costs at (default: 256,1024; "": none)')
    parser.add_argument("--out", type=Path, default=Path("runs/my-text"))
    given = parser.parse_args()
    files = deal_out(given.text, given.out / "text")
    piece = piece_of(files["test"])
    updates = updates_of(files["train"], piece) if given.updates is None else given.updates
    print(f"{given.text}: pieces of {piece} tokens, {updates} updates of {BATCH} pieces each", flush=True)
    mixers = given.mixers.split(",")
    result = subquad.compare(
        recipe_of(files, piece, updates),
        mixers,
        out=given.out / "comparison",
        options=options_of(mixers, piece),
        seeds=given.seeds,
        lengths=[int(length) for length in given.lengths.split(",") if length],
        title=given.text.name,
    )
    for finding in result.conclusions:
        print(finding.text)
    print(f"{given.out / 'comparison/report.html'} is the page")
    if failed := [trial for trial in result.trials if trial.status == "failed"]:
        raise ValueError("; ".join(f"{trial.mechanism}: {trial.reason}" for trial in failed))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"compare_text: {error}")
