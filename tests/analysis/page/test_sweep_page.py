"""The page of a sweep in a real browser: what is chosen is drawn, with the numbers of the analysis, and nothing is left
out in silence. Its command: files, statuses, one line for a mistake.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.browser import chromium, needs_browser, requested, show, window
from support.sweep_tables import RATE, REASON, rates, row, written

from analysis.cli.parser import main
from analysis.figures import sweeps
from analysis.page import sweep_report, webpage
from analysis.statistics import sweep_table
from cbsim.cli.parser import main as cbsim_main
from cbsim.metrics import checks

TITLE, LIMIT = "Rates <i>& loops", "ttft.p99<=350ms"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("sweep") / "rates.parquet", rates())


@pytest.fixture(scope="module")
def out(file: Path) -> Path:
    """The report of the table, where it goes by itself."""
    assert main(["report", str(file), "--check", LIMIT, "--title", TITLE]) == 0
    return file.with_suffix("")


def test_the_report_has_counts_reasons_the_best_places_and_figures(out: Path) -> None:
    text = (out / "report.md").read_text()
    assert "- 48 points at 16 places: 44 done, 3 failed, 1 missing." in text
    reason = REASON.replace("<", "&lt;").replace(">", "&gt;").replace("|", "\\|")
    assert f"| {reason} | failed | 3 | scheduler.name = sarathi; {RATE} = 16; loop = sync |" in text
    assert f"| not run yet | missing | 1 | scheduler.name = vllm; {RATE} = 16; loop = sync |" in text
    assert re.search(r"- Least TTFT p99 within the SLO: \S+ ms ± \S+ % at .*rate_per_s = 1, async\.", text)
    assert "TTFT p99 is of only 40 requests at a place; it needs 368." in text
    figures = re.findall(r"\]\(figures/(.+)\.png\)", text)
    assert figures == ["curves", "heat_map", "pareto"]
    assert all((out / "figures" / f"{name}.png").is_file() for name in figures)
    facts = json.loads((out / "report.json").read_text())["data"]
    assert (facts["points"], facts["done"], facts["failed"], facts["missing"]) == (48, 44, 3, 1)


def test_the_command_in_the_report_makes_it_again(out: Path, file: Path) -> None:
    """To the byte, whatever its name and its options are."""
    import shlex

    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    (command,) = re.findall(r"```sh\n(.*)\n```", (out / "report.md").read_text())
    assert main(shlex.split(command)[3:]) == 0
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--metric", "ttft.p999"], "--metric ttft.p999: no point has a metric 'ttft.p999'; did you mean"),
        (["--metric", "preemption"], "did you mean preemptions?"),
        (["--x", "rate_per_s"], f"no such field; did you mean {RATE}?"),
        (["--check", "ttft.p99<=2"], None),
        (["--check", "ttft.p99<=2%"], "--check 'ttft.p99<=2%': unit '%', ttft.p99 takes"),
        (["--check", "gpu_active>=50%"], "--check 'gpu_active>=50%': no point has a metric 'gpu_active'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str | None
) -> None:
    status = main(["report", str(file), "--out", str(tmp_path / "r"), *words])
    err = capsys.readouterr().err
    assert status == (2 if said else 0)
    assert len(err.splitlines()) == (1 if said else 0) and (said or "") in err
    assert (tmp_path / "r").exists() == (said is None)


def test_a_table_of_one_point_has_a_report(tmp_path: Path) -> None:
    path = written(tmp_path / "one.parquet", [row({}, preemptions=3.0, steps=10.0)])
    assert main(["report", str(path)]) == 0
    text = (tmp_path / "one" / "report.md").read_text()
    assert "1 points at 1 places: 1 done." in text and "differences may be chance" in text


def test_numbered_points_are_listed_with_what_they_set(tmp_path: Path) -> None:
    """With their metrics, or alone where there are too many places."""
    for beside in (1, 5):
        points = [{"x": at, "y": at * at % 31, "z": z} for at in range(30) for z in range(beside)]
        path = written(tmp_path / f"t{beside}.parquet", [row(point, preemptions=3.0, steps=1.0) for point in points])
        assert main(["report", str(path)]) == 0
        text = (tmp_path / f"t{beside}" / "report.md").read_text()
        assert "Points are numbered as in the table." in text
        assert ("| 30: x = 29, y = 4 |" in text) and ("## Points" in text) == (beside == 5)


def test_the_report_says_of_what_the_sweep_is_and_how_it_was_made(tmp_path: Path) -> None:
    """Model and GPU in the title, the workload that all points share, a scenario, and the command of the sweep. A share
    that is 100 % at every point has a sentence in place of a panel.
    """
    (file := tmp_path / "mine.yaml").write_text("scenario: tiny_cpu\naxes: {workload.requests: [2, 3]}\nloop: [sync]\n")
    assert cbsim_main(["sweep", str(file), "--store", str(tmp_path), "--jobs", "1", "--quiet"]) == 0
    table = sweep_table.read(tmp_path / "mine.parquet")
    assert table.command == f"python -m cbsim sweep {file} --store {tmp_path} --jobs 1 --quiet"
    active = np.full(len(table), 0.99999)
    for metrics, whole in ((table.metrics, False), ({**table.metrics, "gpu_active": active}, True)):
        changed = replace(table, metrics=metrics)
        shown = sweep_report.look(changed)
        made = sweep_report.build(changed, shown, "again")
        assert made.title == "Sweep mine, Tiny on one core of a laptop"
        (about,) = [
            line for line in made.findings if line.startswith("Tiny on one core of a laptop; workload: kind synthetic")
        ]
        assert "requests 2" not in about and "output_tokens" in about
        (source,) = made.sources
        assert source.command == table.command and "name: tiny_cpu" in source.scenario
        assert ("GPU active: 100 % at every point, so there is no figure of it." in made.findings) == whole
        assert ("gpu_active" in shown.metrics) == (not whole)


def test_metrics_and_limits_are_what_is_drawn_first(file: Path) -> None:
    table = sweep_table.read(file)
    shown = sweep_report.look(table, ["tpot.mean", "preemptions"], [LIMIT], "loop")
    assert shown.metrics == ["tpot_s.mean", "preemptions"]
    assert shown.view.x is not None and shown.view.x.name == "loop"
    assert sweep_report.look(table, slo=[LIMIT]).metrics[0] == "ttft_s.p99"


# ---------------------------------------------------------------------------------------------------------------------
# In a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def page(browser: Any, out: Path) -> Any:
    """A browser with the page open; opened again only if it shows another."""
    if browser.current_url != (out / "report.html").as_uri():
        opened(browser, out)
    return browser


def opened(browser: Any, out: Path, width: int = 1280) -> None:
    window(browser, width)
    browser.get((out / "report.html").as_uri())


START = {  # what the page shows at first
    "curves": {"metric": "ttft_s.p99", "x": 1, "series": "others"},
    "heat_map": {"metric": "ttft_s.p99", "x": 1, "y": 0, "axis_2": 0},
    "pareto": {
        "across": "output_tokens_per_s_per_user",
        "up": "output_tokens_per_s_per_gpu",
        "colour": 0,
        "filter": "none",
    }
    | {"axis_0": "all", "axis_1": "all", "axis_2": "all", "slo0": True},
}


def choose(browser: Any, figure: str, **choices: object) -> dict[str, Any]:
    """Choose in the controls of a figure, all else as at first; what is drawn then."""
    box = show(browser, figure)
    for name, value in (START[figure] | choices).items():
        script = """const input = arguments[0].closest('figure').querySelector('form').elements[arguments[1]];
            if (!input && !arguments[3]) return; // an axis that is used otherwise
            if (input.type === 'checkbox') input.checked = arguments[2]; else input.value = arguments[2];
            if (input.value === '') throw new Error(`${arguments[1]} has no such value`);
            input.dispatchEvent(new Event('change'))"""
        browser.execute_script(script, box, name.replace("axis_", "axis-"), value, name in choices)
    drawn = """const {data, layout} = arguments[0];
        const says = arguments[0].closest('figure').querySelector('figcaption').textContent;
        const notes = layout.annotations.map((note) => note.text), shapes = layout.shapes;
        const [x, y] = [layout.xaxis.title.text, layout.yaxis.title.text];
        return JSON.parse(JSON.stringify({data, shapes, notes, says, x, y}))"""
    return dict(browser.execute_script(drawn, box))


@needs_browser
def test_what_is_drawn_first_has_the_means_and_intervals_of_the_analysis(browser: Any, out: Path, file: Path) -> None:
    """Two implementations, one definition: Student's t over the replicates of a place."""
    opened(browser, out)
    drawn = choose(browser, "curves")
    table = sweep_table.read(file)
    made = sweep_table.places(table)
    means = made.means(table.metrics["ttft_s.p99"])
    assert [trace["name"] for trace in drawn["data"]] == [
        "vllm, sync",
        "vllm, async",
        "sarathi, sync",
        "sarathi, async",
    ]
    for code, trace in enumerate(drawn["data"]):
        own = [i for i in range(len(made)) if made.codes[i, [0, 2]].tolist() == [code // 2, code % 2]]
        own = [i for i in own if means.n[i]]
        assert trace["x"] == table.axes[1].numbers[made.codes[own, 1]].tolist()
        assert trace["y"] == pytest.approx(means.mean[own], rel=1e-5)
        above = [high - mean for high, mean in zip(means.high[own], means.mean[own], strict=True)]
        assert trace["error_y"]["array"] == pytest.approx(above, rel=1e-4)
    assert drawn["y"] == "TTFT p99 (s)" and drawn["x"] == RATE
    assert "1 places have no point that is done" in drawn["says"]


@needs_browser
def test_the_limit_is_drawn_where_the_metric_has_one(page: Any) -> None:
    first = choose(page, "curves")
    (line,) = first["shapes"]
    assert line["y0"] == line["y1"] == pytest.approx(0.35) and first["notes"] == ["SLO ttft.p99&lt;=350ms"]
    assert choose(page, "curves", metric="tpot_s.mean")["shapes"] == []
    far = choose(page, "curves", metric="ttft_s.p99", x=0, series=2, axis_1=0)
    assert far["shapes"] == [] and far["notes"] == ["SLO ttft.p99&lt;=350ms: beyond the edge"]


@needs_browser
def test_axes_metric_and_what_is_fixed_or_averaged_change_the_drawing(page: Any, file: Path) -> None:
    drawn = choose(page, "curves", metric="output_tokens_per_s", x=2, series=1, axis_0=1)
    assert (drawn["x"], drawn["y"]) == ("loop", "output tokens/s")
    assert [trace["name"] for trace in drawn["data"]] == [f"rate_per_s = {rate}" for rate in (1, 2, 4, 16)]
    assert drawn["data"][3]["x"] == [1]  # sarathi's sync loop failed at 16 a second
    table = sweep_table.read(file)
    values, at = table.metrics["output_tokens_per_s"], [axis.codes for axis in table.axes]
    whole = choose(page, "curves", metric="output_tokens_per_s", x=2, series=1, axis_0="mean")
    for rate in range(3):
        seeds = [values[(at[1] == rate) & (at[2] == 0) & (table.seeds == seed)].mean() for seed in range(3)]
        half = 4.302653 * np.std(seeds, ddof=1) / np.sqrt(3)  # of each replicate's mean over both schedulers
        assert whole["data"][rate]["y"][0] == pytest.approx(np.mean(seeds), rel=1e-5)
        assert whole["data"][rate]["error_y"]["array"][0] == pytest.approx(half, rel=1e-4)
    assert "Averaged over: scheduler.name." in whole["says"]
    assert [trace["name"] for trace in choose(page, "curves", series="none", axis_0=0, axis_2=0)["data"]] == [
        "TTFT p99"
    ]


@needs_browser
def test_a_hover_says_the_settings_the_value_its_interval_and_how_many_runs(page: Any) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.support.ui import WebDriverWait

    choose(page, "curves")
    box = show(page, "curves")
    ActionChains(page).move_to_element(box.find_elements("css selector", ".points path")[3]).perform()
    find = "return [...arguments[0].querySelectorAll('.hovertext')].map((e) => e.textContent).join()"
    text = WebDriverWait(page, 10, 0.05).until(lambda _: page.execute_script(find, box))
    for words in (
        "scheduler.name = vllm",
        f"{RATE} = 16",
        "loop = sync",
        "TTFT p99: 2",
        "(95 % interval ",
        "n = 2 replicates",
    ):
        assert words in text
    assert "2 of 3 points are done" in text


@needs_browser
def test_cells_follow_both_axes_and_cross_what_misses_the_limit(page: Any) -> None:
    cells, crosses = choose(page, "heat_map")["data"]
    assert np.array(cells["z"], dtype=float).shape == (2, 4) and cells["z"][1][3] is None
    assert len(crosses["x"]) == sum(value > 0.35 for line in cells["z"] for value in line if value is not None)
    turned = choose(page, "heat_map", x=2, y=1, axis_0=0)
    assert np.array(turned["data"][0]["z"], dtype=float).shape == (4, 2) and (turned["x"], turned["y"]) == (
        "loop",
        RATE,
    )
    assert "n = 3 replicates" in turned["data"][0]["hovertext"][0][0]
    assert len(choose(page, "heat_map", metric="tpot_s.mean")["data"]) == 1


@needs_browser
def test_the_frontier_is_that_of_the_analysis_with_and_without_the_limit(page: Any, file: Path) -> None:
    table = sweep_table.read(file)
    made, pair = sweep_table.places(table), ("output_tokens_per_s_per_user", "output_tokens_per_s_per_gpu")
    for limits in ([checks.parse(LIMIT)], []):
        found = sweeps.trade_off(table, made, pair, limits)
        drawn = choose(page, "pareto", slo0=bool(limits))
        line, *others = drawn["data"]
        assert line["x"] == pytest.approx(found.x.mean[found.best], rel=1e-5)
        assert line["y"] == pytest.approx(found.y.mean[found.best], rel=1e-5)
        pale = sum(len(trace["x"]) for trace in others if trace["marker"].get("opacity"))
        assert pale == found.dominated.sum()
        missed = sum(len(trace["x"]) for trace in others if trace["name"] == "misses a limit")
        assert missed == (found.known & ~found.met).sum() and (missed > 0) == bool(limits)
        assert sum(len(trace["x"]) for trace in others) == found.known.sum()  # dominated points are kept


@needs_browser
def test_a_limit_of_the_readers_own_and_metrics_where_less_is_better(page: Any, file: Path) -> None:
    values = sweep_table.read(file).metrics["tpot_s.mean"]
    bound = float(np.nanmedian(values))
    drawn = choose(page, "pareto", slo0=False, across="ttft_s.p99", filter="tpot_s.mean", bound=bound)
    assert "ttft" in drawn["x"].lower() and "less is better" in drawn["x"]
    (missed,) = (trace for trace in drawn["data"] if trace["name"] == "misses a limit")
    table = sweep_table.read(file)
    assert len(missed["x"]) == (sweep_table.places(table).means(values).mean > bound).sum()
    one = choose(page, "pareto", slo0=False, axis_2=1)
    assert sum(len(trace["x"]) for trace in one["data"][1:]) == 8 and "Fixed: async." in one["says"]


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_fetched_nothing_complains_and_the_page_never_scrolls_sideways(
    browser: Any, out: Path, width: int
) -> None:
    browser.get("about:blank")
    browser.get_log("browser"), requested(browser)
    opened(browser, out, width)
    for figure in ("curves", "heat_map", "pareto"):
        assert show(browser, figure).get_attribute("data-state") == "drawn"
    wide, there = browser.execute_script("const e = document.documentElement; return [e.scrollWidth, e.clientWidth]")
    assert wide <= there
    assert browser.get_log("browser") == []
    assert [url for url in requested(browser) if not url.startswith("data:")] == [(out / "report.html").as_uri()]
    assert browser.title == TITLE
    window(browser, 1280)


@needs_browser
def test_a_page_whose_library_does_not_start_says_so_and_names_the_file(
    browser: Any, file: Path, tmp_path: Path
) -> None:
    table = sweep_table.read(file)
    shown = sweep_report.look(table)
    made = replace(sweep_report.build(table, shown, "c"), charts=())
    (tmp_path / "report.html").write_text(webpage.html(made, "1", sweep_report.explorer(table, shown)))
    opened(browser, tmp_path)
    text = show(browser, "pareto").text
    assert "cannot be drawn: the drawing library did not start" in text and "figures/pareto.png" in text


@needs_browser
def test_points_have_numbers_along_the_axis_and_their_settings_in_a_hover(browser: Any, tmp_path: Path) -> None:
    points = [{"x": at, "y": at * at % 31} for at in range(30)]
    path = written(tmp_path / "t.parquet", [row(point, preemptions=3.0, steps=1.0) for point in points])
    assert main(["report", str(path)]) == 0
    opened(browser, tmp_path / "t")
    drawn = "const {data, layout} = arguments[0]; return [data[0].hovertext, layout.xaxis.ticktext, layout.xaxis.title]"
    hovers, ticks, title = browser.execute_script(drawn, show(browser, "curves"))
    assert title["text"] == "point" and ticks == [f"{number + 1}" for number in range(30)]
    assert hovers[29].startswith("point = 30: x = 29, y = 4<br>")


@needs_browser
def test_points_that_are_not_done_are_listed_with_their_reason(page: Any) -> None:
    from selenium.webdriver import Keys

    undone = page.find_element("id", "undone")
    undone.find_element("tag name", "summary").send_keys(Keys.ENTER)
    lines = [line.text for line in undone.find_elements("css selector", "tbody tr")]
    assert lines == ["vllm 16 sync missing not run yet", *[f"sarathi 16 sync failed {REASON}"] * 3]


@needs_browser
def test_controls_work_by_keyboard_and_keep_the_focus(page: Any) -> None:
    from selenium.webdriver import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    choose(page, "curves")
    box = show(page, "curves")
    select = box.find_element("xpath", "./ancestor::figure").find_element("name", "x")
    select.send_keys(Keys.ARROW_DOWN)
    name = "return arguments[0].layout.xaxis.title.text"
    WebDriverWait(page, 10, 0.05).until(lambda _: page.execute_script(name, box) == "loop")
    assert page.switch_to.active_element.get_attribute("name") == "x"
