"""The plan for many GPUs: docs/scale.md says what the recipes give, and the arithmetic holds."""

from pathlib import Path

import pytest

from benchmarks.scale_plan import ASSUMED, BEGIN, RECIPES, plan_of, tables

PAGE = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
NAME = "wikitext103_primal"


def test_the_page_says_what_the_recipe_gives() -> None:
    plans = [plan_of(NAME, gpus) for gpus in (8, 64)]
    for name, content in tables(plans):
        assert BEGIN.format(name=name) in PAGE
        for line in content.splitlines():
            assert f"{line}\n" in PAGE
    eight, many = plans
    assert eight.update_tokens == many.update_tokens == 16 * 2048
    assert eight.state_bytes(0) == 16 * eight.cost.parameters  # four numbers of four bytes
    assert eight.state_bytes(3) == pytest.approx(eight.state_bytes(0) / 8)
    work = 3 * eight.cost.flops_per_token * eight.update_tokens
    speed = 8 * ASSUMED.peak * 1e12 * ASSUMED.utilisation
    assert eight.compute_seconds == pytest.approx(work / speed)


def test_every_recipe_of_the_plan_is_on_the_page() -> None:
    for name in RECIPES:
        assert PAGE.count(f"\n| {name} | ") == 5  # once by model; time and memory on 8 and on 64 GPUs
