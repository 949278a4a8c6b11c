"""How far it carries: processes that share an update, and files of 10^9 tokens.

Figures are reported, none is a target but the second that opening may take. Speeds need an idle machine.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.measured import Result
from subquad.data.text.store import TokenStore, TokenWriter
from subquad.files import write_metadata
from subquad.train.metrics_log import read_metrics

ROOT = Path(__file__).parent.parent
TITLES = {
    "processes": "efficiency: the speed over that of one process times the number of processes",
    "tokens": "seconds that opening took",
}
WAYS = {"DDP": "train.sharded=false", "FSDP2": "train.sharded=true"}
STACK = {"layers": 4, "heads": 4, "ffn_dim": 512}
RECIPE: dict[str, Any] = {
    "task": "language-model",
    "data": {"tokenizer": {"kind": "bytes"}, "blocks": {"tokens_per_sample": 256, "breaks": "none"}},
    "model": {"preset": "lm_small", "dim": 128, "decoder": {**STACK, "mixer": {"name": "local", "window": 32}}},
    "schedule": {"kind": "constant", "lr": 1e-3},
    "train": {"budget": {"max_tokens": 1024}, "accumulate": 4},
}


@dataclass(frozen=True)
class Amounts:
    """How much of everything."""

    updates: int = 60
    processes: tuple[int, ...] = (1, 2, 4)
    tokens: tuple[int, ...] = (10**7, 10**8, 10**9)
    taken: int = 100_000


FULL = Amounts()
QUICK = Amounts(updates=6, processes=(1, 2), tokens=(10**6,), taken=1000)
LENGTH = 25
"""Tokens of a sentence in the large files."""


def processes(folder: Path, amounts: Amounts) -> Iterator[Result]:
    """The same updates of four batches, shared by more and more processes of one thread each."""
    recipe = {**RECIPE, "train": {**RECIPE["train"], "updates": amounts.updates, "log_every": 1}}
    splits = {"train": 1 << 19, "valid": 1 << 10}  # bytes; validation is at the end of a run, and not of interest
    recipe["data"] = {**RECIPE["data"], "splits": {name: str(folder / name) for name in splits}}
    for name, size in splits.items():
        (folder / name).write_text("so many words of one line\n" * (size // 26))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    tokens = RECIPE["train"]["budget"]["max_tokens"] * RECIPE["train"]["accumulate"]
    single: float | None = None
    for way, change in WAYS.items():
        for count in amounts.processes:
            if count == 1 and single is not None:
                continue  # one process shards nothing
            labels = {"way": way if count > 1 else "one process", "processes": count, "cores": _cores()}
            run = folder / f"{way}-{count}"
            ended = _train(folder / "recipe.yaml", run, change, count)
            if ended.returncode:
                yield Result("processes", labels, reason=ended.stderr.strip().splitlines()[-1])
                continue
            speed = tokens * _updates_a_second(run)
            single = speed if count == 1 else single
            yield Result("processes", labels, {"tokens a second": speed}, single and speed / (count * single))


def _train(recipe: Path, run: Path, change: str, count: int) -> "subprocess.CompletedProcess[str]":
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    words = ["-m", "subquad.cli.main", "train", str(recipe), change, "--out", str(run)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*start, *words], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=1800, check=False
    )


def _updates_a_second(run: Path) -> float:
    """Of the second half of the updates, when everything is warm."""
    records = read_metrics(run / "metrics.jsonl", "train")
    first, last = records[len(records) // 2 - 1], records[-1]
    return (last["update"] - first["update"]) / max(1e-9, last["time"] - first["time"])


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def tokens(folder: Path, amounts: Amounts, seed: int) -> Iterator[Result]:
    """Stores in files with holes: opened, and read at random; their lengths are those of a real index."""
    draw = random.Random(seed)
    for total in amounts.tokens:
        path = folder / f"tokens-{total}"
        large_store(path, total)
        start = time.perf_counter()
        store = TokenStore.open(path)
        opening = time.perf_counter() - start
        numbers = [draw.randrange(len(store)) for _ in range(amounts.taken)]
        start = time.perf_counter()
        read = sum(len(store[number].tolist()) for number in numbers)
        reading = time.perf_counter() - start
        if read != LENGTH * amounts.taken:
            raise RuntimeError(f"{amounts.taken} sentences of {LENGTH} tokens had {read} tokens")
        labels = {"tokens": f"{total:,}", "sentences": f"{len(store):,}"}
        speed = {"µs a sentence at random": 1e6 * reading / amounts.taken}
        yield Result("tokens", labels, speed, opening, ("at most", 1.0))


def large_store(path: Path, total: int) -> None:
    """Files as `TokenWriter` would have written them for sentences of equal length, all tokens 0."""
    sentences = total // LENGTH
    with TokenWriter(path, "uint16") as writer:
        writer.add([0])
    description = dict(TokenStore.open(path).meta)
    os.truncate(path.with_name(f"{path.name}.tokens"), 2 * total)
    with path.with_name(f"{path.name}.index").open("wb") as file:
        for begin in range(0, sentences + 1, 1 << 20):
            file.write((np.arange(begin, min(begin + (1 << 20), sentences + 1), dtype="<i8") * LENGTH).tobytes())
    write_metadata(path.with_name(f"{path.name}.json"), {**description, "tokens": total, "sentences": sentences})
