"""Pieces of work in this process, in processes of submitit, and in workers of a real Ray on this machine."""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from subquad.cli.main import run as command
from subquad.compare.executors import EXECUTORS, build_executor
from subquad.compare.executors.base import Executor, Piece
from subquad.compare.executors.cluster import Cluster, Job, Outcome
from subquad.compare.executors.ray import LOCAL_SETTINGS, LOOPBACK, SETTINGS
from subquad.compare.locks import lock_path, try_lock
from tests.compare.executors.pieces import Toy

RECIPE = "digits"


def do(executor: Executor, out: Path, pieces: Sequence[Piece], lines: list[str] | None = None) -> list[str]:
    """The names of the pieces that were done, in this order."""
    done: list[str] = []
    executor.run(out, pieces, lambda piece: done.append(piece.name), ([] if lines is None else lines).append)
    return done


# ---------------------------------------------------------------------- in this process


def test_one_after_the_other_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    lines: list[str] = []
    assert do(build_executor("local"), tmp_path, [Toy(1), Toy(2)], lines) == ["toy 1", "toy 2"]
    assert lines == ["toy 1: at work", "toy 2: at work"]
    assert do(build_executor("local"), tmp_path, [Toy(2), Toy(3)]) == ["toy 3"], "what is done is not done again"
    assert Toy(2).tries(tmp_path) == 1


class Inline(Cluster[int]):
    """An engine of a few lines: a job runs when somebody waits for it. lost: how many workers are lost first."""

    name = "inline"

    def __init__(self, options: Cluster.Options, lost: int = 0) -> None:
        super().__init__(options)
        self.jobs: dict[int, Job] = {}
        self.lost, self.cancelled, self.open = lost, list[int](), False

    def start(self, out: Path) -> None:
        self.open = True

    def submit(self, job: Job) -> int:
        self.jobs[len(self.jobs)] = job
        return len(self.jobs) - 1

    def wait(self, handles: Sequence[int], seconds: float) -> Sequence[int]:
        return handles[:1]

    def outcome(self, handle: int) -> Outcome:
        if self.lost:
            self.lost -= 1
            return Outcome(lost="it was switched off")
        return self.jobs[handle]()

    def cancel(self, handles: Sequence[int]) -> None:
        self.cancelled += handles

    def stop(self) -> None:
        self.open = False


@pytest.fixture
def inline_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of Inline set variables of this process."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SUBQUAD_PLUGINS", "")


@pytest.mark.usefixtures("inline_environment")
def test_an_engine_is_one_class_and_a_lost_worker_is_replaced_so_often(tmp_path: Path) -> None:
    engine = Inline(Cluster.Options(retries=2), lost=2)
    with pytest.warns(UserWarning, match=r"its worker was lost .it was switched off.; another goes on") as warned:
        assert do(engine, tmp_path, [Toy(1), Toy(2)]) == ["toy 1", "toy 2"]
    assert len(warned) == 2
    assert not engine.open
    engine = Inline(Cluster.Options(retries=1), lost=2)
    with (
        pytest.warns(UserWarning, match="another goes on"),
        pytest.raises(ValueError, match=r"toy 3: 2 workers were lost .it was switched off.; the same command goes on"),
    ):
        do(engine, tmp_path, [Toy(3)])
    assert not engine.open


@pytest.mark.usefixtures("inline_environment")
def test_an_interruption_cancels_what_runs_and_keeps_what_is_done(tmp_path: Path) -> None:
    engine = Inline(Cluster.Options())

    def interrupt(piece: Piece) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.run(tmp_path, [Toy(1), Toy(2), Toy(3)], interrupt, lambda _: None)
    assert engine.cancelled == [1, 2]
    assert not engine.open
    assert do(engine, tmp_path, [Toy(1), Toy(2), Toy(3)]) == ["toy 2", "toy 3"]


# ---------------------------------------------------------------------- real engines


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A Ray of two workers on this machine, which listens to nobody else."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**SETTINGS, **LOOPBACK}.items():
            patch.setenv(name, value)
        module = pytest.importorskip("ray", reason="the extra cluster is not installed")
        module.init(num_cpus=2, log_to_driver=False, logging_level="error", **LOCAL_SETTINGS)
        yield module
        module.shutdown()


@pytest.fixture(params=["ray", "slurm"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Executor:
    if request.param == "ray":
        request.getfixturevalue("ray")
        return build_executor("ray")
    submitit = pytest.importorskip("submitit", reason="the extra cluster is not installed")
    monkeypatch.setattr(submitit.Job, "_results_timeout_s", 0.5)  # the files of this machine are there at once
    return build_executor("slurm", {"cluster": "local"})


@pytest.mark.parametrize("engine", ["ray", pytest.param("slurm", marks=pytest.mark.nightly)], indirect=True)
def test_a_killed_worker_is_replaced_and_a_mistake_lets_the_others_end(engine: Executor, tmp_path: Path) -> None:
    pieces = [Toy(1), Toy(2, "lost"), Toy(3, "wrong")]
    done: list[str] = []
    with (
        pytest.warns(UserWarning, match="toy 2: its worker was lost"),
        pytest.raises(ValueError, match=r"^toy 3: its file is damaged$"),
    ):
        engine.run(tmp_path, pieces, lambda piece: done.append(piece.name), lambda _: None)
    assert sorted(done) == ["toy 1", "toy 2"]
    assert [piece.tries(tmp_path) for piece in pieces] == [1, 2, 1]
    assert (tmp_path / "1.done").read_text() == "1", "as many threads as CPUs"
    assert f"process {os.getpid()}" not in (tmp_path / "1.log").read_text()
    assert list((tmp_path / "locks").iterdir()) == []


def test_running_work_is_interrupted(ray: Any, tmp_path: Path) -> None:
    piece = Toy(1, "slow")

    def log(line: str) -> None:
        if line.startswith("toy 1: process"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_executor("ray", {"memory": "0.1"}).run(tmp_path, [piece], lambda _: None, log)
    assert piece.is_open(tmp_path)
    with try_lock(lock_path(tmp_path, piece.name)) as acquired:
        assert acquired, "whoever held it has ended"
    assert ray.is_initialized(), "whose Ray it is ends it"


def test_what_this_machine_has_no_room_for_is_refused(ray: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a training asks for 3 CPUs, and Ray has 2 here"):
        do(build_executor("ray", {"cpus": 3}), tmp_path, [Toy(1)])
    assert ray.is_initialized()


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--executor", "slrum"], "no executor is called 'slrum'; choose local, ray, slurm; did you mean 'slurm'?"),
        (["--executor-options", "cpus=2"], "the executor local has no option 'cpus'"),
        (["--executor", "ray", "--executor-options", "cpu=2"], "has no option 'cpu'; did you mean 'cpus'?"),
        (["--executor", "ray", "--executor-options", "cpus=0"], "the executor ray: cpus: Input should be greater than"),
        (["--executor", "slurm", "--executor-options", "cpus"], "write NAME=VALUE, such as cpus=2,gpus=1"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["compare", RECIPE, "--mixers", "eva", "--out", str(tmp_path / "out"), *words]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "package"), [("ray", "ray"), ("slurm", "submitit")])
def test_a_missing_package_is_named(name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"needs the package {package}.*pip install 'subquad\[cluster\]'"):
        do(build_executor(name), tmp_path, [Toy(1)])


def test_slurm_is_where_its_programs_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit", reason="the extra cluster is not installed")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="there is no sbatch here"):
        do(build_executor("slurm"), tmp_path, [Toy(1)])


def test_every_executor_says_what_its_options_mean() -> None:
    for name, kind in EXECUTORS.items():
        assert kind.name == name
        for field in kind.Options.model_fields.values():
            assert str(field.description).endswith(".")
