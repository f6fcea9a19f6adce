"""Charts for a browser: a `Chart` as the data and layout that plotly.js draws.

Plain dicts, lists and numbers, ready for JSON: nothing of plotly is imported. Styles are those of `render.py`. Every
text is escaped, as plotly.js reads a little HTML. Panels stand in a grid from the top down. Shapes take data values on
a logarithmic axis, ranges take exponents.
"""

from __future__ import annotations

import base64
import html
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cbsim.draw.chart import Area, Bars, Cells, Chart, Edge, Level, Line, Mark, Panel, Points, Spans, Style, Whiskers

Dict = dict[str, Any]
PLAIN_AT_MOST = 200  # numbers; a longer array is encoded
DASHES = {"solid": "solid", "dashed": "7px,3px", "dotted": "2px,3px", "dashdot": "dashdot"}
MARKERS = {"circle": "circle", "square": "square", "diamond": "diamond", "triangle": "triangle-up", "cross": "x"}
BAR_HATCHES = ("", "/", ".", "x")  # patterns of the first series, the second, ...


def figure(chart: Chart) -> Dict:
    """Return `data` and `layout` for Plotly.newPlot, and `narrow`, the layout for a screen as wide as a telephone's."""
    shown: set[str] = set()
    data, shapes = [], []
    for number, panel in enumerate(chart.panels, start=1):
        bars = 0
        for mark in filter(placed, panel.seen):
            first = bool(mark.name) and mark.name not in shown
            shown.add(mark.name)
            common = {"name": escaped(mark.name), "legendgroup": mark.name, "showlegend": first}
            if isinstance(mark, Level | Edge):
                shapes.append(common | _across(mark, number))
                continue
            axes = {"xaxis": axis("x", number), "yaxis": axis("y", number)}
            if isinstance(mark, Area):
                traces = list(_area(mark, panel))
            else:
                traces = [_bars(mark, panel, bars) if isinstance(mark, Bars) else DRAWN[type(mark)](mark, panel)]
            data += [common | axes | trace for trace in traces]
            bars += isinstance(mark, Bars)
    wide, narrow = layout(chart, WIDE_PX), layout(chart._replace(columns=1), NARROW_PX)
    return {"data": data, "layout": wide | {"shapes": shapes}, "narrow": narrow | {"shapes": shapes}}


def numbers(values: npt.ArrayLike) -> list[float | None] | dict[str, str]:
    """Return floats for JSON. Non-finite ones become null, or NaN in an encoded array: plotly.js skips both."""
    array = np.asarray(values, dtype="<f8")
    if len(array) > PLAIN_AT_MOST:
        return {"dtype": "f8", "bdata": base64.b64encode(array.tobytes()).decode()}
    return [value if math.isfinite(value) else None for value in array.tolist()]


def _hover(mark: Mark, panel: Panel, y: str = "%{y}", texts: Sequence[str] = ()) -> Dict:
    """Return the hover text of points: a point's own text if it has one, else name and values."""
    if texts:
        return {"hovertext": [escaped(label) for label in texts], "hovertemplate": "%{hovertext}<extra></extra>"}
    x = "%{x}" + (f" {escaped(panel.x)}" if panel.x else "")
    y = f"{escaped(panel.y)}: {y}" if panel.y else y
    return {"hovertemplate": "<br>".join(filter(None, (escaped(mark.name), y, x))) + "<extra></extra>"}


def _line(mark: Line, panel: Panel) -> Dict:
    line = _stroke(mark.style, 1.7) | {"shape": "hv" if mark.step else "linear"}
    trace = {"type": "scatter", "mode": "lines", "x": numbers(mark.x), "y": numbers(mark.y)}
    return trace | {"line": line, "connectgaps": False} | _hover(mark, panel)


def _stroke(style: Style, width: float) -> Dict:
    return {"color": style.colour, "dash": DASHES[style.dash], "width": width}


def _area(mark: Area, panel: Panel) -> Iterator[Dict]:
    """Yield two traces for each unbroken piece: a lower edge, and an upper one that is filled down to it."""
    line = {"width": 0, "shape": "hv" if mark.step else "linear"}
    common: Dict = {"type": "scatter", "mode": "lines", "line": line}
    there = np.isfinite(mark.low) & np.isfinite(mark.high)
    ends = np.flatnonzero(np.diff(np.concatenate(([0], there.astype(np.int8), [0])))).reshape(-1, 2).tolist()
    for index, (start, end) in enumerate(ends):
        x, low, high = (numbers(values[start:end]) for values in (mark.x, mark.low, mark.high))
        yield common | {"x": x, "y": low, "showlegend": False, "hoverinfo": "skip"}
        red, green, blue = mark.style.rgb
        upper = {"x": x, "y": high, "customdata": low, "fill": "tonexty", "hoveron": "points"}
        upper |= {"fillcolor": f"rgba({red},{green},{blue},{mark.style.opacity:g})"}
        upper |= _hover(mark, panel, y="%{customdata} to %{y}")
        yield common | upper | ({"showlegend": False} if index else {})


def _spans(mark: Spans, panel: Panel) -> Dict:
    """Return horizontal bars. Only without an outline does plotly.js keep visible what is thinner than a pixel."""
    outlined = 0 < len(mark.row) <= 100 and not mark.hatched and not mark.thin
    marker: Dict = {"color": mark.style.colour, "line": {"width": 0.5 if outlined else 0, "color": "#444444"}}
    if mark.hatched:
        marker["pattern"] = {"shape": "/", "fillmode": "overlay", "fgcolor": "#D55E00", "size": 7, "solidity": 0.15}
    trace: Dict = {"type": "bar", "orientation": "h", "width": 0.8, "offset": -0.4, "marker": marker}
    trace |= {"y": numbers(mark.row), "base": numbers(mark.start), "x": numbers(mark.end - mark.start)}
    reach = "%{base} to %{x}" + (f" {escaped(panel.x)}" if panel.x else "")
    trace |= {"hovertext": [escaped(label) for label in mark.texts]} if mark.texts else {}
    what = "%{hovertext}" if mark.texts else escaped(mark.name)
    trace |= {"hovertemplate": f"{what}<br>{reach}<extra></extra>"}
    if mark.labels:
        trace |= {"text": [escaped(label) for label in mark.labels], "textposition": "inside", "textangle": 0}
        font = {"color": "#FFFFFF" if mark.style.dark else "#222222", "size": 11}
        trace |= {"insidetextfont": font, "insidetextanchor": "middle"}
    return trace


def _points(mark: Points, panel: Panel) -> Dict:
    size = 9 if len(mark.x) <= 50 else 5
    marker: Dict = {"color": mark.style.colour, "symbol": MARKERS[mark.style.marker], "size": size}
    marker |= {} if mark.style.marker == "cross" else {"line": {"color": "#FFFFFF", "width": 0.5}}
    trace: Dict = {"type": "scatter", "mode": "markers", "x": numbers(mark.x), "y": numbers(mark.y), "marker": marker}
    if mark.labels:
        where = {"textposition": _beside(mark.x, panel), "cliponaxis": False}
        trace |= {"mode": "markers+text", "text": [escaped(label) for label in mark.labels], **where}
    return trace | _hover(mark, panel, texts=mark.texts)


def _whiskers(mark: Whiskers, _: Panel) -> Dict:
    """Return error bars of invisible markers."""
    middle, half = (mark.low + mark.high) / 2, (mark.high - mark.low) / 2
    x, y, bars = (middle, mark.at, "error_x") if mark.level else (mark.at, middle, "error_y")
    error = {"type": "data", "array": numbers(half), "color": mark.style.colour, "thickness": 1.2, "width": 3}
    invisible = {"mode": "markers", "marker": {"size": 1, "opacity": 0}, "hoverinfo": "skip"}
    return {"type": "scatter", "x": numbers(x), "y": numbers(y), bars: error, **invisible}


def _cells(mark: Cells, _: Panel) -> Dict:
    texts, labels = ([[escaped(label) for label in row] for row in part] for part in (mark.texts, mark.labels))
    values = np.geomspace(mark.low, mark.high, 5) if mark.log else np.linspace(mark.low, mark.high, 5)
    bar = {"title": {"text": escaped(mark.unit), "side": "right"}, "thickness": 14}
    bar |= {"tickvals": np.linspace(0, 1, 5).tolist(), "ticktext": [f"{value:.3g}" for value in values]}
    trace = {"type": "heatmap", "z": [numbers(row) for row in mark.shares()], "zmin": 0, "zmax": 1, "colorbar": bar}
    trace |= {"colorscale": "Cividis", "hovertext": texts, "hovertemplate": "%{hovertext}<extra></extra>"}
    return trace | ({"text": labels, "texttemplate": "%{text}"} if labels else {})


def _beside(x: npt.NDArray[np.float64], panel: Panel) -> list[str]:
    """Return text positions: labels of points in the right half end at their point, so that none is cut off."""
    xs = np.concatenate([mark.x for mark in panel.marks if isinstance(mark, Line | Points)])
    xs = xs[np.isfinite(xs) & ((xs > 0) | (not panel.x_log))]
    low, high = (xs.min(), xs.max()) if len(xs) else (0.0, 0.0)
    middle = math.sqrt(low) * math.sqrt(high) if panel.x_log else low / 2 + high / 2
    return ["top left" if value > middle else "top right" for value in x.tolist()]


def _bars(mark: Bars, panel: Panel, before: int) -> Dict:
    pattern = {"shape": BAR_HATCHES[before % len(BAR_HATCHES)], "fillmode": "overlay", "fgcolor": "#FFFFFF", "size": 7}
    names = [escaped(panel.categories[index]) if panel.categories else str(index) for index in mark.x.tolist()]
    y = f"{escaped(panel.y)}: %{{y}}" if panel.y else "%{y}"
    hover = "<br>".join(filter(None, (escaped(mark.name), "%{hovertext}", y))) + "<extra></extra>"
    trace: Dict = {"type": "bar", "x": numbers(mark.x), "y": numbers(mark.height), "offsetgroup": str(before)}
    trace |= {"marker": {"color": mark.style.colour, "pattern": pattern}, "hovertext": names, "hovertemplate": hover}
    if mark.labels:
        trace |= {"text": [escaped(label) for label in mark.labels], "textposition": "outside"}
        trace |= {"cliponaxis": False, "textangle": 0}
    return trace


DRAWN: dict[type[Any], Callable[[Any, Panel], Dict]]
DRAWN = {Line: _line, Spans: _spans, Points: _points, Whiskers: _whiskers, Cells: _cells}


def _across(mark: Level | Edge, number: int) -> Dict:
    """Return a line from edge to edge of the panel."""
    x, y = axis("x", number), axis("y", number)
    line = {"type": "line", "line": _stroke(mark.style, 1.3)}
    if isinstance(mark, Level):
        return line | {"xref": f"{x} domain", "x0": 0, "x1": 1, "yref": y, "y0": mark.y, "y1": mark.y}
    return line | {"yref": f"{y} domain", "y0": 0, "y1": 1, "xref": x, "x0": mark.x, "x1": mark.x}


HEADROOM = 1.06  # top of the axis above a level, as a factor
WIDE_PX, NARROW_PX = 1060, 340  # widths of the plots that the layouts are made for
ROW_LETTERS = {WIDE_PX: 30, NARROW_PX: 16}  # characters in a line of a row's label
TITLE_PX, AXIS_PX, LEGEND_LINE_PX, LETTER_PX = 26, 52, 21, 7
CATEGORY_LETTERS, MOST_ROW_LABELS = 16, 40
FONT = {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 12, "color": "#222222"}
LINES = {"gridcolor": "#E4E4E4", "linecolor": "#777777", "showline": True, "zeroline": False, "ticks": "outside"}
LEGEND = {"orientation": "h", "xref": "container", "x": 0, "xanchor": "left", "tracegroupgap": 2}
LEGEND |= {"yref": "container", "y": 1, "yanchor": "top"}
HOVER = {"align": "left", "namelength": -1, "bgcolor": "#FFFFFF", "font": {"color": "#222222"}}
FRAME: Dict = {"font": FONT, "hoverlabel": HOVER, "hovermode": "closest", "legend": LEGEND, "showlegend": True}
FRAME |= {"barmode": "group", "bargap": 0.2, "uniformtext": {"mode": "hide", "minsize": 9}}
FRAME |= {"plot_bgcolor": "#FFFFFF", "paper_bgcolor": "#FFFFFF"}


def axis(letter: str, number: int, between: str = "") -> str:
    return f"{letter}{between}{number if number > 1 else ''}"


def escaped(label: str) -> str:
    """Return text that plotly.js shows verbatim: neither its HTML nor its %{templates}."""
    return html.escape(label, quote=False).replace("%{", "&#37;{").replace("\n", "<br>")


def _wrapped(label: str, letters: int) -> str:
    return "<br>".join(escaped(line) for line in textwrap.wrap(label, letters)) or escaped(label)


def placed(mark: Mark) -> bool:
    """Whether a mark has a finite position, which a line across the panel needs."""
    return math.isfinite(mark.y if isinstance(mark, Level) else mark.x if isinstance(mark, Edge) else 0)


class _Room(NamedTuple):
    """The heights in pixels of a panel's parts, from the top: its title, its marks, the labels below."""

    title: int
    marks: int
    below: int


def layout(chart: Chart, width: int) -> Dict:
    """Return a grid of panels, from the top down; every panel has axes of its own number."""
    rooms = [_room(chart, index, width) for index in range(len(chart.panels))]
    lines = [rooms[i : i + chart.columns] for i in range(0, len(rooms), chart.columns)]
    lines_rooms = [_Room(*map(max, zip(*line, strict=True))) for line in lines]
    above = 12 + LEGEND_LINE_PX * _legend_lines(chart, width) + lines_rooms[0].title
    below = lines_rooms[-1].below
    inner = sum(map(sum, lines_rooms)) - lines_rooms[0].title - below
    made: Dict = {"height": above + inner + below, "margin": {"t": above, "b": below, "l": 60, "r": 16}}
    made |= FRAME | {"annotations": []}
    top = inner + lines_rooms[0].title
    for row, room in enumerate(lines_rooms):
        top -= room.title
        span = [(top - room.marks) / inner, top / inner]
        for index in range(row * chart.columns, min((row + 1) * chart.columns, len(rooms))):
            made |= _axes(chart, index, width, span)
            made["annotations"] += _title(chart.panels[index], index + 1, _pixels(chart, index, width))
        top -= room.marks + room.below
    return made


def _legend_lines(chart: Chart, width: int) -> int:
    """Return an estimate of the legend's number of lines. It may be as wide as the panels."""
    lines, left = 0, 0
    for name in dict.fromkeys(mark.name for panel in chart.panels for mark in panel.seen if mark.name):
        size = 45 + LETTER_PX * len(name)
        if size > left:
            lines, left = lines + 1, width - 100
        left -= size
    return lines


def _room(chart: Chart, index: int, width: int) -> _Room:
    panel = chart.panels[index]
    spans = any(isinstance(mark, Spans) for mark in panel.marks)
    marks = 60 + min(34 * len(panel.rows), 460) if panel.rows else 340 if spans or panel.tall else 240
    title = len(_title_lines(panel, _pixels(chart, index, width)))
    above = TITLE_PX + 16 * (title - 1) if title else 0
    if not _labelled(chart, index):
        return _Room(above, marks, 14)
    labels = _categories(panel, _pixels(chart, index, width))[1] if panel.categories else 0
    return _Room(above, marks, AXIS_PX + labels)


def _title_lines(panel: Panel, room: float) -> list[str]:
    return textwrap.wrap(panel.title, max(20, int((room - 110) / (LETTER_PX + 1.5))))  # less the labels beside it


def _labelled(chart: Chart, index: int) -> bool:
    """Whether a panel has labels under its x axis. On a shared axis only the lowest of a column has."""
    return not chart.share_x or index + chart.columns >= len(chart.panels)


def _column(chart: Chart, index: int, width: int) -> tuple[float, float]:
    """Return the ends of its column as shares of the width: columns leave space for labels between them."""
    inner = [panel for number, panel in enumerate(chart.panels) if number % chart.columns]
    longest = max((len(row) for panel in inner for row in panel.rows), default=0)
    gap = (75 + LETTER_PX * min(longest, ROW_LETTERS[width])) / width
    size = (1 - gap * (chart.columns - 1)) / chart.columns
    left = (index % chart.columns) * (size + gap)
    return (left, left + size)


def _pixels(chart: Chart, index: int, width: int) -> float:
    left, right = _column(chart, index, width)
    return (right - left) * width


def _categories(panel: Panel, room: float) -> tuple[Dict, int]:
    """Return the x axis of a panel with categories, and the extra pixels of its labels. Without space they slant."""
    lines = [textwrap.wrap(name, CATEGORY_LETTERS) or [""] for name in panel.categories]
    longest = max((len(line) for name in lines for line in name), default=0)
    tallest = max(map(len, lines), default=0)
    slanted = (longest + 1) * LETTER_PX * len(lines) > room
    names = [_wrapped(name, CATEGORY_LETTERS) for name in panel.categories]
    ticks: Dict = {"tickvals": list(range(len(lines))), "ticktext": names, "range": [-0.6, len(lines) - 0.4]}
    ticks |= {"fixedrange": True, "showgrid": False, "tickangle": -35 * slanted}
    return ticks, 15 * tallest + (longest * LETTER_PX // 2 if slanted else -15)


def _title(panel: Panel, number: int, room: float) -> list[Dict]:
    made: Dict = {"xref": f"{axis('x', number)} domain", "x": 0, "yref": f"{axis('y', number)} domain", "y": 1}
    made |= {"xanchor": "left", "yanchor": "bottom", "align": "left", "showarrow": False, "font": {"size": 13}}
    title = "<br>".join(f"<b>{escaped(line)}</b>" for line in _title_lines(panel, room))
    return [made | {"text": title}] if title else []


def _axes(chart: Chart, index: int, width: int, span: list[float]) -> Dict:
    """Return both axes of a panel. Rows and categories do not zoom."""
    panel, number, column = chart.panels[index], index + 1, _column(chart, index, width)
    x: Dict = LINES | {"domain": column, "anchor": axis("y", number), "automargin": True}
    y: Dict = LINES | {"domain": span, "anchor": axis("x", number), "automargin": True, "title": _named(panel.y)}
    edges = [mark.x for mark in panel.marks if isinstance(mark, Edge) and placed(mark)]
    x |= _range(panel.x_range, log=panel.x_log) | {"autorangeoptions": {"include": edges}}
    x |= {"type": "log" if panel.x_log else "linear"}
    y |= {"type": "log" if panel.y_log else "linear", "separatethousands": True}
    if chart.share_x and index:
        x["matches"] = "x"
    x |= {"title": _named(panel.x)} if _labelled(chart, index) else {"showticklabels": False}
    if len(panel.x_ticks):
        x |= {"tickvals": list(panel.x_ticks)}
        x |= {"ticktext": list(map(escaped, panel.categories))} if panel.categories else {}
    elif panel.categories:
        x |= _categories(panel, _pixels(chart, index, width))[0]
    return {axis("x", number, "axis"): x, axis("y", number, "axis"): y | _scale(panel, width)}


def _named(title: str) -> Dict:
    return {"text": escaped(title), "standoff": 8}


def _scale(panel: Panel, width: int) -> Dict:
    """Return the y axis: rows from the top down, else the explicit range, else from 0 unless logarithmic."""
    if panel.rows:
        every = math.ceil(len(panel.rows) / MOST_ROW_LABELS)
        ticks: Dict = {"tickvals": list(range(0, len(panel.rows), every))}
        ticks["ticktext"] = [_wrapped(row, ROW_LETTERS[width]) for row in panel.rows[::every]]
        return ticks | {"range": [len(panel.rows) - 0.5, -0.5], "fixedrange": True, "showgrid": False, "ticks": ""}
    if panel.y_range is not None:
        return _range(panel.y_range, log=panel.y_log)
    if any(isinstance(mark, Spans) for mark in panel.marks):
        return {"autorange": "reversed"}
    levels = [mark.y for mark in panel.marks if isinstance(mark, Level) and placed(mark)]
    levels = [level * (1 if panel.y_log else HEADROOM) for level in levels]
    return {"rangemode": "normal" if panel.y_log else "tozero", "autorangeoptions": {"include": levels}}


def _range(ends: tuple[float, float] | None, *, log: bool) -> Dict:
    if ends is None or not -math.inf < ends[0] < ends[1] < math.inf or (log and ends[0] <= 0):
        return {}
    return {"range": [math.log10(end) if log else end for end in ends]}
