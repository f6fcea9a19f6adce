"""Terms of recorded servers fitted to a part of what their clients saw, the rest predicted.

    python -m reports.own_requests DATA/public_measured/llm-d_requests
    python -m reports.own_requests DATA/measured_vllm

llm-d's two A100 servers are fitted to five of their runs (docs/data.md). Their prefixes are those of the report
`request_logs`, their terms start at the engine's defaults; a run is drawn DRAWS times, as it is random which server a
connection leads to. Half an hour on one core. Each of the three recorded vLLM runs is fitted to the requests that had
ended after FIRST_S seconds, and all others are predicted; with the layer profiles of the card, and with its data sheet.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from cbsim.draw import report as reports
from cbsim.draw.chart import Chart
from cbsim.draw.report import Report, Table
from cbsim.measured.own import fit as fits
from cbsim.measured.own.clients import Measured
from cbsim.measured.own.fit import Largest, Played
from cbsim.measured.own.least_squares import Prior
from cbsim.measured.own.measurement import Load, load_of
from cbsim.measured.own.study import chart, errors, fit_tables
from cbsim.measured.recorded import case, score
from cbsim.record.tables import Floats
from cbsim.scenario.terms import FRONT
from reports.fidelity.request_logs import log, replay

PAIR_OF_A100S = "openshift/exp-2/vllm-70b-2replicas"
FITTED = (("sharegpt", 1.17), ("sharegpt", 2.5), ("sharegpt", 6.0), ("short_input", 2.0), ("short_input", 8.0))
SATURATED = 2.0  # requests a second of sharegpt: above, requests wait
DRAWS = 2
FIRST_S, WINDOW_S = 60.0, 15.0  # of a recorded run: what is fitted, in windows of this length
COSTS: Mapping[str, Mapping[str, Any]] = {
    "layer profiles": {},
    "data sheet": {"cost": {"kind": "roofline", "compute_efficiency": {}, "memory_efficiency": {}}},
}
OUT = Path("reports/fidelity")
KIND = "simulated against recorded runs"
Serve = Callable[[str, Mapping[str, float], int], Floats]
"""A function from the name of a load, terms and the number of a draw to TTFT and E2E, [metric, request]."""


class Replays:
    """Recorded loads as a Predict. Derivatives are of the first of its draws, at the terms that are tried first: times
    are about linear in terms.
    """

    def __init__(self, priors: Mapping[str, Prior], serve: Serve, draws: int = 1) -> None:
        self._priors, self._serve, self._draws = priors, serve, draws
        self._made, self._slopes = dict[tuple[object, ...], Floats](), dict[str, Floats]()

    def _drawn(self, load: str, terms: Mapping[str, float], draw: int) -> Floats:
        key = load, draw, *terms.values()
        if key not in self._made:
            self._made[key] = self._serve(load, terms, draw)
        return self._made[key]

    def _by_term(self, load: Load, terms: Mapping[str, float]) -> Floats:
        first, by_term = fits.means(_timed(load, self._drawn(load.name, terms, 0)))[:2], list[Floats]()
        for name, prior in self._priors.items():
            moved = _timed(load, self._drawn(load.name, {**terms, name: terms[name] + prior.width / 2}, 0))
            by_term.append((fits.means(moved)[:2] - first) / (prior.width / 2))
        return np.array(by_term)

    def __call__(self, load: Load, terms: Mapping[str, float], slopes: bool) -> Played:
        draws = [self._drawn(load.name, terms, number) for number in range(self._draws)]
        if slopes and load.name not in self._slopes:
            self._slopes[load.name] = self._by_term(load, terms)
        by_term = self._slopes[load.name] if slopes else np.zeros((len(self._priors), 2))
        return Played(_timed(load, np.mean(draws, axis=0)), by_term, Largest())


def _timed(load: Load, times: Floats) -> Load:
    return replace(load, ttft_s=times[0], e2e_s=times[1])


def _load(name: str, start_s: Floats, times: Floats, prompts: ArrayLike, outputs: ArrayLike) -> Load:
    columns = (np.asarray(column).tolist() for column in (start_s, *times, prompts, outputs))
    rows = zip(*columns, strict=True)
    return load_of(name, None, [Measured("", 0, s, ttft, float("nan"), e2e, *n) for s, ttft, e2e, *n in rows])


def _shown(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# -- llm-d ------------------------------------------------------------------------------------------------------------


def pair_of_a100s(folder: Path) -> Report:
    """Fit the pair of A100 servers to five of its runs, and predict all others."""
    starts, built = log.starts(folder), replay.BUILT[PAIR_OF_A100S].model_copy(update={"terms": {}})
    runs = [each for each in log.read(folder) if each.key.run == PAIR_OF_A100S]
    logs = {f"{each.key.scenario} {each.key.qps:g}": each for each in runs}
    priors = fits.priors(built.scenario(folder, runs[0].key, []))

    def serve(name: str, terms: Mapping[str, float], draw: int) -> Floats:
        of, front = logs[name], terms[FRONT]
        _shown(f"  {name}")
        changed = [f"cost.{name}={value!r}" for name, value in terms.items() if name != FRONT]
        made, requests = built.scenario(folder, of.key, changed), log.specs(of, starts, front)
        served = replay.serve(made, requests, built.servers(of.key), front, draw).served
        first, last = (part + of.launch_s[0] + front for part in (served.first_token_s, served.last_token_s))
        return np.array([first, last]) - of.launch_s

    loads = [
        _load(name, of.launch_s, np.array([of.ttft_s, of.ttft_s + of.generation_s]), *lengths)
        for name, of in logs.items()
        for lengths in [(of.prompt_tokens, of.output_tokens)]
    ]
    fitted = {f"{scenario} {qps:g}" for scenario, qps in FITTED}
    made = fits.fit(loads, priors, Replays(priors, serve, DRAWS), {*logs} - fitted, _shown)
    keys = {name: of.key for name, of in logs.items()}
    calm = [
        each
        for each in made.unseen
        if keys[each.load.name].scenario == "short_input" or keys[each.load.name].qps <= SATURATED
    ]
    findings = [
        f"{len(FITTED)} runs fitted, {len(made.unseen)} not: {errors(made.unseen)}.",
        f"{len(calm)} of these below saturation: {errors(calm)}.",
        f"Not determined: {', '.join(made.undetermined) or 'none'}. Residuals {made.scale:.1f} times the noise.",
    ]
    title, question = "Two A100 servers, fitted to five runs", "How near are predictions of runs that were not fitted?"
    terms = {name: of.model_dump() for name, of in made.terms.items()}
    data = {"terms": terms, "errors": _errors(made.unseen), "errors_below_saturation": _errors(calm)}
    return Report(title, question, findings, fit_tables(made), [chart(made)], data=data, kind=KIND)


# -- recorded vLLM runs -----------------------------------------------------------------------------------------------


def first_minute(pack: Path) -> Report:
    """Fit each recorded run to the requests that ended within FIRST_S, and predict all others."""
    findings, tables, charts, runs = list[str](), list[Table](), list[Chart](), dict[str, Any]()
    for folder in sorted((pack / "cases").iterdir()):
        recorded = case.read(folder)
        for name, changes in COSTS.items():
            if recorded.ranks > 1 and "cost" in changes:
                continue  # servers that share experts have no roofline
            made, before = of_run(recorded, changes)
            title = f"{recorded.name}, {name}"
            first, rest = (sum(len(each.load) for each in part) for part in (made.fitted, made.unseen))
            findings.append(
                f"{title}: {first} requests fitted, {rest} predicted: {errors(made.unseen)}; with terms as they were: "
                f"{errors(before)}. Not determined: {', '.join(made.undetermined) or 'none'}."
            )
            tables += [each._replace(title=f"{title}: {each.title.lower()}") for each in fit_tables(made)]
            terms = {field: of.model_dump() for field, of in made.terms.items()}
            runs[title] = {"terms": terms, "errors": _errors(made.unseen), "errors_before": _errors(before)}
            charts.append(chart(made)._replace(key=title.replace(", ", "-").replace(" ", "-"), title=title))
            _shown(findings[-1])
    findings.append(
        "Terms of the layer profiles, as they were, were chosen with these runs in sight; those of the data sheet not."
    )
    title, question = "Recorded runs, fitted to their first minute", "How near are predictions of the rest of a run?"
    return Report(title, question, findings, tables, charts, data={"runs": runs}, kind=KIND)


def _errors(compared: Sequence[fits.Compared]) -> dict[str, float]:
    """Return the mean absolute relative errors of means."""
    sizes = np.abs(np.expm1([each.errors for each in compared])).mean(axis=0).round(5).tolist()
    return dict(zip(("ttft", "tpot", "e2e"), sizes, strict=True))


def of_run(of: case.Case, changes: Mapping[str, Any]) -> tuple[fits.Fit, list[fits.Compared]]:
    """Return the fit of a run's windows by the end of their requests, all after FIRST_S one, and how its requests would
    be predicted without.
    """
    base = of.scenario(changes)
    priors = {name: prior for name, prior in fits.priors(base).items() if name != FRONT}  # times are the engine's
    measured = score.recorded(of)
    server = fits.Simulated(base, priors)
    window = np.minimum(measured.last_token_s, FIRST_S) // WINDOW_S
    at = {_window(number): np.flatnonzero(window == number) for number in np.unique(window).astype(int).tolist()}
    known = dict[tuple[float, ...], score.Served]()

    def serve(name: str, terms: Mapping[str, float], _: int) -> Floats:
        key = (*terms.values(),)
        if key not in known:
            known[key] = score.replay(of, server.server(terms)).served
        return _times(known[key])[:, at[name]]

    lengths = [np.array([getattr(row, name) for row in of.arrivals]) for name in ("prompt_tokens", "output_tokens")]
    loads = [
        _load(name, measured.queued_s[part], _times(measured)[:, part], *(each[part] for each in lengths))
        for name, part in at.items()
    ]
    predict, rest = Replays(priors, serve), {_window(int(FIRST_S // WINDOW_S))}
    made = fits.fit(loads, priors, predict, rest, _shown)
    usual = {name: prior.value for name, prior in priors.items()}
    return made, [fits.compare(load, predict, usual, slopes=False) for load in loads if load.name in rest]


def _window(number: int) -> str:
    begin = number * WINDOW_S
    return f"after {begin:.0f} s" if begin >= FIRST_S else f"{begin:.0f} to {begin + WINDOW_S:.0f} s"


def _times(of: score.Served) -> Floats:
    return np.array([of.ttft_s, of.e2e_s])


STUDIES = {"llm-d_requests": ("llm-d-fitted", pair_of_a100s), "measured_vllm": ("own-first-minute", first_minute)}


def main(folder: Path) -> None:
    name, study = STUDIES[folder.name]
    made = replace(study(folder), command=f"python -m reports.own_requests DATA/{folder.name}")
    shutil.rmtree(OUT / name, ignore_errors=True)
    reports.write(made, OUT / name)
    print("\n".join(made.findings))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
