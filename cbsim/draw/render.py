"""Rendering for print: matplotlib draws a `Chart` as PNG or SVG. Equal charts give equal bytes."""

from __future__ import annotations

import io
import math
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings

import numpy as np
import numpy.typing as npt

from cbsim.draw.chart import Area, Bars, Cells, Chart, Edge, Level, Line, Mark, Panel, Points, Spans, Whiskers
from cbsim.errors import RunError
from cbsim.files import access
from cbsim.record.directory import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL.Image import Image

WIDTH_IN, DPI = 10.0, 110
COLOURS = 256  # of a PNG: a third of the size
OPTIONS: dict[str, Any] = {  # nothing that differs from run to run
    "png": {"dpi": DPI, "metadata": {"Software": None}},
    "svg": {"metadata": {"Date": None, "Creator": None}},
}
DASHES: dict[str, Any] = {"solid": "-", "dashed": (0, (5, 2)), "dotted": (0, (1, 1.5)), "dashdot": "-."}
MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle": "^", "cross": "x"}
SETTINGS: Any = {
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "svg.fonttype": "none",
    "svg.hashsalt": "cbsim",
    "path.simplify_threshold": 0.5,
}
LEGEND_LETTERS, TITLE_LETTERS = 150, 105  # letters that fit into a line of the legend, and of the title
CELLS, MIDDLE = "cividis", 0.5  # readable without colour vision; colours below its middle are dark
WIDE_ENOUGH = 1 / 40  # of the panel, for a label inside a span


def import_matplotlib() -> None:
    """Import matplotlib without its axes of three dimensions, and without the help texts that it writes for its classes
    meanwhile, which take a third of that time: for a process that ends when its pictures are drawn.
    """
    artist: Any = import_module("matplotlib.artist")
    modules: dict[str, Any] = sys.modules
    described, artist.kwdoc = artist.kwdoc, lambda _: ""
    absent = modules.setdefault("mpl_toolkits.mplot3d", None) is None
    try:
        with catch_warnings(action="ignore"):  # matplotlib would say that it lacks them
            import_module("matplotlib.backends.backend_agg")
            import_module("matplotlib.figure")
    finally:
        artist.kwdoc = described
        if absent:
            del modules["mpl_toolkits.mplot3d"]


def images(chart: Chart, *kinds: str) -> list[bytes]:
    """Draw the chart once, and save it as files of these kinds, `png` and `svg`. The texts of an SVG remain text."""
    import matplotlib

    with matplotlib.rc_context(SETTINGS):
        drawn = figure(chart)
        return [_saved(chart, drawn, kind) for kind in kinds]


def _saved(chart: Chart, drawn: Figure, kind: str) -> bytes:
    """Save a figure; a PNG in a palette unless it has cells, whose many colours would leave none for other marks."""
    buffer = io.BytesIO()
    if kind == "png" and not any(isinstance(mark, Cells) for panel in chart.panels for mark in panel.marks):
        canvas: Any = drawn.canvas
        canvas.draw()
        _in_palette(np.asarray(canvas.buffer_rgba())).save(buffer, "png", compress_level=7)
    else:
        drawn.savefig(buffer, format=kind, **OPTIONS[kind])
    return buffer.getvalue()


def _in_palette(pixels: npt.NDArray[np.uint8]) -> Image:
    """Return RGBA pixels as an image of the COLOURS that most of them have; others, of edges, get the nearest one. Each
    run of equal pixels is looked at once: a tenth of the time that a median cut takes.
    """
    from PIL import Image

    codes = pixels.view(np.uint32).ravel()
    starts = np.flatnonzero(np.diff(codes, prepend=~codes[:1]))
    lengths = np.diff(starts, append=len(codes))
    distinct, colour = np.unique(codes[starts], return_inverse=True)
    rgb = distinct.view(np.uint8).reshape(-1, 4)[:, :3].astype(np.int64)
    palette = rgb[np.argsort(-np.bincount(colour, lengths), kind="stable")[:COLOURS]]
    nearest = ((rgb[:, None] - palette) ** 2).sum(axis=2).argmin(axis=1).astype(np.uint8)
    image = Image.fromarray(np.repeat(nearest[colour], lengths).reshape(pixels.shape[:2]))
    image.putpalette(palette.astype(np.uint8).tobytes())
    return image


def figure(chart: Chart) -> Figure:
    """Return the chart as a figure of matplotlib, for use in a notebook."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = [chart.panels[i : i + chart.columns] for i in range(0, len(chart.panels), chart.columns)]
    heights = [max(_height(panel) for panel in line) for line in lines]
    drawn = Figure(figsize=(WIDTH_IN, sum(heights) + 0.8), dpi=DPI, layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.subplots(len(lines), chart.columns, sharex=chart.share_x, squeeze=False, height_ratios=heights)
    for axis, panel in zip(axes.flat, chart.panels, strict=False):
        _panel(axis, panel)
    for axis in axes.flat[len(chart.panels) :]:
        axis.set_axis_off()
    if chart.share_x:
        for axis in axes[:-1].flat:
            axis.set_xlabel("")
    drawn.suptitle(_plain(textwrap.fill(chart.title, TITLE_LETTERS)), x=0.01, ha="left", fontsize=11, fontweight="bold")
    entries: dict[str, Any] = {}  # one a name
    for axis in drawn.axes:
        for entry, name in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(name, entry)
    if entries:
        columns = max(min(len(entries), LEGEND_LETTERS // (max(map(len, entries)) + 6)), 1)
        drawn.legend(entries.values(), entries, loc="outside lower center", ncols=columns, fontsize=8, markerscale=1.5)
    if engine := drawn.get_layout_engine():
        engine.execute(drawn)
    drawn.set_layout_engine("none")  # laid out once, so that PNG and SVG agree
    return drawn


def _plain(label: str) -> str:
    """Escape text so that matplotlib does not read it as mathematics."""
    return label.replace("$", r"\$")


def _height(panel: Panel) -> float:
    if any(isinstance(mark, Cells) for mark in panel.marks):
        return max(2.1, 0.9 + min(0.34 * len(panel.rows), 5.0))
    if panel.rows:
        return 0.8 + min(0.34 * len(panel.rows), 4.5)
    if panel.tall or any(isinstance(mark, Spans) for mark in panel.marks):
        return 3.4
    return 2.3


def _panel(axis: Axes, panel: Panel) -> None:
    """Draw the axes of a panel, then its marks."""
    axis.set_title(_plain(panel.title))
    axis.set_xlabel(_plain(panel.x))
    axis.set_ylabel(_plain(panel.y))
    _scales(axis, panel)
    bars = [mark for mark in panel.seen if isinstance(mark, Bars)]
    for mark in panel.seen:
        _draw(axis, mark, bars)
    _limits(axis, panel)
    for mark in panel.seen:
        if isinstance(mark, Spans) and mark.labels:
            _write_labels(axis, mark)


def _draw(axis: Axes, mark: Mark, bars: Sequence[Bars]) -> None:
    colour, dash = mark.style.colour, DASHES[mark.style.dash]
    label: Any = _plain(mark.name) or None
    match mark:
        case Line():
            stepped: Any = "steps-post" if mark.step else "default"
            axis.plot(mark.x, mark.y, color=colour, linestyle=dash, drawstyle=stepped, label=label)
        case Area():
            looks: Any = {"facecolor": colour, "alpha": mark.style.opacity, "linewidth": 0, "label": label}
            axis.fill_between(mark.x, mark.low, mark.high, step="post" if mark.step else None, **looks)
        case Whiskers():
            middle, half = (mark.low + mark.high) / 2, (mark.high - mark.low) / 2
            looks = {"fmt": "none", "ecolor": colour, "elinewidth": 0.9, "capsize": 2, "zorder": 2.5, "label": label}
            x, y, error = (middle, mark.at, "xerr") if mark.level else (mark.at, middle, "yerr")
            axis.errorbar(x, y, **(looks | {error: half}))
        case Level():
            axis.axhline(mark.y, color=colour, linestyle=dash, linewidth=1, label=label)
        case Edge():
            axis.axvline(mark.x, color=colour, linestyle=dash, linewidth=1, label=label)
        case Spans():
            _spans(axis, mark, label)
        case Points():
            _points(axis, mark, label)
        case Cells():
            _cells(axis, mark)
        case Bars():
            _bars(axis, mark, bars)


def _scales(axis: Axes, panel: Panel) -> None:
    if panel.x_log:
        axis.set_xscale("log")
    if panel.y_log:
        axis.set_yscale("log")
    if panel.rows:
        axis.set_yticks(range(len(panel.rows)), list(map(_plain, panel.rows)))
        axis.grid(visible=False, axis="y")
    if len(panel.x_ticks):
        axis.set_xticks(panel.x_ticks, list(map(_plain, panel.categories)) or [f"{tick:.4g}" for tick in panel.x_ticks])
        axis.set_xticks([], minor=True)
    elif panel.categories:
        count = sum(map(bool, panel.categories)) or 1
        names = [textwrap.fill(name, max(110 // count, 30)) for name in panel.categories]
        crowded = count * max(len(line) for name in names for line in [*name.splitlines(), ""]) > 110
        turned: dict[str, Any] = {"rotation": 25, "ha": "right"} if crowded else {}
        axis.set_xticks(range(len(names)), list(map(_plain, names)), **turned)
        axis.grid(visible=False, axis="x")


def _limits(axis: Axes, panel: Panel) -> None:
    spans = any(isinstance(mark, Spans) for mark in panel.marks)
    if spans or panel.rows:
        axis.autoscale_view()
    if panel.x_range is not None and panel.x_range[0] < panel.x_range[1]:
        axis.set_xlim(*panel.x_range)
    if panel.rows:
        axis.set_ylim(len(panel.rows) - 0.5, -0.5)
    elif panel.y_range is not None and panel.y_range[0] < panel.y_range[1]:
        axis.set_ylim(*panel.y_range)
    elif spans:
        axis.invert_yaxis()
    elif not panel.y_log:
        low, high = axis.get_ylim()
        below = bool(axis.dataLim.y0 < 0 and np.isfinite(axis.dataLim.y0))
        axis.set_ylim(low if below else 0.0, max(high, 1.03 * axis.dataLim.y1) if high > 0 else 1.0)


def _spans(axis: Axes, mark: Spans, label: Any) -> None:
    from matplotlib.collections import PolyCollection

    low, high = mark.row - 0.4, mark.row + 0.4
    corners = [(mark.start, low), (mark.start, high), (mark.end, high), (mark.end, low)]
    boxes = np.stack([np.stack([np.asarray(x, dtype=float), y], axis=1) for x, y in corners], axis=1)
    plain = mark.thin or len(mark.row) > 100  # a line of its colour keeps bars thinner than a pixel visible
    edge = "#D55E00" if mark.hatched else mark.style.colour if plain else "#444444"
    axis.add_collection(
        PolyCollection(
            list(boxes),
            facecolors=mark.style.colour,
            edgecolors=edge,
            linewidths=0 if mark.hatched else 0.5,
            hatch="////" if mark.hatched else None,
            label=label,
        ),
        autolim=False,  # which would find the limits for each mark
    )
    axis.update_datalim(boxes.reshape(-1, 2))


def _points(axis: Axes, mark: Points, name: Any) -> None:
    looks: Any = {} if mark.style.marker == "cross" else {"edgecolors": "white", "linewidths": 0.3}
    looks |= {"s": 30 if len(mark.x) <= 50 else 9, "color": mark.style.colour, "marker": MARKERS[mark.style.marker]}
    axis.scatter(mark.x, mark.y, zorder=3, label=name, **looks)
    for x, y, label in zip(mark.x, mark.y, mark.labels, strict=False):
        if math.isfinite(x) and math.isfinite(y):
            axis.annotate(_plain(label), (x, y), xytext=(5, 3), textcoords="offset points", fontsize=7)


def _cells(axis: Axes, mark: Cells) -> None:
    from matplotlib.colors import LogNorm, Normalize

    norm = (LogNorm if mark.log else Normalize)(mark.low, mark.high)
    drawn = axis.imshow(mark.values, cmap=CELLS, norm=norm, aspect="auto")
    axis.grid(visible=False)
    scale = axis.figure.colorbar(drawn, ax=axis, pad=0.02, fraction=0.05)
    scale.set_label(_plain(mark.unit))
    shares = mark.shares()
    for row, labels in enumerate(mark.labels):
        for column, label in enumerate(labels):
            colour = "white" if shares[row, column] < MIDDLE else "#222222"  # the scale begins dark; NaN is on white
            axis.text(column, row, _plain(label), ha="center", va="center", fontsize=7, color=colour)


def _bars(axis: Axes, mark: Bars, bars: Sequence[Bars]) -> None:
    index, width = next(i for i, other in enumerate(bars) if other is mark), 0.8 / len(bars)
    places = mark.x - 0.4 + width * (index + 0.5)
    hatch = ("", "//", "..", "xx")[index % 4]
    looks: Any = {"color": mark.style.colour, "hatch": hatch, "edgecolor": "white", "label": _plain(mark.name) or None}
    drawn = axis.bar(places, mark.height, width * 0.94, **looks)
    if mark.labels:
        axis.bar_label(drawn, labels=list(map(_plain, mark.labels)), fontsize=7, padding=2)
        axis.margins(y=0.12)


def _write_labels(axis: Axes, mark: Spans) -> None:
    low, high = sorted(axis.get_xlim())
    for row, start, end, label in zip(mark.row, mark.start, mark.end, mark.labels, strict=True):
        left, right = max(start, low), min(end, high)
        if right - left > (high - low) * WIDE_ENOUGH:
            colour = "white" if mark.style.dark else "#222222"
            middle = (left + right) / 2, row
            axis.text(*middle, _plain(label), ha="center", va="center", fontsize=7, color=colour, in_layout=False)


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart that is drawn when it is shown."""

    chart: Chart

    def png(self) -> bytes:
        return images(self.chart, "png")[0]

    _repr_png_ = png

    def save(self, path: Path | str) -> Path:
        """Write the picture as .png or .svg, by the file's name. Raises RunError."""
        file = Path(path)
        if file.suffix not in (".png", ".svg"):
            bound = "expected a name that ends in .png or .svg"
            raise RunError(f"{file}: got {file.suffix!r}, {bound}", file=file, value=file.suffix, bound=bound)
        with access(file, RunError, "written"):
            write_whole(file, *images(self.chart, file.suffix[1:]))
        return file
