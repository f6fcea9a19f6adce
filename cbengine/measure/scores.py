"""How near predictions came, case by case: which bars were missed, and the table of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cbsim.proof.bars import Score

ABSURD = 0.25  # on a CPU whose own speed wanders a makespan off by more is an error of ours


@dataclass(frozen=True, slots=True)
class Scored:
    """A case and how near its runs are."""

    case: str
    scores: Sequence[Score]


def failures(found: Sequence[Scored], *, absurd_only: bool) -> list[tuple[str, Score]]:
    """The bars that were missed; of a CPU under real timing only an absurd makespan."""
    told = [(one.case, score) for one in found for score in one.scores]
    if absurd_only:
        return [
            (case, score) for case, score in told if score.bar.label == "makespan" and not abs(score.error) <= ABSURD
        ]
    return [(case, score) for case, score in told if score.verdict == "missed"]


def table(found: Sequence[Scored]) -> str:
    """The scores as a Markdown table."""
    rows = [
        "| workload | loop | metric | simulated | measured | error | repeats | bar |",
        "|---|---|---|---:|---:|---:|---:|---|",
    ]
    for one in found:
        for score in one.scores:
            apart = "" if score.spread is None else f"{score.spread * 100:.1f} {'pt' if score.bar.points else '%'}"
            cells = (one.case, score.loop, score.bar.label, *score.shown(), apart, score.verdict)
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)
