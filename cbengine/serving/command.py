"""The command `cbengine serve`: an engine behind the endpoint, until a signal."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from cbengine import build
from cbengine.build import Setup
from cbengine.errors import UsageError
from cbengine.model import weights
from cbengine.serving import server
from cbengine.serving.backend import EngineBackend
from cbsim.http import listen
from cbsim.http.listen import ServeOptions
from cbsim.http.tokenizer import open_tokenizer
from cbsim.scenario.scenario import Scenario


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of an engine's session besides scenario and device. The default name is that of the weights' folder,
    or the scenario's. The default tokenizer is that of the weights' folder, then ours.
    """

    command: str
    name: str | None = None
    tokenizer: Path | None = None


def serve(scenario: Scenario, setup: Setup, engine: EngineOptions, options: ServeOptions) -> int:
    """Serve clients and return the exit status. Raises the errors of building an engine, EndpointError, RunError."""
    listen.check_host(options.host, options.settings)  # before a model is loaded
    backend = opened(scenario, setup, engine)
    try:
        return asyncio.run(listen.serve(backend, options))
    finally:
        backend.release()


def opened(scenario: Scenario, setup: Setup, engine: EngineOptions) -> EngineBackend:
    """Return a session without requests so far, of a scenario with one loop. Random weights have the vocabulary of the
    tokenizer. Raises the errors of building an engine, EndpointError, UsageError.
    """
    server.check(scenario, setup)
    tokenizer = open_tokenizer(engine.tokenizer or setup.weights)
    if not setup.weights:
        model = scenario.model.model_copy(update={"vocab": tokenizer.vocab})
        scenario = scenario.model_copy(update={"model": model})
    ready = build.adapted(scenario, setup)
    if tokenizer.vocab > ready.model.vocab:
        sizes = f"the tokenizer has {tokenizer.vocab} tokens, the model {ready.model.vocab}"
        raise UsageError(f"{engine.tokenizer or setup.weights}: {sizes}: they do not belong together")
    ends = frozenset(build.architecture_of(ready, setup).end_tokens)
    if setup.weights:
        ends |= weights.end_tokens(setup.weights)
    name = engine.name or (setup.weights.resolve().name if setup.weights else scenario.name)
    return EngineBackend(ready, ready.loop.mode, setup, tokenizer, ends, model=name, command=engine.command)
