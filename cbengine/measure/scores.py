"""How near predictions came, case by case: which bars were missed, and the table of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cbsim.metrics.bars import Score

ABSURD = 0.25  # on a CPU whose own speed wanders a makespan off by more is an error of ours


@dataclass(frozen=True, slots=True)
class ScoredCase:
    """A case and how near its runs are."""

    case: str
    scores: Sequence[Score]


def failures(cases: Sequence[ScoredCase], *, absurd_only: bool) -> list[tuple[str, Score]]:
    """The bars that were missed; of a CPU under real timing only an absurd makespan."""
    scores = [(scored.case, score) for scored in cases for score in scored.scores]
    if absurd_only:
        return [
            (case, score) for case, score in scores if score.bar.label == "makespan" and not abs(score.error) <= ABSURD
        ]
    return [(case, score) for case, score in scores if score.verdict == "missed"]


def table(cases: Sequence[ScoredCase]) -> str:
    """The scores as a Markdown table."""
    rows = [
        "| workload | loop | metric | simulated | measured | error | repeats | bar |",
        "|---|---|---|---:|---:|---:|---:|---|",
    ]
    for scored in cases:
        for score in scored.scores:
            apart = "" if score.spread is None else f"{score.spread * 100:.1f} {'pt' if score.bar.points else '%'}"
            cells = (scored.case, score.loop, score.bar.label, *score.shown(), apart, score.verdict)
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)
