"""Recipes and command lines that nobody meant: read, or refused in one clear line."""

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from hypothesis import given
from hypothesis import strategies as st

from subquad.cli.main import build_app
from subquad.files import MOST_VALUES, parse_yaml
from subquad.recipes import FOLDER
from subquad.train.recipe import Recipe, read_recipe
from tests.fuzzing import WORDS, called, edited, fuzzed, junk, kept_promise

RECIPES = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.rglob("*.yaml"))}


@fuzzed(120)
@given(st.sampled_from(sorted(RECIPES)).flatmap(lambda name: edited(RECIPES[name])))
def test_edited_recipes(tmp_path: Path, recipe: dict[str, Any]) -> None:
    """What is read of them can be stored and read again."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe, allow_unicode=True))
    read = kept_promise(lambda: read_recipe(path))
    if read is not None:
        assert isinstance(read, Recipe)
        path.write_text(yaml.safe_dump(read.model_dump(mode="json")))
        assert read_recipe(path).model_dump(mode="json") == read.model_dump(mode="json")


@fuzzed(60)
@given(
    name=st.sampled_from(sorted(RECIPES)),
    place=st.floats(0, 1),
    length=st.integers(0, 20),
    new=st.binary(max_size=6)
    | st.sampled_from([b"&a [*a]", b"!!python/name:os.system", b"!!int ''", b"\t", b"{[", b"<<: "]),
)
def test_damaged_recipes(tmp_path: Path, name: str, place: float, length: int, new: bytes) -> None:
    content = yaml.safe_dump(RECIPES[name]).encode()
    begin = int(place * len(content))
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content[:begin] + new + content[begin + length :])
    kept_promise(lambda: read_recipe(path))


@fuzzed(60)
@given(
    place=st.sampled_from(
        ["train.updates", "model.encoder.mixer", "model", "data.splits", "task", "a.b.c", "schedule"]
    ),
    value=junk().map(lambda value: yaml.safe_dump(value, default_flow_style=True)) | st.text(max_size=12),
)
def test_changes_of_any_value(place: str, value: str) -> None:
    kept_promise(lambda: read_recipe("phrases", [f"{place}={value}"]))


DOUBLED = "\n".join(["a0: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40))])
MERGED = "\n".join(["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, 40))])


@pytest.mark.parametrize("text", [DOUBLED, MERGED, "a: &a [*a]", "[" * 500 + "]" * 500, "{a: " * 300 + "1" + "}" * 300])
def test_values_without_end_are_refused(text: str) -> None:
    """Forty lines stand for 2^40 values: they are refused before they are made."""
    with pytest.raises(ValueError, match=rf"more than {MOST_VALUES:,} values|recursion"):
        parse_yaml(text)


@pytest.mark.parametrize("text", ["!!python/object/apply:os.system [ls]", "!!python/name:os.system", "!!int ''"])
def test_tags_make_no_objects(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        parse_yaml(text)


def test_a_shared_part_is_no_bomb() -> None:
    assert parse_yaml("a: &stack {layers: 2}\nb: *stack\nc: {<<: *stack, heads: 4}")["c"] == {"layers": 2, "heads": 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1" + ":59" * 400, "a whole number of 1,201 characters"),  # in base 60, which takes quadratic time
        ("a: " + "9" * 1001, "a whole number of 1,001 characters"),
        (f"{2**61 - 1}: 1", "a key that is a whole number of more than 18 characters"),  # equal hashes can be chosen
        (f"? {'1' * 19}\n: 1", "a key that is a whole number"),
    ],
)
def test_numbers_that_take_long_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_yaml(text)


def test_usual_numbers_are_read() -> None:
    found = parse_yaml("{1: 2, 123456789012345678: 1, time: 1:30:00, big: 18446744073709551616, 'x': '1:59:59'}")
    assert found == {1: 2, 123456789012345678: 1, "time": 5400, "big": 2**64, "x": "1:59:59"}


# ---------------------------------------------------------------------- command lines

COMMANDS = {
    name: [option for parameter in found.params for option in parameter.opts if option.startswith("--")]
    for name, found in getattr(typer.main.get_command(build_app()), "commands").items()  # noqa: B009 - a click group
}
QUICK = sorted(set(COMMANDS) - {"demo", "docs", "doctor", "bench", "data"})
"""Commands that work on a run or a recipe; those that need none would begin to work."""


@fuzzed(60)
@given(data=st.data())
def test_any_words(tmp_path: Path, capsys, data: st.DataObject) -> None:
    """Every command with any options and values, none of which is a run: it says so, or what else is wrong."""
    name = data.draw(st.sampled_from(QUICK))
    values = st.sampled_from([*WORDS, "-1", "0", "1e400", "3", str(tmp_path), "recipe.yaml", "a=b", "=", "--", "-x"])
    words = data.draw(st.lists(st.sampled_from(COMMANDS[name]) | values | st.text(max_size=6), max_size=5))
    with contextlib.chdir(tmp_path), open(os.devnull) as nothing, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", nothing)
        called(capsys, name, *words)


@fuzzed(30)
@given(words=st.lists(st.sampled_from([*WORDS, "info", "eva", "--json", "--length", "-5", "--version"]), max_size=4))
def test_any_words_without_a_command(tmp_path: Path, capsys, words: list[str]) -> None:
    with contextlib.chdir(tmp_path):
        called(capsys, *words)
