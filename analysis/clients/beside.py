"""A comparison of a client's file with the run directory of the session that it used.

Requests are paired by id if client and session share them; else, if both have equally many, in order of start and
arrival. If the client has statistics only, nothing is paired. A session with scaled time has its own seconds: they are
divided by the scale, so that all times are the client's.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from analysis.clients.files import MEASURES, Client, Distribution, Measured, distribution
from analysis.statistics.comparable import Incomparable
from analysis.statistics.labels import is_number
from analysis.statistics.loading import LoadedRun
from cbsim.draw.chart import Floats
from cbsim.errors import RunError
from cbsim.record.columns import NS
from cbsim.record.tables import Ints, Requests, token_times
from cbsim.scenario.fields import shown

ID, ORDER, NOT = "id", "order of arrival", "not"
ANSWER = re.compile(r"^(?:chatcmpl|cmpl)-")
SERIAL = re.compile(r"-\d+$")
NUMBERED = re.compile(r"^(.*\D)(\d+)$")


class Pairs(NamedTuple):
    """The paired requests of a client and of its session, in equal numbers; `by` is ID or ORDER."""

    by: str
    measured: Sequence[Measured]
    rows: Ints  # rows of the session's table


@dataclass(frozen=True, slots=True)
class Measure:
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


@dataclass(frozen=True, slots=True)
class Beside:
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
        raise RunError(f"{run.path / 'env.json'}: time_scale: got {shown(value)}, expected a number > 0")
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


# -- pairing


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


# -- measures


def _measure(run: LoadedRun, client: Client, compared: Requests, pairs: Pairs | None, name: str) -> Measure:
    factor, counts, apart = scale(run), None, np.zeros(0)
    if name == "itl_s":
        occurring = compared.gap_counts > 0
        values, counts = compared.gaps_ns[occurring] / NS / factor, compared.gap_counts[occurring]
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
