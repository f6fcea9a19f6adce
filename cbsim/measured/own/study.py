"""`python -m cbsim fit`: the scenario of a user's own server, its terms fitted, and what can be said of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import expm1, hypot, sqrt
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from cbsim.draw.chart import SERIES, Chart, Mark, Panel, Points, Whiskers, equality
from cbsim.draw.report import Report, Table
from cbsim.errors import ScenarioError
from cbsim.measured.own.fit import Compared, Fit, Simulated, compare, fit, priors, terms_file, to_predict
from cbsim.measured.own.measurement import Facts, Load, Measurement, measurement
from cbsim.metrics.terminal import lookup
from cbsim.record.tables import Floats
from cbsim.scenario import catalog, documents, scenario
from cbsim.scenario.fields import bare
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.terms import TermsFile

METRICS = ("TTFT", "TPOT", "E2E")
SIZES = ("num_blocks", "block_size")
UNLIKE = 0.5  # mean error of fitted loads, a logarithm, from which on a scenario is of another server
CHANGED = 3.0  # in units of noise: from which on a server has changed
OPPOSITE = {True: False, False: True}
FLAGS: Mapping[str, tuple[str, Mapping[Any, Any]]] = {
    **dict.fromkeys(("tensor_parallel_size", "tp_size"), ("cost.tensor_parallel", {})),
    **dict.fromkeys(("enforce_eager", "disable_cuda_graph"), ("loop.cuda_graphs.enabled", OPPOSITE)),
    "async_scheduling": ("loop.mode", {True: "async", False: "sync"}),
    "disable_overlap_schedule": ("loop.mode", {True: "sync", False: "async"}),
}
"""Flags of servers that are fields of a scenario of another name, and their values if these are others, too. Other
flags are fields of the scheduler of the same name.
"""


class Study(NamedTuple):
    """The terms of a server, the report on them, and whether another measurement differs from them."""

    terms: TermsFile
    report: Report
    changed: bool


def study(
    paths: Sequence[Path],
    source: Path | str,
    overrides: Sequence[str],
    *,
    name: str,
    where: Mapping[str, str],
    hold_out: Sequence[str] = (),
    against: Sequence[Path] = (),
    report: Callable[[str], None] = lambda _: None,
) -> Study:
    """Fit the terms of a scenario to what was measured of a server. Raises ScenarioError or RunError."""
    of = measurement(paths, where)
    other = measurement(against, where) if against else None
    server, assumed = settings(source, overrides, of.facts)
    for line in assumed:
        report(line)
    _check_lengths([*of.usable, *(other.usable if other else ())], server)
    known = priors(server)
    predict = Simulated(server, known)
    made = fit(of.usable, known, predict, to_predict(of.usable, hold_out), report)
    about = f"{server.model.name} on {server.gpus} x {server.hardware.name}, measured by {of.tool}: {_names(paths)}."
    file = terms_file(name, made, server, about)
    findings, tables = [*_findings(made, of), *assumed], fit_tables(made)
    data: dict[str, Any] = {"terms": file.model_dump(mode="json"), "loads": numbers([*made.fitted, *made.unseen])}
    changed = False
    if other is not None:
        later = [compare(load, predict, made.at, slopes=False) for load in other.usable]
        changed, verdict = _verdict([*made.fitted, *made.unseen], later)
        findings.insert(0, verdict)
        tables.append(loads_table(f"Against {_names(against)}", later))
        data |= {"against": numbers(later), "changed": changed}
    title = f"Terms of {server.model.name} on {server.hardware.name}"
    question = "How near are predictions of this server?"
    return Study(file, Report(title, question, findings, tables, [chart(made)], data), changed)


def _check_lengths(loads: Sequence[Load], server: Scenario) -> None:
    """Raise ScenarioError for a request that is longer than the model's context."""
    most = server.model.max_position
    for load in loads:
        longest = int((load.prompt_tokens + load.output_tokens).max())
        if longest > most:
            context = f"the model's context (model.max_position) {most:,}"
            message = f"load {load.name}: a request has {longest:,} tokens, {context}"
            raise ScenarioError(message, field="model.max_position", value=most, bound=f">= {longest}")


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(path.name for path in paths)


def settings(source: Path | str, overrides: Sequence[str], facts: Facts) -> tuple[Scenario, list[str]]:
    """Return the scenario of the server: what its file leaves open is as the facts say. Each assumption is a line; so
    is what the file says otherwise. Raises ScenarioError if the server had another model.
    """
    stated, first = documents.read(catalog.scenario(source)).data, scenario.load(source, overrides)
    if first.fleet is not None:
        raise ScenarioError("fleet: expected one server, whose terms are fitted", field="fleet")
    lines, more = _model(first, facts), list[str]()
    plain, changed = first.model_dump(mode="json"), {each.partition("=")[0] for each in overrides}
    for field, (value, origin) in _of_server(first, facts).items():
        now = lookup(plain, field)
        if now not in ("both", value) and (lookup(stated, field) is not None or field in changed):
            lines.append(f"{field}: {now}, as the scenario says; {value}, {origin}")
        elif now != value:
            more.append(f"{field}={value}")
            lines.append(f"{field}: {value}, {origin}")
    return scenario.load(source, [*overrides, *more]), lines


def _of_server(of: Scenario, facts: Facts) -> dict[str, tuple[Any, str]]:
    """Return the fields of a scenario that the facts know, with their values and where these come from."""
    known: dict[str, tuple[Any, str]] = {"loop.mode": ("async", "assumed")} if of.loop.mode == "both" else {}
    for name in SIZES:
        if getattr(facts, name) is not None:
            known[f"kv_cache.{name}"] = getattr(facts, name), _as_said(facts, name)
    for flag, value in facts.flags.items():
        field, values = FLAGS.get(flag, (f"scheduler.{flag}", {}))
        if value is not None and (flag in FLAGS or hasattr(of.scheduler, flag)):
            known[field] = values.get(value, value), _as_said(facts, f"flags.{flag}")
    return known


def _as_said(facts: Facts, fact: str) -> str:
    return f"as the server says ({facts.sources.get(fact, 'no source')})"


def _model(of: Scenario, facts: Facts) -> list[str]:
    served, name = bare(facts.model or ""), bare(of.model.name)
    if not served or name in served:
        return []
    known = [each for each in catalog.names("models") if bare(each) in served]
    if known:
        message = f"model: got {of.model.name}, the measured server had {facts.model}: results of another model"
        raise ScenarioError(message, field="model", value=of.model.name, bound=max(known, key=len))
    return [f"model: {of.model.name}, assumed to be what is served as {facts.model!r}"]


def _findings(made: Fit, of: Measurement) -> list[str]:
    lines = [f"{len(made.fitted)} loads fitted: {errors(made.fitted)}; residuals {made.scale:.1f} times the noise."]
    if made.unseen:
        noise = _shares(np.array([each.noise for each in made.unseen]))
        lines.append(f"{len(made.unseen)} loads left out: {errors(made.unseen)}; noise of these measurements {noise}.")
    if float(np.abs([each.errors[:2] for each in made.fitted]).mean()) > UNLIKE:
        doubt = "are model, card and scheduler of the scenario those that were measured?"
        lines.insert(0, f"THESE LOADS DO NOT FIT: {doubt}")
    if made.undetermined:
        lines.append(f"Not determined by these loads, left at their priors: {', '.join(made.undetermined)}.")
    lines += [f"Load {load.name} is not used: {load.left_out}." for load in of.loads if load.left_out]
    lines += [f"Load {load.name}: {note}." for load in of.usable for note in load.notes]
    return [*lines, f"The measurement is incomplete: {of.incomplete}."] if of.incomplete else lines


def errors(compared: Sequence[Compared]) -> str:
    """Return the mean absolute errors of some loads, for a sentence."""
    return f"error {_shares(np.abs(np.expm1([each.errors for each in compared])))}"


def _shares(of: Floats) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in zip(METRICS, of.mean(axis=0), strict=True))


def fit_tables(made: Fit) -> list[Table]:
    """Return the terms, and the loads that were fitted and left out."""
    rows = []
    for name, of in made.terms.items():
        ends = of.value, of.low, of.high, *made.joint.get(name, ())
        cells = [f"{end:.4g}" for end in ends] + ["-"] * (5 - len(ends))
        rows.append((name, *cells, "no" if name in made.undetermined else "yes"))
    note = "80 % intervals; in the joint ones all determined terms lie at once with 95 %. Other terms keep their prior."
    header = ("term", "value", "from", "to", "joint from", "to", "determined")
    tables = [Table("Terms", header, rows, note), loads_table("Loads", made.fitted)]
    return [*tables, loads_table("Loads left out", made.unseen)] if made.unseen else tables


def loads_table(title: str, compared: Sequence[Compared]) -> Table:
    of = [f"{name}{what}" for name in METRICS for what in (", ms", " predicted", " error", " noise")]
    rows = [(each.load.name, *_cells(each)) for each in compared]
    return Table(title, ("load", *of), rows, "Means; errors are predicted over measured, less 1.")


def _cells(each: Compared) -> list[str]:
    cells = list[str]()
    for measured, predicted, error, noise in zip(each.measured, each.predicted, each.errors, each.noise, strict=True):
        shown = f"{1e3 * measured:.2f}", f"{1e3 * predicted:.2f}", f"{expm1(error):+.1%}", f"{noise:.1%}"
        cells += shown if np.isfinite(measured) else ["-"] * 4
    return cells


def chart(made: Fit) -> Chart:
    """Draw mean TTFT and TPOT predicted beside measured, and the errors beside the noise of each load."""
    every, rows = [*made.fitted, *made.unseen], np.arange(len(made.fitted) + len(made.unseen), dtype=float)
    parts = (("fitted", slice(len(made.fitted))), ("left out", slice(len(made.fitted), None)))
    names, beside, residuals = [each.load.name for each in every], list[Panel](), list[Panel]()
    for at, metric in enumerate(METRICS[:2]):
        both = np.array([[1e3 * each.measured[at], 1e3 * each.predicted[at]] for each in every]).T
        error, noise = 100 * np.array([[expm1(each.errors[at]), each.noise[at]] for each in every]).T
        pairs, far = list[Points](), list[Mark]()
        for (name, part), style in zip(parts, SERIES, strict=False):
            pairs.append(Points(name, both[0, part], both[1, part], style, names[part]))
            far.append(Whiskers("", rows[part], (error - noise)[part], (error + noise)[part], style, level=True))
            far.append(Points(name, error[part], rows[part], style))
        equal = equality(pairs)
        log = bool(equal.x[1] > 10 * equal.x[0])
        beside.append(Panel([equal, *pairs], f"{metric}, ms, measured", "predicted", x_log=log, y_log=log))
        residuals.append(Panel(far, f"error of {metric}, %", rows=names))
    caption = "Means of a load; on the dotted line, predicted and measured are equal. Bars are the noise of a load."
    return Chart("loads", "Predicted beside measured", caption, [*beside, *residuals], columns=2)


def numbers(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """Return loads for report.json: TTFT, TPOT and E2E, means in seconds and noise in shares of them."""
    values = ("measured", "predicted", "noise")
    return [
        {"load": each.load.name, "requests": int((~each.load.failed).sum())}
        | {name: np.nan_to_num(getattr(each, name)).round(6).tolist() for name in values}
        for each in compared
    ]


def _verdict(before: Sequence[Compared], later: Sequence[Compared]) -> tuple[bool, str]:
    """Return whether a server has changed, and a line: the mean difference of a metric from what the terms predict, in
    units of its standard error; of a load that counts the noise of both measurements and what the terms miss.
    """
    lines, changed = list[str](), False
    for at, name in enumerate(METRICS[:2]):
        missed = float(np.sqrt(np.mean([each.errors[at] ** 2 for each in before])))
        known = [(-each.errors[at], hypot(each.noise[at], missed)) for each in later if np.isfinite(each.measured[at])]
        if not known:
            continue
        sizes = np.array([shift / noise for shift, noise in known])
        units, most = float(sizes.sum()) / sqrt(len(sizes)), float(np.abs(sizes).max())
        changed = changed or abs(units) > CHANGED or most > CHANGED + 1
        mean = expm1(fmean(shift for shift, _ in known))
        lines.append(
            f"{name} {mean:+.1%} of what the terms predict ({units:+.1f} times the noise, of one load up to {most:.1f})"
        )
    return changed, f"The server {'HAS CHANGED' if changed else 'has not changed'}: {', '.join(lines)}."
