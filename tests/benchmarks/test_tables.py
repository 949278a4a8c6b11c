"""benchmarks/tables.py: every study runs, its numbers carry their config, and the page shows what was measured."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from subquad.compare.measure.lengths import LengthPoint, Timing, shape_at

pytestmark = pytest.mark.usefixtures("preloaded_programs")

ROOT = Path(__file__).parents[2]
STUDIES = ("linformer", "primal", "attention", "convolution")


def load(name: str):
    return importlib.import_module(f"benchmarks.{name}")


# ---------------------------------------------------------------------- the whole, at toy sizes


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> tuple[Path, str]:
    """One run of everything that `make bench-tables` does."""
    folder = tmp_path_factory.mktemp("tables")
    files = ["--json", str(folder / "all.json"), "--write-docs", str(folder / "page.md")]
    command = [sys.executable, "-m", "benchmarks.tables", "--quick", "--threads", "1", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.fixture(scope="module")
def parts(quick) -> dict:
    return json.loads((quick[0] / "all.json").read_text())["parts"]


def points_of(part: dict) -> list[LengthPoint]:
    return [LengthPoint.model_validate(point) for point in part["points"]]


@pytest.mark.nightly
@pytest.mark.parametrize("name", STUDIES)
def test_every_model_is_measured_at_every_length(parts, name) -> None:
    study = load("studies").STUDIES[name]
    points = points_of(parts[name])
    keys = [(point.part, point.length, point.mechanism) for point in points]
    expected = [(part, n, label) for part in study.parts for n in study.toy_lengths for label in study.models]
    assert keys == expected
    for point in points:
        assert (point.status, point.reason) == ("done", None), point
        for timing in (point.inference, point.training):
            assert timing is not None
            assert len(timing.rounds) == 1
        assert point.inference_bytes is not None
        assert point.training_bytes is not None
        assert point.training_bytes > point.inference_bytes


@pytest.mark.nightly
@pytest.mark.parametrize("name", STUDIES)
def test_the_config_travels_with_each_number(parts, name) -> None:
    study, part = load("studies").STUDIES[name], parts[name]
    assert part["command"] == f"python -m benchmarks.tables --only {name} --threads 1 --quick"
    assert part["environment"]["threads"] == 1
    assert part["environment"]["sizes"] == "toy sizes, no meaning"
    assert part["tokens"] == 64
    for point in points_of(part):
        assert point.setting == {"device": "cpu", "dtype": "float32", "threads": 1, "tokens": 64}
        assert point.config[study.mixing]["dim"] == part["models"][point.mechanism]["whole"]["dim"] == 16


@pytest.mark.nightly
def test_models_differ_in_what_a_study_varies(parts) -> None:
    def options(name: str, stack: str, option: str) -> dict:
        return {point.mechanism: point.config[stack].get(option) for point in points_of(parts[name])}

    assert options("linformer", "encoder", "proj_k") == {"vanilla": None, "k = 32": 32, "k = 64": 64, "k = 128": 128}
    assert options("linformer", "decoder.cross", "proj_k")["k = 64"] == 64
    layers = options("primal", "decoder", "name")
    assert layers == {"6 softmax": "softmax", "5 softmax, 1 primal": [*["softmax"] * 5, "primal"]}
    names = options("attention", "encoder", "name")
    assert all(label == name for label, name in names.items())
    assert options("attention", "encoder", "window")["eva"] == 7
    sizes = options("convolution", "encoder", "kernel_size")
    assert sizes.pop("softmax") is None
    assert {label: f"K = {size}" == label.partition(", ")[2] for label, size in sizes.items()} == dict.fromkeys(
        sizes, True
    )


@pytest.mark.nightly
def test_the_page_has_every_study_with_its_config(quick, parts) -> None:
    folder, out = quick
    text = (folder / "page.md").read_text()
    assert "Not measured yet" not in text
    for name, study in load("studies").STUDIES.items():
        section = text.partition(f"## {study.title}\n")[2].partition("\n## ")[0]
        assert parts[name]["command"] in section
        assert "toy sizes, no meaning" in section
        for label, model in parts[name]["models"].items():
            assert f"`{json.dumps(model['given'])}`" in section
            rows = re.findall(rf"^\| [\d,]+ x \d+ \| {re.escape(label)} \|", section, re.MULTILINE)
            assert len(rows) == len(study.parts) * len(study.toy_lengths)
        assert f"\n{name}, " in out


@pytest.mark.nightly
def test_the_page_is_made_of_the_numbers_alone(quick, tmp_path, capsys) -> None:
    folder, _ = quick
    page, file = tmp_path / "page.md", tmp_path / "all.json"
    file.write_text((folder / "all.json").read_text())
    assert load("tables").main(["--from-json", "--json", str(file), "--write-docs", str(page)]) == 0
    assert not capsys.readouterr().out
    assert page.read_text() == (folder / "page.md").read_text()
    assert file.read_text() == (folder / "all.json").read_text()


# ---------------------------------------------------------------------- studies at their own sizes


@pytest.mark.parametrize("longest", [4096, 16384])
@pytest.mark.parametrize("name", STUDIES)
def test_all_lengths_have_the_same_tokens(name, longest) -> None:
    plan = load("studies").STUDIES[name].plan(3, longest, False)
    assert plan.looks == (3,)
    assert 0.7 * longest < max(plan.lengths) <= longest
    for length in plan.lengths:
        shape = shape_at(plan, length)
        assert shape.length == length
        assert shape.batch * length == plan.tokens


@pytest.mark.parametrize(
    ("name", "width"), [("linformer", 64), ("primal", 64), ("attention", 64), ("convolution", 128)]
)
def test_heads_are_as_wide_as_in_the_original(name, width) -> None:
    study = load("studies").STUDIES[name]
    for model in load("tables").models_of(study.plan(1, 4096, False)).values():
        assert model["whole"]["dim"] == width * model["whole"][study.mixing]["heads"]


# ---------------------------------------------------------------------- tables


def point(mechanism: str, milliseconds: float, size: int) -> dict:
    timing = Timing.of([milliseconds / 1000] * 3)
    made = LengthPoint(mechanism=mechanism, part="full", length=1024, batch=4, inference=timing, training=timing)
    made.inference_bytes, made.training_bytes = size, 2 * size
    return made.model_dump(mode="json")


def test_ratios_are_to_the_baseline() -> None:
    page = load("tables_page")
    base, fast = page.rows({"points": [point("a", 8.0, 2**20), point("b", 2.0, 2**22)]}, "full", "a")
    assert base == ["1,024 x 4", "a", *2 * ["8.00 (8.00 to 8.00)", "1.00×"], "1.0 MiB", "1.00×", "2.0 MiB", "1.00×"]
    assert fast == ["1,024 x 4", "b", *2 * ["2.00 (2.00 to 2.00)", "0.25×"], "4.0 MiB", "4.0×", "8.0 MiB", "4.0×"]


@pytest.mark.parametrize("status", ["refused", "failed"])
def test_what_has_no_numbers_has_a_reason(status) -> None:
    page = load("tables_page")
    lost = LengthPoint(mechanism="a", part="full", length=1024, batch=4, status=status, reason="too long")
    lost.inference_bytes = 2**20  # it got so far
    first, second = page.rows({"points": [lost.model_dump(mode="json"), point("b", 2.0, 2**20)]}, "full", "a")
    assert first == ["1,024 x 4", "a", f"{status}: too long", *[""] * 7]
    assert second[2:] == [*2 * ["2.00 (2.00 to 2.00)", ""], "1.0 MiB", "", "2.0 MiB", ""]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "linear"], "invalid choice"),
        (["--from-json"], "needs --json"),
        (["--repeats", "0"], "at least 1"),
        (["--longest", "128"], "--longest must be at least 512"),
        (["--json", "no/such/x.json"], "no folder"),
    ],
)
def test_bad_options_are_refused(words, message, capsys) -> None:
    with pytest.raises(SystemExit) as refusal:
        load("tables").main(words)
    assert refusal.value.code == 2
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------------- the committed page


def test_the_committed_page_is_what_the_numbers_say() -> None:
    report = json.loads((ROOT / "docs/efficiency.json").read_text())
    page = load("tables_page").page(report, load("studies").STUDIES)
    assert page == (ROOT / "docs/efficiency.md").read_text(), "run `make bench-tables`"


def test_the_committed_numbers_are_not_those_of_toy_sizes() -> None:
    report = json.loads((ROOT / "docs/efficiency.json").read_text())
    assert all("sizes" not in part["environment"] for part in report["parts"].values())
