"""The documentation is current, and what it says is true: tables, examples, commands, paths."""

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
import torch

import subquad
from subquad.mixers import available, build
from subquad.models.describe import TABLE_HEADERS
from tests.docs.pages import blocks
from tools.docs import BEGIN, END, generated, write_docs
from tools.markdown import fill_between

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def readme_blocks(language: str) -> list[str]:
    return [block.text for block in blocks(ROOT / "README.md") if block.language == language]


# ---------------------------------------------------------------------- generated parts


@pytest.mark.parametrize("name", generated(ROOT))
def test_generated_parts_are_current(name) -> None:
    assert (ROOT / name).read_text() == generated(ROOT)[name], f"{name} is out of date: run `make docs`"


def test_write_docs_writes_both_files(tmp_path) -> None:
    shutil.copytree(ROOT / "docs/migrating", tmp_path / "docs/migrating")
    for name in ("docs/index.md", "docs/performance.json"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "README.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_docs(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert text.startswith(f"before\n{BEGIN}\n| mechanism |")
    assert text.endswith(f" |\n{END}\nafter\n")
    assert "## softmax" in (tmp_path / "docs/mechanisms.md").read_text()


def test_missing_markers_are_refused() -> None:
    with pytest.raises(ValueError, match="no lines"):
        fill_between("no markers here", BEGIN, END, "table", "README.md")


# ---------------------------------------------------------------------- every cell of the table


def readme_table() -> dict[str, dict[str, str]]:
    """Cells by mechanism and column, as a reader sees them."""
    lines = README.partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    split = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    header, _, *rows = split
    named = [dict(zip(header, row, strict=True)) for row in rows]
    return {re.findall(r"\[(.*?)\]", row["mechanism"])[0]: row for row in named}


def cell(name: str, column: str) -> str:
    assert column in TABLE_HEADERS
    return readme_table()[name][column]


def tokens(length: int) -> torch.Tensor:
    return torch.randn(1, length, 16, generator=torch.Generator().manual_seed(length))


def test_the_table_lists_every_mechanism() -> None:
    assert list(readme_table()) == available()


@pytest.mark.parametrize("name", available())
def test_bidirectional_cell(name) -> None:
    if cell(name, "bidirectional") == "refuse":
        with pytest.raises(ValueError, match=f"{name} cannot look both ways"):
            build(name, dim=16, heads=4, causal=False)
        return
    assert cell(name, "bidirectional") == "yes"
    mixer, x = build(name, dim=16, heads=4).eval(), tokens(9)
    changed = torch.cat([x[:, :-1], -x[:, -1:]], 1)
    assert not torch.equal(mixer(x).y[:, -2], mixer(changed).y[:, -2])


@pytest.mark.parametrize("name", available())
def test_causal_cell(name) -> None:
    if cell(name, "causal") == "refuse":
        with pytest.raises(ValueError, match=f"{name} cannot be causal"):
            build(name, dim=16, heads=4, causal=True)
        return
    assert cell(name, "causal") == "yes"
    mixer, x = build(name, dim=16, heads=4, causal=True).eval(), tokens(9)
    changed = torch.cat([x[:, :-1], -x[:, -1:]], 1)
    assert torch.equal(mixer(x).y[:, :-1], mixer(changed).y[:, :-1])


@pytest.mark.parametrize("name", available())
def test_cross_cell(name) -> None:
    mixer = build(name, dim=16, heads=4).eval()
    if cell(name, "cross") == "refuse":
        with pytest.raises(ValueError, match=f"{name} cannot read a context"):
            mixer(tokens(9), context=tokens(7))
        return
    assert cell(name, "cross") == "yes"
    y, other = mixer(tokens(9), context=tokens(7)).y, mixer(tokens(9), context=-tokens(7)).y
    assert y.shape == (1, 9, 16)
    assert not torch.equal(y, other)


@pytest.mark.parametrize("name", available())
def test_grid_cell(name) -> None:
    mixer, x = build(name, dim=16, heads=4).eval(), tokens(18 * 18)
    outputs = []
    for grid in (None, (18, 18)):
        torch.manual_seed(0)  # ra draws in eval mode too
        outputs.append(mixer(x, grid=grid).y)
    assert cell(name, "2-D grid") == ("as sequence" if torch.equal(*outputs) else "yes")


@pytest.mark.parametrize("name", available())
def test_state_cell(name) -> None:
    text = cell(name, "streaming state")
    if text.startswith("none"):
        assert cell(name, "causal") == "refuse"
        mixer = build(name, dim=16, heads=4)
        with pytest.raises(ValueError, match="stream"):
            mixer(tokens(9), state=subquad.mixers.State(torch.zeros(1, dtype=torch.int64)))
        return
    mixer = build(name, dim=16, heads=4, causal=True).eval()
    state, sizes = mixer.init_state(1), []
    for _ in range(2):
        state = mixer(tokens(300), state=state).state
        values = [getattr(state, field.name) for field in dataclasses.fields(state)]
        sizes.append(sum(value.numel() for value in values if isinstance(value, torch.Tensor)))
    assert (sizes[0] == sizes[1]) == ("O(1)" in text)


# ---------------------------------------------------------------------- examples, commands, paths


def test_the_library_example_runs_and_is_ten_lines() -> None:
    example, *_ = readme_blocks("python")
    assert len([line for line in example.splitlines() if line.strip()]) == 10
    scope: dict = {}
    exec(example, scope)
    assert scope["y"].shape == (2, 1, 64)
    assert scope["state"].lengths.tolist() == [100, 100]


def test_the_model_example_runs(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, example, _ = readme_blocks("python")
    scope: dict = {}
    exec(example, scope)
    whole = scope["model"](scope["tokens"]).logits
    torch.testing.assert_close(scope["logits"][:, 0], whole[:, -1], atol=1e-5, rtol=1e-5)
    assert (tmp_path / "my-model" / "weights.safetensors").exists()


def test_the_readme_begins_with_two_commands() -> None:
    lines = [line for block in readme_blocks("sh") for line in block.splitlines()]
    assert [line.split()[1] for line in lines if line.startswith("make")] == ["demo", "test"]


def test_the_tree_shows_what_exists() -> None:
    (tree,) = [block for block in readme_blocks("") if block.startswith("src/subquad/")]
    shown = {line.split()[0] for line in tree.splitlines() if line.startswith("  ")}
    folders = {f"{path.parent.name}/" for path in (ROOT / "src/subquad").glob("*/__init__.py")}
    assert {name for name in shown if name.endswith("/")} == folders
    assert all((ROOT / "src/subquad" / name).exists() for name in shown)
    assert all((ROOT / line.split()[0]).is_dir() for line in tree.splitlines() if not line.startswith("  "))


def test_links_lead_to_files() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/architecture.md"):
        for target in re.findall(r"\]\(([^)#]+)", (ROOT / name).read_text()):
            assert target.startswith("https://") or ((ROOT / name).parent / target).exists(), f"{name}: {target}"
