"""How a session begins and ends: where it may listen, what it finishes, when it hurries."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
from support.endpoint_calls import Answer, Session, embedded, listening, read_answer, request, scripted

from cbsim.errors import EndpointError
from cbsim.http.app import App
from cbsim.http.listen import Ending, ServeOptions, check_host, listen, serve
from cbsim.http.settings import VARIABLE, Settings, read_keys
from cbsim.runs.served import with_one_loop
from cbsim.scenario.scenario import load
from cbsim.virtual.clocks import Clock
from cbsim.virtual.simulated import SimulatedBackend

ENDLESS = request("/v1/completions", {"prompt": "x", "max_tokens": 1 << 19, "stream": True})
SHORT = request("/v1/completions", {"prompt": "x", "max_tokens": 20, "stream": True})


async def begun(server: Session, bytes_: bytes) -> asyncio.Task[Answer]:
    """An answer that has begun."""
    reader, writer = await server.connect()
    before = len(server.backend.generations)
    writer.write(bytes_)
    await server.until_submitted(before + 1)
    return asyncio.get_running_loop().create_task(read_answer(reader))


async def test_answers_under_way_are_finished() -> None:
    async with listening(scripted(itl_s=0.005)) as server:
        reader, writer = await server.connect()
        writer.write(b"GET /health")  # a request that is not complete when it is time to go
        work = await begun(server, SHORT)
        server.stop.request()
        answer, rest = await work, await reader.read()
        with pytest.raises(ConnectionRefusedError):
            await server.connect()
        assert await server.ending == Ending("asked")
    assert len(answer.events) == 20 and answer.events[-1]["choices"][0]["finish_reason"] == "length"
    assert rest == b""


async def test_a_request_that_is_not_all_there_is_not_waited_for() -> None:
    async with listening(settings=Settings(grace_s=1e6, body_s=1e6)) as server:
        reader, writer = await server.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 9\r\n")
        writer.write(b"content-type: application/json\r\n\r\n{")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        server.stop.request()
        assert (await read_answer(reader)).status == 503
        assert await server.ending == Ending("asked")


async def test_clients_that_await_a_continue_hear_of_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """Heads come in the same turn of the loop as the end, before the server has asked for their bodies."""
    head = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\nexpect: 100-continue\r\n"
    for before in range(3, 18, 3):
        async with listening(settings=Settings(grace_s=1.0)) as server:
            clients = [await server.connect() for _ in range(20)]
            for at, (_, writer) in enumerate(clients):
                if at == before:
                    server.stop.request()
                writer.write(head + b"content-length: 9\r\n\r\n")
                await asyncio.sleep(0)
            for reader, _ in clients:
                with contextlib.suppress(ConnectionError):
                    await reader.read()
    assert not caplog.records


async def test_after_its_grace_what_is_left_is_cancelled() -> None:
    async with listening(settings=Settings(grace_s=0.02)) as server:
        work = await begun(server, ENDLESS)
        server.stop.request("SIGTERM")
        assert (await work).events[-1]["error"]["code"] == 503
        assert await server.ending == Ending("SIGTERM", cut=1)


async def test_a_second_stop_ends_answers_at_once() -> None:
    async with listening(settings=Settings(grace_s=1e6)) as server:
        work = await begun(server, ENDLESS)
        server.stop.request("SIGINT")
        server.stop.request("SIGINT")
        assert await server.ending == Ending("SIGINT", cut=1, interrupted=True)
        await asyncio.gather(work, return_exceptions=True)


async def test_while_it_ends_no_request_is_accepted() -> None:
    async with listening() as server:
        (reader, writer), (other, writer_of_other) = await server.connect(), await server.connect()
        server.app.admission.closing = True
        writer.write(b"GET /health HTTP/1.1\r\n\r\n")
        writer_of_other.write(SHORT)
        health, answer = await read_answer(reader), await read_answer(other)
    assert health.status == 503
    assert answer.status == 503 and "shutting down" in answer.error["message"]


async def test_a_server_that_dies_ends_the_session() -> None:
    async with listening() as server:
        work = await begun(server, ENDLESS)
        server.backend.die("a kernel failed")
        assert (await work).events[-1]["error"]["message"] == "a kernel failed"
        assert await server.ending == Ending("dead", "a kernel failed")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7"])
def test_a_host_that_others_reach_needs_a_key(host: str) -> None:
    with pytest.raises(EndpointError, match="no API key") as raised:
        check_host(host, Settings())
    assert raised.value.field == "host" and raised.value.value == host
    assert all(option in str(raised.value) for option in ("--api-key-file", VARIABLE, "--insecure"))
    check_host(host, Settings(insecure=True))
    check_host(host, Settings(keys=(b"digest",)))
    for loopback in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        check_host(loopback, Settings())


@pytest.mark.parametrize("settings", [Settings(), Settings(insecure=True), Settings(keys=(b"digest",))])
def test_an_empty_host_is_none(settings: Settings) -> None:
    """A socket would take it for all interfaces."""
    with pytest.raises(EndpointError, match="host '' is empty") as raised:
        check_host("", settings)
    assert raised.value.field == "host"


async def test_a_port_that_is_taken_is_named() -> None:
    async with listening() as server:
        with pytest.raises(EndpointError, match=f"127.0.0.1:{server.port}: .*in use") as raised:
            await listen(App(scripted()), port=server.port, signals=False)
        assert raised.value.field == "port"


async def test_a_port_that_is_taken_leaves_no_run(tmp_path: Path) -> None:
    """The run directory of a session is made once the port is its own."""
    scenario = with_one_loop(load("tiny_cpu"))
    async with listening() as server:
        backend = SimulatedBackend(scenario, Clock(), embedded(), None, "")
        with pytest.raises(EndpointError, match="in use"):
            await serve(backend, ServeOptions("127.0.0.1", server.port, tmp_path / "runs", Settings()))
    assert not (tmp_path / "runs").exists()


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n")
    assert len(set(read_keys(file, {VARIABLE: "three"}))) == 3
    assert read_keys(environment={}) == ()
    for wrong in ("", "two words", "é"):
        with pytest.raises(EndpointError, match=f"the variable {VARIABLE}: .*printable"):
            read_keys(environment={VARIABLE: wrong})
    for content, message in (("one\n\nclé\n", r"keys:3: .*printable"), ("\n", "has no API key")):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(EndpointError, match=message) as raised:
            read_keys(file, {})
        assert raised.value.file == str(file) and "cl" not in str(raised.value).partition(":3:")[2]
    with pytest.raises(EndpointError, match="nowhere: cannot be read"):
        read_keys(tmp_path / "nowhere")


def test_the_simulator_starts_without_the_endpoints_libraries() -> None:
    script = "import sys, cbsim, cbsim.cli.parser; print({'starlette', 'uvicorn', 'tokenizers'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "set()"
