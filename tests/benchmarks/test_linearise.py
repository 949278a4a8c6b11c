"""The study of linearising: its table, which the guide shows, follows from the reports, and its budgets are a tenth."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.linearise import (
    BEGIN,
    COMMAND,
    END,
    IMAGE_BUDGET,
    IMAGE_CASES,
    TEXT_BUDGET,
    TEXT_CASES,
    collect,
    table,
)
from benchmarks.linearise_teachers import EPOCHS, TOKENS
from subquad.linearise.options import LineariseOptions, parse_mixer

ROOT = Path(__file__).parents[2]
STUDIES = {"text": (TEXT_CASES, TEXT_BUDGET), "images": (IMAGE_CASES, IMAGE_BUDGET)}
DIGITS = 1297
"""The training images of digits."""


@pytest.mark.parametrize("study", STUDIES)
def test_cases_are_valid_and_learn_from_a_tenth_of_what_the_teacher_did(study: str) -> None:
    cases, budget = STUDIES[study]
    for case in cases.values():
        options = LineariseOptions.parse("case", budget | case | {"mixer": parse_mixer(case["mixer"])})
        samples = options.updates * options.batch
        assert samples * options.length <= TOKENS / 10 if study == "text" else samples <= EPOCHS * DIGITS / 10


def report(loss: float) -> dict[str, Any]:
    def score(name: str, value: float) -> dict[str, Any]:
        gap = {"difference": value - 3, "low": value - 3.1, "high": value - 2.9}
        return {"name": name, "metrics": {"loss": {"value": value, "minus_teacher": gap}}}

    scores = [score("teacher", 3), score("swapped", 5), score("finetune", loss)]
    known = {"mechanism": "local", "layers": ["local", "softmax"], "tokens": 7, "options": {}}
    return known | {"scores": scores}


def test_the_table_has_means_over_seeds_and_the_widest_interval(tmp_path: Path) -> None:
    for seed, loss in ((1, 3.2), (2, 3.4)):
        folder = tmp_path / "text" / f"local-{seed}"
        folder.mkdir(parents=True)
        (folder / "report.json").write_text(json.dumps(report(loss)))
    found = collect(tmp_path)
    assert [row["seed"] for row in found["text"]] == [1, 2]
    assert found["images"] == []
    row = table("text", found["text"]).splitlines()[2]
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "local=window=64, 1 of 2 layers keep attention",
        *("2", "3.000", "5.000", "–", "–", "3.300", "–", "–"),
        "+0.300 (+0.100 to +0.500)",
    ]


@pytest.mark.parametrize("study", STUDIES)
def test_the_guide_shows_the_table_of_the_stored_numbers(study: str) -> None:
    stored = json.loads((ROOT / "docs/linearise.json").read_text())
    page = (ROOT / "docs/guides/linearise.md").read_text()
    begin, end = BEGIN.format(name=study, command=COMMAND), END.format(name=study)
    shown = page.partition(begin)[2].partition(end)[0].strip()
    assert shown == table(study, stored[study]).strip()
