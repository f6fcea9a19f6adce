"""Orca: iteration-level batching, whole prompts beside those who decode, the longest sequence reserved for each.

Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models" (OSDI 2022), as Sarathi-Serve's
baseline has it. Nobody grows, so nobody is preempted.
"""

from __future__ import annotations

from typing import Final

from cbsim.policy.kind import SchedulerKind
from cbsim.policy.schedulers.sarathi_serve import SarathiServe, Step
from cbsim.policy.schedulers.sarathi_settings import OrcaOptions, OrcaSettings, reasons, resolve_orca, widened


class Orca:
    """Who runs decodes, and whoever fits is let in."""

    grows: Final = False

    def choose(self, serve: SarathiServe, step: Step) -> None:
        serve.decode(step)
        while request := serve.head(step):
            serve.admit(request, serve.left(request), step)


def make(options: OrcaOptions) -> SarathiServe:
    return SarathiServe(options, Orca())


ORCA = SchedulerKind(
    name="orca",
    about="Orca (Sarathi-Serve's): iteration-level batching, the longest sequence reserved for each",
    settings=OrcaSettings,
    resolve=resolve_orca,
    make=make,
    widened=widened,
    reasons=reasons,
)
