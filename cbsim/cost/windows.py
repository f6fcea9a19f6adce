"""The roofline of a model whose layers do not all see the whole sequence.

Each kind of layer reads and computes what it sees, so its share of attention's time is that of its own pairs and
tokens. Rows are listed one by one (no scheduler counts them here), decoding ones, too: those of one token, which run at
the rates of decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cbsim.cost.roofline import RooflineCost
from cbsim.policy.groups import Attention
from cbsim.policy.plan import Chunk, StepPlan


class WindowedRoofline(RooflineCost):
    """`attention`: what each layer sees."""

    def __init__(self, attention: Sequence[Attention], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._kinds = [(one, attention.count(one) / len(attention)) for one in dict.fromkeys(attention)]

    def _listed_attention(self, plan: StepPlan) -> float:
        assert not plan.work.decodes, "rows that are counted do not say what each of them sees"
        return sum(share * self._of_kind(one, plan.work.chunks) for one, share in self._kinds)

    def _of_kind(self, attention: Attention, chunks: Sequence[Chunk]) -> float:
        """Seconds, if all layers were like this one."""
        time = 0.0
        for c in chunks:
            start, tokens = c.start, c.tokens + c.padding
            if tokens == 1:
                time += attention.seen(start, 1) * self._context_s
            else:
                time += max(attention.pairs(start, tokens) * self._pair_s, attention.seen(start, tokens) * self._kv_s)
        return time

    def _listed_flops(self, chunks: Sequence[Chunk]) -> float:
        return self._flops_prefill if any(chunk.tokens > 1 for chunk in chunks) else self._flops_decode
