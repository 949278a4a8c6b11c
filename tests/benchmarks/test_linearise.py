"""The study of linearising: its table, which the guide shows, follows from the reports, and its budgets are a tenth."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import linearise_times
from benchmarks.linearise import (
    BEGIN,
    COMMAND,
    END,
    IMAGE_BUDGET,
    TEXT_BUDGET,
    all_cases,
    collect,
    table,
)
from benchmarks.linearise_teachers import EPOCHS, TOKENS
from subquad.linearise.options import LineariseOptions, parse_mixer

TIMES = "docs/linearise_times.json"
ROOT = Path(__file__).parents[2]
STUDIES = {"text": TEXT_BUDGET, "images": IMAGE_BUDGET}
DIGITS = 1297
"""The training images of digits."""


@pytest.mark.parametrize("study", STUDIES)
def test_cases_are_valid_and_learn_from_a_tenth_of_what_the_teacher_did(study: str) -> None:
    budget = STUDIES[study]
    for case in all_cases(study).values():
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


@pytest.mark.nightly
def test_times_of_all_mechanisms_are_measured_and_shown_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linearise_times, "IMAGES", 2)
    found = linearise_times.measure(lengths=(8,), positions=(8,))
    lines = [line for line in linearise_times.tables(found).splitlines() if line.startswith("| local")]
    text, images, decoding = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert text[:2] == ["local=window=64", "8"]
    assert images[:2] == ["local=window=16", "65"]
    assert decoding[:2] == ["local=window=64", "8"]
    assert all(cell.endswith(" ms") for line in (text, images) for cell in line[2:6])
    assert {row["mixer"] for row in found["images"]} >= {"lara=landmarks=16", "eva=window=16"}
    assert all(row["status"] == "done" for part in ("text", "images", "decoding") for row in found[part])


def test_the_guide_shows_the_times_that_are_stored() -> None:
    page = (ROOT / "docs/guides/linearise.md").read_text()
    begin, end = BEGIN.format(name="times", command=linearise_times.COMMAND), END.format(name="times")
    shown = page.partition(begin)[2].partition(end)[0].strip()
    if not (ROOT / TIMES).exists():
        assert shown == "Not measured yet."
        return
    assert shown == linearise_times.tables(json.loads((ROOT / TIMES).read_text())).strip()
