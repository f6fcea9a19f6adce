"""vLLM's log of iterations (`--enable-logging-iteration-details`), as the requests that its steps imply.

A line has the numbers of requests in prefill and in decode, the prompts' tokens, and how long the engine waited for the
step. What its CPU does between two waits is taken to be the same for all steps; it follows from the seconds in the log.
Which request a row belongs to is not known: prompts that begin in one step are taken to be equally long, and the first
of the decoding requests to end first, so that each step has its true rows and tokens. A request comes in the middle of
the step before its first one, of an asynchronous loop of the one before; if none was in flight, when its first step
begins. What was in flight when the log begins or ends is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import dropwhile, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cbsim.errors import RunError

ITERATION = re.compile(
    r"(\d\d-\d\d \d\d:\d\d:\d\d) .*?(Engine \d+: |)Iteration\(\d+\): (\d{1,5}) context requests, "
    r"(\d{1,9}) context tokens, (\d{1,5}) generation requests, (\d{1,9}) generation tokens, "
    r"iteration elapsed time: (\d{1,9}\.\d+) ms(?! \(dummy\))"
)
SYNC = re.compile("(?i)async(hronous)?[ _]scheduling('?: False| is disabled)")
LEAST_S = 5.0  # of steps without a pause, which show what a step takes beside its wait


class _Step(NamedTuple):
    logged_s: float
    seconds: float
    prompts: int
    prompt_tokens: int
    decoding: int


@dataclass
class _Flying:
    """A request in flight."""

    start_s: float
    prompt_tokens: float = 0
    tokens_s: list[float] = field(default_factory=list)

    def fields(self) -> dict[str, float]:
        """Return the request in the fields of Measured."""
        ttft_s, e2e_s = (self.tokens_s[at] - self.start_s for at in (0, -1))
        known = {"prompt_tokens": round(self.prompt_tokens), "output_tokens": len(self.tokens_s)}
        return {"start_s": self.start_s, "ttft_s": ttft_s, "e2e_s": e2e_s, **known}


def requests(path: Path, content: str) -> Iterator[dict[str, float]]:
    """Yield the requests of a log, those that end first come first. Raises RunError."""
    steps = _steps(path, content)
    most = max(step.prompt_tokens + step.decoding for step in steps)
    waited = 0.5 if SYNC.search(content) else 1.5  # steps, on average
    flying, begun, now_s, before_s = list[_Flying](), list[_Flying](), 0.0, 0.0
    for step, after in pairwise(dropwhile(lambda step: step.decoding, steps)):
        ended = len(flying) - step.decoding
        if ended < 0:
            raise RunError(f"{path}: more requests decode than were in prefill before: are lines missing?", file=path)
        yield from (each.fields() for each in flying[:ended])
        flying = flying[ended:]
        if not flying and not begun:
            now_s, before_s = max(now_s, step.logged_s - step.seconds), 0.0
        begun += [_Flying(now_s - waited * before_s) for _ in range(step.prompts - len(begun))]
        for each in begun:
            each.prompt_tokens += step.prompt_tokens / len(begun)
        chunked = step.prompt_tokens + step.decoding == most and after.decoding < step.decoding + step.prompts
        goes_on = 1 if chunked and after.prompts else 0  # the last prompt, in the next step
        flying += begun[: len(begun) - goes_on]
        begun = begun[len(begun) - goes_on :]
        now_s, before_s = now_s + step.seconds, step.seconds
        for each in flying:
            each.tokens_s.append(now_s)


def _steps(path: Path, content: str) -> list[_Step]:
    rows = ITERATION.findall(content)
    try:
        stamps = [datetime.strptime(f"2000-{row[0]}", "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC) for row in rows]
    except ValueError as error:
        raise RunError(f"{path}: {error}", file=path) from None
    prompts, prompt_tokens, decoding, tokens = np.array([row[2:6] for row in rows], dtype=np.int64).T
    if len({row[1] for row in rows}) > 1 or (decoding != tokens).any():
        raise RunError(f"{path}: is of several engines, or of speculative decoding, expected neither", file=path)
    logged_s, waits_s = np.array(
        [(at.timestamp(), float(row[6]) / 1e3) for at, row in zip(stamps, rows, strict=True)]
    ).T
    marks = np.flatnonzero(np.diff(logged_s)) + 1  # the first lines of seconds: they are exact to a step
    busy = [(a, b) for a, b in pairwise(marks.tolist()) if decoding[a : b + 1].all()]
    parts = [(logged_s[b] - logged_s[a], waits_s[a + 1 : b + 1].sum(), b - a) for a, b in busy]
    spent_s, waited_s, count = np.sum([(0, 0, 0), *parts], axis=0)
    if spent_s < LEAST_S:
        raise RunError(f"{path}: decodes for {spent_s:g} s without a pause, needs {LEAST_S:g} s", file=path)
    columns = logged_s, waits_s + max((spent_s - waited_s) / count, 0.0), prompts, prompt_tokens, decoding
    return [_Step(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
