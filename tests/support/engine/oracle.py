"""What a step's arrays must say, from plans alone, and a model of a few lines of numpy that computes what they do say.

`Checked` compares every array with the plan that it was built from, row by row. `Toy` knows no plan: it has a cache of
token ids, block tables and the last token of every slot, and its next token is a hash of the tokens that a row sees.
So one wrong entry anywhere changes a text, which can be compared exactly.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from cbengine import build
from cbengine.batch import Capacity, Ints
from cbengine.device.base import EngineDevice, Lanes, staging
from cbengine.device.layout import Header, arrays
from cbengine.device.moves import Moved
from cbengine.driver import Engine
from cbengine.sampling import uniforms
from cbengine.sequence import CARRIED, FIRST_SCORE, OTHER_SCORE
from cbengine.sequence import Sequence as Text
from cbsim.policy.groups import FULL, Attention
from cbsim.policy.plan import Row, StepPlan, Underway
from cbsim.policy.request import RequestSpec
from cbsim.policy.transfers import IN_ORDER, Direction, Transfer
from support.engine.served import VOCAB, Case, Run
from support.helpers import Executor as PlanExecutor

MARK = 1000  # what a group writes differs from what others do by so much


def views(buffer: Ints, header: Header) -> dict[str, Ints]:
    """The arrays of a step by name."""
    return arrays(buffer, header)._asdict()


class Tables:
    """Block tables of every slot, one a group of layers, as a device keeps them."""

    def __init__(self, capacity: Capacity, unused: int) -> None:
        self.entries = np.full((capacity.slots + 1, capacity.tables, capacity.width), unused, dtype=np.int32)

    def update(self, step: dict[str, Ints], excess: Ints | None) -> None:
        written = np.stack((step["places"], step["blocks"]))
        places, blocks = written if excess is None else np.concatenate((written, excess), axis=1)
        assert len(np.unique(places)) == len(places), "an entry is written twice: a GPU may write them in any order"
        self.entries.reshape(-1)[places] = blocks


class Toy:
    """A device whose model is a hash of what every group of layers sees. After token `broken` comes none: its row has
    no logits, later ones have again. A move by a job is carried out `lag` steps after its own, unless it is awaited;
    what it writes is unreadable until then.
    """

    def __init__(
        self, capacity: Capacity, depth: int, num_blocks: int, block_size: int, broken: int = -1, lag: int = 0
    ) -> None:
        self.staging = staging(capacity, depth)
        self.facts: dict[str, Any] = {"device": "toy"}
        self._tables, self._size, self._broken = Tables(capacity, num_blocks), block_size, broken
        self._sees = [group.attention for group in capacity.groups] or [FULL]
        self._cache = np.full((num_blocks + 1) * block_size, -7, dtype=np.int32)
        self._last = np.full(capacity.slots + 1, -9, dtype=np.int32)
        self._done: dict[int, Ints] = {}
        self._host: dict[int, Ints] = {}
        self._lag, self._jobs, self._moved = lag, list[tuple[int, int, Transfer]](), list[Moved]()

    def bucket(self, rows: int) -> int:
        """Rounded up to a multiple of 4, as a device with captured graphs might."""
        return -(-rows // 4) * 4

    def launch(self, slot: int, header: Header, plan: StepPlan, excess: Ints | None = None) -> None:
        for job in list(self._jobs):
            if job[0] + self._lag < plan.step or job[2].job in plan.awaited:
                self._jobs.remove(job)
                self._perform(*job)
        for at, move in enumerate(plan.transfers):
            if move.job == IN_ORDER:
                self._perform(plan.step, at, move)
        self._compute(slot, header, excess)
        for at, move in enumerate(plan.transfers):
            if move.job != IN_ORDER:
                self._jobs.append((plan.step, at, move))
                for target in move.targets:
                    self._write(move.direction, target, np.full(self._size, -8, dtype=np.int32))

    def _perform(self, step: int, at: int, move: Transfer) -> None:
        read: Any = self._host if move.direction is Direction.IN else self._cache.reshape(-1, self._size)
        for source, target in zip(move.sources, move.targets, strict=True):
            self._write(move.direction, target, read[source])
        self._moved.append(Moved(step, at, 0, 0))

    def _write(self, way: Direction, target: int, values: Ints) -> None:
        if way is Direction.OUT:
            self._host[target] = values.copy()
        else:
            self._cache.reshape(-1, self._size)[target] = values

    def moved(self, until_ns: int | None) -> list[Moved]:
        moved, self._moved = self._moved, []
        return moved

    def _compute(self, slot: int, header: Header, excess: Ints | None) -> None:
        step = views(self.staging[slot], header)
        self._tables.update(step, excess)
        starts, rows = step["starts"], range(header.rows)
        ids = step["tokens"].copy()
        for row in rows:  # all rows write before any reads
            mine = slice(starts[row], starts[row + 1])
            ids[mine] = np.where(ids[mine] == CARRIED, self._last[step["slots"][row]], ids[mine])
            cached = np.arange(step["kv_tokens"][row] - len(ids[mine]), step["kv_tokens"][row])
            for group in range(len(self._sees)):
                self._cache[self._places(step["slots"][row], cached, group)] = ids[mine] + group * MARK
        if header.beams:
            self._done[slot] = self._ranked(step, header)
            return
        sampling = [*range(header.decodes), *step["sampled"]]
        told = np.array([self._next(step, header, row) for row in sampling], dtype=np.int32)
        self._last[step["slots"][sampling]] = np.maximum(told, 0)
        self._done[slot] = told

    def _places(self, slot: int, cached: Ints, group: int) -> Ints:
        return self._tables.entries[slot, group, cached // self._size] * self._size + cached % self._size

    def _next(self, step: dict[str, Ints], header: Header, row: int) -> int:
        seen = self._seen(step, row, step["first"][row] if header.padded else 0)
        return -1 if seen[-1] == self._broken else following(seen)

    def _seen(self, step: dict[str, Ints], row: int, first: int = 0) -> Ints:
        """What each group sees, one behind the other."""
        slot, end = step["slots"][row], step["kv_tokens"][row]
        spans = [np.arange(max(first, sees.gone(end - 1)), end) for sees in self._sees]
        return np.concatenate([self._cache[self._places(slot, span, g)] for g, span in enumerate(spans)])

    def _ranked(self, step: dict[str, Ints], header: Header) -> Ints:
        """The texts of every search, ranked by a hash. One that ends in the broken token spoils its search."""
        seen, scores = [self._seen(step, row) for row in range(header.decodes)], step["scores"].view(np.float32)
        found = []
        for at in range(0, header.decodes, header.beams):
            group = slice(at, at + header.beams)
            tokens, parents, gained = toy_choice(seen[group], scores[group].tolist())
            broken = any(text[-1] == self._broken for text in seen[group])
            found.append(([-1] * len(tokens) if broken else tokens, parents, gained))
        told, parents, gained = (np.array(column).reshape(-1) for column in zip(*found, strict=True))
        results = (told.astype(np.int32), parents.astype(np.int32), gained.astype(np.float32).view(np.int32))
        return np.concatenate(results)

    def wait(self, slot: int) -> tuple[Ints, Lanes]:
        return self._done.pop(slot), Lanes(0, 0, 0, 0, 0, 0)

    def close(self) -> None:
        self._done.clear()


def following(seen: Ints) -> int:
    """The token after these."""
    return zlib.crc32(np.ascontiguousarray(seen, dtype=np.int32).tobytes()) % VOCAB


def toy_choice(seen: Sequence[Ints], scores: Sequence[float]) -> tuple[list[int], list[int], list[float]]:
    """How the texts of a search go on: tokens, whose text each continues, scores. All of it hangs on every text and
    every score.
    """
    count, said = len(seen), b"".join([np.ascontiguousarray(text, dtype=np.int32).tobytes() for text in seen])
    drawn = [zlib.crc32(repr((i, *scores)).encode() + said) for i in range(count)]
    parents = [one % count for one in drawn]
    tokens = [(following(seen[parent]) + i) % VOCAB for i, parent in enumerate(parents)]
    return tokens, parents, [float(one % 1000) for one in drawn]


def toy_search(prompt: Ints, count: int, beams: int) -> list[list[int]]:
    """What the hash makes of a prompt by a search, alone: the outputs of every text."""
    texts, scores = [prompt] * beams, [FIRST_SCORE] + [OTHER_SCORE] * (beams - 1)
    for _ in range(count):
        tokens, parents, scores = toy_choice(texts, scores)
        texts = [np.append(texts[parent], token) for parent, token in zip(parents, tokens, strict=True)]
    return [text[len(prompt) :].tolist() for text in texts]


def toy_text(prompt: Ints, count: int, groups: Sequence[Attention] = (FULL,)) -> list[int]:
    """What the hash says after a prompt, alone, if this is what groups of layers see."""
    text = prompt.tolist()
    for _ in range(count):
        seen = [token + g * MARK for g, sees in enumerate(groups) for token in text[sees.gone(len(text) - 1) :]]
        text.append(following(np.array(seen)))
    return text[len(prompt) :]


def check_toy_text(text: Text) -> None:
    assert text.outputs == toy_text(text.prompt, len(text.outputs)), text.spec


class Checked:
    """A device around another: every step is checked against its plan before it is computed.

    It keeps, from plans alone, each request's table and progress; by slot the token that was sampled last; and what
    every launched row sampled, once that has come back.
    """

    def __init__(self, device: EngineDevice, capacity: Capacity) -> None:
        self.texts: dict[RequestSpec, Text] = {}  # the engine's
        self.block_size = 1  # of the tables, where plans move blocks
        self._device, self._capacity = device, capacity
        self.staging, self.facts = device.staging, device.facts
        self.bucket, self.close = device.bucket, device.close
        self.steps = self.padded_rows = 0
        self._plans = PlanExecutor([])
        self._tables = Tables(capacity, -1)
        self._last: dict[int, tuple[RequestSpec, int]] = {}  # slot -> whose token at which position
        self._padding: dict[RequestSpec, int] = {}
        self._groups: dict[tuple[RequestSpec, int], dict[int, int]] = {}  # of a group's table: entry -> block
        self._lengths: dict[tuple[RequestSpec, int], int] = {}
        self.searches = 0  # steps with one
        self.said: dict[tuple[RequestSpec, int], int] = {}  # (request, position) -> token that came back
        self._in_flight: dict[int, tuple[Header, list[tuple[RequestSpec, int] | None]]] = {}
        self._underway: Underway | None = None
        self._jobs: dict[tuple[int, int], int] = {}

    def launch(self, slot: int, header: Header, plan: StepPlan, excess: Ints | None = None) -> None:
        if plan.transfers or plan.awaited or self._jobs:
            self._check_moves(plan)
        buffer, sizes = self.staging[slot], self._capacity
        assert header.size <= len(buffer) == sizes.staging
        assert header.rows <= sizes.sampling
        assert header.tokens <= sizes.tokens
        assert header.live + header.rows - header.decodes <= sizes.rows
        step = views(buffer, header)
        self._tables.update(step, excess)
        held = [text.slot for text in self.texts.values() if text.slot >= 0]
        assert len(set(held)) == len(held), "two requests share a slot"
        assert all(one < sizes.slots for one in held)
        rows = {self.texts[row.spec].slot: row for row in self._plans.rows(plan)}
        self._hear(plan)
        assert len(rows) == plan.work.rows
        sampling = self._check_rows(step, header, plan, rows)
        self._check_padding(step, header)
        self._in_flight[slot] = header, sampling
        self.steps += 1
        self._device.launch(slot, header, plan, excess)

    def _check_moves(self, plan: StepPlan) -> None:
        """No block of a move that is under way is handed out, and none that it writes is read."""
        self._underway = self._underway or Underway(self.block_size)
        self._underway.planned(plan)
        self._jobs |= {(plan.step, at): move.job for at, move in enumerate(plan.transfers)}

    def moved(self, until_ns: int | None) -> list[Moved]:
        moved = self._device.moved(until_ns)
        if self._underway:
            self._underway.completed(tuple(self._jobs.pop((one.step, one.at)) for one in moved))
        return moved

    def _check_rows(
        self, step: dict[str, Ints], header: Header, plan: StepPlan, rows: dict[int, Row]
    ) -> list[tuple[RequestSpec, int] | None]:
        """Every row of the plan is there once, and what it says is right. Returns what each sampling row samples."""
        starts, idle, sampling, further, filled = step["starts"].tolist(), 0, [], [], []
        assert starts[0] == 0
        assert starts[-1] == header.tokens
        assert header.longest >= max((b - a for a, b in pairwise(starts[header.decodes :])), default=1)
        for at in [*range(header.live), *range(header.decodes, header.rows)]:
            row = rows.pop(int(step["slots"][at]), None)
            if row is None and at >= header.decodes and not header.padded:  # the padding of a row
                self._check_filling(step, at)
                filled.append(int(step["starts"][at + 1] - step["starts"][at]))
                continue
            if row is None:  # of a static batch, a row that has ended
                idle += 1
                assert header.padded
                assert at < header.decodes
                sampling.append(None)
                continue
            samples = row.chunk is None or row.chunk.outputs
            assert (at < header.decodes) == (samples and row.tokens == 1 and not (header.padded and row.chunk))
            self._check_row(step, header, row, at)
            if samples:
                sampling.append((row.spec, row.start + row.tokens))
                further += [at] * (at >= header.decodes)
        assert not rows, "rows of the plan are missing"
        assert idle == plan.work.padding_rows
        assert header.padded or filled == [c.padding for c in plan.work.chunks if c.padding]
        assert step["sampled"].tolist() == further
        self._check_draws(step, header, sampling)
        self._check_search(step, header, plan, sampling)
        for slot_of, sampled in ((self.texts[s[0]].slot, s) for s in sampling if s):
            self._last[slot_of] = sampled
        return sampling

    def _check_row(self, step: dict[str, Ints], header: Header, row: Row, at: int) -> None:
        spec, end = row.spec, row.start + row.tokens
        if row.chunk is not None:
            self._padding[spec] = row.chunk.padding * header.padded
        left = self._padding[spec]
        assert step["kv_tokens"][at] == left + end, (spec.id, step["kv_tokens"][at], left, end)
        ids = step["tokens"][step["starts"][at] : step["starts"][at + 1]].tolist()
        if row.chunk is not None:
            assert ids[:left] == [0] * left
            ids = ids[left:]
        assert len(ids) == row.tokens
        if header.padded:
            assert step["first"][at] == left
        for position, token in enumerate(ids, row.start):
            self._check_token(spec, position, token)
        table, tables = self._plans.tables[spec], self._tables.entries[self.texts[spec].slot]
        assert tables[0, : len(table)].tolist() == table
        for number, group in enumerate(self._capacity.groups):
            size = group.block_size
            for entry in range(group.attention.gone(row.start) // size, -(-end // size)):
                assert tables[number, entry] == self._groups[spec, number][entry], (spec.id, number, entry)

    def _hear(self, plan: StepPlan) -> None:
        """What a plan tells of the tables of groups."""
        for chunk in plan.work.chunks if self._capacity.groups else ():
            assert not chunk.blocks
            for number in range(len(self._capacity.groups) if chunk.admitted else 0):
                self._groups[chunk.spec, number] = {}
                self._lengths.pop((chunk.spec, number), None)
        for change in plan.tables:
            key = change.spec, change.group
            at = self._lengths.get(key, change.passed)
            self._groups[key] |= {**dict(enumerate(change.blocks, at)), **dict(change.replaced)}
            self._lengths[key] = at + len(change.blocks)
            for entry in range(change.passed):
                self._groups[key].pop(entry, None)

    def _check_token(self, spec: RequestSpec, position: int, token: int) -> None:
        """A prompt's token is itself, an output's what came back, or left to the slot that sampled it."""
        if position < spec.prompt_tokens:
            assert token == self.texts[spec].prompt[position]
        elif token == CARRIED:
            assert self._last[self.texts[spec].slot] == (spec, position), (spec.id, position)
        else:
            assert token == self.said[spec, position], (spec.id, position)

    def _check_draws(
        self, step: dict[str, Ints], header: Header, sampling: list[tuple[RequestSpec, int] | None]
    ) -> None:
        """Each sampling row has the number of its request and position, and its request's settings, whatever is beside
        it; rows that only fill a step up are greedy. A step in which nobody draws has nothing of it.
        """
        arrays = [step[name] for name in ("uniforms", "temperature", "top_k", "top_p")]
        if not header.random:
            assert not any(len(array) for array in arrays)
            assert all(self.texts[sampled[0]].sampling.greedy for sampled in sampling if sampled)
            return
        types = (np.float32, np.float32, np.int32, np.float64)
        drawn = [array.view(kind) for array, kind in zip(arrays, types, strict=True)]
        assert drawn[1].any()
        assert not drawn[1][header.live : header.decodes].any()
        assert (drawn[3] > 0).all()
        real = (np.delete(array, np.s_[header.live : header.decodes]).tolist() for array in drawn)
        for told, sampled in zip(zip(*real, strict=True), sampling, strict=True):
            if sampled:
                text, position = self.texts[sampled[0]], sampled[1]
                how = text.sampling
                assert told[0] == uniforms(np.array([text.seed], dtype=np.uint64), np.array([position]))[0]
                assert told[1:] == (np.float32(how.temperature), how.top_k, how.top_p)

    def _check_search(
        self, step: dict[str, Ints], header: Header, plan: StepPlan, sampling: list[tuple[RequestSpec, int] | None]
    ) -> None:
        """The rows of a search lie side by side in its order, each with the score of its text."""
        ranked = [spec for group in plan.ranked for spec in group]
        assert header.beams == (len(plan.ranked[0]) if ranked else 0)
        assert not ranked or ranked == [sampled[0] for sampled in sampling if sampled]
        scores = step["scores"].view(np.float32).tolist()
        assert scores == [np.float32(self.texts[spec].score) for spec in ranked]
        self.searches += bool(ranked)

    def _check_filling(self, step: dict[str, Ints], at: int) -> None:
        """A row that is padding belongs to nobody, and sees itself alone."""
        ids = step["tokens"][step["starts"][at] : step["starts"][at + 1]].tolist()
        assert step["slots"][at] == self._capacity.slots
        assert step["kv_tokens"][at] == len(ids) > 0
        assert ids == [0] * len(ids)

    def _check_padding(self, step: dict[str, Ints], header: Header) -> None:
        """Rows that only fill a step up write to the scratch slot, and read it."""
        filling = slice(header.live, header.decodes)
        assert (step["slots"][filling] == self._capacity.slots).all()
        assert (step["kv_tokens"][filling] == 1).all()
        assert (step["tokens"][filling] == 0).all()
        assert not header.padded or (step["first"][filling] == 0).all()
        assert np.array_equal(step["starts"][: header.decodes + 1], np.arange(header.decodes + 1))
        self.padded_rows += header.decodes - header.live

    def wait(self, slot: int) -> tuple[Ints, Lanes]:
        results, lanes = self._device.wait(slot)
        header, sampling = self._in_flight.pop(slot)
        assert len(results) == header.results
        real = np.delete(results[: header.sampling], np.s_[header.live : header.decodes]).tolist()
        self.said.update({key: token for key, token in zip(sampling, real, strict=True) if key})
        return results, lanes

    def check_delivered(self) -> None:
        """Every token went to the request whose row sampled it, at its position; those of a search to others, too."""
        for spec, text in self.texts.items() if not self.searches else ():
            for position, token in enumerate(text.outputs, spec.prompt_tokens):
                assert self.said[spec, position] == token, (spec.id, position)


def toy_run(
    case: Case, loop: str, *, broken: int = -1, lag: int = 0, toy: type[Toy] = Toy, **options: Any
) -> tuple[Run, Checked]:
    """Serve a case with the toy, every step checked."""
    made: list[Checked] = []

    def device(_: Any, loop: str, plan: Any, *more: Any) -> EngineDevice:
        computing = toy(plan.capacity, build.depth(loop), plan.num_blocks, plan.block_size, broken, lag)
        made.append(Checked(computing, plan.capacity))
        made[0].block_size = plan.block_size
        return made[0]

    def met(engine: Engine) -> None:
        made[0].texts = engine.sequences

    run = case.run(loop, device=device, met=met, **options)
    made[0].check_delivered()
    return run, made[0]
