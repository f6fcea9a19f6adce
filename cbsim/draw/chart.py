"""What a figure shows, as data: marks on panels.

A figure function makes a `Chart` from tables; `render.py` draws it for print, `interactive.py` for a browser. Arrays
are numbers in the units that the axes name. Colours are Okabe and Ito's, distinguishable without colour vision and in
print; what is told apart by colour is told apart by dash, marker or hatch as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


COLOURS = {  # Okabe and Ito
    "schedule": "#0072B2",
    "prepare": "#56B4E9",
    "launch": "#CC79A7",
    "await": "#EEEEEE",
    "update": "#009E73",
    "h2d": "#E69F00",
    "compute": "#D55E00",
    "d2h": "#F0E442",
}
IDLE = "#FBE3D6"
MOVES = {"KV copy": "#999999", "KV out": "#332288", "KV in": "#44AA99"}  # Tol


class Style(NamedTuple):
    """How a mark looks. `dash`: solid, dashed, dotted, dashdot. `marker`: circle, square, diamond, triangle, cross."""

    colour: str
    dash: str = "solid"
    marker: str = "circle"


BLACK, GREY, PALE = "#222222", "#777777", "#EEEEEE"
BLUE, SKY, GREEN, ORANGE, RED, PINK, YELLOW = (
    "#0072B2",
    "#56B4E9",
    "#009E73",
    "#E69F00",
    "#D55E00",
    "#CC79A7",
    "#F0E442",
)
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
LANE_STYLES = {
    name: Style(colour) for name, colour in (COLOURS | MOVES | {"idle": IDLE}).items()
}  # as in a run's own picture


def series(index: int) -> Style:
    """The style of the run number `index`, from 0. Colours return with another dash and marker: 28 styles."""
    lap, place = divmod(index, len(SERIES))
    return Style(
        SERIES[place].colour,
        DASHES[(DASHES.index(SERIES[place].dash) + lap) % len(DASHES)],
        MARKERS[(MARKERS.index(SERIES[place].marker) + lap) % len(MARKERS)],
    )


@dataclass(frozen=True, slots=True)
class Line:
    """y over x, of equal length, x ascending; NaN leaves a gap. With `step`, a value holds from its x to the next."""

    name: str
    x: Floats
    y: Floats
    style: Style
    step: bool = False


@dataclass(frozen=True, slots=True)
class Area:
    """Filled between `low` and `high` over x, of equal length."""

    name: str
    x: Floats
    low: Floats
    high: Floats
    style: Style
    step: bool = False


@dataclass(frozen=True, slots=True)
class Spans:
    """Horizontal bars from `start` to `end`, bar i on row `row[i]` of a panel with rows.

    `texts`, if given, say what each bar is when it is pointed at; `labels`, if given, are written into bars that are
    wide enough.
    """

    name: str
    row: npt.NDArray[np.int64]
    start: Floats
    end: Floats
    style: Style
    hatched: bool = False
    texts: Sequence[str] = ()
    labels: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Points:
    """Markers at (x, y). `texts`, if given, say what each is when pointed at; `labels` are written beside them."""

    name: str
    x: Floats
    y: Floats
    style: Style
    texts: Sequence[str] = ()
    labels: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Whiskers:
    """Intervals from `low` to `high`, upright at x = `at`; with `level`, lying at y = `at`."""

    name: str
    at: Floats
    low: Floats
    high: Floats
    style: Style
    level: bool = False


@dataclass(frozen=True, slots=True)
class Cells:
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
        """Where on the scale of colours each value lies, from 0 to 1; NaN for an empty cell."""
        ends = np.array([self.low, self.high])
        values, (low, high) = (np.log(self.values), np.log(ends)) if self.log else (self.values, ends)
        shares: Floats = (values - low) / ((high - low) or 1.0)
        return shares


@dataclass(frozen=True, slots=True)
class Bars:
    """Vertical bars at whole x of a panel with categories; series of one panel stand side by side."""

    name: str
    x: npt.NDArray[np.int64]
    height: Floats
    style: Style
    labels: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal line across the panel, with its name."""

    name: str
    y: float
    style: Style


@dataclass(frozen=True, slots=True)
class Edge:
    """A vertical line across the panel, with its name."""

    name: str
    x: float
    style: Style


Mark = Line | Area | Spans | Points | Whiskers | Cells | Bars | Level | Edge


@dataclass(frozen=True, slots=True)
class Panel:
    """Axes with marks, the first one lowest. `rows` name the rows of Spans, 0 at the top; `categories` name x of Bars.

    `y_range` or `x_range` fix what is shown at first; without `y_range` a linear y axis starts at 0. `x_ticks` are the
    numbers on x that are written. One that is `tall` has room for many points.
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


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure: `key` names its files, `says` is its caption: what is shown, and what was left out or thinned.

    Panels fill a grid of `columns` row by row. With `share_x` all have one x axis, and zoom together.
    """

    key: str
    title: str
    says: str
    panels: Sequence[Panel]
    columns: int = 1
    share_x: bool = False
