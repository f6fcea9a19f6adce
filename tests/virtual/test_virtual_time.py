"""Virtual time: what happens at a moment is over before the next, repeats are alike, and what cannot join is told."""

from __future__ import annotations

import asyncio
import socket
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.calls import Said, call, read

import cbsim.virtual
from cbsim.virtual import clocks as virtual_loop
from cbsim.virtual.clocks import VirtualLoop, VirtualTimeError, clocks, watched

SCENARIO = "rates"
HERE = Path(__file__).parent


@pytest.fixture
def loop() -> Any:
    made: VirtualLoop = VirtualLoop()
    yield made
    made.close()


def test_sleeping_takes_virtual_time_only(loop: VirtualLoop) -> None:
    async def day() -> tuple[float, float, int]:
        await asyncio.sleep(86_400)
        return time.time(), time.perf_counter(), time.monotonic_ns()

    began = time.monotonic()
    with clocks(loop):
        printed = loop.run_until_complete(day())
    assert printed == (virtual_loop.EPOCH_S + 86_400, 86_400, 86_400 * 10**9)
    assert time.monotonic() - began < 3600, "the clocks are the machine's again"


def test_rest_is_after_all_that_happens_at_its_moment(loop: VirtualLoop) -> None:
    """However many turns of the loop that takes."""
    order: list[str] = []

    async def client() -> None:
        await asyncio.sleep(1)
        for turn in range(5):
            await asyncio.sleep(0)
            order.append(f"client {turn} at {loop.time():g}")

    async def machine() -> None:
        rest = loop.create_future()
        loop.at_rest(1.0, rest)
        await rest
        order.append(f"machine at {loop.time():g}")

    async def together() -> None:
        await asyncio.gather(machine(), client())

    loop.run_until_complete(together())
    assert order == [*(f"client {turn} at 1" for turn in range(5)), "machine at 1"]


def test_bytes_on_their_way_take_no_time(loop: VirtualLoop) -> None:
    """A reader hears what was written before the clock goes on, though a timer is due sooner than it is read."""
    heard: list[tuple[bytes, float]] = []

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            heard.append((data, loop.time()))
            writer.write(data.upper())
        writer.close()

    async def talk() -> list[float]:
        listening = await asyncio.start_server(server, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        answered = []
        for turn in range(50):
            await asyncio.sleep(1e-6)
            sent = loop.time()
            writer.write(b"%d" % turn)
            assert await reader.read(100) == b"%d" % turn
            answered.append(loop.time() - sent)
        writer.close()
        await asyncio.sleep(1)
        listening.close()
        return answered

    assert set(loop.run_until_complete(talk())) == {0.0}


def test_a_thread_takes_no_virtual_time(loop: VirtualLoop) -> None:
    async def work() -> float:
        ticking = asyncio.ensure_future(asyncio.sleep(0.001))
        await asyncio.to_thread(sum, range(10**6))
        at = loop.time()
        await ticking
        return at

    assert loop.run_until_complete(work()) == 0.0


def test_a_thread_that_waits_for_the_loop_is_told(loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_loop, "PATIENCE_S", 0.1)
    event = asyncio.Event()

    def waits() -> None:
        asyncio.run_coroutine_threadsafe(asyncio.wait_for(event.wait(), 5), loop).result()

    async def blocked() -> None:
        await asyncio.to_thread(waits)

    with pytest.raises(VirtualTimeError, match=r"a thread has been in .*waits.* virtual time waits for threads"):
        loop.run_until_complete(blocked())
    monkeypatch.undo()
    event.set()
    loop.run_until_complete(asyncio.sleep(0.1))


def test_a_stray_sleep_takes_time_and_is_told(loop: VirtualLoop) -> None:
    async def naps() -> float:
        time.sleep(86_400)
        return time.perf_counter()

    with clocks(loop):
        assert loop.run_until_complete(naps()) == 86_400
    (printed,) = loop.strays
    assert printed.startswith("time.sleep(86400) in ")
    assert printed.endswith("(naps) kept the loop: what was due meanwhile came late")


def test_a_sleep_that_escaped_is_noticed(loop: VirtualLoop) -> None:
    """Its name was imported before: it cannot be stopped, but the loop sees that nothing was computed meanwhile."""
    real = time.sleep

    async def naps() -> None:
        real(0.2)
        await asyncio.sleep(1)

    with clocks(loop):
        loop.run_until_complete(naps())
    (printed,) = loop.strays
    assert "in which it did not compute" in printed


def test_a_call_that_blocks_the_loop_is_told(loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A synchronous client would wait for a server that waits for it."""
    monkeypatch.setattr(virtual_loop, "PATIENCE_S", 0.1)
    monkeypatch.setattr(virtual_loop, "WATCH_S", 0.05)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "http://{}:{}".format(*silent.getsockname())

        async def calls() -> None:
            urllib.request.urlopen(address)

        with watched(loop), pytest.raises(VirtualTimeError, match="has blocked the loop"):
            loop.run_until_complete(calls())
    with pytest.raises(VirtualTimeError, match="has blocked the loop"):
        loop.check_deadlock()


def run_openai(streams: int) -> tuple[Any, Any]:
    server = cbsim.virtual.virtual(SCENARIO)

    async def call(client: Any, at: int) -> list[float]:
        await asyncio.sleep(at / 40)
        began = time.perf_counter()
        stream = await client.chat.completions.create(
            model=server.model, messages=[{"role": "user", "content": f"hello {at % 3}"}], max_tokens=20, stream=True
        )
        return [time.perf_counter() - began async for part in stream if part.choices[0].delta.content]

    async def everybody() -> list[list[float]]:
        async with server.openai() as client:
            return await asyncio.gather(*(call(client, at) for at in range(streams)))

    return server.run(everybody()), server.result


def test_what_a_client_measures_is_what_the_model_says() -> None:
    """Neither HTTP nor the client takes time: first and last tokens come when the record has them."""
    emitted, result = run_openai(30)
    table = result.requests.to_pydict()
    assert len(emitted) == len(table["id"]) == 30
    for times, arrival, first, last, count in zip(
        emitted,
        *(table[name] for name in ("arrival_ns", "first_token_ns", "last_token_ns", "generated_tokens")),
        strict=True,
    ):
        assert len(times) == count
        assert times[0] == pytest.approx((first - arrival) / 1e9, abs=2e-9)
        assert times[-1] == pytest.approx((last - arrival) / 1e9, abs=2e-9)
    assert result.summary["served"]["faithful"] is True


def test_a_client_that_leaves_is_given_up() -> None:
    server = cbsim.virtual.virtual(SCENARIO)

    async def client() -> None:
        async with server.openai() as openai:
            stream = await openai.completions.create(model=server.model, prompt="hello", max_tokens=500, stream=True)
            async for _ in stream:
                break
            await stream.close()
            await asyncio.sleep(1)
            load = server.backend.load
            assert (load.running, load.waiting) == (0, 0)

    server.run(client())
    assert server.result.summary["requests_by_status"]["aborted"] == 1


def test_a_server_is_good_for_one_run() -> None:
    server = cbsim.virtual.virtual(SCENARIO)
    with pytest.raises(VirtualTimeError, match="nobody has run"):
        server.result  # noqa: B018
    server.run(asyncio.sleep(1))
    assert server.result.summary["requests"] == 0
    with pytest.raises(VirtualTimeError, match="good for one run"):
        server.run(asyncio.sleep(1))


# -- drive


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Said]:
    """The command with a client of this folder; its runs are in `tmp_path`/runs, or where it is told."""
    monkeypatch.chdir(HERE)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    return lambda *client, out="runs": call(
        "drive", SCENARIO, "--loop", "async", "--out", tmp_path / out, "--quiet", *client
    )


def test_a_driven_client_repeats_itself(drive: Callable[..., Said], tmp_path: Path) -> None:
    """Over sockets, with its own clock and its own arguments; what it prints and what is recorded are the same."""
    said = [drive("my_client:main", "12", out=run) for run in ("one", "two")]
    assert [each.status for each in said] == [0, 0]
    printed = [each.out.splitlines()[0] for each in said]
    assert printed[0] == printed[1]
    assert printed[0].count("(9, ") + printed[0].count("(") > 12
    (first,), (second,) = ([*(tmp_path / run).iterdir()] for run in ("one", "two"))
    for name in ("steps.parquet", "requests.parquet", "arrivals.jsonl"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_a_client_may_be_told_where(drive: Callable[..., Said]) -> None:
    said = drive("my_client:told_where")
    assert said.status == 0 and "at http://127.0.0.1" in said.out


def test_a_client_that_keeps_the_loop_makes_a_run_that_is_not_faithful(
    drive: Callable[..., Said], tmp_path: Path
) -> None:
    """The steps that were due while it slept came late: their times are the model's, the client's are not."""
    said = drive("my_client:sleeps")
    assert said.status == 0 and float(said.out.splitlines()[0]) > 0.5
    assert "warning: time.sleep(0.5) in" in said.err and "not faithful: 1 % of its steps came" in said.err
    (run,) = (tmp_path / "runs").iterdir()
    served = read(run / "summary.json")["served"]
    assert served["faithful"] is False and served["lag_max_s"] > 0.4


@pytest.mark.parametrize(
    ("client", "status", "message"),
    [
        ("my_client:fails", 1, "the client failed: OSError: no such thing"),
        ("my_client:waits", 1, "waits for something that never comes"),
        ("my_client:in_a_thread", 1, "a thread has been in"),
        ("my_client:plain", 2, "is not asynchronous"),
        ("my_client:nothing", 2, "has no function nothing"),
        ("my_client", 2, "expected MODULE:FUNCTION"),
        ("no_such_module:main", 2, "there is no module no_such_module"),
    ],
)
def test_what_cannot_be_driven(
    drive: Callable[..., Said],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    client: str,
    status: int,
    message: str,
) -> None:
    monkeypatch.setattr(virtual_loop, "PATIENCE_S", 0.2)
    said = drive(client)
    assert said.status == status
    assert message in said.err
    assert "Traceback" not in said.err + caplog.text
    if status == 1:
        (run,) = (tmp_path / "runs").iterdir()
        assert (run / "INCOMPLETE").exists()
    else:
        assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("seconds", [1.7e7, 1e12])
def test_years_can_be_slept(loop: VirtualLoop, seconds: float) -> None:
    """The clock is a number like others: from some size on, its steps are coarser than a nanosecond."""

    async def sleeps() -> float:
        await asyncio.sleep(seconds)
        await asyncio.sleep(1)
        return loop.time()

    assert loop.run_until_complete(sleeps()) == pytest.approx(seconds + 1)
