"""Transfers of KV between places: blocks on the device, blocks of the host's tier.

A cache copies on write, swaps and offloads by the same means: its plan lists transfers, an executor performs them. A
transfer without a job is in order with the steps: it comes after the rows of all plans before and before the rows of
its own, which may read its targets and write its sources; those of one plan follow each other as they are listed. A
transfer with a job goes on beside the steps: to the host it begins when the rows of its plan have run, to the device
when those of the plans before have. Until a result names the job (`StepResult.moved`), or a plan waits for it
(`StepPlan.awaited`), no row reads its targets, and neither its sources nor its targets are handed out.
"""

from __future__ import annotations

from enum import IntEnum

from cbsim.policy.request import RequestSpec
from cbsim.policy.value import value

IN_ORDER = -1
Place = tuple[str, int]  # a tier, a block of it
DEVICE, HOST = "device", "host"


class Direction(IntEnum):
    """The direction of a transfer."""

    COPY = 0  # a block on the device to another
    OUT = 1  # a block on the device to one of the host
    IN = 2  # a block of the host to one on the device


@value(frozen=True)
class Transfer:
    """A transfer of whole blocks of KV: `sources[i]` is copied to `targets[i]`. `spec` is the request whose KV it is,
    or None where it belongs to no single request. `job` is IN_ORDER, or a number that all transfers of one job share.
    """

    direction: Direction
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    spec: RequestSpec | None = None
    job: int = IN_ORDER

    def __post_init__(self) -> None:
        if not len(self.sources) == len(self.targets) > 0:
            raise AssertionError(("a transfer needs a target for each source", self))

    @property
    def read(self) -> list[Place]:
        tier = HOST if self.direction is Direction.IN else DEVICE
        return [(tier, block) for block in self.sources]

    @property
    def written(self) -> list[Place]:
        tier = HOST if self.direction is Direction.OUT else DEVICE
        return [(tier, block) for block in self.targets]


def arriving(transfers: tuple[Transfer, ...], preempted: list[RequestSpec]) -> int:
    """Return the number of blocks on the device that transfers in order fill. They were handed out for that, and are
    free again where their request was `preempted` since.
    """
    there = [t for t in transfers if t.job == IN_ORDER and t.direction is not Direction.OUT and t.spec not in preempted]
    return sum([len(t.targets) for t in there])
