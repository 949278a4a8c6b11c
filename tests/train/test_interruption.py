"""Ctrl-C and SIGTERM in a training: the update is finished and saved, and going on gives the undisturbed run."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import subquad.api
from subquad.cli.main import run as command
from subquad.processes import InterruptionError, Terminated, interruptible, stop_requests
from subquad.train import distributed
from subquad.train.checkpoint import checkpoints, load_checkpoint, read_state
from subquad.train.metrics_log import read_metrics
from subquad.train.trainer import Trainer
from tests import signals
from tests.train.test_distributed import RECIPE
from tests.train.test_trainer import assert_equal, recipe, trainer

pytestmark = pytest.mark.usefixtures("preloaded_programs")

ROOT = Path(__file__).parents[2]
RAISED = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated}
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def in_update(given: Trainer, number: int, send: Callable[[], None]) -> None:
    """Sends a signal in the middle of an update."""
    step = given.updater.step

    def disturbed(*arguments: Any, **options: Any) -> Any:
        if given.update == number - 1:
            send()
        return step(*arguments, **options)

    given.updater.step = disturbed  # type: ignore[method-assign]


def in_validation(given: Trainer, number: int, send: Callable[[], None]) -> None:
    """Sends a signal while the update of a number is validated."""
    validate = given._validate

    def disturbed() -> None:
        if given.update == number:
            send()
        validate()

    given._validate = disturbed  # type: ignore[method-assign]


MOMENTS = {
    "before the first validation": (in_update, 2, {"validate_every": 4}),
    "between validations": (in_update, 6, {"validate_every": 4}),
    "in an update that is validated": (in_update, 8, {"validate_every": 4}),
    "in a validation": (in_validation, 8, {"validate_every": 4}),
    "in the last validation": (in_validation, 11, {"validate_every": 4}),
    "at the end of an epoch": (in_update, 5, {}),
    "in the middle of an epoch": (in_update, 7, {}),
}


@pytest.mark.parametrize("number", RAISED, ids=lambda number: number.name)
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupted_training_loses_nothing(
    moment: str, number: signal.Signals, tmp_path: Path, monkeypatch
) -> None:
    """Dropout, moving average and patience on: the same bits, and the same validations."""
    monkeypatch.setattr(distributed, "STOP_EVERY", 1)
    disturb, update, changes = MOMENTS[moment]
    given = recipe("image-classification", updates=11, patience=5, **changes)
    trainer(given, tmp_path / "whole").fit()
    disturbed = trainer(given, tmp_path / "parts")
    handlers = {one: signal.getsignal(one) for one in RAISED}
    disturb(disturbed, update, lambda: signal.raise_signal(number))
    with pytest.raises(RAISED[number], match=f"update {update} is kept, and the same command goes on") as caught:
        disturbed.fit()
    assert type(caught.value) is RAISED[number]
    assert {one: signal.getsignal(one) for one in RAISED} == handlers
    assert read_state(checkpoints(tmp_path / "parts" / "checkpoints")[0]).update == update
    trainer(given, tmp_path / "parts").fit()
    first, second = (load_checkpoint(checkpoints(tmp_path / name / "checkpoints")[0]) for name in ("whole", "parts"))
    for part in ("model", "optimizer", "rng", "ema"):
        assert_equal(getattr(first, part), getattr(second, part))
    for state in (first.state, second.state):
        del state.extra["minutes"]
    assert first.state == second.state
    logs = [read_metrics(tmp_path / name / "metrics.jsonl", "valid") for name in ("whole", "parts")]
    assert [{**one, "time": 0} for one in logs[0]] == [{**one, "time": 0} for one in logs[1]]


def test_what_was_not_validated_is_not_the_best(tmp_path: Path) -> None:
    """A checkpoint of an interruption has no metrics, and those of the last validation stay those of the run."""
    given = recipe("image-classification", updates=9, validate_every=4)
    disturbed = trainer(given, tmp_path)
    in_update(disturbed, 6, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        disturbed.fit()
    saved = [read_state(path) for path in checkpoints(tmp_path / "checkpoints")]
    assert [(state.update, bool(state.metrics)) for state in saved] == [(6, False), (4, True)]


def test_a_second_interruption_ends_it_at_once(tmp_path: Path) -> None:
    disturbed = trainer(recipe("image-classification", updates=9), tmp_path)

    def send() -> None:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):  # the request to end may arrive twice
            signal.raise_signal(number)

    in_update(disturbed, 3, send)
    with pytest.raises(KeyboardInterrupt) as caught:
        disturbed.fit()
    assert str(caught.value) == ""
    assert not checkpoints(tmp_path / "checkpoints")


def test_signals_are_left_to_those_who_handle_them() -> None:
    def own(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, own)
    try:
        with stop_requests() as request:
            assert signal.getsignal(signal.SIGTERM) is own
            signal.raise_signal(signal.SIGTERM)
            assert not request
            signal.raise_signal(signal.SIGINT)
            assert request
    finally:
        signal.signal(signal.SIGTERM, before)
    with interruptible(), stop_requests() as request:
        signal.raise_signal(signal.SIGTERM)
        assert request
    with pytest.raises(InterruptionError) as caught, interruptible():
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.exit_code == 143


def test_other_threads_train_without_handlers(tmp_path: Path) -> None:
    done = []

    def train() -> None:
        handlers = {number: signal.getsignal(number) for number in RAISED}
        disturbed = trainer(recipe("image-classification", updates=2), tmp_path)
        in_update(
            disturbed, 1, lambda: done.append({number: signal.getsignal(number) for number in RAISED} == handlers)
        )
        disturbed.fit()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert done == [True]


def test_a_notebook_saves_and_sees_the_interruption(tmp_path: Path, monkeypatch) -> None:
    step = Trainer._step

    def disturbed(self: Trainer, *given: Any) -> None:
        step(self, *given)
        if self.update == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Trainer, "_step", disturbed)
    given = recipe("image-classification", updates=6).model_dump(mode="json")
    with pytest.raises(KeyboardInterrupt, match="update 3 is kept"):
        subquad.train(given, out=tmp_path, quiet=True)
    assert subquad.train(given, out=tmp_path, quiet=True).updates == 6


# ---------------------------------------------------------------------- programs


def start(*words: str, **options: Any) -> "subprocess.Popen[str]":
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(
        [sys.executable, "-m", *words], env=environment, cwd=ROOT, preexec_fn=signals.interruptible, **pipes, **options
    )  # type: ignore[call-overload]


def wait_for_log(process: "subprocess.Popen[str]", run: Path, lines: int) -> None:
    path, end = run / "metrics.jsonl", time.monotonic() + 120
    while not path.exists() or path.read_text().count("\n") < lines:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.02)


def wait_for_end(process: "subprocess.Popen[str]") -> str:
    """Returns what a program and its children have written. If they do not end, they are aborted and say where."""
    try:
        return process.communicate(timeout=120)[0]
    except subprocess.TimeoutExpired:
        for pid in (*children(process.pid), process.pid):
            os.kill(pid, signal.SIGABRT)
        pytest.fail(process.communicate()[0])


@pytest.mark.parametrize("number", RAISED, ids=lambda number: number.name)
def test_the_command_says_what_is_kept(number: signal.Signals, tmp_path: Path) -> None:
    """No validation ever comes: all that is kept is what the interruption saves."""
    path, run = tmp_path / "recipe.yaml", tmp_path / "run"
    given = recipe("image-classification", updates=10**6, validate_every=10**6, log_every=1)
    path.write_text(yaml.safe_dump(given.model_dump(mode="json")))
    process = start("subquad", "train", str(path), "--out", str(run))
    wait_for_log(process, run, 3)
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == CODES[number], said
    kept = read_state(checkpoints(run / "checkpoints")[0]).update
    last = f"subquad: interrupted: update {kept:,} is kept, and the same command goes on from it"
    assert said.splitlines()[-1] == last
    assert kept >= 3
    process = start("subquad", "train", str(path), f"train.updates={kept + 1}", "--out", str(run))
    said, _ = process.communicate(timeout=60)
    assert f"resumed at update {kept:,}" in said
    assert process.returncode == 0, said


@pytest.mark.parametrize(
    ("mode", "whom"), [("replicated", "torchrun"), pytest.param("sharded", "worker", marks=pytest.mark.nightly)]
)
def test_processes_agree_on_the_update_at_which_they_stop(mode: str, whom: str, tmp_path: Path) -> None:
    """SIGTERM to torchrun, which sends it to all, or to one of the processes."""
    path, run = tmp_path / "recipe.yaml", tmp_path / "run"
    train = {**RECIPE["train"], "updates": 10**6, "validate_every": 10**6, "log_every": 1}
    path.write_text(yaml.safe_dump({**RECIPE, "train": {**train, "sharded": mode == "sharded"}}))
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")
    command = ("-m", "subquad.cli.main", "train", str(path), "--out", str(run))
    process = start(*torchrun, *command)
    wait_for_log(process, run, 3)
    if whom == "torchrun":
        process.send_signal(signal.SIGTERM)
    else:
        os.kill(children(process.pid)[1], signal.SIGTERM)
    said = wait_for_end(process)
    kept = read_state(checkpoints(run / "checkpoints")[0]).update
    assert set(re.findall(r"update ([\d,]+) is kept", said)) == {f"{kept:,}"}, said
    undisturbed = start(*torchrun, *command[:-1], str(tmp_path / "whole"), f"train.updates={kept + 3}")
    said = wait_for_end(undisturbed)
    assert undisturbed.returncode == 0, said
    resumed = start(*torchrun, *command, f"train.updates={kept + 3}")
    said = wait_for_end(resumed)
    assert resumed.returncode == 0, said
    first, second = (load_checkpoint(checkpoints(one / "checkpoints")[0]) for one in (tmp_path / "whole", run))
    for part in ("model", "optimizer", "rng", "ema"):
        assert_equal(getattr(first, part), getattr(second, part))


def test_a_signal_while_the_end_is_shown_is_an_interruption(tmp_path: Path, monkeypatch, capsys) -> None:
    """What is shown is read from checkpoints, which takes a moment."""

    class Run:
        folder, updates = tmp_path, 3

        @property
        def metrics(self) -> dict[str, float]:
            signal.raise_signal(signal.SIGTERM)
            return {}

    monkeypatch.setattr(subquad.api, "train", lambda *_, **__: Run())
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert command(["train", "digits"]) == 143
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "subquad: interrupted\n"


WAITING = """
import ctypes, signal
from subquad.processes import exit_on_sigterm, stop_requests
with exit_on_sigterm("all is kept"):
    with stop_requests() as request:
        signal.raise_signal(signal.SIGTERM)
        assert request
    print("ready", flush=True)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second call never comes back to Python, as while waiting for other processes
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


def test_a_process_that_waits_for_others_ends_and_says_so() -> None:
    """Before the updates of several processes begin, and after them."""
    process = subprocess.Popen([sys.executable, "-c", WAITING], stdout=-1, stderr=-1, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert said == "subquad: interrupted: all is kept\n"
    assert process.returncode == 143


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
