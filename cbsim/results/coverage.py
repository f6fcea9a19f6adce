"""Does a run stay within what its coefficients were measured on? Reasons not to trust it, each with its figures.

A `fitted` cost model is a fit to measured steps. Beyond the largest of them it extrapolates, and for another model or
scheduler it says nothing: it computes all the same, and here it is said. Terms of kernel tables were calibrated on
published measurements of some servers; how sure predictions with them are is known for these, and said with each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from cbsim.results.metrics import Steps
from cbsim.scenario import terms

RANGE = (("rows", "rows"), ("tokens", "query tokens"), ("context_tokens", "KV tokens read"))  # columns of a step


def warnings(scenario: Mapping[str, Any], steps: Steps) -> list[str]:
    """What of a run, by its resolved scenario and its step table, the calibration of its cost model does not cover."""
    calibrated = scenario["cost"].get("calibrated")
    if not calibrated:
        return []
    if "systems" in calibrated:
        return _unlike(scenario, calibrated)
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


# -- terms of kernel tables -------------------------------------------------------------------------------------------


def sureness(scenario: Mapping[str, Any]) -> list[str]:
    """What is known of predictions with calibrated terms: the terms with their intervals, and how far measurements of
    left-out servers lay from what was predicted of them.
    """
    cost = scenario["cost"]
    calibrated = cost.get("calibrated")
    if not calibrated or "systems" not in calibrated:
        return []
    kept = {field: value for field, value in calibrated["values"].items() if cost.get(field, value) == value}
    values = [_term(field, value, calibrated["intervals"][field]) for field, value in kept.items()]
    said = [f"tables of {cost['engine']} and terms {cost['terms']}, with 80 % intervals: {', '.join(values)}"]
    if terms.FRONT in kept:
        said[0] += f"; {terms.FRONT} is the client's and not in the times below"
    known = [f"{metric.upper()} {_span(calibrated[metric])}" for metric in ("ttft", "tpot") if calibrated[metric]]
    if known:
        points = calibrated["tpot"]["points"]
        about = f"80 % of {points} servers that were left out measured more or less than predicted by"
        said.append(f"{about}: {', '.join(known)} (means, {terms.FRONT} included)")
    return said


def _term(name: str, value: float, ends: Sequence[float]) -> str:
    low, high = ends
    return f"{name} {value:.3g} ({low:.3g} to {high:.3g})"


def _span(sure: Mapping[str, float]) -> str:
    return f"{sure['low']:+.1%} to {sure['high']:+.1%}"


def _unlike(scenario: Mapping[str, Any], calibrated: Mapping[str, Any]) -> list[str]:
    """How the server differs from those that the terms were calibrated on."""
    cost, model = scenario["cost"], scenario["model"]
    system, scheduler = PurePath(cost["path"]).name, scenario["scheduler"]["name"].partition("_")[0]
    weights = model["weights_dtype"] or model["dtype"]
    tables = calibrated["tables"].get(system, cost["engine"])
    pairs = (
        (scheduler, (calibrated["backend"],), f"scheduler {scheduler}"),
        (system, calibrated["systems"], f"card {system}"),
        (cost["engine"], (tables,), f"tables of {cost['engine']}"),
        (cost["fastest"], (calibrated["fastest"],), f"fastest {str(cost['fastest']).lower()}"),
        (cost["routing"], (calibrated["routing"], *(() if model["experts"] else (cost["routing"],))), cost["routing"]),
        (model["name"], calibrated["models"], f"model {model['name']}"),
        (weights, calibrated["weights"], f"weights in {weights}"),
        (cost["tensor_parallel"], calibrated["tensor_parallel"], f"{cost['tensor_parallel']} GPUs"),
        (scenario["loop"]["mode"], ("async",), "a synchronous loop"),
    )
    said = [text for value, known, text in pairs if value not in known]
    said += [
        f"{field} {cost[field]:g} in place of {value:g}"
        for field, value in calibrated["values"].items()
        if cost.get(field, value) != value
    ]
    said += _users(scenario, *calibrated["users"])
    return [f"{text}, unlike what the terms {cost['terms']} were calibrated on" for text in said]


def _users(scenario: Mapping[str, Any], least: int, most: int) -> list[str]:
    users = (scenario["workload"].get("arrivals") or {}).get("users")
    if users is None:
        return ["arrivals that are no closed loop"]
    return [] if least <= users <= most else [f"{users:,} users"]
