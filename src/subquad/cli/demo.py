"""`subquad demo`: the same small task with several mechanisms, and what each costs."""

import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from subquad.cli.output import print_table

MECHANISMS: dict[str, dict[str, Any]] = {
    "softmax": {"name": "softmax"},
    "lightconv": {"name": "lightconv", "kernel_size": [3, 7]},
    "eva": {"name": "eva", "window": 16, "chunk_size": 8, "relative": "t5"},
}


def demo(
    updates: Annotated[int, typer.Option(min=1, help="Updates for each mechanism.")] = 240,
) -> None:
    """Train a small translation model with three mechanisms on an embedded set, and compare them."""
    from subquad.train.recipe import Recipe
    from subquad.train.sources import task_of

    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for name, mixer in MECHANISMS.items():
            recipe = Recipe.parse("demo", _recipe(mixer, updates))
            task = task_of(recipe, Path(folder) / "data")
            rows.append([name, *_trained(recipe, task, Path(folder) / name)])
    headers = [
        "mechanism",
        "parameters",
        "valid loss",
        "valid ppl",
        "target tokens/s",
        "seconds",
        "peak MB of an update",
    ]
    print_table(headers, rows, numeric=range(1, len(headers)))
    print("\nTranslation of dates, times, numbers, units and names from English to German, generated from CLDR;")
    print(f"{updates} updates each, the same data in the same order. `subquad train` trains on your own files.")


def _recipe(mixer: dict[str, Any], updates: int) -> dict[str, Any]:
    return {
        "task": "translation",
        "data": {"embedded": "phrases", "tokenizer": {"kind": "bpe", "vocab_size": 2000}},
        "model": {
            "preset": "translation_small",
            "shared_embedding": True,
            "encoder": {"mixer": mixer},
            "decoder": {"mixer": mixer},
        },
        "schedule": {"kind": "inverse-sqrt", "lr": 3e-3, "warmup_updates": 100},
        "train": {"updates": updates, "budget": {"max_tokens": 2048}, "smoothing": 0.1},
    }


def _trained(recipe: Any, task: Any, run: Path) -> list[str]:
    """The cells of a mechanism's row, after training it."""
    from subquad.compare.profiling import peak_bytes
    from subquad.train.log import Progress
    from subquad.train.loop import Trainer

    with Progress() as progress:
        trainer = Trainer(recipe, task, run, progress, [])
        progress.note(f"{run.name}: {trainer.model.parameter_count():,} parameters")
        start = time.monotonic()
        metrics = trainer.fit()
        seconds = time.monotonic() - start
    batch = task.samples("train", training=True).batch(trainer.plan.epoch(0)[0])
    peak = peak_bytes(lambda: task.loss(trainer.model, batch).total.backward(), trainer.device)
    speed = trainer.targets / seconds
    return [
        f"{trainer.model.parameter_count():,}",
        f"{metrics['loss']:.3f}",
        f"{metrics['ppl']:.2f}",
        f"{speed:,.0f}",
        f"{seconds:.0f}",
        f"{peak / 1e6:.0f}",
    ]
