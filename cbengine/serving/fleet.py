"""A fleet on the engine: a process for each server, and in this one their client and their routers.

What becomes of the legs of a request say the rules of hand-offs (cbsim.runs.hand_offs), which the simulator has, too;
here their effects are messages to the servers. What one that decodes had when it died has failed: it is not sent again.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Mapping, Sequence
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
from cbsim.policy.request import DECODE, PREFILL, Finish, RequestSpec, leg
from cbsim.policy.transfers import Direction
from cbsim.record.columns import NS
from cbsim.record.record import FAILED, HANDED_OFF, Records
from cbsim.runs.hand_offs import HandOffs, RoutedRequest
from cbsim.runs.inbox import NEVER_NS, Arrivals
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
STATUS = {ABORT: Finish.ABORTED.value, ERROR: FAILED, DIED: FAILED}  # of ends that are called otherwise in tables


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
        self._slots, self._books = {DECODE: list(range(fleet.count))}, dict[int, Books]()  # by leg
        routers = {DECODE: fleet.router}
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
        self._requests, self._left_ns = dict[int, Text](), dict[int, int]()  # not ended; when their clients left
        self._rules, self._lease_ns = HandOffs(self, fleet.hand_off, self.record.hand_offs), NEVER_NS
        self._block_bytes = scenario.servers[0].block_size * scenario.model.kv_bytes_per_token
        self._left, self._closed = len(workload.open), False  # requests that have not arrived, or not ended
        self._due, self._cancels = Arrivals(workload.arriving()), workload.cancels[::-1]

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
        """End all servers, and leave in the record what they recorded, and what became of hand-offs."""
        self._rules.close()
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
        while self._due.due_ns <= now_ns:
            spec = self._due.take()
            self._arrived(Text(spec, self._prompts.of(spec), self._setup.sampling_of(spec), self._stops))
        while self._cancels and self._cancels[-1][0] <= now_ns:
            at_ns, spec = self._cancels.pop()
            self._leave(spec.index, at_ns)
        if self._lease_ns <= now_ns:
            self._rules.lease_over(now_ns)
        happened, self._happened = self._happened, Happened(now_ns, [], [], [])
        if happened.tokens or happened.ended:
            self._report(happened._replace(at_ns=now_ns))
        self._watch()

    def _receive(self) -> None:
        """Wait until a server reports anything, or something is due; take what they report."""
        due_ns = min([self._due.due_ns, *(at_ns for at_ns, _ in self._cancels[-1:])])
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
        return any(at in routed.at.values() for routed in self._rules.requests.values())

    # -- what servers say ----------------------------------------------------------------------------------------------

    def _news(self, at: int, now_ns: int, load: Any, steps: int, tokens: Any, ended: Any) -> None:
        """Take the report of a server's step: its load, and by request tokens and ends."""
        self._loaded(at, now_ns, (load.waiting, load.running, load.kv_usage))
        shown = self._servers[at].record
        shown.step_count = steps
        for index, ids in tokens:
            if (sequence := self._requests.get(index)) and (which := self._leg_at(at, index)) is not None:
                if not sequence.outputs:
                    self._books[which].news(now_ns, index, ended=False)
                if which == DECODE:
                    sequence.outputs += ids
                    shown.sampled_tokens += len(ids)
                    self._happened.tokens.append((sequence.spec, ids))
        for index, finish, reason in ended:
            if (which := self._leg_at(at, index)) is not None:
                self._leg_over(index, which, finish, reason, now_ns)

    def _leg_at(self, at: int, index: int) -> int | None:
        """Return the leg of a request that a server has, if any."""
        routed = self._rules.requests.get(index)
        return next((which for which, server in routed.at.items() if server == at), None) if routed else None

    def _loaded(self, at: int, now_ns: int, load: Sequence[float] | None) -> None:
        for which, slots in self._slots.items():
            if at in slots:
                self._books[which].scraped(now_ns, slots.index(at), load)

    def _over(self, at: int, *_: Any) -> None:
        """Say what becomes of the requests of a server that has failed."""
        server, now_ns = self._servers[at], self._elapsed()
        if not server.problem:
            return
        self._loaded(at, now_ns, None)
        self._rules.gone(at, now_ns)
        for index in list(self._rules.requests):
            if (which := self._leg_at(at, index)) is not None:
                self._leg_over(index, which, DIED, f"{server.name} {server.problem}", now_ns)

    def _leg_over(self, index: int, which: int, finish: str, reason: str, now_ns: int) -> None:
        """Note the end of a leg, and of its request if nothing follows."""
        routed, over = self._rules.requests[index], True
        alone = which == DECODE or not (routed.over or DECODE in routed.at or finish not in (ABORT, ERROR))
        status = STATUS.get(finish, finish) if alone else HANDED_OFF
        server = self._servers[routed.at[which]]
        server.note(leg(routed.spec, which), now_ns, status, reason, died=finish == DIED)
        if which == PREFILL:
            keeps_kv = finish not in (ABORT, ERROR, DIED)
            over = self._rules.prefilled(index, now_ns, keeps_kv=keeps_kv, died=finish == DIED)
        else:
            self._rules.decoded(index, now_ns, died=finish == DIED)
        if over:
            self._finish(index, finish, reason)

    def _ordered(self, at: int, index: int, direction: Direction, blocks: int) -> None:
        self._rules.ordered(at, index, direction, blocks, self._elapsed())

    def _moved(self, _: int, index: int, start_ns: int, end_ns: int, broken: bool) -> None:
        self._rules.transferred(index, start_ns - self.start_ns, end_ns - self.start_ns, broken=broken)

    # -- what the rules ask for (cbsim.runs.hand_offs.Servers) ---------------------------------------------------------

    def route(self, spec: RequestSpec, which: int) -> int | None:
        books = self._books[which]
        books.came(spec)
        if (slot := books.choose(self.now_ns, spec.index)) is None:
            books.end(self.now_ns, spec.index, "refused")
            return None
        return self._slots[which][slot]

    def prefilling(self) -> list[int]:
        return [view.in_flight for view in self._books[PREFILL].views if view.up]

    def cached_tokens(self, server: int, spec: RequestSpec) -> int:
        return self._books[DECODE].views[self._slots[DECODE].index(server)].cached_tokens(spec)

    def give(self, server: int, spec: RequestSpec, form: int) -> None:
        to, left_ns = self._servers[server], self._left_ns.get(spec.index)
        further = form == PREFILL and DECODE in self._rules.requests[spec.index].at
        to.send(("came", *member.crossing(self._requests[spec.index], leg(spec, form), further=further)))
        if to.silent_s > 1 and not self._busy(server):
            to.heard_s = time.monotonic()  # until now it had nothing to say
        if left_ns is not None:
            to.send(("left", spec.index, left_ns))

    def cancel(self, server: int, spec: RequestSpec) -> None:
        self._servers[server].send(("left", spec.index, self.now_ns))

    def release(self, spec: RequestSpec, which: int) -> None:
        books = self._books.get(which)
        if books is not None and spec.index in books.open:
            books.news(self.now_ns, spec.index, ended=True)
            books.end(self.now_ns, spec.index, "finished")

    def begin(self, routed: RoutedRequest) -> int:
        (_, source), (_, target) = routed.sides.items()
        blocks = routed.blocks[Direction.IN]
        for (direction, server), peer in zip(routed.sides.items(), (target, source), strict=True):
            self._servers[server].send(("begin", routed.spec.index, direction, peer, blocks))
        return blocks * self._block_bytes

    def cut(self, routed: RoutedRequest) -> None:
        """Note the end of a transfer to a server that has died; of one from there the server that decodes reports."""
        if self._servers[routed.target].problem:
            self._rules.transferred(routed.spec.index, self.now_ns, self.now_ns, broken=True)

    def drop(self, server: int, index: int, direction: Direction) -> None:
        self._servers[server].send(("drop", index, direction))

    def lease(self, until_ns: int) -> None:
        self._lease_ns = until_ns

    def unserved(self, spec: RequestSpec) -> None:
        dead = next(server for server in reversed(self._servers) if server.problem)
        dead.note(spec, self.now_ns, FAILED, "no server is left", died=True)
        self._finish(spec.index, DIED, "no server is left")

    # -- requests ------------------------------------------------------------------------------------------------------

    def _arrived(self, sequence: Text) -> None:
        """Send a request on its way."""
        self._requests[sequence.spec.index] = sequence
        if not self._rules.arrived(sequence.spec, self.now_ns):
            self.unserved(sequence.spec)

    def _leave(self, index: int, at_ns: int) -> None:
        """Cancel a request that has arrived and has not ended, at all servers that have a leg of it."""
        if index in self._requests:
            self._left_ns[index] = at_ns
            for server in self._rules.requests[index].at.values():
                self._servers[server].send(("left", index, at_ns))

    def _finish(self, index: int, finish: str, reason: str) -> None:
        """Go on behind the end of a request."""
        sequence, spec = self._requests[index], self._requests.pop(index).spec
        self._left_ns.pop(index, None)
        if self._setup.saves_tokens:
            self._texts.append(sequence)
        self._happened.ended.append(Ended(spec, ERROR if finish == DIED else finish, reason or None))
        self._prompts.answered(spec, sequence.outputs)
        self.record.records[0].finished_count += 1  # type: ignore[misc]
        following = self._client.on_finish(spec, self.now_ns)
        self._left += len(following) - 1
        for follower in following:
            self._due.put(follower)


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
