"""The other end of a hand-off: what comes from another server, and what it fetches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import strategies as st

from cbsim.policy.plan import Row, StepPlan, StepResult
from cbsim.policy.request import RequestSpec
from cbsim.policy.transfers import IN_ORDER, Direction, Transfer
from support.contents import Contents, Mover, said
from support.helpers import Ask


class Remote(Contents):
    """The places of one server. What arrives from the other one is what the prompt says, but for `broken` blocks."""

    def __init__(self, asks: Mapping[RequestSpec, Ask], block_size: int) -> None:
        super().__init__(asks, block_size)
        self.broken: dict[int, tuple[int, ...]] = {}  # job -> blocks
        self.computed: dict[RequestSpec, int] = {}
        self.fetched: list[RequestSpec] = []

    def _copy(self, move: Transfer) -> None:
        if move.job == IN_ORDER:  # to the host, and from it
            super()._copy(move)
            return
        assert move.spec is not None
        (self._arrive if move.direction is Direction.IN else self._fetch)(move, move.spec)

    def _arrive(self, move: Transfer, spec: RequestSpec) -> None:
        """The last blocks of the prompt, whole but for the last."""
        first = self._size * (-(-spec.prompt_tokens // self._size) - len(move.targets))
        for i, place in enumerate(move.written):
            start = first + i * self._size
            positions = range(start, min(start + self._size, spec.prompt_tokens))
            whole = move.targets[i] not in self.broken[move.job]
            tokens = [said(self._asks, spec, at) for at in positions] if whole else []
            self.put(place, [*tokens, *self._nothing()][: self._size])

    def _fetch(self, move: Transfer, spec: RequestSpec) -> None:
        """Everything but what the last token would have written, from the first on."""
        computed = self.computed[spec]
        assert len(move.sources) == -(-computed // self._size)
        there = [token for place in move.read for token in self.held(place)]
        assert there[:computed] == [said(self._asks, spec, at) for at in range(computed)], "not what was computed"
        self.fetched.append(spec)


class Wire(Mover):
    """An executor with another server beside it. Some blocks of loads come to nothing."""

    contents: Remote

    def __init__(self, workload: list[Ask], block_size: int, data: st.DataObject) -> None:
        super().__init__(workload, block_size, lambda: data.draw(st.integers(0, self.slowest)))
        self.contents = Remote(self.asks, block_size)
        self.contents.computed = self.computed
        self.broken, self.fetched = self.contents.broken, self.contents.fetched
        self.loads: dict[RequestSpec, int] = {}
        self.data, self.slowest, self.faulty = data, 6, True

    def rows(self, plan: StepPlan) -> list[Row]:
        for move in plan.transfers:
            if move.job == IN_ORDER:
                continue
            assert move.spec is not None and move.job not in self._due, "a job is one transfer"
            if move.direction is Direction.IN:
                self.loads[move.spec] = self.loads.get(move.spec, 0) + 1
                bad = self.faulty and self.data.draw(st.sampled_from([False, False, True]))
                lost = self.data.draw(st.sets(st.sampled_from(move.targets))) if bad else set()
                self.broken[move.job] = tuple(sorted(lost))
        return super().rows(plan)

    def result(self, step: int) -> StepResult:
        result = super().result(step)
        return replace(result, broken=tuple(block for job in result.moved for block in self.broken.pop(job, ())))
