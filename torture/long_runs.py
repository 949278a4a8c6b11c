"""Many updates, many lines, many trials: memory stays where it is, and a failure stays one failure.

And the same bits, whatever the number of threads that make batches.
"""

import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from benchmarks.measured import MEGABYTE, Result
from subquad.compare.report.result import read_result
from subquad.data.builtin import load
from subquad.decode.translate import WINDOW
from subquad.train.checkpoint import checkpoints
from torture.cases import Case, difference, last_line
from torture.kills import outcome
from torture.processes import Child, descendants, done, memory_of

TITLES = {
    "memory": "megabytes by which the median of the last quarter of the time exceeds that of the second",
    "trials": "trials that a failure of others took along",
    "determinism": "numbers of threads that gave other bits",
}
WORKERS = (1, 2, 5)
ROOT = Path(__file__).parent.parent
LEAST_SAMPLES = 16


def growth(table: str, labels: dict[str, object], sizes: list[int], most: float, numbers: dict[str, float]) -> Result:
    """sizes: memory at equal distances in time."""
    quarter = len(sizes) // 4
    if len(sizes) < LEAST_SAMPLES:
        return Result(table, labels, reason=f"over after {len(sizes)} looks at its memory")
    second, last = (statistics.median(sizes[part * quarter : (part + 1) * quarter]) / MEGABYTE for part in (1, 3))
    return Result(table, labels, {**numbers, "second MB": second, "last MB": last}, last - second, ("at most", most))


def training_memory(folder: Path, names: list[str], updates: int, most: float) -> Iterator[Result]:
    """From the first checkpoint on."""
    for name in names:
        every = max(1, updates // 40)
        case = Case(folder / "memory", name, updates=updates, validate_every=every, log_every=every)
        run = case.folder / f"{name}-long"
        child = case.start(run)
        sizes = list(memory_of(child, 0.05, lambda run=run: bool(checkpoints(run / "checkpoints"))))
        ended = child.wait()
        labels: dict[str, object] = {"what": f"training on {name}"}
        if ended.code:
            yield Result("memory", labels, reason=last_line(ended))
        else:
            yield growth("memory", labels, sizes, most, {"updates": updates})


def decoding_memory(folder: Path, lines: int, most: float) -> Iterator[Result]:
    """Lines of one to forty words, which an untrained model translates into whatever it likes; from the second window
    of them on."""
    case = Case(folder / "decoding", "phrases")
    case.train_reference()
    words = " ".join(source for source, _ in load("phrases", train=120, valid=20, test=20).train).split()
    draw, given, out = random.Random(0), case.folder / "input.txt", case.folder / "output.txt"
    with given.open("w") as file:
        for _ in range(lines):
            file.write(" ".join(draw.choices(words, k=draw.randint(1, 40))) + "\n")
    options = ["--beam", "2", "--max-len-a", "0", "--max-len-b", "10"]
    labels: dict[str, object] = {"what": "translating lines"}

    def measure() -> Result:
        out.unlink(missing_ok=True)
        child = Child(["translate", str(case.reference), *options], stdin=given, stdout=out)
        sizes = list(memory_of(child, 0.02, lambda: out.exists() and line_count(out) >= WINDOW))
        ended = child.wait()
        written = line_count(out)
        if ended.code or written != lines:
            return Result("memory", labels, reason=f"{written} of {lines} lines; {last_line(ended)}")
        return growth("memory", labels, sizes, most, {"lines": lines})

    first = measure()
    # A leak grows each time; an allocator that has not settled yet on a busy machine does so once in a while.
    yield measure() if first.verdict == "MISSED" else first


def line_count(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def trials(folder: Path, seeds: int, kills: int, seed: int) -> Iterator[Result]:
    """Five mechanisms and several seeds. One mechanism cannot read the images; some trainings are killed."""
    out, draw = folder / "trials" / "out", random.Random(seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    mixers = ["--mixers", "softmax,eva,local,performer,linformer", "--set", "linformer.max_length=4"]
    recipe = ["digits", "train.updates=4", "schedule.warmup_updates=1"]
    words = ["compare", *recipe, *mixers, "--seeds", str(seeds), "--lengths", "", "--no-floors"]
    words += ["--out", str(out)]
    child, killed = Child(words), 0
    while not child.is_over():
        time.sleep(draw.uniform(0.2, 2.0))
        for pid in descendants(child.pid) if killed < kills and not child.is_over() else ():
            if draw.random() < 0.3:
                with suppress(ProcessLookupError):  # it has just ended by itself
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
    child.wait()
    first = read_result(out / "result.json").trials
    failed = [trial for trial in first if trial.status == "failed" and trial.mechanism != "linformer"]
    wrong = [str(trial.reason) for trial in failed if "SIGKILL" not in str(trial.reason)]
    if killed < kills:
        wrong.append(f"only {killed} trainings could be killed")
    Child([*words, "--retry"]).wait(3600)
    second = read_result(out / "result.json").trials
    wrong += [str(c.reason) for c in second if (c.status == "done") == (c.mechanism == "linformer")]
    numbers = {"trials": len(first), "killed": killed, "failed by a kill": len(failed)}
    numbers |= {"refused by their mechanism": seeds, "done at last": sum(trial.status == "done" for trial in second)}
    yield outcome("trials", {"comparison": "digits, five mechanisms"}, numbers, wrong)


def determinism(folder: Path, names: list[str]) -> Iterator[Result]:
    for name in names:
        case = Case(folder / "determinism", name)
        case.train_reference()
        wrong = []
        for threads in WORKERS:
            run = case.folder / f"{name}-{threads}"
            ended = done(case.words(run, f"train.data_workers={threads}"))
            problem = last_line(ended) if ended.code else difference(run, case.reference)
            if problem is not None:
                wrong.append(f"{threads} threads: {problem}")
        yield outcome("determinism", {"set": name, "threads": ", ".join(map(str, (0, *WORKERS)))}, {}, wrong)
