"""Instructions of hot operations, counted by valgrind: they are the same on a busy machine, where times mean little.

    python -m benchmarks.instructions --json FILE          all parts, some minutes each
    python -m benchmarks.instructions --only step --quick  one part, at toy sizes: shows that it works

Parts: operations (the convolutions against other formulations), mechanisms (a training pass of each, and of the
original's formulation where there is one), short (a training pass of a small model's mixers on short sequences, of
which most is fixed cost), step (one token of a stream). Python's own instructions are part of a count, for they are
part of the time. One thread; the code is that of a processor with AVX2, which valgrind knows, also where the machine
has more. An instruction is no measure of time by itself: one may wait for memory, and another do eight products.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import originals
from benchmarks.convolutions import Case
from benchmarks.convolutions import Sizes as ConvolutionSizes
from benchmarks.formulations import band, unfold
from benchmarks.measured import QUICK, Effort, Result, machine_facts
from benchmarks.runner import measure, read_report, show, write_page
from benchmarks.side_by_side import DIM, stream_work
from benchmarks.whole import CAUSAL, Sizes, Subject, built, subjects, tokens
from subquad.compare.measure.bench import MixerPasses
from subquad.compare.measure.timing import Work
from subquad.mixers import available, build, mixer_class

MARKER = "make bench-instructions"
TITLES = {
    "instructions-operations": "instructions of the next best formulation over ours, forward and backward",
    "instructions-mechanisms": "instructions over those of softmax attention, forward and backward",
    "instructions-short": "instructions over those of softmax attention, forward and backward",
    "instructions-step": "instructions over those of softmax attention, a token of 8 streams",
}
WARM_UP = 2
PROCESSOR = {  # what valgrind can run, and what is compiled before for it
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx,+avx2,+bmi,+bmi2,+cx16,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sse3,+sse4.1,+sse4.2,+ssse3",
    "OMP_NUM_THREADS": "1",
}
Counts = Mapping[str, int]

# ---------------------------------------------------------------------- what is counted


def operations(quick: bool) -> Iterator[tuple[str, Work]]:
    sizes = ConvolutionSizes(1, 16, 2) if quick else ConvolutionSizes(1, 256, 4)
    for operation in ("lightconv", "dynamicconv"):
        for time in (16,) if quick else (128, 512):
            case = Case(sizes, operation, time, 3 if quick else 31)
            for name, way in (("ours", case.ours), ("unfold", unfold), ("band", band)):
                yield f"{operation} {time} {name}", case.both(way, case.x, case.upstream)


def mechanisms(quick: bool) -> Iterator[tuple[str, Work]]:
    sizes, time = (Sizes(16, 2), 128) if quick else (Sizes(256, 4), 512)
    x = tokens(1, time, sizes.dim)
    cases = {case.subject: case for case in originals.CASES}
    for subject in subjects():
        mixer = built(subject, sizes, time)
        yield f"{subject.label} {time} ours", MixerPasses(mixer, x).training
        if subject.label in cases:
            original: Any = originals.Original(mixer, cases[subject.label].formulation)
            yield f"{subject.label} {time} original", MixerPasses(original, x).training


def short(quick: bool) -> Iterator[tuple[str, Work]]:
    """Default options at the width of small models."""
    sizes, time = Sizes(16 if quick else 64, 4), 32
    for subject in subjects():
        plain = Subject(subject.label, subject.mixer, CAUSAL if subject.causal else {})
        yield (
            f"{subject.label} {time} ours",
            MixerPasses(built(plain, sizes, time), tokens(16, time, sizes.dim)).training,
        )


def step(quick: bool) -> Iterator[tuple[str, Work]]:
    for name in available():
        if mixer_class(name).capabilities.causal:
            yield f"{name} 65 ours", stream_work(build(name, dim=DIM, heads=2 if quick else 4, causal=True).eval())


PARTS: dict[str, Callable[[bool], Iterator[tuple[str, Work]]]] = {
    "operations": operations,
    "mechanisms": mechanisms,
    "short": short,
    "step": step,
}

# ---------------------------------------------------------------------- counting


def serve(part: str, quick: bool) -> None:
    """Runs the work of a part once for valgrind, which writes a file of counts each time, and prints its names."""
    torch.set_num_threads(1)
    for name, work in PARTS[part](quick):
        for _ in range(WARM_UP):
            work()
        torch._C._valgrind_toggle()
        work()
        torch._C._valgrind_toggle_and_dump_stats()
        print(name, flush=True)


def count(part: str, quick: bool) -> Counts:
    """Instructions of everything in a part, by name."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.instructions", "--serve", part, *(["--quick"] if quick else [])]
        environment = os.environ | PROCESSOR
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)  # compiles what is not yet
        file = Path(folder) / "counts"
        valgrind = ["valgrind", "-q", "--tool=callgrind", "--collect-atstart=no", f"--callgrind-out-file={file}"]
        done = subprocess.run([*valgrind, *command], env=environment, check=True, stdout=subprocess.PIPE, text=True)
        names = done.stdout.splitlines()
        return {name: total(Path(f"{file}.{number}")) for number, name in enumerate(names, 1)}


def total(file: Path) -> int:
    (line,) = [line for line in file.read_text().splitlines() if line.startswith("totals:")]
    return int(line.split()[1])


# ---------------------------------------------------------------------- tables


def results(part: str, counts: Counts) -> Iterator[Result]:
    cases: dict[tuple[str, str], dict[str, int]] = {}
    for name, found in counts.items():
        what, time, who = name.rsplit(" ", 2)
        cases.setdefault((what, time), {})[who] = found
    for (what, time), sides in cases.items():
        numbers = {f"{who} millions": number / 1e6 for who, number in sides.items()}
        if part == "operations":
            labels = {"operation": what, "T": int(time)}
            score = min(number for who, number in sides.items() if who != "ours") / sides["ours"]
        else:
            labels = {"mechanism": what, "T": int(time)}
            baseline = "causal softmax" if what.startswith("causal ") else "softmax"
            score = sides["ours"] / cases[baseline, time]["ours"]
        yield Result(f"instructions-{part}", labels, numbers, score)


def _results_of(part: str, counts: Counts, effort: Effort) -> Iterator[Result]:  # noqa: ARG001
    return results(part, counts)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.serve:
        serve(options.serve, options.quick)
        return 0
    if shutil.which("valgrind") is None or not torch._C._valgrind_supported_platform():
        raise SystemExit("Counting instructions needs valgrind, on Linux with an x86 processor: install its package.")
    facts = machine_facts(False, options.quick) | {"threads": 1, "processor": "as valgrind shows it, with AVX2"}
    report = read_report(options.json)
    for name in options.only or PARTS:
        found = count(name, options.quick)
        effort = QUICK if options.quick else Effort()
        lines = list(measure(name, partial(_results_of, name, found), effort))
        show(name, lines, TITLES)
        report["parts"][name] = {"environment": facts, "results": lines}
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    write_page(options, report, TITLES, MARKER)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    description, _, details = (__doc__ or "").partition("\n\n")
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, epilog=details, formatter_class=form)
    parser.add_argument("--quick", action="store_true", help="toy sizes; the figures mean nothing")
    parser.add_argument("--only", choices=list(PARTS), action="append", help="count this part; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results; other parts in FILE are kept")
    parser.add_argument("--write-docs", type=Path, metavar="FILE", help="fill the generated parts of a page")
    parser.add_argument("--serve", choices=list(PARTS), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
