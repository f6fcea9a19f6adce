"""What the simulator says of points: mean TTFT and TPOT of their scenarios, made where a sweep's runs are."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cbsim.proof.points.published import Point
from cbsim.scenario.scenario import Scenario
from cbsim.sweeps import identity
from cbsim.sweeps.executor import Executor
from cbsim.sweeps.store import Store
from cbsim.sweeps.work import Made, Task

OUTPUT_SHARE = 0.9  # mean of lengths that are uniform from 0.8 of the nominal one on


class Means(NamedTuple):
    """Of a server's requests, milliseconds."""

    ttft_ms: float
    tpot_ms: float

    def tokens_s(self, point: Point) -> float:
        """Output tokens a second by Little's law: the point's users each wait for one mean request after the other."""
        tokens = OUTPUT_SHARE * point.output
        return 1e3 * point.concurrency * tokens / (self.ttft_ms + self.tpot_ms * (tokens - 1))


def measured(point: Point) -> Means:
    return Means(point.ttft_ms, point.tpot_ms)


def predict(
    scenarios: Sequence[Scenario],
    executor: Executor,
    store: Store | None = None,
    hear: Callable[[Made], None] = lambda _: None,
) -> list[Means | str]:
    """The means of each, or why its run failed; `store` keeps runs, and those that it has are not made again."""
    keys = [identity.key(each) for each in scenarios]
    tasks = dict(zip(keys, scenarios, strict=True))
    known = store.keys() if store else set()
    means: dict[str, Means | str] = {}
    for made in executor.each(Task(key, each, "summary") for key, each in tasks.items() if key not in known):
        if store:
            store.keep(made)
        means[made.key] = made.reason or _means(json.loads(made.files["summary.json"]))
        hear(made)
    if store:
        means |= {key: _means(store.summary(key)) for key in tasks if key in known}
    return [means[key] for key in keys]


def _means(summary: dict[str, dict[str, float]]) -> Means:
    return Means(1e3 * summary["ttft_s"]["mean"], 1e3 * summary["tpot_s"]["mean"])
