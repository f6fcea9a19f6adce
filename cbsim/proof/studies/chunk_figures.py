"""The figures of `chunks`: published step times and overheads beside the roofline's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cbsim.draw.chart import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    PINK,
    RED,
    Bars,
    Chart,
    Floats,
    Level,
    Line,
    Mark,
    Panel,
    Points,
    Style,
)
from cbsim.proof.studies.sarathi import (
    DEFAULT,
    FIGURE_2_CACHED,
    MS,
    REFERENCE,
    Answer,
    Chunked,
    Compared,
    Point,
    cost,
    named,
    roofline_s,
)

UNFITTED, FLOORED = "roofline, nothing fitted", "roofline over a fitted CPU floor"
PUBLISHED, ROOFLINE, FITTED = Style(BLACK, "solid", "circle"), Style(BLUE), Style(ORANGE, "dashed")
CHUNKS = {
    512: Style(RED, "solid", "square"),
    1024: Style(GREEN, "dashed", "diamond"),
    REFERENCE: Style(PINK, "dotted", "triangle"),
}
Kind = Callable[[Answer], float]


def steps(results: Compared) -> Chart:
    """Every published step, and what the efficiency of prefills would have to be."""
    return Chart(
        "chunks_steps",
        "Steps of Yi-34B on two A100 PCIe: published and roofline",
        "Times of engine steps published with Sarathi-Serve, and the roofline's for half of the model on one GPU at "
        "default efficiencies. The dashed line has a CPU floor fitted to the decode batches. The prefill of 256 tokens "
        "is the first batch of its run. Efficiency needed: the share of peak FLOP/s with which the roofline would be "
        "right; a chunked prompt is an average over its steps.",
        [_decodes(results), _prefills(results), _efficiencies(results), _hybrids(results)],
        columns=2,
    )


def overhead(results: Compared) -> Chart:
    """Chunked prompts over the same prompts in one step, and over chunks of `REFERENCE` tokens."""
    ratios: Sequence[tuple[str, Callable[[Chunked], float]]] = (
        ("Over the same prompt in one step", lambda c: c.over_whole),
        (f"Over the same prompt in chunks of {REFERENCE:,}", lambda c: c.over_reference),
    )
    return Chart(
        "chunks_overhead",
        "Overhead of chunked prefills: published and roofline",
        f"Time of a prompt in chunks over its time in one step, as published, and over its time in chunks of "
        f"{REFERENCE:,}. The roofline's ratio is 1 for all of these. Long prompts in one step are slow, so that on the "
        "left chunks seem to become free.",
        [_overheads(results, title, ratio) for title, ratio in ratios],
        columns=2,
    )


def _decodes(results: Compared) -> Panel:
    sizes = np.arange(1, 129, dtype=np.float64)
    answers = _answers([Point(0, 0, int(size), FIGURE_2_CACHED, 1) for size in sizes])
    marks: list[Mark] = [
        Line(UNFITTED, sizes, _ms(answers, _roofline), ROOFLINE),
        Line(FLOORED, sizes, _ms(answers, results.floored_s), FITTED),
        Points("published", _sizes(results.decodes, "decodes"), _ms(results.decodes, _published), PUBLISHED),
    ]
    return Panel(marks, "rows", "ms", "Decode batches, 1,021 tokens cached a row", x_log=True)


def _prefills(results: Compared) -> Panel:
    sizes = np.unique(np.geomspace(128, 16384, 80).round())
    answers = _answers([Point(int(size), int(size), 0, 0, 1) for size in sizes])
    tokens = _sizes(results.prefills, "prompt")
    marks: list[Mark] = [
        Line(UNFITTED, sizes, _ms(answers, _roofline) / sizes * 1e3, ROOFLINE),
        Line(FLOORED, sizes, _ms(answers, results.floored_s) / sizes * 1e3, FITTED),
        Points("published", tokens, _ms(results.prefills, _published) / tokens * 1e3, PUBLISHED),
    ]
    return Panel(marks, "prompt tokens", "us a token", "Prefills in one step", x_log=True)


def _efficiencies(results: Compared) -> Panel:
    whole = [a for a in results.prefills if a.point.prompt >= 512]
    split = [c.answer for c in results.chunked if c.answer.point.chunk < c.answer.point.prompt]
    marks: list[Mark] = [Level(UNFITTED, DEFAULT.compute_efficiency.prefill, ROOFLINE)]
    for name, size, answers, style in (
        ("published", "prompt", whole, PUBLISHED),
        ("published, chunked prompts", "chunk", split, Style(RED, "solid", "cross")),
    ):
        marks.append(Points(name, _sizes(answers, size), np.array([a.efficiency for a in answers]), style))
    return Panel(marks, "tokens a step", "share of peak", "Efficiency needed", x_log=True, y_range=(0.4, 0.7))


def _hybrids(results: Compared) -> Panel:
    at, marks = np.arange(len(results.hybrids)), []
    for name, style, kind in (("published", PUBLISHED, _published), (UNFITTED, ROOFLINE, _roofline)):
        heights = _ms(results.hybrids, kind)
        marks.append(Bars(f"{name}, steps of table 2", at, heights, style, [f"{height:,.0f}" for height in heights]))
    return Panel(marks, "", "ms", "Hybrid batch", categories=[named(a.point) for a in results.hybrids])


def _overheads(results: Compared, title: str, ratio: Callable[[Chunked], float]) -> Panel:
    marks: list[Mark] = [Level("roofline, any of these chunks", 1.0, ROOFLINE)]
    for chunk, style in CHUNKS.items():
        points = [c for c in results.chunked if c.answer.point.chunk == chunk]
        tokens, ratios = _sizes([c.answer for c in points], "prompt"), np.array([ratio(c) for c in points])
        marks += [Line("", tokens, ratios, style), Points(f"published, chunks of {chunk:,}", tokens, ratios, style)]
    return Panel(marks, "prompt tokens", "ratio of times", title, y_range=(0.75, 1.3))


def _answers(points: Sequence[Point]) -> list[Answer]:
    model = cost()
    return [Answer(point, roofline_s(model, point)) for point in points]


def _published(answer: Answer) -> float:
    return answer.published_s


def _roofline(answer: Answer) -> float:
    return answer.roofline_s


def _ms(answers: Sequence[Answer], kind: Kind) -> Floats:
    return np.array([kind(answer) / MS for answer in answers])


def _sizes(answers: Sequence[Answer], field: str) -> Floats:
    return np.array([float(getattr(answer.point, field)) for answer in answers])
