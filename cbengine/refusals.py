"""What can be simulated and not computed: scenarios that the engine refuses, each in a line that names the field."""

from __future__ import annotations

from cbengine.errors import UsageError
from cbsim.errors import ScenarioError
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.shapes import ModelShape


def check_model(shape: ModelShape) -> None:
    """Refuse types and heads. Raises UsageError, ScenarioError."""
    for name in ("weights_dtype", "kv_dtype"):
        if given := getattr(shape, name):
            raise UsageError(f"model.{name}: got {given}, must be null: the engine has one type for all")
    if shape.heads % shape.kv_heads:
        raise ScenarioError(f"model.kv_heads: got {shape.kv_heads}, must divide model.heads ({shape.heads})")
    if shape.head_dim % 2:
        raise ScenarioError(f"model.head_dim: got {shape.head_dim}, must be even: rotation pairs the values of a head")
    if shape.qkv_bias and shape.qk_norm:
        raise ScenarioError("model.qkv_bias: got true, must be false with model.qk_norm: no model of ours has both")


def check_windows(scenario: Scenario) -> None:
    """Refuse given weights whose layers see less than the scheduler takes them to, and rings: a row's keys and values
    are written before any are read. The peer computes both. Raises UsageError.
    """
    kind = scenario.kind
    if not scenario.model.sees_all and (kind.rings or not kind.windows):
        text = f"layers see less than the whole sequence, must be full with scheduler {scenario.scheduler.name}"
        raise UsageError(f"model.attention: {text}")


def check_gpus(scenario: Scenario) -> None:
    """Refuse a group of GPUs: seats, cache and times would be those of several, and one computes. Raises UsageError."""
    if scenario.gpus > 1:
        raise UsageError(f"cost.tensor_parallel: got {scenario.gpus}, must be 1: the engine computes on one device")


def beams(scenario: Scenario) -> int:
    """Texts of a request that are ranked together; 0 where every text stands alone."""
    texts = scenario.kind.samples(scenario.scheduler)
    return texts if texts > 1 else 0


def check_search(scenario: Scenario, *, greedy: bool, end_tokens: bool) -> None:
    """Refuse what a search does not do: draw tokens, or end a text before the others. Raises UsageError."""
    texts = beams(scenario)
    if texts and not greedy:
        raise UsageError(f"sampling.temperature: must be 0: a search of {texts} texts keeps the likeliest")
    if texts and end_tokens:
        raise UsageError(f"--stop-at-end-tokens: must be left out: the {texts} texts of a search end together")
