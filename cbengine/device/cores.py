"""Did driver and worker have a core each? Where they did not, what a loop gains by overlap cannot be seen."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

PROC = Path("/proc")
SHARED = 0.05  # of the time that a process wants a core, from which on it counts as not having one


class Demand(NamedTuple):
    """Nanoseconds that a process has computed, and has waited for a core that something else had."""

    computed: int
    waited: int


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Waits:
    """From now on, how much of the time that each process wants a core it waits for one. `processes`: name to pid."""

    def __init__(self, processes: Mapping[str, int]) -> None:
        self._begun = {(name, pid): _demand(pid) for name, pid in processes.items()}

    def shares(self) -> dict[str, float]:
        """By name, of those processes of which the system says it."""
        found = {}
        for (name, pid), before in self._begun.items():
            after = _demand(pid)
            if before is not None and after is not None:
                computed, waited = after.computed - before.computed, after.waited - before.waited
                found[name] = waited / max(computed + waited, 1)
        return found

    def facts(self) -> dict[str, Any]:
        """What env.json says of it, and the notice if there were too few cores."""
        shares, count = self.shares(), cores()
        facts = {"cores": count, "waited_for_core": {name: round(share, 4) for name, share in shares.items()}}
        if count >= 2 and max(shares.values(), default=0.0) < SHARED:
            return facts
        waited = ", ".join(f"the {name} {share:.0%}" for name, share in shares.items())
        figures = f": of the time that it had work, {waited} waited for a core" if waited else ""
        text = f"driver and worker want a core each, here is {count} for all that runs{figures}"
        return facts | {"notices": [f"sync against async cannot be judged on this machine: {text}"]}


def _demand(pid: int) -> Demand | None:
    """Of a process's main thread. None where the system does not say."""
    with suppress(OSError, ValueError, TypeError):
        computed, waited, _ = map(int, (PROC / str(pid) / "schedstat").read_text().split())
        return Demand(computed, waited)
    return None
