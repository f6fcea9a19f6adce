"""`roofline`: time from the model's shape and the GPU's data sheet.

Every part of a step takes the longer of its arithmetic and its memory traffic: the linear layers (weights read once a
step, 2 FLOP a weight and query token), attention of the chunks, attention of the decoding rows (their KV read once),
and the output head for the rows that sample. Parts run one after the other. An efficiency a regime says which share of
the data sheet is reached; they are the model's only free constants.
"""

from __future__ import annotations

from dataclasses import dataclass

from cbsim.cost.base import Phase
from cbsim.cost.cpu import CpuCost
from cbsim.policy.plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCost:
    """Seconds and bytes. `flops_*` and `bytes_s_*` are data-sheet rates times the efficiency of their regime."""

    cpu: CpuCost
    linear_weights: int  # weights that every query token passes through, embedding and head not counted
    head_weights: int
    hidden: int
    attention_flops: int  # FLOP a query token and KV token: 4 x layers x heads x head_dim
    weight_bytes: int  # bytes a weight and an activation
    kv_bytes: int  # bytes of KV a token
    flops_prefill: float
    flops_decode: float
    bytes_s_weights: float
    bytes_s_kv: float
    bytes_s_pcie: float
    overhead_s: float
    launch_s: float  # CPU time to launch the kernels of a step one by one

    def cpu_ns(self, phase: Phase, plan: StepPlan | None) -> int:
        return self.cpu(phase, plan)

    def compute_ns(self, plan: StepPlan, tokens: int) -> int:
        if not tokens:
            return 0
        flops = self.flops_prefill if plan.chunks else self.flops_decode
        embedding = tokens * self.hidden * self.weight_bytes / self.bytes_s_weights
        linear = self._part(2 * tokens * self.linear_weights, flops, self.linear_weights)
        sampled = plan.decodes + plan.padding_rows + sum([c.samples for c in plan.chunks])
        head = self._part(2 * sampled * self.head_weights, flops, self.head_weights) if sampled else 0.0
        time = embedding + linear + head + self._decode_attention(plan) + self._prefill_attention(plan)
        return round((time + self.overhead_s) * 1e9)

    def _part(self, flop: float, flops: float, weights: int) -> float:
        return max(flop / flops, weights * self.weight_bytes / self.bytes_s_weights)

    def _decode_attention(self, plan: StepPlan) -> float:
        context = plan.decode_context + plan.decodes + plan.padding_context
        return max(context * self.kv_bytes / self.bytes_s_kv, context * self.attention_flops / self.flops_decode)

    def _prefill_attention(self, plan: StepPlan) -> float:
        """Causal: query token i of a chunk attends to the `start` tokens before it and to i + 1 of its own."""
        time = 0.0
        for c in plan.chunks:
            tokens = c.tokens + c.padding
            pairs = tokens * c.start + tokens * (tokens + 1) / 2
            moved = (c.start + tokens) * self.kv_bytes / self.bytes_s_kv
            time += max(pairs * self.attention_flops / self.flops_prefill, moved)
        return time

    def copies_ns(self, plan: StepPlan) -> tuple[int, int]:
        """Three 4-byte inputs a query token and one a block of the tables; one 4-byte token a row back."""
        h2d = 4 * (3 * plan.tokens + plan.table_blocks) / self.bytes_s_pcie
        return round(h2d * 1e9), round(4 * plan.rows / self.bytes_s_pcie * 1e9)

    def eager_launch_ns(self, plan: StepPlan) -> int:
        return round(self.launch_s * 1e9) if plan.rows else 0
