"""What clients of a real engine get: the model's tokens, whoever else is there, until an end that is theirs."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="folders are written, and texts read, by transformers")
pytest.importorskip("uvicorn", reason="clients are served")

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.engine.served import (
    DRAFTERS,
    INLINE,
    LOOPS,
    SCHEDULERS,
    VOCAB,
    asked,
    check_text,
    least_blocks,
    server,
    speculating,
)
from support.engine.served import spec as a_spec
from support.engine.talking import Answer, Server
from support.scripted import next_tokens

from cbengine.device.base import DeviceError
from cbengine.errors import UsageError
from cbengine.serving import backend
from cbengine.serving.reporter import Left, Load, Post, Reporter, WokenClock
from cbsim.http.backend import Meter, Stream
from cbsim.http.settings import Settings
from cbsim.record.tables import requests_of
from cbsim.runs.inbox import NEVER_NS

SHARED = [(7 * i + 3) % VOCAB for i in range(12)]
PROMPTS = [[*SHARED[:8], i, i + 1, 5 * i % VOCAB, 2, 9] for i in range(4)] + [SHARED, [17]]


def sizes(scheduler: str = "vllm", block_size: int = 4, blocks: int = 60, budget: int = 64, slots: int = 4) -> Any:
    return server(scheduler, block_size, blocks, budget, slots, sharing=True)


def text_of(answer: Answer) -> Any:
    """As `check_text` takes one: what the model says after the prompt alone, greedily."""
    prompt = np.array(answer.stream.generation.prompt)
    return SimpleNamespace(prompt=prompt, outputs=answer.tokens, spec=a_spec(0, len(prompt), 1))


async def everybody(server: Server) -> list[Answer]:
    return await asyncio.gather(*(server.request(prompt, 12) for prompt in PROMPTS))


# -- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_requests_at_a_time_say_what_each_says_alone(scheduler: str, loop: str, tmp_path: Path) -> None:
    """Under every scheduler, with prompts that share content: the tokens are those of transformers' `generate`, also
    where one leaves; and the plans follow from the directory.
    """

    async def with_one_who_leaves(server: Server) -> list[Answer]:
        return (await asyncio.gather(everybody(server), server.request(SHARED, 9, give_up_after=2)))[0]

    served = Server(sizes(scheduler), loop)
    for answer in served.talk(with_one_who_leaves):
        assert (answer.stream.finish, len(answer.tokens)) == ("length", 12)
        check_text(text_of(answer))
    served.check(tmp_path)


def test_a_seed_makes_a_request_the_same_again() -> None:
    """In another session, in another place of it; without a seed each draws of its own."""

    async def twice(server: Server) -> list[Answer]:
        return [await server.request(PROMPTS[0], 12, temperature=1.0, seed=seed) for seed in (None, 5, -3, 5, None)]

    async def late(server: Server) -> Answer:
        await server.request(PROMPTS[1], 3)
        return await server.request(PROMPTS[0], 12, temperature=1.0, seed=5)

    none, first, minus, again, other = (answer.tokens for answer in Server(sizes(), "async").talk(twice))
    assert first == again == Server(sizes(), "sync").talk(late).tokens
    assert len({tuple(tokens) for tokens in (none, first, minus, other)}) == 4


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_speculation_changes_no_text(drafter: str, loop: str, tmp_path: Path) -> None:
    """Greedy texts, sampled ones, those that end at a stop token; and the plans follow from the directory."""
    ways: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 5}, {"stop_token_ids": (3, 11, 42, 77, 101)}]

    async def several(server: Server) -> list[list[int]]:
        asked = [server.request(prompt, 15, **way) for prompt in PROMPTS for way in ways]
        leaves = server.request(SHARED, 15, give_up_after=2)
        return [answer.tokens for answer in (await asyncio.gather(leaves, *asked))[1:]]

    served = Server(speculating(sizes(), drafter), loop)
    assert served.talk(several) == Server(sizes(), loop).talk(several)
    assert served.check(tmp_path).summary["drafts"]["accepted_tokens"] > 0


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
def test_a_stop_token_ends_a_text_that_has_its_least_tokens(loop: str) -> None:
    """The token itself is told and nothing behind it; among the first `min_tokens` it is a token like others."""

    async def ends(server: Server) -> tuple[Answer, list[tuple[int, Answer]]]:
        whole = await server.request(PROMPTS[0], 12)
        end = whole.tokens[5]
        options: list[dict[str, Any]] = [{"stop_token_ids": (end,)}, {"stop_token_ids": (end,), "min_tokens": 6}]
        return whole, [(end, await server.request(PROMPTS[0], 12, **more)) for more in options]

    whole, twice_more = Server(sizes(), loop).talk(ends)
    for least, (end, answer) in zip((0, 6), twice_more, strict=True):
        at = next((i for i, token in enumerate(whole.tokens) if token == end and i >= least), None)
        expected = (whole.tokens, "length") if at is None else (whole.tokens[: at + 1], "stop")
        assert (answer.tokens, answer.stream.finish) == expected
    assert twice_more[0][1].stream.finish == "stop"


def test_the_models_end_is_an_end_unless_it_is_ignored() -> None:
    whole = Server(sizes(), "async").talk(everybody)[0].tokens
    ends = frozenset({whole[4]})

    async def both(server: Server) -> list[Answer]:
        return [await server.request(PROMPTS[0], 12, ignore_eos=ignored) for ignored in (False, True)]

    ended, ignored = Server(sizes(), "async", ends).talk(both)
    assert ended.tokens == whole[: whole.index(whole[4]) + 1]
    assert (ended.stream.finish, ignored.stream.finish, ignored.tokens) == ("stop", "length", whole)


@pytest.mark.parametrize("loop", LOOPS)
def test_who_leaves_makes_room(loop: str) -> None:
    """The next request needs the whole cache, and has it."""
    full = sizes(blocks=60, block_size=4)

    async def leave(server: Server) -> tuple[Answer, Answer]:
        left = await server.request([1] * 20, 200, give_up_after=3)
        return left, await server.request([2] * 212, 24)

    served = Server(full, loop)
    left, after = served.talk(leave)
    assert (left.stream.finish, after.stream.finish, len(after.tokens)) == ("abort", "length", 24)
    assert 3 <= len(left.tokens) < 200
    (row,) = [row for row in requests_of(served.engine.record) if row.id == "r0"]
    assert row.status == "aborted"
    assert served.backend.load.kv_usage == 0


def test_what_cannot_be_served_is_said_and_leaves_no_trace() -> None:
    served = Server(sizes(), "async")

    async def wrong(server: Server) -> list[str | None]:
        most = server.backend.max_model_len
        bad: list[tuple[list[int], int, dict[str, Any]]] = [
            ([], 1, {}),
            ([VOCAB], 1, {}),
            ([-1], 1, {}),
            ([1 << 40], 1, {}),
            ([1] * most, 1, {}),
            ([1], most, {}),
            ([1], 0, {}),
            ([1], 1, {"temperature": -1.0}),
            ([1], 1, {"top_p": 0.0}),
        ]
        return [(await server.request(prompt, tokens, **more)).stream.error for prompt, tokens, more in bad]

    fields = ["prompt"] * 4 + ["max_tokens"] * 3 + ["sampling.temperature", "sampling.top_p"]
    assert [str(error).partition(":")[0] for error in served.talk(wrong)] == fields
    assert not requests_of(served.engine.record)
    assert served.backend.log.content() == ""
    late = served.send([1], 1)
    assert (late.stream.finish, late.stream.error) == ("error", "the server takes no more requests")


def test_the_policys_refusal_reaches_the_client() -> None:
    """Every token of the pool would fit the model; the policy keeps a block back."""

    async def refused(server: Server) -> Answer:
        return await server.request([1] * 30, server.backend.max_model_len - 30)

    served = Server(sizes("transformers_fifo", blocks=12), "async")
    answer = served.talk(refused)
    assert (answer.stream.finish, answer.tokens) == ("error", [])
    (row,) = requests_of(served.engine.record)
    assert (row.status, row.reason) == ("refused", answer.stream.error)


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
def test_logits_that_are_no_numbers_end_their_request_alone(loop: str) -> None:
    served = Server(sizes(), loop)
    device, steps = served.engine._device, 0
    wait = device.wait

    def broken(slot: int) -> Any:
        nonlocal steps
        results, lanes = wait(slot)
        steps += 1
        if steps == 6:
            results[0] = -1
        return results, lanes

    with mock.patch.object(device, "wait", broken):
        answers = served.talk(everybody)
    failed = [each for each in answers if each.stream.finish == "error"]
    assert [each.stream.error for each in failed] == ["the logits of a token were not numbers"]
    assert all((each.stream.finish, len(each.tokens)) == ("length", 12) for each in answers if each not in failed)


def test_a_device_that_fails_ends_all_and_is_said(tmp_path: Any) -> None:
    """Streams end with the reason, whoever comes later hears it at once, and so does the run directory's reader."""
    served = Server(sizes(), "async")
    device = served.engine._device
    launch, launched = device.launch, 0

    def fail(*step: Any) -> None:
        nonlocal launched
        launched += 1
        if launched == 5:
            raise DeviceError("the worker process was killed by signal 9")
        launch(*step)

    async def until_it_fails(server: Server) -> tuple[list[Answer], Answer]:
        return await everybody(server), await server.request([1], 1)

    with mock.patch.object(device, "launch", fail):
        answers, late = served.talk(until_it_fails)
    reason = "the worker process was killed by signal 9"
    assert served.backend.dead == reason
    assert {(each.stream.finish, each.stream.error) for each in (*answers, late)} == {("error", reason)}
    path = served.written(tmp_path, served.backend.dead)
    assert (path / "INCOMPLETE").read_text() == f"{reason}\n"


async def test_a_cancelled_session_ends_after_a_step() -> None:
    """Its requests end as errors, and no thread is left."""
    served = Server(sizes(), "async")
    running = asyncio.create_task(served.backend.run())
    await asyncio.sleep(0)
    answer = served.send(PROMPTS[0], 200)
    await next_tokens(answer.stream)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await next_tokens(answer.stream) == [] or await next_tokens(answer.stream) == []
    assert (answer.stream.finish, answer.stream.error) == ("error", "interrupted")
    assert "engine" not in {thread.name for thread in threading.enumerate()}


def test_the_engine_s_thread_settles_before_it_serves() -> None:
    """The thread that runs the steps is not the one that made the device."""
    served = Server(sizes(), "async")
    device, met = served.engine._device, list[tuple[str, str]]()
    launch = device.launch
    with mock.patch.multiple(
        device,
        settle=lambda: met.append(("settle", threading.current_thread().name)),
        launch=lambda *step: (met.append(("launch", threading.current_thread().name)), launch(*step)),
        create=True,
    ):
        served.talk(everybody)
    assert met[:2] == [("settle", "engine"), ("launch", "engine")]
    assert met.count(("settle", "engine")) == 1


def test_a_session_shares_the_interpreter_in_short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """While clients are served, the engine's thread waits at most SWITCH_S for the event loop's, and garbage is looked
    for only among what has been made since. Both end with the session.
    """
    before, seen = (sys.getswitchinterval(), gc.get_freeze_count()), list[tuple[float, bool]]()

    async def listened(served: backend.EngineBackend, _: Any) -> int:
        seen.append((sys.getswitchinterval(), gc.get_freeze_count() > before[1]))
        served.close()
        return 5

    monkeypatch.setattr(backend.listen, "serve", listened)
    options = backend.ServeOptions("127.0.0.1", 0, Path("runs"), Settings())
    assert backend.serve(asked("vllm", "loop.mode=async"), INLINE, options, "serve", None, None) == 5
    assert seen == [(pytest.approx(backend.SWITCH_S), True)]
    assert (sys.getswitchinterval(), gc.get_freeze_count()) == (before[0], 0)


def test_a_search_serves_no_clients() -> None:
    with pytest.raises(UsageError, match=r"^scheduler\.name: got beam, which searches"):
        backend.opened(asked("beam"), INLINE, "serve")


# -- waiting ----------------------------------------------------------------------------------------------------------


def test_nobody_polls_while_nobody_comes() -> None:
    """Two polls a step, and one for each wait that somebody ended: the engine sleeps until its post wakes it."""
    served = Server(sizes(), "sync")
    waits: list[float | None] = []
    wait = Post.wait

    def counted(post: Post, seconds: float | None) -> None:
        waits.append(seconds)
        wait(post, seconds)

    async def pauses(server: Server) -> None:
        for _ in range(3):
            await server.request(PROMPTS[0], 4)
            for _ in range(50):
                await asyncio.sleep(0)

    with mock.patch.object(Post, "wait", counted):
        served.talk(pauses)
    record = served.engine.record
    assert set(waits) == {None}
    assert len(waits) <= 10
    assert record.polls <= 2 * record.step_count + len(waits) + 4


def test_a_letter_ends_a_wait_whenever_it_was_sent() -> None:
    """Before the wait or in it; the next wait is for another one."""
    post = Post()
    clock = WokenClock(post)
    letter = Left(a_spec(0, 1, 1), 0)
    post.send(letter)
    clock.wait_until(NEVER_NS)
    assert post.take() == [letter]
    thread = threading.Thread(target=clock.wait_until, args=(NEVER_NS,))
    thread.start()
    post.send(letter)
    thread.join(60)
    assert not thread.is_alive()
    begun = clock.now_ns()
    clock.wait_until(begun + 1_000_000)
    assert clock.now_ns() >= begun + 1_000_000


def test_the_load_counts_whoever_has_not_ended() -> None:
    """Two seats: at no moment do more run, the others wait, on the way to the engine included."""
    served = Server(sizes(slots=2), "async")
    seen: list[tuple[int, int, int]] = []

    async def crowd(server: Server) -> None:
        streams = [server.send(prompt, 12).stream for prompt in PROMPTS]
        assert (server.backend.load.running, server.backend.load.waiting) == (0, len(PROMPTS))
        for stream in streams:
            while await next_tokens(stream):
                load = server.backend.load
                seen.append((load.running, load.waiting, sum(each.finish is None for each in streams)))

    served.talk(crowd)
    assert max(running for running, _, _ in seen) == 2
    assert all(waiting == max(0, left - running) for running, waiting, left in seen)


# -- what the meter hears ---------------------------------------------------------------------------------------------


def test_the_meter_hears_every_step_and_token() -> None:
    meter = mock.Mock(spec=Meter)
    served = Server(sizes(blocks=16), "async")
    served.backend.meter = meter

    async def metered(server: Server) -> None:
        with mock.patch("support.engine.talking.Stream", lambda generation: Stream(generation, meter)):
            await everybody(server)

    served.talk(metered)
    record = served.engine.record
    assert [getattr(meter, name).call_count for name in ("scheduled", "ended")] == [6, 6]
    assert sum(call.args[1] for call in meter.emitted.call_args_list) == 72
    assert all(call.args[2] >= 0 for call in meter.emitted.call_args_list)
    assert meter.stepped.call_count == record.step_count
    preempted = sum(call.args[1] for call in meter.stepped.call_args_list)
    assert preempted == sum(row.preemptions for row in requests_of(record))


def test_a_text_is_there_as_long_as_the_scheduler_has_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang lets a cancelled request end with its next token, and may take its blocks before: it is computed again."""
    spec, dropped, news = a_spec(0, 30, 16), list[int](), list[Any]()
    engine: Any = SimpleNamespace(
        scheduler=SimpleNamespace(requests={spec: None}),
        sequences={spec: SimpleNamespace(forget=lambda: dropped.append(1))},
        record=SimpleNamespace(refusals={}, failures={}, cancels={spec: 0}, step_count=0),
        now_ns=0,
    )
    post: Any = SimpleNamespace(stopped=False, closed=False, take=list)
    inbox: Any = None  # nobody sends anything
    monkeypatch.setattr(Load, "of", lambda _: None)
    reporter = Reporter(post, news.append)
    reporter.serve(engine)
    reporter._emitted[spec] = 0
    reporter.on_finish(spec, 0)
    reporter.feed(inbox)
    assert [one.ended[0].finish for one in news] == ["abort"] and not dropped
    engine.scheduler.requests.clear()
    reporter.feed(inbox)
    assert len(news) == 1 and dropped == [1]


# -- a session is a run -----------------------------------------------------------------------------------------------


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
