"""Chunk size: the step times and chunking overheads published with Sarathi-Serve (OSDI'24) against the roofline.

`sarathi` has the points and says what they are; here is what the roofline gets right and wrong on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cbsim.draw.markdown import Table
from cbsim.draw.study import Study
from cbsim.proof.studies import chunk_figures
from cbsim.proof.studies.sarathi import (
    DEFAULT,
    LINK_BYTES_S,
    MS,
    PCIE_BANDWIDTH,
    REFERENCE,
    SHARD,
    Answer,
    Chunked,
    Compared,
    Point,
    compared,
    cost,
    filled,
    gpu,
    linear_s,
    named,
    ridge_tokens,
    roofline_s,
)


def study() -> Study:
    """What the roofline gets right and wrong. Raises ScenarioError if the data are absent."""
    results = compared()
    right, wrong = (_prefill_right, _hybrid_right), (_level_wrong, _slope_wrong, _chunks_wrong, _whole_wrong)
    fitted, limits = (_cache_wrong, _kernels, _floor_fitted, _share_fitted), (_agreement, _left_out)
    return Study(
        title="Chunk size: Sarathi-Serve's published step times against the roofline",
        question="What does the roofline get right and wrong on the published chunked-prefill overhead and hybrid-batch"
        " times of Sarathi-Serve (OSDI'24), Yi-34B on two A100 80GB PCIe?",
        findings=[finding(results) for finding in (*right, *wrong, *fitted, *limits)],
        tables=[_decode_table(results), _prefill_table(results), _chunk_table(results), _hybrid_table(results)],
        charts=[chunk_figures.steps(results), chunk_figures.overhead(results)],
        data=_data(results),
    )


def _ms(seconds: float) -> str:
    return f"{seconds / MS:,.0f}" if seconds >= 1 else f"{seconds / MS:,.1f}"


def _span(values: Sequence[float], form: str = "+z.0%") -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


def _prefills(results: Compared, low: int, high: int) -> list[Answer]:
    """Prefills of figure 2 with `low` to `high` tokens, without the one that came first in its run: it was cold."""
    return [a for a in results.prefills if low <= a.point.prompt <= high and not a.point.cold]


def _chunked(results: Compared, chunk: int) -> list[Chunked]:
    """Prompts in chunks of that size, shortest first."""
    return sorted((c for c in results.chunked if c.answer.point.chunk == chunk), key=lambda c: c.answer.point.prompt)


# -- findings ---------------------------------------------------------------------------------------------------------


def _prefill_right(results: Compared) -> str:
    short, large = _prefills(results, 512, 4096), [c.answer for c in _chunked(results, REFERENCE)]
    return (
        f"Right: prefills of 512 to 4,096 tokens in one step ({_span([a.error for a in short])}), and prompts up to "
        f"16,383 tokens in chunks of {REFERENCE:,} ({_span([a.error for a in large])}): linear in the tokens, plus the "
        "quadratic part of attention."
    )


def _hybrid_right(results: Compared) -> str:
    decode, hybrid, prefill = results.hybrids
    beside = hybrid.published_s / prefill.published_s - 1, hybrid.roofline_s / prefill.roofline_s - 1
    alone = decode.published_s / prefill.published_s, decode.roofline_s / prefill.roofline_s
    return (
        f"Right: a hybrid batch costs what its prefill costs. {hybrid.point.decodes} decodes in the place of as many "
        f"of {prefill.point.prompt:,} prompt tokens change the step by {beside[0]:+.1%} published, {beside[1]:+.1%} in "
        f"the roofline. But a batch of {decode.point.decodes} decodes alone costs {alone[0]:.0%} of that prefill "
        f"published, {alone[1]:.0%} in the roofline, which therefore understates what piggybacking saves."
    )


def _level_wrong(results: Compared) -> str:
    single, least = results.decodes[0], results.prefills[0]
    return (
        f"Wrong: the level of decode batches, {_span([a.error for a in results.decodes])}. "
        f"{single.point.decodes} row takes {_ms(single.published_s)} ms, the roofline's weights and KV "
        f"{_ms(single.roofline_s)} ms. A prefill of "
        f"{least.point.prompt} tokens takes {_ms(least.published_s)} ms (roofline {_ms(least.roofline_s)}); prefills "
        "of 2,048 show no such gap. So it is a floor that a longer step hides, not a sum: what launching every kernel "
        "from Python would give, and what our `launch_s_per_layer` is for."
    )


def _slope_wrong(results: Compared) -> str:
    single, few, many = results.decodes[0], results.decodes[2], results.decodes[-1]
    rows = many.point.decodes - single.point.decodes
    slopes = [(many.published_s - single.published_s) / rows / MS, (many.roofline_s - single.roofline_s) / rows / MS]
    grown = many.published_s / single.published_s, many.roofline_s / single.roofline_s
    return (
        f"Wrong: the slope of decode batches. {many.point.decodes} rows cost {grown[0]:.1f} times one row published "
        f"and {grown[1]:.1f} times in the roofline: {slopes[0]:.2f} ms a row against {slopes[1]:.2f}. The roofline is "
        f"flat but for KV up to {ridge_tokens(prefill=False):.0f} rows, the published times up to {few.point.decodes}. "
        "All rows have one context length, so cost a row and cost a cached token cannot be told apart."
    )


def _chunks_wrong(results: Compared) -> str:
    ratios = [c.roofline_over_whole - 1 for c in results.chunked]
    early = {size: [f"{c.over_whole - 1:+.0%}" for c in _chunked(results, size)[:2]] for size in (512, 1024)}
    tiny = [roofline_s(cost(), Point(2048, size, 0, 0, 1)) for size in (64, 2048)]
    return (
        f"Wrong: the overhead of chunks. The roofline says {max(ratios):.1%} for all of these: above "
        f"{ridge_tokens(prefill=True):.0f} tokens a step it is bound by arithmetic, and reading weights and KV again "
        f"is free (in chunks of 64 it would say {tiny[0] / tiny[1] - 1:+.0%}). Published, for prompts of 2,047 and "
        f"4,095: {' and '.join(early[512])} in chunks of 512, {' and '.join(early[1024])} in chunks of 1,024. Half as "
        "many chunks cost as much, which leaves little room for a cost a step (launch, CPU, weights): it is a lower "
        "rate of small steps."
    )


def _whole_wrong(results: Compared) -> str:
    errors = [a.error for a in _prefills(results, 8192, 16384)]
    errors += [c.answer.error for c in results.chunked if c.answer.point.chunk >= c.answer.point.prompt > 8000]
    last = [f"{_chunked(results, size)[-1].over_whole:.2f} in chunks of {size:,}" for size in (512, 1024, REFERENCE)]
    return (
        f"Wrong: prompts from 8,191 tokens on in one step, {_span(errors)}, although in chunks of {REFERENCE:,} the "
        "same prompts are right. Something other than arithmetic slows the published long steps, and with them the "
        f"baseline of figure 9, whose ratios at 16,383 tokens fall to {', '.join(last)}. The roofline never finds "
        "chunks faster."
    )


def _cache_wrong(results: Compared) -> str:
    grown = {size: [f"{c.over_reference - 1:+.0%}" for c in _chunked(results, size)] for size in (512, 1024)}
    return (
        f"Against chunks of {REFERENCE:,} the published overhead keeps its sign: {', '.join(grown[512])} in chunks of "
        f"512 for the four prompts, {', '.join(grown[1024])} in chunks of 1,024. That it grows with the prompt in "
        "chunks of 512 is what slower attention of short chunks behind a long cache would give; the roofline has one "
        "rate for it."
    )


def _kernels(results: Compared) -> str:
    decode, _, prefill = results.hybrids
    wide, thin = prefill.point.linear_s, decode.point.linear_s
    flops, weights = gpu().flops.bfloat16, SHARD.layers * SHARD.layer_parameters
    reached = 2 * prefill.point.prompt * weights / wide / flops, weights * SHARD.dtype_bytes / thin / PCIE_BANDWIDTH
    reduced = 2 * SHARD.layers * prefill.point.prompt * SHARD.hidden * SHARD.dtype_bytes / LINK_BYTES_S
    assumed = DEFAULT.compute_efficiency.prefill, DEFAULT.memory_efficiency.weights
    return (
        f"The profiled kernels of the linear layers alone take {_ms(wide)} ms in the prefill of "
        f"{prefill.point.prompt:,} tokens (roofline {_ms(linear_s(prefill.point.prompt, prefill=True))}) and "
        f"{_ms(thin)} ms in the batch of {decode.point.decodes} decodes (roofline "
        f"{_ms(linear_s(decode.point.decodes, prefill=False))}): {reached[0]:.0%} of peak FLOP/s and {reached[1]:.0%} "
        f"of the bandwidth, where the defaults assume {assumed[0]:.0%} and {assumed[1]:.0%}. The prefill's total is "
        f"nearer because the lower share also pays for the {_ms(prefill.published_s - wide)} ms of everything else, "
        f"all-reduces of at least {_ms(reduced)} ms (at the link's rate) among them."
    )


def _floor_fitted(results: Compared) -> str:
    misses = [results.floored_s(a) / a.published_s - 1 for a in results.decodes]
    return (
        f"Fitted to the decode batches, as an illustration: the longer of the roofline and {_ms(results.base_s)} ms + "
        f"{results.row_s / MS:.1f} ms a row meets them within {_span(misses)}, leaves the hybrid batch free as "
        f"published, and gives the prefill of {results.prefills[0].point.prompt} tokens "
        f"{results.floored_s(results.prefills[0]) / results.prefills[0].published_s - 1:+z.0%}. "
        f"As `launch_s_per_layer` the floor is {results.base_s / SHARD.layers * 1e6:,.0f} us; our default is "
        f"{DEFAULT.launch_s_per_layer * 1e6:.0f}."
    )


def _share_fitted(results: Compared) -> str:
    small = [c.answer.efficiency for size in (512, 1024) for c in _chunked(results, size)]
    large = [c.answer.efficiency for c in _chunked(results, REFERENCE)]
    least = min(c.over_reference - 1 for c in _chunked(results, 1024))
    return (
        "Fitted point by point, as an illustration: `compute_efficiency.prefill` would have to be "
        f"{_span(small, '.2f')} in chunks of 512 and 1,024 and {_span(large, '.2f')} in chunks of {REFERENCE:,}; the "
        f"default is {DEFAULT.compute_efficiency.prefill:.2f}. Not fitted: output tiles of 256 x 128, a wave of 108 at "
        f"a time, would make steps of 1,024 tokens {filled(2048) / filled(1024) - 1:.0%} slower a token than steps of "
        f"2,048, against {least:.0%} or more published. Which tiles were used is not known."
    )


def _agreement(results: Compared) -> str:
    decode, _, _ = results.hybrids
    same = [_ms(a.published_s) for a in results.decodes if a.point.decodes == decode.point.decodes]
    whole = {c.answer.point.prompt + 1: c.answer for c in results.chunked if c.over_whole == 1}
    again = [whole[a.point.prompt].published_s / a.published_s - 1 for a in results.prefills if a.point.prompt in whole]
    cold = [f"{a.point.prompt} tokens, {_ms(a.published_s)} ms" for a in results.prefills if a.point.cold]
    return (
        f"How far the published numbers agree: {decode.point.decodes} decodes take {' or '.join(same)} ms in figure 2 "
        f"and {_ms(decode.published_s)} ms in table 2, whose notebook pools profiled runs with unprofiled ones; "
        f"prompts in one step differ by {_span(again)} between figures 9 and 2. A prefill of figure 2 is a single "
        f"step; the first of the run ({', '.join(cold)}) is in the table and in no range above."
    )


def _left_out(results: Compared) -> str:
    rows = [answer.point.steps[0] for answer in (results.decodes[0], results.decodes[-1])]
    ms = [f"{sum(cost().cpu_ns(step)) / 1e6:.1f} ms at {step.work.decodes}" for step in rows]
    return (
        "The published times are wall times of whole engine steps, the roofline's those of one GPU. Left out of these: "
        "all-reduces between the two GPUs; norms, rotary embeddings and other small kernels; sampling; and the CPU, "
        f"whose phases come to {ms[0]} row and {ms[1]} rows with our defaults."
    )


# -- tables, data -----------------------------------------------------------------------------------------------------


def _cells(answer: Answer) -> tuple[str, str, str]:
    return _ms(answer.published_s), _ms(answer.roofline_s), f"{answer.error:+z.0%}"


TIMES = ("published, ms", "roofline, ms", "error")


def _decode_table(results: Compared) -> Table:
    lines = [(f"{a.point.decodes}", *_cells(a), _ms(results.floored_s(a))) for a in results.decodes]
    says = "Each row has about 1,021 tokens cached."
    return Table("Decode batches (figure 2)", ("rows", *TIMES, "with the fitted floor, ms"), lines, says)


def _prefill_table(results: Compared) -> Table:
    names = [f"{a.point.prompt:,}{' (first of its run)' if a.point.cold else ''}" for a in results.prefills]
    lines = [(name, *_cells(a), f"{a.efficiency:.2f}") for name, a in zip(names, results.prefills, strict=True)]
    bound = f"above {ridge_tokens(prefill=True):.0f} tokens"
    says = f"With the efficiency of the last column the roofline, bound by arithmetic {bound}, would be right."
    return Table("Prefills in one step (figure 2)", ("tokens", *TIMES, "efficiency needed"), lines, says)


def _chunk_table(results: Compared) -> Table:
    lines = []
    for c in results.chunked:
        point, ratios = c.answer.point, (c.over_whole, c.over_reference, c.roofline_over_whole)
        split = f"{point.prompt:,} in {point.chunk:,}"
        name = split if point.chunk < point.prompt else f"{point.prompt:,} ({point.chunk:,})"
        lines.append((name, *_cells(c.answer), *(f"{ratio:.3f}" for ratio in ratios)))
    others = "over one step", f"over chunks of {REFERENCE:,}", "roofline over one step"
    header = ("prompt in chunks", *TIMES, *others)
    says = "In brackets: a chunk size that takes the prompt in one step."
    return Table("Chunked prefills (figure 9)", header, lines, says)


def _hybrid_table(results: Compared) -> Table:
    lines = []
    for a in results.hybrids:
        linear = linear_s(a.point.prompt + a.point.decodes, prefill=a.point.prompt > 0)
        lines.append((named(a.point), *_cells(a), _ms(a.point.linear_s), _ms(linear)))
    header = ("batch", *TIMES, "linear layers published, ms", "linear layers roofline, ms")
    return Table("Hybrid batch (table 2)", header, lines)


def _data(results: Compared) -> dict[str, Any]:
    """Every point, in seconds."""
    return {
        "efficiencies": DEFAULT.compute_efficiency.model_dump() | DEFAULT.memory_efficiency.model_dump(),
        "decode": [{"rows": a.point.decodes, **_entry(a), "floored_s": results.floored_s(a)} for a in results.decodes],
        "prefill": [{"tokens": a.point.prompt, "first": a.point.cold, **_entry(a)} for a in results.prefills],
        "chunked": [
            {
                "prompt_tokens": c.answer.point.prompt,
                "chunk_tokens": c.answer.point.chunk,
                **_entry(c.answer),
                "published_ratio": c.over_whole,
                "published_over_2048": c.over_reference,
                "roofline_ratio": c.roofline_over_whole,
            }
            for c in results.chunked
        ],
        "hybrid": [
            {"prefill_tokens": a.point.prompt, "rows": a.point.decodes, **_entry(a), "linear_s": a.point.linear_s}
            for a in results.hybrids
        ],
        "fitted": {"base_s": results.base_s, "row_s": results.row_s},
    }


def _entry(answer: Answer) -> dict[str, float]:
    return {"published_s": answer.published_s, "roofline_s": answer.roofline_s, "error": answer.error}
