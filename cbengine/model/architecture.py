"""The architecture of a decoder of the Llama family: a model's shape, and the fields that only config.json has."""

from __future__ import annotations

from dataclasses import dataclass

from cbsim.scenario.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's stretched rotary frequencies (`rope_type: llama3` in config.json)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


class Architecture(ModelShape):
    """A dense decoder: grouped-query attention with rotary positions, RMS norms, gated SiLU feed-forward. Defaults of
    fields that a scenario's shape lacks are those of a run without weights: unscaled rotary positions.
    """

    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    end_tokens: tuple[int, ...] = ()
    """The ids that end a text."""
