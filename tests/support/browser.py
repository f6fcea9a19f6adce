"""A headless Chromium for tests, and a report with charts of every kind to show in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbsim.draw.chart import (
    BLACK,
    BLUE,
    LANE_STYLES,
    ORANGE,
    RED,
    Area,
    Bars,
    Chart,
    Edge,
    Level,
    Line,
    Panel,
    Points,
    Spans,
    Style,
    series,
)
from cbsim.draw.report import Caveat, Report, Source, Table, Tile

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "about:blank"),
)


BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def missing() -> str:
    """What a browser test lacks here, or "" if nothing."""
    from importlib.util import find_spec

    for module in ("selenium", "plotly"):
        if find_spec(module) is None:
            return f"{module} is not installed"
    if not _program():
        return f"{BROWSERS[0]} is not installed"
    return "" if shutil.which("chromedriver") else "chromedriver is not installed"


def _program() -> str:
    return next(filter(None, map(shutil.which, BROWSERS)), "")


needs_browser = pytest.mark.skipif(bool(missing()), reason=missing() or "none")


@contextmanager
def chromium(profile: Path) -> Iterator[Any]:
    """A browser with a profile of its own that keeps its console and every request it makes."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = _program()
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))
    try:
        driver.set_script_timeout(60)
        driver.get("about:blank")
        yield driver
    finally:
        driver.quit()


def window(driver: Any, width: int, height: int = 900) -> None:
    """The page, not the frame, gets this size."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def show(browser: Any, key: str) -> Any:
    """Scroll to a chart and wait until it is drawn, or failed."""
    from selenium.webdriver.support.ui import WebDriverWait

    box = browser.find_element("css selector", f"#chart-{key} .plot")
    browser.execute_script("document.documentElement.style.scrollBehavior = 'auto'; arguments[0].scrollIntoView()", box)
    WebDriverWait(browser, 30, 0.05).until(lambda _: box.get_attribute("data-state") in ("drawn", "failed"))
    return box


def requested(driver: Any) -> list[str]:
    """The addresses asked for since the last call, but for the browser's own start page."""
    events = (json.loads(entry["message"])["message"] for entry in driver.get_log("performance"))
    urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [url for url in urls if not url.startswith(("chrome://", "chrome-untrusted://"))]


LOOPS = ("sync", "async")


def lanes() -> Chart:
    """Two loops, one above the other on one axis, with events."""
    panels = []
    for loop, period in (("sync", 33.0), ("async", 29.0)):
        start = np.arange(7) * period
        marks: list[Any] = []
        for name, row, offset, size in (
            *(("schedule", 0, 0.0, 2.0), ("prepare", 0, 2.0, 1.5), ("launch", 0, 3.5, 0.5)),
            *(("await", 0, 4.0, period - 6), ("update", 0, period - 2, 2.0)),
            *(("h2d", 1, 4.0, 0.05), ("compute", 2, 4.1, 24.0), ("d2h", 3, 28.2, 0.05)),
        ):
            texts = [f"step {step} {name}" for step in range(7)]
            labels = [f"step {step}" for step in range(7)] if name == "compute" else ()
            ends = start + offset + size
            marks.append(
                Spans(name, np.full(7, row), start + offset, ends, LANE_STYLES[name], texts=texts, labels=labels)
            )
        idle = Spans("idle", np.full(6, 2), start[:-1] + 28.1, start[1:] + 4.1, LANE_STYLES["idle"], hatched=True)
        copied = Points("D2H done", start + 28.25, np.full(7, 3.0), Style(BLACK, "solid", "diamond"))
        rows = ("CPU", "H2D", "compute", "D2H")
        panels.append(Panel((*marks, idle, copied), "ms since the first step shown", title=loop, rows=rows))
    return Chart("lanes", "CPU and GPU lanes", "Seven steps in the middle of each run. Hatched: idle.", panels, 1, True)


def tokens() -> Chart:
    x = np.arange(400.0)
    prefill, decode = 200 + 150 * np.sin(x / 20), np.full(400, 64.0)
    marks = (
        Area("prefill", x, decode, decode + prefill, Style(ORANGE), step=True),
        Area("decode", x, np.zeros(400), decode, Style(BLUE), step=True),
        Level("budget", 512.0, Style(BLACK, "dashed")),
        Edge("window", 120.0, Style(RED, "dotted")),
    )
    gap = Line("KV use", x, np.where((x > 100) & (x < 130), np.nan, 40 + x / 10), Style(BLUE))
    panels = (Panel(marks, "time (s)", "tokens a step", "tokens"), Panel((gap,), "time (s)", "% of blocks", "blocks"))
    return Chart("tokens", "Tokens a step", "Prefill above decode.", panels, 1, True)


def latencies() -> Chart:
    """Distributions of two runs, four panels in two columns, one logarithmic."""
    q = np.linspace(0, 100, 101)
    panels = [
        Panel(
            [Line(loop, (1 + index / 5) * np.exp(q / 30) * 10, q, series(index)) for index, loop in enumerate(LOOPS)],
            f"{name} (ms)",
            "% of requests",
            name,
            x_log=name == "TTFT",
            y_range=(0.0, 100.0),
        )
        for name in ("TTFT", "TPOT", "ITL", "E2E")
    ]
    return Chart("latencies", "Latencies", "Share of requests that took at most so long.", panels, columns=2)


def costs() -> Chart:
    names = ("vllm, static batches", "vllm, continuous", "transformers, chunked prefill")
    bars = [
        Bars(loop, np.arange(3), np.array([0.9, 0.4, 0.6]) - 0.1 * index, series(index), labels=("a", "b", "c"))
        for index, loop in enumerate(LOOPS)
    ]
    pareto = Points("runs", np.array([10.0, 20, 40]), np.array([300.0, 200, 90]), series(2), names, names)
    panels = (Panel(bars, "", "USD", "cost", categories=names), Panel((pareto,), "tokens/s/user", "tokens/s/GPU"))
    return Chart("costs", "Cost & <b>throughput</b>", "No range is drawn: one run each.", panels, columns=2)


def timeline() -> Chart:
    start = np.arange(120) * 0.2
    queue = Spans("queue", np.arange(120), start, start + 1, Style("#EEEEEE"))
    decode = Spans("decode", np.arange(120), start + 1, start + 9, Style(BLUE), texts=[f"r{i}" for i in range(120)])
    return Chart("timeline", "Requests", "Every request.", (Panel((queue, decode), "s", "request"),))


def source(index: int, command: str = "python -m cbsim run worked_example --seed 0") -> Source:
    tiles = (
        Tile("ttft_s.p50", "TTFT p50", f"{120 + index} ms"),
        Tile("ttft_s.p99", "TTFT p99", f"{840 + index} ms", "of 100, needs 368"),
        Tile("tpot_s.p50", "TPOT p50", f"{29.5 + index} ms"),
        Tile("output_tokens_per_s", "output tokens/s", f"1 {234 + index}"),
        Tile("gpu_active", "GPU active", f"{76 + index} %"),
    )
    label = f"worked_example {LOOPS[index % 2]} output_tokens={50 + index}"
    text = "name: worked_example\nworkload:\n" + "".join(f"  field_{i}: {i}  # </script><b>&\n" for i in range(30))
    return Source(label, f"20260101T000000Z-worked_example-{index}", "simulated", tiles, text, "{}", command)


def report(runs: int, caveats: int = 2) -> Report:
    """A report of so many runs with charts of every kind, and texts that try to be HTML."""
    rows = [[f"metric {i}", "120.0 ms", "131.0 ms", "+9.2 % (+4.1 to +14.3)", "yes"] for i in range(6)]
    return Report(
        title="worked_example <i>&",
        question="Does the loop matter? <script>alert(1)</script>",
        sources=[source(index) for index in range(runs)],
        caveats=[Caveat("few_samples", source(0).label, "100 requests are too few for p99.") for _ in range(caveats)],
        findings=["TPOT p50 is 9.2 % higher in B.", "GPU active is 5 points lower."],
        tables=[Table("Differences", ("metric", "A", "B", "change, 95 % interval", "seen"), rows, "B against A.")],
        charts=[lanes(), tokens(), latencies(), costs(), timeline()],
        command="python -m analysis report runs/a runs/b --out reports/example",
    )
