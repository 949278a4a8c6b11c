"""Compares mechanisms on your own text: which one models it best, and what each costs by length.

    python examples/compare_text.py my.txt
    python examples/compare_text.py my.txt --mixers softmax,lightconv,eva,primal --updates 2000 --seeds 3

The lines of the file are dealt out: every tenth to validation, every tenth to the test, the others to training. A small
language model is then trained with each mechanism by `subquad compare`, which prints a table and a verdict and writes
OUT/comparison/report.html. The same command goes on after an interruption.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from subquad.cli.main import run

OPTIONS = {"eva": ["eva.window=32", "eva.chunk_size=8"], "local": ["local.window=32"]}
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


def recipe_of(files: dict[str, str], updates: int) -> dict[str, Any]:
    return {
        "task": "language-model",
        "data": {
            "splits": files,
            "tokenizer": {"kind": "bpe", "vocab_size": 4000},
            "blocks": {"tokens_per_sample": 256, "breaks": "none"},
        },
        "model": {"preset": "lm_small"},
        "optim": {"name": "adam", "betas": [0.9, 0.98], "clip": 1.0},
        "schedule": {"kind": "cosine", "lr": 2e-3, "warmup_updates": max(1, updates // 10)},
        "train": {"updates": updates, "budget": {"max_tokens": 4096}, "validate_every": max(1, updates // 5)},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("--mixers", default="softmax,lightconv,eva", help="causal mechanisms, see `subquad info`")
    parser.add_argument("--updates", type=int, default=500, help="of each training (default: 500)")
    parser.add_argument("--seeds", default="1", help="how many (default: 1); several tell luck from difference")
    parser.add_argument("--lengths", default="256,1024", help='to measure costs at (default: 256,1024; "": none)')
    parser.add_argument("--out", type=Path, default=Path("runs/my-text"))
    given = parser.parse_args()
    recipe = recipe_of(deal_out(given.text, given.out / "text"), given.updates)
    (given.out / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    words = ["compare", str(given.out / "recipe.yaml"), "--mixers", given.mixers, "--seeds", given.seeds]
    words += ["--lengths", given.lengths, "--out", str(given.out / "comparison")]
    for mixer in given.mixers.split(","):
        words += [word for option in OPTIONS.get(mixer, []) for word in ("--set", option)]
    return run(words)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"compare_text: {error}")
