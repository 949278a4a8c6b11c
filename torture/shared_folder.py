"""Runs and comparisons in a folder that is slow, or that shows what was there a while ago."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measured import Result
from subquad.compare.report.result import read_result
from subquad.train.checkpoint import checkpoints
from torture.cases import Case, difference, last_line
from torture.kills import finish, kill_all, outcome, torchrun
from torture.processes import Child, Failpoint, done
from torture.stale import View

TITLES = {"shared": "runs that lost something, or did not end with the bits or scores of the undisturbed one"}
OLD = 15.0
"""Seconds for which a machine goes on seeing what was there."""
SLOW = 0.02
"""Seconds that an operation takes."""


def shared_folders(folder: Path, count: int, comparison: bool) -> Iterator[Result]:
    case = Case(folder / "shared", "phrases")
    case.train_reference()
    two = Case(folder / "shared-two", "phrases", updates=40, validate_every=5)
    finish(torchrun(["-m", "subquad.cli.main", *two.words(two.reference)]))
    for what, tried, wrong in (
        ("every operation takes 20 ms, and a process is killed", count, _slow(case, count)),
        (f"an old list of checkpoints, for {OLD:g} s, to the process that goes on", count, _old_list(case, count)),
        (f"an old list of checkpoints, for {OLD:g} s, to the second of two processes", 1, _old_list_of_two(two)),
        (f"no prepared data, for {OLD:g} s, to the second of two processes", 1, _no_data_of_two(two)),
    ):
        yield outcome("shared", {"folder": what}, {"tried": tried}, wrong)
    if comparison:
        yield outcome(
            "shared",
            {"folder": "old lists and 20 ms, to the second of two comparisons"},
            {"tried": 1},
            _compared(folder),
        )


def _slow(case: Case, count: int) -> list[str]:
    wrong, operations = [], case.operations()
    for number in range(count):
        run = case.folder / f"slow-{number}"
        point = Failpoint("kill", (number + 1) * operations // (count + 1))

        def before(point: Failpoint = point, run: Path = run) -> None:
            View(str(run), SLOW).install()
            point.install()

        Child(case.words(run), before).wait()
        ended = done(case.words(run), View(str(run), SLOW).install)
        problem = last_line(ended) if ended.code else difference(run, case.reference)
        wrong += [] if problem is None else [problem]
        shutil.rmtree(run)
    return wrong


def _old_list(case: Case, count: int) -> list[str]:
    """Killed after its second, third, ... checkpoint, and gone on with by a machine that has seen the first alone."""
    wrong, operations = [], case.operations()
    for number in range(count):
        run = case.folder / f"old-{number}"
        case.start(run, Failpoint("kill", operations // 3)).wait()
        view = View.remember(run, OLD)
        case.start(run, Failpoint("kill", operations // 3 + (number + 1) * operations // (4 * count))).wait()
        ended = done(case.words(run), view.install)
        problem = last_line(ended) if ended.code else difference(run, case.reference)
        wrong += [] if problem is None else [problem]
        shutil.rmtree(run)
    return wrong


def _two_with(case: Case, run: Path, view: View) -> list[str]:
    """Two processes, of which the second has another view."""
    file = case.folder / f"{run.name}.json"
    view.write(file)
    try:
        finish(torchrun(["-m", "torture.stale", "1", str(file), *case.words(run)]))
    except RuntimeError as error:
        return [str(error)]
    problem = difference(run, case.reference)
    return [] if problem is None else [problem]


def _old_list_of_two(case: Case) -> list[str]:
    """Both go on from the newest checkpoint, though the second sees an older one."""
    run = case.folder / "old"
    view = None
    process = torchrun(["-m", "subquad.cli.main", *case.words(run)])
    while process.poll() is None and len(found := checkpoints(run / "checkpoints")) < 2:
        if len(found) == 1 and view is None:
            view = View.remember(run, OLD)
        time.sleep(0.002)
    kill_all(process)
    if view is None:
        return [f"no moment with one checkpoint: {found}"]
    return _two_with(case, run, view)


def _no_data_of_two(case: Case) -> list[str]:
    run = case.folder / "new"
    return _two_with(case, run, View.remember(run, OLD))


def _compared(folder: Path) -> list[str]:
    """Two processes share a comparison; the second sees what others have done late. Scores are those of one process."""
    recipe = ["digits", "train.updates=10", "schedule.warmup_updates=1"]
    words = ["compare", *recipe, "--mixers", "softmax,local", "--seeds", "2", "--lengths", "", "--out"]
    alone, out = folder / "alone", folder / "both"
    if (ended := done([*words, str(alone)])).code:
        return [last_line(ended)]
    first = Child([*words, str(out)])
    while not (out / "comparison.json").exists() and not first.is_over():
        time.sleep(0.02)
    second = Child([*words, str(out)], View.remember(out, OLD, SLOW).install)
    wrong = [last_line(ended) for ended in (first.wait(1800), second.wait(1800)) if ended.code]
    scores = []
    for place in (alone, out):
        trials = read_result(place / "result.json").trials
        scores.append(sorted((one.mechanism, one.seed, json.dumps(one.model_dump()["scores"])) for one in trials))
    return wrong if scores[0] == scores[1] else [*wrong, "the scores are others"]
