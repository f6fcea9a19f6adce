"""Write the files of `scenarios/terms`: what kernel tables leave out, calibrated on published measurements.

    python -m reports.calibrate_terms [NAME ...] [--data DIR] [--jobs N] [--out DIR]

calibrations.yaml states each file's points and priors. Terms are solved for by least squares with these priors
(cbsim/measured/own/least_squares.py); a run gives the derivatives, as its steps are priced again with each term moved.
A curve is predicted with terms calibrated without it and without all curves of the same server (of other days, or of
another source): the derivatives at the solution make that a linear problem, and the prediction is simulated again with
its answer. All files take hours of CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from cbsim.cli.arguments import Parser, option, run_verb, verb
from cbsim.cli.many_runs import jobs
from cbsim.cli.measured import data_argument
from cbsim.draw import folder
from cbsim.errors import OK, Interrupted, ScenarioError
from cbsim.machine.repriced import REPRICED
from cbsim.measured.own.least_squares import ENGINE, MIXTURE, TAIL, Prior, Solution, solve, step
from cbsim.measured.points import flags, published
from cbsim.measured.points.build import REQUESTS_A_USER, ROUTING, CannotBuildError, build, engine_of, model_of
from cbsim.measured.points.published import Point
from cbsim.measured.points.score import means_of
from cbsim.record.tables import Floats
from cbsim.scenario import documents
from cbsim.scenario import terms as files
from cbsim.scenario.fields import Frozen, Many, Real, Whole
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.terms import FRONT, Curve, Family, Residual, Term, TermsFile, resolve, short
from cbsim.sweeps import identity
from cbsim.sweeps.store import SUMMARY
from cbsim.sweeps.work import Executor, Processes, Task

PROGRAM = "reports.calibrate_terms"
ROUNDS = (5, REQUESTS_A_USER, REQUESTS_A_USER)  # requests a user in the runs of each round
LATE = {**MIXTURE, "launch_s_per_layer": Prior(1e-3, 1e-3, 1e-4), FRONT: Prior(0.1, 0.08, 0.01)}
"""Of mixtures of experts whose servers answer late: what is in front of the engine differs by card."""
USUAL = {"engine": ENGINE, "mixture": MIXTURE, "windows": {**MIXTURE, "layer_s": ENGINE["layer_s"]}, "late": LATE}


class Calibration(Frozen):
    """A choice of points of InferenceX, and the priors of the terms that are calibrated on them: `usual` ones, those of
    a field in `scopes` for each of its cards or versions, those of all-reduces among so many `gpus`, and `more`.
    """

    name: str
    about: str
    backend: str
    systems: Many[str]
    family: Family
    usual: Literal["engine", "mixture", "windows", "late"] | None = None
    scopes: dict[str, Many[str]] = Field(default_factory=dict)
    gpus: Many[Whole] = ()
    more: dict[str, Many[Real]] = Field(default_factory=dict)
    fastest: bool = True
    """Whether matrix products take the time of the card's fastest engine where the engine's own tables hold more than
    the kernel: TensorRT-LLM's, and those of block-quantised weights.
    """

    @property
    def priors(self) -> dict[str, Prior]:
        usual = USUAL[self.usual] if self.usual else {}
        priors = {name: prior for name, prior in usual.items() if name not in self.scopes}
        priors |= {f"{field}@{scope}": usual[field] for field, each in self.scopes.items() for scope in each}
        priors |= {f"reduce_s@{each}": Prior((1 + np.log2(each)) * 1e-6, 4e-6, 2e-6) for each in self.gpus}
        return priors | {name: Prior(*values) for name, values in self.more.items()}

    def points(self, points: Sequence[Point]) -> list[Point]:
        """Return the points of InferenceX that this calibration uses, of servers whose flags are known."""
        return [each for each in points if each.system in self.systems and self._uses(each)]

    def _uses(self, point: Point) -> bool:
        if point.backend != self.backend or not point.inferencex:
            return False
        try:
            model = model_of(point)
        except CannotBuildError:
            return False
        return flags.family(model, point.ranks) == self.family and not flags.doubts(point, flags.family(model))


class _File(Frozen):
    calibrations: Many[Calibration]


@cache
def calibrations() -> dict[str, Calibration]:
    """Return the project's calibrations by name, in order: calibrations.yaml."""
    file = documents.read(Path(__file__).with_name("calibrations.yaml")).checked(_File)
    return {each.name: each for each in file.calibrations}


def left_out(solution: Solution, priors: Mapping[str, Prior], curves: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return for each curve the terms calibrated on the points of all other curves."""
    names = np.array(curves)
    return {
        curve: step(solution.at, priors, solution.errors[names != curve], solution.slopes[:, names != curve])
        for curve in dict.fromkeys(curves)
    }


def servers(points: Sequence[Point]) -> list[str]:
    """Return for each point the server that it was measured on, by the first of its curves: measurements of other days
    or in another source are curves of their own, and models of one shape have several names.
    """
    first: dict[Any, str] = {}
    names = []
    for point in points:
        shape = model_of(point).model_copy(update={"name": ""}).model_dump_json()
        key = point.system, point.backend, shape, point.all_gpus, point.prompt, point.output
        names.append(first.setdefault(key, point.curve))
    return names


def calibrate(
    calibration: Calibration,
    points: Sequence[Point],
    executor: Executor,
    report: Callable[[str], None] = lambda _: None,
) -> TermsFile:
    """Calibrate terms on those points of a calibration that can be built, with intervals from leaving out each server.
    Raises ScenarioError.
    """
    used = list[Point]()
    for point in calibration.points(points):
        with suppress(CannotBuildError):
            build(point, {})
            used.append(point)
    named = servers(used)
    if len(set(named)) < 2:
        points_of = f"{calibration.name}: {len(used)} points of {calibration.about}"
        raise ScenarioError(f"{points_of} can be built: too few to calibrate on")

    def evaluate(terms: Mapping[str, float], requests: int) -> tuple[Floats, Floats]:
        errors, slopes = _evaluate(calibration, used, [terms] * len(used), executor, requests)
        ttft, tpot = np.abs(np.expm1(errors)).mean(axis=0)
        values = ", ".join(f"{name} {value:.3g}" for name, value in terms.items())
        report(f"{requests} requests a user: TTFT {ttft:.1%}, TPOT {tpot:.2%}: {values}")
        return errors, slopes

    solution = solve(calibration.priors, evaluate, ROUNDS)
    without = left_out(solution, calibration.priors, named)
    own_terms = [without[server] for server in named]
    errors, _ = _evaluate(calibration, used, own_terms, executor, REQUESTS_A_USER, slopes=False)
    ttft, tpot = np.abs(np.expm1(errors)).mean(axis=0)
    report(f"{len(used)} points of {len(without)} servers, each left out: TTFT {ttft:.1%}, TPOT {tpot:.2%}")
    return TermsFile(
        name=calibration.name,
        about=calibration.about,
        backend=calibration.backend,
        systems=tuple(system for system in calibration.systems if any(each.system == system for each in used)),
        family=calibration.family,
        tables={point.system: engine_of(point) for point in used},
        weights=tuple(sorted({str(model.weights_dtype or model.experts_dtype) for model in map(model_of, used)})),
        routing=ROUTING,
        fastest=calibration.fastest,
        models=tuple(sorted({each.model_name for each in used})),
        tensor_parallel=tuple(sorted({each.gpus for each in used})),
        users=(min(each.concurrency for each in used), max(each.concurrency for each in used)),
        calibrated=datetime.now(UTC).date().isoformat(),
        terms=_terms(solution, without),
        curves=_curves(used, named, without, errors),
    )


def _evaluate(
    calibration: Calibration,
    points: Sequence[Point],
    terms: Sequence[Mapping[str, float]],
    executor: Executor,
    requests: int,
    *,
    slopes: bool = True,
) -> tuple[Floats, Floats]:
    """Return logarithms of predicted over measured TTFT and TPOT, [point, metric], and their derivatives; each point
    has its own terms.
    """
    runs = [_perturbed(calibration, point, of, requests, slopes) for point, of in zip(points, terms, strict=True)]
    tasks = [
        Task(identity.key(run.scenario), run.scenario, "summary", others=(*run.perturbed.values(),)) for run in runs
    ]
    files = dict[str, Mapping[str, bytes]]()
    for made in executor.each({task.key: task for task in tasks}.values()):
        if made.reason:
            raise ScenarioError(made.reason)
        files[made.key] = made.files
    measured = np.array([[point.ttft_ms, point.tpot_ms] for point in points])
    outcomes = [means_of(json.loads(files[task.key][SUMMARY])) for task in tasks]
    for point, outcome in zip(points, outcomes, strict=True):
        if isinstance(outcome, str):
            raise ScenarioError(f"{point.where}: {outcome}")
    means = np.array(outcomes)
    means[:, 0] += 1e3 * np.array([run.waits_s for run in runs])
    steps = np.array([prior.step for prior in calibration.priors.values()])
    by_point = [run.slopes(steps, files[task.key]) for run, task in zip(runs, tasks, strict=True)]
    return np.log(means / measured), np.stack(by_point, axis=1) / means


class Perturbed(NamedTuple):
    """A point's scenario, and those with one term a step further, by the term's index among the priors."""

    scenario: Scenario
    waits_s: float  # before the engine has a request
    front_s: Mapping[int, float]  # derivatives of that
    perturbed: Mapping[int, Scenario]

    def slopes(self, steps: Floats, files: Mapping[str, bytes]) -> Floats:
        """Return derivatives of mean TTFT and TPOT in milliseconds, [term, metric]; 0 in a term that is not known."""
        slopes, terms = np.zeros((len(steps), 2)), [*self.perturbed]
        if terms:
            priced = json.loads(files[REPRICED])
            slopes[terms] = 1e3 * np.array([priced["ttft_s"], priced["tpot_s"]]).T / steps[terms, None]
        for term, front in self.front_s.items():
            slopes[term, 0] += 1e3 * front
        return slopes


def _perturbed(
    calibration: Calibration, point: Point, terms: Mapping[str, float], requests: int, slopes: bool
) -> Perturbed:
    values = resolve(terms, point.gpus, point.system, point.version)
    waits = values.pop(FRONT, 0.0)
    scenario = build(point, {"fastest": calibration.fastest, **values}, requests)
    perturbed, front_s = dict[int, Scenario](), dict[int, float]()
    for at, (name, prior) in enumerate(calibration.priors.items() if slopes else ()):
        further = resolve({**terms, name: terms[name] + prior.step}, point.gpus, point.system, point.version)
        front_s[at] = (further.pop(FRONT, 0.0) - waits) / prior.step
        if changed := {field: value for field, value in further.items() if value != values[field]}:
            perturbed[at] = scenario.model_copy(update={"cost": scenario.cost.model_copy(update=changed)})
    return Perturbed(scenario, waits, front_s, perturbed)


def _terms(solution: Solution, curves: Mapping[str, Mapping[str, float]]) -> dict[str, Term]:
    """Return terms with jackknife intervals: the variance is (n - 1)/n times the sum of squares about the mean."""
    terms = {}
    for name, value in solution.terms.items():
        values = np.array([each[name] for each in curves.values()])
        spread = TAIL * float(np.sqrt((len(values) - 1) * values.var()))
        low, high = max(0.0, value - spread), value + spread
        terms[name] = Term(value=short(value), low=short(low), high=short(high))
    return terms


def _curves(
    points: Sequence[Point], named: Sequence[str], without: Mapping[str, Mapping[str, float]], errors: Floats
) -> dict[str, Curve]:
    first, residuals = dict[str, tuple[Point, str]](), defaultdict[str, list[Residual]](list)
    for point, server, (ttft, tpot) in zip(points, named, (-errors).tolist(), strict=True):
        first.setdefault(point.curve, (point, server))
        residuals[point.curve].append(Residual(users=point.concurrency, ttft=round(ttft, 4), tpot=round(tpot, 4)))
    return {
        curve: Curve(
            system=point.system,
            server=server,
            prompt=point.prompt,
            output=point.output,
            terms={name: short(value) for name, value in without[server].items()},
            residuals=tuple(residuals[curve]),
        )
        for curve, (point, server) in first.items()
    }


@verb("calibrate-terms", "calibrate the terms that kernel tables leave out on published measurements", "vllm-dense")
def terms_arguments(parser: argparse.ArgumentParser) -> None:
    about = f"of {', '.join(calibrations())} (all)"
    parser.add_argument("calibrations", nargs="*", type=_calibration, metavar="NAME", help=about)
    data_argument(parser)
    parser.add_argument("--jobs", type=jobs, metavar="N", help="processes (as many as there are cores)")
    option(parser, "--out", default=Path("scenarios/terms"), help="folder (scenarios/terms)")


def _calibration(name: str) -> Calibration:
    if name not in calibrations():
        raise argparse.ArgumentTypeError(f"invalid choice: {name!r} (choose from {', '.join(calibrations())})")
    return calibrations()[name]


def calibrate_terms(arguments: argparse.Namespace) -> int:
    """Calibrate terms on the open points, and write them to the folder in which scenarios look for them."""
    points = published.read(published.folder(arguments.data))
    folder.write(arguments.out, {})  # before the work, not after it
    for calibration in arguments.calibrations or calibrations().values():
        name = calibration.name
        print(f"{name}:", file=sys.stderr)
        try:
            with closing(Processes(arguments.jobs or os.cpu_count() or 1)) as workers:
                made = calibrate(calibration, points, workers, lambda line: print(f"  {line}", file=sys.stderr))
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; {name} is not written, and begins again") from None
        folder.write(arguments.out, {f"{name}.yaml": files.dump(made).encode()})
        print(arguments.out / f"{name}.yaml")
    return OK


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. A user's own mistake is one message on stderr, never a traceback."""
    program = f"python -m {PROGRAM}"
    about = terms_arguments.about
    parser = Parser(prog=program, description=about, example=f"{program} {terms_arguments.example}")
    terms_arguments.arguments(parser)
    parser.set_defaults(command=terms_arguments.name, refuse=parser.error)
    return run_verb(PROGRAM, parser, [terms_arguments], argv)


if __name__ == "__main__":
    sys.exit(main())
