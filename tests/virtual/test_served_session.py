"""A served session is a run: the same requests, given beforehand, lead to the same steps; its plans can be derived."""

from __future__ import annotations

import asyncio
import random
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.calls import call
from support.scripted import next_tokens

from cbsim.errors import ScenarioError
from cbsim.http.backend import Generation, Stream
from cbsim.http.tokenizer import open_tokenizer
from cbsim.machine.simulate import Simulation
from cbsim.policy.request import RequestSpec
from cbsim.runs import running
from cbsim.runs.replan import rederive
from cbsim.runs.result import Result
from cbsim.runs.running import Terms
from cbsim.runs.served import Contents, Log, result_of
from cbsim.scenario.demand import Served
from cbsim.scenario.scenario import Scenario, scenario_of
from cbsim.virtual.clocks import Clock, VirtualLoop
from cbsim.virtual.simulated import SimulatedBackend
from cbsim.workload import served

SCHEDULERS = ("vllm", "transformers_fifo", "sglang", "sarathi", "trtllm", "orca", "static")
TOKENIZER = open_tokenizer()


def scenario(scheduler: str, loop: str, blocks: int = 60, **settings: Any) -> Scenario:
    """A small server: its cache is too small for all who come."""
    lengths = {"prompt_tokens": 9, "output_tokens": {"uniform": {"low": 1, "high": 40}}}
    cpu = {"schedule": {"base_s": 1e-3}, "update": {"base_s": 2e-3}}
    parts: dict[str, Any] = {
        "workload": {"kind": "synthetic", "requests": 20, **lengths},
        "scheduler": {"name": scheduler, **settings},
        "cost": {"kind": "constant", "step_s": 0.01, "cpu": cpu},
    }
    small = {"kv_cache": {"num_blocks": blocks}, "loop": {"mode": loop}}
    return scenario_of({"question": "Who is served?", "model": "tiny", "hardware": "laptop-cpu", **parts, **small})


async def visit(backend: SimulatedBackend, rng: random.Random, name: str) -> list[Stream]:
    """A client that asks three times, and sometimes leaves before the end."""
    streams = []
    for turn in range(3):
        await asyncio.sleep(rng.choice((0, 0.001, rng.random() / 10)))
        prompt = [rng.randrange(3)] * rng.randrange(1, 80)
        limit, ignored = rng.randrange(1, 50), rng.random() < 0.5
        stream = Stream(Generation(f"{name}-{turn}", prompt, max_tokens=limit, ignore_eos=ignored))
        backend.submit(stream)
        streams.append(stream)
        leaves_after = rng.choice((None, None, 0, 1, 7))
        taken = 0
        while leaves_after is None or taken < leaves_after:
            ids = await next_tokens(stream)
            taken += len(ids)
            if not ids:
                break
        backend.cancel(stream)
        assert stream.finish in ("length", "stop", "abort", "error")
        assert leaves_after is not None or taken == stream.tokens
    return streams


def session(
    scenario: Scenario, seed: int, clients: int = 12, *, real: bool = False
) -> tuple[SimulatedBackend, Result, list[Stream]]:
    loop = asyncio.new_event_loop() if real else VirtualLoop()
    clock = Clock(50.0) if real else Clock()
    backend = SimulatedBackend(scenario, clock, TOKENIZER, None, "test")

    async def together() -> list[Stream]:
        serving = asyncio.ensure_future(backend.run())
        visits = [visit(backend, random.Random(f"{seed} {at}"), str(at)) for at in range(clients)]
        streams = await asyncio.gather(*visits)
        backend.close()
        await serving
        return [stream for visited in streams for stream in visited]

    try:
        streams = loop.run_until_complete(together())
    finally:
        loop.close()
    return backend, result_of(backend.session, backend.log, {}), streams


def again(backend: SimulatedBackend) -> Result:
    """`cbsim run` on the requests that came."""
    scenario, requests = backend.session.scenario, backend.log.content()
    return running.one_loop(scenario, scenario.loop.mode, Simulation, Terms("test", requests=requests))


def check_same(backend: SimulatedBackend, result: Result) -> None:
    expected = again(backend)
    assert result.steps.equals(expected.steps)
    assert result.requests.equals(expected.requests)


@pytest.mark.parametrize("loop", ["sync", "async"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_arrivals_of_a_session_lead_to_its_steps(scheduler: str, loop: str) -> None:
    backend, result, streams = session(scenario(scheduler, loop), seed=1)
    check_same(backend, result)
    statuses = result.summary["requests_by_status"]
    assert statuses["length"]
    assert statuses["aborted"]
    pool = backend.machine.scheduler.pool
    pool.check()
    assert pool.free == pool.num_blocks, "a client that left has returned its blocks"
    emitted = {stream.generation.id: stream.tokens for stream in streams if stream.finish in ("length", "stop")}
    generated = dict(
        zip(result.requests["id"].to_pylist(), result.requests["generated_tokens"].to_pylist(), strict=True)
    )
    assert emitted == {name: generated[name] for name in emitted}


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 32), scheduler=st.sampled_from(("vllm", "sglang")), blocks=st.integers(12, 80))
def test_whoever_comes_and_leaves(seed: int, scheduler: str, blocks: int) -> None:
    backend, result, _ = session(scenario(scheduler, "async", blocks), seed, clients=6)
    check_same(backend, result)


def test_the_real_clock_changes_when_tokens_are_seen_and_nothing_else() -> None:
    """However late it was: who came is all that decides."""
    backend, result, _ = session(scenario("vllm", "async"), seed=2, real=True)
    check_same(backend, result)
    assert backend.timing.scale == 50
    assert backend.timing.steps > 0


@pytest.mark.parametrize(
    "transfers",
    [
        {"preemption_mode": "swap"},
        {"kv_connector": "simple_cpu", "cpu_bytes_to_use": 1 << 24},
        {"kv_connector": "offloading", "cpu_bytes_to_use": 1 << 24},
    ],
    ids=["swap", "simple_cpu", "offloading"],
)
def test_a_session_whose_kv_moves(transfers: dict[str, Any]) -> None:
    """Steps that wait for a move, or for a request, end when either comes."""
    backend, result, _ = session(scenario("vllm", "async", 24, **transfers), seed=3)
    assert len(result.transfers["step"])
    check_same(backend, result)


def test_a_saved_session_runs_and_replays(tmp_path: Path) -> None:
    _, result, _ = session(scenario("vllm", "async"), seed=5)
    folder = result.save(tmp_path / "session")
    assert rederive(folder) == (len(result.steps), len(result.steps), None)
    assert call("run", folder / "scenario.resolved.yaml", "--out", tmp_path / "runs", "--quiet").status == 0
    (run,) = (tmp_path / "runs").iterdir()
    for table in ("steps.parquet", "requests.parquet"):
        assert (run / table).read_bytes() == (folder / table).read_bytes()


def test_equal_texts_are_found_in_the_cache() -> None:
    """The KV of a text is there for whoever sends it next, its answer included, unless the salt is another one."""

    def cached(salts: tuple[str, str], forgotten: bool = False) -> int:
        loop = VirtualLoop()
        backend = SimulatedBackend(scenario("vllm", "sync"), Clock(), TOKENIZER, None, "test")

        async def twice() -> int:
            serving = asyncio.ensure_future(backend.run())
            for number, salt in enumerate(salts):
                stream = Stream(Generation(str(number), list(range(64)), max_tokens=4, cache_salt=salt))
                backend.submit(stream)
                while await next_tokens(stream):
                    pass
                if forgotten:
                    backend.forget_prefixes()
            backend.close()
            await serving
            return stream.cached_tokens

        hit = loop.run_until_complete(twice())
        loop.close()
        return hit

    assert cached(("", "")) == 48  # all full blocks of 16 but the last, of which something must be computed
    assert cached(("a", "a")) == 48
    assert cached(("a", "b")) == cached(("", "a")) == 0
    assert cached(("", ""), forgotten=True) == 0


@given(st.lists(st.lists(st.integers(0, 2), max_size=30), max_size=8), st.integers(1, 5))
def test_equal_ids_are_equal_texts(texts: list[list[int]], width: int) -> None:
    contents = Contents(width, 100)
    ids = [contents.prefix(content) for content in texts]
    for content, named in zip(texts, ids, strict=True):
        assert len(named) == len(content) // width
        for other, known in zip(texts, ids, strict=True):
            for block in range(min(len(named), len(known))):
                end = (block + 1) * width
                assert (named[block] == known[block]) == (content[:end] == other[:end])


LENGTHS = ("arrival_ns", "prompt_tokens", "output_tokens", "max_tokens", "priority")
WHOLE = RequestSpec(0, "a", 5, 20, 3, 9)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "index: is required"),
        ("[]", "row: got [], expected a JSON object"),
        ('{"cancel": 0, "at_ns": 1}', "cancel: got 0, expected the index of a request above"),
        (served.came(replace(WHOLE, index=1)), "index: got 1, expected 0"),
        (served.came(replace(WHOLE, id="a\n")), "id: got 'a\\n', expected a text that can be printed"),
        (served.came(WHOLE).replace('"prompt_tokens": 20', '"prompt_tokens": 0'), "prompt_tokens: got 0, must be >= 1"),
        (
            served.came(WHOLE).replace('"output_tokens": 3', '"output_tokens": 10'),
            "output_tokens: got 10, expected at most",
        ),
        (
            served.came(WHOLE).replace('"prefix": []', '"prefix": [[1, 99]]'),
            "prefix: got [1, 99], expected [first id, count]",
        ),
    ],
)
def test_a_log_that_cannot_be_read(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "arrivals.jsonl"
    file.write_text(line.rstrip() + "\n")
    with pytest.raises(ScenarioError) as error:
        served.read(file)
    assert f"{file}:1: {message}" in str(error.value)


def test_a_log_that_was_cut_in_a_line_is_read_up_to_there(tmp_path: Path) -> None:
    """As a killed session leaves it."""
    spec = RequestSpec(0, "a", 5, 20, 3, 9)
    file = tmp_path / "arrivals.jsonl"
    file.write_text(served.came(spec) + served.came(replace(spec, index=1, id="b"))[:-5])
    assert [read.id for read in served.read(file).open] == ["a"]
    again = scenario("vllm", "sync").model_copy(update={"workload": Served(kind="served", path=str(file))})
    result = running.one_loop(again, "sync", Simulation, Terms("test"))
    assert result.summary["requests"] == 1
    assert any("left out" in notice for notice in result.notices)


def test_a_full_disk_is_told_at_once_and_leaves_whole_lines(tmp_path: Path) -> None:
    log, emitted = Log(), list[str]()
    log.alarm = emitted.append
    log.write_to(tmp_path / "arrivals.jsonl")
    spec = RequestSpec(0, "a", 5, 20, 3, 9)
    log.came(spec)
    whole = (tmp_path / "arrivals.jsonl").read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, before[1]))  # a file cannot become longer
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        log.came(replace(spec, index=1, id="b"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "arrivals.jsonl").read_bytes() == whole
    (problem,) = emitted
    assert "arrivals.jsonl: cannot be written" in problem
    assert problem.endswith("what follows is in memory only")
    log.left(spec, 9)
    assert len(log.content().splitlines()) == 3, "memory has them all"


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 64))
def test_a_log_says_what_a_request_was(prefix: list[int], width: int) -> None:
    ids = tuple(prefix)
    spec = RequestSpec(0, "a", 5, 2000, 3, 9, -1, ids, width, len(ids) * width)
    session = served.parse(Path("log"), [served.came(spec), served.left(spec, 77)])
    (read,) = session.open
    assert (read.prefix, read.prefix_block_tokens, read.prefix_tokens) == (ids, width, len(ids) * width)
    assert all(getattr(read, name) == getattr(spec, name) for name in LENGTHS)
    assert session.cancels == [(77, read)]
