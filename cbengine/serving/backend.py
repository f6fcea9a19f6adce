"""A real engine behind the front end: requests go to its thread by post, what became of them comes back once a step."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from dataclasses import replace
from functools import partial

import numpy as np

from cbengine.build import Setup
from cbengine.content import Ids
from cbengine.errors import UsageError
from cbengine.sampling import MASK, Sampling, request_seed
from cbengine.sequence import Sequence
from cbengine.serving import server
from cbengine.serving.post import NS, Came, Left, Post
from cbengine.serving.reporter import ERROR, Happened, Reporter
from cbengine.serving.server import EngineServer
from cbsim.errors import DeadlockError, ServerError
from cbsim.http.backend import ABORT, UNMETERED, Generation, Load, Meter, Stream
from cbsim.http.tokenizer import Tokenizer
from cbsim.policy.request import RequestSpec
from cbsim.runs.guard import PolicyError
from cbsim.runs.served import Contents, Log, session_of
from cbsim.scenario.scenario import Scenario


class EngineBackend:
    """A session of the engine (cbsim.http.backend.Backend). `ends` are the model's end tokens. Raises what making
    an engine does.

    A stop token among the first `min_tokens` tokens is a token like others: the engine masks no logits. A seed makes
    a request's draws its own: the same again in any session.
    """

    timing = None  # it keeps no deadlines

    def __init__(
        self,
        scenario: Scenario,
        loop: str,
        setup: Setup,
        tokenizer: Tokenizer,
        ends: frozenset[int] = frozenset(),
        *,
        model: str = "",
        command: str = "",
    ) -> None:
        self.model, self.tokenizer = model or scenario.model.name, tokenizer
        self.meter: Meter = UNMETERED
        self.max_model_len = server.longest(scenario, loop)
        self.dead: str | None = None
        self.log = Log()
        self._ends, self._vocab, self._seed = ends | tokenizer.ends, scenario.model.vocab, scenario.seed
        self._post = Post()
        self._reporter = Reporter(self._post, self._tell)
        self.session = session_of(scenario, loop, partial(EngineServer, setup, self._post, self._reporter), command)
        assert isinstance(self.session.server, EngineServer)
        self._server = self.session.server
        pool = self._server.engine.scheduler.pool
        self._contents = Contents(pool.block_size, pool.num_blocks)
        self._streams: dict[RequestSpec, Stream] = {}  # those that have not ended
        self._specs: dict[Stream, RequestSpec] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over = asyncio.Event()

    # -- how it stands

    @property
    def now_s(self) -> float:
        return self._now_ns / NS

    @property
    def _now_ns(self) -> int:
        """Since `run` began."""
        return 0 if self._loop is None else self._server.clock.now_ns() - self._server.start_ns

    @property
    def load(self) -> Load:
        """Whoever has not ended and does not run waits, on the way to the engine or there."""
        load = self._reporter.load
        return replace(load, waiting=max(0, len(self._streams) - load.running))

    # -- requests

    def submit(self, stream: Stream) -> None:
        at_ns = self._now_ns
        stream.arrive(at_ns / NS)
        try:
            sequence = self._sequence(stream.generation, at_ns)
        except UsageError as error:
            stream.end(ERROR, at_ns / NS, str(error))
            return
        spec = sequence.spec
        self._streams[spec], self._specs[stream] = stream, spec
        self.log.came(spec)
        self._post.send(Came(sequence))

    def _sequence(self, wanted: Generation, at_ns: int) -> Sequence:
        """A request as the engine takes it. Raises UsageError."""
        if self.dead or self._post.closed:
            raise UsageError(self.dead or "the server takes no more requests")
        prompt = self._prompt(wanted)
        seed = None if wanted.seed is None else request_seed(wanted.seed & MASK, 0)
        sampling = Sampling(wanted.temperature, max(0, wanted.top_k), wanted.top_p, self._seed)
        ids = self._contents.prefix(wanted.prompt, wanted.cache_salt)
        spec = RequestSpec(
            index=self.log.count,
            id=wanted.id,
            arrival_ns=at_ns,
            prompt_tokens=len(prompt),
            output_tokens=wanted.max_tokens,
            max_tokens=wanted.max_tokens,
            priority=wanted.priority,
            prefix=ids,
            prefix_block_tokens=self._contents.block_tokens,
            prefix_tokens=len(ids) * self._contents.block_tokens,
        )
        stops = frozenset(wanted.stop_token_ids) if wanted.ignore_eos else self._ends.union(wanted.stop_token_ids)
        return Sequence(spec, prompt, sampling, stops, wanted.min_tokens, seed)

    def _prompt(self, wanted: Generation) -> Ids:
        """Its tokens, checked. Raises UsageError."""
        ids, most = wanted.prompt, self.max_model_len
        if not ids:
            raise UsageError("prompt: has no token, expected at least one")
        if not 0 <= min(ids) <= max(ids) < self._vocab:
            raise UsageError(f"prompt: holds a token that is not in 0 .. {self._vocab - 1}")
        if wanted.max_tokens < 1 or len(ids) + wanted.max_tokens > most:
            asked = f"{len(ids)} tokens of prompt and {wanted.max_tokens} of answer"
            raise UsageError(f"max_tokens: {asked} are asked for, expected at least 1 of answer and {most} in all")
        return np.array(ids, dtype=np.int32)

    def cancel(self, stream: Stream) -> None:
        spec = self._specs.pop(stream, None)
        if spec is not None:
            at_ns = self._now_ns
            del self._streams[spec]
            self.log.left(spec, at_ns)
            self._post.send(Left(spec, at_ns))
            stream.end(ABORT, at_ns / NS)

    def forget_prefixes(self) -> None:
        self._contents.forget()

    # -- the engine's thread

    async def run(self) -> None:
        """Cancelled, it ends the engine after the step under way, as a server that cannot go on."""
        self._loop = asyncio.get_running_loop()
        self._server.start_ns = self._server.clock.now_ns()
        thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        thread.start()
        try:
            await self._over.wait()
        finally:
            self._post.stop()
            thread.join()

    def close(self) -> None:
        self._post.close()

    def release(self) -> None:
        """Give back the device's memory, whether it has run or not."""
        self._server.engine.close()

    def _serve(self) -> None:
        """What the thread does."""
        problem: str | None = None
        try:
            self._server.run(self._reporter.on_step)
        except DeadlockError as stop:
            problem = f"stuck: {stop}"
        except (ServerError, PolicyError) as stop:
            problem = str(stop)
        except Exception as defect:  # clients are told, whatever it is
            traceback.print_exc(file=sys.stderr)
            problem = f"{type(defect).__name__}: {defect}"
        self._call(partial(self._ended, problem))

    def _tell(self, happened: Happened) -> None:
        self._call(partial(self._heard, happened))

    def _call(self, callback: partial[None]) -> None:
        """By the loop, if it still runs."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    # -- called by the loop

    def _ended(self, problem: str | None) -> None:
        """The engine has; `problem` says why, if not in order."""
        self.dead, at_s = problem, self.now_s
        for stream in self._streams.values():
            stream.end(ERROR, at_s, problem)
        self._streams, self._specs = {}, {}
        self._over.set()

    def _heard(self, happened: Happened) -> None:
        """Streams get what is theirs. Nobody tells those that were given up."""
        streams, at_s = self._streams, happened.at_ns / NS
        for step in happened.steps:
            for spec, cached_tokens in step.admitted:
                if spec in streams and streams[spec].scheduled_s is None:
                    streams[spec].schedule(step.at_ns / NS, cached_tokens)
        for spec, ids in happened.tokens:
            if spec in streams:
                streams[spec].put(ids, at_s)
        for end in happened.ended:
            if stream := streams.pop(end.spec, None):
                del self._specs[stream]
                stream.preemptions = end.preemptions
                stream.end(end.finish, at_s, end.error)
        for step in happened.steps:
            self.meter.stepped(step.tokens, step.preempted)
