"""`cbsim route`: requests forwarded to servers by a router, in virtual time; servers that die at any moment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")
httpx = pytest.importorskip("httpx", reason="needs the extra `serve`")

from hypothesis import given, settings
from hypothesis import strategies as st
from support.in_process import Transport

from cbsim.errors import RunError, ScenarioError
from cbsim.http.failures import FailingApp, Failures
from cbsim.http.metrics import VllmMeter
from cbsim.http.route import RouteApp, read_load
from cbsim.http.tokenizer import open_tokenizer
from cbsim.routers.base import Guarded
from cbsim.routers.registry import OURS
from cbsim.runs import routing
from cbsim.runs.routing import Books, head_of
from cbsim.scenario.scenario import scenario_of
from cbsim.virtual.clocks import Clock, VirtualLoop
from cbsim.virtual.server import IN_PROCESS, end
from cbsim.virtual.simulated import SimulatedBackend

TOKENIZER = open_tokenizer()
SCENARIO = {
    "question": "Who gets a request?",
    "model": "tiny",
    "hardware": "laptop-cpu",
    "workload": {"kind": "synthetic", "requests": 1, "prompt_tokens": 1, "output_tokens": 1},
    "scheduler": {"name": "vllm", "max_num_seqs": 4},
    "kv_cache": {"num_blocks": 64},
    "loop": {"mode": "async"},
    "cost": {"kind": "constant", "step_s": 0.005},
}
STEP_S = 0.005
TURN = {"role": "user", "content": "a b"}


class Killable(httpx.AsyncBaseTransport):
    """A server that can be killed: its connections break, and there are no new ones."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.killed = inner, asyncio.Event()
        self.open: list[Any] = []

    def kill(self) -> None:
        self.killed.set()
        for parts in self.open:
            parts.abort()

    async def handle_async_request(self, request: Any) -> Any:
        if self.killed.is_set():
            raise httpx.ConnectError("refused")
        killed = asyncio.ensure_future(self.killed.wait())
        answer = asyncio.ensure_future(self.inner.handle_async_request(request))
        await asyncio.wait({killed, answer}, return_when=asyncio.FIRST_COMPLETED)
        killed.cancel()
        if not answer.done():
            answer.cancel()
            raise httpx.ReadError("killed")
        response = answer.result()
        self.open.append(response.stream)
        return response


class Routed:
    """Simulated servers behind a router, all on one virtual loop."""

    def __init__(self, router: str, servers: int = 3, faults: Sequence[Failures] = (), *changes: str) -> None:
        self.urls, self.lines = [f"http://s{at}" for at in range(servers)], list[str]()
        self.head = head_of(self.urls, router, changes, 7)
        self.backends = [
            SimulatedBackend(scenario_of(SCENARIO), Clock(), TOKENIZER, "m", "test") for _ in range(servers)
        ]
        with_faults = zip_longest(self.backends, faults, fillvalue=Failures())
        doors = [FailingApp(fault, each, IN_PROCESS, VllmMeter(each)) for each, fault in with_faults]
        self.killable = [Killable(Transport(door)) for door in doors]
        self.books = Books(self.head, self.lines.append)
        http = httpx.AsyncClient(timeout=None, mounts=dict(zip(self.urls, self.killable, strict=True)))
        self.app = RouteApp(self.books, http, TOKENIZER, IN_PROCESS)
        self.client = httpx.AsyncClient(transport=Transport(self.app), base_url="http://front", timeout=None)

    async def post(self, **fields: Any) -> Any:
        body = {"model": "m", "prompt": "a b c", "max_tokens": 8, "ignore_eos": True, "stream": True, **fields}
        return await self.client.post("/v1/completions", json=body)

    async def during(self, work: Coroutine[Any, Any, Any]) -> Any:
        running = [asyncio.ensure_future(each.run()) for each in (*self.backends, self.app)]
        try:
            return await work
        finally:
            self.app.close()
            await running[-1]
            for backend in self.backends:
                backend.abandon()
                backend.close()
            await asyncio.gather(*running)

    def log(self, folder: Path) -> Path:
        (folder / routing.FILE).write_text(self.head.model_dump_json() + "\n" + "".join(self.lines))
        return folder


def routed(work: Callable[[Routed], Coroutine[Any, Any, Any]], *arguments: Any) -> tuple[Routed, Any]:
    """Make servers on a virtual loop, and run `work` with them."""

    async def within() -> tuple[Routed, Any]:
        several = Routed(*arguments)
        return several, await several.during(work(several))

    loop = VirtualLoop()
    try:
        made = loop.run_until_complete(within())
        loop.run_until_complete(end())
        return made
    finally:
        loop.close()


def text_of(answer: Any) -> tuple[str, str]:
    """What a client has: the end of its answer, and all texts."""
    *events, done, _ = answer.text.split("\n\n")
    assert done == "data: [DONE]"
    parts = [json.loads(event.removeprefix("data: ")) for event in events]
    texts = "".join(part["choices"][0]["text"] for part in parts if "choices" in part)
    return ("error" if "error" in parts[-1] else "whole"), texts


@pytest.mark.parametrize("name", sorted(OURS))
def test_choices_of_every_router_are_derived_again(name: str, tmp_path: Path) -> None:
    """From the log alone; a log with another choice is reported at its line."""

    async def work(several: Routed) -> list[Any]:
        async def one(at: int) -> Any:
            await asyncio.sleep(at * 0.003)
            prompt = "the same words at the beginning of many prompts " * (1 + at % 3) + str(at)
            return await several.post(prompt=prompt, max_tokens=1 + at % 9)

        return await asyncio.gather(*map(one, range(30)))

    several, answers = routed(work, name)
    assert [text_of(answer)[0] for answer in answers] == ["whole"] * 30
    assert several.books.ends == {"finished": 30} and not several.books.open
    verdict = routing.rederive(several.log(tmp_path))
    assert verdict == (30, 30, None)
    served = [int(json.loads(line)["server"]) for line in several.lines if '"choose"' in line]
    assert [served.count(at) for at in range(3)] == [each.log.count for each in several.backends]
    at = next(at for at, line in enumerate(several.lines) if '"choose"' in line)
    line = json.loads(several.lines[at])
    several.lines[at] = json.dumps(line | {"server": (line["server"] + 1) % 3}) + "\n"
    difference = routing.rederive(several.log(tmp_path)).difference
    assert difference is not None and difference.startswith(f"line {at + 2}: server")


def test_answers_pass_through_unchanged() -> None:
    """Streams byte by byte, but for the moment of their creation; other answers, errors and other paths as a whole."""

    async def work(several: Routed) -> None:
        direct = httpx.AsyncClient(transport=several.killable[0], base_url="http://s0", timeout=None)
        for fields in ({}, {"stream": False}, {"max_tokens": 0}, {"n": 3}):
            body = {"model": "m", "prompt": "a b", "max_tokens": 5, "stream": True, **fields}
            headers = {"x-request-id": "mine"}
            ours, theirs = [
                await each.post("/v1/completions", json=body, headers=headers) for each in (several.client, direct)
            ]
            assert (ours.status_code, ours.text) == (theirs.status_code, theirs.text)
            assert ours.headers.get("content-type") == theirs.headers.get("content-type")
        assert (await several.client.get("/v1/models")).json()["data"][0]["id"] == "m"
        assert (await several.client.post("/tokenize", json={"prompt": "a b"})).json()["count"] > 0
        assert (await several.client.get("/health")).status_code == 200

    routed(work, "round_robin", 1)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2)), max_size=3),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12), st.booleans()), min_size=1, max_size=8),
    st.sampled_from(["round_robin", "least_in_flight", "kubernetes_service", "llmd", "preble"]),
)
def test_a_server_may_die_at_any_moment(kills: list[tuple[int, int]], requests: list[Any], router: str) -> None:
    """Every request ends once: whole, or with an error if its stream had begun or no server was left. Nothing waits for
    ever: the virtual loop would end with a deadlock.
    """

    async def work(several: Routed) -> list[Any]:
        async def kill(at: int, server: int) -> None:
            await asyncio.sleep(at * STEP_S / 2)
            several.killable[server].kill()

        async def one(at: int, tokens: int, stream: bool) -> Any:
            await asyncio.sleep(at * STEP_S / 2)
            return await several.post(max_tokens=tokens, stream=stream)

        ends = [kill(*each) for each in kills] + [one(*each) for each in requests]
        return (await asyncio.gather(*ends))[len(kills) :]

    several, answers = routed(work, router)
    counts = dict.fromkeys(routing.ENDS, 0)
    for answer, (_, tokens, stream) in zip(answers, requests, strict=True):
        if answer.status_code != 200:
            assert answer.status_code in (502, 503) and len({server for _, server in kills}) == 3
            counts["refused" if answer.status_code == 503 else "failed"] += 1
        elif stream:
            counts["finished" if text_of(answer)[0] == "whole" else "failed"] += 1
        else:
            assert answer.json()["usage"]["completion_tokens"] == tokens
            counts["finished"] += 1
    assert {**counts} == {name: several.books.ends[name] for name in counts}
    assert not several.books.open and sum(counts.values()) == len(requests)
    assert all(view.in_flight == 0 for view in several.books.views)


def test_a_request_without_a_byte_is_retried_and_others_fail() -> None:
    """Two streams and a whole answer are at a server that dies: the stream that has begun ends with an error."""

    async def twice(several: Routed) -> list[Any]:
        asyncio.get_running_loop().call_later(4.5 * STEP_S, several.killable[0].kill)
        return await asyncio.gather(several.post(), several.post(stream=False))

    several, (begun, whole) = routed(twice, "session_hash", 1)
    assert text_of(begun)[0] == "error" and whole.status_code == 502
    assert several.books.ends == {"failed": 2}
    several, (begun, second) = routed(twice, "round_robin", 2)
    assert text_of(begun)[0] == "error" and second.json()["usage"]["completion_tokens"] == 8


def test_a_server_that_answers_503_or_breaks_off_is_passed_over() -> None:
    """Each server gets a request once; if none takes it, the client gets 503 with Retry-After."""

    async def work(several: Routed) -> list[Any]:
        return [await several.post(stream=False) for _ in range(6)]

    busy = Failures({"503": 1.0})
    several, answers = routed(work, "round_robin", 3, [busy, Failures({"break": 1.0})])
    assert [answer.status_code for answer in answers] == [200] * 6
    assert several.books.ends == {"finished": 6}
    several, answers = routed(work, "round_robin", 2, [busy, busy])
    assert {(answer.status_code, answer.headers["retry-after"]) for answer in answers} == {(503, "1")}
    assert several.books.ends == {"refused": 6} and [view.sent for view in several.books.views] == [6, 6]


def test_a_server_that_cannot_be_reached_gets_nothing_until_it_is_scraped() -> None:
    """Of four requests in turn the first one finds it out; a stream that ends without a byte goes on, too."""

    async def work(several: Routed) -> list[int]:
        await asyncio.sleep(0.1)
        several.killable[0].kill()
        answers = [(await several.post()).status_code for _ in range(4)]
        empty = httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=httpx.ByteStream(b""))
        several.killable[1].inner = httpx.MockTransport(lambda _: empty)
        return [*answers, (await several.post()).status_code]

    several, answers = routed(work, "round_robin", 2, (), "signals.metrics_s=60")
    assert answers == [200, 200, 200, 200, 502]
    assert [view.sent for view in several.books.views] == [1, 5] and several.books.ends == {"finished": 4, "failed": 1}


def test_a_session_that_ends_fails_the_answers_under_way() -> None:
    """A stream that has begun ends with an error; a client that waits for its whole answer gets 503."""

    async def work(several: Routed) -> tuple[Any, ...]:
        answers = [asyncio.ensure_future(several.post(max_tokens=60, stream=stream)) for stream in (True, False)]
        await asyncio.sleep(10 * STEP_S)
        several.app.close()
        assert several.app.cut() == 2
        return (*await asyncio.gather(*answers), await several.post(), await several.client.get("/health"))

    several, (begun, whole, late, health) = routed(work, "round_robin", 1)
    assert text_of(begun)[0] == "error" and "the router ended before the answer" in begun.text
    assert (whole.status_code, late.status_code, health.status_code) == (503, 503, 503)
    assert several.books.ends == {"failed": 2} and several.books.views[0].in_flight == 0


def test_a_router_of_a_user_that_fails_fails_the_request_and_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 500 and its own message; what is under way goes on, what comes later is refused."""

    async def work(several: Routed) -> list[Any]:
        monkeypatch.setattr(several.books, "_router", Guarded(lambda: None, "mine"))
        answers = [await several.post() for _ in range(2)]
        assert str(await several.app.run()).startswith("router mine, choose, request request-0: AttributeError")
        return answers

    several, answers = routed(work, "random", 2)
    assert [answer.status_code for answer in answers] == [500, 503] and "router mine, choose, request" in answers[
        0
    ].text
    assert several.books.ends == {"failed": 1}


@pytest.mark.parametrize(
    ("path", "fields", "tokens"),
    [
        ("/v1/completions", {"prompt": [7, 8, 9]}, 3),
        ("/v1/completions", {"prompt": [[7, 8], [9]]}, 2),
        ("/v1/completions", {"prompt": {"no": "prompt"}}, 1),
        (
            "/v1/chat/completions",
            {"messages": [TURN], "tools": [{}]},
            len(TOKENIZER.encode(TOKENIZER.render([TURN]), special=False)),
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 1),
    ],
)
def test_prompts_are_read_for_the_router(path: str, fields: dict[str, Any], tokens: int) -> None:
    """A request that cannot be read counts as one token, and goes to a server, which answers it."""

    async def work(several: Routed) -> Any:
        direct = httpx.AsyncClient(transport=several.killable[0], base_url="http://s0", timeout=None)
        body = {"model": "m", "max_tokens": 2, **fields}
        return [(await each.post(path, json=body)).status_code for each in (several.client, direct)]

    several, (ours, theirs) = routed(work, "round_robin", 1)
    (came,) = (json.loads(line)["request"] for line in several.lines if '"came"' in line)
    assert ours == theirs and came["prompt_tokens"] == tokens


def test_a_client_that_leaves_is_cancelled_at_the_server() -> None:
    async def work(several: Routed) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(several.post(max_tokens=60), 10 * STEP_S)
        await asyncio.sleep(10 * STEP_S)
        assert [each.load.running for each in several.backends] == [0]

    several, _ = routed(work, "random", 1)
    assert several.books.ends == {"cancelled": 1}


def test_a_server_that_starts_late_gets_requests_once_it_is_scraped() -> None:
    async def work(several: Routed) -> list[int]:
        await asyncio.sleep(0.5)
        early = [await several.post() for _ in range(4)]
        await asyncio.sleep(1.0)
        return [len(early), *[(await several.post()).status_code for _ in range(4)]]

    several, answers = routed(work, "round_robin", 2, [Failures(start_s=1.0)])
    assert answers == [4, 200, 200, 200, 200]
    assert [view.sent for view in several.books.views] == [2, 6]


def test_metrics_are_those_of_the_stated_age() -> None:
    """A router sees the queue of the last scrape, of vLLM's names or SGLang's."""

    async def work(several: Routed) -> None:
        waiting = [asyncio.ensure_future(several.post(max_tokens=40)) for _ in range(6)]
        await asyncio.sleep(0.1)
        view = several.books.views[0]
        assert (view.running, view.waiting) == (0, 0)  # as at the start
        await asyncio.gather(*waiting)
        await asyncio.sleep(0.9 - asyncio.get_running_loop().time())
        late = [asyncio.ensure_future(several.post(max_tokens=100)) for _ in range(6)]
        await asyncio.sleep(0.3)
        assert (view.running, view.waiting) == (4, 2)
        assert view.age_ns == pytest.approx(0.9e9, rel=0.01)  # at the last choice, of metrics of the start
        await asyncio.gather(*late)

    routed(work, "llmd", 1, (), "signals.metrics_s=1")
    shares = 'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:kv_cache_usage_perc{engine="1"} 0.75 17\n'
    exposition = f'a 1\nsglang:num_queue_reqs{{x="a b"}} 3.0\n{shares}'
    assert read_load(exposition) == (3.0, 0.0, 0.5)


def test_a_log_that_is_none_is_reported(tmp_path: Path) -> None:
    head = head_of(["a", "b"], "random", (), 0).model_dump_json() + "\n"
    (tmp_path / routing.FILE).write_text(head + '{"call": "open", "at_ns": 1}\n')
    with pytest.raises(RunError, match=r"choices\.jsonl:2: is no call"):
        routing.rederive(tmp_path)
    (tmp_path / routing.FILE).write_text(head + '{"call": "scraped", "at_ns": 1, "server": 7, "load": null}\n')
    with pytest.raises(ScenarioError, match=r"choices\.jsonl:2: server: got 7, expected 0 to 1$"):
        routing.rederive(tmp_path)
    for tail in ("", "\n"):
        (tmp_path / routing.FILE).write_text(head + '{"call": "sc' + tail)
        assert routing.rederive(tmp_path) == (0, 0, None)
    (tmp_path / routing.FILE).write_text(head + '{"call": "sc\n{}\n')
    with pytest.raises(ScenarioError, match=r"choices\.jsonl:2: not valid JSON"):
        routing.rederive(tmp_path)
