"""Drawings say what the chart says: equal charts give equal bytes, every text is in the SVG, every mark on the axes."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.collections import PathCollection, PolyCollection

from cbsim.draw import render
from cbsim.draw.chart import SERIES, Area, Bars, Cells, Chart, Edge, Level, Line, Panel, Points, Spans, Whiskers

pytestmark = pytest.mark.usefixtures("drawn")

X = np.linspace(0.0, 4.0, 5)
SPANS = Spans("compute", np.array([0, 2]), np.array([0.0, 1.0]), np.array([1.0, 4.0]), SERIES[1], labels=("a", "b"))
LINES = [
    *(Line("line", X, X**2, SERIES[0]), Area("area", X, X, 2 * X, SERIES[1], step=True)),
    Points("points", X, X, SERIES[2], labels=[f"p{i}" for i in range(5)]),
    *(Level("level", 9.0, SERIES[3]), Edge("edge", 2.0, SERIES[4])),
]
BARS = [
    Bars("left", np.arange(2), np.array([1.0, 2.0]), SERIES[0], labels=("1", "2")),
    Bars("right", np.arange(2), np.array([2.0, 1.0]), SERIES[1]),
]
PANELS = [
    *(Panel(LINES, "time, s", "tokens", "one"), Panel([SPANS], "time, s", rows=("CPU", "H2D", "compute"))),
    Panel(BARS, "", "tokens/s", categories=("sync", "async")),
]
ALL = Chart("all", "Every mark", "Caption.", PANELS)


def test_equal_charts_give_equal_bytes() -> None:
    """A committed figure changes only when what it shows does."""
    assert render.images(ALL, "png", "svg") == [*render.images(ALL, "png"), *render.images(ALL, "svg")]


def test_a_png_has_the_colours_of_most_pixels_and_for_others_the_nearest() -> None:
    """Areas, lines and letters are exact; of more colours than a palette holds, those of the fewest pixels are not."""
    shades, rare = [(i, 255 - i, 255, 255) for i in range(render.COLOURS)], [(9, 246, 254, 255), (200, 55, 253, 255)]
    pixels = np.array([shades, shades, [*rare, *shades[2:]]], np.uint8)
    drawn = np.asarray(render._in_palette(pixels).convert("RGB"))
    assert (drawn[:2] == pixels[:2, :, :3]).all()
    assert drawn[2].tolist() == [list(shades[9][:3]), list(shades[200][:3]), *(list(one[:3]) for one in shades[2:])]


def test_the_texts_are_texts() -> None:
    """An SVG can be searched: title, axes, panels, rows, categories and legend are in it as text."""
    text = render.images(ALL, "svg")[0].decode()
    words = ("Every mark", "time, s", "tokens/s", "one", "CPU", "compute", "async", "level", "points", "right", "p3")
    for word in words:
        assert f">{word}</text>" in text, word


def test_every_mark_is_on_its_axes() -> None:
    first, second, third = render.figure(ALL).axes[:3]
    line = first.lines[0]
    assert np.array_equal(line.get_xdata(), X)
    assert np.array_equal(line.get_ydata(), X**2)
    assert any(isinstance(one, PathCollection) and len(one.get_offsets()) == 5 for one in first.collections)
    (spans,) = [one for one in second.collections if isinstance(one, PolyCollection)]
    corners = [path.get_extents() for path in spans.get_paths()]
    assert [(box.x0, box.x1) for box in corners] == [(0.0, 1.0), (1.0, 4.0)]
    assert [box.height for box in corners] == pytest.approx([0.8, 0.8])
    assert second.get_ylim() == (2.5, -0.5)  # the first row is on top
    assert [bar.get_height() for bar in third.patches] == [1.0, 2.0, 2.0, 1.0]
    assert third.patches[0].get_x() < third.patches[2].get_x() < third.patches[1].get_x()  # side by side


def test_whiskers_reach_from_low_to_high_upright_or_lying() -> None:
    for level in (False, True):
        mark = Whiskers("", X, X - 1, X + 2, SERIES[0], level)
        (bars,) = render.figure(Chart("k", "t", "s", [Panel([mark], "x")])).axes[0].collections
        for at, (start, end) in zip(X.tolist(), bars.get_segments(), strict=True):
            ends = [(at, at - 1), (at, at + 2)]
            assert [tuple(start), tuple(end)] == [pair[::-1] for pair in ends] if level else ends


@pytest.mark.parametrize("log", [False, True])
def test_cells_have_their_numbers_their_order_and_a_scale(log: bool) -> None:
    """Numbers are light on dark cells and dark on pale ones; rows are read from the top."""
    values = np.array([[1.0, 100.0], [np.nan, 90.0]])
    mark = Cells("", values, 1.0, 100.0, SERIES[0], [["", ""]] * 2, [["1", "100"], ["-", "90"]], "ms", log)
    axes, scale = render.figure(Chart("k", "t", "s", [Panel([mark], "x", rows="ab", categories="uv")])).axes
    (image,) = axes.images
    np.testing.assert_array_equal(image.get_array().filled(np.nan), values)
    assert axes.get_ylim() == (1.5, -0.5) and scale.get_ylim() == pytest.approx((1, 100)) and scale.get_ylabel() == "ms"
    written = {text.get_text(): (text.get_position(), text.get_color()) for text in axes.texts}
    assert written["1"] == ((0, 0), "white") and written["100"] == ((1, 0), "#222222")
    assert written["-"] == ((0, 1), "#222222")


def test_numbers_of_an_axis_are_written_where_they_are_asked_for() -> None:
    panel = Panel([Line("l", X + 1, X, SERIES[0])], "x", x_log=True, x_ticks=(1.0, 2.5, 5.0))
    axes = render.figure(Chart("k", "t", "s", [panel])).axes[0]
    assert axes.get_xticks().tolist() == [1.0, 2.5, 5.0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "2.5", "5"]
    assert len(axes.get_xticks(minor=True)) == 0
    axes = render.figure(Chart("k", "t", "s", [panel._replace(categories=("1, 4", "2.5, 8", "$5$"))])).axes[0]
    assert axes.get_xticks().tolist() == [1.0, 2.5, 5.0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1, 4", "2.5, 8", r"\$5\$"]


def test_long_names_and_titles_leave_the_marks_their_room() -> None:
    """They stand on several lines: turned, or on one, they would push the panel together or leave the picture."""
    names, title = [f"{name} {'server 0 at_s 1 ' * 3}" for name in "abc"], "a title of many words " * 9
    short, long = (
        render.figure(Chart("k", of, "s", [Panel(BARS[:1], "", "USD", categories=each)]))
        for of, each in (("t", "abc"), (title, names))
    )
    assert long.axes[0].get_position().height > 0.6 * short.axes[0].get_position().height
    assert all(tick.get_rotation() == 0 and "\n" in tick.get_text() for tick in long.axes[0].get_xticklabels())
    heading = long._suptitle
    assert heading is not None and heading.get_window_extent().x1 < long.bbox.x1


def test_a_label_is_written_where_there_is_room() -> None:
    starts, ends = np.array([0.0, 1.0]), np.array([0.01, 9.0])
    thin = Spans("thin", np.array([0, 0]), starts, ends, SERIES[1], labels=("no", "yes"))
    axes = render.figure(Chart("k", "t", "s", [Panel([thin], "s", rows=("r",))])).axes[0]
    assert [text.get_text() for text in axes.texts] == ["yes"]


@pytest.mark.parametrize("log", [False, True])
def test_nothing_to_draw(log: bool) -> None:
    """A run without steps gives empty axes, not an error."""
    none = np.array([], dtype=float)
    rows = np.array([], dtype=np.int64)
    marks = [Line("l", none, none, SERIES[0]), Area("a", none, none, none, SERIES[0])]
    spans = Spans("s", rows, none, none, SERIES[0])
    chart = Chart("k", "t", "s", [Panel(marks, "x", x_log=log), Panel([spans], "x", rows=("r",)), Panel([], "x")])
    assert render.images(chart, "png")[0].startswith(b"\x89PNG")


def test_a_linear_axis_starts_at_zero_and_has_room_above_what_hardly_varies() -> None:
    """A difference looks as large as it is; only a fixed range or a log axis leaves zero out."""
    axes = render.figure(Chart("k", "t", "s", [Panel([Line("l", X, X + 100, SERIES[0])], "x")])).axes[0]
    assert axes.get_ylim()[0] == 0.0
    axes = render.figure(Chart("k", "t", "s", [Panel([Points("p", X, 32 + X * 1e-6, SERIES[0])], "x")])).axes[0]
    assert axes.get_ylim() == (0.0, pytest.approx(32 * 1.03, rel=1e-3))


def test_dollars_are_not_mathematics() -> None:
    """What a scenario is called is written as it stands."""
    chart = Chart("k", "costs $2 or $3", "s", [Panel([Line("$x$", X, X, SERIES[0])], "$ an hour $")])
    text = render.images(chart, "svg")[0].decode()
    for word in ("costs $2 or $3", "$x$", "$ an hour $"):
        assert f">{word}</text>" in text
