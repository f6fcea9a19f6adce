"""Where plotly.js puts the panels of a `Chart`, and its axes: a grid from the top down, in pixels and shares of them.

Ranges are exponents on a logarithmic axis.
"""

from __future__ import annotations

import html
import math
import textwrap
from typing import Any, NamedTuple

from cbsim.draw.chart import Chart, Edge, Level, Mark, Panel, Spans

Dict = dict[str, Any]

HEADROOM = 1.06  # above a level, in levels
WIDE_PX, NARROW_PX = 1060, 340  # of the plots that the layouts are made for
TITLE_PX, AXIS_PX, LEGEND_LINE_PX, LETTER_PX = 26, 52, 21, 7
CATEGORY_LETTERS, MOST_ROW_LABELS = 16, 40
FONT = {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 12, "color": "#222222"}
LINES = {"gridcolor": "#E4E4E4", "linecolor": "#777777", "showline": True, "zeroline": False, "ticks": "outside"}


def axis(letter: str, number: int, between: str = "") -> str:
    return f"{letter}{between}{number if number > 1 else ''}"


def escaped(text: str) -> str:
    """Text that plotly.js shows as it is: neither its HTML nor its %{templates}."""
    return html.escape(text, quote=False).replace("%{", "&#37;{").replace("\n", "<br>")


def _wrapped(text: str, letters: int) -> str:
    return "<br>".join(escaped(line) for line in textwrap.wrap(text, letters)) or escaped(text)


def _row_letters(width: int) -> int:
    """Letters of a label in one line."""
    return 30 if width >= WIDE_PX else 16


def placed(mark: Mark) -> bool:
    """A line across the panel needs a place."""
    return math.isfinite(mark.y if isinstance(mark, Level) else mark.x if isinstance(mark, Edge) else 0)


class _Room(NamedTuple):
    """Pixels of a panel, from the top: its title, its marks, the labels below."""

    title: int
    marks: int
    below: int


def layout(chart: Chart, width: int) -> Dict:
    """Panels in a grid, from the top down; every panel has axes of its own number."""
    rooms = [_room(chart, place, width) for place in range(len(chart.panels))]
    lines = [rooms[i : i + chart.columns] for i in range(0, len(rooms), chart.columns)]
    lines_rooms = [_Room(*map(max, zip(*line, strict=True))) for line in lines]
    above = 12 + LEGEND_LINE_PX * _legend_lines(chart, width) + lines_rooms[0].title
    below = lines_rooms[-1].below
    inner = sum(map(sum, lines_rooms)) - lines_rooms[0].title - below
    made = _frame(above + inner + below, {"t": above, "b": below, "l": 60, "r": 16})
    top = inner + lines_rooms[0].title
    for index, room in enumerate(lines_rooms):
        top -= room.title
        span = [(top - room.marks) / inner, top / inner]
        for place in range(index * chart.columns, min((index + 1) * chart.columns, len(rooms))):
            made |= _axes(chart, place, width, span)
            made["annotations"] += _title(chart.panels[place], place + 1, _pixels(chart, place, width))
        top -= room.marks + room.below
    return made


def _frame(height: int, margin: Dict) -> Dict:
    """What all layouts have in common."""
    return {
        "height": height,
        "margin": margin,
        "font": FONT,
        "hoverlabel": {"align": "left", "namelength": -1, "bgcolor": "#FFFFFF", "font": {"color": "#222222"}},
        "legend": {
            "orientation": "h",
            "xref": "container",
            "x": 0,
            "xanchor": "left",
            "yref": "container",
            "y": 1,
            "yanchor": "top",
            "tracegroupgap": 2,
        },
        "showlegend": True,
        "hovermode": "closest",
        "barmode": "group",
        "bargap": 0.2,
        "uniformtext": {"mode": "hide", "minsize": 9},
        "plot_bgcolor": "#FFFFFF",
        "paper_bgcolor": "#FFFFFF",
        "annotations": [],
    }


def _legend_lines(chart: Chart, width: int) -> int:
    """An estimate of how many lines the legend fills. It may be as wide as the panels."""
    lines, left = 0, 0
    for name in dict.fromkeys(mark.name for panel in chart.panels for mark in panel.marks if mark.name):
        size = 45 + LETTER_PX * len(name)
        if size > left:
            lines, left = lines + 1, width - 100
        left -= size
    return lines


def _room(chart: Chart, place: int, width: int) -> _Room:
    panel = chart.panels[place]
    spans = any(isinstance(mark, Spans) for mark in panel.marks)
    marks = 60 + min(34 * len(panel.rows), 460) if panel.rows else 340 if spans or panel.tall else 240
    title = len(_title_lines(panel, _pixels(chart, place, width)))
    above = TITLE_PX + 16 * (title - 1) if title else 0
    if not _labelled(chart, place):
        return _Room(above, marks, 14)
    labels = _categories(panel, _pixels(chart, place, width))[1] if panel.categories else 0
    return _Room(above, marks, AXIS_PX + labels)


def _title_lines(panel: Panel, room: float) -> list[str]:
    return textwrap.wrap(panel.title, max(20, int((room - 110) / (LETTER_PX + 1.5))))  # less the labels beside it


def _labelled(chart: Chart, place: int) -> bool:
    """Has it labels under its x axis? On a shared axis only the lowest of a column has."""
    return not chart.share_x or place + chart.columns >= len(chart.panels)


def _column(chart: Chart, place: int, width: int) -> tuple[float, float]:
    """From where to where its column reaches, as shares of the width: columns leave room for labels between them."""
    inner = [panel for number, panel in enumerate(chart.panels) if number % chart.columns]
    longest = max((len(row) for panel in inner for row in panel.rows), default=0)
    gap = (75 + LETTER_PX * min(longest, _row_letters(width))) / width
    size = (1 - gap * (chart.columns - 1)) / chart.columns
    left = (place % chart.columns) * (size + gap)
    return (left, left + size)


def _pixels(chart: Chart, place: int, width: int) -> float:
    left, right = _column(chart, place, width)
    return (right - left) * width


def _categories(panel: Panel, room: float) -> tuple[Dict, int]:
    """The x axis of a panel with categories, and the pixels that its labels need beyond a line. No room: they slant."""
    lines = [textwrap.wrap(name, CATEGORY_LETTERS) or [""] for name in panel.categories]
    longest = max((len(line) for name in lines for line in name), default=0)
    tallest = max(map(len, lines), default=0)
    slanted = (longest + 1) * LETTER_PX * len(lines) > room
    ticks = {
        "tickvals": list(range(len(lines))),
        "ticktext": [_wrapped(name, CATEGORY_LETTERS) for name in panel.categories],
    }
    ticks |= {"range": [-0.6, len(lines) - 0.4], "fixedrange": True, "showgrid": False, "tickangle": -35 * slanted}
    return ticks, 15 * tallest + (longest * LETTER_PX // 2 if slanted else -15)


def _title(panel: Panel, number: int, room: float) -> list[Dict]:
    where = {"xref": f"{axis('x', number)} domain", "x": 0, "yref": f"{axis('y', number)} domain", "y": 1}
    looks = {"xanchor": "left", "yanchor": "bottom", "align": "left", "showarrow": False, "font": {"size": 13}}
    text = "<br>".join(f"<b>{escaped(line)}</b>" for line in _title_lines(panel, room))
    return [where | looks | {"text": text}] if text else []


def _axes(chart: Chart, place: int, width: int, span: list[float]) -> Dict:
    """Both axes of a panel. Rows and categories do not zoom."""
    panel, number, column = chart.panels[place], place + 1, _column(chart, place, width)
    x: Dict = LINES | {"domain": column, "anchor": axis("y", number), "automargin": True}
    y: Dict = LINES | {"domain": span, "anchor": axis("x", number), "automargin": True, "title": _named(panel.y)}
    edges = [mark.x for mark in panel.marks if isinstance(mark, Edge) and placed(mark)]
    x |= _range(panel.x_range, log=panel.x_log) | {"autorangeoptions": {"include": edges}}
    x |= {"type": "log" if panel.x_log else "linear"}
    y |= {"type": "log" if panel.y_log else "linear", "separatethousands": True}
    if chart.share_x and place:
        x["matches"] = "x"
    x |= {"title": _named(panel.x)} if _labelled(chart, place) else {"showticklabels": False}
    if len(panel.x_ticks):
        x |= {"tickvals": list(panel.x_ticks)}
    if panel.categories:
        x |= _categories(panel, _pixels(chart, place, width))[0]
    return {axis("x", number, "axis"): x, axis("y", number, "axis"): y | _scale(panel, width)}


def _named(title: str) -> Dict:
    return {"text": escaped(title), "standoff": 8}


def _scale(panel: Panel, width: int) -> Dict:
    """The y axis: rows from the top down, else the range asked for, else from 0 unless logarithmic."""
    if panel.rows:
        every = math.ceil(len(panel.rows) / MOST_ROW_LABELS)
        ticks: Dict = {"tickvals": list(range(0, len(panel.rows), every))}
        ticks["ticktext"] = [_wrapped(row, _row_letters(width)) for row in panel.rows[::every]]
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
