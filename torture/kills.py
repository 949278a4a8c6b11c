"""kill -9: at every step of saving and of what else is written, at random moments, of one or all of two processes."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from benchmarks.measured import Result
from subquad.train.checkpoint import checkpoints
from torture.cases import PARTS, Case, difference
from torture.processes import Child, Failpoint, descendants, done

KILLS_PER_RUN = 4
ROOT = Path(__file__).parent.parent
TITLES = {
    "kill-saving": "runs that did not go on, or did not end with the bits of the undisturbed run",
    "kill-random": "runs that did not go on, or did not end with the bits of the undisturbed run",
    "kill-results": "kills after which the same command did not give the same result, or left something beside it",
    "kill-two": "runs that did not go on, or did not end with the bits of the undisturbed run",
}


def outcome(table: str, labels: dict[str, object], numbers: Mapping[str, float], wrong: list[str]) -> Result:
    """A line of a table: nothing may be wrong. The first that is, is shown."""
    shown = {**labels, "what went wrong": " ".join(wrong[0].split())[-300:]} if wrong else labels
    return Result(table, shown, dict(numbers), float(len(wrong)), ("at most", 0.0))


def spread(total: int, most: int) -> list[int]:
    """`most` of the numbers 1 to `total`, evenly spread; all of them if there are no more."""
    count = min(total, most)
    if count == 1:
        return [(total + 1) // 2]
    return [1 + round(place * (total - 1) / (count - 1)) for place in range(count)]


def saving(folder: Path, names: list[str], most: int) -> Iterator[Result]:
    """Killed before every operation on the files of checkpoints, of which a run makes as many as it shows."""
    for name in names:
        case = Case(folder / "saving", name)
        case.train_reference()
        points, wrong = spread(case.operations(), most), list[str]()
        for number in points:
            run = case.folder / f"{name}-{number}"
            ended = case.start(run, Failpoint("kill", number)).wait()
            if ended.code != -signal.SIGKILL:
                wrong.append(f"operation {number}: {ended.last}")
            elif (problem := case.finish(run)) is not None:
                wrong.append(f"operation {number}: {problem}")
            shutil.rmtree(run)
        yield outcome("kill-saving", {"set": name}, {"kills": len(points)}, wrong)


def random_moments(folder: Path, names: list[str], kills: int, seed: int) -> Iterator[Result]:
    """Runs that are killed several times, anywhere between their start and their end."""
    draw = random.Random(seed)
    for place, name in enumerate(names):
        case = Case(folder / "random", name, updates=60, validate_every=15)
        begun = time.monotonic()
        case.train_reference()
        duration = time.monotonic() - begun
        own = (kills + len(names) - 1 - place) // len(names)
        left, wrong, done, early = own, list[str](), 0, 0
        while left > 0:
            run = case.folder / f"{name}-{done}"
            for _ in range(min(left, KILLS_PER_RUN)):
                child = case.start(run)
                time.sleep(draw.uniform(0, duration))
                child.kill()
                code = child.wait().code
                if code == 0:  # over before the kill: there is nothing left to kill in this run
                    early += 1
                    break
                if code != -signal.SIGKILL:
                    wrong.append(f"ended by itself with code {code}")
                left -= 1
            if (problem := case.finish(run)) is not None:
                wrong.append(problem)
            done += 1
            shutil.rmtree(run)
        numbers = {"kills": own, "too late, not counted": early, "runs": done}
        yield outcome("kill-random", {"set": name}, numbers, wrong)


def results(folder: Path, most: int) -> Iterator[Result]:
    """Killed before operations on the files that `average` and `export` write; then the same command is given again."""
    case = Case(folder / "results", "phrases")
    case.train_reference()
    for name, within in (("average", "average"), ("export", "exported")):
        wrong, contents, points = [], list[dict[str, bytes]](), [0]
        counted = case.folder / f"counted-{name[0]}.txt"  # not a file of the command's
        for place in range(most + 1):
            if place == 1:
                points += spread(int(counted.read_text()), most)
            if place == len(points):
                break
            run = case.folder / f"{name[0]}-{place:03d}"  # the card of an export has this name
            shutil.copytree(case.reference, run)
            words = [name, str(run), *(["--updates", "2"] if name == "average" else ["--to", "torch", "--out"])]
            words += [str(run / within)] if name == "export" else []
            act = Failpoint("kill" if place else "count", points[place], counted, within)
            ended = Child(words, act.install).wait()
            if place and ended.code != -signal.SIGKILL:
                wrong.append(f"operation {points[place]}: code {ended.code}: {ended.last}")
            again = done(words) if place else ended
            if again.code and "exists already" not in again.last:  # killed after all was written
                wrong.append(f"operation {points[place]}: {again.last}")
            contents.append(_content(run, "checkpoints/average" if name == "average" else within))
            if contents[0] != contents[-1]:
                wrong.append(f"operation {points[place]}: another result")
            shutil.rmtree(run)
        yield outcome("kill-results", {"command": name}, {"kills": len(points) - 1}, wrong)


def _content(run: Path, within: str) -> dict[str, bytes]:
    """Files by name, and what is hidden beside them, which must be nothing; archives of torch have their own dates."""
    found = {path.name: path.read_bytes() for path in (run / within).rglob("*") if path.is_file()}
    left = [path.name for path in (run / within).parent.glob(".*") if path.name != ".lock"]
    sizes = {name: bytes(len(data)) for name, data in found.items() if name.endswith((".pt2", ".md"))}
    return {**found, **sizes, "left": repr(left).encode()}


# ---------------------------------------------------------------------- two processes


def torchrun(words: list[str], *options: str) -> "subprocess.Popen[str]":
    """Two processes in a group of their own."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *options, *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(start, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True, **pipes)  # type: ignore[call-overload]


def two_processes(folder: Path, kills: int, seed: int, dropout: bool = True) -> Iterator[Result]:
    """All of them at once, and then one of two, which torchrun starts again.

    dropout off: two processes give the bits of one, which takes the place of an undisturbed run of two.
    """
    draw = random.Random(seed)
    case = Case(folder / "two", "phrases", updates=40, validate_every=5)
    off = ["model.encoder.dropout=0", "model.decoder.dropout=0", "model.source.dropout=0", "model.target.dropout=0"]
    changes = [] if dropout else off
    if dropout:
        finish(torchrun(["-m", "subquad.cli.main", *case.words(case.reference)]))
    else:
        case.train_reference(*changes)
    if kills > 1:
        yield _all_killed(case, kills // 2, draw)
    wrong = []
    count = kills - kills // 2
    for number in range(count):
        run, rank = case.folder / f"one-{number}", 1 - number % 2
        worker = ["-m", "torture.dying", str(rank), str(draw.uniform(0, 0.2)), *case.words(run, *changes)]
        said = finish(torchrun(worker, "--max-restarts=2"))
        # without dropout nothing is drawn, and each process has a generator of its own that nobody asks
        parts = PARTS if dropout else PARTS[:-1]
        told = "died here" in said and "defect of subquad" not in said  # the one that is left says what happened
        problem = difference(run, case.reference, parts) if told else said
        if problem is not None:
            wrong.append(f"rank {rank}: {problem}")
    yield outcome("kill-two", {"killed": "one of two, started again by torchrun"}, {"kills": count}, wrong)


def _all_killed(case: Case, kills: int, draw: random.Random) -> Result:
    wrong, left, done = [], kills, 0
    while left > 0:
        run = case.folder / f"all-{done}"
        for _ in range(min(left, KILLS_PER_RUN)):
            before = checkpoints(run / "checkpoints")[:1]
            process = torchrun(["-m", "subquad.cli.main", *case.words(run)])
            waits = draw.random() < 0.5  # starting takes longer than training: half of the kills wait for a checkpoint
            while waits and process.poll() is None and checkpoints(run / "checkpoints")[:1] == before:
                time.sleep(0.05)
            time.sleep(draw.uniform(0, 0.5 if waits else 12))
            if process.poll() is not None:
                process.communicate()
                break
            kill_all(process)
            left -= 1
        finish(torchrun(["-m", "subquad.cli.main", *case.words(run)]))
        if (problem := difference(run, case.reference)) is not None:
            wrong.append(problem)
        done += 1
    return outcome("kill-two", {"killed": "both at once"}, {"kills": kills, "runs": done}, wrong)


def kill_all(process: "subprocess.Popen[str]") -> None:
    """torchrun gives each worker a session of its own: a kill of its group would leave them training."""
    for pid in (*descendants(process.pid), process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def finish(process: "subprocess.Popen[str]") -> str:
    """What it said; a RuntimeError unless it ended well."""
    try:
        said, _ = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        kill_all(process)
        raise RuntimeError("torchrun did not end within 600 seconds") from None
    if process.returncode:
        raise RuntimeError(f"torchrun ended with code {process.returncode}: {said}")
    return said
