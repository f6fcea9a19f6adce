"""`cbsim contrast`: the effect of one field of a sweep, all else equal, by paired replicates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cbsim.draw.report import Report, Table
from cbsim.errors import ScenarioError
from cbsim.metrics.catalogue import Metric
from cbsim.scenario.fields import near
from cbsim.stats import intervals
from cbsim.stats.intervals import Paired
from cbsim.stats.replicated import Configuration, Replicated, shown

HEADER = ("", "reference", "this", "difference", "from", "to", "verdict", "pairs", "needed", "gain")
VERDICTS = {1: "better", -1: "worse", 0: "cannot be told"}
DIRECTIONS = {1: "More is better.", -1: "Less is better.", 0: "Neither more nor less is better."}


class Terms(NamedTuple):
    """The confidence with which all intervals hold at once, and the relative half-width that `needed` aims at."""

    confidence: float
    precision: float


class Compared(NamedTuple):
    """A configuration compared with the one that differs from it in the field alone."""

    metric: Metric
    configuration: Configuration
    difference: Paired


def study(sweep: Replicated, by: str, against: str | None, metrics: Sequence[Metric], terms: Terms) -> Report:
    """Compare all configurations with those whose `by` is `against`, by default the first. Raises ScenarioError."""
    by = sweep.field(by)
    for metric in metrics:
        sweep.check(metric.name)
    reference = _reference(sweep, by, against)
    couples = _couples(sweep, by, reference)
    confidence = intervals.each(terms.confidence, len(couples) * len(metrics))
    compared = [
        Compared(metric, one, difference)
        for metric in metrics
        for one, other in couples
        if (difference := intervals.paired(one.values(metric.name), other.values(metric.name), confidence))
    ]
    fields = [by, *(name for name in sweep.changing if name != by)]
    return Report(
        title=f"{by} against {shown(reference)}",
        question=f"What does {by} change, all else equal?",
        findings=[*_findings(sweep, compared, terms, confidence), *sweep.step_times],
        tables=[
            Table(
                metric.spelled,
                HEADER,
                [_row(each, fields, terms, still=sweep.still) for each in compared if each.metric == metric],
                DIRECTIONS[metric.sign],
            )
            for metric in metrics
        ],
        data={
            "by": by,
            "against": reference,
            "confidence": terms.confidence,
            "confidence_each": confidence,
            "differences": [_facts(each, terms) for each in compared],
        },
    )


def _reference(sweep: Replicated, by: str, against: str | None) -> Any:
    values = {shown(each.settings[by]): each.settings[by] for each in sweep.configurations}
    if against is None:
        return next(iter(values.values()))
    if against not in values:
        bound = f"expected one of {', '.join(values)}"
        hint = near(against, values)
        raise ScenarioError(f"--against {against}: {by} is never that, {bound}{hint}", field=by, bound=bound)
    return values[against]


def _couples(sweep: Replicated, by: str, reference: Any) -> list[tuple[Configuration, Configuration]]:
    """Pair every configuration with the one that differs from it in `by` alone, whose value there is `reference`."""

    def elsewhere(of: Configuration) -> tuple[Any, ...]:
        return tuple(value for name, value in of.settings.items() if name != by)

    references = {elsewhere(each): each for each in sweep.configurations if each.settings[by] == reference}
    compared = [each for each in sweep.configurations if each.settings[by] != reference]
    return [(each, references[elsewhere(each)]) for each in compared if elsewhere(each) in references]


def _row(compared: Compared, fields: Sequence[str], terms: Terms, *, still: bool) -> tuple[str, ...]:
    metric, configuration, difference = compared
    needed = difference.needed(terms.precision, terms.confidence)
    return (
        configuration.label(fields),
        metric.shown(difference.second),
        metric.shown(difference.first),
        *_relative(difference, metric),
        _verdict(metric, difference, still=still),
        str(difference.pairs),
        "-" if needed is None else f"{needed:,}",
        "-" if difference.gain is None else f"{difference.gain:.3g}",
    )


def _verdict(metric: Metric, difference: Paired, *, still: bool) -> str:
    """Return the verdict on a difference; a metric without a better direction gets only more, less or the same."""
    if difference.none:
        return "the same"
    sign = (difference.mean > 0) - (difference.mean < 0) if still else difference.sign
    if still and not sign:
        return "the same"
    if sign and not metric.sign:
        return "more" if sign > 0 else "less"
    return VERDICTS[metric.sign * sign]


def _relative(difference: Paired, metric: Metric) -> list[str]:
    """Return the difference and its interval as shares of the reference, or in the metric's unit if that is 0."""
    whole = abs(difference.second)
    ends = (difference.mean, *((difference.low, difference.high) if difference.known else (None, None)))
    return ["-" if end is None else f"{end / whole:+.2%}" if whole else metric.shown(end) for end in ends]


def _findings(sweep: Replicated, compared: Sequence[Compared], terms: Terms, confidence: float) -> list[str]:
    if sweep.still:
        findings = [f"{intervals.STILL[0].upper()}{intervals.STILL[1:]}."]
    elif any(not each.difference.known for each in compared):
        findings = ["A difference of one pair has no interval: give the sweep more replicates."]
    else:
        width = f"a {terms.confidence:g} interval of ± {terms.precision:.3g} of the reference"
        at_once = f"hold at once with a confidence of {terms.confidence:g} (Bonferroni)"
        findings = [
            f"{len(compared)} intervals of paired differences, each with {confidence:.6g}, {at_once}.",
            f"needed: pairs for {width}; gain: the variance of unpaired differences over that of the pairs.",
        ]
    if sweep.lacking:
        findings.append(f"{sweep.lacking} points of the sweep are not done and left out.")
    return findings


def _facts(compared: Compared, terms: Terms) -> dict[str, Any]:
    difference = compared.difference
    facts = {**difference._asdict(), "needed": difference.needed(terms.precision, terms.confidence)}
    if not difference.known:
        facts |= {"low": None, "high": None}
    return {"metric": compared.metric.name, "settings": compared.configuration.settings, **facts}
