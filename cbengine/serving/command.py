"""`cbengine serve`: a real engine behind the endpoint, until a signal."""

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
from cbsim.http import command
from cbsim.http.command import ServeOptions
from cbsim.http.listen import check_host
from cbsim.http.tokenizer import Tokenizer, open_tokenizer
from cbsim.scenario.scenario import Scenario


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine's session is told besides scenario and device. Without a name clients ask for the model's folder,
    or the scenario's name; the tokenizer is that of its folder, then that of the model's, then ours.
    """

    command: str
    name: str | None = None
    tokenizer: Path | None = None


def serve(scenario: Scenario, setup: Setup, told: EngineOptions, options: ServeOptions) -> int:
    """Serve clients; the exit status. Raises what making an engine does, EndpointError, RunError."""
    check_host(options.host, options.settings)  # before a model is loaded
    backend = opened(scenario, setup, told)
    try:
        return asyncio.run(command.serve(backend, backend.session, backend.log, options))
    finally:
        backend.release()


def opened(scenario: Scenario, setup: Setup, told: EngineOptions) -> EngineBackend:
    """A session that nobody has come to yet, of a scenario with one loop. Random weights have the vocabulary of the
    tokenizer. Raises what making an engine does, EndpointError, UsageError.
    """
    server.check(scenario, setup)
    tokenizer = open_tokenizer(told.tokenizer or setup.weights)
    ready = build.adapted(scenario if setup.weights else _worded(scenario, tokenizer), setup)
    if tokenizer.vocab > ready.model.vocab:
        text_of = f"{told.tokenizer or setup.weights}: the tokenizer has {tokenizer.vocab} tokens"
        raise UsageError(f"{text_of}, the model {ready.model.vocab}: they do not belong together")
    ends = frozenset(build.architecture_of(ready, setup).end_tokens)
    if setup.weights:
        ends |= weights.end_tokens(setup.weights)
    name = told.name or (setup.weights.resolve().name if setup.weights else scenario.name)
    return EngineBackend(ready, ready.loop.mode, setup, tokenizer, ends, model=name, command=told.command)


def _worded(scenario: Scenario, tokenizer: Tokenizer) -> Scenario:
    shape = scenario.model.model_copy(update={"vocab": tokenizer.vocab})
    return scenario.model_copy(update={"model": shape})
