"""The page of a comparison: one file that needs nothing else, tried in a real browser."""

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subquad.compare.report.html import embedded, page, write_page
from subquad.compare.report.result import Result
from tests.compare.cases import synthetic
from tests.compare.report.results import bare

HOSTILE = "</script><script>window.broken=1</script><img src=x onerror='window.broken=1'><!-- ${policy} \u2028 &amp;"


class Elements(HTMLParser):
    """Names and attributes of all elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


# ---------------------------------------------------------------------- the file


def test_the_page_refers_to_nothing_outside() -> None:
    for tag, attributes in Elements(page(synthetic())).found:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form"), tag
        for name in ("src", "srcset", "action", "style", "onclick", "onload"):
            assert name not in attributes, (tag, name)
        assert (attributes.get("href") or "#").startswith("#")
    assert not re.search(r"@import|url\(", page(synthetic()))


def test_the_page_carries_the_result() -> None:
    result = synthetic()
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page(result), re.DOTALL)
    assert found is not None
    assert Result.model_validate(json.loads(found.group(1))["result"]) == result


def test_text_cannot_become_elements() -> None:
    def structure(result: Result) -> list[str]:
        return [tag for tag, _ in Elements(page(result)).found]

    calm, hostile = bare(), bare()
    calm.title, calm.recipe, calm.environment, calm.command = "x", {"x": "x"}, {"x": "x"}, "x"
    hostile.title, hostile.recipe, hostile.command = HOSTILE, {HOSTILE: HOSTILE}, HOSTILE
    hostile.environment = {HOSTILE: HOSTILE}
    assert structure(hostile) == structure(calm)


@given(
    st.recursive(
        st.text() | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_embedded_data_is_json_without_markup(data: Any) -> None:
    text = embedded(data)
    assert json.loads(text) == data
    assert not set("<>&\u2028") & set(text)


def test_a_page_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(bare(), path)
    write_page(synthetic(), path)
    assert path.read_text(encoding="utf-8") == page(synthetic())
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


# ---------------------------------------------------------------------- in a browser


class Opened:
    """A result's page in the browser, and what must not happen while it is open."""

    def __init__(self, browser: Any, result: Result, folder: Path, width: int = 1280, **options: Any) -> None:
        self.wrong: list[str] = []
        path = folder / "page.html"
        write_page(result, path)
        self.page = browser.new_page(viewport={"width": width, "height": 900}, **options)
        self.page.on("console", lambda message: self.wrong.append(message.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: self.wrong.append(dialog.message))
        self.page.on("request", lambda request: self._requested(request.url, path.as_uri()))
        self.page.goto(path.as_uri())

    def _requested(self, url: str, own: str) -> None:
        if url != own:
            self.wrong.append(f"request of {url}")

    def count(self, selector: str) -> int:
        return self.page.locator(selector).count()

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def close(self) -> None:
        self.page.close()
        assert self.wrong == []


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Opened]:
    shown = Opened(browser, synthetic(), tmp_path)
    yield shown
    shown.close()


def test_the_table_fits_and_figures_are_saved(browser: Any, tmp_path: Path) -> None:
    shown = Opened(browser, synthetic(), tmp_path, 1200)
    widths = shown.page.evaluate("(e => [e.scrollWidth, e.clientWidth])(document.querySelector('#mechanisms .scroll'))")
    assert widths[0] == widths[1], "nothing of it is cut off"
    assert shown.count("#pareto .dot") == 3 * 5 + 2, "one for each finished run"
    with shown.page.expect_download() as download:
        shown.page.locator("#pareto-save").click()
    drawing = Path(download.value.path()).read_text()
    assert download.value.suggested_filename == "pareto.svg"
    assert drawing.startswith("<svg")
    assert "var(--" not in drawing, "it needs no style of the page"
    shown.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_plots_are_drawn_and_fit(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    shown = Opened(browser, synthetic(), tmp_path, width, color_scheme=scheme)
    assert shown.page.evaluate("document.documentElement.scrollWidth") == width
    assert shown.count("#pareto .mark") == 6
    assert shown.count("#lengths .curve") == 6
    assert shown.count("#lengths .mark") == 6 * 7 - 1  # softmax has none at its longest
    assert shown.count("#trials .curve:not(.failed)") == 6 + 1  # and the cross of the failed run
    assert shown.count("#trials .failed") == 1
    assert shown.count("#swap .curve") == 6
    lines = shown.page.locator("#swap .reference").all_text_contents()
    assert sorted(lines) == ["mean of the values", "no mixing", "softmax as it was trained"]
    assert shown.count("#tuning .mark") == 6 * 4
    assert shown.count(".plot svg[role=img][aria-label]") == 5
    labels = shown.page.locator("#lengths text").all_text_contents()
    assert {"256", "1,024", "4,096", "16,384"} <= set(labels)
    names = shown.page.locator("#lengths .name").count()
    assert names == (6 if width == 1280 else 0)
    shown.close()


def test_the_failed_run_is_seen(opened: Opened) -> None:
    row = opened.page.locator("section:has(#mechanisms-title) tr[data-state=failed]")
    assert row.locator("th").inner_text() == "performer"
    assert row.locator("td").last.inner_text() == "2 done, 1 failed"
    assert "performer (seed 3) failed: the loss was not finite" in opened.text("#conclusions .limit")
    assert "softmax at 16,384 tokens: failed, out of memory" in opened.text("#lengths-note")


def test_toggles_hide_a_mechanism_everywhere(opened: Opened) -> None:
    button = opened.page.get_by_role("button", name="eva")
    everywhere = [f"#{plot} [data-label=eva]" for plot in ("pareto", "lengths", "trials", "swap")]
    assert button.get_attribute("aria-pressed") == "true"
    assert all(opened.count(selector) for selector in everywhere)
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert not any(opened.count(selector) for selector in everywhere)
    assert opened.count("#lengths [data-label=softmax]")
    button.focus()
    opened.page.keyboard.press("Space")
    assert button.get_attribute("aria-pressed") == "true"
    assert all(opened.count(selector) for selector in everywhere)


def test_hiding_everything_is_said(opened: Opened) -> None:
    for button in opened.page.locator("#legend button").all():
        button.click()
    assert opened.text("#lengths") == "Nothing to show: no mechanism is chosen."
    opened.page.get_by_role("button", name="softmax").click()
    assert opened.count("#lengths .curve") == 1


def test_the_keyboard_reads_values(opened: Opened) -> None:
    plot, tip = opened.page.locator("#lengths"), opened.page.locator("#lengths .tip")
    plot.focus()
    assert tip.get_attribute("role") == "status"
    first = tip.inner_text()
    assert first.startswith("softmax")
    assert "256 tokens, batch of 64" in first
    assert "device cpu, dtype float32, threads 2" in first  # the config travels with the number
    opened.page.keyboard.press("ArrowRight")
    assert "512 tokens, batch of 32" in tip.inner_text()
    opened.page.keyboard.press("ArrowDown")
    assert tip.inner_text().startswith("lightconv")
    opened.page.keyboard.press("Escape")
    assert not tip.is_visible()


def test_the_pointer_reads_values(opened: Opened) -> None:
    point = opened.page.locator("#pareto [data-label=primal] .mark").first
    point.scroll_into_view_if_needed()
    point.hover(force=True)
    tip = opened.page.locator("#pareto .tip")
    assert tip.is_visible()
    assert tip.inner_text().startswith("primal\n32.35 BLEU")
    opened.page.mouse.move(1, 1)
    assert not tip.is_visible()


def test_a_finger_reads_values(browser: Any, tmp_path: Path) -> None:
    shown = Opened(browser, synthetic(), tmp_path, 400, has_touch=True)
    point = shown.page.locator("#lengths [data-label=eva] .mark").last
    point.scroll_into_view_if_needed()
    point.tap(force=True)
    text = shown.text("#lengths .tip")
    assert text.startswith("eva")
    assert "16,384 tokens" in text
    shown.close()


def test_controls_change_the_plots(opened: Opened) -> None:
    assert opened.count("#swap-note") == 1
    assert not opened.page.locator("section:has(#swap) select").count(), "there is nothing to choose"
    opened.page.select_option("#lengths-part", "encoder")
    assert opened.count("#lengths .mark") == 6 * 7
    assert "out of memory" not in opened.text("#lengths-note")
    opened.page.select_option("#lengths-cost", "training_bytes")
    assert any("MiB" in text for text in opened.page.locator("#lengths text").all_text_contents())
    opened.page.select_option("#trials-by", "seconds")
    assert "minutes of training →" in opened.page.locator("#trials text").all_text_contents()
    opened.page.select_option("#pareto-cost", label="Parameters")
    assert opened.count("#pareto .mark:not(.hollow)") == 1  # five equal counts: the best of them stands alone


def test_the_order_of_tab_stops(opened: Opened) -> None:
    """Everything that can be operated can be reached, in the order of the page."""
    reached = []
    for _ in range(40):
        opened.page.keyboard.press("Tab")
        reached.append(opened.page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
    wanted = [
        "theme",
        "softmax",
        "primal",
        "pareto-cost",
        "pareto",
        "lengths-cost",
        "lengths-part",
        "lengths",
        "trials",
    ]
    places = [reached.index(name) for name in wanted]
    assert places == sorted(places)


CONTRAST = """() => {
  const probe = document.body.appendChild(document.createElement("i"));
  const light = (name) => {
    probe.style.color = `var(--${name})`;
    const parts = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
    const [r, g, b] = parts.map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const names = ["ink", "soft", "accent", "alarm", ...Array.from({ length: 12 }, (_, i) => `s${i}`)];
  const ground = light("ground");
  const ratios = names.map((name) => light(name))
    .map((value) => (Math.max(value, ground) + 0.05) / (Math.min(value, ground) + 0.05));
  probe.remove();
  return ratios;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_can_be_changed_and_is_readable(browser: Any, tmp_path: Path, scheme: str) -> None:
    shown = Opened(browser, synthetic(), tmp_path, color_scheme=scheme)
    button = shown.page.locator("#theme")
    grounds = []
    for pressed in (scheme == "dark", scheme != "dark", scheme == "dark"):
        assert button.get_attribute("aria-pressed") == str(pressed).lower()
        assert min(shown.page.evaluate(CONTRAST)) >= 4.5
        grounds.append(shown.page.evaluate("getComputedStyle(document.body).backgroundColor"))
        button.click()
    assert grounds[0] == grounds[2] != grounds[1]
    shown.close()


def test_hostile_text_stays_text(browser: Any, tmp_path: Path) -> None:
    result = synthetic()
    text = json.loads(json.dumps(result.model_dump(mode="json")).replace("local window=32", "local <b>&'"))
    result = Result.model_validate(text | {"title": HOSTILE, "recipe": {HOSTILE: [HOSTILE]}})
    result.environment = {HOSTILE: HOSTILE}
    shown = Opened(browser, result, tmp_path)
    assert shown.page.evaluate("window.broken") is None
    assert shown.page.locator("h1").text_content() == HOSTILE
    assert shown.page.get_by_role("button", name="local <b>&'").count() == 1
    assert "local <b>&'" in shown.page.locator("#lengths .name").all_text_contents()
    shown.close()


def test_raw_data_can_be_read_and_saved(opened: Opened) -> None:
    opened.page.locator("#raw summary").click()
    opened.page.wait_for_function("document.getElementById('raw-text').textContent")
    assert Result.model_validate_json(opened.page.locator("#raw-text").text_content()) == synthetic()
    with opened.page.expect_download() as download:
        opened.page.locator("#download").click()
    assert Result.model_validate_json(Path(download.value.path()).read_text()) == synthetic()


def test_without_scripts_the_numbers_are_there(browser: Any, tmp_path: Path) -> None:
    shown = Opened(browser, synthetic(), tmp_path, java_script_enabled=False)
    assert "Use lightconv here" in shown.text(".headline")
    assert shown.count("section:has(#mechanisms-title) tbody tr") == 6
    assert shown.page.locator("noscript").inner_text().startswith("The plots need JavaScript")
    assert not shown.page.locator("#plots").is_visible()
    assert not shown.page.locator("#theme").is_visible()
    shown.close()


def test_a_result_without_numbers(browser: Any, tmp_path: Path) -> None:
    shown = Opened(browser, bare(), tmp_path)
    assert "Nothing can be concluded yet" in shown.text(".headline")
    assert not shown.page.locator("#plots").is_visible()
    shown.close()


def test_on_paper_there_are_no_controls(opened: Opened) -> None:
    opened.page.emulate_media(media="print", color_scheme="dark")
    assert not opened.page.locator("#theme").is_visible()
    assert not opened.page.locator("#lengths-cost").is_visible()
    assert opened.page.locator("#lengths svg").is_visible()
    red, green, blue = map(
        int, re.findall(r"\d+", opened.page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]
    )
    assert min(red, green, blue) > 240
