"""The endpoint's cost of a streamed token, beside the least that asyncio can do: bytes written to transports from the
loop that makes the steps, without HTTP parsing, tasks or text. `python reports/endpoint/token_cost.py [--json]`.

Each server is a process of its own, whose CPU time is measured. All serve the same streams, in alternation: the bare
writer, the endpoint in front of a script, and the endpoint in front of the simulated machine, metered, as `serve` is.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing as mp
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from statistics import median

from cbsim.http.answers import DONE
from cbsim.http.app import App
from cbsim.http.listen import Stop, listen
from cbsim.http.metrics import VllmMeter
from cbsim.http.tokenizer import open_tokenizer
from cbsim.scenario.scenario import scenario_of
from cbsim.virtual.clocks import Clock
from cbsim.virtual.simulated import SimulatedBackend

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.scripted import Scripted  # type: ignore[import-not-found]

HEAD = (
    b'data: {"id":"cmpl-0","object":"text_completion","created":1700000000,"model":"bare",'
    b'"choices":[{"index":0,"text":"'
)
TAIL = b'","logprobs":null,"finish_reason":null}]}\n\n'
BARE = "bare"
SCENARIO = {
    "question": "What does a token cost?",
    "model": "llama-3.1-8b",
    "hardware": "h100-sxm",
    "workload": {"kind": "synthetic", "requests": 1, "prompt_tokens": 1, "output_tokens": 1},
    "scheduler": {"name": "vllm", "max_num_seqs": 256},
    "loop": {"mode": "async"},
}
BAR = 3.2
"""The endpoint's CPU time a token may be so many times the bare writer's."""


@dataclass(frozen=True, slots=True)
class Work:
    """So many streams, each of so many tokens, one every `itl_s`; they begin `apart_s` after each other."""

    streams: int = 256
    tokens: int = 100
    itl_s: float = 0.02
    apart_s: float = 0.004


STEADY, FASTER = Work(tokens=500), Work(tokens=500, itl_s=0.01)


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time a token; how late the steps were made, as the server saw it, once all streams had begun."""

    us_per_token: float
    late_median_ms: float
    late_p99_ms: float
    late_most_ms: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs by server, in the order in which they were made."""

    costs: Mapping[str, Sequence[Cost]]

    def us_per_token(self, name: str) -> float:
        return median(cost.us_per_token for cost in self.costs[name])

    @property
    def ratios(self) -> dict[str, float]:
        """CPU time a token, the bare writer's being 1."""
        return {name: self.us_per_token(name) / self.us_per_token(BARE) for name in self.costs}

    def __str__(self) -> str:
        lines = [f"{'server':<11}{'CPU us/token':>13}{'ratio':>7}   late: median, p99, most, ms"]
        for name, costs in self.costs.items():
            late = [median(getattr(cost, f"late_{each}_ms") for cost in costs) for each in ("median", "p99", "most")]
            times = ", ".join(f"{each:.2f}" for each in late)
            lines.append(f"{name:<11}{self.us_per_token(name):>13.1f}{self.ratios[name]:>7.2f}   {times}")
        return "\n".join([*lines, f"bar: a ratio of {BAR}"])


def compare(work: Work, repeats: int = 3) -> Comparison:
    """All of them, `repeats` times in turn."""
    with ExitStack() as stack:
        servers = {name: stack.enter_context(_server(serve, work.itl_s)) for name, serve in SERVERS.items()}
        costs: dict[str, list[Cost]] = {name: [] for name in servers}
        for _ in range(repeats):
            for name, server in servers.items():
                costs[name].append(_measure(server, work))
    return Comparison(costs)


def bench(*, as_json: bool) -> None:
    """Print it, at 50 and at 100 tokens a second and stream."""
    measured = {"50 tokens/s each": compare(STEADY), "100 tokens/s each": compare(FASTER)}
    if as_json:
        ratios = {name: {"ratio": each.ratios, "costs": _plain(each)} for name, each in measured.items()}
        print(json.dumps(ratios, indent=2))
        return
    for name, comparison in measured.items():
        print(f"256 streams, {name}\n{comparison}\n")


def _plain(comparison: Comparison) -> dict[str, list[dict[str, float]]]:
    return {name: [asdict(cost) for cost in costs] for name, costs in comparison.costs.items()}


# -- servers, each in a process of its own


Serve = Callable[[Pipe, float], None]


@dataclass(frozen=True, slots=True)
class _Server:
    pipe: Pipe
    port: int

    def ask(self) -> tuple[float, list[float]]:
        """Its CPU seconds, and how many seconds late each step was since it was asked last."""
        self.pipe.send("cpu")
        cpu_s, late_s = self.pipe.recv()
        return cpu_s, late_s


@contextmanager
def _server(serve: Serve, itl_s: float) -> Iterator[_Server]:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, itl_s), daemon=True)
    process.start()
    theirs.close()
    try:
        yield _Server(ours, ours.recv())
    finally:
        ours.close()
        process.join(10.0)
        if process.is_alive():
            process.kill()


def _measure(server: _Server, work: Work) -> Cost:
    before, _ = server.ask()
    tokens = asyncio.run(_read_all(server.port, work))
    after, late_s = server.ask()
    assert tokens == work.streams * work.tokens, f"{tokens} tokens came"
    coming = int(work.streams * work.apart_s / work.itl_s)  # steps in which requests came
    late_ms = sorted(late * 1e3 for late in late_s[coming:] or late_s)
    return Cost((after - before) / tokens * 1e6, median(late_ms), late_ms[int(0.99 * len(late_ms))], late_ms[-1])


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _bare(pipe: Pipe, itl_s: float) -> None:
    asyncio.run(_Bare(itl_s).run(pipe))


def _endpoint(pipe: Pipe, itl_s: float) -> None:
    asyncio.run(_listen(pipe, itl_s))


async def _answer(pipe: Pipe, late: list[float], done: Callable[[], object]) -> None:
    """Tell what was used whenever the other side asks, until it hangs up."""
    loop = asyncio.get_running_loop()

    def asked() -> None:
        try:
            pipe.recv()
        except EOFError:
            loop.remove_reader(pipe.fileno())
            done()
        else:
            pipe.send((_cpu_s(), [*late]))
            late.clear()

    loop.add_reader(pipe.fileno(), asked)


class _Bare:
    """The least: a protocol that answers any request with TOKENS tokens, written by the loop that makes the steps."""

    def __init__(self, itl_s: float) -> None:
        self.itl_s = itl_s
        self.late_s: list[float] = []
        self.writers: dict[_Writer, None] = {}

    async def run(self, pipe: Pipe) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(partial(_Writer, self), "127.0.0.1", 0)
        steps = loop.create_task(self.steps())
        await _answer(pipe, self.late_s, steps.cancel)
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.wait({steps})

    async def steps(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = due + self.itl_s if self.writers else loop.time() + self.itl_s
            await asyncio.sleep(max(0.0, due - loop.time()))
            if self.writers:
                self.late_s.append(loop.time() - due)
            for writer in [*self.writers]:
                writer.put(b" tok")


class _Writer(asyncio.Protocol):
    def __init__(self, server: _Bare) -> None:
        self.server, self.left = server, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.write = transport.write

    def data_received(self, data: bytes) -> None:
        self.left = int(data.split(b'"max_tokens":')[1].split(b",")[0])
        self.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        self.server.writers[self] = None

    def put(self, text: bytes) -> None:
        chunk = HEAD + text + TAIL
        self.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        self.left -= 1
        if not self.left:
            self.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(DONE), DONE))
            del self.server.writers[self]

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.server.writers.pop(self, None)


async def _listen(pipe: Pipe, itl_s: float) -> None:
    backend, stop = Scripted(open_tokenizer(), itl_s), Stop()
    await _answer(pipe, backend.late_s, stop.request)
    await listen(App(backend), port=0, stop=stop, signals=False, ready=lambda _, port: pipe.send(port))


def _simulated(pipe: Pipe, itl_s: float) -> None:
    asyncio.run(_simulate(pipe, itl_s))


async def _simulate(pipe: Pipe, itl_s: float) -> None:
    late_s: list[float] = []
    clock, stop = _Noted(late_s), Stop()
    scenario = scenario_of({**SCENARIO, "cost": {"kind": "constant", "step_s": itl_s}})
    backend = SimulatedBackend(scenario, clock, open_tokenizer(), None, "bench")
    await _answer(pipe, late_s, stop.request)
    app = App(backend, meter=VllmMeter(backend))
    await listen(app, port=0, stop=stop, signals=False, ready=lambda _, port: pipe.send(port))


class _Noted(Clock):
    """Notes each lag that it is asked for."""

    def __init__(self, late_s: list[float]) -> None:
        super().__init__()
        self._late_s = late_s

    def lag_s(self, at_ns: int) -> float:
        lag_s = super().lag_s(at_ns)
        self._late_s.append(max(0.0, lag_s))
        return lag_s


SERVERS = {BARE: _bare, "scripted": _endpoint, "simulated": _simulated}


# -- the client


async def _read_all(port: int, work: Work) -> int:
    """Tokens that came on all streams."""
    loop = asyncio.get_running_loop()
    ends = [loop.create_future() for _ in range(work.streams)]
    for end in ends:
        await loop.create_connection(partial(_Reader, end, work.tokens), "127.0.0.1", port)
        await asyncio.sleep(work.apart_s)
    return sum(await asyncio.gather(*ends))


class _Reader(asyncio.Protocol):
    """Counts the tokens of one stream, to its end."""

    def __init__(self, end: asyncio.Future[int], tokens: int) -> None:
        self.end, self.tokens = end, tokens
        self.seen, self.tail = 0, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.transport = transport
        body = b'{"prompt":"a b c","max_tokens":%d,"stream":true,"ignore_eos":true}' % self.tokens
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        )
        transport.write(head % len(body) + body)

    def data_received(self, data: bytes) -> None:
        told = self.tail + data  # the tail's own tokens have been counted
        self.seen += told.count(b'"text":') - self.tail.count(b'"text":')
        self.tail = told[-64:]
        if b"[DONE]" in self.tail:
            self.transport.close()
            if not self.end.done():
                self.end.set_result(self.seen)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.end.done():
            self.end.set_exception(exc or EOFError("the stream ended early"))


if __name__ == "__main__":
    bench(as_json="--json" in sys.argv)
