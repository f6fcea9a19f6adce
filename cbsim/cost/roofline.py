"""`roofline`: time from the model's shape and the GPU's data sheet.

Every part of a step takes the longer of its arithmetic and its memory traffic: the linear layers (weights read once a
step, 2 FLOP a weight and query token), attention of the chunks, attention of the decoding rows (their KV read once),
and the output head for the rows that sample. Parts run one after the other. An efficiency a regime says which share of
the data sheet is reached; they are the model's only free constants. Copies: three 4-byte inputs a query token and one a
block of the tables to the device, one 4-byte token a row back.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    def cpu_ns(self, plan: StepPlan | None) -> tuple[int, int, int, int]:
        return self.cpu(plan)

    def gpu_ns(self, plan: StepPlan, tokens: int) -> tuple[int, int, int]:
        rows = plan.decodes + len(plan.chunks)
        if not rows:
            return 0, 0, 0
        sampled = plan.decodes + plan.padding_rows
        time, flops = self.overhead_s, self.flops_decode
        if plan.chunks:
            flops = self.flops_prefill
            sampled += sum([c.samples for c in plan.chunks])
            time += self._prefill_attention(plan)
        time += tokens * self.hidden * self.weight_bytes / self.bytes_s_weights  # embeddings
        time += self._dense(tokens, self.linear_weights, flops)
        time += self._dense(sampled, self.head_weights, flops)
        time += self._decode_attention(plan)
        per_byte = 1e9 / self.bytes_s_pcie
        h2d_bytes = 4 * (3 * (plan.prefill_tokens + plan.decodes) + plan.table_blocks)
        return round(h2d_bytes * per_byte), round(time * 1e9), round(4 * rows * per_byte)

    def _dense(self, rows: int, weights: int, flops: float) -> float:
        """A matrix product of `rows` activations with `weights` weights: its arithmetic or its traffic."""
        if not rows:
            return 0.0
        return max(2 * rows * weights / flops, weights * self.weight_bytes / self.bytes_s_weights)

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

    def eager_launch_ns(self, plan: StepPlan) -> int:
        return round(self.launch_s * 1e9) if plan.rows else 0
