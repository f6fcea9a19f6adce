"""Does a workload fit the memory of this machine? Asked before it is taken; of a file's rows, while they are read."""

from __future__ import annotations

from pathlib import Path

from cbsim.scenario.fields import ScenarioError

REQUEST_BYTES = 1300
"""Of a request in a run: what was asked, its progress, its rows of the tables; about that."""
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def check(requests: int, samples: int = 1) -> None:
    """Raises ScenarioError if so many requests of so many samples need more memory than is free."""
    each, free = samples * REQUEST_BYTES, free_bytes()
    needed = requests * each
    if free is not None and needed > free:
        bound = f"must be <= {free // each:,}: {free / 1e9:.1f} GB of memory are free"
        sampled = f" of {samples:,} samples" if samples > 1 else ""
        message = f"workload.requests: got {requests:,}{sampled}, about {needed / 1e9:.1f} GB, {bound}"
        raise ScenarioError(message, field="workload.requests", value=requests, bound=bound)


def check_rows(path: Path, rows: int) -> None:
    """Raises ScenarioError if a run of so many requests, those read from a file until now, needs more than is free."""
    needed, free = rows * REQUEST_BYTES, free_bytes()
    if free is not None and needed > free:
        bound = f"must be <= {free // REQUEST_BYTES:,} at {REQUEST_BYTES:,} bytes each: {free / 1e9:.1f} GB are free"
        message = f"{path}: got {rows:,} rows or more, {bound}; workload.limit reads fewer"
        raise ScenarioError(message, file=path, value=rows, bound=bound)


def free_bytes() -> int | None:
    """What this process can still take, the least of what the system says; None where it does not."""
    known = [_available(), _left_in_group()]
    return min((value for value in known if value is not None), default=None)


def _available() -> int | None:
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _left_in_group() -> int | None:
    """Of a container's share."""
    try:
        most, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # none, or `max`
        return None
    return max(most - used, 0)
