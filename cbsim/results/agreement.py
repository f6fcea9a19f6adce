"""Do the files of a run directory say what they must, and agree? Asked by whoever reads one."""

from __future__ import annotations

from cbsim.results import declared, invariants
from cbsim.results.directory import Run, RunError


def check_documents(run: Run) -> None:
    """Raises RunError if env.json or summary.json lack what is read of them."""
    declared.check(run.path / "env.json", run.environment, declared.ENVIRONMENT)
    declared.check(run.path / "summary.json", run.summary, declared.SUMMARY)


def check_same(run: Run, loop: str, *, whole: bool = True) -> None:
    """Raises RunError if the summary is not that of the scenario, whose loop this is, and of the tables beside it, if
    these are read `whole`.
    """
    beside = (("steps", len(run.steps), "steps.parquet"), ("requests", len(run.requests), "requests.parquet"))
    for key, value, file in (*(beside if whole else ()), ("loop", loop, "scenario.resolved.yaml")):
        if run.summary[key] != value:
            raise RunError(f"{run.path / 'summary.json'}: {key} is {run.summary[key]}, that of {file} is {value}")


def check_possible(run: Run) -> None:
    """Raises RunError if no server can have run these steps, on whatever clock."""
    try:
        invariants.check_read(run.steps, int(run.summary["total_blocks"]))
    except AssertionError as error:
        raise RunError(f"{run.path / 'steps.parquet'}: {error}") from None
