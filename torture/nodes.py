"""Two machines, of which one disappears, and runs that go on with another number of processes.

A machine is an agent of torchrun with one process, and all are on this one. They meet as machines do: at an address
that is known beforehand, where the agent that comes first serves the others.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from benchmarks.measured import Result
from subquad.train.checkpoint import checkpoints, load_checkpoint
from torture.cases import PARTS, Case, difference
from torture.kills import ROOT, finish, kill_all, outcome
from torture.processes import descendants, done

TITLES = {
    "kill-node": "runs that did not go on, or did not end with the bits of the undisturbed run",
    "world": "runs that did not go on as they should",
}
PATIENCE = 300.0
LENGTH = {"updates": 120, "validate_every": 10}
OFF = ["model.encoder.dropout=0", "model.decoder.dropout=0", "model.source.dropout=0", "model.target.dropout=0"]
REJOINING = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it torchrun does not tell an agent that joins later where the others meet."""


def torchrun(words: list[str], *options: str, **environment: str) -> "subprocess.Popen[str]":
    """An agent with its processes. Nobody reads what it says before its end, which a pipe could not hold."""
    start = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "subquad.cli.main", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    own = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.Popen(start, cwd=ROOT, env=own, start_new_session=True, **pipes)  # type: ignore[call-overload]


def standalone(words: list[str], count: int) -> "subprocess.Popen[str]":
    return torchrun(words, "--standalone", f"--nproc-per-node={count}")


class Nodes:
    """Two machines that train in one run directory."""

    def __init__(self, words: list[str], **environment: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.words, self.environment = words, environment
        self.agents = [self._start()]
        while not self._is_served():  # the first serves the other
            time.sleep(0.05)
        self.agents.append(self._start())

    def _start(self) -> "subprocess.Popen[str]":
        place = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}", "--local-addr=127.0.0.1"]
        return torchrun(self.words, "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", *place, **self.environment)

    def _is_served(self) -> bool:
        if self.agents[0].poll() is not None:
            raise RuntimeError(f"the first agent ended: {self.agents[0].communicate()[0]}")
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def wait_for_checkpoint(self, run: Path) -> None:
        end = time.monotonic() + PATIENCE
        while not checkpoints(run / "checkpoints"):
            for agent in self.agents:
                if agent.poll() is not None:
                    raise RuntimeError(f"an agent ended: {agent.communicate()[0]}")
            if time.monotonic() > end:
                self.kill()
                raise RuntimeError(f"there was no checkpoint within {PATIENCE:g} seconds")
            time.sleep(0.02)

    def kill_worker(self, number: int) -> None:
        os.kill(descendants(self.agents[number].pid)[0], signal.SIGKILL)

    def kill_node(self, number: int) -> None:
        kill_all(self.agents[number])

    def bring_back(self, number: int) -> None:
        self.agents[number] = self._start()

    def ends(self) -> list[int]:
        """Exit codes of both, which must come within some minutes."""
        codes = []
        try:
            for agent in self.agents:
                agent.communicate(timeout=PATIENCE)
                codes.append(agent.returncode)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeError(f"two machines did not end within {PATIENCE:g} seconds") from None
        return codes

    def kill(self) -> None:
        for agent in self.agents:
            kill_all(agent)


def lost_nodes(folder: Path, count: int, seed: int) -> Iterator[Result]:
    """A process, a machine that comes back, and the machine that serves the others: then all are started again."""
    draw = random.Random(seed)
    case = Case(folder / "nodes", "phrases", **LENGTH)
    finish(standalone(case.words(case.reference), 2))
    for what, act in (
        ("a process of one of two machines", _lose_process),
        ("a machine, which comes back", _lose_node),
        ("the machine at which they meet; both are started again", _lose_first),
    ):
        wrong = []
        for number in range(count):
            run = case.folder / f"{act.__name__}-{number}"
            try:
                problem = act(case, run, number, draw) or difference(run, case.reference)
            except RuntimeError as error:
                problem = str(error)
            wrong += [] if problem is None else [problem]
            shutil.rmtree(run, ignore_errors=True)
        yield outcome("kill-node", {"killed": what}, {"kills": count}, wrong)


def _lose_process(case: Case, run: Path, number: int, draw: random.Random) -> str | None:
    nodes = Nodes(case.words(run))
    nodes.wait_for_checkpoint(run)
    time.sleep(draw.uniform(0, 0.3))
    nodes.kill_worker(number % 2)
    codes = nodes.ends()
    return f"ended with codes {codes}" if any(codes) else None


def _lose_node(case: Case, run: Path, _: int, draw: random.Random) -> str | None:
    nodes = Nodes(case.words(run), **REJOINING)
    nodes.wait_for_checkpoint(run)
    time.sleep(draw.uniform(0, 0.3))
    nodes.kill_node(1)
    time.sleep(draw.uniform(0, 5))
    nodes.bring_back(1)
    codes = nodes.ends()
    return f"ended with codes {codes}" if any(codes) else None


def _lose_first(case: Case, run: Path, _: int, draw: random.Random) -> str | None:
    nodes = Nodes(case.words(run))
    nodes.wait_for_checkpoint(run)
    time.sleep(draw.uniform(0, 0.3))
    nodes.kill_node(0)
    if not nodes.ends()[1]:
        return "the other machine ended as if all were well"
    codes = Nodes(case.words(run)).ends()
    return f"ended with codes {codes}" if any(codes) else None


# ---------------------------------------------------------------------- other numbers of processes


def other_worlds(folder: Path, pairs: tuple[tuple[int, int], ...], dropout: bool) -> Iterator[Result]:
    """Killed after a checkpoint, and gone on with by more or fewer processes.

    Without dropout nothing is drawn, and the end has the bits of one process. With it, processes draw numbers of their
    own: the place in the data and the number of updates are the same, and the weights are others.
    """
    case = Case(folder / "worlds", "phrases", **LENGTH)
    case.train_reference(*OFF)
    for first, second in pairs:
        run = case.folder / f"{first}-{second}"
        problem = _go_on_with(case, run, first, second, OFF) or difference(run, case.reference, PARTS[:-1])
        yield outcome("world", {"processes": f"{first}, then {second}", "dropout": "off"}, {}, _listed(problem))
    if dropout:
        run, pair = case.folder / "drawn", (1, 2)
        problem = _go_on_with(case, run, *pair, []) or _other_place(run, case.reference)
        yield outcome("world", {"processes": "1, then 2", "dropout": "on: the same place"}, {}, _listed(problem))
    refused = standalone(case.words(case.folder / "refused", *OFF), 3)
    said = refused.communicate(timeout=PATIENCE)[0]
    told = refused.returncode != 0 and "train.accumulate is 2: 3 processes cannot share" in said
    labels: dict[str, object] = {"processes": "3, and 2 batches", "dropout": "refused"}
    yield outcome("world", labels, {}, [] if told else [said])


def _go_on_with(case: Case, run: Path, first: int, second: int, changes: list[str]) -> str | None:
    words = case.words(run, *changes)
    process = standalone(words, first)
    while not checkpoints(run / "checkpoints"):
        if process.poll() is not None:
            return f"ended: {process.communicate()[0]}"
        time.sleep(0.02)
    kill_all(process)
    if len(load_checkpoint(checkpoints(run / "checkpoints")[0]).model) == 0:
        return "the checkpoint is empty"
    if second == 1:
        ended = done(words)
        return f"code {ended.code}: {ended.last}" if ended.code else None
    try:
        finish(standalone(words, second))
    except RuntimeError as error:
        return str(error)
    return None


def _other_place(run: Path, reference: Path) -> str | None:
    ours, other = (load_checkpoint(checkpoints(one / "checkpoints")[0]).state for one in (run, reference))
    same = (ours.update, ours.epoch, ours.cursor) == (other.update, other.epoch, other.cursor)
    return None if same else f"it ended at {ours.update}, {ours.cursor} instead of {other.update}, {other.cursor}"


def _listed(problem: str | None) -> list[str]:
    return [] if problem is None else [problem]
