"""Prefill and decode apart: the rules of requests in two legs at two servers, whose KV goes from one to the other.

They know neither clock nor device. A world, simulated (cbsim/machine/handoff.py) or of processes
(cbengine/serving/fleet.py), calls them with what happened and the time, and does what they ask of it (`Servers`). So
both worlds choose the same servers, end a hand-off for the same reasons, and write the same rows.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Protocol

from cbsim.policy.request import DECODE, PREFILL, WHOLE, RequestSpec
from cbsim.policy.transfers import Direction
from cbsim.record.columns import NS
from cbsim.record.optional_tables import BROKEN, ENDED, FETCHED, LEASE_OVER, UNDER_WAY
from cbsim.runs.inbox import NEVER_NS
from cbsim.scenario.fleet import HandOff

NONE_YET = -1
OUT, IN = Direction.OUT, Direction.IN


@dataclass(eq=False, slots=True)
class RoutedRequest:
    """A request at the servers chosen for it. Its KV goes from `source` to `target`, unless it has no source."""

    spec: RequestSpec
    target: int
    source: int | None  # NONE_YET while it waits in a global queue
    at: dict[int, int] = field(default_factory=dict)  # by leg that a server has, that server
    blocks: dict[Direction, int] = field(default_factory=dict)  # that a side keeps for the transfer
    over: bool = False  # all its tokens are there, or it has failed
    begun: bool = False  # the transfer
    fate: int = UNDER_WAY
    prefilled_ns: int = NONE_YET
    taken_ns: int = NONE_YET
    start_ns: int = NONE_YET
    end_ns: int = NONE_YET
    bytes: int = 0

    @property
    def handing(self) -> bool:
        """Whether its hand-off is under way."""
        return self.source is not None and self.fate == UNDER_WAY

    @property
    def sides(self) -> dict[Direction, int]:
        """The server that a hand-off goes out of, and the one that it goes into."""
        assert self.source is not None
        return {OUT: self.source, IN: self.target}


class Servers(Protocol):
    """What the rules ask of a world, whose servers have numbers. Of the legs PREFILL and DECODE the latter answers."""

    def route(self, spec: RequestSpec, which: int) -> int | None:
        """Let the router of a leg choose a server; return None if none takes requests."""

    def prefilling(self) -> list[int]:
        """Return for each server that takes prefills how many it has."""

    def cached_tokens(self, server: int, spec: RequestSpec) -> int:
        """Return how many tokens of a prompt a server that decodes has, as far as its router knows."""

    def give(self, server: int, spec: RequestSpec, form: int) -> None:
        """Send a server a leg of a form (`policy.request.leg`)."""

    def cancel(self, server: int, spec: RequestSpec) -> None:
        """Cancel a prefill."""

    def release(self, spec: RequestSpec, which: int) -> None:
        """Note in the books of a leg's router, unless they know it, that its server has answered."""

    def begin(self, routed: RoutedRequest) -> int:
        """Start a transfer; return its bytes. At its end both sides know of it, and `transferred` is called."""

    def cut(self, routed: RoutedRequest) -> None:
        """Break off a transfer that has begun, as one of its servers has gone."""

    def drop(self, server: int, index: int, direction: Direction) -> None:
        """Let a server know that there will be no transfer for which it keeps blocks."""

    def lease(self, until_ns: int) -> None:
        """Call `lease_over` at this time alone; NEVER_NS: not at all."""

    def unserved(self, spec: RequestSpec) -> None:
        """Go on with a request that no server is left to decode."""


class HandOffs:
    """The requests of a fleet, by index, until they and their hand-offs are over. `rows` are those of
    hand_offs.parquet. Without `terms` the servers have no roles: each request has one leg, DECODE.
    """

    def __init__(self, servers: Servers, terms: HandOff | None, rows: array[int]) -> None:
        self.requests: dict[int, RoutedRequest] = {}
        self._servers, self._terms, self._rows = servers, terms, rows
        self._pulls = terms is not None and terms.transfer == "pull"
        self._global = terms is not None and terms.prefill_queue == "global"
        self._queue: dict[int, RoutedRequest] = {}  # whose prefills can begin, in that order
        self._waiting: dict[int, None] = {}  # hand-offs that count as waiting for a prefill
        self._until_ns: dict[int, int] = {}  # the ends of leases, which are in the order of their starts
        self._gone: set[int] = set()

    @property
    def under_way(self) -> list[RoutedRequest]:
        return [routed for routed in self.requests.values() if routed.handing]

    def arrived(self, spec: RequestSpec, now_ns: int) -> bool:
        """Choose who decodes a request, then who prefills it, and give its first leg to one of them. A prompt is
        computed where it decodes if few of its tokens are not cached there, as many prefills wait as may, or no server
        prefills. Return False if nobody decodes.
        """
        terms, source = self._terms, None
        if (target := self._servers.route(spec, DECODE)) is None:
            return False
        if terms is not None and not self._is_local(spec, target, terms):
            if not self._global:
                source = self._servers.route(spec, PREFILL)
            elif self._servers.prefilling():
                source = NONE_YET
        self.requests[spec.index] = routed = RoutedRequest(spec, target, None if source == target else source)
        if routed.handing:
            self._waiting[spec.index] = None
        if routed.handing and self._pulls:
            self._queue[spec.index] = routed
            self.prefill_next(now_ns)
        else:
            self._give(routed, DECODE, DECODE if routed.handing else WHOLE, now_ns)
        return True

    def _is_local(self, spec: RequestSpec, target: int, terms: HandOff) -> bool:
        least, most = terms.local_below_tokens, terms.most_waiting_prefills
        full = most is not None and len(self._waiting) >= most
        return full or (least > 0 and spec.prompt_tokens - self._servers.cached_tokens(target, spec) < least)

    def prefill_next(self, now_ns: int) -> None:
        """Give the prefills that can begin to their servers; with one queue for all, as long as any is idle."""
        while self._queue and not (self._global and min(self._servers.prefilling(), default=0)):
            routed = self._queue.pop(next(iter(self._queue)))
            if not self._give(routed, PREFILL, PREFILL, now_ns):
                self._end(routed, BROKEN, now_ns)
                if DECODE not in routed.at:
                    self._decode(routed, now_ns)
            elif self._global:
                del self._waiting[routed.spec.index]

    def _give(self, routed: RoutedRequest, which: int, form: int, now_ns: int) -> bool:
        """Give a leg to the server that was chosen, or to another one if that has gone; return whether one is left."""
        spec, server = routed.spec, routed.source if which == PREFILL else routed.target
        if server is None or server == NONE_YET or server in self._gone:
            self._servers.release(spec, which)
            server = self._servers.route(spec, which)
            if server is None or (which == PREFILL and server == routed.target):
                return False
            if which == PREFILL:
                routed.source = server
            else:
                routed.target = server
                if server == routed.source:  # it has the prompt in its cache
                    form = WHOLE
                    self._end(routed, BROKEN, now_ns)
        routed.at[which] = server
        self._servers.give(server, spec, form)
        return True

    # -- ends of legs --------------------------------------------------------------------------------------------------

    def prefilled(self, index: int, now_ns: int, *, keeps_kv: bool, died: bool = False) -> bool:
        """Go on after a prefill, whose server keeps its KV, or has refused or cancelled it, or has died. Return True if
        the request ends with it, as nobody decodes it yet.
        """
        routed = self.requests.get(index)
        if routed is None or routed.at.pop(PREFILL, None) is None:
            return False
        self._waiting.pop(index, None)
        self._servers.release(routed.spec, PREFILL)
        self.prefill_next(now_ns)
        if keeps_kv:
            routed.prefilled_ns = now_ns
        elif routed.over or DECODE in routed.at or died:
            self._end(routed, BROKEN, now_ns)
        else:
            routed.fate = ENDED  # nothing was to be handed over, so that it has no row
            self._over(routed)
            return True
        if not (routed.over or DECODE in routed.at):
            self._decode(routed, now_ns)
        self._forget(routed)
        return False

    def _decode(self, routed: RoutedRequest, now_ns: int) -> None:
        """Send the leg that decodes after a prefill; without KV it computes the prompt."""
        if not self._give(routed, DECODE, DECODE if routed.handing else WHOLE, now_ns):
            self._end(routed, BROKEN, now_ns)
            self._over(routed)
            self._servers.unserved(routed.spec)

    def decoded(self, index: int, now_ns: int, *, died: bool = False) -> None:
        """Go on after the leg that answers, or the death of its server. KV that has not begun to go over is of no use
        any more.
        """
        routed = self.requests[index]
        del routed.at[DECODE]
        if not routed.begun:
            self._end(routed, BROKEN if died else ENDED, now_ns)
        self._over(routed)

    def _over(self, routed: RoutedRequest) -> None:
        """Note that a request is over, in the books of both routers, unless its prefill is still to be cancelled."""
        routed.over = True
        for which in (PREFILL, DECODE):
            if which not in routed.at:
                self._servers.release(routed.spec, which)
        self._forget(routed)

    def _forget(self, routed: RoutedRequest) -> None:
        if routed.over and not routed.handing and PREFILL not in routed.at:
            self.requests.pop(routed.spec.index, None)

    def gone(self, server: int, now_ns: int) -> None:
        """End the hand-offs of a server that goes, before the ends of its legs. Those that it was chosen for alone get
        another one when their turn comes.
        """
        self._gone.add(server)
        for routed in self.under_way:
            if routed.begun and server in (routed.source, routed.target):
                self._servers.cut(routed)
            elif server == routed.source and (PREFILL in routed.at or routed.prefilled_ns != NONE_YET):
                self._end(routed, BROKEN, now_ns)

    # -- hand-offs -----------------------------------------------------------------------------------------------------

    def ordered(self, server: int, index: int, direction: Direction, blocks: int, now_ns: int) -> None:
        """Note that a server keeps blocks for a transfer. It starts when both do; one waits for the other as long as
        its lease lasts. Unless the KV is pulled, the blocks of the server that decodes let the prefill begin.
        """
        routed, lease_s = self.requests.get(index), self._terms.lease_s if self._terms else None
        if routed is None or not routed.handing:
            self._servers.drop(server, index, direction)
            return
        routed.blocks[direction] = blocks
        if direction is IN:
            routed.taken_ns = now_ns
        if len(routed.blocks) == len((OUT, IN)):
            self._until_ns.pop(index, None)
            routed.begun, routed.bytes = True, self._servers.begin(routed)
        else:
            if lease_s is not None:
                self._until_ns[index] = now_ns + round(lease_s * NS)
            if direction is IN and not self._pulls:
                self._queue[index] = routed
                self.prefill_next(now_ns)
        self._lease()

    def _lease(self) -> None:
        self._servers.lease(next(iter(self._until_ns.values()), NEVER_NS))

    def lease_over(self, now_ns: int) -> None:
        """End the hand-offs one side of which has kept blocks for so long that the other has not."""
        for index, until_ns in list(self._until_ns.items()):
            if until_ns <= now_ns:
                self._end(self.requests[index], LEASE_OVER, now_ns)

    def transferred(self, index: int, start_ns: int, end_ns: int, *, broken: bool) -> None:
        """Note the end of a transfer that had begun, and its start if it got as far."""
        if (routed := self.requests.get(index)) is not None and routed.begun and routed.handing:
            routed.start_ns = start_ns
            self._end(routed, BROKEN if broken else FETCHED, end_ns)

    def _end(self, routed: RoutedRequest, fate: int, now_ns: int) -> None:
        """End a hand-off, if it is under way: blocks kept for it are free, and a prefill under way is cancelled."""
        index = routed.spec.index
        if not routed.handing:
            return
        routed.fate, routed.end_ns = fate, now_ns
        self._note(routed)
        self._queue.pop(index, None)
        self._waiting.pop(index, None)
        for direction in () if routed.begun else tuple(routed.blocks):
            self._servers.drop(routed.sides[direction], index, direction)
        if (server := routed.at.get(PREFILL)) is not None:
            self._servers.cancel(server, routed.spec)
        if self._until_ns.pop(index, None) is not None:
            self._lease()
        self._forget(routed)

    def _note(self, routed: RoutedRequest) -> None:
        times = routed.prefilled_ns, routed.taken_ns, routed.start_ns, routed.end_ns
        size = routed.blocks.get(IN, 0), routed.bytes
        self._rows.extend((routed.spec.index, *routed.sides.values(), *times, *size, routed.fate))

    def close(self) -> None:
        """Note the hand-offs that are under way when a run ends."""
        for routed in self.under_way:
            del self.requests[routed.spec.index]
            self._note(routed)
