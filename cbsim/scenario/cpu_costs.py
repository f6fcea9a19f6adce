"""CPU time of the loop, in a scenario: by phase, linear in what a step holds."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cbsim.scenario.fields import Frozen, Real

Seconds = Annotated[Real, Field(ge=0)]


class PhaseSettings(Frozen):
    """CPU seconds of one phase of a step, linear in what the step holds."""

    base_s: Seconds = 0.0
    """Seconds a step."""
    per_request_s: Seconds = 0.0
    """Seconds a row (request) of the step."""
    per_token_s: Seconds = 0.0
    """Seconds a query token."""
    per_block_s: Seconds = 0.0
    """Seconds a cache block in the tables of the step."""
    per_chunk_s: Seconds = 0.0
    """Seconds a request that is listed by itself: a chunk of its prompt, a first or a resumed row."""
    per_change_s: Seconds = 0.0
    """Seconds a decoding request that gets a block, leaves the others or ends."""


class CpuSettings(Frozen):
    """CPU time of the loop's phases; nothing by default."""

    schedule: PhaseSettings = PhaseSettings()
    """Planning a step."""
    prepare: PhaseSettings = PhaseSettings()
    """Building its input tensors."""
    launch: PhaseSettings = PhaseSettings()
    """Queueing its copies and its graph or kernels."""
    update: PhaseSettings = PhaseSettings()
    """Applying its result."""


class MeasuredCpuSettings(CpuSettings):
    """CPU time of the loop's phases. schedule and update: vLLM 0.33 measured on a shared 2-core Xeon (an upper guess);
    prepare and launch: assumptions, to be replaced by a calibration.
    """

    schedule: PhaseSettings = PhaseSettings(base_s=20e-6, per_request_s=6.8e-6)
    """Planning a step."""
    prepare: PhaseSettings = PhaseSettings(base_s=300e-6, per_request_s=5e-6)
    """Building its input tensors."""
    launch: PhaseSettings = PhaseSettings(base_s=200e-6)
    """Queueing its copies and its graph or kernels."""
    update: PhaseSettings = PhaseSettings(base_s=10e-6, per_request_s=3.3e-6)
    """Applying its result."""
