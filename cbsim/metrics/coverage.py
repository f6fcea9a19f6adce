"""Checks that a run stays within the range its coefficients were measured on: reasons not to trust it, with figures.

A `fitted` cost model is a fit to measured steps. Beyond the largest of them it extrapolates, and for another model or
scheduler it is not valid; it computes all the same, so a warning is given here. Terms of kernel tables were calibrated
on published measurements of some servers; the error of predictions is known for these, and reported with each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

from cbsim.cost import curves
from cbsim.cost.table import HEAD_DIM
from cbsim.record.tables import Steps
from cbsim.scenario import costs, terms
from cbsim.scenario.costs import Cost, FittedSettings, RooflineSettings, TableSettings
from cbsim.scenario.scenario import Scenario

RANGE = (("rows", "rows"), ("tokens", "query tokens"), ("context_tokens", "KV tokens read"))  # columns of a step


NOTED = 0.1  # share of the GPU's time from which on the error of a class of steps is given
LARGEST = 8192  # query tokens of the steps that efficiency curves were compared with tables for


def basis(scenario: Scenario, steps: Steps | None = None) -> str:
    """Return what the step times of simulated runs rest on and how far off they are known to be: for `steps` by size,
    the sizes that take most of the GPU's time first, or for any steps.
    """
    cost = scenario.cost
    if isinstance(cost, RooflineSettings):
        return _roofline(cost, scenario, steps)
    if isinstance(cost, TableSettings):
        whose = f"{cost.engine} in " if cost.engine else ""
        added = f"terms {cost.terms}" if cost.terms else f"terms as given or its defaults: {UNKNOWN}"
        return f"kernel tables of {whose}{PurePath(cost.path).name}, and {added}"
    if isinstance(cost, FittedSettings):
        device, fits = (cost.calibrated.device, cost.calibrated.fits) if cost.calibrated else ("no named device", None)
        within = f"95 % of {fits.kernels.steps:,} measured steps within {fits.kernels.p95:.1%}" if fits else UNKNOWN
        return f"coefficients calibrated on {device}: {within}"
    return f"a fixed time a step and linear terms: {UNKNOWN}"


def _roofline(cost: RooflineSettings, scenario: Scenario, steps: Steps | None) -> str:
    gpu = scenario.hardware
    if cost.calibrated and cost.calibrated.own:
        return f"data sheet of {gpu.name} and terms {cost.terms}, {_own(cost.calibrated.own)}"
    known = [] if cost.compute_efficiency or cost.memory_efficiency else curves.sources(gpu)
    if known:
        return _curves(known, scenario, steps)
    compute, memory = cost.efficiencies
    shares = f"{compute.prefill:.0%} and {compute.decode:.0%} of its FLOP/s in prefills and decodes"
    shares += f", {memory.weights:.0%} and {memory.kv:.0%} of its bandwidth for weights and KV"
    usual = cost.efficiencies == (costs.ComputeEfficiency(), costs.MemoryEfficiency()) and curves.sources(gpu)
    error = _servers("constant") if usual else UNKNOWN
    return f"data sheet of {gpu.name} and constant shares of it ({shares}): {error}"


STEP_TIMES = b"step_times"  # metadata of a sweep's table: what its runs rest on, a line each


def bases(scenarios: Iterable[Scenario]) -> list[str]:
    """Return what step times of scenarios rest on, and what of these their terms were not calibrated on, each once."""
    parts = {each.model_dump_json(include={"cost", "hardware", "model"}): each for each in scenarios}
    lines = [f"step times by {basis(each)}" for each in parts.values()]
    termed = [each for each in parts.values() if isinstance(each.cost, TableSettings | RooflineSettings)]
    known = [each.model_dump(mode="json") for each in termed]
    unlike = [line for each in known if each["cost"]["calibrated"] for line in _unlike(each)]
    return list(dict.fromkeys([*lines, *unlike]))


UNKNOWN = "their error is not known"


def _servers(kind: str) -> str:
    """Return how far off servers of cards that were measured are, predicted by less than is known of them."""
    cards, of = curves.servers(kind)
    if not cards:
        return UNKNOWN
    ttft, tpot = (f"{min(errors):.0%} to {max(errors):.0%}" for errors in (of["ttft"], of["tpot"]))
    return f"servers of {', '.join(cards)}, predicted so, were off by {tpot} in mean TPOT and {ttft} in mean TTFT"


def _curves(known: Sequence[curves.Source], scenario: Scenario, steps: Steps | None) -> str:
    model, gpu = scenario.model, scenario.hardware
    bounds, cards = curves.errors(known, gpu.name, scenario.gpus), [each.curves["hardware"]["name"] for each in known]
    whose, of, alone = f"efficiency curves of {cards[0]}", "of its kernel tables", ""
    if cards[0] != gpu.name:
        nearest = max(known, key=lambda source: source.weight).curves["hardware"]["name"]
        whose = f"efficiency curves of {len(cards)} cards, {nearest} first, scaled to the data sheet of {gpu.name}"
        of, alone = "for a card that was left out", f"; data sheet only: {_servers('alone')}"
    within = f"one model's layers: {UNKNOWN}"
    if bounds:
        spread = f"within {min(bounds.values()):.1%} to {max(bounds.values()):.1%} {of}, by their size"
        within = f"90 % of steps {(steps is not None and _by_size(bounds, of, steps)) or spread}"
    unlike = {
        "latent attention": model.latent is not None,
        f"heads of {model.head_dim}": model.head_dim != HEAD_DIM and model.latent is None,
        "linear attention": model.linear is not None,
        "windows": {*model.attention} - {"full", "linear"},
        f"{scenario.gpus} GPUs": scenario.gpus > 8,
        f"{scenario.ranks} servers in step": scenario.ranks > 1,
    }
    others = ", ".join(name for name, is_so in unlike.items() if is_so)
    return f"{whose}: {within}{alone}" + (f"; {others}: not measured" if others else "")


def _by_size(bounds: Mapping[int, float], of: str, steps: Steps) -> str:
    """Return the bounds, by the most query tokens of a class, for the classes with NOTED of the GPU's time or more."""
    most = list(bounds)
    classes = np.minimum(np.searchsorted(most, steps["padded_tokens"]), len(most) - 1)
    busy = np.bincount(classes, weights=steps.lane("compute"), minlength=len(most))
    shares = busy / max(busy.sum(), 1.0)
    noted = [at for at in np.argsort(-shares).tolist() if shares[at] >= NOTED]
    sizes = {at: f"{(0, *most)[at] + 1:,} to {most[at]:,} tokens ({shares[at]:.0%} of the GPU's time)" for at in noted}
    each = ", ".join(f"of {size} within {bounds[most[at]]:.1%}" for at, size in sizes.items())
    return f"{each} {of}" if each else ""


def warnings(scenario: Mapping[str, Any], steps: Steps) -> list[str]:
    """Return what the calibration of the cost model does not cover of a run, by its resolved scenario and its steps."""
    calibrated = scenario["cost"].get("calibrated")
    if not calibrated:
        return _large(steps) if scenario["cost"]["kind"] == "roofline" else []
    if scenario["cost"]["kind"] in ("table", "roofline"):
        return [*_unlike(scenario), *(_beyond(steps, own) if (own := calibrated.get("own")) else ())]
    model = scenario["model"]
    types = {"dtype": model["dtype"], "weights": model.get("weights_dtype"), "KV cache": model.get("kv_dtype")}
    dtype = ", ".join(f"{kind} of {name}" if name != "dtype" else kind for name, kind in types.items() if kind)
    subject = {"model": model["name"], "dtype": dtype, "scheduler": scenario["scheduler"]["name"]}
    changed = [(name, is_now) for name, is_now in subject.items() if calibrated[name] != is_now]
    unlike = "the coefficients were measured with {} {}, the scenario has {}"
    return [*(unlike.format(name, calibrated[name], now) for name, now in changed), *_beyond(steps, calibrated)]


def _beyond(steps: Steps, most: Mapping[str, Any]) -> list[str]:
    """Return how steps exceed the largest that were measured."""
    lines = []
    for column, noun in RANGE:
        over, bound = steps[column][steps[column] > most[column]], f"the {most[column]:,} {noun} measured"
        if len(over):
            lines.append(f"{len(over):,} of {len(steps):,} steps have more than {bound}, up to {over.max():,}")
    return lines


def _large(steps: Steps) -> list[str]:
    """Return a warning if most of the GPU's time goes to steps larger than any that curves were checked for."""
    busy = steps.lane("compute").astype(np.float64)
    share = float(busy[steps["padded_tokens"] > LARGEST].sum()) / max(float(busy.sum()), 1.0)
    if share <= 0.5:
        return []
    return [f"{share:.0%} of the GPU's time are steps of more than the {LARGEST:,} tokens that were checked"]


def sureness(cost: Cost) -> list[str]:
    """Return the known errors of predictions with calibrated terms: the terms with their intervals, and the range of
    measured over predicted values of left-out servers, or of left-out loads of one's own.
    """
    if not isinstance(cost, RooflineSettings | TableSettings) or (calibrated := cost.calibrated) is None:
        return []
    unchanged = [field for field in calibrated.values if field not in calibrated.changed(cost)]
    ends = [(field, calibrated.values[field], *calibrated.intervals[field]) for field in unchanged]
    values = [f"{field} {value:.3g} ({low:.3g} to {high:.3g})" for field, value, low, high in ends]
    of = f"tables of {cost.engine}" if isinstance(cost, TableSettings) else "the data sheet"
    sentences = [f"{of} and terms {cost.terms}, with 80 % intervals: {', '.join(values)}"]
    if terms.FRONT in unchanged:
        sentences[0] += f"; {terms.FRONT} is the client's and not in the times below"
    if calibrated.own:
        return [*sentences, _own(calibrated.own)]
    known = [(name, sure) for name, sure in (("TTFT", calibrated.ttft), ("TPOT", calibrated.tpot)) if sure]
    if known:
        spans = ", ".join(f"{name} {sure.low:+.1%} to {sure.high:+.1%}" for name, sure in known)
        about = f"80 % of {known[-1][1].points} servers that were left out measured more or less than predicted by"
        sentences.append(f"{about}: {spans} (means, {terms.FRONT} included)")
    return sentences


def _own(own: terms.Own) -> str:
    """Return what terms of one's own server rest on, and how far off they are on loads that were left out."""
    count, known = len(own.residuals), f"no load left out: {UNKNOWN}"
    if count:
        errors = ", ".join(f"{metric.upper()} error {own.error(metric):.1%}" for metric in ("tpot", "ttft"))
        known = f"{errors} on {count} load{'s' * (count > 1)} left out"
    undetermined = f"; not determined: {', '.join(own.undetermined)}" if own.undetermined else ""
    return f"calibrated on {own.requests:,} requests of this server: {known}{undetermined}"


def _unlike(scenario: Mapping[str, Any]) -> list[str]:
    """Return how a server differs from those of its terms; unvalidated, as runs of other code have other fields."""
    cost, model, own = scenario["cost"], scenario["model"], scenario["cost"]["calibrated"].get("own")
    known = {**cost["calibrated"], "own": own and terms.Own.model_construct(**own)}
    calibrated = costs.CalibratedTerms.model_construct(**known)
    backend, tensor = scenario["scheduler"]["name"].partition("_")[0], cost.get("tensor_parallel", 1)
    system = PurePath(cost["path"]).name if "path" in cost else scenario["hardware"]["name"]
    users = (scenario["workload"].get("arrivals") or {}).get("users")
    engine, weights = cost.get("engine"), model["weights_dtype"] or model["dtype"]
    fastest, routing = cost.get("fastest", calibrated.fastest), cost.get("routing", calibrated.routing)
    server = {
        f"tables of {engine}": engine != calibrated.tables.get(system, engine),
        f"fastest {str(fastest).lower()}": fastest != calibrated.fastest,
        f"routing {routing}": model["experts"] and routing != calibrated.routing,
        f"weights in {weights}": weights not in calibrated.weights,
        "a synchronous loop": scenario["loop"]["mode"] != "async" and not own,
    }
    differences = calibrated.outside(backend, system, model["name"], tensor, users)
    differences += [name for name, differs in server.items() if differs]
    changed = calibrated.changed(cost).items()
    differences += [f"{field} {value:g} in place of {calibrated.values[field]:g}" for field, value in changed]
    return [f"{each}, unlike what the terms {cost.get('terms')} were calibrated on" for each in differences]
