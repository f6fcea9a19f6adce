"""TensorRT-LLM's capacity schedulers: which of the active requests have cache for the next step.

A request that got a row has started: it has the blocks of its prompt, and later those of what it has generated.
"""

from __future__ import annotations

from typing import NamedTuple

from cbsim.policy.decode_batch import by_order
from cbsim.policy.decoding import Decoding
from cbsim.policy.request import Request, Status
from cbsim.policy.value import mypyc_attr
from cbsim.schedulers.trtllm.settings import TrtllmOptions


class Fit(NamedTuple):
    """The requests that have cache, in the order in which rows are given, and the requests that lose it."""

    requests: list[Request]
    paused: list[Request]


@mypyc_attr(allow_interpreted_subclasses=True)
class Capacity:
    """The GUARANTEED_NO_EVICT rule: cache is reserved to a request's end, so no started request is paused.

    STATIC_BATCH is the same, but no request starts while another generates.
    """

    def __init__(self, options: TrtllmOptions, decoding: Decoding) -> None:
        self.options = options
        self.decoding = decoding
        self.pool = decoding.pool
        self._static = options.capacity_scheduler_policy == "STATIC_BATCH"
        self._reserved = 0  # blocks that all started requests will have at their ends

    def whole(self, request: Request) -> int:
        """Return the blocks that are reserved for a request: its prompt and all that it may generate."""
        return self.pool.blocks_for(request.spec.prompt_tokens + request.limit)

    def started(self, request: Request) -> None:
        """Reserve the blocks of a request that is about to get its first ones."""
        self._reserved += self.whole(request)

    def stopped(self, request: Request) -> None:
        """Unreserve the blocks of a request that is about to lose them."""
        self._reserved -= self.whole(request)

    def spares_members(self, contexts: dict[Request, None]) -> bool:
        """True if all generating requests have cache, in front of these requests that may not."""
        del contexts
        return True

    def behind(self, generating: int, contexts: dict[Request, None]) -> Fit:
        """Return which of `contexts` fit behind `generating` others: in order, up to the first misfit."""
        fits: list[Request] = []
        if self._static and generating:
            return Fit(fits, [])
        available = self._available()
        for request in contexts:
            needed = self.whole(request) - self.pool.allocated(request)
            if generating + len(fits) == self.options.max_num_requests or needed > available:
                break
            available -= needed
            fits.append(request)
        return Fit(fits, [])

    def _available(self) -> int:
        """Return the free blocks, less what all generating requests will need."""
        available = self.pool.num_blocks - self._reserved
        for request in self.decoding.unbatched:
            if request.status is Status.PREFILL:
                available += self.whole(request) - self.pool.allocated(request)
        return available

    def one_by_one(self, generating: list[Request], contexts: dict[Request, None]) -> Fit:
        """Return the requests that fit: generating ones, then the others, each in order of arrival."""
        front = generating[: self.options.max_num_requests]
        return Fit([*front, *self.behind(len(front), contexts).requests], [])


class MaxUtilization(Capacity):
    """The MAX_UTILIZATION rule: a request needs room for its next step; if it lacks it, the last started is paused."""

    def __init__(self, options: TrtllmOptions, decoding: Decoding) -> None:
        super().__init__(options, decoding)
        self._ahead = 2 if options.two_step_lookahead else 1

    def one_step(self, request: Request) -> int:
        """Return the blocks that a request needs beside those it has."""
        pool = self.pool
        if request.status is not Status.DECODE:
            return 0 if pool.allocated(request) else pool.blocks_for(request.target)
        ahead = min(self._ahead, request.limit - request.scheduled)
        return pool.blocks_for(request.computed + ahead) - pool.blocks_for(request.computed)

    def spares_members(self, contexts: dict[Request, None]) -> bool:
        for first in contexts:
            if first.order < self.decoding.batched.max_order:
                return False
            break
        return self._members_need() <= self.pool.free

    def _members_need(self) -> int:
        if self._ahead > 1:
            return sum([self.one_step(request) for request in self.decoding.batched])
        return self.decoding.due_blocks()

    def behind(self, generating: int, contexts: dict[Request, None]) -> Fit:
        return self._walk(list(contexts), generating, self._members_need())

    def one_by_one(self, generating: list[Request], contexts: dict[Request, None]) -> Fit:
        return self._walk(sorted([*generating, *contexts], key=by_order), 0, 0)

    def _walk(self, line: list[Request], slots: int, used: int) -> Fit:
        """Return the fitting requests, in order of arrival, behind `slots` slots and `used` blocks. For a misfit, the
        last started from it on, perhaps itself, is paused and ends the line; if none has started, the walk ends.
        """
        fits: list[Request] = []
        paused: list[Request] = []
        free, end, at = self.pool.free, len(line), 0
        while at < end:
            request = line[at]
            needed = self.one_step(request)
            if slots + len(fits) < self.options.max_num_requests and used + needed <= free:
                used += needed
                fits.append(request)
                at += 1
                continue
            last = end - 1
            while last >= at and line[last].status is Status.WAITING:
                last -= 1
            if last < at:
                break
            free += self.pool.allocated(line[last])
            paused.append(line[last])
            end = last
        return Fit(fits, paused)


def capacity(options: TrtllmOptions, decoding: Decoding) -> Capacity:
    """Return the capacity scheduler that the options name."""
    kind = MaxUtilization if options.capacity_scheduler_policy == "MAX_UTILIZATION" else Capacity
    return kind(options, decoding)
