"""SGLang's queue of waiting requests, what admission knows of them, and the order in which they are considered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cbsim.kv.radix import Node, RadixKey
from cbsim.kv.radix_pool import RadixPool
from cbsim.policy.request import Request
from cbsim.schedulers.sglang.settings import SglangOptions

CACHE_AWARE = ("lpm", "dfs-weight", "hrrn", "shortest-prefill-first")
CLIP = 4096  # the most outputs of a request that are counted
LOOKED_UP = 128  # most waiting requests for which lpm and hrrn look up prefixes, or whose prefixes are kept recent
LOOKS = 32  # passes over the queue from one that keeps prefixes recent to the next
SortKey = Callable[["Entry"], tuple[Any, ...]]
SHARED = 32  # leading tokens from which on a request waits for another's KV


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
        falls_back = options.disable_radix_cache and policy in ("lpm", "dfs-weight", "hrrn")
        self._policy: str = "fcfs" if falls_back else policy
        self._keeps_recent = options.radix_eviction_policy == "lru" and not options.disable_radix_cache
        ranked = options.enable_priority_scheduling
        self._keys: dict[str, SortKey] = {  # of policies that sort; the others leave the order of arrival
            "lof": lambda entry: (entry.rank if ranked else 0, -entry.max_new),
            "lpm": lambda entry: (entry.late, 0 if entry.late else -entry.matched),
            "hrrn": self._response,
            "shortest-prefill-first": lambda entry: (entry.late, _work(entry), entry.queued),
        }
        if ranked:
            self._keys["fcfs"] = lambda entry: (entry.rank, entry.queued)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Request]:
        return iter([entry.request for entry in self.entries])

    def push(self, entry: Entry) -> None:
        self._queued += 1
        entry.queued, entry.seen = self._queued, self.processed
        self.entries.append(entry)

    def remove(self, request: Request) -> None:
        self.entries = [entry for entry in self.entries if entry.request is not request]

    def sort(self) -> None:
        """Sort the queue before each batch that may be a prefill."""
        entries, policy = self.entries, self._policy
        if policy in ("lpm", "hrrn") and len(entries) > LOOKED_UP:
            policy = ""
        if policy in CACHE_AWARE:
            self._match_all()
        if policy in self._keys:
            entries.sort(key=self._keys[policy])
        elif policy == "dfs-weight":
            self.entries = self._depth_first()
        if self._keeps_recent and policy not in CACHE_AWARE and entries:
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
            node: Node | None = entry.node
            while node is not None:
                weight[node] = weight.get(node, 0) + 1
                node = node.parent
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
        if self._options.schedule_policy != "shortest-prefill-first" or budget < 2 * size:
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
