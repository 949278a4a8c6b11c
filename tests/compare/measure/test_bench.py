"""Measuring: clocks and memory against what is known, and no time without a passed check."""

import json
import platform
from pathlib import Path

import pytest
import torch
from torch import nn

from subquad.cli.main import run as run_command
from subquad.cli.options import parse_mixer_options
from subquad.compare.measure.bench import BenchPlan, bench_report, run_bench
from subquad.compare.measure.checks import LONGEST_CHECK
from subquad.compare.measure.timing import Seconds, interleaved_seconds, peak_bytes
from subquad.environment import cpu_model
from subquad.mixers import Capabilities, Mixer, State, available, mixer_class, registry
from subquad.mixers.state import advanced, fresh_lengths

CPU = torch.device("cpu")
MEGABYTE = 250_000  # float32 values
SCALARS = 100  # bytes that torch takes for the numbers in an expression
SMALL = ["--dim", "16", "--heads", "2", "--repeats", "1"]


# ---------------------------------------------------------------------- time


class FakeTime:
    """A clock that moves only when work is done or waited for."""

    def __init__(self) -> None:
        self.now, self.order = 0.0, ""

    def work(self, name: str, seconds: list[float]):
        durations = iter(seconds)

        def run() -> None:
            self.order += name
            self.now += next(durations)

        return run


def test_repeats_are_interleaved_and_the_warm_up_is_dropped() -> None:
    fake = FakeTime()
    rounds: list[int] = []
    work = {"a": fake.work("a", [9, 1, 2, 3]), "b": fake.work("b", [90, 10, 20, 30])}
    seconds = interleaved_seconds(work, [3], warmup=1, clock=lambda: fake.now, after_round=rounds.append)
    assert seconds == {"a": [1, 2, 3], "b": [10, 20, 30]}
    rounds_of = [fake.order[i : i + 2] for i in range(0, 8, 2)]
    assert set(rounds_of) == {"ab", "ba"}, "every round runs both, in another order"
    assert rounds == [0, 1, 2, 3]


def test_measuring_ends_at_the_first_look_that_decides() -> None:
    seen: list[int] = []

    def is_decided(seconds: Seconds) -> bool:
        seen.append(len(seconds["a"]))
        return len(seen) == 2

    seconds = interleaved_seconds({"a": lambda: None}, [2, 4, 9], is_decided=is_decided)
    assert (seen, len(seconds["a"])) == ([2, 4], 4)


def test_a_time_includes_what_the_device_still_does_and_nothing_before() -> None:
    fake, queued = FakeTime(), [5.0]  # work queued before the measurement

    def enqueue() -> None:
        queued.append(2.0)

    def wait() -> None:
        fake.now += sum(queued)
        queued.clear()

    seconds = interleaved_seconds({"a": enqueue}, [2], warmup=0, clock=lambda: fake.now, synchronize=wait)
    assert seconds == {"a": [2, 2]}


# ---------------------------------------------------------------------- memory


def test_peak_of_temporaries() -> None:
    def work() -> None:
        a = torch.ones(MEGABYTE)
        b = a * 2  # two
        del a
        c = b + 1  # two again
        del b, c
        torch.ones(MEGABYTE)  # one

    assert peak_bytes(work, CPU) == pytest.approx(2_000_000, abs=SCALARS)


def test_peak_counts_the_result_and_not_what_was_there_before() -> None:
    before = torch.ones(10 * MEGABYTE)
    kept = []
    assert peak_bytes(lambda: kept.append(before[:MEGABYTE] + 1), CPU) == pytest.approx(1_000_000, abs=SCALARS)


def test_peak_sees_what_backward_keeps() -> None:
    x = torch.ones(MEGABYTE, requires_grad=True)
    ones = torch.ones(MEGABYTE)

    def work() -> None:
        y = x.exp().exp().exp()  # each result is kept for backward
        torch.autograd.grad(y, x, ones)

    # Three results, of which y keeps the last, and two gradients while the second is computed from the first.
    assert peak_bytes(work, CPU) == pytest.approx(5_000_000, abs=SCALARS)


def test_peak_is_not_lowered_by_releasing_older_tensors() -> None:
    older: list[torch.Tensor] = []
    peak_bytes(lambda: older.append(torch.ones(2 * MEGABYTE)), CPU)

    def work() -> torch.Tensor:
        older.clear()
        return torch.ones(MEGABYTE)

    assert peak_bytes(work, CPU) == pytest.approx(1_000_000, abs=SCALARS)


def test_peak_sees_temporaries_inside_one_operation() -> None:
    x = torch.randn(MEGABYTE)
    # The result is one number; what is seen is the copy of x that holds the exponentials.
    assert peak_bytes(lambda: torch.logsumexp(x, 0), CPU) == pytest.approx(1_000_000, abs=SCALARS)


def test_cpu_model(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name\t: Some Chip @ 2 GHz\n")
    assert cpu_model(info) == "Some Chip @ 2 GHz"
    assert isinstance(cpu_model(tmp_path / "absent"), str)


# ---------------------------------------------------------------------- runs


def small_plan(**changes) -> BenchPlan:
    return BenchPlan(**{"mixers": ["local"], "lengths": [12, 20], "dim": 16, "heads": 2, "repeats": 2, **changes})


def test_every_mechanism_passes_its_check() -> None:
    rows = run_bench(small_plan(mixers=available(), lengths=[33], repeats=1))
    forms = {name: mixer_class(name).capabilities.bidirectional for name in available()}
    assert [(row.mixer, row.status) for row in rows] == [(name, "done" if forms[name] else "refused") for name in forms]
    assert not [row.reason for row in rows if row.status == "done" and row.reason]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_causal_mechanisms_pass_and_the_others_are_refused(dtype) -> None:
    for row in run_bench(small_plan(mixers=available(), lengths=[33], repeats=1, causal=True, dtype=dtype)):
        if mixer_class(row.mixer).capabilities.causal:
            assert (row.status, row.reason) == ("done", None), row.mixer
        else:
            assert row.status == "refused"
            assert f"{row.mixer} cannot be causal" in (row.reason or "")
            assert row.inference_seconds is None


def test_softmax_is_the_baseline_and_always_measured() -> None:
    plan = small_plan()
    messages: list[str] = []
    rows = run_bench(plan, messages.append)
    assert [(row.mixer, row.length) for row in rows] == [
        ("softmax", 12),
        ("local", 12),
        ("softmax", 20),
        ("local", 20),
    ]
    assert len(messages) == plan.steps
    for baseline, local in (rows[:2], rows[2:]):
        assert baseline.inference_ratio == baseline.training_ratio == 1
        assert local.inference_seconds and local.training_seconds and local.training_bytes  # noqa: PT018
        assert baseline.inference_seconds and baseline.training_seconds and local.inference_bytes  # noqa: PT018
        assert local.inference_ratio == local.inference_seconds / baseline.inference_seconds
        assert local.training_ratio == local.training_seconds / baseline.training_seconds
        assert len(local.seconds["inference"]) == len(local.seconds["training"]) == plan.repeats
        assert local.training_bytes > local.inference_bytes > 12 * 16 * 4


def test_the_check_is_capped() -> None:
    assert run_bench(small_plan(mixers=[], lengths=[LONGEST_CHECK + 9], repeats=1))[0].check["length"] == LONGEST_CHECK


def test_max_length_follows_the_lengths_unless_set() -> None:
    rows = run_bench(small_plan(mixers=["linformer"], lengths=[12, 600], repeats=1))
    assert [row.options["max_length"] for row in rows if row.mixer == "linformer"] == [600, 600]
    rows = run_bench(small_plan(mixers=["linformer"], lengths=[12, 20], options={"linformer": {"max_length": 16}}))
    assert [row.status for row in rows if row.mixer == "linformer"] == ["done", "refused"]


def test_the_report_states_what_was_measured_and_names_nobody() -> None:
    plan = small_plan(lengths=[12], options={"local": {"window": 4}})
    text = json.dumps(bench_report(plan, run_bench(plan)))
    written = json.loads(text)
    assert written["rows"][1]["options"]["window"] == 4
    assert written["plan"]["dtype"] == "float32"
    assert written["environment"]["threads"] == torch.get_num_threads()
    assert platform.node() not in text
    assert str(Path.home()) not in text


# ---------------------------------------------------------------------- a mechanism that is wrong


class Broken(Mixer):
    """Adds an error of the kind that a test chooses to a mixer that would be right."""

    name = "broken"
    capabilities = Capabilities(causal=True, cross=False, grid=False, state="nothing, O(1)")
    kind = ""

    def setup(self) -> None:
        self.linear = nn.Linear(self.config.dim, self.config.dim)

    def mix(self, x, layout):
        y = self.linear(x)
        if self.kind == "crash":
            raise IndexError("out of range")
        if self.kind == "shape":
            y = y[:, 1:]
        if self.kind == "finite":
            y = y / 0
        if self.kind == "precision" and x.dtype == torch.float32:
            y = y * 1.001
        if self.kind == "gradient" and y.requires_grad:
            y.register_hook(lambda gradient: gradient / 0)
        return y, None

    def new_state(self, batch, device, dtype):
        return State(fresh_lengths(batch, device))

    def step(self, x, new, state):
        return self.linear(x) * (1.001 if self.kind == "streaming" else 1), State(
            advanced(state.lengths, new, x.shape[1])
        )


@pytest.fixture(params=["shape", "finite", "precision", "streaming", "gradient", "crash", ""])
def broken(request, monkeypatch) -> str:
    monkeypatch.setitem(registry._REGISTRY, "broken", Broken)
    monkeypatch.setattr(Broken, "kind", request.param)
    return request.param


def test_no_time_without_a_passed_check(broken, capsys) -> None:
    code = run_command(["bench", "--mixers", "broken", "--causal", "--lengths", "9", *SMALL])
    out, err = capsys.readouterr()
    (line,) = [line for line in out.splitlines() if line.split()[:2] == ["9", "broken"]]
    if not broken:
        assert code == 0
        assert len(line.split()) == 8
        return
    reasons = {
        "shape": "has shape (1, 8, 16) instead of (1, 9, 16)",
        "finite": "the output has values that are not finite",
        "precision": "differs from its float64 copy by 1.0e-03",
        "streaming": "differs from its streaming form by 1.0e-03",
        "gradient": "the gradient of the input has values that are not finite",
        "crash": "IndexError: out of range",
    }
    assert code == 1
    assert line.split() == ["9", "broken", "failed"]
    assert reasons[broken] in out
    assert err.splitlines()[-1] == "subquad: error: no times for broken: see the reasons under the table"


# ---------------------------------------------------------------------- the command


def test_bench_command_prints_a_table_and_writes_json(tmp_path, capsys) -> None:
    file = tmp_path / "bench.json"
    words = ["--mixers", "eva,lara", "--lengths", "8,24", "--causal", "--set", "eva.window=8", "--out", str(file)]
    assert run_command(["bench", *words, *SMALL]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[:2] for line in out.splitlines()[2:9] if line] == [
        [length, name] for length in ("8", "24") for name in ("softmax", "eva", "lara")
    ]
    assert "refused: lara at 8, 24: lara cannot be causal" in out
    assert "eva at 24: checked" in err
    rows = json.loads(file.read_text())["rows"]
    assert [row["options"].get("window") for row in rows if row["mixer"] == "eva"] == [8, 8]
    assert run_command(["bench", "--mixers", "softmax", "--lengths", "8", "--json", *SMALL]) == 0
    assert [row["mixer"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["softmax"]


def test_settings_are_read_as_values() -> None:
    settings = ["a.x=3", "a.y=true", "a.z=null", "b.x=word", "b.y=0.5"]
    assert parse_mixer_options(settings) == {"a": {"x": 3, "y": True, "z": None}, "b": {"x": "word", "y": 0.5}}
