"""Model cards: what a run says cannot become HTML, close a block of code, or break a table."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from subquad.interop.export import card as cards
from subquad.interop.export.card import model_card
from subquad.models import build_model

HOSTILE = "<script>alert(1)</script> ![x](http://evil/x.png) | a ``` b"


def language_model() -> Any:
    stack = {"layers": 1, "heads": 2, "ffn_dim": 16}
    return build_model("language-model", vocab=20, dim=8, decoder=stack)


def test_a_card_is_yaml_and_markdown() -> None:
    text = model_card(language_model(), "```python\nprint(1 < 2)\n```")
    front, _, body = text.removeprefix("---\n").partition("---\n")
    assert yaml.safe_load(front)["pipeline_tag"] == "text-generation"
    assert "print(1 < 2)" in body  # the program is shown as it is
    assert "\n\n\n" not in body
    headings = [line for line in body.splitlines() if line.startswith("## ")]
    assert headings == ["## Use", "## Model", "## Environment"]


def test_text_of_a_run_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "environment", lambda device: {"machine": f"{HOSTILE}\nnext", HOSTILE: "1"})
    body = model_card(language_model(), "").partition("## Environment")[2]
    rows = [line for line in body.splitlines() if line.startswith("| ")]
    assert len(rows) == 4  # two of the heading, two of the values: a line break adds none
    assert "<script>" not in body
    assert "&lt;script&gt;" in body
    assert "![x]" not in body
    for row in rows[2:]:
        assert row.replace("\\|", "").count("|") == 3


@pytest.mark.parametrize("text", ["```", "a ```` b\n`````\n", "plain"])
def test_a_block_ends_where_it_should(text: str) -> None:
    block = str(cards._block({"value": text, "lines": f"x\n{text}\n<b>"}))
    first, *inner, last = block.splitlines()
    assert first == f"{last}yaml"
    assert set(last) == {"`"}
    assert not any(line.strip().startswith(last) for line in inner)
    assert yaml.safe_load("\n".join(inner)) == {"value": text, "lines": f"x\n{text}\n<b>"}


def test_paths_are_shortened(tmp_path: Path) -> None:
    assert cards.shorten_paths({"a": [str(tmp_path / "x.txt"), "b/c", 1]}) == {"a": ["x.txt", "b/c", 1]}
