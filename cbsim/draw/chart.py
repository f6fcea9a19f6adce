"""The content of a figure as data: marks on panels.

A figure function makes a `Chart` from tables; `render.py` draws it for print, `interactive.py` for a browser. Arrays
are numbers in the units that the axes name. Colours are Okabe and Ito's, distinguishable without colour vision and in
print; dash, marker or hatch distinguishes what colour does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
BLACK, GREY, PALE = "#222222", "#777777", "#EEEEEE"
BLUE, SKY, GREEN = "#0072B2", "#56B4E9", "#009E73"  # these and the next: Okabe and Ito
ORANGE, RED, PINK, YELLOW = "#E69F00", "#D55E00", "#CC79A7", "#F0E442"
COLOURS = {"schedule": BLUE, "prepare": SKY, "launch": PINK, "await": PALE, "update": GREEN}
COLOURS |= {"h2d": ORANGE, "compute": RED, "d2h": YELLOW, "idle": "#FBE3D6"}
COLOURS |= {"KV copy": "#999999", "KV out": "#332288", "KV in": "#44AA99"}  # the last two: Tol


class Style(NamedTuple):
    """A mark's look. `dash`: solid, dashed, dotted, dashdot. `marker`: circle, square, diamond, triangle, cross."""

    colour: str
    dash: str = "solid"
    marker: str = "circle"

    @property
    def rgb(self) -> tuple[int, int, int]:
        red, green, blue = bytes.fromhex(self.colour[1:])
        return red, green, blue

    @property
    def dark(self) -> bool:
        """Whether text on it has to be light."""
        red, green, blue = self.rgb
        return 0.299 * red + 0.587 * green + 0.114 * blue < 140

    @property
    def opacity(self) -> float:
        """The opacity of areas: strong colours let the grid and other areas through, pale ones do not."""
        return 1.0 if self.colour.startswith("#F") or self.colour == "#EEEEEE" else 0.35


SERIES = (  # of the first run, the second run ...
    Style(BLUE, "solid", "circle"),
    Style(RED, "dashed", "square"),
    Style(GREEN, "dotted", "diamond"),
    Style(PINK, "dashdot", "triangle"),
    Style(ORANGE, "solid", "cross"),
    Style(SKY, "dashed", "circle"),
    Style(BLACK, "dotted", "square"),
)
DASHES = ("solid", "dashed", "dotted", "dashdot")
MARKERS = ("circle", "square", "diamond", "triangle", "cross")
LANE_STYLES = {name: Style(colour) for name, colour in COLOURS.items()}  # as in a run's own picture


def series(index: int) -> Style:
    """Return the style of run `index`, from 0. Colours repeat with another dash and marker: 28 styles."""
    lap, at = divmod(index, len(SERIES))
    return Style(
        SERIES[at].colour,
        DASHES[(DASHES.index(SERIES[at].dash) + lap) % len(DASHES)],
        MARKERS[(MARKERS.index(SERIES[at].marker) + lap) % len(MARKERS)],
    )


class Line(NamedTuple):
    """A line, y over x of equal length, x ascending; NaN leaves a gap. `step`: a value holds from its x to the next."""

    name: str
    x: Floats
    y: Floats
    style: Style
    step: bool = False


class Area(NamedTuple):
    """An area filled between `low` and `high` over x, of equal length."""

    name: str
    x: Floats
    low: Floats
    high: Floats
    style: Style
    step: bool = False


class Spans(NamedTuple):
    """A set of horizontal bars from `start` to `end`, bar i on row `row[i]` of a panel with rows. `texts`, if given,
    are shown when a bar is pointed at; `labels`, if given, are written into bars that are wide enough.
    """

    name: str
    row: npt.NDArray[np.int64]
    start: Floats
    end: Floats
    style: Style
    hatched: bool = False
    texts: Sequence[str] = ()
    labels: Sequence[str] = ()

    @property
    def thin(self) -> bool:
        """Whether every bar is less than a hundredth of what they all span, perhaps less than a pixel."""
        reach = float(self.end.max() - self.start.min()) if len(self.end) else 0.0
        return reach > 0 and float((self.end - self.start).max()) < reach / 100


class Points(NamedTuple):
    """A set of markers at (x, y). `texts`, if given, are shown when pointed at; `labels` are written beside them."""

    name: str
    x: Floats
    y: Floats
    style: Style
    texts: Sequence[str] = ()
    labels: Sequence[str] = ()


def equality(marks: Sequence[Points], dash: str = "dotted") -> Line:
    """Return the line on which x and y are equal, as far as these marks reach."""
    values = np.concatenate([axis for mark in marks for axis in (mark.x, mark.y)])
    ends = np.array([np.nanmin(values), np.nanmax(values)])
    return Line("equal", ends, ends, Style(GREY, dash))


class Whiskers(NamedTuple):
    """A set of intervals from `low` to `high`, vertical at x = `at`; with `level` horizontal at y = `at`."""

    name: str
    at: Floats
    low: Floats
    high: Floats
    style: Style
    level: bool = False


class Cells(NamedTuple):
    """A coloured cell for each row and category of a panel that has both, from pale to dark between `low` and `high`.
    `values` and `texts` have a row a row and a column a category; NaN leaves a cell empty. `labels` are written into
    cells. `unit` stands beside the scale of colours, which may be logarithmic.
    """

    name: str
    values: Floats
    low: float
    high: float
    style: Style
    texts: Sequence[Sequence[str]]
    labels: Sequence[Sequence[str]] = ()
    unit: str = ""
    log: bool = False

    def shares(self) -> Floats:
        """Return the position of each value on the scale of colours, from 0 to 1; NaN for an empty cell."""
        ends = np.array([self.low, self.high])
        values, (low, high) = (np.log(self.values), np.log(ends)) if self.log else (self.values, ends)
        shares: Floats = (values - low) / ((high - low) or 1.0)
        return shares


class Bars(NamedTuple):
    """A set of vertical bars at whole x of a panel with categories; series of one panel are side by side."""

    name: str
    x: npt.NDArray[np.int64]
    height: Floats
    style: Style
    labels: Sequence[str] = ()


class Level(NamedTuple):
    """A horizontal line across the panel, with its name."""

    name: str
    y: float
    style: Style


class Edge(NamedTuple):
    """A vertical line across the panel, with its name."""

    name: str
    x: float
    style: Style


Mark = Line | Area | Spans | Points | Whiskers | Cells | Bars | Level | Edge

THINNEST = 0.004  # share of a panel's height: less than a pixel


class Panel(NamedTuple):
    """Axes with marks, the first one lowest. `rows` name the rows of Spans, 0 at the top; `categories` name x of Bars.
    `y_range` or `x_range` fix the range shown at first; without `y_range` a linear y axis starts at 0. `x_ticks` are
    the numbers written on the x axis, as `categories` if there are any. A `tall` panel has room for many points.
    """

    marks: Sequence[Mark]
    x: str
    y: str = ""
    title: str = ""
    rows: Sequence[str] = ()
    categories: Sequence[str] = ()
    x_log: bool = False
    y_log: bool = False
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    x_ticks: Sequence[float] = ()
    tall: bool = False

    @property
    def seen(self) -> list[Mark]:
        """The marks that can be seen: not lines and points without a value, nor areas thinner than a pixel."""
        highs = [np.nan_to_num(mark.high).max(initial=0.0) for mark in self.marks if isinstance(mark, Area)]
        thinnest = THINNEST * (self.y_range[1] if self.y_range else max(highs, default=0.0))
        return [
            mark
            for mark in self.marks
            if not isinstance(mark, Area | Line | Points)
            or (np.isfinite(mark.y) if not isinstance(mark, Area) else mark.high - mark.low > thinnest).any()
        ]


class Chart(NamedTuple):
    """A figure: `key` names its files, `caption` describes its content, and what was left out or thinned. Panels fill a
    grid of `columns` row by row. With `share_x` all have one x axis, and zoom together.
    """

    key: str
    title: str
    caption: str
    panels: Sequence[Panel]
    columns: int = 1
    share_x: bool = False


class Columns(Protocol):
    """A table by columns: a step table, or a data frame of one."""

    def __getitem__(self, name: str, /) -> Any: ...

    def __len__(self) -> int: ...


class Unit(NamedTuple):
    """The unit of an axis, whose name may be "": values, of time in seconds, are divided by its `size`."""

    name: str
    size: float


UNITS = ((0.001, Unit("µs", 1e-6)), (1.0, Unit("ms", 1e-3)), (600.0, Unit("s", 1.0)), (10_800.0, Unit("min", 60.0)))


def unit(longest_s: float) -> Unit:
    """Return the unit in which times up to `longest_s` seconds are read easily."""
    return next((unit for below, unit in UNITS if longest_s < below), Unit("h", 3600.0))


def scale_of(unit_of_values: str, most: float) -> Unit:
    """Return the unit in which values up to `most`, in seconds, shares or another unit, are read easily."""
    if unit_of_values == "s":
        return unit(most)
    return Unit("%", 0.01) if unit_of_values == "share" else Unit("", 1.0)


def column(table: Columns, name: str) -> Floats:
    values: Floats = np.asarray(table[name], dtype=np.float64)
    return values


def pipelined(steps: Columns) -> bool:
    """True if a step was planned before the previous one was applied, as in async loops and never in sync ones."""
    starts, ends = column(steps, "schedule_start_ns"), column(steps, "update_end_ns")
    return bool((starts[1:] < ends[:-1]).any())


def without(tables: Mapping[str, Columns], what: str = "step") -> str:
    """Return a sentence naming the runs whose table is empty, for a caption; "" if there are none."""
    names = [label for label, table in tables.items() if not len(table)]
    return f" No {what} in {', '.join(names)}." if names else ""
