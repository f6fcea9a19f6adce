"""SGLang's waiting requests, in the order in which they are considered, and the budgets of a prefill batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from cbsim.kv.radix import Node, RadixKey
from cbsim.kv.radix_pool import RadixPool
from cbsim.policy.request import Request
from cbsim.policy.value import mypyc_attr
from cbsim.schedulers.sglang.settings import SglangOptions

CACHE_AWARE = ("lpm", "dfs-weight", "hrrn", "shortest-prefill-first")
CLIP = 4096  # the most outputs of a request that are counted
LOOKED_UP = 128  # most waiting requests for which lpm and hrrn look up prefixes, or whose prefixes are kept recent
LOOKS = 32  # passes over the queue from one that keeps prefixes recent to the next
SortKey = Callable[["Entry"], tuple[Any, ...]]
SHARED = 32  # leading tokens from which on a request waits for another's KV
NO_LIMIT = 1 << 60
NO_ROOM, NOT_NOW = -1, 0  # why a request is not admitted
Finishing = tuple[float, int]  # of a request: the tokens it has left to write, the tokens it occupies


class Entry:
    """A request in SGLang's terms. `max_new` outputs are allowed; with 0 one is sampled all the same. The less `rank`,
    the more urgent. `queued`: number of the last time that it was queued; `seen`: prefill tokens processed by then.
    `node` ends what was matched of it last, `matched` tokens for the order of the queue. `late`: it waits for another
    one's KV. `todo` tokens are to be computed before it decodes, `extent` of them in the batch. `whole`: all that it
    may write is kept free for it.
    """

    def __init__(self, request: Request, max_new: int, rank: int, *, whole: bool, root: Node) -> None:
        self.request = request
        self.key = RadixKey(request.spec)
        self.max_new = max_new
        self.rank = rank
        self.whole = whole
        self.queued = self.seen = self.matched = self.todo = self.extent = 0
        self.late = False
        self.node = root

    def owes(self, ratio: float) -> float:
        """Return the tokens kept free for what the request may still write."""
        left = min(self.max_new - self.request.seen, CLIP)
        return left if self.whole else left * ratio


class WaitingQueue:
    """The waiting requests, in the order in which they are considered."""

    def __init__(self, options: SglangOptions, pool: RadixPool) -> None:
        self.entries: list[Entry] = []
        self.processed = 0  # prefill tokens so far
        self._options, self._pool = options, pool
        self._queued = self._looks = 0
        policy = options.schedule_policy
        self._most = None if options.disaggregation_mode != "null" else options.max_queued_requests
        falls_back = options.disable_radix_cache and policy in ("lpm", "dfs-weight", "hrrn")
        self._policy: str = "fcfs" if falls_back else policy
        self._aware = self._policy in CACHE_AWARE
        self._keeps_recent = options.radix_eviction_policy == "lru" and not options.disable_radix_cache
        self._keeps_recent &= not options.decodes
        ranked = options.enable_priority_scheduling
        keys: dict[str, SortKey] = {  # of policies that sort
            "lof": lambda entry: (entry.rank if ranked else 0, -entry.max_new),
            "lpm": lambda entry: (entry.late, 0 if entry.late else -entry.matched),
            "hrrn": self._response,
            "shortest-prefill-first": lambda entry: (entry.late, _work(entry), entry.queued),
        }
        if ranked:
            keys["fcfs"] = lambda entry: (entry.rank, entry.queued)
        self._key = keys.get(self._policy)  # of the others, dfs-weight has an order of its own, fcfs that of arrival

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Request]:
        return iter([entry.request for entry in self.entries])

    def push(self, entry: Entry) -> None:
        self.stamp(entry)
        self.entries.append(entry)

    def stamp(self, entry: Entry) -> None:
        """Let an entry wait from now on."""
        self._queued += 1
        entry.queued, entry.seen = self._queued, self.processed

    @property
    def is_full(self) -> bool:
        return self._most is not None and len(self.entries) >= self._most

    def gives_way(self, rank: int) -> Entry | None:
        """Return the waiting request that is refused for a more urgent one: the least urgent, of equals the last."""
        last = max(self.entries, key=lambda entry: (entry.rank, entry.queued))
        return last if self._options.enable_priority_scheduling and rank < last.rank else None

    def remove(self, request: Request) -> None:
        self.entries = [entry for entry in self.entries if entry.request is not request]

    def sort(self) -> None:
        """Sort the queue before each batch that may be a prefill."""
        entries, key, aware = self.entries, self._key, self._aware
        if aware and self._policy in ("lpm", "hrrn") and len(entries) > LOOKED_UP:
            key, aware = None, False
        if aware:
            self._match_all()
        if key is not None:
            entries.sort(key=key)
        elif aware:
            self.entries = self._depth_first()
        if self._keeps_recent and not aware and entries:
            self._keep_recent()

    def _match_all(self) -> None:
        """Match every request with the tree, the last token included. A request with a short match that shares much
        with one before it is late: it would compute what that one is about to.
        """
        size, noted = self._pool.block_size, set[int]()
        for entry in self.entries:
            tokens = entry.request.target
            entry.node = self._pool.match(entry.key, tokens)
            hit = entry.node.end * size
            entry.matched, entry.late = min(hit, tokens - 1), False
            if hit <= SHARED <= tokens:
                start = entry.key.at(SHARED - 1)  # names all tokens up to it
                entry.late = start in noted
                noted.add(start)

    def _keep_recent(self) -> None:
        if self._looks % LOOKS == 0:
            for entry in reversed(self.entries[:LOOKED_UP]):
                self._pool.match(entry.key, entry.request.target)
        self._looks += 1

    def _response(self, entry: Entry) -> tuple[int, float, str]:
        """Return hrrn's key: nothing to compute first, then tokens waited for per own token, late ones last."""
        name, todo = entry.request.spec.id, entry.request.spec.prompt_tokens - entry.matched
        if entry.late:
            return 2, 0.0, name
        return (1, -(self.processed - entry.seen) / todo, name) if todo > 0 else (0, 0.0, name)

    def _depth_first(self) -> list[Entry]:
        """Return the requests depth first: first the child with the most requests, those that end at a node last."""
        here: dict[Node, list[Entry]] = {}
        weight: dict[Node, int] = {}
        for entry in self.entries:
            here.setdefault(entry.node, []).append(entry)
            for node in (self._pool.tree.root, *entry.node.lineage()):
                weight[node] = weight.get(node, 0) + 1
        order: list[Entry] = []
        ahead = [(self._pool.tree.root, False)]
        while ahead:
            at, below_done = ahead.pop()
            if below_done:
                order += here.get(at, [])
                continue
            below = sorted([n for n in at.children.values() if n in weight], key=lambda n: -weight[n])
            ahead.append((at, True))
            ahead += [(n, False) for n in reversed(below)]
        return order

    def reserve(self, todo: int, budget: int) -> int:
        """Return the most tokens of a chunk of `todo`, beside shorter waiting requests, for shortest-prefill-first."""
        size, reserved = self._pool.block_size, 0
        if self._policy != "shortest-prefill-first" or budget < 2 * size:
            return budget
        for entry in self.entries:
            work = _work(entry)
            paged = -(-work // size) * size
            if work >= todo or reserved + paged > budget - size:
                break
            reserved += paged
        return (budget - reserved) // size * size if reserved else budget


def _work(entry: Entry) -> int:
    return max(1, entry.request.target - entry.matched)


def by_outputs(entries: Sequence[Entry], *, ranked: bool) -> list[Entry]:
    """Return the entries in the order in which they keep their place when memory runs out, longest first."""
    return sorted(
        entries, key=lambda e: (-e.rank if ranked else 0, e.request.seen, -e.request.spec.prompt_tokens), reverse=True
    )


@mypyc_attr(allow_interpreted_subclasses=True)
class Prefill:
    """The budgets of a prefill batch. `total` are the tokens reserved for running and taken requests, `current` those
    written at once; both must stay below what the cache has room for. `inputs`, `chunk`: query tokens left.
    """

    def __init__(self, options: SglangOptions, ratio: float, batch: dict[Request, Entry], most: float) -> None:
        """Start with the decoding requests `batch`, for which at most `most` tokens are reserved in all."""
        self._options = options
        mixed = len(batch) if options.mixes else 0
        self.inputs = options.max_prefill_tokens - mixed
        self.chunk = options.chunked_prefill_size - mixed if options.chunks else NO_LIMIT
        self.current = mixed
        self.bound = mixed + most  # `total` is not more
        self.taken: list[Entry] = []
        self.preempted: list[Entry] = []
        self._page, self._ratio, self._batch, self._mixed = options.block_size, ratio, batch, mixed
        self._charges: list[float] = []
        self._total: float | None = None
        self._finishing: list[Finishing] | None = None  # soonest first, once computed

    @property
    def total(self) -> float:
        """The tokens reserved, summed only when read and always in the same order, because it is no whole number."""
        if self._total is None:
            owed = 0.0
            for entry in self._batch.values():
                owed += entry.owes(self._ratio)
            self._total = self._mixed + owed
            for tokens in self._charges:
                self._total += tokens
        return self._total

    def _charge(self, tokens: float) -> None:
        self._charges.append(tokens)
        if self._total is not None:
            self._total += tokens

    def has_room(self, tokens: int, room: int) -> bool:
        """True if there is room for more than `tokens` tokens beside those reserved."""
        return tokens < room - self.bound or tokens < room - self.total

    def returns(self, entry: Entry) -> None:
        """Record that a decoding request is preempted and about to leave the batch."""
        assert self._total is not None, "summed up when it was in it"
        self._charge(-entry.owes(self._ratio))
        self.preempted.append(entry)

    def paged(self, tokens: int) -> int:
        return -(-tokens // self._page) * self._page

    @property
    def spent(self) -> bool:
        return self.inputs <= 0 or self.chunk <= 0

    def fits(self, room: int) -> bool:
        return self.has_room(0, room) and room > self.current

    def take(self, entry: Entry, tokens: int) -> None:
        """Take a request with `tokens` tokens. If these are all that it has to compute, reserve what it may write."""
        entry.extent = tokens
        self.taken.append(entry)
        paged = self.paged(tokens)
        charge = paged + self._page + (min(entry.max_new, CLIP) if tokens == entry.todo else 0)
        self.bound += charge
        self._charge(charge)
        self.current += paged + self._page
        self.inputs -= paged
        self.chunk -= paged

    def next_chunk(self, room: int) -> int:
        """Return the most tokens of the partly computed prompt. It has to go on, whatever is reserved for others."""
        if self.has_room(self.chunk, room):
            return self.chunk
        fits = min(self.chunk, int(room - self.total))
        return fits if fits > 0 else self.chunk

    def extent(self, entry: Entry, running: Iterable[Entry], room: int, *, cuts: bool) -> int:
        """Return a request's tokens in the batch, or why it waits. `cuts`: no prompt is partly computed."""
        o, todo = self._options, entry.todo
        if o.prefill_max_requests is not None and len(self.taken) >= o.prefill_max_requests:
            return NOT_NOW
        if entry.whole and o.disable_radix_cache:
            return min(todo, max(self.chunk, NOT_NOW)) if self.lasts(entry, running, room) else NO_ROOM
        outputs = min(max(entry.max_new - entry.request.seen, 0), CLIP)
        if not self.has_room(todo + outputs + self._page, room):
            return NO_ROOM
        if not o.chunks:
            return NOT_NOW if self.taken and self.paged(todo) >= self.inputs else todo
        if self.paged(todo) <= self.chunk:
            return todo
        if o.schedule_policy == "shortest-prefill-first" and not cuts:
            return NOT_NOW
        return max(self.chunk // self._page * self._page, NOT_NOW)

    def lasts(self, entry: Entry, running: Iterable[Entry], room: int) -> bool:
        """True if memory lasts until all have written what they may, if those with the least left end first."""
        needed = self.paged(entry.todo) + self._page
        if needed > room - self.current or needed > room - self.total:
            return False
        line = self._line(entry, running)
        free, freed = room - self.current - needed, 0
        for i, (left, occupied) in enumerate(line):
            ahead = len(line) - i
            if free + freed - left * ahead <= ahead:
                return False
            freed += occupied
        return True

    def _line(self, entry: Entry, running: Iterable[Entry]) -> list[Finishing]:
        """Return all requests in the order of their ends, this one among them."""
        if self._finishing is None:
            line = [self._end(other) for other in (entry, *running, *self.taken)]
            self._finishing = sorted([end for end in line if end[0] > 0], key=lambda end: end[0])
        elif (end := self._end(entry))[0] > 0:
            later = [i for i, other in enumerate(self._finishing) if end[0] <= other[0]]
            self._finishing.insert(later[0] if later else self.behind(self._finishing), end)
        return self._finishing

    def behind(self, line: list[Finishing]) -> int:
        """Return the index in a line for a request that ends after all others."""
        return len(line)

    def _end(self, entry: Entry) -> Finishing:
        request = entry.request
        left = entry.max_new * (1.0 if entry.whole else self._ratio) - request.seen
        return left, request.spec.prompt_tokens + request.seen


def giving_way(candidates: list[Entry], needed: float, ratio: float) -> list[Entry]:
    """Return candidates that free the tokens needed, least urgent first, of equals the last queued; none if too few."""
    victims: list[Entry] = []
    for entry in sorted(candidates, key=lambda entry: (-entry.rank, -entry.queued)):
        victims.append(entry)
        needed -= entry.owes(ratio)
        if needed <= 0:
            return victims
    return []
