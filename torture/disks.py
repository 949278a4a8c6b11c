"""Disks that are full or read-only, files that vanish, signals, a second trainer, a clock that is set back.

Each ends with a line that says what is wrong, and nothing is lost: once the disturbance is over, the same command gives
the bits of the undisturbed run.
"""

import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.measured import Result
from subquad.data.builtin import load
from subquad.processes import INTERRUPTED, TERMINATED
from subquad.train.checkpoint import checkpoints
from torture.cases import Case, difference, last_line
from torture.kills import outcome, spread
from torture.processes import Child, Failpoint, apart, done, own_mounts

TITLES = {"disturbed": "disturbances without a clear message, or after which something was lost"}
DISK = 48 << 20
FREE = (0, 4096, 16_384, 40_960, 65_536, 131_072, 262_144)
"""Bytes that are left: what they are enough for differs."""
DAY = 86_400.0


KINDS: dict[str, Callable[[Case, list[int]], Result]] = {
    "ENOSPC": lambda case, points: failing(case, "ENOSPC", points),
    "EIO": lambda case, points: failing(case, "EIO", points),
    "EROFS": lambda case, points: failing(case, "EROFS", points),
    "SIGINT": lambda case, points: signalled(case, "SIGINT", points),
    "SIGTERM": lambda case, points: signalled(case, "SIGTERM", points),
    "limited": lambda case, points: limited_files(case, len(points)),
    "full": lambda case, points: mounted(case, "a full disk", lambda disk: full_disk(case, disk, len(points))),
    "commands": lambda case, points: mounted(
        case,
        "a full disk for evaluate, export and data prepare",
        lambda disk: full_disk_of_commands(case, disk, len(points)),
    ),
    "read-only": lambda case, _: mounted(case, "a read-only folder", lambda disk: read_only(case, disk)),
    "vanished": lambda case, _: vanished(case),
    "second": lambda case, _: second_trainer(case),
    "clock": lambda case, _: clock_set_back(case),
}


def disturbances(folder: Path, kinds: tuple[str, ...], most: int) -> Iterator[Result]:
    """most: places in a run at which each of the kinds is tried."""
    case = Case(folder / "disks", "phrases")
    case.train_reference()
    points = spread(case.operations(), most)
    for kind in kinds:
        yield KINDS[kind](case, points)


def failing(case: Case, error: str, points: list[int]) -> Result:
    return at_operations(case, error, points, f"an operation on a checkpoint fails ({error})", 1)


def signalled(case: Case, name: str, points: list[int]) -> Result:
    code = {"SIGINT": INTERRUPTED, "SIGTERM": TERMINATED}[name]
    return at_operations(case, name, points, f"{name} while a checkpoint is saved", code)


def line(what: str, tried: int, wrong: list[str]) -> Result:
    return outcome("disturbed", {"disturbance": what}, {"tried": tried}, wrong)


def at_operations(case: Case, act: str, points: list[int], what: str, code: int) -> Result:
    """What is only cleaning up may fail without an end: then the run goes on."""
    wrong = []
    for number in points:
        run = case.folder / f"{act}-{number}"
        ended = case.start(run, Failpoint(act, number)).wait()
        if not ended.is_clear or ended.code not in (0, code):
            wrong.append(f"operation {number}: {last_line(ended)}")
        elif (problem := case.finish(run)) is not None:
            wrong.append(f"operation {number}: {problem}")
        shutil.rmtree(run, ignore_errors=True)
    return line(what, len(points), wrong)


def limited_files(case: Case, most: int) -> Result:
    """No file may grow beyond a limit, whoever writes it."""
    wrong, limits = [], [1000 * 2**step for step in range(min(most, 8))]
    for limit in limits:
        run = case.folder / f"limit-{limit}"

        def before(limit: int = limit) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

        ended = done(case.words(run), before)
        if not ended.is_clear:
            wrong.append(f"{limit} bytes: {last_line(ended)}")
        elif (problem := case.finish(run)) is not None:
            wrong.append(f"{limit} bytes: {problem}")
        shutil.rmtree(run, ignore_errors=True)
    return line("files may not grow beyond a limit", len(limits), wrong)


# ---------------------------------------------------------------------- disks of their own


def mounted(case: Case, what: str, work: Callable[[Path], list[str]]) -> Result:
    """work(disk) on a disk of its own: its first answer is how many things it tried, the others what went wrong."""

    def inside() -> list[str]:
        disk = case.folder / "disk"
        disk.mkdir(exist_ok=True)
        try:
            own_mounts()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(disk)], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            return [f"not tried: {error}"]
        return work(disk)

    tried, *wrong = apart(inside)
    if tried.startswith("not tried"):
        return Result("disturbed", {"disturbance": what}, reason=tried)
    return line(what, int(tried), wrong)


def full_disk(case: Case, disk: Path, most: int) -> list[str]:
    """The disk fills up before a run, and in the middle of one."""
    wrong, amounts = [], FREE[:most]
    for free in amounts:
        for begun in (False, True):
            run, filler = disk / f"run-{free}-{begun}", disk / "filler"
            if begun:
                case.start(run, Failpoint("kill", case_middle(case))).wait()
            status = os.statvfs(disk)
            filler.write_bytes(bytes(max(0, status.f_bavail * status.f_frsize - free)))
            ended = done(case.words(run))
            filler.unlink()
            where = f"{free} bytes left {'in' if begun else 'before'} a run"
            if not ended.is_clear or (ended.code and "No space left" not in ended.last):
                wrong.append(f"{where}: {last_line(ended)}")
            elif (problem := case.finish(run)) is not None:
                wrong.append(f"{where}: {problem}")
            shutil.rmtree(run, ignore_errors=True)
    return [str(2 * len(amounts)), *wrong]


def full_disk_of_commands(case: Case, disk: Path, most: int) -> list[str]:
    """The disk fills up while results are written: nothing is left under its name, and the same command works later."""
    text = case.folder / "lines.txt"
    text.write_text("".join(f"line {number * 7919 % 1000} of a text\n" for number in range(20_000)))
    run, out, wrong, amounts = str(case.reference), disk / "out", list[str](), FREE[:most]
    commands = [
        ["evaluate", run, "decode.beam=1", "decode.max_len_b=20", "--out", str(out / "result.json")],
        ["export", run, "--to", "torch", "--out", str(out / "exported")],
        ["export", run, "--to", "huggingface", "--out", str(out / "exported")],
        [
            "data",
            "prepare",
            str(out / "data"),
            "--samples",
            "text",
            "--train",
            str(text),
            "--tokenizer",
            "bytes",
        ],
    ]
    for words in commands:
        for free in amounts:
            out.mkdir()
            status, filler = os.statvfs(disk), disk / "filler"
            filler.write_bytes(bytes(max(0, status.f_bavail * status.f_frsize - free)))
            ended = done(words)
            left = [path.name for path in out.rglob("*") if path.is_file()]
            filler.unlink()
            where = f"{' '.join(words[:4])} with {free} bytes left"
            if ended.code and (not ended.is_clear or f"{out}" not in ended.last or "No space left" not in ended.last):
                wrong.append(f"{where}: {last_line(ended)}")
            elif ended.code and set(left) > {"kind.json"}:
                wrong.append(f"{where}: left {left}")
            elif ended.code and (again := done(words)).code:
                wrong.append(f"{where}, again: {last_line(again)}")
            shutil.rmtree(out)
    return [str(len(commands) * len(amounts)), *wrong]


def case_middle(case: Case) -> int:
    """An operation by which a run has a checkpoint and is not over."""
    return int((case.folder / f"{case.name}-count.txt").read_text()) // 2


def read_only(case: Case, disk: Path) -> list[str]:
    wrong = []
    for begun in (False, True):
        run = disk / f"run-{begun}"
        if begun:
            case.start(run, Failpoint("kill", case_middle(case))).wait()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        ended = done(case.words(run))
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        if ended.code != 1 or not ended.is_clear or "Read-only file system" not in ended.last:
            wrong.append(last_line(ended))
        elif (problem := case.finish(run)) is not None:
            wrong.append(problem)
    return ["2", *wrong]


# ---------------------------------------------------------------------- files, processes, clocks


def vanished(case: Case) -> Result:
    """A file of the data, before a run goes on; and each file of the tokens that were made of it."""
    found = load("phrases", train=120, valid=20, test=20)
    files: dict[str, list[str]] = {}
    for split in ("train", "valid"):
        for column, side in enumerate(("source", "target")):
            path = case.folder / f"{split}.{side}"
            path.write_text("".join(f"{pair[column]}\n" for pair in found.split(split)))
            files[split] = [*files.get(split, []), str(path)]
    changes = ["data.embedded=null", "data.options={}", *(f"data.splits.{k}=[{','.join(v)}]" for k, v in files.items())]
    whole, run, wrong = case.folder / "files-reference", case.folder / "files", list[str]()
    ended = done(case.words(whole, *changes))
    if ended.code:
        return line("a file of the data is gone", 0, [last_line(ended)])
    case_run = case.words(run, *changes)
    Child(case_run, Failpoint("kill", case_middle(case)).install).wait()
    lost = Path(files["train"][1])
    kept = lost.rename(lost.with_suffix(".kept"))
    ended = done(case_run)
    if ended.code != 1 or not ended.is_clear or str(lost) not in ended.last:
        wrong.append(last_line(ended))
    kept.rename(lost)
    tokens = sorted((run / "data").glob("*.*"))
    for path in tokens:
        path.unlink() if path.is_file() else None
    ended = done(case_run)
    problem = difference(run, whole) if ended.code == 0 else last_line(ended)
    return line("files of the data are gone", 2, [*wrong, *([problem] if problem else [])])


def second_trainer(case: Case) -> Result:
    """A second process in a run directory is refused, and the first one does not notice."""
    run = case.folder / "shared"
    first = case.start(run, Failpoint("stop", case_middle(case)))
    while not checkpoints(run / "checkpoints") or _state(first.pid) != "T":
        if first.is_over():
            return line("a second trainer in the run directory", 1, [last_line(first.wait())])
        time.sleep(0.01)
    second = done(case.words(run))
    first.kill(signal.SIGCONT)
    ended, wrong = first.wait(), []
    if second.code != 1 or not second.is_clear or f"process {first.pid} trains in {run}" not in second.last:
        wrong.append(last_line(second))
    if ended.code or (problem := difference(run, case.reference)) is not None:
        wrong.append(last_line(ended) if ended.code else str(problem))
    return line("a second trainer in the run directory", 1, wrong)


def _state(pid: int) -> str:
    """T: stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def clock_set_back(case: Case) -> Result:
    """Killed, and resumed on a day before its files were written."""
    run = case.folder / "yesterday"
    case.start(run, Failpoint("kill", case_middle(case))).wait()
    for path in run.rglob("*"):
        status = path.stat()
        os.utime(path, (status.st_atime + DAY, status.st_mtime + DAY))
    real = time.time

    def before() -> None:
        time.time = lambda: real() - DAY

    ended = done(case.words(run), before)
    problem = last_line(ended) if ended.code else difference(run, case.reference)
    return line("a clock that is set back by a day", 1, [problem] if problem else [])
