"""What a scenario leaves open, and what it comes to on its model and GPU: values, each with where it comes from."""

from __future__ import annotations

from dataclasses import fields
from itertools import groupby

from cbsim.scenario.scenario import Scenario, depth, loops, scheduler_options, site


def solved(scenario: Scenario) -> list[tuple[str, str]]:
    """(values, where they come from) of the scheduler's settings that are null and of the cache, for the loop with most
    steps in flight. Raises ScenarioError.
    """
    steps = max(map(depth, loops(scenario)))
    place, options = site(scenario, steps), scheduler_options(scenario, steps)
    reasons = scenario.kind.reasons(scenario.scheduler, place)
    values = []
    for field in fields(scenario.scheduler):
        value = getattr(options, field.name, None)
        if getattr(scenario.scheduler, field.name) is None and value is not None:
            values.append((reasons.get(field.name, "solved"), f"{field.name} {value:,}"))
    if scenario.kv_cache.num_blocks is None:
        gpu = scenario.hardware
        share = f"{scenario.kv_cache.memory_fraction:g} of the {gpu.memory_bytes / 2**30:.1f} GiB of {gpu.name}"
        values.append(
            (reasons.get("num_blocks", share), f"{options.num_blocks:,} blocks of {options.block_size} tokens")
        )
    return [(", ".join(v for _, v in group), reason) for reason, group in groupby(values, key=lambda pair: pair[0])]


def lines(scenario: Scenario) -> str:
    """The same as text, a line for each; empty if nothing was left open."""
    text = [f"{values}: {reason}" for values, reason in solved(scenario)]
    return "\n".join(["solved  " + text[0], *("        " + line for line in text[1:])]) if text else ""
