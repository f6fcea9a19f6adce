"""Charts for a browser: a `Chart` as the data and layout that plotly.js draws.

Plain dicts, lists and numbers, ready for JSON: nothing of plotly is imported. Looks are those of `draw.py`. Every text
is escaped, as plotly.js reads a little HTML. Shapes take data values on a logarithmic axis, ranges take exponents.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from analysis.page.layout import NARROW_PX, WIDE_PX, Dict, axis, escaped, layout, placed
from cbsim.draw.chart import (
    Area,
    Bars,
    Cells,
    Chart,
    Edge,
    Level,
    Line,
    Mark,
    Panel,
    Points,
    Spans,
    Style,
    Whiskers,
)

PLAIN_AT_MOST = 200  # numbers; a longer array is encoded
DASHES = {"solid": "solid", "dashed": "7px,3px", "dotted": "2px,3px", "dashdot": "dashdot"}
MARKERS = {"circle": "circle", "square": "square", "diamond": "diamond", "triangle": "triangle-up", "cross": "x"}
BAR_HATCHES = ("", "/", ".", "x")  # of the first series, the second ...


def figure(chart: Chart) -> Dict:
    """`data` and `layout` for Plotly.newPlot, and `narrow`, the layout for a screen as wide as a telephone's."""
    shown: set[str] = set()
    data, shapes = [], []
    for number, panel in enumerate(chart.panels, start=1):
        bars = 0
        for mark in filter(placed, panel.marks):
            first = bool(mark.name) and mark.name not in shown
            shown.add(mark.name)
            common = {"name": escaped(mark.name), "legendgroup": mark.name, "showlegend": first}
            if isinstance(mark, Level | Edge):
                shapes.append(common | _across(mark, number))
                continue
            axes = {"xaxis": axis("x", number), "yaxis": axis("y", number)}
            data += [common | axes | trace for trace in _traces(mark, panel, bars)]
            bars += isinstance(mark, Bars)
    narrow = replace(chart, columns=1)
    return {
        "data": data,
        "layout": layout(chart, WIDE_PX) | {"shapes": shapes},
        "narrow": layout(narrow, NARROW_PX) | {"shapes": shapes},
    }


def numbers(values: npt.ArrayLike) -> list[float | None] | dict[str, str]:
    """Floats for JSON. What is not finite becomes null, or stays NaN inside an encoded array: plotly.js skips both."""
    array = np.asarray(values, dtype="<f8")
    if len(array) > PLAIN_AT_MOST:
        return {"dtype": "f8", "bdata": base64.b64encode(array.tobytes()).decode()}
    return [value if math.isfinite(value) else None for value in array.tolist()]


def _traces(mark: Mark, panel: Panel, bars: int) -> Iterable[Dict]:
    """One trace for a mark, two for each unbroken piece of an area. `bars` counts the series of bars before it."""
    match mark:
        case Line():
            return [_line(mark, panel)]
        case Area():
            return _area(mark, panel)
        case Spans():
            return [_spans(mark, panel)]
        case Points():
            return [_points(mark, panel)]
        case Whiskers():
            return [_whiskers(mark)]
        case Cells():
            return [_cells(mark)]
        case Bars():
            return [_bars(mark, panel, bars)]
        case _:
            raise AssertionError(mark)


def _hover(mark: Mark, panel: Panel, y: str = "%{y}", texts: Sequence[str] = ()) -> Dict:
    """What is said of a point: its own text if it has one, else name and values."""
    x = "%{x}" + (f" {escaped(panel.x)}" if panel.x else "")
    if texts:
        return {"hovertext": [escaped(text) for text in texts], "hovertemplate": "%{hovertext}<extra></extra>"}
    y = f"{escaped(panel.y)}: {y}" if panel.y else y
    return {"hovertemplate": "<br>".join(filter(None, (escaped(mark.name), y, x))) + "<extra></extra>"}


def _line(mark: Line, panel: Panel) -> Dict:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": numbers(mark.x),
        "y": numbers(mark.y),
        "line": _stroke(mark.style, 1.7) | {"shape": "hv" if mark.step else "linear"},
        "connectgaps": False,
        **_hover(mark, panel),
    }


def _stroke(style: Style, width: float) -> Dict:
    return {"color": style.colour, "dash": DASHES[style.dash], "width": width}


def _area(mark: Area, panel: Panel) -> Iterator[Dict]:
    """Each unbroken piece is a lower edge, and an upper one that is filled down to it."""
    line = {"width": 0, "shape": "hv" if mark.step else "linear"}
    common: Dict = {"type": "scatter", "mode": "lines", "line": line}
    for index, piece in enumerate(_pieces(np.isfinite(mark.low) & np.isfinite(mark.high))):
        x, low = numbers(mark.x[piece]), numbers(mark.low[piece])
        yield common | {"x": x, "y": low, "showlegend": False, "hoverinfo": "skip"}
        upper = {"x": x, "y": numbers(mark.high[piece]), "customdata": low, "fill": "tonexty", "hoveron": "points"}
        upper |= {"fillcolor": _see_through(mark.style.colour)} | _hover(mark, panel, y="%{customdata} to %{y}")
        yield common | upper | ({"showlegend": False} if index else {})


def _pieces(there: npt.NDArray[np.bool_]) -> list[slice]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], there.astype(np.int8), [0]))))
    return [slice(int(low), int(high)) for low, high in edges.reshape(-1, 2)]


def _see_through(colour: str) -> str:
    """Strong colours let the grid and other areas through, pale ones do not."""
    red, green, blue = _channels(colour)
    pale = colour.startswith("#F") or colour == "#EEEEEE"
    return f"rgba({red},{green},{blue},{1 if pale else 0.35})"


def _channels(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def _dark(colour: str) -> bool:
    red, green, blue = _channels(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


def _spans(mark: Spans, panel: Panel) -> Dict:
    """Bars on their sides. Only without an outline does plotly.js keep visible what is thinner than a pixel."""
    wide = mark.end - mark.start
    reach = float(mark.end.max() - mark.start.min()) if len(wide) else 0.0
    outlined = 0 < len(wide) <= 100 and not mark.hatched and float(wide.max()) >= reach / 100
    marker: Dict = {"color": mark.style.colour, "line": {"width": 0.5 if outlined else 0, "color": "#444444"}}
    if mark.hatched:
        marker["pattern"] = {"shape": "/", "fillmode": "overlay", "fgcolor": "#D55E00", "size": 7, "solidity": 0.15}
    return {
        "type": "bar",
        "orientation": "h",
        "y": numbers(mark.row),
        "base": numbers(mark.start),
        "x": numbers(wide),
        "width": 0.8,
        "offset": -0.4,
        "marker": marker,
        **_hover_of_spans(mark, panel),
        **(_inside(mark) if mark.labels else {}),
    }


def _hover_of_spans(mark: Spans, panel: Panel) -> Dict:
    reach = "%{base} to %{x}" + (f" {escaped(panel.x)}" if panel.x else "")
    if mark.texts:
        return _hover(mark, panel, texts=mark.texts) | {"hovertemplate": f"%{{hovertext}}<br>{reach}<extra></extra>"}
    return {"hovertemplate": f"{escaped(mark.name)}<br>{reach}<extra></extra>"}


def _inside(mark: Spans) -> Dict:
    colour = "#FFFFFF" if _dark(mark.style.colour) else "#222222"
    where = {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
    return {"text": [escaped(label) for label in mark.labels], "insidetextfont": {"color": colour, "size": 11}, **where}


def _points(mark: Points, panel: Panel) -> Dict:
    few = len(mark.x) <= 50
    edge = {} if mark.style.marker == "cross" else {"line": {"color": "#FFFFFF", "width": 0.5}}
    labels = {
        "text": [escaped(label) for label in mark.labels],
        "textposition": _beside(mark.x, panel),
        "cliponaxis": False,
    }
    return {
        "type": "scatter",
        "mode": "markers+text" if mark.labels else "markers",
        "x": numbers(mark.x),
        "y": numbers(mark.y),
        "marker": {"color": mark.style.colour, "symbol": MARKERS[mark.style.marker], "size": 9 if few else 5} | edge,
        **(labels if mark.labels else {}),
        **_hover(mark, panel, texts=mark.texts),
    }


def _whiskers(mark: Whiskers) -> Dict:
    """Errors of markers that are not seen."""
    middle, half = (mark.low + mark.high) / 2, (mark.high - mark.low) / 2
    x, y, bars = (middle, mark.at, "error_x") if mark.level else (mark.at, middle, "error_y")
    error = {"type": "data", "array": numbers(half), "color": mark.style.colour, "thickness": 1.2, "width": 3}
    invisible = {"mode": "markers", "marker": {"size": 1, "opacity": 0}, "hoverinfo": "skip"}
    return {"type": "scatter", "x": numbers(x), "y": numbers(y), bars: error, **invisible}


def _cells(mark: Cells) -> Dict:
    texts = [[escaped(text) for text in row] for row in mark.texts]
    labels = [[escaped(text) for text in row] for row in mark.labels]
    return {
        "type": "heatmap",
        "z": [numbers(row) for row in mark.shares()],
        "zmin": 0,
        "zmax": 1,
        "colorscale": "Cividis",
        "colorbar": {"title": {"text": escaped(mark.unit), "side": "right"}, "thickness": 14} | _scale_of(mark),
        "hovertext": texts,
        "hovertemplate": "%{hovertext}<extra></extra>",
        **({"text": labels, "texttemplate": "%{text}"} if labels else {}),
    }


def _scale_of(mark: Cells) -> Dict:
    """Values written beside the scale of colours."""
    ends = np.geomspace(mark.low, mark.high, 5) if mark.log else np.linspace(mark.low, mark.high, 5)
    return {"tickvals": np.linspace(0, 1, 5).tolist(), "ticktext": [f"{value:.3g}" for value in ends]}


def _beside(x: npt.NDArray[np.float64], panel: Panel) -> list[str]:
    """Labels of points in the right half end at their point, so that none is cut off."""
    places = np.concatenate([mark.x for mark in panel.marks if isinstance(mark, Line | Points)])
    places = places[np.isfinite(places) & ((places > 0) | (not panel.x_log))]
    low, high = (places.min(), places.max()) if len(places) else (0.0, 0.0)
    middle = math.sqrt(low) * math.sqrt(high) if panel.x_log else low / 2 + high / 2
    return ["top left" if value > middle else "top right" for value in x.tolist()]


def _bars(mark: Bars, panel: Panel, before: int) -> Dict:
    pattern = {"shape": BAR_HATCHES[before % len(BAR_HATCHES)], "fillmode": "overlay", "fgcolor": "#FFFFFF", "size": 7}
    labels = {"text": [escaped(label) for label in mark.labels], "textposition": "outside", "cliponaxis": False}
    y = f"{escaped(panel.y)}: %{{y}}" if panel.y else "%{y}"
    return {
        "type": "bar",
        "x": numbers(mark.x),
        "y": numbers(mark.height),
        "offsetgroup": str(before),
        "marker": {"color": mark.style.colour, "pattern": pattern},
        "hovertext": [
            escaped(panel.categories[place]) if panel.categories else str(place) for place in mark.x.tolist()
        ],
        "hovertemplate": "<br>".join(filter(None, (escaped(mark.name), "%{hovertext}", y))) + "<extra></extra>",
        **(labels | {"textangle": 0} if mark.labels else {}),
    }


def _across(mark: Level | Edge, number: int) -> Dict:
    """A line from edge to edge of the panel."""
    x, y = axis("x", number), axis("y", number)
    line = {"type": "line", "line": _stroke(mark.style, 1.3)}
    if isinstance(mark, Level):
        return line | {"xref": f"{x} domain", "x0": 0, "x1": 1, "yref": y, "y0": mark.y, "y1": mark.y}
    return line | {"yref": f"{y} domain", "y0": 0, "y1": 1, "xref": x, "x0": mark.x, "x1": mark.x}
