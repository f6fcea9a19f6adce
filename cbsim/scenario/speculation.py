"""The speculation part of a scenario: who drafts how many tokens, how many of them come true, what a draft costs."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from cbsim.errors import ScenarioError
from cbsim.policy import kind
from cbsim.scenario import catalog, rows
from cbsim.scenario.fields import DataPath, Frozen, Many, Real, Whole, complaint, shown
from cbsim.scenario.shapes import ModelShape, NamedModel

MOST_DRAFTS = 64
CURVES = "public_measured/speculation/golden_acceptance.csv"  # of InferenceX, below the data folder
Pair = Annotated[Many[Whole], Field(min_length=2, max_length=2)]
Share = Annotated[Real, Field(ge=0, le=1)]


def _ascending(entries: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    if any(after[0] <= before[0] for before, after in pairwise(entries)):
        raise complaint("must be ascending in the rows")
    return entries


def _read(curve: Any) -> Any:
    """Return the mean acceptance lengths for 1, 2, ... drafts that were measured, by a curve's name; a list as it is.
    Raises ScenarioError.
    """
    if not isinstance(curve, str):
        if isinstance(curve, list | tuple) and curve:
            return curve
        raise complaint(f"got {shown(curve)}, expected the name of a curve or a list of mean lengths")
    curves: dict[str, list[float]] = {}
    with catalog.data(CURVES, "InferenceX's curves").open(newline="") as file:
        for row in sorted(csv.DictReader(file), key=lambda row: int(row["drafts"])):
            curves.setdefault(f"{row['file']}/{row['thinking']}", []).append(float(row["acceptance_length"]))
    return curves[catalog.known([*curves], curve, "curve")]


Lengths = Annotated[Many[Annotated[Real, Field(ge=1)]], Field(min_length=1)]
Curve = Annotated[Lengths, BeforeValidator(_read, json_schema_input_type=str | Lengths)]


class Acceptance(Frozen):
    """How many drafts of a row the target accepts: one of these. Drawn for each request and position of its output, so
    that schedulers and loops see the same draws.
    """

    rate: Share | None = None  #: A draft behind accepted ones comes true with this probability.
    rates: Annotated[Many[Share], Field(min_length=1)] | None = None
    """Of the first, second, ... draft: that it and all before it come true, not rising; with `conditional`: that it
    does if all before it do. As many as drafts, or fewer: those behind come true never."""
    conditional: bool = False  #: What `rates` are.
    length: Annotated[Real, Field(ge=1)] | None = None
    """Mean tokens of a verification, the target's own included; whole ones in every row, the rest by chance, as vLLM's
    synthetic_acceptance_length."""
    curve: Curve | None = None
    """Such means for 1, 2, ... drafts; or the name of one that InferenceX measured: qwen3.5_mtp/on. Where noise lets it
    fall or rise faster than before, drafts next to each other have equal probabilities; the means hold. Drafts behind
    its end come true never."""
    path: DataPath | None = None
    """A CSV file of `request,accepted`: the request's number in the workload, and how many drafts came true, at most k,
    in the order of its verifications; from the first again if there are more. It has all requests of two tokens or
    more."""

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        stated = [name for name in ("rate", "rates", "length", "curve", "path") if getattr(self, name) is not None]
        if len(stated) != 1:
            raise complaint(f"got {' and '.join(stated) or 'none'}, expected one of rate, rates, length, curve, path")
        if self.conditional and self.rates is None:
            raise complaint("got true, must be false without rates", "conditional")
        for drafts, length in enumerate(self.curve or (), 1):
            if length > drafts + 1:
                raise complaint(f"got {length:g}, must be <= {drafts + 1}: {drafts} drafts", f"curve.{drafts - 1}")
        if self.rates and not self.conditional and any(b > a for a, b in pairwise(self.rates)):
            raise complaint("must not rise: each is the probability that all drafts up to there come true", "rates")
        return self

    def recorded(self, drafts: int, outputs: Sequence[int] | None = None) -> dict[int, list[int]] | None:
        """Return the numbers of the file, by request; None without one. A verification has at most `drafts`; `outputs`
        are the output tokens of each request, if they are known. Raises ScenarioError.
        """
        if self.path is None:
            return None
        numbers: dict[int, list[int]] = {}
        path = catalog.data(self.path, "speculation.acceptance.path")
        with rows.open_text(path) as file:
            table = rows.CsvTable(path, file, ("request", "accepted"))
            for cells in table.rows(None):
                request, accepted = (table.count(at, cell, 0) for at, cell in enumerate(cells))
                if outputs is not None and request >= len(outputs):
                    raise table.bad(0, request, f"a request's number, from 0 to {len(outputs) - 1:,}")
                if accepted > drafts:
                    raise table.bad(1, accepted, f"at most {drafts} drafts (speculation.k)")
                numbers.setdefault(request, []).append(accepted)
        missing = [at for at, tokens in enumerate(outputs or ()) if tokens > 1 and at not in numbers]
        if missing:
            more = f" and {len(missing) - 1:,} others" if missing[1:] else ""
            bound = f"has no row of request {missing[0]}{more}, expected one of each of 2 tokens or more"
            raise ScenarioError(f"{path}: request: {bound}", file=path, field="request", bound=bound)
        return numbers

    def conditional_rates(self, drafts: int) -> list[float]:
        """Return the probability of each of so many drafts to come true behind accepted ones. Raises ScenarioError."""
        if self.rate is not None:
            return [self.rate] * drafts
        if self.rates is not None and self.conditional:
            return [*self.rates, *[0.0] * (drafts - len(self.rates))]
        survival = [*(self.rates or self._survival(drafts)), *[0.0] * drafts][:drafts]
        return [b / a if a else 0.0 for a, b in zip([1.0, *survival], survival, strict=False)]

    def _survival(self, drafts: int) -> list[float]:
        """Return the probability that all drafts up to each one come true."""
        if self.length is not None:
            return [min(1.0, max(0.0, self.length - 1 - at)) for at in range(drafts)]
        steps: list[tuple[float, int]] = []  # (sum, number), pooled until they fall, none < 0
        for before, after in pairwise([1.0, *(self.curve or ())[:drafts]]):
            total, count = after - before, 1
            while steps and (total < 0 or steps[-1][0] * count < total * steps[-1][1]):
                total, count = total + steps[-1][0], count + steps.pop()[1]
            steps.append((total, count))
        return [max(total / count, 0.0) for total, count in steps for _ in range(count)]


class Drafter(Frozen):
    """Who drafts, and the time that it takes."""

    model: NamedModel | None = None  #: Shape of a draft model; for eagle, of the head. Null: a layer of the target's.
    fraction: Share | None = None
    """Kernels of one draft, as a share of the target's step of as many rows. Null: by shape; where the cost follows
    from no shape (constant, fitted, vLLM layer profiles) its share of the target's weights."""


class Speculation(Frozen):
    """Drafts that a step verifies beside the tokens that are due."""

    method: kind.Method  #: Who drafts: prompt lookup, a head on the target's states (EAGLE, MTP), or a model.
    k: Annotated[Whole, Field(ge=1, le=MOST_DRAFTS)]  #: Drafts of a row.
    by_rows: Annotated[Many[Pair], AfterValidator(_ascending)] = ()
    """Pairs of most rows of a step and drafts of each, in place of k; the last one also for more rows."""
    adaptive: bool = False
    """Verify only as many of a step's drafts as give most tokens a second, by the declared rates and a profile of the
    cost: vLLM's rule for DSpark, on its main branch."""
    acceptance: Acceptance  #: How many come true.
    drafter: Drafter = Drafter.model_construct()  #: What a draft costs.

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        for at, (most, drafts) in enumerate(self.by_rows):
            if most < 1:
                raise complaint(f"got {most} rows, must be >= 1", f"by_rows.{at}.0")
            if not 0 <= drafts <= self.k:
                raise complaint(f"got {drafts} drafts, must be 0 to k ({self.k})", f"by_rows.{at}.1")
        accepts = self.acceptance
        if accepts.rates and len(accepts.rates) > self.k:
            raise complaint(f"got {len(accepts.rates)} rates, must be <= k ({self.k})", "acceptance.rates")
        if accepts.length is not None and accepts.length > self.k + 1:
            raise complaint(f"got {accepts.length:g}, must be <= k + 1 ({self.k + 1})", "acceptance.length")
        return self

    @model_validator(mode="after")
    def _method_has_its_parts(self) -> Self:
        if self.method == "draft_model" and self.drafter == Drafter():
            raise complaint("needs model or fraction with method draft_model", "drafter")
        recorded = self.acceptance.path is not None
        if self.adaptive and (self.method == "ngram" or recorded):
            what = "acceptance.path, whose rates are not known" if recorded else "method ngram"
            raise complaint(f"got true, must be false with {what}", "adaptive")
        if self.method == "ngram" and self.drafter != Drafter():
            raise complaint("must be left out with method ngram, which has no model", "drafter")
        return self

    def drafts_with(self, target: ModelShape, *, stored: bool = False) -> ModelShape | None:
        """Return the shape of the model that drafts for `target`; None for prompt lookup. Without one of its own it is
        a layer of the target's that sees everything, with experts if there are some, and the target's embedding and
        output head, which are not `stored` again.
        """
        if self.method != "eagle" or self.drafter.model:
            return self.drafter.model
        layer = {"layers": 1, "attention": ("full",), "linear": None, "feed_forward": (), "first_dense": 0}
        layer |= {"vocab": 1} if stored else {}
        return target.model_copy(update={"name": f"a layer of {target.name}", **layer})

    @property
    def rule(self) -> kind.Speculation:
        """What a scheduler knows of it."""
        by_rows = tuple([(most, drafts) for most, drafts in self.by_rows])
        return kind.Speculation(self.method, self.k, by_rows)


def row_tokens(speculation: Speculation | None) -> int:
    """Return the query tokens of a decoding row with all its drafts."""
    return 1 + (speculation.k if speculation else 0)
