"""`cbengine serve`: the engine, in a thread, as a backend of the front end; tokens and ends come back once a step."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cbengine import build
from cbengine.build import Setup
from cbengine.errors import UsageError
from cbengine.model import weights
from cbengine.sampling import MASK, Sampling, request_seed
from cbengine.sequence import Ids, Sequence
from cbengine.serving.fleet import Fleet, PostWithPipe, adapted
from cbengine.serving.reporter import EngineServer, Happened, Left, Post, Reporter
from cbsim.errors import DeadlockError, PolicyError, ServerError
from cbsim.http import listen
from cbsim.http.backend import ERROR, NS, Backend, Generation, Load, Stream
from cbsim.http.listen import ServeOptions
from cbsim.http.tokenizer import Tokenizer, open_tokenizer
from cbsim.policy.request import RequestSpec
from cbsim.runs.running import Maker
from cbsim.runs.served import Contents, session_of
from cbsim.scenario.scenario import Scenario

SWITCH_S = 0.0002  # the longest that the event loop may keep the engine's thread from going on after a step


class EngineBackend(Backend):
    """A session of the engine (cbsim.http.backend.Backend). `ends` are the model's end tokens. Raises the errors of
    building an engine. A stop token among the first `min_tokens` tokens is an ordinary token: the engine masks no
    logits. A request's seed fixes its draws: they are the same in any session.
    """

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
        super().__init__(model or scenario.model.name, tokenizer, scenario, loop)
        self._ends, self._vocab, self._seed = ends | tokenizer.ends, scenario.model.vocab, scenario.seed
        report = partial(self._call, self._heard)
        if scenario.fleet is None:
            self._post = Post()
            make: Maker = partial(EngineServer, setup, self._post, Reporter(self._post, report))
        else:
            self._post = post = PostWithPipe()
            make = partial(Fleet, setup, post=post, report=report)
        self.session = session_of(scenario, loop, make, command)
        assert isinstance(self.session.server, EngineServer | Fleet)
        self._server = self.session.server
        if isinstance(self._server, Fleet):
            try:
                self._server.start()
            except BaseException:
                self._server.close()
                raise
        self.contents = Contents(self._server.load.block_size, self._server.load.num_blocks)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over = asyncio.Event()

    def _stamp(self) -> int:
        """Return the nanoseconds since `run` began."""
        start_ns = self._server.start_ns
        return 0 if start_ns is None else self._server.clock.now_ns() - start_ns

    @property
    def load(self) -> Load:
        """The engine's load; a request that neither runs nor has ended counts as waiting, also on its way to it."""
        load = self._server.load
        return replace(load, waiting=max(0, len(self._streams) - load.running))

    def submit(self, stream: Stream) -> None:
        at_ns = self._stamp()
        stream.arrive(at_ns / NS)
        try:
            self._post.send(self._sequence(stream, at_ns))
        except UsageError as error:
            stream.end(ERROR, at_ns / NS, str(error))

    def _withdraw(self, spec: RequestSpec, at_ns: int) -> None:
        self._post.send(Left(spec, at_ns))

    def _sequence(self, stream: Stream, at_ns: int) -> Sequence:
        """Return a request in the engine's form. Raises UsageError."""
        if self.dead or self._post.closed:
            raise UsageError(self.dead or "the server takes no more requests")
        generation = stream.generation
        prompt = self._prompt(generation)
        seed = None if generation.seed is None else request_seed(generation.seed & MASK, 0)
        sampling = Sampling(generation.temperature, max(0, generation.top_k), generation.top_p, self._seed)
        stops = frozenset(generation.stop_token_ids)
        if not generation.ignore_eos:
            stops |= self._ends
        spec = self._enter(stream, at_ns, generation.max_tokens)
        return Sequence(spec, prompt, sampling, stops, generation.min_tokens, seed)

    def _prompt(self, generation: Generation) -> Ids:
        """Return its checked tokens. Raises UsageError."""
        ids, tokens, most = generation.prompt, generation.max_tokens, self.max_model_len
        if not ids:
            raise UsageError("prompt: has no token, expected at least one")
        if not 0 <= min(ids) <= max(ids) < self._vocab:
            raise UsageError(f"prompt: holds a token that is not in 0 .. {self._vocab - 1}")
        if tokens < 1 or len(ids) + tokens > most:
            requested = f"{len(ids)} tokens of prompt and {tokens} of answer"
            raise UsageError(f"max_tokens: {requested} are asked for, expected at least 1 of answer and {most} in all")
        return np.array(ids, dtype=np.int32)

    async def run(self) -> None:
        """Run the engine's thread to its end; when cancelled, end it after the step under way, as a failed server."""
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
        """Free the device's memory, whether the engine has run or not."""
        self._server.close()

    def _serve(self) -> None:
        """Run the engine; the body of its thread."""
        problem: str | None = None
        try:
            self._server.run(lambda _: None)
        except (DeadlockError, ServerError, PolicyError) as stop:
            problem = str(stop)
        except Exception as defect:  # any error ends the streams
            traceback.print_exc(file=sys.stderr)
            problem = f"{type(defect).__name__}: {defect}"
        self._call(self._ended, problem)

    def _call(self, callback: Callable[[Any], None], value: Any) -> None:
        """Call back in the event loop, unless it has been closed."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, value)

    def _ended(self, problem: str | None) -> None:
        """End all streams in the event loop as the engine ended; `problem` is the cause unless it ended in order."""
        self._fail(problem, self._stamp())
        self._over.set()

    def _heard(self, happened: Happened) -> None:
        """Pass on the reports of streams that were not cancelled, in the event loop."""
        streams, at_ns = self._streams, happened.at_ns
        for step in happened.steps:
            for spec, cached_tokens in step.admitted:
                if spec in streams and streams[spec].scheduled_s is None:
                    streams[spec].schedule(step.at_ns / NS, cached_tokens)
        for spec, ids in happened.tokens:
            if spec in streams:
                streams[spec].put(ids, at_ns / NS)
        for end in happened.ended:
            if stream := streams.get(end.spec):
                stream.preemptions = end.preemptions
                self._end(stream, end.finish, at_ns, end.error)
        for step in happened.steps:
            self.meter.stepped(step.tokens, step.preempted)


def serve(
    scenario: Scenario, setup: Setup, options: ServeOptions, line: str, name: str | None, tokenizer: Path | None
) -> int:
    """Serve what `opened` opens until a signal; return the exit status. Raises its errors, RunError."""
    listen.check_host(options.host, options.settings)  # before a model is loaded
    backend, usual_s = opened(scenario, setup, line, name, tokenizer), sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()  # what has been built stays, and need not be looked at whenever clients leave reference cycles behind
    try:
        return asyncio.run(listen.serve(backend, options))
    finally:
        sys.setswitchinterval(usual_s)
        gc.unfreeze()
        backend.release()


def opened(
    scenario: Scenario, setup: Setup, line: str, name: str | None = None, tokenizer: Path | None = None
) -> EngineBackend:
    """Return a session without requests so far, of a scenario with one loop. The default name is that of the weights'
    folder, or the scenario's; the default tokenizer that of the weights' folder, then ours. Random weights have the
    vocabulary of the tokenizer. Raises the errors of building an engine, EndpointError, UsageError.
    """
    if scenario.kind.samples(scenario.scheduler) > 1:
        raise UsageError(f"scheduler.name: got {scenario.scheduler.name}, which searches: a stream has one text")
    source = tokenizer or setup.weights
    words = open_tokenizer(source)
    if not setup.weights:
        model = scenario.model.model_copy(update={"vocab": words.vocab})
        scenario = scenario.model_copy(update={"model": model})
    ready = adapted(scenario, setup, open_ended=True)
    if words.vocab > ready.model.vocab:
        sizes = f"the tokenizer has {words.vocab} tokens, the model {ready.model.vocab}"
        raise UsageError(f"{source}: {sizes}: they do not belong together")
    ends = frozenset(build.architecture_of(ready, setup).end_tokens)
    if setup.weights:
        ends |= weights.end_tokens(setup.weights)
    name = name or (setup.weights.resolve().name if setup.weights else scenario.name)
    return EngineBackend(ready, ready.loop.mode, setup, words, ends, model=name, command=line)
