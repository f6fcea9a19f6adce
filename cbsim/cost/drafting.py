"""The cost of a server that speculates: its target's step, and behind it the passes of the drafter.

A drafter proposes one token after the other. Its first pass also takes in the query tokens of the step, as its own
cache has to; each later one has a token for every row that samples. The drafter is a model, a layer of the target's
with its output head, or by a fraction: passes that take such a share of the target's with as many tokens. A step that
proposes nothing has no passes, and neither has prompt lookup, which is CPU time (`per_draft_s`).
"""

from __future__ import annotations

from cbsim.cost.base import Cost, nearest
from cbsim.policy.plan import Chunk, StepPlan, StepWork


class DraftingCost:
    """The cost model of a `target` whose drafts take the share `fraction` of the passes of `drafter`; a step has at
    most `passes` of them.
    """

    def __init__(self, target: Cost, drafter: Cost, fraction: float, passes: int) -> None:
        self.cpu_ns = target.cpu_ns
        self.launch_ns = target.launch_ns + nearest(passes * fraction * drafter.launch_ns)
        self._target, self._drafter, self._fraction = target, drafter, fraction

    def gpu_ns(self, plan: StepPlan, tokens: int) -> tuple[int, int, int]:
        h2d_ns, kernels_ns, d2h_ns = self._target.gpu_ns(plan, tokens)
        if plan.work.drafts:
            kernels_ns += nearest(self._fraction * self._passes_ns(plan, tokens))
        return h2d_ns, kernels_ns, d2h_ns

    def _passes_ns(self, plan: StepPlan, tokens: int) -> int:
        """Return the ns of the passes. Rows with guesses read their context once in the first one, like decoding ones;
        contexts of later ones are those of the pass in the middle.
        """
        work = plan.work
        prompts: list[Chunk] = []
        rows, context, longest = work.decodes, work.decode_context, work.longest_context
        sampled, ends, furthest = rows, context + rows, longest + 1
        for chunk in work.chunks:
            end = chunk.start + chunk.tokens
            if chunk.reads_once:
                rows, context, longest = rows + 1, context + end - 1, max(longest, end - 1)
            else:
                prompts.append(chunk)
            if chunk.outputs:
                sampled, ends, furthest = sampled + 1, ends + end, max(furthest, end)
        prefill = sum([chunk.tokens for chunk in prompts])
        first = StepWork(tuple(prompts), 0, rows, context, longest, prefill)
        time = self._drafter.gpu_ns(StepPlan(plan.step, first), tokens)[1]
        if (later := work.drafts - 1) and sampled:
            between = (later - 1) // 2
            each = StepWork((), 0, sampled, ends + sampled * between, furthest + between)
            time += later * self._drafter.gpu_ns(StepPlan(plan.step, each), sampled)[1]
        return time
