"""Checks that a run stays within the range its coefficients were measured on: reasons not to trust it, with figures.

A `fitted` cost model is a fit to measured steps. Beyond the largest of them it extrapolates, and for another model or
scheduler it is not valid; it computes all the same, so a warning is given here. Terms of kernel tables were calibrated
on published measurements of some servers; the error of predictions is known for these, and reported with each.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from cbsim.record.tables import Steps
from cbsim.scenario import terms
from cbsim.scenario.costs import CalibratedTerms, TableSettings

RANGE = (("rows", "rows"), ("tokens", "query tokens"), ("context_tokens", "KV tokens read"))  # columns of a step


def warnings(scenario: Mapping[str, Any], steps: Steps) -> list[str]:
    """Return what the calibration of the cost model does not cover of a run, by its resolved scenario and its steps."""
    calibrated = scenario["cost"].get("calibrated")
    if not calibrated:
        return []
    if scenario["cost"]["kind"] == "table":
        return _unlike(scenario)
    model = scenario["model"]
    types = {"dtype": model["dtype"], "weights": model.get("weights_dtype"), "KV cache": model.get("kv_dtype")}
    dtype = ", ".join(f"{kind} of {name}" if name != "dtype" else kind for name, kind in types.items() if kind)
    subject = {"model": model["name"], "dtype": dtype, "scheduler": scenario["scheduler"]["name"]}
    changed = [(name, is_now) for name, is_now in subject.items() if calibrated[name] != is_now]
    unlike = "the coefficients were measured with {} {}, the scenario has {}"
    beyond = (_beyond(steps, column, noun, calibrated[column]) for column, noun in RANGE)
    return [*(unlike.format(name, calibrated[name], is_now) for name, is_now in changed), *filter(None, beyond)]


def _beyond(steps: Steps, column: str, noun: str, most: int) -> str:
    values = steps[column]
    count = int((values > most).sum())
    if not count:
        return ""
    largest = int(values.max())
    return f"{count:,} of {len(values):,} steps have more than the {most:,} {noun} measured, up to {largest:,}"


def sureness(cost: TableSettings) -> list[str]:
    """Return the known errors of predictions with calibrated terms: the terms with their intervals, and the range of
    measured over predicted values of left-out servers.
    """
    calibrated = cost.calibrated
    if calibrated is None:
        return []
    unchanged = [field for field in calibrated.values if field not in _changed(cost, calibrated)]
    ends = [(field, calibrated.values[field], *calibrated.intervals[field]) for field in unchanged]
    values = [f"{field} {value:.3g} ({low:.3g} to {high:.3g})" for field, value, low, high in ends]
    sentences = [f"tables of {cost.engine} and terms {cost.terms}, with 80 % intervals: {', '.join(values)}"]
    if terms.FRONT in unchanged:
        sentences[0] += f"; {terms.FRONT} is the client's and not in the times below"
    known = [(name, sure) for name, sure in (("TTFT", calibrated.ttft), ("TPOT", calibrated.tpot)) if sure]
    if known:
        spans = ", ".join(f"{name} {sure.low:+.1%} to {sure.high:+.1%}" for name, sure in known)
        about = f"80 % of {known[-1][1].points} servers that were left out measured more or less than predicted by"
        sentences.append(f"{about}: {spans} (means, {terms.FRONT} included)")
    return sentences


def _changed(cost: TableSettings, calibrated: CalibratedTerms) -> dict[str, float]:
    """Return the calibrated values of the terms that the scenario overrides."""
    return {field: value for field, value in calibrated.values.items() if getattr(cost, field, value) != value}


def _unlike(scenario: Mapping[str, Any]) -> list[str]:
    """Return the differences of the server from those that the terms were calibrated on. Nothing is validated: a run of
    other code may have more fields.
    """
    cost = TableSettings.model_construct(**scenario["cost"])
    calibrated = CalibratedTerms.model_construct(**scenario["cost"]["calibrated"])
    model, engine = scenario["model"], scenario["scheduler"]["name"].partition("_")[0]
    system, weights = PurePath(cost.path).name, model["weights_dtype"] or model["dtype"]
    users = (scenario["workload"].get("arrivals") or {}).get("users")
    differences = calibrated.outside(engine, system, model["name"], cost.tensor_parallel, users)
    server = {
        f"tables of {cost.engine}": cost.engine != calibrated.tables.get(system, cost.engine),
        f"fastest {str(cost.fastest).lower()}": cost.fastest != calibrated.fastest,
        f"routing {cost.routing}": model["experts"] and cost.routing != calibrated.routing,
        f"weights in {weights}": weights not in calibrated.weights,
        "a synchronous loop": scenario["loop"]["mode"] != "async",
    }
    differences += [name for name, differs in server.items() if differs]
    changed = _changed(cost, calibrated)
    differences += [f"{field} {getattr(cost, field):g} in place of {value:g}" for field, value in changed.items()]
    return [f"{difference}, unlike what the terms {cost.terms} were calibrated on" for difference in differences]
