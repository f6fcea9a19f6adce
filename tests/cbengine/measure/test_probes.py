"""The probes that calibration measures: they are scenarios on every scheduler, and cover what was asked for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the engine needs torch")

from support.engine.served import INLINE, LOOPS, SCHEDULERS, asked

from cbengine.batch import Load
from cbengine.measure import probes
from cbengine.measure.probes import Probe, ProbeTable, Reach
from cbsim.scenario.scenario import Scenario
from cbsim.workload import generators

HOSTILE = (  # what a base scenario may say, and a probe has to do without
    "workload.requests=3",
    "kv_cache.num_blocks=2",
    "slo={ttft_s: 1}",
)
VLLM = (
    "scheduler.enable_chunked_prefill=false",
    "scheduler.max_model_len=20",
    "scheduler.max_num_seqs=1",
    "scheduler.max_num_batched_tokens=8192",
    "scheduler.enable_prefix_caching=true",
)


@settings(max_examples=40)
@given(
    rows=st.integers(1, 80), longest=st.integers(8, 500), tokens=st.integers(8, 300), context=st.integers(1, 9000),
    quick=st.booleans(),
)  # fmt: skip
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_probes_are_scenarios(scheduler: str, rows: int, longest: int, tokens: int, context: int, quick: bool) -> None:
    """Whatever the reach and the base: each has a cache for all seats at once, so that nothing is refused or preempted,
    and a device of the right size follows from it.
    """
    base = BASES[scheduler]
    for probe in probes.probes(Reach(rows, longest, tokens, context), quick=quick):
        assert 1 <= probe.low <= probe.prompt
        assert probe.prompt + probe.output <= longest
        assert probe.slots <= rows
        ready = probes._scenario(base, probe)
        assert Scenario.model_validate(ready.model_dump(mode="json")) == ready
        options: Any = ready.options("sync")
        assert options.num_blocks * options.block_size >= probe.slots * (probe.prompt + probe.output)
        sizes = Load.of(generators.build(ready).specs()).capacity(options)
        assert sizes.slots <= max(probe.slots, probe.requests)


BASES = {one: asked(one, *HOSTILE, *(VLLM if one.startswith("vllm ") else ())) for one in SCHEDULERS}


def test_probes_cover_what_was_asked_for() -> None:
    """All seats, whole prompts, chunks, one request alone, as much context as asked for; `quick` shortens outputs."""
    for quick in (False, True):
        found = probes.probes(Reach(16, 160, 128, 1000), quick=quick)
        assert max(probe.slots for probe in found) == 16
        assert min(probe.slots for probe in found) == 1
        assert max(probe.prompt + probe.output for probe in found) == 160
        assert any(probe.chunk >= probe.prompt for probe in found)
        assert any(probe.chunk < probe.prompt for probe in found)
        assert max(probe.slots * probe.low for probe in found) >= 0.8 * 1000


@pytest.mark.parametrize("loop", LOOPS)
def test_what_a_base_scenario_says_of_its_loop_does_not_matter(loop: str) -> None:
    """Probes run the synchronous loop, in which every step has its own time; some run the other one, too."""
    base, said = asked("vllm", f"loop.mode={loop}"), []
    few = Probe("few", 3, 2, 1, 6, 8, 6)
    table = probes.measure(base, INLINE, [few, few._replace(ahead=True)], said.append)
    assert said[:2] == ["probe 1 of 2: few", "probe 2 of 2: few, in both loops"]
    assert table.lines
    assert all(line.requests >= 1 and line.d2h >= 0 and not line.eager for line in table.lines)
    assert ProbeTable.of(table.arrow()).lines == table.lines
