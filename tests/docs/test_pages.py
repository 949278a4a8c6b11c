"""The documentation's pages: what they tell a reader to do works, figures are those of the modules, links lead on."""

import contextlib
import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from subquad.mixers import available
from tests.docs.pages import ROOT, Session, blocks, in_process, small_runs

pytestmark = pytest.mark.usefixtures("preloaded_programs")

DOCS = ROOT / "docs"
ELSEWHERE = {
    "guides/own-mechanism.md": "its commands need its package: test_own_mechanism.py",
}
PAGES = {
    name: path
    for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    if blocks(path) and (name := path.relative_to(DOCS if DOCS in path.parents else ROOT).as_posix()) not in ELSEWHERE
}
LONG = [name for name, path in PAGES.items() if any(block.nightly for block in blocks(path))]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return small_runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", PAGES)
def test_a_page_can_be_followed(name: str, runs: dict[str, Path], tmp_path: Path) -> None:
    Session(tmp_path, runs).follow(PAGES[name], nightly=False)


@pytest.mark.nightly
@pytest.mark.parametrize("name", LONG)
def test_a_page_can_be_followed_with_what_takes_long(name: str, runs: dict[str, Path], tmp_path: Path) -> None:
    Session(tmp_path, runs).follow(PAGES[name], nightly=True)


def test_what_a_reader_would_run_is_no_text() -> None:
    """Commands of programs that nobody has here are: the originals, those of `benchmarks.peer`, and the harness."""
    programs = r"subquad(?!\.interop\.lm_eval)|benchmarks(?!\.peer)"
    ours = re.compile(rf"^(\$ )?(subquad|torchrun|make|docker|python -m ({programs})|(import|from) subquad)\b", re.M)
    for page in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]:
        for block in blocks(page):
            assert block.language not in ("text", "") or not ours.search(block.text), f"{page}: {block.text}"


@pytest.mark.nightly
def test_a_comparison_of_ones_own_text(tmp_path: Path) -> None:
    """The example that pages leave to the nightly tests, with a mechanism, a seed and no lengths."""
    lines = [f"the year {number} was {'good' if number % 3 else 'better'}" for number in range(200)]
    (tmp_path / "my.txt").write_text("\n".join(lines) + "\n")
    words = ["--mixers", "softmax", "--updates", "2", "--seeds", "1", "--lengths", ""]
    with contextlib.chdir(tmp_path):
        said = in_process(["-m", "subquad.examples.compare_text", "my.txt", *words])
    assert said.startswith("my.txt: pieces of 32 tokens, 2 updates of 16 pieces each\n")
    made = tmp_path / "runs/my-text"
    parts = {split: (made / f"text/{split}.txt").read_text().splitlines() for split in ("train", "valid", "test")}
    assert {split: len(part) for split, part in parts.items()} == {"train": 160, "valid": 20, "test": 20}
    assert sorted(line for part in parts.values() for line in part) == sorted(lines)
    assert (made / "comparison/report.html").is_file()


# ---------------------------------------------------------------------- figures


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    folder = DOCS / "figures"
    spec = importlib.util.spec_from_file_location("draw", folder / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


def shades(svg: str) -> dict[tuple[int, int], float]:
    cells = re.findall(r'<rect x="(\d+)" y="(\d+)" .*? fill-opacity="([\d.]+)"', svg)
    return {(int(x), int(y)): float(shade) for x, y, shade in cells}


def test_figures_are_those_of_the_modules(drawing: ModuleType) -> None:
    drawn = drawing.figures()
    assert {path.name for path in (DOCS / "mechanisms").glob("*.svg")} == drawn.keys()
    for name, svg in drawn.items():
        ours, theirs = shades((DOCS / "mechanisms" / name).read_text()), shades(svg)
        places = ours.keys() | theirs.keys()
        assert places
        assert max(abs(ours.get(place, 0) - theirs.get(place, 0)) for place in places) <= 0.02, f"{name}: run make docs"


# ---------------------------------------------------------------------- the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in strict mode: a link that leads nowhere, also to a heading, or a page that no menu has, is an error.

    It is built once for all processes of the suite: the first that asks builds it, the others wait.
    """
    pytest.importorskip("mkdocs")
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site"
    with out.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
            if done.returncode:
                shutil.rmtree(out, ignore_errors=True)
            assert done.returncode == 0, done.stderr
    return out


def test_every_mechanism_is_described(site: Path) -> None:
    text = (site / "mechanisms.html").read_text()
    for name in available():
        assert f'id="{name}"' in text, f"docs/mechanisms.md has no {name}: run make docs"


@pytest.mark.parametrize("name", [path.stem for path in sorted((DOCS / "mechanisms").glob("*.md"))])
def test_the_page_of_a_mechanism_shows_it(name: str, site: Path) -> None:
    text = (site / "mechanisms" / f"{name}.html").read_text()
    assert f"{name}.svg" in text
    assert "What we measured" in text


def test_the_site_needs_no_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        fetched = re.findall(r'(?:src|<link[^>]*href)="(https?:[^"]*)"', page.read_text())
        assert not fetched, f"{page.name} fetches {fetched}"


def test_equations_are_shown_and_pipes_are_pipes(site: Path) -> None:
    for path in sorted((DOCS / "mechanisms").glob("*.md")):
        fences = path.read_text().count("```math")
        text = (site / "mechanisms" / f"{path.stem}.html").read_text()
        assert text.count("<math ") == fences > 0, path.name
        assert "<mi>&<" not in text, f"{path.name}: columns of an environment that is not known"
        assert not re.search(r"<m\w+>\\", text), f"{path.name}: a command that is not known"
    assert any("\\|" in path.read_text() for path in DOCS.glob("*.md"))
    for page in site.rglob("*.html"):
        assert not re.search(r"<code>[^<]*\\\|", page.read_text()), page.name


def test_links_between_pages_say_what_they_lead_to(site: Path) -> None:
    """They have titles or sentences, not names of files, which a reader of the site does not see."""
    links = [found for page in site.rglob("*.html") for found in re.findall(r"<a href=.*?</a>", page.read_text(), re.S)]
    assert len(links) > 1000
    assert [link for link in links if re.search(r">(<code>)?[\w/-]+\.(md|html)(</code>)?</a>$", link)] == []


def test_pages_fit_and_are_found_when_opened_from_a_folder(site: Path, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    for path in sorted(site.rglob("*.html")):
        if path.name == "404.html":  # of a server
            continue
        page.goto(path.as_uri())
        cut = "[...document.querySelectorAll('pre > code, .equation')].filter(e => e.scrollWidth > e.clientWidth + 1)"
        assert page.evaluate(f"{cut}.map(e => e.innerText)") == [], path.name
    page.goto((site / "mechanisms" / "eva.html").as_uri())
    page.wait_for_selector("iframe", state="attached")
    page.click("[data-md-component=search-query]")
    page.keyboard.type("landmarks", delay=20)
    page.wait_for_selector(".md-search-result__link")
    found = page.locator(".md-search-result__link").first.get_attribute("href")
    assert found.startswith(site.as_uri())
    assert all(url.startswith((site.as_uri(), "about:", "blob:", "data:")) for url in requests), requests


def test_the_reference_shows_what_it_names(site: Path) -> None:
    named = re.findall(r"^::: (\S+)", (DOCS / "api.md").read_text(), re.MULTILINE)
    text = (site / "api.html").read_text()
    assert named
    assert all(f'id="{name}"' in text for name in named)
