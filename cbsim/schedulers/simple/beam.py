"""Beam search with iteration-level batching, as `generate(num_beams=k)` searches, on paged blocks.

A request is k texts. One of them computes the prompt but for its last token; then all compute that token and every one
after it, side by side in each step, and go on with the k best continuations of all k texts: a result names the text
that each beam took over. What texts have in common lies in shared blocks; the last block of a text that several go on
with is copied.

Requests are admitted first come, first served, if the cache has room for k whole texts that share nothing: so none is
preempted. The next step's tables follow from a result, so no step is planned ahead of one, in either loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from cbsim.kv.blocks import BlockPool, FreeQueue
from cbsim.policy.decoding import Decoding
from cbsim.policy.kind import SchedulerKind
from cbsim.policy.plan import Chunk, Outcome, StepPlan, StepResult
from cbsim.policy.request import Finish, Request, RequestSpec, Status
from cbsim.policy.transfers import Direction, Transfer
from cbsim.policy.value import mypyc_attr, replace
from cbsim.schedulers.base import SchedulerBase
from cbsim.schedulers.simple.settings import BeamOptions, BeamSettings, resolve_beam

Exchanged = tuple[Request, list[tuple[int, int]], int | None]
"""A beam with another text: its table's changed entries (index, block), the block of which its last is a copy."""


@mypyc_attr(allow_interpreted_subclasses=True)
class BeamPool(BlockPool):
    """A pool whose blocks may be in several tables, which are exchanged as the texts are; none has a content key.

    All beams of a request are as long as each other. Full blocks are shared by reference; a block that is written to
    belongs to one beam: of the beams that go on with the same text the first to keep it does so, and the others get a
    copy of it.
    """

    def __init__(self, block_size: int, num_blocks: int) -> None:
        super().__init__(block_size, num_blocks, FreeQueue(range(num_blocks), unhashed_first=True))

    def fork(self, request: Request, beam: Request, computed: int) -> int | None:
        """Give a beam a table of its own for what a request has computed. Return the block that it has to copy."""
        whole, table = computed // self.block_size, self.tables[request]
        self.tables[beam] = self._shared(table[:whole])
        if computed % self.block_size == 0:
            return None
        self.grow(beam, 1)
        return table[whole]

    def exchange(self, beams: Sequence[Request], parents: Sequence[Request], computed: int) -> list[Exchanged]:
        """Let beam i go on with the `computed` tokens of parents[i], all in its table. Return the beams changed."""
        whole, rest = divmod(computed, self.block_size)
        before = {beam: self.tables[beam] for beam in beams}
        keeper: dict[Request, Request] = {}  # for each text: the beam that keeps the block that is written to
        for i, beam in enumerate(beams):
            if beam is parents[i] or parents[i] not in keeper:
                keeper[parents[i]] = beam
        for i, beam in enumerate(beams):
            table = before[parents[i]]
            self.tables[beam] = self._shared(table[:] if keeper[parents[i]] is beam else table[:whole])
        for table in before.values():
            self._give_back(table, 0)
        exchanged: list[Exchanged] = []
        for i, beam in enumerate(beams):
            copied: int | None = None
            if rest and keeper[parents[i]] is not beam:
                copied = before[parents[i]][whole]
                self.grow(beam, 1)
            own, now = before[beam], self.tables[beam]
            entries = [(at, block) for at, block in enumerate(now) if block != own[at]]
            if entries or copied is not None:  # the target of the copy may be the block that it had
                exchanged.append((beam, entries, copied))
        return exchanged

    def _shared(self, blocks: list[int]) -> list[int]:
        """Return these blocks, each of which is in one more table."""
        for block in blocks:
            self._refs[block] = self._refs.get(block, 1) + 1
        return blocks


class Search:
    """The texts of one request. `beams[0]` computes the prompt; `forked`: the others have taken it over."""

    def __init__(self, first: Request, blocks: int) -> None:
        self.beams = [first]
        self.blocks = blocks  # the most blocks that all of them together can have
        self.forked = False


@mypyc_attr(allow_interpreted_subclasses=True)
class BeamScheduler(SchedulerBase):
    """A policy for beam search."""

    def __init__(self, options: BeamOptions) -> None:
        self.pool = BeamPool(options.block_size, options.num_blocks)
        super().__init__(options, Decoding(self.pool))
        self.options = options
        self.waiting: deque[Request] = deque()
        self.searches: list[Search] = []  # those that have been admitted
        self._search: dict[Request, Search] = {}
        self._scheduled = 0  # blocks reserved for admitted requests

    @property
    def running(self) -> list[Request]:
        return [beam for search in self.searches for beam in search.beams]

    def refusal(self, spec: RequestSpec) -> str | None:
        needed, have = self._whole(spec), self.pool.num_blocks
        if needed > have:
            return f"{self.options.num_beams} texts need up to {needed} blocks, the cache has {have}"
        if spec.sample_of is not None and spec.max_tokens != spec.sample_of.max_tokens:
            return f"max_tokens is {spec.max_tokens}, that of the other texts {spec.sample_of.max_tokens}"
        return None

    def _whole(self, spec: RequestSpec) -> int:
        """Return the blocks of all texts of a request at their end; the last tokens are never computed."""
        return self.options.num_beams * self.pool.blocks_for(spec.prompt_tokens + spec.max_tokens - 1)

    def add(self, spec: RequestSpec) -> None:
        request = self.decoding.add(spec, spec.max_tokens)
        first = self.requests.get(spec.sample_of) if spec.sample_of is not None else None
        search = self._search.get(first) if first is not None else None
        if search is None or len(search.beams) == self.options.num_beams:
            search = Search(request, self._whole(spec))
        else:
            search.beams.append(request)
        self._search[request] = search
        self.waiting.append(request)

    def cancel(self, spec: RequestSpec) -> None:
        """Cancel all texts of a request together."""
        request = self.requests.get(spec)
        if request is not None:
            for beam in list(self._search[request].beams):
                self._finish(beam, Finish.ABORTED)

    def schedule(self) -> StepPlan | None:
        rows: dict[Request, Chunk] = {}
        ranked: list[tuple[RequestSpec, ...]] = []
        left = self.options.max_num_batched_tokens
        for search in self.searches:
            left -= self._go_on(search, left, rows, ranked)
        while self.waiting and left and self._has_room(self._search[self.waiting[0]]):
            search = self._search[self.waiting[0]]
            self._scheduled += search.blocks
            self.searches.append(search)
            self.waiting = deque([request for request in self.waiting if self._search[request] is not search])
            self.decoding.admit(search.beams[0])
            left -= self._go_on(search, left, rows, ranked)
        if not rows:
            return None
        plan = self.decoding.plan(rows, running=len(self.running), waiting=len(self.waiting))
        return replace(plan, ranked=tuple(ranked))

    def _has_room(self, search: Search) -> bool:
        slots = self.options.max_num_seqs - len(self.running)
        return len(search.beams) <= slots and search.blocks <= self.pool.num_blocks - self._scheduled

    def _go_on(
        self, search: Search, left: int, rows: dict[Request, Chunk], ranked: list[tuple[RequestSpec, ...]]
    ) -> int:
        """Add rows of at most `left` tokens: some of the prompt, or one of each text. Return their tokens."""
        first = search.beams[0]
        tokens = min(first.uncomputed - 1, left)
        if tokens:
            self._add(first, tokens, rows)
            return tokens
        if len(search.beams) > left:
            return 0
        if not search.forked:
            self._fork(search)
        for beam in search.beams:
            self._add(beam, 1, rows)
        if self.options.num_beams > 1:
            ranked.append(tuple([beam.spec for beam in search.beams]))
        return len(search.beams)

    def _add(self, request: Request, tokens: int, rows: dict[Request, Chunk]) -> None:
        blocks = self.pool.grow(request, self.pool.missing(request, request.computed + tokens))
        rows[request] = self.decoding.row(request, tokens, blocks)

    def _fork(self, search: Search) -> None:
        """Start every text with the last token of the prompt, once all the others are computed."""
        search.forked = True
        first = search.beams[0]
        for beam in search.beams[1:]:
            copied = self.pool.fork(first, beam, first.computed) if first.computed else None
            self.decoding.admit(beam, first.computed)
            if copied is not None:
                self._copy(copied, beam)

    def _copy(self, block: int, beam: Request) -> None:
        self.decoding.transfers.append(Transfer(Direction.COPY, (block,), (self.pool.tables[beam][-1],), beam.spec))

    def runs_ahead(self, plan: StepPlan) -> bool:
        return False

    def update(self, plan: StepPlan, result: StepResult) -> Outcome:
        outcome = super().update(plan, result)
        if result.parents:
            self._exchange(plan, dict(result.parents))
        return outcome

    def _exchange(self, plan: StepPlan, parents: dict[RequestSpec, RequestSpec]) -> None:
        """Exchange the tables of texts that go on with another's."""
        for group in plan.ranked:
            if parents.keys().isdisjoint(group) or any(spec not in self.requests for spec in group):
                continue  # no text changed, or some have ended
            beams = [self.requests[spec] for spec in group]
            origins = [self.requests[parents.get(spec, spec)] for spec in group]
            for beam, entries, copied in self.pool.exchange(beams, origins, beams[0].computed):
                self.decoding.exchange(beam, entries)
                if copied is not None:
                    self._copy(copied, beam)

    def _finish(self, request: Request, reason: Finish) -> None:
        search = self._search.pop(request)
        search.beams.remove(request)
        if search in self.searches and not search.beams:
            self.searches.remove(search)
            self._scheduled -= search.blocks
        if request.status is Status.WAITING and request in self.waiting:
            self.waiting.remove(request)
        self.decoding.call_off(request)
        self.decoding.end(request, reason)


BEAM = SchedulerKind(
    name="beam",
    about="beam search: every request is the best of several texts that grow side by side on shared blocks",
    settings=BeamSettings,
    resolve=resolve_beam,
    make=BeamScheduler,
    samples=lambda settings: settings.num_beams,
)
