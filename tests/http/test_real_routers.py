"""Real routers in front of a simulated fleet: openai's client over them, every choice that of our policy.

Which server has a request is in the servers' logs. Of vllm-router the policy that reads KV events: it knows what each
server has cached from these alone.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx", reason="needs the extra `serve`")
openai = pytest.importorskip("openai", reason="needs the extra `measure`")

from support.calls import started
from support.routed import Counting, Texts

from cbsim.routers.sglang import CacheAware, CacheAwareSettings


def python_with(package: str) -> str | None:
    """Return a Python that has a router's package: that of the variable CBSIM_<PACKAGE>, or this one; else None."""
    here = sys.executable if importlib.util.find_spec(package) is not None else None
    return os.environ.get(f"CBSIM_{package.upper()}") or here


def needs(package: str, version: str) -> pytest.MarkDecorator:
    reason = f"needs {package} {version}: installed, or a Python with it in CBSIM_{package.upper()}"
    return pytest.mark.skipif(python_with(package) is None, reason=reason)


FLEET = """\
question: Who gets a request?
name: fleet
model: tiny
hardware: laptop-cpu
workload: {kind: synthetic, requests: 1, prompt_tokens: 20, output_tokens: 10}
scheduler: {name: vllm, max_num_seqs: 64}
kv_cache: {num_blocks: 40000, block_size: 16}
loop: {mode: sync}
cost: {kind: constant, step_s: 0.05}
fleet: {pools: [{count: 3}], router: {name: sglang_cache_aware}}
"""
SERVERS, REQUESTS, UNDER_WAY_TOKENS = 3, 80, 6000  # of 50 ms each: longer than the test
THRESHOLD, ABSOLUTE, RELATIVE = 0.4, 2, 1.2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def until(condition: Callable[[], Any]) -> Any:
    """Return what the condition is, once it is true; the test's timeout bounds it."""
    while not (value := condition()):
        time.sleep(0.01)
    return value


@contextmanager
def gateway(package: str, policy: str, port: int, workers: list[str], log: Path, *more: str) -> Iterator[str]:
    """The router's process, once it knows all servers."""
    command = [str(python_with(package)), "-m", f"{package}.launch_router", "--policy", policy, *more]
    command += ["--port", str(port), "--prometheus-port", str(port + 1), "--worker-urls", *workers]
    address = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        try:
            return httpx.get(f"{address}/workers").text.count('"url"') >= len(workers)
        except httpx.HTTPError:
            return False

    theirs = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=theirs)
        try:
            until(lambda: ready() or process.poll() is not None)
            assert process.poll() is None, log.read_text()[-3000:]
            yield address
        finally:
            process.terminate()
            process.wait(30)


@contextmanager
def fleet_served(folder: Path, port: int, *more: object) -> Iterator[tuple[list[str], list[Path]]]:
    """Three simulated servers: their addresses, and the logs of their requests."""
    (folder / "fleet.yaml").write_text(FLEET)
    words = ("serve", folder / "fleet.yaml", "--port", port, "--out", folder / "runs", "--grace", 0, *more)
    with started("cbsim", *words) as served:
        assert served.stdout is not None
        lines = [served.stdout.readline() for _ in range(2 * SERVERS)]
        addresses = [line.split(" at ")[1].partition("/v1")[0] for line in lines[:SERVERS]]
        yield addresses, [Path(line.split()[1]) / "arrivals.jsonl" for line in lines[SERVERS:]]


def counts(logs: list[Path]) -> list[int]:
    return [log.read_bytes().count(b'"arrival_ns"') for log in logs]


def receiver(logs: list[Path], before: list[int]) -> int:
    """Return the server that has a request since."""
    after = until(lambda: now if sum(now := counts(logs)) > sum(before) else None)
    return next(at for at in range(SERVERS) if after[at] > before[at])


def prompts(seed: int) -> Iterator[tuple[str, bool]]:
    """Prompts that begin alike, and whether each stays under way."""
    rng = random.Random(seed)
    stems = ["".join(rng.choices("abcd", k=rng.randint(8, 30))) for _ in range(5)]
    for _ in range(REQUESTS):
        stem = rng.choice(stems)
        tail = "".join(rng.choices("abcd", k=rng.randint(0, 20)))
        yield stem[: rng.choice([len(stem), rng.randint(1, len(stem))])] + tail, rng.random() < 0.12


@needs("sglang_router", "0.3.2")
def test_choices_of_the_sglang_router_are_our_policys(tmp_path: Path) -> None:
    """Requests that are not to end stay under way, so that the load of every server is known at each choice."""
    port = random.Random(os.getpid()).randrange(20_000, 30_000)
    thresholds = {"cache_threshold": THRESHOLD, "balance_abs_threshold": ABSOLUTE, "balance_rel_threshold": RELATIVE}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in thresholds.items()]
    words += ["--eviction-interval-secs=100000", "--disable-health-check"]
    with ExitStack() as stack:
        workers, logs = stack.enter_context(fleet_served(tmp_path, port))
        front = gateway("sglang_router", "cache_aware", port + 10, workers, tmp_path / "router.log", *words)
        address = stack.enter_context(front)
        client = stack.enter_context(openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0))

        def send(prompt: str, under_way: bool) -> int:
            """Return who got a request, once it has ended, or is under way."""
            before, load = counts(logs), sum(loads())
            tokens = UNDER_WAY_TOKENS if under_way else 1
            answer = client.completions.create(
                model="fleet", prompt=prompt, max_tokens=tokens, stream=under_way, extra_body={"ignore_eos": True}
            )
            if under_way:
                stack.callback(answer.close)
            until(lambda: sum(loads()) == load + under_way)
            return receiver(logs, before)

        def loads() -> list[int]:
            return [each["load"] for each in httpx.get(f"{address}/workers").json()["workers"]]

        order = [send(name, True) for name in ("A0", "B0", "C0")]  # equal loads: in the order of the router's list
        assert sorted(order) == [0, 1, 2]
        form = CacheAwareSettings(name="sglang_cache_aware", block_tokens=1, ties="first", **thresholds)
        fleet, texts = Counting(CacheAware(form, SERVERS), SERVERS), Texts()
        for name in ("A0", "B0", "C0"):
            fleet.send(texts.request(name))
        chosen = list[int]()
        for at, (prompt, under_way) in enumerate(prompts(1)):
            request = texts.request(prompt)
            chosen.append(order.index(send(prompt, under_way)))
            assert (at, prompt, fleet.send(request)) == (at, prompt, chosen[-1])
            if not under_way:
                fleet.end(request.id)
        assert {*chosen} == {0, 1, 2} and max(view.in_flight for view in fleet.views) > 2


@needs("vllm_router", "0.1.17")
def test_a_router_that_reads_kv_events_goes_where_the_prompt_is_cached(tmp_path: Path) -> None:
    """`kv_aware` of vllm-router credits a server with exactly the tokens that the server finds in its cache then; our
    policy on KV events makes the same choices. Each server has computed a prompt that the router has not seen.
    """
    pytest.importorskip("zmq", reason="needs the extra `kv-events`")
    port = random.Random(os.getpid() + 1).randrange(20_000, 30_000)
    log, texts = tmp_path / "router.log", Texts()
    router = CacheAware(CacheAwareSettings(name="sglang_cache_aware", kv_events=True), SERVERS)
    ours = Counting(router, SERVERS)
    with ExitStack() as stack:
        workers, logs = stack.enter_context(fleet_served(tmp_path, port, "--kv-events", port + 20))
        words = ["--log-level", "debug", "--kv-event-block-size", "16", "--kv-event-model", "fleet"]
        for at, worker in enumerate(workers):
            words += ["--kv-event-source", f"{worker}=tcp://127.0.0.1:{port + 20 + at}"]
            words += ["--kv-event-replay-source", f"{worker}=tcp://127.0.0.1:{port + 20 + SERVERS + at}"]
        front = gateway("vllm_router", "kv_aware", port + 10, workers, log, *words)
        address = stack.enter_context(front)

        def complete(base: str, prompt: list[int]) -> int:
            """Return how many tokens of a prompt the server had cached."""
            with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client:
                answer = client.completions.create(model="fleet", prompt=prompt, max_tokens=1)
            return int(answer.usage.prompt_tokens_details.cached_tokens)

        stems = [[100 * (1 + at) + token for token in range(64)] for at in range(SERVERS)]
        for worker, stem in zip(workers, stems, strict=True):
            complete(worker, stem)
            until(lambda url=worker: re.search(rf"sequence advanced source={url} ", plain(log)))
        rng = random.Random(1)
        for number in range(24):
            at, tokens = number % SERVERS, 16 * rng.randint(1, 4)
            prompt = [*stems[at][:tokens], *rng.choices(range(1000, 4000), k=20)]
            before = counts(logs)
            cached = complete(address, prompt)
            assert (number, receiver(logs, before), cached) == (number, at, tokens)
            request = texts.request("a" * len(prompt))
            for server, view in enumerate(ours.views):
                view.cached[request.id] = tokens if server == at else 0
            assert ours.send(request) == at
            ours.end(request.id)
        credited = re.findall(r"KV prefix decision .*credited_prefix_tokens=(\d+)", plain(log))
        assert len(credited) == 24 and {*credited} == {"16", "32", "48", "64"}


def plain(log: Path) -> str:
    return re.sub("\x1b\\[[0-9;]*m", "", log.read_text())
