"""Plans and results, which pass between a scheduler and an executor: frozen values, no request state.

A plan lists what is new. Rows that merely go on decoding (one token each) are counted, not listed: `Batch` keeps them
from plan to plan, and is what an executor or a check uses when it wants every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from struct import pack, unpack
from typing import Final, NamedTuple

from cbsim.policy.groups import TableChange
from cbsim.policy.request import Finish, RequestSpec
from cbsim.policy.transfers import DEVICE, IN_ORDER, Place, Transfer
from cbsim.policy.value import value

Listed = tuple[int, ...] | bytes  # block ids, or these packed
PACKED: Final = 8  # bytes of a packed number, little-endian as in the digest


def packed(blocks: Sequence[int]) -> bytes:
    return pack(f"<{len(blocks)}q", *blocks)


def unpacked(listed: Listed) -> tuple[int, ...]:
    return unpack(f"<{len(listed) // PACKED}q", listed) if isinstance(listed, bytes) else listed


def length(listed: Listed) -> int:
    return len(listed) // PACKED if isinstance(listed, bytes) else len(listed)


@value(init=False)
class Chunk:
    """A row listed by itself: `tokens` query tokens of a request, behind `start` tokens already in the cache.

    `listed` are the block ids added to its table, or the whole table when `admitted` (first chunk after the queue). The
    row may yield up to `outputs` output tokens, which are scheduled until its result is there: 0 for a part of a
    prompt, 1 for a decoding row, more where query tokens are guesses. Of the tokens before an admitted row, `cached`
    were found in the prefix cache; the KV of others has been kept elsewhere, and transfers of the plan bring it.
    `recomputed` of its own tokens had been computed before a preemption. `padding` tokens are computed to its left for
    nothing but shape.
    """

    def __init__(
        self,
        spec: RequestSpec,
        order: int,
        start: int,
        tokens: int,
        listed: Listed,
        outputs: int,
        *,
        admitted: bool = False,
        resumed: bool = False,
        cached: int = 0,
        recomputed: int = 0,
        padding: int = 0,
    ) -> None:
        self.spec: Final = spec
        self.order: Final = order
        self.start: Final = start
        self.tokens: Final = tokens
        self.listed: Final = listed
        self.outputs: Final = outputs
        self.admitted: Final = admitted
        self.resumed: Final = resumed
        self.cached: Final = cached
        self.recomputed: Final = recomputed
        self.padding: Final = padding

    @property
    def blocks(self) -> tuple[int, ...]:
        return unpacked(self.listed)

    @property
    def drafts(self) -> int:
        """The draft tokens that it verifies. Those of an admitted row are blank."""
        return 0 if self.admitted else max(0, self.outputs - 1)

    @property
    def decodes(self) -> bool:
        """Whether the row is what a decoding request has in a step: one new token behind a computed prompt, and drafts
        behind it.
        """
        alone = self.outputs > 0 and self.tokens == 1 + self.drafts
        return alone and self.start >= self.spec.prompt_tokens and not self.recomputed

    @property
    def reads_once(self) -> bool:
        """Whether attention takes it for a decoding row, whose context is read once: one query token, or guesses behind
        one.
        """
        return self.tokens + self.padding <= max(1, self.outputs)


class Preempted(NamedTuple):
    """A request that lost its blocks in this step: the tokens that it has to compute again, none of them if their KV is
    kept elsewhere, and the blocks that it had until then.
    """

    spec: RequestSpec
    lost_tokens: int
    blocks: int


@value(init=False)
class StepWork:
    """The work of a step. Rows run in the order chunks[:lead], the decoding rows in admission order, chunks[lead:].

    `decodes` rows go on decoding from the plans before, a token each: all of the decode batch, or none in a step that
    rests; together they read `decode_context` cached tokens, the longest of them `longest_context`. `prefill_tokens`
    are the query tokens of the chunks.

    Static batches compute for nothing but shape: `padding_rows` decode rows that have ended, and `padding_context` KV
    tokens beyond the requests' own. With speculation the step proposes `drafts` draft tokens behind each row that
    samples.
    """

    def __init__(
        self,
        chunks: tuple[Chunk, ...] = (),
        lead: int = 0,
        decodes: int = 0,
        decode_context: int = 0,
        longest_context: int = 0,
        prefill_tokens: int = 0,
        drafts: int = 0,
        *,
        padding_rows: int = 0,
        padding_context: int = 0,
        fast_decode: bool = False,
    ) -> None:
        self.chunks: Final = chunks
        self.lead: Final = lead
        self.decodes: Final = decodes
        self.decode_context: Final = decode_context
        self.longest_context: Final = longest_context
        self.prefill_tokens: Final = prefill_tokens
        self.padding_rows: Final = padding_rows
        self.padding_context: Final = padding_context
        self.fast_decode: Final = fast_decode
        self.drafts: Final = drafts

    @property
    def rows(self) -> int:
        return len(self.chunks) + self.decodes

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decodes

    @property
    def guesses(self) -> int:
        """The query tokens that are guesses."""
        return sum([chunk.outputs - 1 for chunk in self.chunks if chunk.outputs > 1])

    @property
    def computed_tokens(self) -> int:
        """The query tokens that the step computes by itself, with the padding of a static batch."""
        tokens = self.prefill_tokens + self.decodes + self.padding_rows
        for chunk in self.chunks:
            tokens += chunk.padding
        return tokens


@value(init=False)
class StepChanges:
    """The changes since the plan before, for an executor that keeps requests and their tables.

    `grown` are the decoding rows that got a block each, and `listed` these; `joined` decode without being listed from
    the next step on; `left` had been decoding and are no longer, as of this step. `ends` are the requests whose
    declared last token this step samples, if its rows yield all that they may; `ended` those that have ended: an
    executor forgets them. `replaced` gives (request, index in its table, block): that entry became another block of
    equal content, the old one is free.
    """

    def __init__(
        self,
        grown: tuple[RequestSpec, ...] = (),
        listed: Listed = (),
        joined: tuple[RequestSpec, ...] = (),
        left: tuple[RequestSpec, ...] = (),
        ends: tuple[RequestSpec, ...] = (),
        ended: tuple[RequestSpec, ...] = (),
        preempted: tuple[Preempted, ...] = (),
        *,
        replaced: tuple[tuple[RequestSpec, int, int], ...] = (),
    ) -> None:
        self.grown: Final = grown
        self.listed: Final = listed
        self.joined: Final = joined
        self.left: Final = left
        self.ends: Final = ends
        self.ended: Final = ended
        self.preempted: Final = preempted
        self.replaced: Final = replaced

    @property
    def blocks(self) -> tuple[int, ...]:
        return unpacked(self.listed)


NO_WORK: Final = StepWork()
UNDISTURBED: Final = StepChanges()


@value(init=False)
class StepCounts:
    """The sums for costs and records. All but the first two apply after planning.

    `table_blocks` are in the tables of the step's rows, `new_blocks` were handed out for it. `cached_blocks` are the
    free ones with content that has a key in the prefix cache.
    """

    def __init__(
        self,
        table_blocks: int = 0,
        new_blocks: int = 0,
        running: int = 0,
        waiting: int = 0,
        free_blocks: int = 0,
        cached_blocks: int = 0,
    ) -> None:
        self.table_blocks: Final = table_blocks
        self.new_blocks: Final = new_blocks
        self.running: Final = running
        self.waiting: Final = waiting
        self.free_blocks: Final = free_blocks
        self.cached_blocks: Final = cached_blocks


NO_COUNTS: Final = StepCounts()


@value(init=False)
class StepPlan:
    """A step: what it computes, what changes with it, the counts after planning, and its KV transfers.

    Its rows run after the jobs `awaited`, transfers of earlier plans, whose blocks are free for it. Each group of
    `ranked` are texts of one request whose rows sample together: the best continuations of all of them, one for each.
    With a cache of layer groups, `tables` replaces the blocks that rows list: changes of the tables of every group.
    """

    def __init__(
        self,
        step: int,
        work: StepWork = NO_WORK,
        changes: StepChanges = UNDISTURBED,
        counts: StepCounts = NO_COUNTS,
        transfers: tuple[Transfer, ...] = (),
        awaited: tuple[int, ...] = (),
        tables: tuple[TableChange, ...] = (),
        *,
        ranked: tuple[tuple[RequestSpec, ...], ...] = (),
    ) -> None:
        self.step: Final = step
        self.work: Final = work
        self.changes: Final = changes
        self.counts: Final = counts
        self.transfers: Final = transfers
        self.awaited: Final = awaited
        self.ranked: Final = ranked
        self.tables: Final = tables


@value(init=False)
class StepResult:
    """The result of a step. `stopped` are the requests that sampled a stop token. `moved` are the jobs of transfers
    that are over since the result before. `parents` are the texts of ranked groups that go on with another one's text,
    each with that one. `broken` are blocks that transfers should have filled and have not.

    `accepted` gives, of rows with guesses, how many came true, none behind a stop token: so many tokens and one more
    are delivered, up to the declared last one of the request; without an entry all came true. `drafted` gives the draft
    tokens behind rows for which there are fewer than the plan proposes.
    """

    def __init__(
        self,
        stopped: tuple[RequestSpec, ...] = (),
        moved: tuple[int, ...] = (),
        parents: tuple[tuple[RequestSpec, RequestSpec], ...] = (),
        broken: tuple[int, ...] = (),
        accepted: tuple[tuple[RequestSpec, int], ...] = (),
        drafted: tuple[tuple[RequestSpec, int], ...] = (),
    ) -> None:
        self.stopped: Final = stopped
        self.moved: Final = moved
        self.parents: Final = parents
        self.broken: Final = broken
        self.accepted: Final = accepted
        self.drafted: Final = drafted


NOTHING_STOPPED: Final = StepResult()


@value(init=False)
class Outcome:
    """The effects of a result: requests that got tokens one by one or ended, rows computed for nothing."""

    def __init__(
        self, received: tuple[RequestSpec, ...], finished: tuple[tuple[RequestSpec, Finish], ...], wasted_rows: int
    ) -> None:
        self.received: Final = received
        self.finished: Final = finished
        self.wasted_rows: Final = wasted_rows


UNCHANGED: Final = Outcome((), (), 0)


class Row(NamedTuple):
    """A row of a step, listed in the plan or counted in the decode batch."""

    spec: RequestSpec
    start: int
    tokens: int
    blocks: tuple[int, ...]
    chunk: Chunk | None


class Batch:
    """The rows of every step, rebuilt from plans alone, as an executor that keeps state has to do."""

    def __init__(self) -> None:
        self._decoding: dict[RequestSpec, tuple[int, int]] = {}  # -> (order, computed - pace)
        self._pace = self._offset = 0  # steps in which they had rows; the sum of computed - pace

    def rows(self, plan: StepPlan) -> list[Row]:
        """Return every row of `plan`, in order. Call this or `follow` once for every plan, in order."""
        work, changes, pace = plan.work, plan.changes, self._pace
        grown = {spec: (block,) for spec, block in zip(changes.grown, changes.blocks, strict=True)}
        left = set(changes.left)
        going = [(*state, spec) for spec, state in self._decoding.items() if spec not in left and work.decodes]
        going.sort(key=itemgetter(0))
        assert max([at + pace for _, at, _ in going], default=0) == work.longest_context
        rows = [Row(spec, at + pace, 1, grown.get(spec, ()), None) for _, at, spec in going]
        listed = [Row(c.spec, c.start, c.tokens, c.blocks, c) for c in work.chunks]
        self.follow(plan)
        return [*listed[: work.lead], *rows, *listed[work.lead :]]

    def follow(self, plan: StepPlan) -> None:
        """Take in what a plan changes, without a list of its rows. Raise AssertionError if its sums are wrong, or a
        row is listed of a request that decodes unlisted.
        """
        work, changes, batch = plan.work, plan.changes, self._decoding
        for spec in changes.left:
            self._offset -= batch.pop(spec)[1]
        sums = (len(batch), self._offset + len(batch) * self._pace) if work.decodes else (0, 0)
        if (work.decodes, work.decode_context) != sums:
            raise AssertionError(("decoding rows, context", work.decodes, work.decode_context, "by its plans", *sums))
        self._pace += work.decodes > 0
        if not work.chunks:
            return
        listed = {chunk.spec: chunk for chunk in work.chunks}
        if len(listed) < len(work.chunks) or not batch.keys().isdisjoint(listed):
            raise AssertionError("two rows of one request")
        for spec in changes.joined:
            at = listed[spec].start + listed[spec].tokens - self._pace
            batch[spec] = listed[spec].order, at
            self._offset += at


PHASES = ("schedule", "prepare", "launch", "await", "update")
WORKED = tuple(phase for phase in PHASES if phase != "await")


class Underway:
    """The transfers that go on beside the steps, known from plans and results: an executor's side of the rule that a
    block is not handed out while a transfer reads or writes it. Call `planned` once for every plan, in order.
    """

    def __init__(self, block_size: int) -> None:
        self.jobs: dict[int, list[Transfer]] = {}
        self._block_size = block_size

    def planned(self, plan: StepPlan) -> None:
        """Record transfers. Raise AssertionError if a plan hands out a block of one under way, or reads its target."""
        for job in plan.awaited:
            self.jobs.pop(job, None)
        if self.jobs:
            self._check(plan)
        for transfer in plan.transfers:
            if transfer.job != IN_ORDER:
                self.jobs.setdefault(transfer.job, []).append(transfer)

    def completed(self, jobs: tuple[int, ...]) -> None:
        """Record that these jobs are over."""
        for job in jobs:
            self.jobs.pop(job, None)

    def _check(self, plan: StepPlan) -> None:
        transfers = [transfer for group in self.jobs.values() for transfer in group]
        read = {at for one in transfers for at in one.read}
        written = {at for one in transfers for at in one.written}
        targets = {(DEVICE, block) for block in plan.changes.blocks}
        needed: set[Place] = set()
        for chunk in plan.work.chunks:
            hits = chunk.cached // self._block_size if chunk.admitted else 0
            needed.update((DEVICE, block) for block in chunk.blocks[:hits])
            targets.update((DEVICE, block) for block in chunk.blocks[hits:])
        for transfer in plan.transfers:
            needed.update(transfer.read)
            targets.update(transfer.written)
        if taken := targets & (read | written):
            raise AssertionError((plan.step, "handed out under a transfer", taken))
        if early := needed & written:
            raise AssertionError((plan.step, "read before a transfer has written them", early))
