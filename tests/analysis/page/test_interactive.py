"""Charts as plotly.js gets them: every number of every mark arrives, and nothing that JSON or HTML trips over."""

from __future__ import annotations

import base64
import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.browser import costs, lanes, latencies, tokens

from analysis.page import interactive
from cbsim.draw import render
from cbsim.draw.chart import Area, Bars, Cells, Chart, Edge, Level, Line, Panel, Points, Spans, Style, Whiskers

PLAIN = Style("#0072B2", "dashed", "triangle")
X = np.array([1.0, 2.0, 3.0])


def drawn(*marks: Any, **panel: Any) -> dict[str, Any]:
    return interactive.figure(Chart("key", "title", "says", [Panel(marks, "x", **panel)]))


def test_a_line_keeps_its_gap_its_steps_and_its_dash() -> None:
    trace = drawn(Line("a", X, np.array([1.0, np.nan, 3.0]), PLAIN, step=True))["data"][0]
    assert (trace["x"], trace["y"]) == ([1, 2, 3], [1, None, 3])
    assert (trace["line"]["shape"], trace["line"]["color"], trace["line"]["dash"]) == ("hv", "#0072B2", "7px,3px")
    assert trace["connectgaps"] is False


def test_an_area_is_filled_from_its_upper_edge_down_to_the_lower_one() -> None:
    low, high = drawn(Area("a", X, X, X + 2, PLAIN))["data"]
    assert (low["y"], high["y"], high["fill"]) == ([1, 2, 3], [3, 4, 5], "tonexty")
    assert (low["showlegend"], high["showlegend"], high["customdata"]) == (False, True, [1, 2, 3])


def test_an_area_with_a_gap_is_two_areas_with_one_name() -> None:
    x = np.arange(5.0)
    traces = drawn(Area("a", x, np.zeros(5), np.array([1, 2, np.nan, 4, 5]), PLAIN))["data"]
    assert [trace["x"] for trace in traces] == [[0, 1], [0, 1], [3, 4], [3, 4]]
    assert [trace["showlegend"] for trace in traces] == [False, True, False, False]


def test_what_nobody_can_see_is_no_entry_of_the_legend() -> None:
    """An area thinner than a pixel, a line and points without a value; in the page as in the picture."""
    x, none = np.arange(3.0), np.full(3, np.nan)
    marks = [Area("used", x, np.zeros(3), np.full(3, 900.0), PLAIN), Area("cached", x, np.zeros(3), np.ones(3), PLAIN)]
    marks += [Line("failed", x, none, PLAIN), Points("failed", x, none, PLAIN), Line("mean", x, x, PLAIN)]
    assert {trace["name"] for trace in drawn(*marks)["data"]} == {"used", "mean"}
    (legend,) = render.figure(Chart("key", "title", "says", [Panel(marks, "x")])).legends
    assert [entry.get_text() for entry in legend.get_texts()] == ["used", "mean"]


def test_spans_are_bars_that_start_where_they_start() -> None:
    mark = Spans("a", np.array([0, 2]), np.array([1.0, 5]), np.array([2.5, 9]), PLAIN, True, ("p", "q"), ("1", "2"))
    made = drawn(mark, rows=("CPU", "H2D", "compute"))
    trace = made["data"][0]
    assert (trace["base"], trace["x"], trace["y"]) == ([1, 5], [1.5, 4], [0, 2])
    assert (trace["hovertext"], trace["text"]) == (["p", "q"], ["1", "2"])
    assert trace["marker"]["pattern"]["shape"] == "/"
    axis = made["layout"]["yaxis"]
    assert (axis["ticktext"], axis["range"], axis["fixedrange"]) == (["CPU", "H2D", "compute"], [2.5, -0.5], True)


def test_what_is_thinner_than_a_pixel_has_no_outline() -> None:
    """plotly.js widens a bar to a pixel only if it has none."""
    start = np.arange(10.0)
    thin, wide = (drawn(Spans("a", np.zeros(10, int), start, start + d, PLAIN))["data"][0] for d in (1e-4, 0.5))
    assert thin["marker"]["line"]["width"] == 0 < wide["marker"]["line"]["width"]


def test_points_have_markers_hover_texts_and_labels() -> None:
    trace = drawn(Points("a", X, X * 2, PLAIN, ("p", "q", "r"), ("1", "2", "3")))["data"][0]
    assert (trace["y"], trace["marker"]["symbol"], trace["mode"]) == ([2, 4, 6], "triangle-up", "markers+text")
    assert (trace["hovertext"], trace["text"]) == (["p", "q", "r"], ["1", "2", "3"])
    assert trace["textposition"][0] == "top right" and trace["textposition"][2] == "top left"


def test_bars_stand_side_by_side_over_their_categories_with_different_hatches() -> None:
    place = np.array([0, 1])
    marks = [Bars(name, place, np.array([1.0, 2]) * scale, PLAIN) for scale, name in ((1, "a"), (2, "b"))]
    made = drawn(*marks, categories=("left", "right"))
    assert [trace["y"] for trace in made["data"]] == [[1, 2], [2, 4]]
    assert made["layout"]["barmode"] == "group"
    assert len({trace["marker"]["pattern"]["shape"] for trace in made["data"]}) == 2
    assert made["layout"]["xaxis"]["ticktext"] == ["left", "right"] and made["layout"]["xaxis"]["fixedrange"]


def test_whiskers_are_errors_round_their_middle_upright_or_lying() -> None:
    upright, lying = (Whiskers("", X, X - 1, X + 2, PLAIN, level) for level in (False, True))
    trace = drawn(upright)["data"][0]
    assert (trace["x"], trace["y"], trace["error_y"]["array"]) == ([1, 2, 3], [1.5, 2.5, 3.5], [1.5, 1.5, 1.5])
    assert trace["hoverinfo"] == "skip" and trace["marker"]["opacity"] == 0 and not trace["showlegend"]
    trace = drawn(lying)["data"][0]
    assert (trace["x"], trace["y"], trace["error_x"]["array"]) == ([1.5, 2.5, 3.5], [1, 2, 3], [1.5, 1.5, 1.5])


def test_cells_have_a_scale_of_colours_that_says_their_values() -> None:
    values, texts = np.array([[1.0, 10.0], [np.nan, 100.0]]), [["a", "b"], ["", "d"]]
    for log, shares, ends in (
        (True, [[0, 0.5], [None, 1]], "1 10 100"),
        (False, [[0, 1 / 11], [None, 1]], "1 50.5 100"),
    ):
        made = drawn(Cells("", values, 1.0, 100.0, PLAIN, texts, unit="ms", log=log), rows="yz", categories="uv")
        trace = made["data"][0]
        assert [cell for row in trace["z"] for cell in row] == [
            s if s is None else pytest.approx(s) for r in shares for s in r
        ]
        assert trace["colorbar"]["ticktext"][::2] == ends.split() and trace["colorbar"]["tickvals"][::2] == [0, 0.5, 1]
        assert trace["hovertext"] == texts and trace["colorbar"]["title"]["text"] == "ms"
    assert made["layout"]["yaxis"]["ticktext"] == ["y", "z"] and made["layout"]["xaxis"]["ticktext"] == ["u", "v"]


def test_levels_and_edges_cross_their_own_panel() -> None:
    panels = [Panel((), "x"), Panel((Level("l", 5.0, PLAIN), Edge("e", 7.0, PLAIN)), "x")]
    made = interactive.figure(Chart("k", "t", "s", panels))
    level, edge = made["layout"]["shapes"]
    assert (level["y0"], level["y1"], level["yref"], level["xref"]) == (5, 5, "y2", "x2 domain")
    assert (edge["x0"], edge["x1"], edge["xref"], edge["yref"]) == (7, 7, "x2", "y2 domain")
    assert level["showlegend"] and level["line"]["dash"] == "7px,3px"
    assert made["layout"]["yaxis2"]["autorangeoptions"]["include"][0] >= 5


def test_ranges_of_logarithmic_axes_are_exponents_and_no_range_is_made_of_what_has_no_logarithm() -> None:
    line = Line("a", X, X, PLAIN)
    layout = drawn(line, x_log=True, x_range=(1.0, 100.0), y_range=(0.0, 3.0))["layout"]
    assert (layout["xaxis"]["type"], layout["xaxis"]["range"]) == ("log", [0, 2])
    assert layout["yaxis"]["range"] == [0, 3]
    assert "range" not in drawn(line, x_log=True, x_range=(0.0, 10.0))["layout"]["xaxis"]
    assert drawn(line)["layout"]["yaxis"]["rangemode"] == "tozero"


@pytest.mark.parametrize("chart", [lanes(), tokens(), latencies(), costs()], ids=lambda chart: chart.key)
@pytest.mark.parametrize("layout", ["layout", "narrow"])
def test_panels_of_the_grid_do_not_overlap_and_names_are_listed_once(chart: Chart, layout: str) -> None:
    made = interactive.figure(chart)
    boxes = []
    for number in range(1, len(chart.panels) + 1):
        end = str(number) if number > 1 else ""
        boxes.append([made[layout][f"{letter}axis{end}"]["domain"] for letter in "xy"])
    for (x, y), (other_x, other_y) in itertools.combinations(boxes, 2):
        assert x[1] <= other_x[0] or other_x[1] <= x[0] or y[1] <= other_y[0] or other_y[1] <= y[0]
    assert all(0 <= edge <= 1 + 1e-9 for box in boxes for pair in box for edge in pair)
    entries = [entry["name"] for entry in (*made["data"], *made["layout"]["shapes"]) if entry["showlegend"]]
    assert sorted(entries) == sorted({mark.name for panel in chart.panels for mark in panel.marks})


def test_panels_that_share_x_zoom_together_and_only_the_lowest_says_what_it_is() -> None:
    layout = interactive.figure(lanes())["layout"]
    assert layout["xaxis2"]["matches"] == "x"
    assert layout["xaxis"]["showticklabels"] is False and layout["xaxis2"]["title"]["text"].startswith("ms")
    assert "matches" not in interactive.figure(latencies())["layout"]["xaxis2"]


def test_names_and_texts_are_shown_as_they_are() -> None:
    """plotly.js reads some HTML, and %{...} in what is shown on hovering."""
    trace = drawn(Points("<b>%{x}", X, X, PLAIN, ("a<br>", "b\nc", "&")))["data"][0]
    assert trace["name"] == "&lt;b&gt;&#37;{x}"
    assert trace["hovertext"] == ["a&lt;br&gt;", "b<br>c", "&amp;"]


FLOATS = st.floats(-1e300, 1e300) | st.sampled_from([math.nan, math.inf, -math.inf])
STYLES = st.builds(
    Style,
    st.sampled_from(["#0072B2", "#EEEEEE", "#FBE3D6"]),
    st.sampled_from(sorted(interactive.DASHES)),
    st.sampled_from(sorted(interactive.MARKERS)),
)


@st.composite
def marks(draw: st.DrawFn) -> Any:
    count = draw(st.integers(0, 8) | st.just(interactive.PLAIN_AT_MOST + 1))
    one, two, three = (np.resize(draw(st.lists(FLOATS, min_size=1, max_size=8)), count) for _ in range(3))
    name, style, place = draw(st.text(max_size=5)), draw(STYLES), np.arange(count)
    texts = draw(st.just(()) | st.just([name] * count))
    made: list[Any] = [
        *(Line(name, one, two, style), Area(name, one, two, three, style), Points(name, one, two, style, texts, texts)),
        *(Spans(name, place, one, two, style, texts=texts, labels=texts), Bars(name, place, one, style, texts)),
        *(Level(name, draw(FLOATS), style), Edge(name, draw(FLOATS), style)),
    ]
    return draw(st.sampled_from(made))


@given(st.lists(st.lists(marks(), max_size=3), min_size=1, max_size=5), st.integers(1, 3), st.booleans(), st.booleans())
def test_any_chart_is_strict_json_and_no_number_of_it_is_lost(
    panels: list[list[Any]], columns: int, shared: bool, log: bool
) -> None:
    chart = Chart("k", "t", "s", [Panel(marks, "x", y_log=log) for marks in panels], columns, shared)
    with np.errstate(invalid="ignore", over="ignore"):  # inf - inf
        made = interactive.figure(chart)
    assert json.loads(json.dumps(made, allow_nan=False)) == json.loads(json.dumps(made))
    lines = [
        mark for marks in panels for mark in marks if isinstance(mark, Line | Points) and np.isfinite(mark.y).any()
    ]
    traces = [trace for trace in made["data"] if trace["type"] == "scatter"]
    sent = [trace for trace in traces if "customdata" not in trace and trace.get("hoverinfo") != "skip"]
    for mark, trace in zip(lines, sent, strict=True):
        values = trace["y"]
        if isinstance(values, dict):
            values = np.frombuffer(base64.b64decode(values["bdata"]), "<f8").tolist()
        expected = mark.y.tolist()
        assert [v for v in values if v is not None and math.isfinite(v)] == [v for v in expected if math.isfinite(v)]
        assert len(values) == len(expected)
