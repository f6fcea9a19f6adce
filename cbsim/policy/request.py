"""A request as submitted, its progress, and every legal change of its state.

Progress is counts only: no times, tensors or token values. A request that decodes one token a step carries no counter
of its own; it derives its progress from the pace of its decode batch (`Pace`), so a step costs what changed.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import Enum
from typing import Final

from librt.strings import BytesWriter

from cbsim.policy.value import replace, value

EVERY_BLOCK = 1 << 60
NO_BLOCKS: Final = BytesWriter()
MOST_STRETCHES = 4096  # of steps, from which on it is worth while to forget some


class Status(Enum):
    """The state of a request. FINISHED is final; its reason is in `Request.finish`."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class Finish(Enum):
    """The reason why a request ended. LENGTH: its limit, foreseeable; STOP: seen only with its token."""

    LENGTH = "length"
    STOP = "stop"
    ABORTED = "aborted"
    REFUSED = "refused"


@value(frozen=True, eq=False)
class RequestSpec:
    """A request as submitted. Nothing in a run overwrites it. Compared by identity: one object is one request.

    `output_tokens` is how many tokens the model will produce (declared by the workload), `max_tokens` the limit the
    scheduler knows; when the first is smaller, the end is a stop token that cannot be foreseen. `prefix` holds the ids
    of chained content hashes, one for every `prefix_block_tokens` tokens, valid for the first `prefix_tokens` tokens:
    equal id means equal content up to and including that block. `sample_of`: this is a further sample of that request,
    whose prompt it shares; it arrives right behind it. `computed_elsewhere`: another server can supply the KV of its
    prompt; `fetched_later`: another server will fetch the KV of this one.
    """

    index: int
    id: str
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    priority: int = 0
    prefix: tuple[int, ...] = ()
    prefix_block_tokens: int = 1
    prefix_tokens: int = 0
    sample_of: RequestSpec | None = None
    computed_elsewhere: bool = False
    fetched_later: bool = False

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or not 1 <= self.output_tokens <= self.max_tokens:
            raise ValueError(
                f"request {self.id}: needs prompt_tokens >= 1 and 1 <= output_tokens <= max_tokens, got "
                f"prompt_tokens={self.prompt_tokens}, output_tokens={self.output_tokens}, max_tokens={self.max_tokens}"
            )

    def shared_blocks(self, block_size: int, ahead: int = 0) -> int:
        """Return how many leading blocks, and the `ahead` tokens behind each, have declared content; the blocks after
        them are this request's own.
        """
        declared = min(self.prefix_tokens, len(self.prefix) * self.prefix_block_tokens)
        return max(0, declared - ahead) // block_size

    def block_key(self, block: int, block_size: int, ahead: int = 0) -> int:
        """Return the content key of a full block: equal keys, equal content, also of the `ahead` tokens behind it, and
        equal prefix. Private ones are negative.
        """
        last_token = (block + 1) * block_size - 1 + ahead
        if block < self.shared_blocks(block_size, ahead):
            return (self.prefix[last_token // self.prefix_block_tokens] << 24) + block
        return -((self.index << 24) + block + 1)


WHOLE, PREFILL, DECODE = range(3)  # legs of requests


def leg(spec: RequestSpec, which: int) -> RequestSpec:
    """Return a request as a server gets it: whole, or the leg of a server that prefills, whose one token counts for
    nothing, or that of a server which decodes, with the KV of its prompt from there.
    """
    if which == PREFILL:
        return replace(spec, output_tokens=1, max_tokens=1, fetched_later=True)
    return replace(spec, computed_elsewhere=True) if which == DECODE else spec


class Pace:
    """The steps that the requests of a decode batch have in common, and from which each derives its own progress.

    `planned` and `updated` count steps and are the index of the next one of each. `pace` and `completed` count those of
    them that did not rest: in a step that rests no request of the batch has a row.
    """

    def __init__(self) -> None:
        self.planned = self.updated = 0
        self.pace = self.completed = 0
        self.updated_at_plan = 0  # `updated` when the newest step was planned
        self._rested: list[int] = []  # steps in flight that rest, in order
        self._went: list[list[int]] = []  # [first step, steps] that have come back, up to the last that rested
        self._firsts: list[int] = []  # the first steps of these
        self._since = 0  # the first step behind these

    def advance(self, *, resting: bool) -> None:
        """Record that a step is planned."""
        if resting:
            self._rested.append(self.planned)
        else:
            self.pace += 1
        self.planned += 1
        self.updated_at_plan = self.updated

    def applied(self) -> None:
        """Record that the oldest step in flight has come back."""
        if self._rested and self._rested[0] == self.updated:
            del self._rested[0]
            if self.updated > self._since:
                self._went.append([self._since, self.updated - self._since])
                self._firsts.append(self._since)
            self._since = self.updated + 1
            if len(self._went) > MOST_STRETCHES:
                over = max(0, bisect_left(self._firsts, self.oldest + 1) - 1)
                del self._went[:over], self._firsts[:over]
        else:
            self.completed += 1
        self.updated += 1

    @property
    def oldest(self) -> int:
        """The step before which stretches may be forgotten."""
        return 0

    def known_at_plan(self, request: Request) -> int:
        """Return the tokens of a request of the batch that were known when its newest row was planned: those before the
        rows in flight then.

        The row that made it part of the batch, in step `since` - 1, is the first that could be in flight.
        """
        return request.computed - max(0, self.planned - 1 - max(self.updated_at_plan, request.since - 1))

    def stretches(self, since: int) -> list[list[int]]:
        """Return [first step, steps] in which rows have come back from step `since` on."""
        first = bisect_left(self._firsts, since + 1)
        result = self._went[first:]
        if first and (end := self._firsts[first - 1] + self._went[first - 1][1]) > since:
            result.insert(0, [since, end - since])
        if self.updated > (start := max(since, self._since)):
            result.append([start, self.updated - start])
        elif result:
            result[-1] = result[-1][:]  # one request may go on with it, the rest not
        return result


class Request:
    """The progress of one request. Its fields are written by these methods only, which the scheduler calls.

    `computed`: tokens whose KV is written or scheduled by a planned step. `scheduled`: output tokens that planned steps
    will have sampled, at most. `seen`: output tokens that came back. So prompt + scheduled is what is known of the
    sequence, and scheduled - seen is what is in flight.
    """

    def __init__(self, spec: RequestSpec, limit: int, block_size: int, ahead: int = 0) -> None:
        self.spec = spec
        self.named = spec.shared_blocks(block_size, ahead)  # leading blocks whose content another request might look up
        self.limit = limit  # output tokens after which the end is known in advance
        self.last = min(spec.output_tokens, limit)  # output tokens it will have produced when it ends
        self.status = Status.WAITING
        self.finish: Finish | None = None
        self.keeps_blocks = False  # whether its blocks stay its own for a while after its end
        self.order = -1  # place in the admission order, renewed at every admission, or in that of arrival
        self.batch: Pace | None = None
        self.since = 0  # first step whose row comes from the decode batch
        self.entered = 0  # tokens computed when it was last admitted: found in the cache
        self.restored = 0  # of them, those whose KV came back after it was parked, or from another server
        self.local_tokens: int | None = None  # where another server sends the rest: tokens found in the cache before
        self.epoch = 0  # bumped when rows in flight become worthless
        self.hashed = 0  # leading blocks whose content key is known
        self.own = NO_BLOCKS  # those that it does not share, in a pool that packs them
        self.drafts = 0  # draft tokens that its next row may verify
        self.cached: int | None = None  # prefix-cache hit at the first admission, tokens
        self.preemptions = 0
        self.high_water = 0  # most tokens computed before it lost its blocks: what lies below it is recomputed
        self.runs: list[list[int]] = []  # [first step, steps]: the steps that delivered tokens, one for each token
        self._computed = self._scheduled = self._seen = 0
        self._joined = 0  # the decode batch's pace when it joined

    @property
    def computed(self) -> int:
        batch = self.batch
        return self._computed if batch is None else self._computed + batch.pace - self._joined

    @property
    def scheduled(self) -> int:
        batch = self.batch
        return self._scheduled if batch is None else self._scheduled + batch.pace - self._joined

    @property
    def seen(self) -> int:
        batch = self.batch
        if batch is None or batch.updated <= self.since:
            return self._seen
        return self._seen + batch.completed - self._joined

    @property
    def known(self) -> int:
        """The tokens whose values are known: the prompt and the outputs that came back."""
        return self.spec.prompt_tokens + self.seen

    @property
    def target(self) -> int:
        """The tokens that have to be computed before the next output can be sampled."""
        return self.spec.prompt_tokens + self.scheduled

    @property
    def uncomputed(self) -> int:
        """The query tokens between what is computed and the next output; for a request outside any decode batch."""
        return self.spec.prompt_tokens + self._scheduled - self._computed

    @property
    def awaits_last(self) -> bool:
        """Whether its last token is in flight, whatever comes of drafts; for a request outside any decode batch."""
        return self._scheduled > self._seen and self._seen + 1 >= self.limit

    @property
    def fresh(self) -> bool:
        """Whether no row of it has been planned since it was last admitted."""
        return self._computed == self.entered and self.status is Status.PREFILL

    def admit(self, order: int, cached_tokens: int) -> None:
        """Leave the queue with the first `cached_tokens` tokens already in the cache."""
        if self.status is not Status.WAITING or self.batch is not None:
            raise self._broken("is admitted, and does not wait")
        self.status, self.order = Status.PREFILL, order
        self._computed = self.entered = cached_tokens
        local = cached_tokens if self.local_tokens is None else min(self.local_tokens, cached_tokens)
        self.restored, self.local_tokens = cached_tokens - local, None
        if self.cached is None:
            self.cached = local

    def fetch(self, local_tokens: int | None) -> None:
        """Note that the tokens behind so many cached ones come from another server; None: they do not, after all."""
        self.local_tokens = local_tokens

    def renew(self, order: int) -> None:
        """Set its place in the order of admission or arrival, for a request outside any decode batch."""
        if self.batch is not None:
            raise self._broken("gets another place in the order, and decodes with others")
        self.order = order

    def _broken(self, rule: str) -> AssertionError:
        """Return the error of a scheduler, perhaps a user's own, that treats this request against its state."""
        together = " with others" if self.batch is not None else ""
        return AssertionError(f"request {self.spec.id} {rule}: it is in {self.status.value}{together}")

    def advance(self, tokens: int, outputs: int) -> None:
        """Record a planned row of `tokens` query tokens that may yield `outputs` tokens: one behind each query token
        from the last wanted one on. Those after it are guesses.
        """
        most = self.uncomputed + (outputs - 1 if outputs else 0)
        if self.batch is not None or not 0 < tokens <= most or (outputs and tokens < most):
            raise self._broken(f"has a row of {tokens} tokens for {outputs} outputs, and {self.uncomputed} to compute")
        self._computed += tokens
        self._scheduled += outputs
        self.drafts = 0
        self.status = Status.DECODE if outputs else Status.PREFILL

    def draft(self, tokens: int) -> None:
        """Record that so many draft tokens follow the tokens that are scheduled."""
        self.drafts = tokens

    def join(self, batch: Pace) -> None:
        """Decode one token a step at the decode batch's pace, from the next step on."""
        if self.batch is not None or self.status is not Status.DECODE:
            raise self._broken("joins those that decode together, and is not one that decodes alone")
        self.batch, self.since, self._joined = batch, batch.planned, batch.pace

    def leave(self) -> None:
        """Copy the decode batch's progress into the request's own counters. The caller handles rows still in flight."""
        batch = self.batch
        if batch is None:
            raise self._broken("leaves those that decode together, and is none of them")
        self._computed, self._scheduled, self._seen = self.computed, self.scheduled, self.seen
        self.batch = None
        join_runs(self.runs, batch.stretches(self.since))

    def receive(self, step: int, tokens: int = 1) -> None:
        """Record that `tokens` output tokens, sampled by `step`, came back."""
        if self.batch is not None and step >= self.since:
            raise self._broken(f"gets a token of step {step} of its own, and decodes with others")
        self._seen += tokens
        if self._seen > self._scheduled:
            self._scheduled = self._seen
        if tokens and self.runs and self.runs[-1][0] + self.runs[-1][1] == step:
            self.runs[-1][1] += 1
            tokens -= 1
        self.runs += [[step, 1] for _ in range(tokens)]

    def reconcile(self, short: int) -> None:
        """Take back `short` tokens that a row did not yield: they are neither scheduled nor computed.

        Rows in flight behind it were planned as if it yielded them all; they begin so much earlier. A request that has
        lost everything since has nothing to take back.
        """
        if self.status is Status.WAITING and not self._computed:
            return
        if self.batch is not None or self._scheduled - self._seen < short:
            raise self._broken(f"owes {short} tokens of {self._scheduled - self._seen} in flight")
        self._scheduled -= short
        self._computed -= short

    def delivered(self) -> list[list[int]]:
        """Return [first step, steps] of the tokens delivered so far; `runs` lacks those of the current decode batch. A
        step that delivered several is part of as many entries.
        """
        if self.batch is None:
            return self.runs
        return join_runs([run[:] for run in self.runs], self.batch.stretches(self.since))

    def hash_to(self, blocks: int) -> None:
        """Record that the first `blocks` blocks have a content key."""
        if blocks > self.hashed:
            self.hashed = blocks

    def pack(self, own: BytesWriter) -> None:
        """Keep the blocks that it does not share in `own`, packed."""
        self.own = own

    def cut(self, size: int) -> bytes:
        """Remove the first `size` bytes of its own blocks."""
        own = self.own.getvalue()
        self.own.truncate(0)
        if size == len(own):
            return own
        self.own.write(own[size:])
        return own[:size]

    def name_all(self) -> None:
        """Give every full block a key, also those whose content no other request can look up."""
        self.named = EVERY_BLOCK

    def requeue(self, drop_in_flight: bool) -> None:
        """Lose everything computed and wait again. Rows in flight still deliver unless they are dropped."""
        if self.batch is not None or self.status not in (Status.PREFILL, Status.DECODE):
            raise self._broken("is set back, and does not run by itself")
        self.high_water = max(self.high_water, self._computed)
        self.status, self._computed, self.hashed, self.drafts = Status.WAITING, 0, 0, 0
        self._scheduled = self._seen
        self.name_all()
        self.preemptions += 1
        self.epoch += drop_in_flight

    def park(self, drop_in_flight: bool) -> None:
        """Wait again and keep what is computed, whose KV is elsewhere meanwhile. Rows in flight still deliver unless
        they are dropped; then the next row begins with the last known token at the latest.
        """
        computed, scheduled, known = self._computed, self._scheduled, self.known
        self.requeue(drop_in_flight)
        if drop_in_flight:
            self._computed = min(computed, known - 1)
        else:
            self._computed, self._scheduled = computed, scheduled

    def resume(self, order: int) -> None:
        """Leave the queue with what was computed before it was parked, in fresh blocks."""
        self.admit(order, self._computed)
        self.restored = self.entered

    @property
    def natural_end(self) -> Finish:
        """The reason for its end if it ends with the token seen last."""
        return Finish.LENGTH if self.seen == self.limit else Finish.STOP

    def end(self, reason: Finish, *, keeps_blocks: bool = False) -> None:
        assert self.finish is None
        assert self.batch is None
        self.status, self.finish, self.keeps_blocks = Status.FINISHED, reason, keeps_blocks


def join_runs(runs: list[list[int]], more: list[list[int]]) -> list[list[int]]:
    """Extend `runs` by `more`, which follow them, and return them; each run is [first step, steps]."""
    if runs and more and runs[-1][0] + runs[-1][1] == more[0][0]:
        runs[-1][1] += more.pop(0)[1]
    runs += more
    return runs
