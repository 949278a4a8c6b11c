"""Ill-treats subquad and reports what was lost: python -m torture

    python -m torture                                        everything, as tables; takes long
    python -m torture --only kills --quick                   one part, a few cases: shows that it works

Parts: kills (kill -9 while saving and at random moments), results (while average and export write), two (of two
processes), nodes (of two machines), worlds (another number of processes goes on), shared (folders that are slow, or
show what was there a while ago), cluster (SIGTERM with a deadline, comparisons that lose a process, memory while
saving), damage (files that disks changed), disks (full, read-only, signals, a second trainer, clocks), long (memory
over many updates and lines), streaming (100,000 tokens, one by one), trials (a large comparison with failures),
determinism, fuzz (the fuzz tests with more examples), hostile (folders and checkpoints of fairseq's), scale (processes
that share updates, files of 10^9 tokens; needs an idle machine). The exit code is 1 when anything was lost.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: children are forked, and a pool of threads cannot be

import argparse
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measured import Result
from benchmarks.page import described, filled, missed
from subquad.environment import environment
from torture import cluster, damage, disks, fuzz, hostile, kills, long_runs, nodes, scale, shared_folder, streaming
from torture.cases import SMALL

TITLES = {
    **kills.TITLES,
    **nodes.TITLES,
    **shared_folder.TITLES,
    **cluster.TITLES,
    **damage.TITLES,
    **disks.TITLES,
    **long_runs.TITLES,
    **streaming.TITLES,
    **fuzz.TITLES,
    **hostile.TITLES,
    **scale.TITLES,
}
COMMAND = "make torture"


@dataclass(frozen=True)
class Amounts:
    """How much of everything."""

    sets: tuple[str, ...] = tuple(SMALL)
    saving: int = 10_000  # every operation
    kills: int = 200
    results: int = 12  # kills of each command
    kills_of_two: int = 20
    two_with_dropout: bool = True
    nodes: int = 3  # of each kind
    worlds: tuple[tuple[int, int], ...] = ((1, 2), (2, 1))
    shared: int = 4
    terminated: int = 5
    saving_dim: int = 1024
    comparisons: bool = True  # waits for the lock of a killed process, which takes a minute and a half
    damages: int = 1000
    disturbances: tuple[str, ...] = tuple(disks.KINDS)
    places: int = 30
    watched: tuple[str, ...] = ("phrases", "digits")
    updates: int = 20_000
    lines: int = 100_000
    steps: int = 100_000
    growth: float = 4.0  # MB
    seeds: int = 10
    trials_killed: int = 8
    fuzz: int = 10  # times the examples of the normal suite
    hostile: int = 40  # of each kind
    far: scale.Amounts = scale.FULL


QUICK = Amounts(
    sets=("phrases",),
    saving=2,
    kills=3,
    results=1,
    kills_of_two=1,
    two_with_dropout=False,
    nodes=1,
    worlds=((1, 2),),
    shared=1,
    terminated=1,
    saving_dim=64,
    comparisons=False,
    damages=30,
    disturbances=("SIGTERM", "full", "second"),
    places=1,
    watched=("digits",),
    updates=200,
    lines=4500,  # the first 2,048 are those of a window, after which memory is watched
    steps=300,
    growth=8.0,
    seeds=1,
    trials_killed=1,
    fuzz=1,
    hostile=1,
    far=scale.QUICK,
)
Part = Callable[[Path, Amounts, int], Iterator[Result]]


def all_kills(folder: Path, amounts: Amounts, seed: int) -> Iterator[Result]:
    yield from kills.saving(folder, ["phrases"], amounts.saving)
    yield from kills.random_moments(folder, list(amounts.sets), amounts.kills, seed)


def of_two(folder: Path, amounts: Amounts, seed: int) -> Iterator[Result]:
    yield from kills.two_processes(folder, amounts.kills_of_two, seed, amounts.two_with_dropout)


def of_worlds(folder: Path, amounts: Amounts, seed: int) -> Iterator[Result]:  # noqa: ARG001
    yield from nodes.other_worlds(folder, amounts.worlds, amounts.two_with_dropout)


def of_clusters(folder: Path, amounts: Amounts, seed: int) -> Iterator[Result]:
    yield from cluster.terminated(folder, amounts.terminated, seed)
    yield from cluster.saving_memory(folder, amounts.saving_dim)
    if amounts.comparisons:
        yield from cluster.comparisons(folder, seed)


def long(folder: Path, amounts: Amounts, seed: int) -> Iterator[Result]:  # noqa: ARG001
    yield from long_runs.training_memory(folder, list(amounts.watched), amounts.updates, amounts.growth)
    yield from long_runs.decoding_memory(folder, amounts.lines, amounts.growth)


def of_scale(folder: Path, amounts: Amounts, seed: int) -> Iterator[Result]:
    yield from scale.processes(folder, amounts.far)
    yield from scale.tokens(folder, amounts.far, seed)


PARTS: dict[str, Part] = {
    "kills": all_kills,
    "results": lambda folder, amounts, _: kills.results(folder, amounts.results),
    "two": of_two,
    "nodes": lambda folder, amounts, seed: nodes.lost_nodes(folder, amounts.nodes, seed),
    "worlds": of_worlds,
    "shared": lambda folder, amounts, _: shared_folder.shared_folders(folder, amounts.shared, amounts.comparisons),
    "cluster": of_clusters,
    "damage": lambda folder, amounts, seed: damage.damages(folder, amounts.damages, seed),
    "disks": lambda folder, amounts, _: disks.disturbances(folder, amounts.disturbances, amounts.places),
    "long": long,
    "streaming": lambda _, amounts, __: streaming.drift(amounts.steps),
    "trials": lambda folder, amounts, seed: long_runs.trials(folder, amounts.seeds, amounts.trials_killed, seed),
    "determinism": lambda folder, amounts, _: long_runs.determinism(folder, list(amounts.sets)),
    "fuzz": lambda folder, amounts, _: fuzz.fuzzing(folder, amounts.fuzz),
    "hostile": lambda folder, amounts, seed: hostile.hostile(folder, amounts.hostile, seed),
    "scale": of_scale,
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(1)
    report: dict[str, Any] = {"parts": {}}
    if options.json is not None and options.json.exists():  # parts that are not tried now keep their results
        report = json.loads(options.json.read_text())
    lines = []
    # in their own order: a part that computes in this process would leave its forks without compiled kernels
    for name in (name for name in PARTS if name in (options.only or PARTS)):
        own = []
        with tempfile.TemporaryDirectory(prefix="torture-", ignore_cleanup_errors=True) as folder:
            for result in tried(name, Path(folder).resolve(), options):
                own.append(result.as_json())
                print(f"[{name}] {described(own[-1])}", file=sys.stderr, flush=True)
        facts = {**environment(torch.device("cpu")), "seed": options.seed}
        report["parts"][name] = {"environment": facts, "results": own}
        lines += own
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    for page in options.write_docs:
        page.write_text(filled(page.read_text(), report, TITLES, COMMAND))
    return int(bool(missed(lines)))


def tried(name: str, folder: Path, options: argparse.Namespace) -> Iterator[Result]:
    """A part's results; where it cannot go on, that is one, and the other parts are tried all the same."""
    try:
        yield from PARTS[name](folder, options.amounts, options.seed)
    except Exception as error:
        traceback.print_exc()
        yield Result(name, {"part": name}, reason=f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    text, _, details = (__doc__ or "").partition("\n\n")
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m torture", description=text, epilog=details, formatter_class=form)
    add = parser.add_argument
    add("--quick", dest="amounts", action="store_const", const=QUICK, default=Amounts(), help="a few cases of each")
    add("--only", choices=list(PARTS), action="append", help="this part; may be repeated")
    add("--seed", type=int, default=1, help="of what is killed and damaged where (default 1)")
    add("--kills", type=int, help="kills at random moments (default 200)")
    add("--json", type=Path, metavar="FILE", help="write all results; other parts in FILE are kept")
    add("--write-docs", type=Path, metavar="FILE", action="append", default=[], help="fill a page; may be repeated")
    options = parser.parse_args(arguments)
    if options.kills is not None:
        options.amounts = Amounts(**{**vars(options.amounts), "kills": options.kills})
    return options


if __name__ == "__main__":
    sys.exit(main())
