"""What becomes of each request: it waits, is prefilled, decodes."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.figures.axis import Frames, longest, seconds
from analysis.statistics.thin import Ints, chosen
from cbsim.draw.chart import BLACK, BLUE, ORANGE, Chart, Floats, Mark, Panel, Points, Spans, Style
from cbsim.draw.units import Unit, unit, without
from cbsim.results.terminal import shown

MOST_NAMED = 40  # more rows than this are labelled by their place in order of arrival, every so often
STYLES = {"queue": Style("#C8C8C8"), "prefill": Style(BLUE), "decode": Style(ORANGE)}


def timeline(requests: Frames, most: int = 200) -> Chart:
    """One panel a run, one row a request in order of arrival: queue (arrival to planning of its first step), prefill,
    decode. Preemptions stay inside. Of more than `most` requests so many are drawn, evenly chosen.
    """
    time = unit(max((longest(requests, name) for name in ("last_token_ns", "arrival_ns", "scheduled_ns")), default=0.0))
    panels = [_panel(label, frame, time, most) for label, frame in requests.items()]
    says = "Each row is a request, first come uppermost: in the queue, prefill, decode; preemptions stay inside."
    says += " A cross: it did not end with its last token."
    cut = [f"{most:,} of {len(frame):,} of {label}" for label, frame in requests.items() if len(frame) > most]
    says += f" Drawn are {', '.join(cut)}, evenly chosen." if cut else ""
    return Chart("timeline", "Requests over time", says + without(requests, "request"), panels, share_x=True)


def _panel(label: str, requests: pd.DataFrame, time: Unit, most: int) -> Panel:
    order = np.argsort(requests["arrival_ns"].to_numpy(), kind="stable")
    places = chosen(len(order), most)
    drawn = requests.iloc[order[places]]
    ends = _ends(drawn, longest({label: requests}, "last_token_ns"))
    texts = [
        f"{request.id}: prompt {request.prompt_tokens:,}, output {request.generated_tokens:,} tokens, {request.status}"
        for request in drawn[["id", "prompt_tokens", "generated_tokens", "status"]].itertuples()
    ]
    marks: list[Mark] = []
    for number, (name, style) in enumerate(STYLES.items()):
        start, end = ends[number], ends[number + 1]
        seen = np.flatnonzero(end > start)
        said = [f"{texts[i]}; {name} {shown(float(end[i] - start[i]), 's')}" for i in seen]
        marks.append(Spans(name, seen, start[seen] / time.seconds, end[seen] / time.seconds, style, texts=said))
    lost = np.flatnonzero(~drawn["done"].to_numpy(dtype=bool))
    if len(lost):
        style, said = Style(BLACK, marker="cross"), [texts[i] for i in lost]
        marks.append(Points("not done", ends[3][lost] / time.seconds, lost.astype(np.float64), style, texts=said))
    return Panel(marks, time.name, title=label, rows=_rows(drawn, places))


def _ends(requests: pd.DataFrame, horizon: float) -> list[Floats]:
    """Arrival, and the ends of queue, prefill and decode, in seconds. What is still under way at the end of an
    interrupted run lasts until the `horizon`; what never began has no length.
    """
    known = [seconds(requests, f"{name}_ns") for name in ("arrival", "scheduled", "first_token", "last_token")]
    open_ = requests["status"].isin(("waiting", "unfinished")).to_numpy()
    ends = [known[0]]
    for times in known[1:]:
        under_way = np.where(open_, np.maximum(horizon, ends[-1]), ends[-1])
        ends.append(np.where(times >= 0, np.maximum(times, ends[-1]), under_way))
    return ends


def _rows(requests: pd.DataFrame, places: Ints) -> list[str]:
    if len(requests) <= MOST_NAMED:
        return [str(name) for name in requests["id"]]
    every = max(len(places) // 10, 1)
    return [f"{place + 1:,}" if i % every == 0 else "" for i, place in enumerate(places)]
