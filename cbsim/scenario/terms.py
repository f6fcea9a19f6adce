"""Calibrated terms of a cost model: scenarios/terms/<name>.yaml, made by `python -m reports.calibrate_terms` for
tables, and files of a user's own server, made by `cbsim fit` for tables and rooflines.

A term is named by its field of the scenario's cost, or by the field and its scope: `reduce_s@4` holds for 4 GPUs,
`large_products@h200_sxm` on that card, `layer_s@0.16.0` for that version. `front_s` is no field: it is the time that
client, HTTP and tokenizer add to TTFT.

The uncertainty of a prediction follows from residuals of predictions that were made without the point's own curve.

The interval of a prediction is its value times the exponentials of two order statistics of residuals: those of points
like it, with prompts as long in proportion to outputs, on its card and with about as many users, as far as there are
enough of them. With n residuals the ends are the k-th
smallest and largest, k = floor(0.1 (n + 1)): a new residual of the same distribution falls beyond each with probability
k / (n + 1), 10 % at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import exp, inf, log
from operator import ge
from pathlib import Path
from random import Random
from statistics import NormalDist, fmean
from typing import Annotated, Literal, NamedTuple, Self, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from cbsim.errors import ScenarioError
from cbsim.scenario import catalog, documents
from cbsim.scenario.fields import Frozen, Many, Real, Whole, as_tuple, complaint, near

T = TypeVar("T")
FRONT = "front_s"
FIELDS = (
    *("step_s", "layer_s", "row_s", "reduce_s", "elementwise", "decode_attention", "products", "large_products"),
    *("experts", "launch_s_per_layer", FRONT),
)
EFFICIENCIES = (
    *("compute_efficiency.prefill", "compute_efficiency.decode", "memory_efficiency.weights", "memory_efficiency.kv"),
)
CPU = "cpu.factor"
ROOFLINE = (*EFFICIENCIES, "step_overhead_s", "launch_s_per_layer", CPU, FRONT)
FOLDER = "terms"
Family = Literal["dense", "experts", "windows", "latent", "sparse", "linear", "ranks"]
Ends = Annotated[tuple[Real, Real], BeforeValidator(as_tuple)]


class Term(Frozen):
    """A calibrated number."""

    value: Real  #: By all open curves.
    low: Real  #: Lower end of its 80 % interval: a jackknife of values with one curve left out.
    high: Real  #: Upper end.


class Residual(Frozen):
    """The error of a prediction that was made without the point's curve."""

    users: Whole  #: Concurrent requests.
    ttft: Real  #: Logarithm of measured over predicted TTFT.
    tpot: Real  #: Logarithm of measured over predicted TPOT.


class Curve(Frozen):
    """A set of points that differ in concurrency only, with the terms and residuals of a fit to the other curves."""

    system: str = ""  #: The card.
    server: str = ""  #: The curve by which its server is named: those of the same one are left out with it.
    prompt: Whole  #: Nominal tokens of a prompt.
    output: Whole  #: Nominal tokens of an output.
    terms: dict[str, Real]  #: Terms without this curve.
    residuals: Many[Residual]  #: Of the predictions by them.


class Own(Frozen):
    """What terms of a user's own server were fitted to, and how well they predict what was left out."""

    requests: Whole  #: Requests of the loads that were fitted.
    rows: Whole  #: Requests of the largest step of the simulated loads.
    tokens: Whole  #: Query tokens of the largest step.
    context_tokens: Whole  #: KV tokens read by the step that read most.
    open_arrivals: bool  #: Did some loads arrive whatever the server did?
    residuals: Many[Residual]  #: Of loads that were left out.
    undetermined: Many[str]  #: Terms that the data do not determine; they keep their prior.
    joint: dict[str, Ends]  #: Intervals of the other terms, within which all of them lie at once with 95 %.

    def error(self, metric: str) -> float:
        """Return the mean absolute error of a metric's predictions of loads that were left out, of which there are."""
        return fmean(abs(exp(-getattr(each, metric)) - 1) for each in self.residuals)


class Range(Frozen):
    """The range of the points that terms were calibrated on."""

    backend: str  #: vllm, trtllm or sglang.
    systems: Many[str]  #: Cards, as measurements call them.
    models: Many[str]  #: Models.
    tensor_parallel: Many[Whole]  #: GPUs that shared a layer.
    users: Annotated[tuple[Whole, Whole], BeforeValidator(as_tuple)]  #: Least and most concurrent requests.
    tables: dict[str, str]  #: By card, the engine whose tables they add to, such as vllm_0.18.0.
    weights: Many[str]  #: Types of the layers' matrices.
    routing: str  #: How unevenly tokens were taken to choose experts.
    fastest: bool
    """Do products take what the fastest of the card's engines takes? Else what the engine's own tables say."""
    own: Own | None = None  #: Of a user's own server: what they were fitted to.

    def outside(self, backend: str, system: str, model: str, tensor: int, users: int | None) -> list[str]:
        """Return the differences of a server from the calibrated ones. `users`: None without a closed loop."""
        known = {
            f"engine {backend}": backend == self.backend,
            f"card {system}": system in self.systems,
            f"model {model}": model in self.models,
            f"{tensor} GPUs": tensor in self.tensor_parallel,
            "arrivals that are no closed loop": users is not None or (self.own is not None and self.own.open_arrivals),
            f"{users or 0:,} users": users is None or self.users[0] <= users <= self.users[1],
        }
        return [difference for difference, within in known.items() if not within]


class TermsFile(Range):
    """A file of terms of servers of one engine and one kind of model, with the errors of their predictions."""

    name: str  #: What the file is called.
    about: str  #: Which servers, and where the points come from.
    kind: Literal["table", "roofline"] = "table"  #: The kind of the cost whose terms they are.
    family: Family | None = None
    """Of dense models, mixtures; with windows, latents, sparse ones, states; of ranks in lock-step; null: one's own."""
    calibrated: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]  #: When.
    terms: dict[str, Term]  #: The terms.
    curves: dict[str, Curve]  #: By the hash that measurements give a curve.

    @model_validator(mode="after")
    def _whole(self) -> Self:
        """Check that every term is known and within its interval, and that every curve has the same terms."""
        fields = FIELDS if self.kind == "table" else ROOFLINE
        for name, term in self.terms.items():
            if name.partition("@")[0] not in fields:
                raise complaint(f"got {name}, expected one of {', '.join(fields)}{near(name, fields)}", "terms")
            if not 0 <= term.low <= term.value <= term.high:
                got = f"got {term.low} to {term.high} for {term.value}"
                raise complaint(f"{name}: {got}, which must lie between", "terms")
        for hash_, curve in self.curves.items():
            if curve.terms.keys() != self.terms.keys() or min(curve.terms.values(), default=0.0) < 0:
                raise complaint(f"{hash_}: terms: must be those of the file, each >= 0", "curves")
        return self

    def resolved(self, tensor: int, system: str, version: str, curve: str | None = None) -> dict[str, float]:
        """Return its terms as `resolve` does; for a `curve` that they were calibrated on, those fitted without it."""
        left_out = self.curves.get(curve or "")
        values = left_out.terms if left_out else {name: term.value for name, term in self.terms.items()}
        return resolve(values, tensor, system, version)


def resolve(terms: Mapping[str, T], tensor: int, system: str, version: str) -> dict[str, T]:
    """Return the terms that hold for so many GPUs of a card and a version of the engine, by field; where no term of a
    field does, its last one: that of most GPUs, the newest version.
    """
    fits: dict[str, T] = {}
    last: dict[str, T] = {}
    for name, value in terms.items():
        field, _, of = name.partition("@")
        last[field] = value
        if of in ("", str(tensor), system, version):
            fits[field] = value
    return last | fits


def load(name: str, base: Path | None = None) -> TermsFile:
    """Load the terms of that name, or in the file at that path from the folder `base` or the current one. Raises
    ScenarioError.
    """
    known = catalog.names(FOLDER)
    if name not in known and name.endswith((".yaml", ".yml")):
        return documents.read(catalog.shape(FOLDER, name, base)).checked(TermsFile)
    if name not in known:
        bound = f"one of {', '.join(known) or 'none'}, or the path of a file that cbsim fit wrote"
        raise ScenarioError(f"cost.terms: got {name!r}, expected {bound}", field="cost.terms", value=name, bound=bound)
    document = documents.read(catalog.SCENARIOS / FOLDER / f"{name}.yaml")
    file = document.checked(TermsFile)
    if file.name != name:
        raise ScenarioError(f"{document.file}: name: got {file.name!r}, must be {name!r}, as the file is called")
    return file


@lru_cache(maxsize=1)
def every() -> Sequence[TermsFile]:
    """Return all files of terms that come with the project."""
    return tuple(load(name) for name in catalog.names(FOLDER))


def dump(file: TermsFile) -> str:
    """Return the file as YAML; loading it gives an equal one."""
    return documents.write(file.model_dump(mode="json"))


def short(value: float, digits: int = 5) -> float:
    """Round to so many digits; terms to five, so that the simulated value is the written one."""
    return float(f"{value:.{digits}g}")


TAIL = 0.1  # share beyond each end of an 80 % interval
ENOUGH = 15  # residuals that an interval of like points needs
SERVERS = 5  # and servers, as those of one server are alike
WIDEST = 2.0  # the largest factor between the ends of an interval that says anything


def draws(field: str, value: float, ends: tuple[float, float], count: int, seed: int) -> list[float]:
    """Return `count` draws of a term, one from each of as many parts of its distribution, in an order by seed and
    field. Its median is `value`, and TAIL of it lie beyond each end of its interval: log-normal on each side, or normal
    beside an end of 0; never below a hundredth of the value, and no efficiency above 1.
    """
    parts, unit, most = list(range(count)), NormalDist(), 1.0 if field in EFFICIENCIES else inf
    Random(f"{seed} {field}").shuffle(parts)
    made = []
    for part in parts:
        far = unit.inv_cdf((part + 0.5) / count) / unit.inv_cdf(1 - TAIL)
        end, size = ends[far > 0], abs(far)
        drawn = value * (end / value) ** size if ends[0] > 0 else value + size * (end - value)
        made.append(min(most, max(value / 100, drawn)))
    return made


class Interval(NamedTuple):
    """An interval of the factor of measured over predicted, `low` to `high`, from so many residuals."""

    low: float
    high: float
    residuals: int

    def holds(self, factor: float) -> bool:
        return self.low <= factor <= self.high


class Like(NamedTuple):
    """What makes a server's errors like those of others: lengths, card and users, as far as they are known."""

    prompt: int
    output: int
    system: str = ""
    users: int = 0

    def marks(self, other: Like) -> tuple[bool, bool, bool]:
        """Return whether another server has as long prompts in proportion to outputs, the card, half to twice the
        users.
        """
        alike = _kind(self.prompt, self.output) == _kind(other.prompt, other.output)
        return alike, self.system == other.system, self.users <= 2 * other.users and other.users <= 2 * self.users


MARKS = ((True, True, True), (True, True, False), (True, False, True), (True, False, False), (False,) * 3)
"""Which marks residuals have to share with a point; the first that leaves ENOUGH of them counts."""


def interval(file: TermsFile, metric: str, like: Like | None = None, without: str | None = None) -> Interval | None:
    """Return the 80 % interval of measured over predicted `metric`, ttft or tpot, by the curves of all servers but that
    of the curve `without`, of those points that are like `like` as far as there are enough, of enough servers. None
    with too few residuals, and if it would be wider than WIDEST.
    """
    rest = [
        (like.marks(Like(of.prompt, of.output, of.system, each.users)) if like else (), each, server)
        for server, of, each in _others(file, without)
    ]
    values: list[float] = []
    for wanted in MARKS if like else ((),):
        chosen = [(each, server) for has, each, server in rest if all(map(ge, has, wanted))]
        values = sorted(getattr(each, metric) for each, _ in chosen)
        if len(values) >= ENOUGH and len({server for _, server in chosen}) >= SERVERS:
            break
    rank = int(TAIL * (len(values) + 1))
    if not rank or values[-rank] - values[rank - 1] > log(WIDEST):
        return None
    return Interval(exp(values[rank - 1]), exp(values[-rank]), len(values))


def _others(file: TermsFile, without: str | None) -> list[tuple[str, Curve, Residual]]:
    """Return the residuals of all servers but that of one curve, with their server and curve."""
    left_out = file.curves.get(without or "")
    server = (left_out and left_out.server) or object()
    rest = {hash_: of for hash_, of in file.curves.items() if of is not left_out and of.server != server}
    return [(of.server or hash_, of, each) for hash_, of in rest.items() for each in of.residuals]


def coverage(file: TermsFile, metric: str) -> tuple[int, int]:
    """Return the number of left-out points within the interval that the other curves give, and of all that have one."""
    within = total = 0
    for hash_, curve in file.curves.items():
        for each in curve.residuals:
            like = Like(curve.prompt, curve.output, curve.system, each.users)
            known = interval(file, metric, like, hash_)
            if known is not None:
                total += 1
                within += known.holds(exp(getattr(each, metric)))
    return within, total


def _kind(prompt: int, output: int) -> int:
    """Return -1 if outputs are at least 4 times as long as prompts, 1 if prompts are, else 0."""
    return (prompt >= 4 * output) - (output >= 4 * prompt)
