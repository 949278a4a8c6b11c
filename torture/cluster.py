"""What clusters do: SIGTERM with a deadline, processes of a comparison that disappear, memory while saving."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

from benchmarks.measured import Result
from subquad.compare.report.result import read_result
from subquad.train.checkpoint import checkpoints, read_state
from subquad.train.metrics_log import read_metrics
from torture.cases import Case, difference
from torture.kills import ROOT, finish, kill_all, outcome, torchrun
from torture.processes import Child, descendants
from torture.scale import RECIPE, WAYS

TITLES = {
    "terminated": "runs that lost an update, did not end in time, or did not end with the bits of the undisturbed run",
    "kill-compare": "trials that a killed process took along",
    "saving": "megabytes that a process needed to save a checkpoint, beyond what it held before",
}
DEADLINE = 30.0
"""Seconds between SIGTERM and SIGKILL, as Slurm and Kubernetes have it by default."""


def terminated(folder: Path, count: int, seed: int) -> Iterator[Result]:
    """SIGTERM to torchrun, which sends it to both processes, or to one of them; then the same command goes on."""
    draw = random.Random(seed)
    case = Case(folder / "terminated", "phrases", updates=400, validate_every=100, log_every=1)
    words = ["-m", "subquad.cli.main", *case.words(case.reference)]
    finish(torchrun(words))
    for whom in ("torchrun", "one of two processes"):
        wrong, slowest = [], 0.0
        for number in range(count):
            run = case.folder / f"{whom.split()[0]}-{number}"
            process = torchrun([*words[:-1], str(run)])
            seen = _wait_for_update(process, run, draw.randint(1, 300))
            begun = time.monotonic()
            target = process.pid if whom == "torchrun" else draw.choice(_workers(process.pid))
            os.kill(target, signal.SIGTERM)
            try:
                process.communicate(timeout=DEADLINE)
            except subprocess.TimeoutExpired:
                kill_all(process)
                wrong.append(f"it did not end within {DEADLINE:g} seconds")
            slowest = max(slowest, time.monotonic() - begun)
            kept = read_state(checkpoints(run / "checkpoints")[0]).update
            if kept < seen:
                wrong.append(f"update {seen} was made, and {kept} is kept")
            finish(torchrun([*words[:-1], str(run)]))
            if (problem := difference(run, case.reference)) is not None:
                wrong.append(problem)
            shutil.rmtree(run)
        numbers = {"signals": count, "seconds to the end, at most": slowest}
        yield outcome("terminated", {"SIGTERM to": whom}, numbers, wrong)


def _wait_for_update(process: "subprocess.Popen[str]", run: Path, update: int) -> int:
    """The update that the log of a run shows, from `update` on."""
    path = run / "metrics.jsonl"
    while True:
        records = read_metrics(path, "train") if path.exists() else []
        if records and records[-1]["update"] >= update:
            return records[-1]["update"]
        if process.poll() is not None:
            raise RuntimeError(f"torchrun ended: {process.communicate()[0]}")
        time.sleep(0.01)


def _workers(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def comparisons(folder: Path, seed: int) -> Iterator[Result]:
    """Two processes work on a comparison in one folder, and one is killed with the training that it has begun."""
    out = folder / "comparison"
    recipe = ["digits", "train.updates=30", "schedule.warmup_updates=1"]
    words = ["compare", *recipe, "--mixers", "softmax,local", "--seeds", "3", "--lengths", "", "--no-floors"]
    words += ["--out", str(out)]
    first, second = Child(words), Child(words)
    begun = time.monotonic()
    while not list(out.glob("trials/*/metrics.jsonl")) and not first.is_over():
        time.sleep(0.05)
    time.sleep(random.Random(seed).uniform(0, 2))
    for pid in (*descendants(first.pid), first.pid):
        os.kill(pid, signal.SIGKILL)
    first.wait()
    ended = second.wait(1800)
    trials = read_result(out / "result.json").trials if (out / "result.json").exists() else []
    wrong = [str(trial.reason) for trial in trials if trial.status != "done"]
    if ended.code or len(trials) != 6:
        wrong.append(f"code {ended.code}: {ended.last}")
    numbers = {"trials": len(trials), "killed": 1, "seconds": time.monotonic() - begun}
    yield outcome("kill-compare", {"comparison": "digits, two processes in one folder"}, numbers, wrong)


def saving_memory(folder: Path, dim: int) -> Iterator[Result]:
    """A checkpoint of a language model of some width with Adam's two moments, by two processes."""
    decoder = {**RECIPE["model"]["decoder"], "ffn_dim": 4 * dim}
    recipe = {**RECIPE, "model": {**RECIPE["model"], "dim": dim, "decoder": decoder}}
    recipe["data"] = {**RECIPE["data"], "splits": {name: str(folder / name) for name in ("train", "valid")}}
    recipe["train"] = {"updates": 1, "budget": {"max_tokens": 256}, "accumulate": 2}
    for name in ("train", "valid"):
        (folder / name).write_text("so many words of one line\n" * 100)
    (folder / "saving.yaml").write_text(yaml.safe_dump(recipe))
    for way, change in WAYS.items():
        run = folder / f"saving-{way}"
        run.mkdir()
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        words = ["-m", "torture.saving", str(run), "train", str(folder / "saving.yaml"), change, "--out", str(run)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        ended = subprocess.run([*start, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode:
            yield Result("saving", {"way": way}, reason=ended.stderr.strip().splitlines()[-1])
            continue
        size = sum(path.stat().st_size for path in checkpoints(run / "checkpoints")[0].iterdir()) / 1e6
        for rank in range(2):
            found = json.loads((run / f"{rank}.json").read_text())
            numbers = {"checkpoint MB": size, "before MB": found["before"]}
            yield Result("saving", {"way": way, "process": rank}, numbers, found["most"] - found["before"])
        shutil.rmtree(run)
