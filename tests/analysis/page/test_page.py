"""The page in a real browser: it opens from disk, fetches nothing, shows the numbers, and its charts can be used."""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.browser import chromium, needs_browser, report, requested, show, window

from analysis.page import webpage
from cbsim.draw import report as reports


def without_library(html: str) -> str:
    return re.sub(r'id="library">[^<]*<', 'id="library"><', html)


def test_equal_reports_are_equal_pages_and_the_library_is_inside_once() -> None:
    script = "window.Plotly = {};" * 500
    html = webpage.html(report(2), script)
    assert html == webpage.html(report(2), script)
    (packed,) = re.findall(r'id="library">([^<]*)<', html)
    assert gzip.decompress(base64.b64decode(packed)).decode() == script
    assert script not in html


@pytest.mark.parametrize("runs", [1, 2, 6])
def test_the_page_names_no_address_and_runs_nothing_that_is_not_its_own(runs: int) -> None:
    """Texts of a report cannot become scripts, and only scripts with a known hash run at all."""
    html = without_library(webpage.html(report(runs), "1"))
    assert "https:" not in html and "http:" not in html
    assert "<script>alert" not in html and not re.search(r"<[^>]+\son\w+=", html)
    assert "default-src 'none'; script-src 'sha256-" in html
    assert html.count("<script") == html.count("</script>") == 2 + len(report(runs).charts)


def test_sections_come_in_the_order_of_reading_and_empty_ones_are_left_out() -> None:
    html = webpage.html(report(2), "1")
    found = re.findall(r'<section id="(\w+)"', html)
    assert found == ["numbers", "findings", "caveats", "tables", "charts", "scenarios", "environments", "commands"]
    found = re.findall(r'<section id="(\w+)"', webpage.html(report(6), "1"))
    assert found[:4] == ["findings", "tables", "caveats", "charts"]
    bare = webpage.html(replace(report(1, caveats=0), findings=(), tables=(), charts=()), "1")
    assert "No caveat found." in bare
    assert re.findall(r'<section id="(\w+)"', bare) == ["numbers", "caveats", "scenarios", "environments", "commands"]


def test_a_long_list_of_runs_is_folded_and_only_what_is_drawn_has_a_colour() -> None:
    """Nobody scrolls past a hundred runs to the findings; a colour beside a run that no chart has would mislead."""
    short, long = (without_library(webpage.html(report(runs), "1")) for runs in (2, webpage.MOST_LISTED + 1))
    assert "<summary>25 runs</summary>" in long and " runs</summary>" not in short
    plain = replace(report(2), coloured=False, sources=[one._replace(tiles=()) for one in report(2).sources])
    assert 'class="mark"' in short and 'class="mark"' not in webpage.html(plain, "1")


def test_what_no_run_has_of_its_own_is_no_section() -> None:
    """Runs of one workload share its scenario; tiles of dozens of runs are a table of their own elsewhere."""
    first, second = report(2).sources
    sources = [first._replace(tiles=()), second._replace(tiles=(), scenario="", environment="")]
    html = webpage.html(replace(report(2), sources=sources), "1")
    assert "numbers" not in re.findall(r'<section id="(\w+)"', html)
    assert html.count('aria-label="Scenario of ') == html.count('aria-label="Environment of ') == 1


def test_without_plotly_there_is_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webpage.util, "find_spec", lambda name: None)
    assert webpage.plotly_script() is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages of one, two and six runs, and one whose library is broken."""
    made: Path = tmp_path_factory.mktemp("pages")
    script = webpage.plotly_script()
    assert script is not None
    for runs, caveats in ((1, 0), (2, 2), (6, 2)):
        (made / f"{runs}.html").write_text(webpage.html(report(runs, caveats), script))
    (made / "broken.html").write_text(webpage.html(report(1), "'no library';"))
    return made


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


def open_page(browser: Any, folder: Path, name: str, width: int = 1280) -> None:
    window(browser, width)
    browser.get((folder / f"{name}.html").as_uri())


def legend_fits(browser: Any, box: Any) -> bool:
    """All of the legend is inside the box and above the first panel."""
    inside = """const [box, legend, panel] = ['.svg-container', '.legend', '.nsewdrag'].map(
        (name) => arguments[0].querySelector(name).getBoundingClientRect());
        return legend.height > 10 && legend.top >= box.top - 1 && legend.right <= box.right + 1
            && legend.bottom <= panel.top"""
    return bool(browser.execute_script(inside, box))


def x_range(browser: Any, box: Any) -> list[float]:
    """What the first panel shows."""
    return list(browser.execute_script("return arguments[0].layout.xaxis.range", box))


def size(span: list[float]) -> float:
    return span[1] - span[0]


@needs_browser
@pytest.mark.parametrize("runs", [1, 2, 6])
def test_numbers_are_there_and_caveats_come_before_figures(browser: Any, folder: Path, runs: int) -> None:
    open_page(browser, folder, str(runs))
    shown = browser.find_elements("css selector", '[data-metric="ttft_s.p99"] .value')
    tiled = runs if runs <= reports.MOST_COLUMNS else 0  # the table has the numbers of more
    assert [element.text for element in shown] == [f"{840 + run} ms" for run in range(tiled)]
    caveats = browser.find_element("id", "caveats")
    assert ("No caveat found." in caveats.text) == (runs == 1)
    assert caveats.rect["y"] < browser.find_element("tag name", "figure").rect["y"]
    assert len(browser.find_elements("tag name", "h1")) == 1
    assert browser.title == "worked_example <i>&"


@needs_browser
@pytest.mark.parametrize(("runs", "width"), [(2, 1280), (2, 390), (6, 390)])
def test_every_chart_draws_inside_its_box_and_the_page_never_scrolls_sideways(
    browser: Any, folder: Path, runs: int, width: int
) -> None:
    open_page(browser, folder, str(runs), width)
    browser.get_log("browser"), requested(browser)
    for chart in report(runs).charts:
        box = show(browser, chart.key)
        assert box.get_attribute("data-state") == "drawn"
        counted = "return arguments[0].querySelectorAll('.main-svg .point path, .js-line, .js-fill, path.point').length"
        assert browser.execute_script(counted, box) > 0
        svg = browser.execute_script(
            "return arguments[0].querySelector('.main-svg').getBoundingClientRect().width", box
        )
        assert svg <= box.rect["width"] + 1
        assert legend_fits(browser, box)
    wide, there = browser.execute_script("const e = document.documentElement; return [e.scrollWidth, e.clientWidth]")
    assert wide <= there
    assert browser.get_log("browser") == []
    assert requested(browser) == []


@needs_browser
def test_opening_asks_for_the_file_and_nothing_else_and_draws_everything(browser: Any, folder: Path) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get("about:blank")
    requested(browser)
    open_page(browser, folder, "6")
    assert requested(browser) == [(folder / "6.html").as_uri()]
    boxes = browser.find_elements("css selector", ".plot")
    WebDriverWait(browser, 30, 0.05).until(lambda _: all(box.get_attribute("data-state") == "drawn" for box in boxes))


@needs_browser
def test_a_drag_zooms_both_lanes_and_a_double_click_resets(browser: Any, folder: Path) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.support.ui import WebDriverWait

    open_page(browser, folder, "2")
    box = show(browser, "lanes")
    before = x_range(browser, box)
    layer = box.find_elements("css selector", ".nsewdrag")[0]
    ActionChains(browser).move_to_element_with_offset(layer, -150, 0).click_and_hold().move_by_offset(
        200, 0
    ).release().perform()
    waiting = WebDriverWait(browser, 30, 0.05)  # on a busy machine the page is late
    waiting.until(lambda _: x_range(browser, box) != before)
    after = x_range(browser, box)
    assert before[0] < after[0] < after[1] < before[1] and size(after) < size(before) / 2
    assert browser.execute_script("return arguments[0].layout.xaxis2.range", box) == pytest.approx(after)

    def reset(_: object) -> bool:
        ActionChains(browser).double_click(layer).perform()  # two clicks that came too slowly are none
        return x_range(browser, box) == pytest.approx(before)

    waiting.until(reset)


@needs_browser
@pytest.mark.parametrize("key", ["lanes", "latencies"])
def test_keys_and_buttons_zoom_round_the_middle_move_and_reset(browser: Any, folder: Path, key: str) -> None:
    """On a logarithmic axis (the first panel of the latencies) likewise, in exponents."""
    from selenium.webdriver import Keys

    open_page(browser, folder, "2")
    box = show(browser, key)
    home = x_range(browser, box)
    box.send_keys("+")
    half = x_range(browser, box)
    assert (size(half), sum(half)) == pytest.approx((size(home) / 2, sum(home)))
    box.send_keys(Keys.ARROW_RIGHT)
    moved = x_range(browser, box)
    assert moved == pytest.approx([end + 0.2 * size(half) for end in half])
    box.send_keys(Keys.ARROW_LEFT)
    assert x_range(browser, box) == pytest.approx(half)
    box.send_keys("-")
    assert x_range(browser, box) == pytest.approx(home)
    figure = box.find_element("xpath", "./ancestor::figure")
    figure.find_element("css selector", "button[aria-label='Zoom in']").click()
    assert size(x_range(browser, box)) == pytest.approx(size(home) / 2)
    box.send_keys("0")
    assert x_range(browser, box) == pytest.approx(home)


@needs_browser
def test_tab_reaches_the_skip_link_first_and_then_every_chart(browser: Any, folder: Path) -> None:
    from selenium.webdriver import ActionChains, Keys

    open_page(browser, folder, "2")
    active = "const e = document.activeElement; return [e.className, e.closest('figure')?.id ?? '', e.role ?? '']"
    charts = [f"chart-{chart.key}" for chart in report(2).charts]
    seen: list[list[str]] = []
    while len(seen) < 100 and (not seen or seen[-1][:2] != ["plot", charts[-1]]):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        name, figure, role = browser.execute_script(active)
        seen.append([name.split()[0] if name else "", figure, role])
    assert seen[0][0] == "skip"
    assert [figure for name, figure, role in seen if (name, role) == ("plot", "group")] == charts


@needs_browser
def test_details_open_by_keyboard_and_commands_are_copied(browser: Any, folder: Path) -> None:
    from selenium.webdriver import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    open_page(browser, folder, "1")
    summary = browser.find_element("css selector", "#scenarios summary")
    summary.send_keys(Keys.ENTER)
    assert "</script><b>&" in browser.find_element("css selector", "#scenarios pre").text
    button = browser.find_element("css selector", "#commands button")
    button.send_keys(Keys.ENTER)
    WebDriverWait(browser, 10, 0.05).until(lambda _: button.text in {"Copied", "Selected"})


@needs_browser
def test_a_chart_that_cannot_be_drawn_says_why(browser: Any, folder: Path) -> None:
    open_page(browser, folder, "broken")
    box = show(browser, "lanes")
    assert "cannot be drawn: the drawing library did not start" in box.text
    assert "figures/lanes.png" in box.text


@needs_browser
def test_a_window_that_becomes_narrow_puts_panels_one_below_the_other(browser: Any, folder: Path) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    open_page(browser, folder, "2")
    box = show(browser, "latencies")
    columns = "return new Set([...arguments[0].querySelectorAll('.nsewdrag')].map((e) => e.getAttribute('x'))).size"
    assert browser.execute_script(columns, box) == 2
    window(browser, 390)
    WebDriverWait(browser, 10, 0.05).until(lambda _: browser.execute_script(columns, box) == 1)
