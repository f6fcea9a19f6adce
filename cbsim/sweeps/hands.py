"""Who makes the runs of a call from Python."""

from __future__ import annotations

from cbsim.scenario.fields import ScenarioError, shown
from cbsim.sweeps.executor import Executor, Here
from cbsim.sweeps.processes import Processes
from cbsim.sweeps.ray_cluster import RayCluster

MOST_JOBS = 1024


def hands(jobs: int, ray: str | None = None) -> Executor:
    """One is this process, several are others; `ray` is a cluster's address. Raises ScenarioError, RunError."""
    if isinstance(jobs, bool) or not isinstance(jobs, int) or not 1 <= jobs <= MOST_JOBS:
        bound = f"expected a whole number from 1 to {MOST_JOBS}"
        raise ScenarioError(f"jobs: got {shown(jobs)}, {bound}", field="jobs", value=jobs, bound=bound)
    if ray is not None:
        return RayCluster(ray)
    return Processes(jobs) if jobs > 1 else Here()
