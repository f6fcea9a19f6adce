"""The interface between the HTTP front end and a server, simulated or real: submit, stream tokens, cancel.

All methods are called on the event loop's thread. Times are seconds of the server's clock since its start: those of the
simulated machine if time is scaled or virtual, else those of this machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cbsim.http.tokenizer import Tokenizer
from cbsim.policy.loop import Scheduler
from cbsim.policy.request import RequestSpec
from cbsim.runs.running import Session
from cbsim.runs.served import Contents, Log
from cbsim.scenario.scenario import Scenario, longest_text

NS = 1_000_000_000
STOP, ABORT, ERROR = "stop", "abort", "error"  # finish reasons of a stream


@dataclass(frozen=True, slots=True)
class Generation:
    """A prompt to continue. `id` is its name in the record, unique in a session. `stop_token_ids` end a text that has
    `min_tokens`, as the model's own end token does unless `ignore_eos`. Requests of different `cache_salt` share no KV.
    """

    id: str
    prompt: Sequence[int]
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    priority: int = 0
    cache_salt: str = ""


class Meter:
    """An observer of requests and steps, called at each event, in the server's time. This one counts nothing."""

    def scheduled(self, stream: Stream) -> None:
        """Handle the planning of a request's first row: `scheduled_s` and `cached_tokens` are known."""

    def emitted(self, stream: Stream, tokens: int, gap_s: float) -> None:
        """Count emitted tokens, `gap_s` seconds after the previous ones, or after the arrival for the first ones."""

    def ended(self, stream: Stream) -> None: ...

    def stepped(self, tokens: int, preempted: int) -> None:
        """Count a completed step: its query tokens, and the requests that its plan preempted."""

    def rejected(self, reason: str) -> None: ...

    def exposition(self) -> bytes | None:
        """Return the counts in Prometheus's format for /metrics; None if there are none."""
        return None


UNMETERED = Meter()


class Stream:
    """The tokens of a request: put by the server, taken by one reader, later or never. Ids that were not taken are
    buffered, so a server is never blocked. `finish` is None until the end; then `stop`, `length`, `abort` (cancelled)
    or `error`, whose message is in `error`.
    """

    __slots__ = (
        *("_heard", "_unread", "arrived_s", "cached_tokens", "error", "finish", "first_s", "generation"),
        *("last_s", "meter", "preemptions", "scheduled_s", "tokens"),
    )

    def __init__(self, generation: Generation, meter: Meter = UNMETERED) -> None:
        self.generation, self.meter = generation, meter
        self.arrived_s = 0.0
        self.scheduled_s: float | None = None
        self.first_s: float | None = None
        self.last_s: float | None = None  # time of the newest token, or of the end once it has ended
        self.tokens = self.cached_tokens = self.preemptions = 0
        self.finish: str | None = None
        self.error: str | None = None
        self._unread: list[int] = []
        self._heard: Callable[[], None] | None = None

    @property
    def unread(self) -> int:
        """The number of tokens that were not taken."""
        return len(self._unread)

    def arrive(self, at_s: float) -> None:
        """Record the time at which the server received the request."""
        self.arrived_s = at_s

    def schedule(self, at_s: float, cached_tokens: int) -> None:
        """Record that the request's first row is planned."""
        self.scheduled_s, self.cached_tokens = at_s, cached_tokens
        self.meter.scheduled(self)

    def put(self, ids: Sequence[int], at_s: float) -> None:
        """Append the next tokens, visible from `at_s` on."""
        before = self.arrived_s if self.last_s is None else self.last_s
        if self.first_s is None:
            self.first_s = at_s
        self.last_s = at_s
        self.tokens += len(ids)
        self._unread += ids
        self.meter.emitted(self, len(ids), at_s - before)
        self._wake()

    def end(self, finish: str, at_s: float, error: str | None = None) -> None:
        """End the stream. Later calls do nothing."""
        if self.finish is None:
            self.finish, self.error, self.last_s = finish, error, at_s
            self.meter.ended(self)
            self._wake()

    def _wake(self) -> None:
        if (heard := self._heard) is not None:
            self._heard = None
            heard()

    def listen(self, heard: Callable[[], None] | None) -> None:
        """Set a function to be called once, inside the next `put` or `end`, so it must be short."""
        self._heard = heard

    def take(self, most: int | None = None) -> list[int]:
        """Take the next tokens, at most `most`."""
        ids = self._unread[:most]
        del self._unread[:most]
        return ids


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a server: running and waiting requests, and the share of its cache in use."""

    running: int
    waiting: int
    kv_usage: float
    block_size: int
    num_blocks: int

    @classmethod
    def of(cls, scheduler: Scheduler) -> Load:
        pool = scheduler.pool
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        blocks = getattr(getattr(scheduler, "options", None), "num_blocks", pool.num_blocks)  # with vLLM's null block
        return cls(running, waiting, 1 - pool.free / pool.num_blocks, pool.block_size, blocks)


@dataclass(frozen=True, slots=True)
class Timing:
    """A session's timeliness: lags in real seconds, of which one is `scale` simulated; steps beyond the bound."""

    scale: float
    lag_s: float
    lag_max_s: float
    lag_p99_s: float
    steps: int
    late_steps: int
    median_itl_s: float  # seconds of this machine

    @property
    def bound_s(self) -> float:
        """The lag in seconds below which figures do not change: 1 ms, or 1 % of the median ITL if that is more."""
        return max(1e-3, 0.01 * self.median_itl_s)

    @property
    def faithful(self) -> bool:
        return self.lag_p99_s <= self.bound_s

    @property
    def facts(self) -> dict[str, Any]:
        """The fields on timeliness in a session's summary."""
        return {
            "time_scale": self.scale,
            "faithful": self.faithful,
            "lag_p99_s": self.lag_p99_s,
            "lag_max_s": self.lag_max_s,
            "lag_bound_s": self.bound_s,
            "late_steps": self.late_steps,
        }

    def unfaithful(self, reason: str) -> str:
        """Return a message that a session's figures depend on more than the model, with the reason."""
        lag, bound = (
            f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
            for seconds in (self.lag_p99_s, self.bound_s)
        )
        return f"not faithful: 1 % of its steps came {lag} late or more, the bound is {bound}: {reason}"


class Backend(ABC):
    """A server behind the endpoint, of one session: requests that have not ended, their log and their content. Clients
    know its `model` by name, and send at most `max_model_len` tokens of prompt and answer. `meter` is set by the front
    end before `run`; `dead` is why the server cannot continue, None while it can.
    """

    session: Session
    contents: Contents

    def __init__(self, model: str, tokenizer: Tokenizer, scenario: Scenario, loop: str) -> None:
        self.model, self.tokenizer, self.max_model_len = model, tokenizer, longest_text(scenario, loop)
        self.meter: Meter = UNMETERED
        self.dead: str | None = None
        self.log = Log()
        self._streams: dict[RequestSpec, Stream] = {}
        self._specs: dict[Stream, RequestSpec] = {}

    @property
    @abstractmethod
    def load(self) -> Load: ...

    @property
    def timing(self) -> Timing | None:
        """The session's timeliness; None for a real server, which has no deadlines."""
        return None

    @abstractmethod
    def submit(self, stream: Stream) -> None:
        """Submit a request now. If it is invalid, its stream ends with the error."""

    def cancel(self, stream: Stream) -> None:
        """Cancel a request, unless it has ended: its stream aborts now, the scheduler drops it at the next poll."""
        if (spec := self._specs.get(stream)) is not None:
            at_ns = self._stamp()
            self.log.left(spec, at_ns)
            self._withdraw(spec, at_ns)
            self._end(stream, ABORT, at_ns)

    def forget_prefixes(self) -> None:
        """Prevent later requests from hitting the KV of earlier ones."""
        self.contents.forget()

    @abstractmethod
    async def run(self) -> None:
        """Serve until `close` and the last end. Raises nothing: a failed server ends its streams, and is `dead`."""

    @abstractmethod
    def close(self) -> None:
        """Stop accepting requests; `run` ends when all streams have ended."""

    @abstractmethod
    def _stamp(self) -> int:
        """Return the time in ns at which a client's request or cancellation arrives now."""

    @abstractmethod
    def _withdraw(self, spec: RequestSpec, at_ns: int) -> None:
        """Notify the server that a client has cancelled its request."""

    def _enter(self, stream: Stream, at_ns: int, output_tokens: int, answer: Sequence[int] = ()) -> RequestSpec:
        """Record a request that has arrived; an `answer` known beforehand is part of its content."""
        generation, contents = stream.generation, self.contents
        prefix = contents.prefix([*generation.prompt, *answer], generation.cache_salt)
        spec = RequestSpec(
            index=self.log.count,
            id=generation.id,
            arrival_ns=at_ns,
            prompt_tokens=len(generation.prompt),
            output_tokens=output_tokens,
            max_tokens=generation.max_tokens,
            priority=generation.priority,
            prefix=prefix,
            prefix_block_tokens=contents.block_tokens,
            prefix_tokens=len(prefix) * contents.block_tokens,
        )
        self.log.came(spec)
        self._streams[spec], self._specs[stream] = stream, spec
        return spec

    def _end(self, stream: Stream, finish: str, at_ns: int, error: str | None = None) -> None:
        """End a stream unless it has ended."""
        if (spec := self._specs.pop(stream, None)) is not None:
            del self._streams[spec]
            stream.end(finish, at_ns / NS, error)

    def _fail(self, reason: str | None, at_ns: int) -> None:
        """End every request, as the server has ended; `reason` states why, None if it ended regularly."""
        self.dead = reason
        for stream in [*self._specs]:
            self._end(stream, ERROR, at_ns, reason)
