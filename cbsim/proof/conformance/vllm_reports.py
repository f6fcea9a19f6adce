"""What vLLM's traces say of every request at the end: when it was queued, scheduled, heard of, how often preempted.

The engine tells of events with the next token of their request. From format 2 on that is what the report has: whoever
is aborted before its first token was never said to be queued or scheduled, and a preemption behind which no token came
is not counted. Format 1 asked the requests themselves, and so has every event.
"""

from __future__ import annotations

from typing import Any

from cbsim.policy.request import RequestSpec

Line = dict[str, Any]


class Reports:
    """The reports of all requests; `said` is what they have got to say by now. Times are the trace's."""

    def __init__(self, trace_format: int) -> None:
        self.said: dict[str, Line] = {}
        self._events: dict[str, Line] = {}  # as `said`, of what has happened
        self._at_once = trace_format == 1

    def arrived(self, spec: RequestSpec, now: int) -> None:
        self.said[spec.id] = {"arrival": spec.arrival_ns, "preemptions": 0, "n_out": 0}
        self._events[spec.id] = {"queued_ts": now, "preemptions": 0}
        self._happened(spec)

    def scheduled(self, spec: RequestSpec, now: int) -> None:
        """Of a row: it tells when the first one was planned."""
        if "scheduled_ts" not in self._events[spec.id]:
            self._events[spec.id]["scheduled_ts"] = now
            self._happened(spec)

    def preempted(self, spec: RequestSpec) -> None:
        self._events[spec.id]["preemptions"] += 1
        self._happened(spec)

    def token(self, spec: RequestSpec, now: int) -> None:
        said = self.said[spec.id]
        said |= self._events[spec.id]
        said["n_out"] += 1
        said.setdefault("first_token_ts", now)
        said["last_token_ts"] = now

    def _happened(self, spec: RequestSpec) -> None:
        if self._at_once:
            self.said[spec.id] |= self._events[spec.id]
