"""The seam of autoscaling: how a rule says how many replicas a pool should have; and the rule of Kubernetes.

The rule `hpa` is that of the HorizontalPodAutoscaler on a metric of pods, as kubernetes.io documents it
(tasks/run-application/horizontal-pod-autoscale) and pkg/controller/podautoscaler (replica_calculator.go,
`calcPlainMetricReplicas`; horizontal.go, behaviors) has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar

from cbsim.policy.kind import Natural, Settings
from cbsim.policy.marks import AtLeast
from cbsim.routers.base import S_IN_NS, Guarded, RouterError, View


class Rule(Protocol):
    """A rule that is called at every interval. It sees a pool as a router does."""

    def desired(self, ready: Sequence[View], starting: int, wanted: int, now_ns: int) -> int:
        """Return how many replicas the pool should have. `ready` ones take requests, `starting` ones do not yet;
        `wanted` is what the rule returned last. Draining ones are none of these.
        """


S = TypeVar("S", bound=Settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleKind(Generic[S]):
    """A rule: its name, what it is in a sentence, its settings (as a scheduler's), and how an instance comes from them
    and the fewest and the most replicas of its pool.
    """

    name: str
    about: str
    settings: type[S]
    make: Callable[[S, int, int], Rule]


@dataclass(frozen=True, slots=True, kw_only=True)
class HpaSettings(Settings):
    """The settings of Kubernetes' HorizontalPodAutoscaler, with its defaults but for metric and target."""

    metric: Literal["waiting", "running", "in_flight", "kv_use"] = "waiting"
    """What is averaged over ready replicas: requests waiting or running, the router's requests in flight, or the share
    of KV in use."""
    target: Annotated[float, AtLeast(1e-9)] = 4.0  #: The mean of the metric that a replica should have.
    tolerance: Annotated[float, AtLeast(0)] = 0.1  #: Nothing changes while mean over target is so close to 1.
    up_window_s: Annotated[float, AtLeast(0)] = 0.0  #: More only as far as all results of so many seconds say.
    down_window_s: Annotated[float, AtLeast(0)] = 300.0  #: Fewer only as far as all results of so many seconds say.
    up_period_s: Annotated[float, AtLeast(1e-9)] = 15.0  #: Time of the two bounds on more replicas.
    up_percent: Natural | None = 100  #: Replicas that may be added in that time, % of those before it; null: no bound.
    up_pods: Natural | None = 4  #: The same as a number; null: no bound.
    down_period_s: Annotated[float, AtLeast(1e-9)] = 15.0  #: Time of the two bounds on fewer replicas.
    down_percent: Natural | None = 100  #: Replicas that may go in that time, % of those before it; null: no bound.
    down_pods: Natural | None = None  #: The same as a number; null: no bound.
    select_policy: Literal["max", "min"] = "max"  #: Which of two bounds holds: that of the larger change, or the other.


class Hpa:
    """Kubernetes' rule."""

    def __init__(self, settings: HpaSettings, least: int, most: int) -> None:
        self._settings, self._least, self._most = settings, least, most
        self._results: list[tuple[int, int]] = []  # (time, replicas) before stabilization
        self._changes: list[tuple[int, int]] = []  # (time, replicas added or, below 0, taken)

    def desired(self, ready: Sequence[View], starting: int, wanted: int, now_ns: int) -> int:
        raw = self._by_metric(ready, starting, wanted)
        replicas = self._limited(self._stabilized(raw, wanted, now_ns), wanted, now_ns)
        if replicas != wanted:
            self._changes.append((now_ns, replicas - wanted))
        return replicas

    def _by_metric(self, ready: Sequence[View], starting: int, wanted: int) -> int:
        """Return ceil(replicas * mean / target). Starting replicas count as 0 where more are needed."""
        settings, count = self._settings, len(ready)
        if not ready:
            return wanted
        total = sum(getattr(view, settings.metric) for view in ready)
        ratio = first = total / count / settings.target
        if starting and first > 1:
            count += starting
            ratio = total / count / settings.target
        replicas = ceil(round(ratio * count, 9))
        against = (first > 1 > ratio) or (starting and first > 1 and replicas < wanted)
        return wanted if against or abs(1 - ratio) <= settings.tolerance else replicas

    def _stabilized(self, raw: int, wanted: int, now_ns: int) -> int:
        """Return the least of the results in the window for more, the most of those in the window for fewer."""
        up_ns, down_ns = (s * S_IN_NS for s in (self._settings.up_window_s, self._settings.down_window_s))
        self._results = self._results or [(now_ns, wanted)]  # the controller begins with what there is
        self._results = [each for each in self._results if each[0] > now_ns - max(up_ns, down_ns)]
        low = min([raw, *(count for at_ns, count in self._results if at_ns > now_ns - up_ns)])
        high = max([raw, *(count for at_ns, count in self._results if at_ns > now_ns - down_ns)])
        self._results.append((now_ns, raw))
        return min(max(wanted, low), high)

    def _limited(self, replicas: int, wanted: int, now_ns: int) -> int:
        """Return the replicas that bounds on changes, and those of the pool, leave."""
        settings, more = self._settings, replicas > wanted
        period_s = settings.up_period_s if more else settings.down_period_s
        percent, pods = (settings.up_percent, settings.up_pods) if more else (settings.down_percent, settings.down_pods)
        before = wanted - sum(change for at_ns, change in self._changes if at_ns > now_ns - period_s * S_IN_NS)
        bounds = [] if percent is None else [ceil(before * percent / 100)]
        bounds += [] if pods is None else [pods]
        if bounds:
            change = max(bounds) if settings.select_policy == "max" else min(bounds)
            low, high = min(before - change, wanted), max(before + change, wanted)
            replicas = min(replicas, high) if more else max(replicas, low)
        return min(max(replicas, self._least), self._most)


class GuardedRule(Guarded):
    """A rule of a user, whose every answer is checked. Raises RouterError."""

    what = "rule"

    def desired(self, ready: Sequence[View], starting: int, wanted: int, now_ns: int) -> int:
        rule: Any = self._router
        answer = self._safe("desired", lambda: rule.desired(tuple(ready), starting, wanted, now_ns))
        if type(answer) is not int or answer < 0:
            raise RouterError(f"{self.what} {self._name}, desired: got {answer!r}, expected 0 or more replicas")
        return answer


HPA = RuleKind(
    name="hpa",
    about="Kubernetes' HorizontalPodAutoscaler on the mean of a metric over replicas",
    settings=HpaSettings,
    make=Hpa,
)
