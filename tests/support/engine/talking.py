"""Clients of a served engine: a backend of the tests' small model, and the tokens of its streams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cbengine.build import Setup, adapted
from cbengine.serving.backend import EngineBackend
from cbsim.http.backend import Generation, Stream
from cbsim.runs import replan
from cbsim.runs.reading import Run, load
from cbsim.runs.served import SessionDirectory
from cbsim.scenario.scenario import Scenario
from support.engine.served import INLINE, VOCAB
from support.scripted import next_tokens


class Numbers:
    """A tokenizer whose tokens nobody reads: clients of these tests send and get ids."""

    vocab = VOCAB

    def __init__(self, ends: frozenset[int] = frozenset()) -> None:
        self.ends = ends


@dataclass
class Answer:
    """A stream, and the tokens that its client has read."""

    stream: Stream
    tokens: list[int] = field(default_factory=list)


class Server:
    """A session. `prompt`s are ids; a request is greedy and ends at its limit, unless `more` says otherwise."""

    def __init__(
        self, scenario: Scenario, loop: str, ends: frozenset[int] = frozenset(), setup: Setup = INLINE
    ) -> None:
        self.backend = EngineBackend(adapted(scenario, setup), loop, setup, Numbers(ends))  # type: ignore[arg-type]
        self.answers: list[Answer] = []
        self.read: Run | None = None

    @property
    def engine(self) -> Any:
        return self.backend._server.engine

    def send(self, prompt: Sequence[int], tokens: int, **more: Any) -> Answer:
        """Submit, and read nothing yet."""
        options = {"temperature": 0.0, "ignore_eos": True, **more}
        stream = Stream(Generation(f"r{len(self.answers)}", list(prompt), tokens, **options))
        self.answers.append(Answer(stream))
        self.backend.submit(stream)
        return self.answers[-1]

    async def request(
        self, prompt: Sequence[int], tokens: int, give_up_after: int | None = None, **more: Any
    ) -> Answer:
        """Read to the end, or give up once so many tokens are there."""
        answer = self.send(prompt, tokens, **more)
        while new := await next_tokens(answer.stream):
            answer.tokens += new
            if give_up_after is not None and len(answer.tokens) >= give_up_after:
                self.backend.cancel(answer.stream)
        return answer

    def talk(self, conversation: Callable[[Server], Awaitable[Any]]) -> Any:
        """What the conversation gives, once the server has drained after it."""

        async def session() -> Any:
            running = asyncio.create_task(self.backend.run())
            await asyncio.sleep(0)  # it has begun
            try:
                return await conversation(self)
            finally:
                self.backend.close()
                await running

        return asyncio.run(session())

    def written(self, folder: Path, incomplete: str | None = None) -> Path:
        """Its run directory."""
        directory = SessionDirectory(self.backend.session, self.backend.log, folder)
        directory.write({}, incomplete)
        return directory.path

    def check(self, folder: Path) -> Run:
        """The run directory as it was read: the same plans follow from it, and its rows say what the streams say."""
        path = self.written(folder)
        verdict, run = replan.rederive(path), load(path)
        assert verdict == (len(run.steps), len(run.steps), None), verdict
        rows = {row.id: row for row in run.requests}
        logged = [answer for answer in self.answers if answer.stream.generation.id in rows]
        assert len(rows) == len(logged)
        for answer in logged:
            row, stream = rows[answer.stream.generation.id], answer.stream
            delivered = sum(row.token_runs[1::2])
            if stream.finish in ("stop", "length"):
                assert row.status == stream.finish
                assert len(answer.tokens) == stream.tokens == delivered
                assert row.preemptions == stream.preemptions
            else:
                assert {"error": "refused", "abort": "aborted"}[str(stream.finish)] == row.status or (
                    stream.finish == "abort" and row.status in ("length", "stop", "refused")  # it was over by then
                )
                assert len(answer.tokens) <= delivered + 1
            assert stream.cached_tokens in (0, row.cached_tokens)
        return run
