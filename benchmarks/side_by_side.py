"""Speed of every mechanism in two source trees, measured in turns: is a change slower than what it replaces?

    git worktree add ../before COMMIT
    python -m benchmarks.side_by_side ../before .                          every mechanism, all kinds of work
    python -m benchmarks.side_by_side ../before . --mixers eva,local --lengths 512 --only train

Each tree runs in a process of its own, which stays alive, and the first one in a second process as a control. They take
turns: one works while the others wait, so that what else the machine does meets all alike. A ratio is the median, over
all turns, of the second tree's time divided by the first one's in the same turn; above 1 the second tree is slower. The
control's ratio is made in the same way and should be 1: a difference no larger than the control's says nothing.

Work: forward (evaluation, no gradient), train (training mode, forward and backward), padded (train, with rows of
different lengths), step (one token of a stream, 8 rows, after 64 others).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

DIM, HEADS, TOKENS = 256, 4, 4096
"""Width of the model, and tokens of a batch: shorter sequences come in larger batches."""
WORK = ("forward", "train", "padded", "step")
NO_PAGE_FAULTS = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Keeps freed memory, as `subquad.allocator` does: to ask the system for it again takes long, never equally long."""
LEAST_SECONDS = 0.02
"""A turn repeats its work until it takes this long."""


@dataclass(frozen=True)
class Case:
    name: str
    causal: bool
    work: str
    length: int

    def __str__(self) -> str:
        where = "" if self.work == "step" else f" at {self.length}"
        return f"{self.name}{' causal' if self.causal else ''}, {self.work}{where}"


# ---------------------------------------------------------------------- the process of one tree


def serve() -> None:
    """Reads cases, one line of JSON each, and answers with the seconds that one turn of it took, or a reason."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    prepared: dict[str, tuple[Callable[[], Any], int]] = {}
    for line in sys.stdin:
        try:
            if line not in prepared:
                prepared.clear()  # one case after the other: what an earlier one holds would only cost memory
                prepared[line] = prepare(Case(**json.loads(line)))
            work, repeats = prepared[line]
            start = time.perf_counter()
            for _ in range(repeats):
                work()
            answer: Any = (time.perf_counter() - start) / repeats
        except ValueError as refusal:  # a form that the mechanism does not have
            answer = str(refusal)
        print(json.dumps(answer), flush=True)


def prepare(case: Case) -> tuple[Callable[[], Any], int]:
    """The work of a case, and how often a turn repeats it."""
    import torch

    from subquad.mixers import build

    torch.manual_seed(0)
    mixer: Any = build(case.name, dim=DIM, heads=HEADS, causal=case.causal).train(case.work in ("train", "padded"))
    work = stream_work(mixer) if case.work == "step" else sequence_work(mixer, case)
    for _ in range(2):
        work()
    start = time.perf_counter()
    work()
    return work, max(1, round(LEAST_SECONDS / (time.perf_counter() - start)))


def sequence_work(mixer: Any, case: Case) -> Callable[[], Any]:
    import torch

    batch = max(1, TOKENS // case.length)
    x, padding = torch.randn(batch, case.length, DIM), None
    if case.work == "padded":
        padding = torch.arange(case.length) >= torch.linspace(case.length / 2, case.length, batch).long()[:, None]

    def forward() -> None:
        with torch.no_grad():
            mixer(x)

    def train() -> None:
        mixer.zero_grad(set_to_none=True)
        mixer(x, padding=padding).y.square().mean().backward()

    return forward if case.work == "forward" else train


def stream_work(mixer: Any) -> Callable[[], Any]:
    import torch

    rows = 8
    with torch.inference_mode():
        begin = torch.randn(rows, 64, DIM)
        state = mixer.init_state(rows, begin.device, begin.dtype)
        for first in range(0, 64, 16):
            state = mixer(begin[:, first : first + 16], state=state).state
    token = torch.randn(rows, 1, DIM)

    def step() -> None:
        with torch.inference_mode():
            mixer(token, state=state)

    return step


# ---------------------------------------------------------------------- both trees


class Tree:
    """A source tree and its process."""

    def __init__(self, folder: Path, threads: int) -> None:
        own = {"PYTHONPATH": str((folder / "src").resolve()), "OMP_NUM_THREADS": str(threads)}
        environment = os.environ | NO_PAGE_FAULTS | own
        command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, cwd=folder, **pipes)

    def turn(self, case: Case) -> float | str:
        """Seconds, or why there are none."""
        asked, answers = _open(self.process.stdin), _open(self.process.stdout)
        asked.write(json.dumps(asdict(case)) + "\n")
        asked.flush()
        line = answers.readline()
        if not line:
            raise RuntimeError(f"the process ended at: {case}")
        return json.loads(line)

    def close(self) -> None:
        _open(self.process.stdin).close()
        self.process.wait()


def _open(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


class Measured(NamedTuple):
    """Median seconds of both trees, and the median ratios of the second and of the control to the first."""

    before: float
    after: float
    ratio: float
    control: float


def compare(trees: Sequence[Tree], case: Case, repeats: int) -> Measured | str:
    """What trees (before, after, control) need for a case; or why one of them refuses."""
    turns: list[list[float]] = []
    for number in range(repeats + 1):
        order = [(number + shift) % len(trees) for shift in range(len(trees))]  # who comes later finds it warmer
        seconds = {which: trees[which].turn(case) for which in order}
        for refusal in seconds.values():
            if isinstance(refusal, str):
                return refusal
        if number:  # the first turn warms up
            turns.append([float(seconds[which]) for which in range(len(trees))])
    before, after, _ = (statistics.median(column) for column in zip(*turns, strict=True))
    ratio, control = (statistics.median(turn[which] / turn[0] for turn in turns) for which in (1, 2))
    return Measured(before, after, ratio, control)


def cases(options: argparse.Namespace, names: Sequence[str]) -> list[Case]:
    found = []
    for name in names:
        for causal in (False, True):
            for work in options.only:
                lengths = (0,) if work == "step" else options.lengths
                found += [Case(name, causal, work, length) for length in lengths if causal or work != "step"]
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    description, _, details = (__doc__ or "").partition("\n\n")
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, epilog=details, formatter_class=form)
    parser.add_argument("before", type=Path, help="the tree to compare with")
    parser.add_argument("after", type=Path, help="the tree to judge")
    parser.add_argument("--mixers", type=lambda text: text.split(","), help="some mechanisms; default: all")
    parser.add_argument("--lengths", type=_numbers, default=(128, 1024, 4096), help="default: 128,1024,4096")
    parser.add_argument("--only", type=lambda text: text.split(","), default=WORK, help=f"some of {', '.join(WORK)}")
    parser.add_argument("--threads", type=int, default=1, help="of each process; default: 1")
    parser.add_argument("--repeats", type=int, default=15, help="turns of each tree; default: 15")
    parser.add_argument("--limit", type=float, default=1.03, help="ratios above it are marked; default: 1.03")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    options = parser.parse_args(arguments)
    unknown = set(options.only) - set(WORK)
    if unknown:
        parser.error(f"--only takes {', '.join(WORK)}, not {', '.join(sorted(unknown))}")
    for folder in (options.before, options.after):
        if not (folder / "src" / "subquad").is_dir():
            parser.error(f"{folder} is no source tree: it has no src/subquad")
    return options


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    from subquad.mixers import available

    trees = [Tree(folder, options.threads) for folder in (options.before, options.after, options.before)]
    lines, above = [], 0
    print(f"{'':44} {'before':>10} {'after':>10} {'ratio':>7} {'control':>7}")
    try:
        for case in cases(options, options.mixers or available()):
            measured = compare(trees, case, options.repeats)
            if isinstance(measured, str):
                continue
            mark = "  slower" if measured.ratio > options.limit else ""
            above += bool(mark)
            seconds = f"{1000 * measured.before:8.3f}ms {1000 * measured.after:8.3f}ms"
            print(f"{case!s:44} {seconds} {measured.ratio:7.3f} {measured.control:7.3f}{mark}", flush=True)
            lines.append({**asdict(case), **measured._asdict()})
    finally:
        for tree in trees:
            tree.close()
    if options.json is not None:
        options.json.write_text(json.dumps({"threads": options.threads, "results": lines}, indent=1) + "\n")
    print(f"{len(lines)} measured, {above} slower by more than {options.limit - 1:.0%}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        sys.exit(main())
