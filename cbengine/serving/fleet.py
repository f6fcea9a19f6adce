"""A fleet on the engine: a process for each server, and in this one their client and their routers.

A request of a fleet whose servers prefill or decode has two legs (`policy.request.leg`), and this process alone knows
both. A transfer begins when both servers have ordered it; if one of them never will, the other's order is dropped: its
blocks are free, or the prompt is computed where it decodes. What a server that prefills had when it died is computed
there, too; what one that decodes had has failed.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from cbengine.build import Setup, architecture_of, beams, executor_plan
from cbengine.build import adapted as alone_adapted
from cbengine.device.base import Clock
from cbengine.device.process import STEP_S
from cbengine.errors import UsageError
from cbengine.sequence import Prompts
from cbengine.sequence import Sequence as Text
from cbengine.servers import maker as alone_maker
from cbengine.servers import option_facts, texts_files
from cbengine.serving import member
from cbengine.serving.member import LOOK_S, Server, nothing
from cbengine.serving.reporter import Ended, Happened, Left, Post
from cbsim.errors import ServerError
from cbsim.http.backend import ABORT, ERROR, Load
from cbsim.policy.request import DECODE, PREFILL, WHOLE, RequestSpec, leg
from cbsim.policy.transfers import Direction
from cbsim.record.columns import NS
from cbsim.record.optional_tables import BROKEN, ENDED, FETCHED, LEASE_OVER, UNDER_WAY
from cbsim.record.record import Records
from cbsim.runs.inbox import NEVER_NS
from cbsim.runs.routing import Books, Head
from cbsim.runs.running import Maker
from cbsim.runs.running import Server as AnyServer
from cbsim.scenario import fleet as pools
from cbsim.scenario.scenario import Scenario
from cbsim.workload.requests import Workload

EARLY_NS = 1_000_000  # by which a wait ends before an arrival: the system's clock of waits is no finer
START_S = 180.0  # the longest that servers may take to load their models
SILENT_S = 60.0  # the longest that a server may be silent which has nothing left to do
DIED = "died"  # the end of a leg whose server has
OUT, IN = Direction.OUT, Direction.IN


@dataclass(eq=False, slots=True)
class RoutedRequest:
    """A request on its way: the servers that routers have chosen for its legs, and those that have one of them now."""

    sequence: Text
    chosen: dict[int, int] = field(default_factory=dict)  # by leg
    at: dict[int, int] = field(default_factory=dict)
    left_ns: int | None = None  # when its client left
    reason: str = ""  # why it failed

    def leg(self, server: int) -> int | None:
        """Return the leg that a server has, if any."""
        return next((which for which, at in self.at.items() if at == server), None)


@dataclass(eq=False, slots=True)
class HandOver:
    """The hand-over of a request: its servers, the blocks that each has ordered, 0 if it never will, and when."""

    source: int
    target: int
    ordered: dict[Direction, int] = field(default_factory=dict)
    at_ns: dict[Direction, int] = field(default_factory=dict)
    until_ns: int = NEVER_NS  # the end of the lease
    fate: int = UNDER_WAY


class PostWithPipe(Post):
    """A post whose reader waits for pipes, too: `pipe` is one that can be read when something has come."""

    def __init__(self) -> None:
        super().__init__()
        self.pipe, self._wakes = multiprocessing.Pipe(duplex=False)

    def wake(self) -> None:
        self._wakes.send_bytes(b"!")

    def take(self) -> list[Text | Left]:
        while self.pipe.poll():
            self.pipe.recv_bytes()
        return super().take()


class Fleet:
    """The servers of a scenario's fleet behind its routers, and their client (cbsim.runs.running.Server). With a `post`
    requests come by it, too, until it is closed, and each report of what a step brought them goes to `report`.
    """

    measured = True

    def __init__(
        self,
        setup: Setup,
        scenario: Scenario,
        loop: str,
        workload: Workload,
        post: PostWithPipe | None = None,
        report: Callable[[Happened], None] = lambda _: None,
    ) -> None:
        assert loop == scenario.loop.mode
        self._post, self._report, self.clock = post, report, Clock()
        self._scenario, self._client, self._setup = scenario, workload, setup
        assert scenario.fleet is not None
        self._fleet = fleet = scenario.fleet
        setup.requests.check(workload.specs())
        for each in {id(server): server for server in scenario.servers}.values():
            executor_plan(each, each.loop.mode, workload.specs(), setup).check()
        self._slots, self._books = {WHOLE: list(range(fleet.count))}, dict[int, Books]()
        routers = {WHOLE: fleet.router}
        if fleet.hand_off:
            self._slots = {PREFILL: fleet.slots("prefill"), DECODE: fleet.slots("decode")}
            routers = {PREFILL: fleet.router, DECODE: fleet.hand_off.router}
        for which, slots in self._slots.items():  # which a router numbers by itself
            alone = {"router": routers[which], "pools": (pools.Pool(count=len(slots), server={}),), "hand_off": None}
            head = Head(fleet=fleet.model_copy(update=alone), seed=scenario.seed, servers=list(map(str, slots)))
            self._books[which] = Books(head)
        self._servers = list[Server]()
        self.record = Records([nothing(0) for _ in range(fleet.count)])
        device = f"{setup.device}, a process for each of {fleet.count} servers"
        self.facts: dict[str, Any] = {"engine": "cbengine", "device": device, "dtype": scenario.model.dtype}
        self.facts |= {"weights": str(setup.weights or "random"), **option_facts(setup)}
        self.now_ns = self.start_ns = 0
        self._happened = Happened(0, [], [], [])
        architecture = architecture_of(scenario.servers[0], setup)
        self._prompts = Prompts(scenario.seed, architecture.vocab)
        self._stops = frozenset(architecture.end_tokens if setup.end_tokens else ())
        self._texts = list[Text]()
        self._requests = dict[int, RoutedRequest]()
        self._hand_overs, self._crossing = dict[int, HandOver](), dict[int, HandOver]()  # before, and while KV crosses
        self._block_bytes = scenario.servers[0].block_size * scenario.model.kv_bytes_per_token
        self._left, self._closed = len(workload.open), False  # requests that have not arrived, or not ended
        self._coming, self._due = workload.arriving(), list[tuple[int, int, RequestSpec]]()
        self._cancels = workload.cancels[::-1]
        self._come_up()

    @property
    def load(self) -> Load:
        """The load of all servers together."""
        views = [view for books in self._books.values() for view in books.views]
        options = self._scenario.servers[0].options(self._scenario.loop.mode)
        sums = sum(view.running for view in views), sum(view.waiting for view in views)
        return Load(*sums, sum(view.kv_use for view in views) / len(views), options.block_size, options.num_blocks)

    def files(self) -> Mapping[str, bytes]:
        return texts_files(self._setup, self._texts)

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self, on_step: Callable[[int], None]) -> None:
        """Serve to the end of the workload. Raises ServerError if a server has failed, once the others have ended."""
        try:
            if not self._servers:
                self.start(on_step)
            self.start_ns = self.start_ns or time.perf_counter_ns()
            for server in self._servers:
                server.send(self.start_ns)
            while not all(server.over for server in self._servers):
                self._turn()
                on_step(self._elapsed())
        finally:
            self.close()
        for server in self._servers:
            if server.problem:
                raise ServerError(f"{server.name} {server.problem}")

    def close(self) -> None:
        """End all servers, and leave in the record what they recorded, and what became of hand-overs."""
        for index, hand_over in {**self._hand_overs, **self._crossing}.items():
            if any(hand_over.ordered.values()):
                self._hand_over(index, hand_over, UNDER_WAY)
        self._hand_overs, self._crossing = {}, {}
        for server in self._servers:
            server.end()
        self._folder.cleanup()
        self.record.records[: len(self._servers)] = [server.record for server in self._servers]
        self.facts["server_facts"] = [server.facts for server in self._servers]

    def start(self, on_step: Callable[[int], None] = lambda _: None) -> None:
        """Start the processes and wait until all are ready. Raises ServerError."""
        self._folder = TemporaryDirectory()
        spawning = multiprocessing.get_context("spawn")
        sources, targets = (self._slots.get(which, []) for which in (PREFILL, DECODE))
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited: an interrupt is this process's
        try:
            for at, (scenario, pool) in enumerate(zip(self._scenario.servers, self._fleet.pool_names, strict=True)):
                near, far = spawning.Pipe()
                peers = {*(targets if at in sources else ()), *(sources if at in targets else ())} - {at}
                place = member.Place(at, tuple(sorted(peers)), Path(self._folder.name))
                process = spawning.Process(target=member.run, args=(far, scenario, self._setup, place))
                process.start()
                far.close()
                self._servers.append(Server(f"server {at} ({pool})", near, process))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        until, pipes = time.monotonic() + START_S, {server.pipe: server for server in self._servers}
        while waiting := [server for server in self._servers if not server.ready]:
            for pipe in wait([server.pipe for server in waiting], LOOK_S):
                server = pipes[cast("Connection", pipe)]
                kind, *values = server.receive()
                if kind != "ready":
                    raise ServerError(f"{server.name} {server.problem}")
                server.ready, server.record, server.facts = True, nothing(values[0]), values[1]
            on_step(0)
            if time.monotonic() > until:
                raise ServerError(f"{waiting[0].name} has not been ready for {START_S:.0f} s")
        self.record.records[:] = [server.record for server in self._servers]
        self.record.total_blocks = max(server.record.total_blocks for server in self._servers)

    def _elapsed(self) -> int:
        self.now_ns = time.perf_counter_ns() - self.start_ns
        return self.now_ns

    def _turn(self) -> None:
        """Take what servers report, and do what is due."""
        self._receive()
        now_ns = self._elapsed()
        while self._due and self._due[0][0] <= now_ns:
            spec = heappop(self._due)[2]
            if spec is self._up:
                self._come_up()
            self._arrived(Text(spec, self._prompts.of(spec), self._setup.sampling_of(spec), self._stops))
        while self._cancels and self._cancels[-1][0] <= now_ns:
            at_ns, spec = self._cancels.pop()
            self._leave(spec.index, at_ns)
        for index, hand_over in list(self._hand_overs.items()):
            if hand_over.until_ns <= now_ns and [*hand_over.ordered] == [OUT]:
                self._give_up(index, hand_over, LEASE_OVER)
        happened, self._happened = self._happened, Happened(now_ns, [], [], [])
        if happened.tokens or happened.ended:
            self._report(happened._replace(at_ns=now_ns))
        self._watch()

    def _receive(self) -> None:
        """Wait until a server reports anything, or something is due; take what they report."""
        due_ns = min([*(each[0][0] for each in (self._due, self._cancels[-1:]) if each), NEVER_NS])
        due_s = min(LOOK_S, max(0, due_ns - self._elapsed() - EARLY_NS) / NS)
        pipes = {server.pipe: at for at, server in enumerate(self._servers) if not server.over}
        news = () if self._post is None else self._take(self._post)
        for pipe in wait([*pipes, *news], due_s):
            if pipe not in pipes:
                continue
            at = pipes[pipe]
            kind, *values = self._servers[at].receive()
            getattr(self, f"_{kind}")(at, *values)

    def _take(self, post: PostWithPipe) -> Sequence[Connection]:
        """Take the requests and cancellations of a post; return what can be read when there are more. Raises
        ServerError if it was stopped.
        """
        if post.stopped:
            raise ServerError("interrupted")
        for item in post.take():
            if isinstance(item, Text):
                self._left += 1
                self._arrived(item)
            else:
                self._leave(item.spec.index, item.at_ns)
        return (post.pipe,)

    def _come_up(self) -> None:
        self._up = next(self._coming, None)
        if self._up is not None:
            heappush(self._due, (self._up.arrival_ns, self._up.index, self._up))

    def _watch(self) -> None:
        """Let the servers know when nothing arrives any more, and kill one that is silent for too long."""
        closing = not self._closed and not self._left and (self._post is None or self._post.closed)
        self._closed |= closing
        most_s = SILENT_S if self._closed else STEP_S
        for at, server in enumerate(self._servers):
            if closing:
                server.send(("close",))
            if not server.over and server.silent_s > most_s and (self._closed or self._busy(at)):
                server.process.kill()

    def _busy(self, at: int) -> bool:
        """Whether a server has a leg of any request."""
        return any(at in routed.at.values() for routed in self._requests.values())

    # -- what servers say ----------------------------------------------------------------------------------------------

    def _news(self, at: int, now_ns: int, load: Any, steps: int, tokens: Any, ended: Any) -> None:
        """Take the report of a server's step: its load, and by request tokens and ends."""
        self._loaded(at, now_ns, (load.waiting, load.running, load.kv_usage))
        shown = self._servers[at].record
        shown.step_count = steps
        for index, ids in tokens:
            if (routed := self._requests.get(index)) and (which := routed.leg(at)) is not None:
                if not routed.sequence.outputs:
                    self._books[which].news(now_ns, index, ended=False)
                if which != PREFILL:
                    routed.sequence.outputs += ids
                    shown.sampled_tokens += len(ids)
                    self._happened.tokens.append((routed.sequence.spec, ids))
        for index, finish, reason in ended:
            if (routed := self._requests.get(index)) and (which := routed.leg(at)) is not None:
                routed.reason = reason
                self._ended(routed, which, finish, now_ns)
            elif finish in (ABORT, ERROR) and index in self._hand_overs and self._hand_overs[index].source == at:
                self._order(index, OUT, 0)  # a prefill whose request had ended before

    def _loaded(self, at: int, now_ns: int, load: Sequence[float] | None) -> None:
        for which, slots in self._slots.items():
            if at in slots:
                self._books[which].scraped(now_ns, slots.index(at), load)

    def _over(self, at: int, *_: Any) -> None:
        """Say what becomes of the requests of a server that has failed."""
        server, now_ns, clock_ns = self._servers[at], self._elapsed(), time.perf_counter_ns()
        if not server.problem:
            return
        self._loaded(at, now_ns, None)
        for index in [index for index, hand_over in self._crossing.items() if hand_over.target == at]:
            self._moved(at, index, clock_ns, clock_ns, broken=True)
        for index, hand_over in list(self._hand_overs.items()):
            if hand_over.source == at:
                self._give_up(index, hand_over, BROKEN)
        for routed in list(self._requests.values()):
            if (which := routed.leg(at)) is not None:
                server.lose(leg(routed.sequence.spec, which), now_ns, further=which == PREFILL)
                routed.reason = f"{server.name} {server.problem}"
                self._ended(routed, which, DIED, now_ns)

    # -- hand-overs ----------------------------------------------------------------------------------------------------

    def _ordered(self, at: int, index: int, direction: Direction, blocks: int) -> None:
        """Note that a server has ordered its side of a hand-over; the decoding server's may let the prefill begin."""
        if (hand_over := self._hand_overs.get(index)) is None:
            self._servers[at].send(("drop", index, direction))
            return
        hand_over.at_ns[direction] = self._elapsed()
        self._order(index, direction, blocks)
        routed = self._requests.get(index)
        if direction is IN and routed and PREFILL in routed.chosen and PREFILL not in routed.at:
            self._send(routed, PREFILL, PREFILL)

    def _order(self, index: int, direction: Direction, blocks: int) -> None:
        """Note what one side of a hand-over has ordered, 0 if it never will; begin or end it when both are known."""
        if (hand_over := self._hand_overs.get(index)) is None:
            return
        hand_over.ordered.setdefault(direction, blocks)
        if len(hand_over.ordered) < len((OUT, IN)):
            return
        del self._hand_overs[index]
        out, into = hand_over.ordered[OUT], hand_over.ordered[IN]
        sides = {OUT: (hand_over.source, hand_over.target), IN: (hand_over.target, hand_over.source)}
        if out and into:
            self._crossing[index] = hand_over
        elif out or into or hand_over.fate != UNDER_WAY:
            self._hand_over(index, hand_over, ENDED if out else BROKEN)
        for side, (server, peer) in sides.items():
            if out and into:
                self._servers[server].send(("begin", index, side, peer, into))
            elif hand_over.ordered[side]:
                self._servers[server].send(("drop", index, side))

    def _give_up(self, index: int, hand_over: HandOver, fate: int) -> None:
        """Free what a server keeps for a hand-over, which will not take place."""
        if hand_over.ordered.get(OUT):
            self._servers[hand_over.source].send(("drop", index, OUT))
        hand_over.fate, hand_over.until_ns, hand_over.ordered[OUT] = fate, NEVER_NS, 0
        self._order(index, OUT, 0)

    def _moved(self, _: int, index: int, start_ns: int, end_ns: int, broken: bool) -> None:
        """Note the end of a transfer, as the server that decodes says."""
        if (hand_over := self._crossing.pop(index, None)) is not None:
            times = start_ns - self.start_ns, end_ns - self.start_ns
            self._hand_over(index, hand_over, BROKEN if broken else FETCHED, *times)

    def _hand_over(self, index: int, hand_over: HandOver, fate: int, start_ns: int = -1, end_ns: int = -1) -> None:
        """Record what became of a hand-over, if that was not known before."""
        fate, blocks = fate if hand_over.fate == UNDER_WAY else hand_over.fate, hand_over.ordered.get(IN, 0)
        end_ns = self.now_ns if start_ns < 0 else end_ns
        times = hand_over.at_ns.get(OUT, -1), hand_over.at_ns.get(IN, -1), start_ns, end_ns
        row = index, hand_over.source, hand_over.target, *times, blocks, blocks * self._block_bytes, fate
        self.record.hand_offs.extend(row)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _arrived(self, sequence: Text) -> None:
        """Choose the servers of a request, and send its first leg."""
        spec = sequence.spec
        routed, hand_off = RoutedRequest(sequence), self._fleet.hand_off
        self._requests[spec.index] = routed
        if hand_off is None:
            self._send(routed, WHOLE, WHOLE)
            return
        target = self._choose(routed, DECODE)
        if target is not None:
            view = self._books[DECODE].views[self._slots[DECODE].index(target)]
            new = spec.prompt_tokens - view.cached_tokens(spec)
            source = self._choose(routed, PREFILL) if new >= hand_off.local_below_tokens else None
            if source is not None and source != target:
                self._hand_overs[spec.index] = HandOver(source, target)
                first = PREFILL if hand_off.transfer == "pull" else DECODE
                self._send(routed, first, first)
                return
            self._release(routed, PREFILL)
        self._send(routed, DECODE, WHOLE)

    def _choose(self, routed: RoutedRequest, which: int) -> int | None:
        """Let a leg's router choose; None if no server is there."""
        books, spec = self._books[which], routed.sequence.spec
        books.came(spec)
        if (slot := books.choose(self.now_ns, spec.index)) is None:
            books.end(self.now_ns, spec.index, "refused")
            return None
        routed.chosen[which] = self._slots[which][slot]
        return routed.chosen[which]

    def _release(self, routed: RoutedRequest, which: int) -> None:
        """End a leg in its router's books."""
        if routed.chosen.pop(which, None) is not None:
            self._books[which].news(self.now_ns, routed.sequence.spec.index, ended=True)
            self._books[which].end(self.now_ns, routed.sequence.spec.index, "finished")

    def _send(self, routed: RoutedRequest, which: int, form: int) -> None:
        """Send a leg to the server that was chosen, or to another one if that has died, in one of the forms of a leg.
        If no server is left a prompt is computed where it decodes, or the request fails.
        """
        sequence, at = routed.sequence, routed.chosen.get(which)
        index = sequence.spec.index
        if at is None or self._servers[at].problem:
            self._release(routed, which)
            at = self._choose(routed, which)
        if at is None and DECODE in routed.at:
            self._order(index, OUT, 0)
        elif at is None:
            dead = next(server for server in reversed(self._servers) if server.problem)
            dead.lose(sequence.spec, self.now_ns, further=False)
            routed.reason = "no server is left"
            self._order(index, IN, 0)
            self._finish(routed, DIED, self.now_ns)
        else:
            if (hand_over := self._hand_overs.get(index)) is not None:
                if which == PREFILL:
                    hand_over.source = at
                else:
                    hand_over.target = at
            further = which == PREFILL and DECODE in routed.at
            self._servers[at].send(("came", *member.crossing(sequence, leg(sequence.spec, form), further=further)))
            if self._servers[at].silent_s > 1 and not self._busy(at):
                self._servers[at].heard_s = time.monotonic()  # until now it had nothing to say
            routed.at[which] = at
            if routed.left_ns is not None:
                self._servers[at].send(("left", index, routed.left_ns))

    def _leave(self, index: int, at_ns: int) -> None:
        """Cancel a request that has arrived and has not ended, at all servers that have a leg of it."""
        if routed := self._requests.get(index):
            routed.left_ns = at_ns
            for server in routed.at.values():
                self._servers[server].send(("left", index, at_ns))

    def _ended(self, routed: RoutedRequest, which: int, finish: str, now_ns: int) -> None:
        """Note the end of a leg. The decode follows a prefill, unless it is under way."""
        del routed.at[which]
        self._release(routed, which)
        index, keeps_kv, hand_off = (
            routed.sequence.spec.index,
            finish not in (ABORT, ERROR, DIED),
            self._fleet.hand_off,
        )
        if which != PREFILL or hand_off is None:
            self._order(index, IN, 0)
            self._finish(routed, finish, now_ns)
            return
        if not keeps_kv:
            self._order(index, OUT, 0)
        elif hand_off.lease_s is not None and index in self._hand_overs:
            self._hand_overs[index].until_ns = now_ns + round(hand_off.lease_s * NS)
        if DECODE in routed.at:
            return
        if finish in (ABORT, ERROR):
            self._order(index, IN, 0)
            self._finish(routed, finish, now_ns)
        else:
            self._send(routed, DECODE, DECODE if keeps_kv else WHOLE)

    def _finish(self, routed: RoutedRequest, finish: str, now_ns: int) -> None:
        """Go on behind the end of a request. A prefill of it that is still under way is of no use."""
        sequence = routed.sequence
        spec = sequence.spec
        self._leave(spec.index, now_ns)
        for which in list(routed.chosen):
            self._release(routed, which)
        del self._requests[spec.index]
        if self._setup.saves_tokens:
            self._texts.append(sequence)
        self._happened.ended.append(Ended(spec, ERROR if finish == DIED else finish, routed.reason or None))
        self._prompts.answered(spec, sequence.outputs)
        self.record.records[0].finished_count += 1  # type: ignore[misc]
        following = self._client.on_finish(spec, now_ns)
        self._left += len(following) - 1
        for follower in following:
            heappush(self._due, (follower.arrival_ns, follower.index, follower))


# -- a fleet's scenario ------------------------------------------------------------------------------------------------


def adapted(scenario: Scenario, setup: Setup, *, open_ended: bool = False) -> Scenario:
    """Return the scenario as the device runs it, as cbengine.build.adapted does; a fleet's servers each. Raises
    ScenarioError, UsageError.
    """
    if (fleet := scenario.fleet) is None:
        return alone_adapted(scenario, setup, open_ended=open_ended)
    if setup.device == "modelled":
        raise UsageError("--device modelled: got a scenario with a fleet, whose servers have no clock in common")
    if changes := fleet.changes:
        raise UsageError(f"fleet.{changes}: must be left out: the engine's servers are there from the start to the end")
    if fleet.hand_off and fleet.hand_off.transfer == "layerwise":
        raise UsageError("fleet.hand_off.transfer: got layerwise, must be pull or push: the engine sends whole blocks")
    alone = alone_adapted(scenario.model_copy(update={"fleet": None}), setup, open_ended=open_ended)
    ready = Scenario.model_validate(alone.model_dump(mode="json") | {"fleet": fleet.model_dump(mode="json")})
    for within, server in ready.pools:
        for part, has in (
            ("speculation", server.speculation is not None),
            ("scheduler.name", beams(server) > 0 or bool(fleet.hand_off and server.kind.brings_first)),
            ("cost.tensor_parallel", server.gpus > 1),
        ):
            if has:
                raise UsageError(
                    f"{within}{part}: the engine's fleets have no speculation, searches, ranks, or tokens beside KV"
                )
        if alone_adapted(server, setup, open_ended=open_ended) != server:
            bound = "must be left out: the device decides it for all servers"
            raise UsageError(f"{within}model.dtype, {within}loop.cuda_graphs: {bound}")
    return ready


def maker(setup: Setup, profiled: int = 0) -> Maker:
    """Return the maker of a run's server, or of its fleet of servers; `profiled` steps of one server are profiled."""
    one = alone_maker(setup, profiled)

    def made(scenario: Scenario, loop: str, workload: Workload) -> AnyServer:
        if profiled and scenario.fleet is not None:
            raise UsageError("--profile: needs a scenario without a fleet: kernels of other processes are not seen")
        return one(scenario, loop, workload) if scenario.fleet is None else Fleet(setup, scenario, loop, workload)

    return made
