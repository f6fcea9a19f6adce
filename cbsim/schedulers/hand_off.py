"""The hand-off of requests between servers that prefill and servers that decode: one side's transfers of KV."""

from __future__ import annotations

from cbsim.policy.decoding import Decoding
from cbsim.policy.request import Finish, Request
from cbsim.policy.transfers import Direction, Transfer


class HandOff:
    """The transfers of a server with a role: vLLM's rules for a connector that pulls KV across; SGLang's servers order
    theirs by `fetch` and `ended`.

    Consumer: a request whose prompt was computed elsewhere loads all of it behind what is cached here; its last token
    is computed again, and gives the first output. It loads once: after a preemption, or if the load fails, it prefills
    here. Producer: a request that ends by itself keeps its blocks until they have been fetched. Every transfer is a job
    of one request. What the blocks are on the other side is not known here: each job names some of its own.
    """

    def __init__(self, decoding: Decoding) -> None:
        self.unfetched: dict[Request, int] = {}  # ended requests, with the job that fetches their blocks
        self._decoding = decoding
        self._loading: dict[int, Request] = {}
        self._requested: set[Request] = set()  # requests that have loaded once, even if the load was broken
        self._jobs, self._places = 0, decoding.pool.host_blocks  # behind those of this server's own host

    @property
    def busy(self) -> bool:
        return bool(self.unfetched)

    def match(self, request: Request, local: int) -> int | None:
        wishes = request.spec.computed_elsewhere and request not in self._requested
        return request.spec.prompt_tokens - local if wishes else 0

    def load(self, request: Request, local: int, external: int) -> None:
        self._requested.add(request)
        self.fetch(request, local)

    def fetch(self, request: Request, local: int) -> None:
        """Order a job that brings what is behind the first `local` tokens of a request's table."""
        request.fetch(local)
        pool = self._decoding.pool
        self._loading[self._jobs] = request
        self._order(Direction.IN, request, pool.table(request)[local // pool.block_size :])

    def order(self, step: int, ahead: object) -> None:
        """Do nothing: the next plan lists every job ordered since the one before."""

    def ended(self, request: Request, reason: Finish, computed: int) -> bool:
        self._requested.discard(request)
        if reason is Finish.ABORTED or not request.spec.fetched_later:
            return False
        pool = self._decoding.pool
        self.unfetched[request] = self._jobs
        self._order(Direction.OUT, request, pool.table(request)[: pool.blocks_for(computed)])
        return True

    def _order(self, direction: Direction, request: Request, blocks: list[int]) -> None:
        """Order a job, whose other side has places that no other job names."""
        here, there = tuple(blocks), tuple(range(self._places, self._places + len(blocks)))
        sources, targets = (here, there) if direction is Direction.OUT else (there, here)
        self._decoding.transfers.append(Transfer(direction, sources, targets, request.spec, self._jobs))
        self._jobs += 1
        self._places += len(blocks)

    def completed(self, step: int, jobs: list[int]) -> list[Request]:
        loaded = [self._loading.pop(job) for job in jobs if job in self._loading]
        fetched = [request for job in jobs for request, of in self.unfetched.items() if of == job]
        for request in fetched:
            del self.unfetched[request]
        return loaded + fetched

    def check(self) -> None:
        """Raise AssertionError unless requests waiting to be fetched and requests that load have their blocks."""
        tables = self._decoding.pool.tables
        assert all(request in tables for request in self.unfetched), "who is kept has lost its blocks"
        assert all(request in tables for request in self._loading.values()), "a load into blocks of nobody"
