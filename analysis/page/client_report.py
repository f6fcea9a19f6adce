"""The report of clients' measurements of a session, compared with those of its server: statistics, overlaid
distributions, and differences by request.

Requests are paired by id if client and session share them; else, if both have equally many, in order of start and
arrival. If the client has statistics only, nothing is paired. A session with scaled time has its own seconds: they are
divided by the scale, so that all times are the client's.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from analysis.figures.axis import cdf_line, spread
from analysis.page import report as reports
from analysis.statistics.compare import Incomparable, signed
from analysis.statistics.labels import is_number
from analysis.statistics.loading import LoadedRun
from cbsim.draw.chart import BLACK, Chart, Edge, Floats, Mark, Panel, Points, Style, series, unit
from cbsim.draw.report import Caveat, Report, Table
from cbsim.errors import RunError
from cbsim.measured.own.clients import MEASURES, STATISTICS, Client, Distribution, Measured, distribution
from cbsim.metrics.metrics import SAMPLES_NEEDED
from cbsim.metrics.terminal import shown
from cbsim.record.tables import Ints, Requests, token_times
from cbsim.scenario import fields

NOTHING_S = 0.5e-9  # a smaller difference is none: the tables have whole nanoseconds
WAY = "network, HTTP, event loop and client"
ID, ORDER, NOT = "id", "order of arrival", "not"
ANSWER = re.compile(r"^(?:chatcmpl|cmpl)-")
SERIAL = re.compile(r"-\d+$")
NUMBERED = re.compile(r"^(.*\D)(\d+)$")


class Pairs(NamedTuple):
    """The paired requests of a client and of its session, in equal numbers; `by` is ID or ORDER."""

    by: str
    measured: Sequence[Measured]
    rows: Ints  # rows of the session's table


class Measure(NamedTuple):
    """A measure on both sides, in the client's seconds: both distributions, the server's values (of ITL with the count
    of each), and the client's value less the server's for each paired request.
    """

    name: str
    client: Distribution
    server: Distribution
    server_s: Floats
    server_counts: Ints | None
    apart_s: Floats

    def difference(self, statistic: str) -> float:
        """Return the client's statistic less the server's; NaN if one is missing."""
        return self.client.get(statistic, math.nan) - self.server.get(statistic, math.nan)


class Beside(NamedTuple):
    """A comparison of client and session. `served` are the session's requests that ended with their last token,
    `compared` those whose times are shown. `doubts` are reasons why the client may have used another session.
    """

    client: Client
    paired_by: str
    pairs: int
    served: int
    compared: Requests
    prompt_tokens: int
    output_tokens: int
    measures: Mapping[str, Measure]
    doubts: Sequence[str]


def scale(run: LoadedRun) -> float:
    """Return the session's seconds per client's second. Raises RunError."""
    value = run.environment.get("time_scale", 1.0)
    if not is_number(value) or not 0 < value < math.inf:
        raise RunError(f"{run.path / 'env.json'}: time_scale: got {fields.shown(value)}, expected a number > 0")
    return float(value)


def beside(run: LoadedRun, client: Client) -> Beside:
    """Compare a client's file with a session. Raises Incomparable if the client cannot have used this session."""
    done = np.flatnonzero(run.times.done)
    pairs = _pairs(run, client, done)
    if pairs is None and client.succeeded != len(done):
        raise Incomparable(
            f"{client.path} cannot be of the session {run.path}: requests that succeeded: got {client.succeeded:,}, "
            f"expected {len(done):,}, which the session has ended, or requests whose ids it knows"
        )
    by, paired, at = pairs or (NOT, (), done)
    compared = token_times(run.times.rows.rows(at), run.table)
    tokens = int(compared.rows.numbers("prompt_tokens").sum()), int(compared.generated.sum())
    measures = {name: _measure(run, client, compared, pairs, name) for name in MEASURES}
    doubts = _doubts(client, pairs, compared, tokens)
    return Beside(client, by, len(paired), len(done), compared, *tokens, measures, doubts)


def _pairs(run: LoadedRun, client: Client, done: Ints) -> Pairs | None:
    if client.requests is None:
        return None
    ids = run.times.rows.texts("id").to_pylist()
    names = {row: _names(ids[row]) for row in done.tolist()}
    known = _by_number(client, names) if client.numbered else _by_name(names)
    keys = [str(each.number) if client.numbered else ANSWER.sub("", each.key) for each in client.requests]
    same = [(each, known[key]) for each, key in zip(client.requests, keys, strict=True) if key in known]
    if same:
        return Pairs(ID, [each for each, _ in same], np.array([row for _, row in same], dtype=np.int64))
    starts = np.array([each.start_s for each in client.requests])
    if len(starts) != len(done) or not np.isfinite(starts).all():
        return None
    arrivals = done[np.argsort(run.times.arrival_ns[done], kind="stable")]
    return Pairs(ORDER, [client.requests[at] for at in np.argsort(starts, kind="stable")], arrivals)


def _names(record_id: str) -> list[str]:
    """Return a client's names for a record's request: its id without `chatcmpl-`, also without our serial number."""
    name = ANSWER.sub("", record_id)
    return list(dict.fromkeys((name, SERIAL.sub("", name))))


def _by_name(names: Mapping[int, Sequence[str]]) -> dict[str, int]:
    """Return rows by each name that only one of them has."""
    counts = Counter(name for own in names.values() for name in own)
    return {name: row for row, own in names.items() for name in own if counts[name] == 1}


def _by_number(client: Client, names: Mapping[int, Sequence[str]]) -> dict[str, int]:
    """Return rows by their names' last number, for the one prefix with as many as the client, all below `issued`."""
    numbered: dict[str, dict[str, int]] = {}
    for row, own in names.items():
        for match in filter(None, map(NUMBERED.match, own)):
            numbered.setdefault(match[1], {})[match[2]] = row
    fitting = [
        rows
        for rows in numbered.values()
        if len(rows) == client.succeeded and all(int(number) < client.issued for number in rows)
    ]
    return fitting[0] if len(fitting) == 1 else {}


def _measure(run: LoadedRun, client: Client, compared: Requests, pairs: Pairs | None, name: str) -> Measure:
    factor, counts, apart = scale(run), None, np.zeros(0)
    if name == "itl_s":
        gaps_s, counts = compared.gaps_s
        values = gaps_s / factor
    else:
        rows = run.times.done if pairs is None else pairs.rows
        values = run.requests[name].to_numpy(dtype=np.float64)[rows] / factor
        if pairs is not None:
            apart = np.array([getattr(each, name) for each in pairs.measured], dtype=np.float64) - values
        values = values[np.isfinite(values)]
    known = distribution(values, counts)
    return Measure(name, client.distribution(name), known, values, counts, apart[np.isfinite(apart)])


def _doubts(client: Client, pairs: Pairs | None, compared: Requests, tokens: tuple[int, int]) -> list[str]:
    kinds = ("prompt", "output")
    if pairs is None:
        return [
            f"the client has {number:,.0f} {what} tokens, the session {own:,}"
            for number, own, what in zip((client.prompt_tokens, client.output_tokens), tokens, kinds, strict=True)
            if math.isfinite(number) and number != own
        ]
    missing = client.succeeded - len(pairs.measured)
    ours = np.array([[each.prompt_tokens, each.output_tokens] for each in pairs.measured])
    theirs = np.stack([compared.rows.numbers("prompt_tokens"), compared.generated], axis=1)
    other = (np.isfinite(ours) & (ours != theirs)).sum(axis=0).tolist()
    return [f"{missing:,} of {client.succeeded:,} requests of the client are not in the session"] * bool(missing) + [
        f"{number:,} of {len(ours):,} requests have another number of {what} tokens than the session"
        for number, what in zip(other, kinds, strict=True)
        if number
    ]


def build(run: LoadedRun, clients: Sequence[Client], command: str) -> Report:
    """Return one report of all files. Raises RunError, Incomparable."""
    compared = [beside(run, client) for client in clients]
    return Report(
        title=f"{run.name}: what its clients measured",
        question=f"How much of a client's figures is the server's, and how much is {WAY}?",
        sources=[reports.source(run, run)],
        caveats=caveats(run, compared),
        findings=[finding for each in compared for finding in findings(each)],
        tables=[table for each in compared for table in tables(each)],
        charts=[chart for number, each in enumerate(compared, 1) for chart in charts(each, number)],
        command=command,
        data={"clients": {"session": run.path.name, "time_scale": scale(run), "files": list(map(_facts, compared))}},
    )


def tables(compared: Beside) -> list[Table]:
    """Return tables of counts, of every statistic on both sides, and of the differences by request."""
    client = compared.client
    rows: list[tuple[str, ...]] = [
        ("requests", f"{client.succeeded:,}", f"{len(compared.compared.rows):,}", ""),
        ("failed", f"{client.failed:,}", "", ""),
        ("prompt tokens", _count(client.prompt_tokens), f"{compared.prompt_tokens:,}", ""),
        ("output tokens", _count(client.output_tokens), f"{compared.output_tokens:,}", ""),
    ]
    for name, measure in compared.measures.items():
        for statistic in STATISTICS:
            if measure.client or measure.server:
                values = (shown(side.get(statistic), "s") for side in (measure.client, measure.server))
                difference = measure.difference(statistic)
                more = "" if math.isnan(difference) else _signed(difference)
                rows.append((f"{MEASURES[name]} {statistic}", *values, more))
    header = ("", client.tool, "server", "difference")
    made = [Table(client.path.name, header, rows, _paired(compared))]
    apart = {name: distribution(each.apart_s) for name, each in compared.measures.items() if len(each.apart_s)}
    if apart:
        lines = [(MEASURES[name], *(_signed(values[each]) for each in STATISTICS)) for name, values in apart.items()]
        made.append(Table(f"{client.path.name}: request by request, client less server", ("", *STATISTICS), lines))
    return made


def findings(compared: Beside) -> list[str]:
    """Return a sentence on how much time the connection adds."""
    means = {name: compared.measures[name].difference("mean") for name in ("ttft_s", "e2e_s")}
    known = {name: value for name, value in means.items() if not math.isnan(value)}
    if known and all(abs(value) < NOTHING_S for value in known.values()):
        return [f"{compared.client.tool} measured what its server did, to the nanosecond."]
    parts = [f"{MEASURES[name]} by {_signed(value)} in the mean" for name, value in known.items()]
    return [f"{compared.client.tool} differs from its server in {' and '.join(parts)}: {WAY}."] if parts else []


def caveats(run: LoadedRun, compared: Sequence[Beside]) -> list[Caveat]:
    """Return reasons not to trust a difference."""
    made = [
        Caveat("session", each.client.path.name, f"Perhaps not of this session: {doubt}.")
        for each in compared
        for doubt in each.doubts
    ]
    if (factor := scale(run)) != 1:
        reason = f"The session's clock ran {factor:g} times as fast: its seconds are simulated, here divided by "
        made.append(Caveat("scaled", run.label, f"{reason}{factor:g}."))
    made += _lag(run)
    if run.incomplete:
        made.append(Caveat("incomplete", run.label, f"It was cut short: {run.incomplete.strip()}"))
    for each in compared:
        count, name = len(each.compared.rows), each.client.path.name
        if each.paired_by == ORDER:
            reason = "Its requests have no ids that the server knows: those close to each other may be swapped."
            made.append(Caveat("order", name, reason))
        if count < SAMPLES_NEEDED["p99"]:
            made.append(Caveat("few requests", name, f"{count:,} requests, p99 needs {SAMPLES_NEEDED['p99']}."))
    return made


def _lag(run: LoadedRun) -> list[Caveat]:
    """Return a caveat if the session was late: its clients saw steps later than its tables have them."""
    served = run.summary.get("served")
    lags = [served.get(name) for name in ("lag_p99_s", "lag_max_s")] if isinstance(served, dict) else []
    if not isinstance(served, dict) or served.get("faithful") is not False or not all(map(is_number, lags)):
        return []
    p99, most = (shown(lag, "s") for lag in lags)
    reason = f"Its steps were sent up to {most} late, 1 % of them {p99} or more: a part of every difference is that."
    return [Caveat("lag", run.label, reason)]


def _facts(compared: Beside) -> dict[str, Any]:
    """Return a comparison in the form of the JSON: times in the client's seconds, null for unknown values."""
    client = compared.client
    return {
        "file": client.path.name,
        "tool": client.tool,
        "paired_by": None if compared.paired_by == NOT else compared.paired_by,
        "pairs": compared.pairs,
        "requests": {"succeeded": client.succeeded, "failed": client.failed, "server": len(compared.compared.rows)},
        "prompt_tokens": {"client": _or_none(client.prompt_tokens), "server": compared.prompt_tokens},
        "output_tokens": {"client": _or_none(client.output_tokens), "server": compared.output_tokens},
        "measures": {name: _numbers(measure) for name, measure in compared.measures.items()},
        "doubts": list(compared.doubts),
    }


def _numbers(measure: Measure) -> dict[str, Mapping[str, float | None]]:
    differences: Any = {each: _or_none(measure.difference(each)) for each in STATISTICS}
    made: dict[str, Distribution] = {"client": measure.client, "server": measure.server}
    made |= {"difference": differences, "per_request": distribution(measure.apart_s)}
    return {name: {statistic: known.get(statistic) for statistic in STATISTICS} for name, known in made.items()}


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _count(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.0f}"


def _signed(value: float) -> str:
    return "0" if abs(value) < NOTHING_S else signed(value, "s")


def _paired(compared: Beside) -> str:
    if compared.paired_by == NOT:
        return "The file lists no requests: distributions of all requests, none paired."
    more = compared.served - compared.pairs
    rest = f" {more:,} more of the session are left out." if more and compared.paired_by == ID else ""
    return f"{compared.pairs:,} requests, paired by {compared.paired_by}.{rest}"


CLIENT, SERVER, APART = series(1), series(0), series(2)
SHARES = {"p50": 0.5, "p99": 0.99}


def charts(compared: Beside, number: int) -> list[Chart]:
    """Draw the comparison with one file, the `number`th of the report."""
    both = [measure for measure in compared.measures.values() if measure.client and measure.server]
    panels = [_distributions(compared, measure) for measure in both]
    caption = f"Share of values up to x, in seconds of the client. {compared.client.tool} lists "
    caption += "each request." if compared.client.requests is not None else "no requests: its percentiles are marked."
    made = [Chart(f"client-{number}", f"{compared.client.path.name}: client and server", caption, panels, columns=2)]
    apart = []
    for measure in (each for each in compared.measures.values() if len(each.apart_s)):
        drawn = unit(float(np.abs(measure.apart_s).max()))
        zero = Edge("", 0.0, Style(BLACK, "dashed"))
        marks: list[Mark] = [zero, cdf_line("client - server", measure.apart_s, None, drawn, APART)]
        apart.append(Panel(marks, drawn.name, "share", MEASURES[measure.name], y_range=(0.0, 1.03)))
    if apart:
        caption = f"The client's value less the server's, of {compared.pairs:,} requests paired by "
        caption += f"{compared.paired_by}."
        title = f"{compared.client.path.name}: how far apart"
        made.append(Chart(f"apart-{number}", title, caption, apart, columns=len(apart)))
    return made


def _distributions(compared: Beside, measure: Measure) -> Panel:
    server = measure.server_s
    client = compared.client.values(measure.name)
    names = [name for name in SHARES if name in measure.client]
    quoted = np.array([measure.client[name] for name in names])
    drawn = unit(float(max(server.max(), (client if len(client) else quoted).max(initial=0.0))))
    marks: list[Mark] = [cdf_line("server", server, measure.server_counts, drawn, SERVER)]
    if len(client):
        marks.append(cdf_line("client", client, None, drawn, CLIENT))
    else:
        texts = [f"client: {name} {shown(measure.client[name], 's')}" for name in names]
        heights = np.array([SHARES[name] for name in names])
        marks.append(Points("client", quoted / drawn.size, heights, CLIENT, texts))
    log = spread([server, client])
    return Panel(marks, drawn.name, "share", MEASURES[measure.name], x_log=log, y_range=(0.0, 1.03))
