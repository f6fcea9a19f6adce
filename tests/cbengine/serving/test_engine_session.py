"""A served session is a run: whatever clients do, its plans follow from its run directory, and nothing is left."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="folders are written, and texts read, by transformers")
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.engine.served import LOOPS, SCHEDULERS, VOCAB, least_blocks, server
from support.engine.served import spec as a_spec
from support.engine.talking import Server

FAMILIES = [[(11 * i + family) % VOCAB for i in range(24)] for family in range(3)]


class Turn(NamedTuple):
    """A request of a client: its prompt, its limit, when its client leaves (tokens), and what else it asks for."""

    prompt: list[int]
    tokens: int
    give_up_after: int | None
    more: dict[str, Any]


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    head = draw(st.sampled_from(FAMILIES))[: draw(st.sampled_from((24, 16, 8, 3)))]
    tail = draw(st.lists(st.integers(0, VOCAB - 1), max_size=6))
    more: dict[str, Any] = {"priority": draw(st.integers(0, 2)), "temperature": draw(st.sampled_from((0.0, 1.0)))}
    if draw(st.booleans()):
        more["stop_token_ids"] = tuple(range(draw(st.sampled_from((20, 90)))))
        more["min_tokens"] = draw(st.integers(0, 3))
    if draw(st.sampled_from((False, False, True))):
        more["cache_salt"] = "own"
    give_up_after = draw(st.sampled_from((None, None, 0, 1, 5)))
    return Turn(head + tail, draw(st.integers(1, 16)), give_up_after, more)


async def client(server: Server, turns: list[Turn]) -> None:
    """One request after the other; who leaves with no token leaves at once."""
    for turn in turns:
        if turn.give_up_after == 0:
            server.backend.cancel(server.send(turn.prompt, turn.tokens, **turn.more).stream)
        else:
            await server.request(turn.prompt, turn.tokens, turn.give_up_after, **turn.more)


def check_session(scheduler: str, loop: str, clients: list[list[Turn]], blocks: int, too_long: bool) -> None:
    scenario = server(scheduler, 4, blocks, 64, 3, sharing=True)

    async def all_of_them(served: Server) -> None:
        await asyncio.gather(*(client(served, turns) for turns in clients))
        if too_long:
            await served.request([1], served.backend.max_model_len - 1)

    served = Server(scenario, loop)
    served.talk(all_of_them)
    assert served.backend.dead is None
    with TemporaryDirectory() as folder:
        served.check(Path(folder))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("scheduler", ["vllm", "sglang"])
@settings(max_examples=6, phases=[Phase.generate])  # threads: a failure need not come again
@given(clients=st.lists(st.lists(turns(), max_size=3), min_size=1, max_size=5), spare=st.sampled_from((0, 3, 60)))
def test_plans_follow_from_a_sessions_directory(
    scheduler: str, loop: str, clients: list[list[Turn]], spare: int
) -> None:
    """Clients share content, leave, ask for too much; some caches are small enough to preempt."""
    least = least_blocks(scheduler, 4, [a_spec(0, 30, 16)])
    check_session(scheduler, loop, clients, least + spare, too_long=True)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_under_every_scheduler(scheduler: str, loop: str) -> None:
    clients = [
        [Turn([*family[:20], i], 9, after, {}) for i, after in enumerate((None, 2, None))] for family in FAMILIES
    ]
    check_session(scheduler, loop, clients, 60, too_long=False)


def test_content_is_found_again_unless_it_is_salted_or_forgotten(tmp_path: Path) -> None:
    """Blocks of the prompt that somebody has sent before; the last token is always computed."""

    async def again(served: Server) -> list[int]:
        options: list[dict[str, Any]] = [{}, {}, {"cache_salt": "a"}, {"cache_salt": "a"}]
        answers = [await served.request(FAMILIES[0], 2, **more) for more in options]
        served.backend.forget_prefixes()
        answers.append(await served.request(FAMILIES[0], 2))
        return [each.stream.cached_tokens for each in answers]

    served = Server(server("vllm", 4, 60, 64, 3, sharing=True), "async")
    assert served.talk(again) == [0, 20, 0, 20, 0]
    assert [row.cached_tokens for row in served.check(tmp_path).requests] == [0, 20, 0, 20, 0]
