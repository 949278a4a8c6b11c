"""Run by `test_counting.py`: the arithmetic of the scale plan, results of users, and that pages are up to date."""

import json
from pathlib import Path

import pytest

from benchmarks import scale_plan
from benchmarks.gpu import page
from benchmarks.gpu.hardware import A100
from benchmarks.scale_plan import RECIPES, plan_of
from subquad.compare.measure.bench import BenchPlan, bench_report, run_bench
from subquad.train.recipe import read_recipe

DOCS = Path(__file__).parents[3] / "docs"
NAME = "wikitext103_primal"


def check_the_arithmetic_of_a_plan() -> None:
    recipe = read_recipe(NAME)
    eight, many = (plan_of(NAME, recipe, gpus, "bfloat16") for gpus in (8, 64))
    assert eight.update_tokens == many.update_tokens == 16 * 2048
    assert eight.state_bytes(0) == 16 * eight.cost.parameters  # four numbers of four bytes
    assert eight.state_bytes(3) == pytest.approx(eight.state_bytes(0) / 8)
    assert eight.compute_seconds == pytest.approx(
        eight.passes * eight.counted.seconds(A100) + eight.counted.update_seconds(A100)
    )
    assert 0.05 < eight.utilisation < 0.64, "products alone would reach 200 of 312 TFLOP/s"
    slow = plan_of(NAME, recipe, 8, "float32")
    assert slow.compute_seconds > 3 * eight.compute_seconds
    assert slow.counted.tokens == eight.counted.tokens


def check_every_recipe_of_the_plan_is_on_the_page() -> None:
    text = (DOCS / "scale.md").read_text()
    for name in RECIPES:
        lines = text.count(f"\n| {name} | ")
        assert lines in (5, 9)  # once by model; time and memory on 8 and on 64 GPUs, in one precision or two


def check_a_result_of_a_user_is_shown_beside_its_estimate(tmp_path: Path) -> None:
    assert page.measured_table(tmp_path) == "No result of a GPU has been added yet.\n"
    plan = BenchPlan(mixers=["lightconv"], lengths=[32], dim=32, heads=4, repeats=1, causal=True, dtype="bfloat16")
    report = bench_report(plan, run_bench(plan))
    report["environment"]["device"] = "NVIDIA A100-SXM4-80GB"
    (tmp_path / "a100-result.json").write_text(json.dumps(report))
    rows = [line.split(" | ") for line in page.measured_table(tmp_path).splitlines()[2:]]
    assert [row[1] for row in rows] == ["softmax", "lightconv"]
    for row in rows:
        assert row[0].endswith("NVIDIA A100-SXM4-80GB")
        assert float(row[4]) > 0
        assert 0.05 < float(row[5].removesuffix(" |")) < 1


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "fill"), [("gpu.md", page.fill_page), ("scale.md", scale_plan.written)])
def check_pages_are_up_to_date(name, fill) -> None:
    text = (DOCS / name).read_text()
    assert fill(text) == text, f"docs/{name} is out of date: its markers name the command that writes it"
