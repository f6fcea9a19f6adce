"""Prefill and decode on different servers: vLLM's rules for a connector that pulls KV from one to the other.

Consumer: a request whose prompt was computed elsewhere loads all of it behind what is cached here; its last token is
computed again, and gives the first output. It asks once: after a preemption, or if the load fails, it prefills here.
Producer: who ends by itself keeps its blocks until they have been fetched. Policy only: no world has a second server,
so the moves name places of their own for every transfer, on a side that has no end.
"""

from __future__ import annotations

from cbsim.policy.decoding import Decoding
from cbsim.policy.moves import Move, Way
from cbsim.policy.request import Finish, Request
from cbsim.policy.schedulers.vllm_transfers import Ahead


class HandOff:
    """Every transfer is a job: blocks of one request that come or go."""

    def __init__(self, decoding: Decoding) -> None:
        self.kept: dict[Request, int] = {}  # ended, with the job that fetches its blocks
        self._decoding = decoding
        self._loading: dict[int, Request] = {}
        self._asked: set[Request] = set()  # have got what they asked for, be it broken
        self._ordered: list[Move] = []  # since the plan before
        self._jobs = self._places = 0

    @property
    def busy(self) -> bool:
        return bool(self.kept)

    def match(self, request: Request, local: int) -> int | None:
        wishes = request.spec.computed_elsewhere and request not in self._asked
        return request.spec.prompt_tokens - local if wishes else 0

    def load(self, request: Request, local: int, external: int) -> None:
        self._asked.add(request)
        pool = self._decoding.pool
        self._loading[self._jobs] = request
        self._order(Way.IN, request, pool.tables[request][local // pool.block_size :])

    def admitted(self, request: Request) -> None:
        pass

    def order(self, step: int, ahead: Ahead) -> None:
        self._decoding.moves += self._ordered
        self._ordered = []

    def ended(self, request: Request, reason: Finish, computed: int) -> bool:
        self._asked.discard(request)
        if reason is Finish.ABORTED or not request.spec.fetched_later:
            return False
        pool = self._decoding.pool
        self.kept[request] = self._jobs
        self._order(Way.OUT, request, pool.tables[request][: pool.blocks_for(computed)])
        return True

    def _order(self, way: Way, request: Request, blocks: list[int]) -> None:
        """A job, whose other side has places that no other job names."""
        here, there = tuple(blocks), tuple(range(self._places, self._places + len(blocks)))
        sources, targets = (here, there) if way is Way.OUT else (there, here)
        self._ordered.append(Move(way, sources, targets, request.spec, self._jobs))
        self._jobs += 1
        self._places += len(blocks)

    def landed(self, step: int, jobs: list[int]) -> list[Request]:
        loaded = [self._loading.pop(job) for job in jobs if job in self._loading]
        fetched = [request for job in jobs for request, of in self.kept.items() if of == job]
        for request in fetched:
            del self.kept[request]
        return loaded + fetched

    def check(self) -> None:
        """Raise AssertionError unless who is kept holds its blocks, and who loads has asked."""
        tables = self._decoding.pool.tables
        assert all(request in tables for request in self.kept), "who is kept has lost its blocks"
        assert all(request in tables for request in self._loading.values()), "a load into blocks of nobody"
