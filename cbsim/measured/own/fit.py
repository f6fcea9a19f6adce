"""Terms of a user's own server, fitted to what was measured of it.

Errors are logarithms of predicted over measured mean TTFT and TPOT of each load, weighed by the load's own noise: the
spread of measured over predicted means of blocks of its requests, one after the other. Terms come from Gauss-Newton
with priors, as in the project's calibrations (least_squares.py); an efficiency enters as its inverse, in which
times are linear.

At first large errors count in full, and a term that ends FAR widths off its prior refutes it: the prior becomes as wide
as that. Then they count less, in case a load is not as it seems. A term is determined if the
data narrow it to half its prior's width or less. The one that is wide most goes back to its prior, until the rest is
determined, and these are solved again. Intervals of the rest count how uncertain the fixed ones are. They are those of
Student's t, widened where residuals are larger than the noise: of each term, as a cost has them, and joint ones by
Bonferroni's inequality, within which all determined terms lie at once (stats/intervals.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from math import inf, sqrt
from pathlib import PurePath
from typing import NamedTuple

import numpy as np

from cbsim.cost import curves
from cbsim.errors import ScenarioError
from cbsim.machine.repriced import REPRICED, Repriced
from cbsim.machine.simulate import Simulation
from cbsim.measured.own import least_squares
from cbsim.measured.own.least_squares import HUBER, TRUST, WEIGHTS, Evaluate, Prior, solve
from cbsim.measured.own.measurement import Load
from cbsim.policy.request import RequestSpec
from cbsim.record import directory
from cbsim.record.columns import NS
from cbsim.record.record import Record
from cbsim.record.tables import Floats, Ints, token_times
from cbsim.scenario import terms as files
from cbsim.scenario.costs import RooflineSettings, TableSettings, with_terms
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.terms import CPU, EFFICIENCIES, FRONT, Own, Residual, Term, TermsFile, short
from cbsim.stats.intervals import each, t_quantile
from cbsim.workload.requests import Users, Workload

FLOOR = 0.01  # of a load's noise: no model is nearer
BLOCKS = 8  # of a load, from which its noise is known
ALONE = 0.05  # the noise of a load with one request
TIMES = ("ttft_s", "tpot_s", "e2e_s")
HALF = 0.5  # the largest posterior width of a determined term, in widths of its prior
FAR = 3.0  # widths of its prior beyond which a term refutes it
EXACT = 1e-9  # the width of a prior from which its term does not move, in widths of the usual one
LARGE = HUBER / (TRUST * WEIGHTS[1])  # the residual, in units of the noise, from which on it counts less
ROUNDS = 4  # of Gauss-Newton
EVERY = 4  # one of so many loads is left out
SINGLE, JOINT = 0.8, 0.95  # confidence of a term's own interval, and of all joint intervals together


class Largest(NamedTuple):
    """The most of a step's rows, query tokens and context tokens."""

    rows: int = 0
    tokens: int = 0
    context_tokens: int = 0


class Played(NamedTuple):
    """A load as a simulated server serves it: with the times that its client sees, NaN where a request failed. `slopes`
    are how far mean TTFT and TPOT move with terms, or with the costs of other scenarios, [term, metric].
    """

    load: Load
    slopes: Floats
    largest: Largest


def play(scenario: Scenario, load: Load, front_s: float, priced: Sequence[Scenario] = ()) -> Played:
    """Serve a load, each repeat by an idle server, which gets requests `front_s` late. Raises ScenarioError."""
    times, moved, largest = np.full((2, len(load)), np.nan), np.zeros((len(priced), 2)), Largest()
    for number in np.unique(load.repeat[~load.failed]):
        at = np.flatnonzero((load.repeat == number) & ~load.failed)
        start = load.start_s[at] - load.start_s[at].min()
        workload = _workload(start, load.prompt_tokens[at], load.output_tokens[at], load.users, front_s)
        times[:, at], more, most = _served(scenario, workload, priced)
        moved += more * len(at) / (~load.failed).sum()
        largest = Largest(*map(max, largest, most))
    several = int((load.output_tokens[~load.failed] > 1).sum())
    moved[:, 1] *= (~load.failed).sum() / max(several, 1)  # single tokens have no TPOT
    ttft_s, e2e_s = times + front_s
    return Played(replace(load, ttft_s=ttft_s, e2e_s=e2e_s), moved, largest)


def _workload(start_s: Floats, prompts: Ints, outputs: Ints, users: int | None, front_s: float) -> Workload:
    """Return requests that arrive as sent; in a closed loop each user's first does, and others follow its end."""
    arrivals = np.rint((start_s + front_s) * NS).astype(int).tolist()
    rows = enumerate(zip(arrivals, prompts.tolist(), outputs.tolist(), strict=True))
    specs = [RequestSpec(at, str(at), ns, prompt, output, output) for at, (ns, prompt, output) in rows]
    if users is None or users >= len(specs):
        return Workload(specs, len(specs))
    return Workload(specs[:users], len(specs), follow=Users(specs[users:], round(front_s * NS)))


def _served(scenario: Scenario, workload: Workload, priced: Sequence[Scenario]) -> tuple[Floats, Floats, Largest]:
    """Return TTFT and E2E by request, how other costs move mean TTFT and TPOT, and the largest step."""
    loop = scenario.loop.mode
    server = Repriced(scenario, loop, workload, priced) if priced else Simulation(scenario, loop, workload)
    server.run(lambda _: None)
    for record in [server.record] if isinstance(server.record, Record) else server.record.records:
        for spec, reason in getattr(record, "refusals", {}).items():
            raise ScenarioError(f"scheduler, kv_cache: request {spec.id} of the load cannot be served: {reason}")
    table, steps = directory.contents(server.record)
    requests = token_times(table, steps)
    first, last = requests.first_token_ns, requests.last_token_ns
    times = np.array([first - requests.arrival_ns, last - requests.arrival_ns]) / NS
    moved = np.zeros((0, 2))
    if priced:
        by = json.loads(server.files()[REPRICED])
        moved = np.array([by["ttft_s"], by["tpot_s"]]).T
    return times, moved, Largest(*(int(steps[name].max()) for name in Largest._fields))


Ends = dict[str, tuple[float, float]]
Predict = Callable[[Load, Mapping[str, float], bool], Played]
"""A function from a load, terms, and whether slopes in these are wanted, to the load as it would be."""


def priors(scenario: Scenario) -> dict[str, Prior]:
    """Return priors of a cost's terms: its values, with widths of the project's calibrations. Raises ScenarioError."""
    cost = scenario.cost
    if scenario.stages > 1:
        bound = "must be 1: terms are fitted to servers of one stage"
        raise ScenarioError(f"cost.pipeline_parallel: got {scenario.stages}, {bound}")
    if isinstance(cost, RooflineSettings):
        known = _of_roofline(cost, not curves.sources(scenario.hardware))
    elif isinstance(cost, TableSettings):
        usual = {
            **(least_squares.MIXTURE if scenario.model.experts else least_squares.ENGINE),
            "reduce_s": Prior(0, 4e-6, 2e-6),
        }
        without = {FRONT, *(() if scenario.gpus > 1 else ("reduce_s",))}
        fields = [name for name in files.FIELDS if name in usual.keys() - without]
        names = fields if cost.engine else ["step_s", "row_s"]
        known = {name: usual[name]._replace(value=getattr(cost, name)) for name in names}
    else:
        raise ScenarioError(f"cost.kind: got {cost.kind!r}, expected table or roofline, whose terms can be fitted")
    front = cost.calibrated.values.get(FRONT) if cost.calibrated else None
    return known | {
        FRONT: least_squares.COMMON[FRONT] if front is None else least_squares.COMMON[FRONT]._replace(value=front)
    }


def _of_roofline(cost: RooflineSettings, constant: bool) -> dict[str, Prior]:
    """Return the terms of a roofline; efficiencies if they are `constant`, or any is given: down to a third of what was
    assumed, but for that of weights, whose time is one of every step as its overhead is.
    """
    usual = {
        "step_overhead_s": least_squares.COMMON["step_s"],
        "launch_s_per_layer": least_squares.ENGINE["launch_s_per_layer"],
    }
    known = {name: prior._replace(value=getattr(cost, name)) for name, prior in usual.items()}
    if constant or cost.compute_efficiency or cost.memory_efficiency:
        compute, memory = cost.efficiencies
        shares = compute.prefill, compute.decode, memory.weights, memory.kv
        known |= {
            name: Prior(1 / share, (0.4 if "weights" in name else 1) / share, 0.1 / share, 1.0)
            for name, share in zip(EFFICIENCIES, shares, strict=True)
        }
    return known | {CPU: Prior(1.0, 0.5, 0.2, 0.05)}


def natural(terms: Mapping[str, float]) -> dict[str, float]:
    """Return terms as a cost has them: efficiencies, not their inverses."""
    return {name: 1 / value if name in EFFICIENCIES else value for name, value in terms.items()}


@dataclass(frozen=True, slots=True)
class Simulated:
    """A simulated server whose cost has terms, as a Predict. The steps of one run are priced again with each term
    moved: in a run of its own a request may come just in time for a step, or just too late. Only CPU phases take one.
    """

    scenario: Scenario
    priors: Mapping[str, Prior]

    def server(self, terms: Mapping[str, float]) -> Scenario:
        assert isinstance(self.scenario.cost, RooflineSettings | TableSettings)
        return self.scenario.model_copy(update={"cost": with_terms(self.scenario.cost, natural(terms))})

    def __call__(self, load: Load, terms: Mapping[str, float], slopes: bool) -> Played:
        far = {name: prior.step for name, prior in self.priors.items()} if slopes else {}
        moved = {name: self.server({**terms, name: terms[name] + step}) for name, step in far.items()}
        priced = [name for name in moved if name not in (CPU, FRONT)]
        made = play(self.server(terms), load, terms[FRONT], [moved[name] for name in priced])
        changes = {name: change / far[name] for name, change in zip(priced, made.slopes, strict=True)}
        if CPU in moved:
            changes[CPU] = (means(play(moved[CPU], load, terms[FRONT]).load)[:2] - means(made.load)[:2]) / far[CPU]
        by_term = np.array([changes.get(name, (float(name == FRONT), 0.0)) for name in self.priors])
        return made._replace(slopes=by_term)


def _mean(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else np.nan


def means(load: Load) -> Floats:
    """Return mean TTFT, TPOT and E2E over requests that did not fail; NaN without any."""
    return np.array([_mean(getattr(load, name)[~load.failed]) for name in TIMES])


class Compared(NamedTuple):
    """A load's means measured and predicted: TTFT, TPOT, E2E; the relative noise of both; the derivatives of the
    logarithms of mean TTFT and TPOT in the terms, [term, metric]; and the largest step.
    """

    load: Load
    measured: Floats
    predicted: Floats
    noise: Floats
    slopes: Floats
    largest: Largest

    @property
    def errors(self) -> Floats:
        """The logarithms of predicted over measured means; 0 of one that is not known."""
        return np.nan_to_num(np.log(self.predicted / self.measured))


def compare(load: Load, predict: Predict, terms: Mapping[str, float], slopes: bool = True) -> Compared:
    """Predict a load. Its noise is the standard error of measured over predicted means, by blocks of requests, with
    each request sent up to a token's time later: a prediction that meets the steps just as the server did is luck.
    """
    made = predict(load, terms, slopes)
    token_s = float(np.nan_to_num(means(load)[1]))
    late = np.random.default_rng(0).uniform(0, token_s, len(load))
    again = predict(replace(load, start_s=load.start_s + late), terms, False).load
    blocks = np.array_split(np.flatnonzero(~load.failed), BLOCKS)
    noise = []
    for name in TIMES:
        both = [[_mean(getattr(of, name)[block]) for of in (load, again)] for block in blocks if len(block)]
        ratios = [np.log(measured / predicted) for measured, predicted in both if measured > 0 and predicted > 0]
        noise.append(float(np.std(ratios, ddof=1)) / sqrt(len(ratios)) if len(ratios) > 1 else ALONE)
    by_term = np.nan_to_num(made.slopes / means(made.load)[:2])
    return Compared(load, means(load), means(made.load), np.maximum(FLOOR, noise), by_term, made.largest)


class Fit(NamedTuple):
    """Terms fitted to loads: where they are, efficiencies as their inverses; with 80 % intervals, as a cost has them;
    joint intervals of those that are determined; residuals in units of the noise; the other terms; and the loads that
    were fitted and left out beside their predictions.
    """

    at: dict[str, float]
    terms: dict[str, Term]
    joint: Ends
    scale: float
    undetermined: list[str]
    fitted: list[Compared]
    unseen: list[Compared]


def to_predict(loads: Sequence[Load], named: Sequence[str]) -> set[str]:
    """Return the names of loads to leave out: those named, or one of EVERY, as long as what is left reaches as far in
    concurrency, prompts, outputs and tokens in the cache. Raises ScenarioError.
    """
    names = [load.name for load in loads]
    for name in named:
        if name not in names:
            raise ScenarioError(f"--hold-out: got {name!r}, expected a load: {', '.join(names)}", value=name)
    return {*named} if named else {names[at] for at in _redundant(loads)}


def _redundant(loads: Sequence[Load]) -> set[int]:
    """Return the positions of one load of EVERY, spread over all, without which the others reach as far."""
    users, prompts = [_in_flight(load) for load in loads], [load.prompt_tokens.mean() for load in loads]
    outputs = [load.output_tokens.mean() for load in loads]
    tokens = [n * (prompt + output) for n, prompt, output in zip(users, prompts, outputs, strict=True)]
    sizes, count = np.array([users, prompts, outputs, tokens]), len(loads) // EVERY
    spread = [(2 * at + 1) * len(loads) // (2 * count) for at in range(count)]
    left = [*range(len(loads))]
    for at in dict.fromkeys((*spread, *left)):
        rest = [each for each in left if each != at]
        if len(loads) - len(rest) <= count and (np.ptp(sizes[:, rest], axis=1) == np.ptp(sizes, axis=1)).all():
            left = rest
    return {*range(len(loads))} - {*left}


def _in_flight(load: Load) -> float:
    """Return the users of a closed loop, or the requests in flight on average."""
    ends = load.start_s + np.nan_to_num(load.e2e_s)
    parts = [load.repeat == number for number in np.unique(load.repeat)]
    spans = sum(float(ends[part].max() - load.start_s[part].min()) for part in parts)
    return load.users or max(1.0, float(load.e2e_s[~load.failed].sum()) / (spans or 1.0))


def fit(
    loads: Sequence[Load],
    known: Mapping[str, Prior],
    predict: Predict,
    left_out: Collection[str] = (),
    report: Callable[[str], None] = lambda _: None,
) -> Fit:
    """Fit terms to all loads but those left out, and predict all. Raises ScenarioError if no load or term is left."""
    chosen = [load for load in loads if load.name not in left_out]
    if not chosen:
        raise ScenarioError("--hold-out: leaves out all loads, expected some to fit")
    known, fixed, limit, changed = {**known}, list[str](), inf, True
    while changed:
        at = _solved(known, fixed, partial(_evaluated, chosen, predict), limit)
        fitted = [compare(load, predict, at) for load in chosen]
        wider = _wider(known, at)
        known |= wider
        more = [] if wider else _undetermined(_squares(fitted, known), [*known], fixed)
        changed = bool(wider or more) or limit > HUBER
        fixed, limit = fixed + more, inf if wider else HUBER
        if len(fixed) == len(known):
            raise ScenarioError(f"{len(chosen)} loads determine no term of {', '.join(known)}: measure more of them")
        values = ", ".join(f"{name} {value:.3g}" for name, value in natural(at).items())
        report(f"{values}; not determined: {', '.join(fixed) or 'none'}")
    unseen = [compare(load, predict, at, slopes=False) for load in loads if load.name in left_out]
    return Fit(at, *_intervals(fitted, known, at, fixed), fixed, fitted, unseen)


def _solved(known: Mapping[str, Prior], fixed: Sequence[str], evaluate: Evaluate, limit: float) -> dict[str, float]:
    """Return the terms that fit best; those that went back to their priors do not move."""
    exact = {name: known[name]._replace(width=EXACT * known[name].width) for name in fixed}
    return solve({**known, **exact}, evaluate, [0] * ROUNDS, limit).terms | {name: known[name].value for name in fixed}


def _wider(known: Mapping[str, Prior], terms: Mapping[str, float]) -> dict[str, Prior]:
    """Return the priors that their terms refute, as wide as these are off them."""
    off = {name: abs(terms[name] - prior.value) for name, prior in known.items()}
    return {name: known[name]._replace(width=far) for name, far in off.items() if far > FAR * known[name].width}


def _evaluated(loads: Sequence[Load], predict: Predict, terms: Mapping[str, float], _: int) -> tuple[Floats, Floats]:
    """Return errors and slopes in units of the noise, which weigh in `step` as terms off their priors do."""
    made = [compare(load, predict, terms) for load in loads]
    units = TRUST * WEIGHTS[1] / WEIGHTS / np.array([each.noise[:2] for each in made])
    slopes = np.array([each.slopes for each in made]).transpose(1, 0, 2)
    return np.array([each.errors[:2] for each in made]) * units, slopes * units


def _squares(fitted: Sequence[Compared], known: Mapping[str, Prior]) -> Floats:
    """Return the matrix of the normal equations in widths of the priors: data, and priors."""
    widths = np.array([[prior.width] for prior in known.values()])
    matrix = np.hstack([each.slopes / each.noise[:2] for each in fitted]) * widths
    return np.asarray(matrix @ matrix.T + np.eye(len(widths)))


def _undetermined(squares: Floats, names: Sequence[str], fixed: Sequence[str]) -> list[str]:
    """Return further terms to be put back to their priors, the widest one first, until the rest is determined."""
    more = list[str]()
    while left := [at for at, name in enumerate(names) if name not in (*fixed, *more)]:
        widths = np.sqrt(np.diag(np.linalg.inv(squares[np.ix_(left, left)])))
        if widths.max() <= HALF:
            break
        more.append(names[left[int(widths.argmax())]])
    return more


def _intervals(
    fitted: Sequence[Compared], known: Mapping[str, Prior], terms: Mapping[str, float], fixed: Sequence[str]
) -> tuple[dict[str, Term], Ends, float]:
    """Return all terms as a cost has them, with 80 % intervals; the joint intervals of those that are determined; and
    residuals in units of the noise, at least 1, large ones counting less.
    """
    at, squares = np.array([name not in fixed for name in known]), _squares(fitted, known)
    inner = np.linalg.inv(squares[np.ix_(at, at)])
    across = inner @ squares[np.ix_(at, ~at)]
    far = np.abs([of.errors[:2] / of.noise[:2] for of in fitted])
    degrees = max(1, int((far > 0).sum() - at.sum()))
    scale = max(1.0, sqrt(np.where(far < LARGE, far**2, 2 * LARGE * far - LARGE**2).sum() / degrees))
    widths = np.array([prior.width for prior in known.values()])
    widths[at] *= np.sqrt(np.diag(scale**2 * inner + across @ across.T))
    single, together = (t_quantile((1 + level) / 2, degrees) for level in (SINGLE, each(JOINT, int(at.sum()))))

    def ends(name: str, half: float) -> tuple[float, float]:
        both = max(known[name].least, terms[name] - half), terms[name] + half
        low, high = sorted(short(natural({name: end})[name]) for end in both)
        return low, high

    made, joint = dict[str, Term](), Ends()
    for (name, value), width in zip(natural(terms).items(), widths.tolist(), strict=True):
        low, high = ends(name, width * (least_squares.TAIL if name in fixed else single))
        made[name] = Term(value=short(value), low=low, high=high)
        if name not in fixed:
            joint[name] = ends(name, width * together)
    return made, joint, scale


def terms_file(name: str, made: Fit, scenario: Scenario, about: str) -> TermsFile:
    """Return the file of fitted terms that a scenario's `cost.terms` takes."""
    cost, model = scenario.cost, scenario.model
    assert isinstance(cost, RooflineSettings | TableSettings)
    system = PurePath(cost.path).name if isinstance(cost, TableSettings) else scenario.hardware.name
    users = [round(_in_flight(of.load)) for of in made.fitted]
    residuals = [
        Residual(users=round(_in_flight(of.load)), ttft=short(-of.errors[0]), tpot=short(-of.errors[1]))
        for of in made.unseen
    ]
    own = Own(
        requests=sum(int((~of.load.failed).sum()) for of in made.fitted),
        **Largest(*map(max, *(of.largest for of in made.fitted), Largest()))._asdict(),
        open_arrivals=any(of.load.users is None for of in made.fitted),
        residuals=tuple(residuals),
        undetermined=tuple(made.undetermined),
        joint=made.joint,
    )
    return TermsFile(
        name=name,
        about=about,
        kind=cost.kind,
        backend=scenario.scheduler.name.partition("_")[0],
        systems=(system,),
        tables={system: cost.engine} if isinstance(cost, TableSettings) and cost.engine else {},
        weights=(model.weights_dtype or model.dtype,),
        routing=getattr(cost, "routing", "balanced"),
        fastest=getattr(cost, "fastest", True),
        models=(model.name,),
        tensor_parallel=(scenario.gpus,),
        users=(min(users), max(users)),
        own=own,
        calibrated=datetime.now(UTC).date().isoformat(),
        terms=made.terms,
        curves={},
    )
