"""Recorded workloads: rows in order of time, and readers of Mooncake's and aiperf's JSON lines.

A request that generated nothing (0 output tokens) is an error: it would have no first token to wait for. The public
traces that we know have no such request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from pydantic import model_validator

from cbsim.policy.request import RequestSpec
from cbsim.scenario import catalog, demand
from cbsim.scenario.fields import Count, Form, Milliseconds, Natural, complaint
from cbsim.scenario.rows import check_not_empty, lines, open_text
from cbsim.workload.requests import Sessions, Streams, Workload

BLOCK_TOKENS = 512
"""Tokens of the block that one hash id names, in Mooncake's and aiperf's files."""
MS = 1_000_000  # ns


class Arrival(NamedTuple):
    """A row of a trace; `hash_ids` are those of its prompt's blocks of `block_tokens`, the last one perhaps short."""

    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    id: str = ""
    block_tokens: int = 1


class Hashed(Form):
    """The request of a line; `hash_ids` name the blocks of 512 tokens of its prompt, the last one perhaps short."""

    input_length: Count
    output_length: Count
    hash_ids: list[Natural]

    @model_validator(mode="after")
    def _id_for_each_block(self) -> Self:
        blocks = -(-self.input_length // BLOCK_TOKENS)
        if len(self.hash_ids) != blocks:
            expected = f"{blocks} ids, one for every {BLOCK_TOKENS} of {self.input_length} tokens"
            raise complaint(f"got {len(self.hash_ids)} ids, expected {expected}", "hash_ids")
        return self


class Stamped(Hashed):
    """A request of a Mooncake trace, or the first turn of a session."""

    timestamp: Milliseconds


class LaterTurn(Hashed):
    """A turn that arrives its delay after the end of the turn before."""

    delay: Milliseconds


class Conversation(NamedTuple):
    """The turns of a session, each of so many tokens new to the conversation."""

    id: str
    first: Stamped
    later: list[LaterTurn]

    @property
    def turns(self) -> Sequence[Hashed]:
        return self.first, *self.later


def mooncake(path: Path, limit: int | None = None) -> list[Arrival]:
    """Read a Mooncake trace. A hash id names a 512-token block of the prompt together with everything before it."""
    rows: list[Arrival] = []
    with open_text(path) as file:
        for line in islice(lines(path, file), limit):
            request = line.checked(Stamped)
            now = round(request.timestamp * MS)
            if rows and now < rows[-1].arrival_ns:
                raise line.bad("timestamp", f"not less than in the row above ({rows[-1].arrival_ns // MS})")
            ids = tuple(request.hash_ids)
            rows.append(Arrival(now, request.input_length, request.output_length, ids, block_tokens=BLOCK_TOKENS))
    check_not_empty(path, rows)
    return rows


def agentic(path: Path, limit: int | None = None) -> list[Conversation]:
    """Read the sessions of an agentic trace of aiperf, at most `limit`, in order of their first lines.

    `input_length` counts the tokens that a turn adds to the conversation, and `hash_ids` names the 512-token blocks of
    these new tokens, the last one short. A first turn (it has `timestamp`, in ms, and `group_id`) is chained from the
    start of the prompt: all sessions share their first blocks (tools and system prompt), sessions of one `group_id`
    the next ones (a repository), and the rest is the session's own. Later turns (they have `delay`, in ms after the
    turn before has ended) share no id with anything.
    """
    sessions: dict[str, Conversation] = {}
    with open_text(path) as file:
        for line in lines(path, file):
            name = line.data.get("session_id")
            if not isinstance(name, str) or not name:
                raise line.bad("session_id", "text")
            if name in sessions:
                sessions[name].later.append(line.checked(LaterTurn))
            elif len(sessions) != limit:
                sessions[name] = Conversation(name, line.checked(Stamped), [])
    check_not_empty(path, sessions)
    return list(sessions.values())


GRID_NS = 3_000_000_000
"""Timestamps of a Mooncake trace are multiples of this, give or take GRID_SLACK_NS."""
GRID_SLACK_NS = 10_000_000


def spread(rows: list[Arrival], rng: np.random.Generator) -> list[Arrival]:
    """Move requests stamped with a multiple of 3 s to random times within the 3 s that follow, order kept. A trace with
    a timestamp off the grid has real times and is left as it is.
    """
    off = [(row.arrival_ns + GRID_SLACK_NS) % GRID_NS for row in rows]
    if max(off) > 2 * GRID_SLACK_NS:
        return rows
    moved: list[Arrival] = []
    for cell, group in groupby(rows, key=lambda row: (row.arrival_ns + GRID_SLACK_NS) // GRID_NS):
        members = list(group)
        offsets = np.sort(rng.integers(0, GRID_NS, len(members))).tolist()
        moved += [row._replace(arrival_ns=cell * GRID_NS + at) for row, at in zip(members, offsets, strict=True)]
    return moved


def spec_of(index: int, row: Arrival) -> RequestSpec:
    return RequestSpec(
        index=index,
        id=row.id or str(index),
        arrival_ns=row.arrival_ns,
        prompt_tokens=row.prompt_tokens,
        output_tokens=row.output_tokens,
        max_tokens=row.output_tokens,
        prefix=row.hash_ids,
        prefix_block_tokens=row.block_tokens,
        prefix_tokens=min(row.prompt_tokens, len(row.hash_ids) * row.block_tokens),
    )


def timed(rows: Iterable[Arrival], scale: float = 1.0) -> Workload:
    """Return the workload of a trace, its times multiplied by `scale`."""
    scaled = rows if scale == 1 else (row._replace(arrival_ns=round(row.arrival_ns * scale)) for row in rows)
    specs = [spec_of(index, row) for index, row in enumerate(scaled)]
    return Workload(specs, len(specs))


def mooncake_workload(form: demand.Mooncake, streams: Streams) -> Workload:
    rows = mooncake(catalog.data(form.path), form.limit)
    return timed(spread(rows, streams.spread) if form.spread else rows, form.time_scale)


def agentic_workload(form: demand.Agentic) -> Workload:
    """Return the workload of an agentic trace. Turns are numbered session by session and share all earlier content."""
    sessions = agentic(catalog.data(form.path), form.limit)
    own = 1 + max(max(turn.hash_ids) for session in sessions for turn in session.turns)
    first: list[RequestSpec] = []
    following: dict[int, tuple[RequestSpec, int]] = {}
    index = 0
    for session in sessions:
        specs = _turns(session, index, own, form.time_scale)
        first.append(specs[0])
        for before, spec, turn in zip(specs, specs[1:], session.later, strict=False):
            following[before.index] = (spec, round(round(turn.delay * MS) * form.time_scale))
        index += len(specs)
        own += len(specs[-1].prefix)
    return Workload(first, index, follow=Sessions(following))


def _turns(session: Conversation, index: int, own: int, scale: float) -> list[RequestSpec]:
    """Return the requests of one session. Its length only grows, so a block of 512 tokens has one id in all turns: the
    trace's where the first turn fills the block, else one of the session's own, counted from `own`.
    """
    shared = session.first.hash_ids[: session.first.input_length // BLOCK_TOKENS]
    length = sum(turn.input_length + turn.output_length for turn in session.turns)
    ids = (*shared, *range(own + len(shared), own + -(-length // BLOCK_TOKENS)))
    specs, spoken = [], 0
    for number, turn in enumerate(session.turns):
        prompt = spoken + turn.input_length
        spoken = prompt + turn.output_length
        at_ns, known = round(round(session.first.timestamp * MS) * scale), ids[: -(-spoken // BLOCK_TOKENS)]
        row = Arrival(at_ns, prompt, turn.output_length, known, f"{session.id}/{number}", block_tokens=BLOCK_TOKENS)
        specs.append(replace(spec_of(index + number, row), prefix_tokens=spoken))
    return specs
