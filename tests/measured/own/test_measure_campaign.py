"""`cbsim measure`: what a client measures of a simulated server in virtual time, and what may go wrong."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cbsim.virtual
from cbsim.errors import ScenarioError
from cbsim.http.app import App
from cbsim.http.metrics import VllmMeter
from cbsim.measured.own import measurement
from cbsim.measured.own.campaign import Budget, Campaign, Planned, table
from cbsim.measured.own.measurement import Facts, Load, Measurement
from cbsim.measured.own.server import Server
from cbsim.virtual.server import HOST, IN_PROCESS, VirtualServer

SMALL = {
    "question": "What does a client measure?",
    "model": "tiny",
    "hardware": "laptop-cpu",
    "workload": {"kind": "synthetic", "requests": 1, "prompt_tokens": 1, "output_tokens": 1},
    "scheduler": {"name": "vllm", "max_num_seqs": 8, "enable_prefix_caching": True},
    "kv_cache": {"num_blocks": 600},
    "loop": {"mode": "async"},
    "cost": {"kind": "constant", "step_s": 0.005},
}
ALONE = Planned("unloaded-40", 1, [(40, 8)] * 2)
FOUR = Planned("decode-4", 4, [(32, 20)] * 4)
Work = Callable[[Campaign], Awaitable[Any]]


def simulated(**parts: Any) -> VirtualServer:
    """A simulated server with vLLM's metrics."""
    server = cbsim.virtual.virtual(SMALL | parts)
    server.app = App(server.backend, IN_PROCESS, VllmMeter(server.backend))
    return server


def conducted(server: VirtualServer, out: Path, work: Work, budget: Budget | None = None) -> list[str]:
    """Let `work` be done with a campaign in virtual time; return what it said."""
    said: list[str] = []

    async def client() -> None:
        async with server.openai() as openai:
            chosen = budget or Budget(60, 100_000, 8)
            await work(Campaign(Server(HOST, openai, 1), out, chosen, lambda line, *_: said.append(line)))

    server.run(client())
    return said


def run(*loads: Planned, repeats: int = 2, beside: Callable[[Campaign], Awaitable[Any]] | None = None) -> Work:
    """Run these loads, with something beside them."""

    async def work(campaign: Campaign) -> None:
        campaign.facts = await campaign.server.facts("", None)
        await campaign.server.check()
        campaign.loads, campaign.repeats = loads, repeats
        task = asyncio.ensure_future(beside(campaign)) if beside else None
        try:
            await campaign.run()
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    return work


def measured(out: Path, work: Work, *, app: Callable[[Any], Any] | None = None, **parts: Any) -> Measurement:
    """What a campaign measured of a small server behind `app`."""
    server = simulated(**parts)
    if app is not None:
        server.app = app(server.app)
    conducted(server, out, work)
    return measurement.read(out)


def by_name(content: Measurement) -> dict[str, Load]:
    return {load.name: load for load in content.loads}


def completions(then: Callable[[int, Any], Awaitable[Any]]) -> Callable[[Any], Any]:
    """An application before another one: `then(number, send)` sees each message that a completion sends."""

    def around(app: Any) -> Any:
        count = 0

        async def wrapped(scope: Any, receive: Any, send: Any) -> None:
            nonlocal count
            if not scope["path"].endswith("completions"):
                await app(scope, receive, send)
                return
            count += 1
            scope = scope | {"extensions": {}}  # answers go by ASGI's messages
            await then(count, (app, scope, receive, send))

        return wrapped

    return around


def test_a_client_measures_what_is_simulated(tmp_path: Path) -> None:
    """TTFT and TPOT of every request to the microsecond, its tokens, and the concurrency of the load."""
    server = simulated()
    conducted(server, tmp_path, run(ALONE, FOUR, Planned("mixed-4", 4, [(20, 5), (90, 30)] * 5)))
    content = measurement.read(tmp_path)
    assert not content.incomplete and [load.name for load in content.usable] == ["unloaded-40", "decode-4", "mixed-4"]
    clients = np.array(
        [row for load in content.loads for row in zip(load.start_s, load.ttft_s, load.tpot_s, strict=True)]
    )
    table = server.result.requests
    rows = [[table[name][at].as_py() for name in ("arrival_ns", "ttft_s", "tpot_s")] for at in range(len(table))]
    servers = np.array(sorted(rows)[-len(clients) :])
    clients = clients[np.argsort(clients[:, 0], kind="stable")]
    assert np.abs(np.sort(clients[:, 1]) - np.sort(servers[:, 1])).max() < 1e-6
    assert np.abs(np.sort(clients[:, 2]) - np.sort(servers[:, 2])).max() < 1e-6
    loads = by_name(content)
    assert loads["decode-4"].users == 4 and len(loads["decode-4"]) == 8
    assert {*loads["decode-4"].prompt_tokens} == {32} and {*loads["decode-4"].output_tokens} == {20}
    assert {*loads["mixed-4"].cached_tokens} == {0}, "no prompt shares a prefix with another"
    ttft = loads["unloaded-40"].estimate(loads["unloaded-40"].ttft_s)
    assert ttft[1] < 1e-9, "a simulated server has no noise"
    readings = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    hits = [reading["prefix_cache_hits"] for reading in readings if reading["load"] == "mixed-4"]
    assert len(hits) >= 2 and {*hits} == {0}


def test_a_whole_campaign_from_its_plan(tmp_path: Path) -> None:
    """It says what it will take, takes about that, fits context and budget, and derives the rate of its open load."""
    plan, shown = list[str](), list[str]()

    async def work(campaign: Campaign) -> None:
        plan.append(await campaign.plan("", None))
        plan.extend(campaign.facts.lines())
        await campaign.run()
        shown.append(table(campaign.measured))
        plan.append(f"{campaign.server.tokens} {campaign.server.now_s}")

    server = simulated(scheduler={"name": "vllm", "max_num_seqs": 8, "max_model_len": 600})
    said = conducted(server, tmp_path, work, Budget(100, 60_000, 4))
    content = measurement.read(tmp_path)
    names = [load.name for load in content.usable]
    assert names == ["unloaded-32", "unloaded-256", "decode-1", "decode-4", "decode-4-long", "mixed-4", "mixed-open"]
    tokens, seconds = map(float, plan[-1].split())
    assert tokens <= 60_000 and seconds <= 100
    assert f"at most {max(load.users or 0 for load in content.loads)} at once" in plan[0]
    assert all((load.prompt_tokens + load.output_tokens <= 600).all() for load in content.loads)
    requests = server.result.requests
    at_once = [(at, -1) for at in requests["last_token_ns"].to_pylist()] + [
        (at, 1) for at in requests["arrival_ns"].to_pylist()
    ]
    assert np.cumsum([change for _, change in sorted(at_once)]).max() == 4, (
        "requests in flight are never more than allowed"
    )
    assert "decode-4-long" in shown[0]
    rates = [np.diff(np.sort(load.start_s[load.repeat == 0])).mean() for load in content.usable if load.users is None]
    assert rates and all(rate > 0 for rate in rates)
    known = [line.split(maxsplit=1) for line in plan]
    assert ["num_blocks", "600 (/metrics)"] in known and ["max_model_len", "600 (/v1/models)"] in known
    assert content.facts == Facts.model_validate(json.loads((tmp_path / "measurement.json").read_text())["facts"])
    assert said[0] == f"unloaded-32, repeat 1 of {len({*content.loads[0].repeat})}"
    assert server.result.summary["requests_by_status"]["length"] == server.result.summary["requests"]


def test_a_pause_leaves_the_repeat_out_and_is_made_up_for(tmp_path: Path) -> None:
    async def one_pause(number: int, call: Any) -> None:
        app, scope, receive, send = call

        async def late(message: Any) -> None:
            if number == 11 and message.get("body"):
                await asyncio.sleep(1)
            await send(message)

        await app(scope, receive, late)

    loads = by_name(measured(tmp_path, run(ALONE, FOUR), app=completions(one_pause)))
    paused = loads["unloaded-40 left out"]
    assert paused.left_out == "a pause: no token for 1.01 s" and not loads["unloaded-40"].left_out
    assert len(loads["unloaded-40"]) == 4 and loads["unloaded-40"].ttft_s.max() < 0.1 and len(loads["decode-4"]) == 8


def test_lost_requests_are_kept_with_their_reason(tmp_path: Path) -> None:
    """One of many is a note; the rest of the load stands. Most of them, and the load does not."""

    async def lost(number: int, call: Any) -> None:
        app, scope, receive, send = call
        if number != 11 and number < 30:
            await app(scope, receive, send)
            return
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
        await send(start)
        await send({"type": "http.response.body", "body": b'data: {"choices": [{"text": "a"}]}\n\n'})

    load = Planned("decode-2", 2, [(20, 4)] * 20)
    content = measured(tmp_path, run(load, repeats=2), app=completions(lost))
    good = by_name(content)["decode-2"]
    assert (
        good.failed.sum() == 1
        and good.reasons == ("the answer ended early",)
        and good.notes == ["the answer ended early"]
    )
    assert "requests failed: the answer ended early" in by_name(content)["decode-2 left out"].left_out
    assert "does not answer any more" in content.incomplete


@pytest.mark.parametrize(
    ("clients", "words"), [(1, "another client: 0 requests, "), (20, "another client: 13 requests, ")]
)
def test_another_client_is_noticed(clients: int, words: str, tmp_path: Path) -> None:
    """By requests beyond ours, or by tokens beyond ours."""

    async def other(campaign: Campaign) -> None:
        while True:
            await campaign.server.send([*range(1, 50)], 100)

    async def others(campaign: Campaign) -> None:
        await asyncio.gather(*(other(campaign) for _ in range(clients)))

    content = measured(tmp_path, run(ALONE, beside=others))
    assert words in by_name(content)["unloaded-40 left out"].left_out
    assert not content.usable


def test_a_warm_prefix_cache_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "prompt", lambda self, tokens: [*range(1000, 1000 + tokens)])
    content = measured(tmp_path, run(ALONE))
    assert "a warm prefix cache: 64 of 80 prompt tokens" in by_name(content)["unloaded-40 left out"].left_out


def test_a_client_that_is_the_bottleneck_is_noticed(tmp_path: Path) -> None:
    """Something keeps its event loop busy; `time.sleep` takes virtual time here."""

    async def busy(_: Campaign) -> None:
        while True:
            await asyncio.sleep(0.001)
            time.sleep(0.03)

    content = measured(tmp_path, run(FOUR, beside=busy))
    assert "the client is the bottleneck: " in by_name(content)["decode-4 left out"].left_out


def test_the_budget_is_never_exceeded(tmp_path: Path) -> None:
    """Not its tokens, not its seconds; what was measured before counts, and what was cut short does not."""
    spent: list[tuple[int, float]] = []

    def with_budget(budget: Budget) -> Measurement:
        async def work(campaign: Campaign) -> None:
            await run(ALONE, Planned("long", 2, [(40, 40)] * 10))(campaign)
            spent.append((campaign.server.tokens, campaign.server.now_s))

        conducted(simulated(), tmp_path / f"{budget.tokens}", work, budget)
        return measurement.read(tmp_path / f"{budget.tokens}")

    content = with_budget(Budget(60, 1700, 2))
    assert spent[-1][0] <= 1700 and "tokens are spent, long does not fit" in content.incomplete
    content = with_budget(Budget(1.2, 9000, 2))
    assert content.incomplete == "--budget: 1.2 s are over" and spent[-1][1] == pytest.approx(1.2, abs=1e-3)
    assert by_name(content)["long left out"].left_out == "it was cut short"
    assert len(by_name(content)["unloaded-40"]) == 2


def test_a_budget_that_allows_nothing_is_refused(tmp_path: Path) -> None:
    async def work(campaign: Campaign) -> None:
        await campaign.plan("", None)

    with pytest.raises(ScenarioError, match=r"--budget: too small: 2 times unloaded-32 take about .* and 160 tokens"):
        conducted(simulated(), tmp_path, work, Budget(600, 450, 1))


def test_an_interruption_writes_what_there_is(tmp_path: Path) -> None:
    """What is in flight is cancelled, at the server, too."""

    async def work(campaign: Campaign) -> None:
        task = asyncio.ensure_future(run(ALONE, Planned("long", 2, [(40, 400)] * 4))(campaign))
        await asyncio.sleep(1.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    server = simulated()
    conducted(server, tmp_path, work)
    content = measurement.read(tmp_path)
    assert content.incomplete == "it was interrupted" and [load.name for load in content.usable] == ["unloaded-40"]
    assert server.result.summary["requests_by_status"]["aborted"] == 2


def test_a_campaign_that_is_killed_can_be_read(tmp_path: Path) -> None:
    """At any moment the folder holds the whole repeats so far."""
    seen: list[Measurement] = []

    async def look(_: Campaign) -> None:
        while True:
            await asyncio.sleep(0.4)
            seen.append(measurement.read(tmp_path))

    conducted(simulated(), tmp_path, run(ALONE, Planned("long", 2, [(40, 40)] * 10), beside=look))
    assert [each.incomplete for each in seen] == ["it was killed"] * len(seen) and len(seen) > 3
    assert "long" not in by_name(seen[0])
    assert {len(load) % 10 for each in seen for load in each.loads if load.name == "long"} == {0}


def answering(status: int, body: Any, kind: bytes = b"application/json") -> Callable[[Any], Any]:
    """Completions are answered so, whatever they are."""

    async def then(_: int, call: Any) -> None:
        send = call[3]
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        await send(
            {"type": "http.response.body", "body": body if isinstance(body, bytes) else json.dumps(body).encode()}
        )

    return completions(then)


WHOLE = {
    "choices": [{"text": "a b", "finish_reason": "length"}],
    "usage": {"prompt_tokens": 256, "completion_tokens": 16},
}
ONCE = b"data: " + json.dumps(WHOLE).encode() + b"\n\ndata: [DONE]\n\n"
WITHOUT = b"data: " + json.dumps({"choices": WHOLE["choices"]}).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("app", "model", "complaint"),
    [
        (None, "nothing", "--model: got nothing, must be one of scenario"),
        (answering(404, {"error": {"message": "The model\n does not exist."}}), "", "404: The model does not exist."),
        (answering(401, {"error": {"message": "no key"}}), "", "401: no key"),
        (answering(200, WHOLE), "", "does not stream: no event came"),
        (answering(200, ONCE, b"text/event-stream"), "", "does not stream: 16 tokens came at once"),
        (answering(200, WITHOUT * 3, b"text/event-stream"), "", "reports no usage, so that lengths are not known"),
        (answering(200, b'data: {"error": "full"}\n\n', b"text/event-stream"), "", "an error in the stream: full"),
    ],
)
def test_a_server_that_cannot_be_measured(app: Any, model: str, complaint: str, tmp_path: Path) -> None:
    """It is one line before any load, and nothing is written."""

    async def work(campaign: Campaign) -> None:
        await campaign.plan(model, None)

    server = simulated()
    server.app = app(server.app) if app else server.app
    with pytest.raises(ScenarioError) as raised:
        conducted(server, tmp_path / "out", work)
    assert complaint in str(raised.value) and "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()
