"""Fleets of real processes by commands: what a run leaves behind when a process of it is killed; one endpoint."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
openai = pytest.importorskip("openai", reason="clients are served")

from support import calls
from support.engine.calls import SMALL, call, derived, started

import cbsim

PARTS = """\
fleet:
  pools: [{name: prefill, role: prefill}, {name: decode, role: decode}]
  router: {name: round_robin}
  hand_off: {link: {bandwidth_gb_s: 1}}
"""
SETTINGS = ("model.max_position=8192", "kv_cache.num_blocks=2200", "loop.mode=async")
ROOM = [word for setting in SETTINGS for word in ("--set", setting)]
PROMPTS = [f"the server is number {at}" for at in range(6)]


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    path = tmp_path / "pair.yaml"
    path.write_text(SMALL + "loop: {mode: sync}\n" + PARTS)
    return path


def children(of: int) -> list[int]:
    """The processes that a process has started and that run a server or its worker, oldest first."""
    found = []
    for task in Path(f"/proc/{of}/task").iterdir():
        found += [int(each) for each in (task / "children").read_text().split()]
    return [each for each in sorted(set(found)) if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()]


def gone(processes: list[int]) -> bool:
    """Whether they all end within seconds; one that nobody waits for has ended, too."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if not any(_runs(each) for each in processes):
            return True
        time.sleep(0.05)
    return False


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_pair_writes_what_a_simulated_one_does(pair: Path, tmp_path: Path) -> None:
    """In worker processes; the texts are those of one engine in this one, the plans of both servers follow from their
    polls.
    """
    out = {name: tmp_path / name for name in ("apart", "one", "simulated")}
    one = tmp_path / "one.yaml"
    one.write_text(SMALL + "loop: {mode: sync}\n")
    for name, path, device in (("apart", pair, "process"), ("one", one, "inline")):
        said = call("replay", path, "--device", device, "--save-tokens", "--quiet", "--out", out[name])
        assert said.status == 0, said
    assert calls.call("run", pair, "--quiet", "--out", out["simulated"]).status == 0
    runs = {name: calls.runs(path)[0] for name, path in out.items()}
    texts = [(runs[name] / "tokens.parquet").read_bytes() for name in ("apart", "one")]
    assert texts[0] == texts[1]
    derived(runs["apart"], runs["simulated"])
    assert cbsim.read(runs["apart"]).summary["hand_off"]["transfers"] == 5  # though each server has a clock of its own
    files = [{file.name for file in runs[name].iterdir()} - {"tokens.parquet"} for name in ("apart", "simulated")]
    assert files[0] == files[1]
    summaries = [json.loads((runs[name] / "summary.json").read_text()) for name in ("apart", "simulated")]
    assert [each["hand_off"]["transfers"] for each in summaries] == [5, 5]
    assert summaries[0]["requests_by_status"] == summaries[1]["requests_by_status"]


slow = pytest.mark.slow


@pytest.mark.parametrize("victim", ["prefill", "decode", *(pytest.param(x, marks=slow) for x in ("worker", "front"))])
def test_a_killed_process_leaves_nothing(victim: str, pair: Path, tmp_path: Path) -> None:
    """Within seconds, whoever it is; a line says who, and what the others did can be read."""
    load = ("workload.requests=300", "workload.output_tokens=8", "scheduler.max_num_seqs=8")
    pace = ("--inject", "prepare=20")  # a run of seconds on any machine
    words = ("replay", pair, "--device", "process", *pace, *(word for each in load for word in ("--set", each)))
    with started(*words, "--out", tmp_path / "out") as run:
        assert run.stderr is not None
        assert any(re.search(r" [1-9][0-9]* of 300 requests", line) for line in run.stderr), "nothing is served"
        servers = children(run.pid)
        workers = [child for server in servers for child in children(server)]
        assert len(servers) == len(workers) == 2
        killed = {"prefill": servers[0], "decode": servers[1], "worker": workers[0], "front": run.pid}[victim]
        os.kill(killed, signal.SIGKILL)
        _, err = run.communicate(timeout=110)
        assert gone([*servers, *workers])
    if victim == "front":
        return
    assert run.returncode == 1
    name = "server 1 (decode)" if victim == "decode" else "server 0 (prefill)"
    how = "the worker process was killed by signal 9" if victim == "worker" else "was killed by signal 9"
    assert f"{name} {how}" in err and "Traceback" not in err
    (path,) = calls.runs(tmp_path / "out")
    summary = json.loads((path / "summary.json").read_text())
    statuses = summary["requests_by_status"]
    assert statuses["failed"] if victim == "decode" else statuses["length"] == 300
    assert statuses["length"] + statuses["failed"] == summary["requests"] == 300
    assert summary["ttft_s"].get("min", 0) >= 0, "times of requests whose steps are lost"


async def texts(address: str) -> list[str]:
    import asyncio

    async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:

        async def text(at: int) -> str:
            fields: dict[str, Any] = {"model": "m", "prompt": PROMPTS[at], "max_tokens": 20, "temperature": 0}
            answer = await client.completions.create(**fields, stream=at % 2 > 0, extra_body={"ignore_eos": True})
            return "".join([part.choices[0].text async for part in answer]) if at % 2 else answer.choices[0].text

        whole = await asyncio.gather(*map(text, range(len(PROMPTS))))
        left = await client.completions.create(
            model="m", prompt=PROMPTS[0], max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in left:
            break
        await left.close()
        return whole


@pytest.fixture
def addresses(pair: Path, tmp_path: Path) -> Iterator[Any]:
    alone = tmp_path / "alone.yaml"
    alone.write_text(SMALL + "loop: {mode: sync}\n")
    words = ("--device", "inline", "--served-model-name", "m", "--port", 0, "--out", tmp_path / "out")
    with started("serve", pair, *ROOM, *words) as apart, started("serve", alone, *ROOM, *words) as one:
        yield apart, one


def test_one_endpoint_two_roles(addresses: Any, tmp_path: Path) -> None:
    """Texts are those of one server; a client that leaves, long before its last token, is cancelled at both; the
    session's plans follow.
    """
    import asyncio

    said = []
    for process in addresses:
        said.append(asyncio.run(texts(process.stdout.readline().split(" at ")[1].partition(",")[0])))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert said[0] == said[1] and len({*said[0]}) > 1
    paths = calls.runs(tmp_path / "out")
    derived(*paths)
    counts = [json.loads((path / "summary.json").read_text())["requests_by_status"] for path in paths]
    assert sorted(count.get("handed_off", 0) for count in counts) == [0, len(PROMPTS) + 1]
    assert all(count["aborted"] == 1 for count in counts)
