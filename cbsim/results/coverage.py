"""Does a run stay within what its coefficients were measured on? Reasons not to trust it, each with its figures.

A `fitted` cost model is a fit to measured steps. Beyond the largest of them it extrapolates, and for another model or
scheduler it says nothing: it computes all the same, and here it is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cbsim.results.metrics import Steps

RANGE = (("rows", "rows"), ("tokens", "query tokens"), ("context_tokens", "KV tokens read"))  # columns of a step


def warnings(scenario: Mapping[str, Any], steps: Steps) -> list[str]:
    """What of a run, by its resolved scenario and its step table, the calibration of its cost model does not cover."""
    calibrated = scenario["cost"].get("calibrated")
    if not calibrated:
        return []
    texts = [
        _other(name, calibrated[name], is_now) for name, is_now in _subject(scenario) if calibrated[name] != is_now
    ]
    return texts + [text for column, noun in RANGE if (text := _beyond(steps, column, noun, calibrated[column]))]


def _subject(scenario: Mapping[str, Any]) -> list[tuple[str, Any]]:
    model = scenario["model"]
    types = {"dtype": model["dtype"], "weights": model.get("weights_dtype"), "KV cache": model.get("kv_dtype")}
    dtype = ", ".join(f"{kind} of {name}" if name != "dtype" else kind for name, kind in types.items() if kind)
    return [("model", model["name"]), ("dtype", dtype), ("scheduler", scenario["scheduler"]["name"])]


def _other(name: str, was: str, is_now: str) -> str:
    return f"the coefficients were measured with {name} {was}, the scenario has {is_now}"


def _beyond(steps: Steps, column: str, noun: str, most: int) -> str:
    values = steps[column]
    count = int((values > most).sum())
    if not count:
        return ""
    largest = int(values.max())
    return f"{count:,} of {len(values):,} steps have more than the {most:,} {noun} measured, up to {largest:,}"
