"""How a session begins and ends: where it may listen, what it finishes, when it hurries."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.endpoint_calls import Answer, Session, listening, read_answer, request, scripted

from cbsim.http.app import App
from cbsim.http.errors import EndpointError
from cbsim.http.listen import Ending, check_host, listen
from cbsim.http.settings import VARIABLE, Settings, read_keys

ENDLESS = request("/v1/completions", {"prompt": "x", "max_tokens": 1 << 19, "stream": True})
SHORT = request("/v1/completions", {"prompt": "x", "max_tokens": 20, "stream": True})


async def begun(server: Session, bytes_: bytes) -> asyncio.Task[Answer]:
    """An answer that has begun."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    before = len(server.backend.generations)
    writer.write(bytes_)
    while len(server.backend.generations) == before:
        await asyncio.sleep(0.001)

    async def rest() -> Answer:
        try:
            return await read_answer(reader)
        finally:
            writer.close()

    return asyncio.get_running_loop().create_task(rest())


def test_answers_under_way_are_finished() -> None:
    async def session() -> tuple[Answer, Ending, bytes]:
        async with listening(scripted(itl_s=0.005)) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET /health")  # a request that is not complete when it is time to go
            answer = await begun(server, SHORT)
            server.stop.request()
            emitted = await answer
            rest = await reader.read()
            writer.close()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", server.port)
            return emitted, await server.ending, rest

    answer, ending, rest = asyncio.run(session())
    assert len(answer.events) == 20 and answer.events[-1]["choices"][0]["finish_reason"] == "length"
    assert ending == Ending("asked") and rest == b""


def test_a_request_that_is_not_all_there_is_not_waited_for() -> None:
    async def session() -> tuple[Answer, Ending]:
        async with listening(settings=Settings(grace_s=1e6, body_s=1e6)) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 9\r\n")
            writer.write(b"content-type: application/json\r\n\r\n{")
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            server.stop.request()
            answer = await read_answer(reader)
            writer.close()
            return answer, await server.ending

    answer, ending = asyncio.run(session())
    assert answer.status == 503 and ending == Ending("asked")


def test_who_is_to_be_told_to_go_on_is_told_that_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    """Heads come in the same turn of the loop as the end, before the server has asked for their bodies."""
    head = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\nexpect: 100-continue\r\n"

    async def session(before: int) -> None:
        async with listening(settings=Settings(grace_s=1.0)) as server:
            clients = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(20)]
            for at, (_, writer) in enumerate(clients):
                if at == before:
                    server.stop.request()
                writer.write(head + b"content-length: 9\r\n\r\n")
                await asyncio.sleep(0)
            for reader, writer in clients:
                with contextlib.suppress(ConnectionError):
                    await reader.read()
                writer.close()

    for before in range(3, 18, 3):
        asyncio.run(session(before))
    assert not caplog.records


def test_after_its_grace_what_is_left_is_cancelled() -> None:
    async def session() -> tuple[Answer, Ending]:
        async with listening(settings=Settings(grace_s=0.02)) as server:
            answer = await begun(server, ENDLESS)
            server.stop.request("SIGTERM")
            return await answer, await server.ending

    answer, ending = asyncio.run(session())
    assert answer.events[-1]["error"]["code"] == 503
    assert ending == Ending("SIGTERM", cut=1)


def test_told_twice_it_hurries() -> None:
    async def session() -> Ending:
        async with listening(settings=Settings(grace_s=1e6)) as server:
            answer = await begun(server, ENDLESS)
            server.stop.request("SIGINT")
            server.stop.request("SIGINT")
            ending = await server.ending
            await asyncio.gather(answer, return_exceptions=True)
            return ending

    assert asyncio.run(session()) == Ending("SIGINT", cut=1, interrupted=True)


def test_while_it_ends_nobody_enters() -> None:
    async def session() -> list[Answer]:
        async with listening() as server:
            connections = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
            server.app.admission.closing = True
            connections[0][1].write(b"GET /health HTTP/1.1\r\n\r\n")
            connections[1][1].write(SHORT)
            answers = [await read_answer(reader) for reader, _ in connections]
            for _, writer in connections:
                writer.close()
            return answers

    health, answer = asyncio.run(session())
    assert health.status == 503
    assert answer.status == 503 and "shutting down" in answer.error["message"]


def test_a_server_that_dies_ends_the_session() -> None:
    async def session() -> tuple[Answer, Ending]:
        async with listening() as server:
            answer = await begun(server, ENDLESS)
            server.backend.die("a kernel failed")
            return await answer, await server.ending

    answer, ending = asyncio.run(session())
    assert answer.events[-1]["error"]["message"] == "a kernel failed"
    assert ending == Ending("dead", "a kernel failed")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7"])
def test_a_host_that_others_reach_needs_a_key(host: str) -> None:
    with pytest.raises(EndpointError, match="no API key") as raised:
        check_host(host, Settings())
    assert raised.value.field == "host" and raised.value.value == host
    assert all(writer in str(raised.value) for writer in ("--api-key-file", VARIABLE, "--insecure"))
    check_host(host, Settings(insecure=True))
    check_host(host, Settings(keys=read_keys(["k"], environment={})))
    for loopback in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        check_host(loopback, Settings())


@pytest.mark.parametrize("settings", [Settings(), Settings(insecure=True), Settings(keys=(b"digest",))])
def test_an_empty_host_is_none(settings: Settings) -> None:
    """A socket would take it for all interfaces."""
    with pytest.raises(EndpointError, match="host '' is empty") as raised:
        check_host("", settings)
    assert raised.value.field == "host"


def test_a_port_that_is_taken_is_named() -> None:
    async def session() -> None:
        async with listening() as server:
            with pytest.raises(EndpointError, match=f"127.0.0.1:{server.port}: .*in use") as raised:
                await listen(App(scripted()), port=server.port, signals=False)
            assert raised.value.field == "port"

    asyncio.run(session())


def test_keys_come_from_three_places(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n")
    assert len(set(read_keys(["three"], file, {VARIABLE: "four"}))) == 4
    assert read_keys(environment={}) == ()
    for wrong in ("", "two words", "é"):
        with pytest.raises(EndpointError, match=f"the variable {VARIABLE}: .*printable"):
            read_keys(environment={VARIABLE: wrong})
    file.write_text("one\n\nclé\n", encoding="utf-8")
    with pytest.raises(EndpointError, match=r"keys:3: .*printable") as raised:
        read_keys(file=file, environment={})
    assert (raised.value.file, raised.value.line) == (str(file), 3) and "cl" not in str(raised.value).split(":3:")[1]
    file.write_text("\n")
    with pytest.raises(EndpointError, match="has no API key"):
        read_keys(file=file)
    with pytest.raises(EndpointError, match="nowhere"):
        read_keys(file=tmp_path / "nowhere")


SERVER = """
import asyncio
from cbsim.http.app import App
from cbsim.http.listen import listen
import sys
sys.path.insert(0, sys.argv[1])
from support.scripted import Scripted
from cbsim.http.tokenizer import open_tokenizer
backend = Scripted(open_tokenizer(), 0.001)
print(asyncio.run(listen(App(backend), port=0, ready=lambda host, port: print(port, flush=True))))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(Path(__file__).parents[1])], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(30) == 0
        assert f"why='{number.name}'" in process.stdout.read()


def test_the_simulator_starts_without_the_endpoints_libraries() -> None:
    script = "import sys, cbsim, cbsim.cli.parser; print({'starlette', 'uvicorn', 'tokenizers'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "set()"
