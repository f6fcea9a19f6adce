"""The queues of an SGLang 0.5.23 server that decodes what other servers prefill: cbsim/schedulers/sglang/scheduler.py
has the rest of its rules, and those of the servers that prefill.

A request gets blocks for its prompt before its prefill begins elsewhere, if enough stays free for all that run or are
about to. When its KV has come it waits for a place, and is given one without any computation: its first output came
with the KV. Whoever is retracted goes to the host with its KV, and comes back before any further request gets blocks.
"""

from __future__ import annotations

from collections.abc import Iterable

from cbsim.kv.radix import Node
from cbsim.kv.radix_pool import RadixPool
from cbsim.policy.decoding import Decoding
from cbsim.policy.request import Finish, Request
from cbsim.policy.swapping import Host, LowestFirst
from cbsim.schedulers.hand_off import HandOff
from cbsim.schedulers.sglang.queue import CLIP, Entry, WaitingQueue
from cbsim.schedulers.sglang.settings import SglangOptions

BUFFERS = 2  # for what comes with the KV, for each request that may run


class Receiving:
    """The requests of a decoding server that do not run: those of `queue` have no blocks yet."""

    def __init__(self, o: SglangOptions, queue: WaitingQueue, decoding: Decoding, pool: RadixPool) -> None:
        self.host = Host(decoding, LowestFirst(o.host_blocks))
        self.hand_off = HandOff(decoding)
        self.queue = queue
        self.retracted: list[Entry] = []
        self.loading: dict[Request, Entry] = {}  # blocks are taken, the KV comes
        self.arrived: dict[Request, bool] = {}  # of these, those whose transfer is over, and whether it brought the KV
        self.cancelled: dict[Request, None] = {}  # they have ended, and their KV still comes
        self.leaving = 0  # of these, those for which memory is reserved until the queues are looked at
        self.ready = WaitingQueue(o, pool)  # they wait for a place
        self.left: list[Entry] = []  # requests that ended since the batch was looked at
        self._options, self._decoding, self._pool = o, decoding, pool

    @property
    def busy(self) -> bool:
        return bool(self.loading or self.cancelled)

    @property
    def allocated(self) -> int:
        """The requests that have blocks and do not run."""
        return len(self.loading) + len(self.cancelled) + len(self.ready)

    def look(self, batch: Iterable[Entry], running: int) -> list[Entry]:
        """Move requests on, once in a pass in which `running` have rows and `batch` decode. Return those that end, as
        their KV is lost.
        """
        batch = [*batch, *self.left]
        self._resume(len(batch), running)
        if self.retracted:
            return []  # nobody takes memory before them
        self._allocate(batch, running)
        self.leaving = 0
        lost: list[Entry] = []
        for request in [request for request in self.loading if request in self.arrived]:
            entry = self.loading.pop(request)
            if self.arrived.pop(request):
                self._decoding.admit(request, request.spec.prompt_tokens)
                self.ready.push(entry)
            else:
                lost.append(entry)
        return lost

    def retract(self, entry: Entry) -> None:
        """Let a request wait whose KV is on the host; none waits that found no room there and has ended."""
        if entry.request.finish is None:
            self.ready.stamp(entry)
            self.retracted.append(entry)

    def _rows(self, running: int) -> int:
        """Return how many further requests may have blocks."""
        o = self._options
        return o.max_running_requests + (o.disaggregation_decode_extra_slots or 0) - running - self.allocated

    def _room(self, decoding: int, single: int = 0) -> int:
        """Return the tokens free beside those reserved for `decoding` requests and others with blocks, or `single`."""
        active = decoding + len(self.loading) + self.leaving + len(self.ready)
        reserved = self._options.num_reserved_decode_tokens * active
        return self._pool.free * self._pool.block_size - max(reserved, single)

    def _resume(self, decoding: int, running: int) -> None:
        pool = self._pool
        while self.retracted and self._rows(running) > 0:
            entry, size = self.retracted[0], pool.block_size
            request = entry.request
            needed = pool.blocks_for(request.computed) * size + self._options.num_reserved_decode_tokens
            alone = not (decoding or self.busy or len(self.ready))
            if needed > self._room(decoding) and not alone:
                return
            del self.retracted[0]
            self._take(entry, pool.tree.root, request.computed)
            self._decoding.resume(request)
            self.host.restore(request)
            self.ready.entries.append(entry)

    def _allocate(self, batch: list[Entry], running: int) -> None:
        """Take blocks for requests in order, none is passed over. What those that decode hold counts as free for the
        whole output of a request: they could be retracted.
        """
        o, pool, size = self._options, self._pool, self._pool.block_size
        retractable = sum([entry.request.known for entry in batch])
        single = max([_whole(entry) for entry in batch]) - retractable if batch else 0
        buffers = BUFFERS * o.max_running_requests
        if o.enable_priority_scheduling:
            self.queue.entries.sort(key=lambda entry: entry.rank)
        while self.queue.entries and self._rows(running) > 0 and len(self.loading) + len(self.cancelled) < buffers:
            entry = self.queue.entries[0]
            prompt = entry.request.spec.prompt_tokens
            node = pool.match(entry.key, prompt - 1)
            pool.lock(node)
            new, prefix = (pool.blocks_for(prompt) - node.end) * size, node.end * size
            needed = max(new + o.num_reserved_decode_tokens, _whole(entry) - prefix - retractable)
            fits = needed <= self._room(len(batch), single)
            if fits:
                del self.queue.entries[0]
                self._take(entry, node, prompt)
                self.hand_off.fetch(entry.request, prefix)
                self.loading[entry.request] = entry
            pool.unlock(node)
            if not fits:
                return

    def _take(self, entry: Entry, node: Node, tokens: int) -> None:
        """Take blocks for the first `tokens` tokens of a request, those behind what is cached."""
        pool = self._pool
        pool.make_room((pool.blocks_for(tokens) - node.end) * pool.block_size)
        pool.admit(entry.request, entry.key, node)
        pool.grow(entry.request, pool.missing(entry.request, tokens))

    def entering(self, decoding: int) -> list[Entry]:
        """Remove and return those that get a place beside `decoding` requests; their blocks may be cached."""
        o, ready = self._options, self.ready
        if o.enable_priority_scheduling and ready.entries:
            ready.sort()
        places = max(0, o.max_running_requests - decoding - len(self.left))
        entering, ready.entries = ready.entries[:places], ready.entries[places:]
        for entry in entering:
            self._pool.merge(entry.request, entry.request.computed // self._pool.block_size)
        return entering

    def moved(self, jobs: tuple[int, ...], broken: tuple[int, ...]) -> None:
        """Record that jobs are over, and which blocks they did not fill."""
        over = self.hand_off.completed(0, list(jobs))
        for request in [request for request in self.cancelled if request in over]:
            del self.cancelled[request]
            self._pool.release(request, returns=True)
        for request in [request for request in over if request in self.loading]:
            self.arrived[request] = not broken or {*broken}.isdisjoint(self._pool.table(request))

    def cancel(self, request: Request) -> bool:
        """End a request that is here. Return False if it is not."""
        decoding = self._decoding
        if request in self.loading:
            entry = self.loading.pop(request)
            self.leaving += 1
            if self.arrived.pop(request, None) is not None:
                self._pool.release(entry.request, returns=True)
            else:
                self.cancelled[request] = None
            decoding.end(request, Finish.ABORTED, keeps_blocks=True)
        elif request in [entry.request for entry in (*self.ready.entries, *self.retracted, *self.queue.entries)]:
            self.host.forget(request)
            self.retracted = [entry for entry in self.retracted if entry.request is not request]
            self.ready.remove(request)
            self.queue.remove(request)
            decoding.end(request, Finish.ABORTED)
        else:
            return False
        return True

    def check(self) -> None:
        """Raise AssertionError unless the host adds up, and those whose KV comes are known once, each with blocks."""
        self.host.check()
        self.hand_off.check()
        assert self.arrived.keys() <= self.loading.keys(), (self.arrived, self.loading)
        assert self.host.tables.keys() == {entry.request for entry in self.retracted}, "who is out and who is retracted"


def _whole(entry: Entry) -> int:
    """Return the tokens of a request at its end."""
    return min(entry.max_new, CLIP) + entry.request.spec.prompt_tokens
