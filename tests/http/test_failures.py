"""Failures on demand: their shares, by seed; and a fleet served and routed by commands, of which some requests fail."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")
openai = pytest.importorskip("openai", reason="needs the extra `measure`")

from support.calls import call, environment, refused, started

from cbsim.http.failures import MOST_PARTS, Failures

FLEET = """\
question: Who gets a request?
name: several
model: tiny
hardware: laptop-cpu
workload: {kind: synthetic, requests: 1, prompt_tokens: 20, output_tokens: 4}
scheduler: {name: vllm}
kv_cache: {num_blocks: 64}
loop: {mode: sync}
cost: {kind: constant, step_s: 0.001}
fleet: {pools: [{count: 2}], router: {name: round_robin}}
"""


def test_failures_follow_from_seed_and_number() -> None:
    shares = {"429": 0.1, "500": 0.05, "break": 0.2}
    drawn = [Failures(shares, 3).drawn(number) for number in range(4000)]
    assert drawn == [Failures(shares, 3).drawn(number) for number in range(4000)]
    assert drawn != [Failures(shares, 4).drawn(number) for number in range(4000)]
    for name, share in shares.items():
        parts = [part for failure, part in drawn if failure == name]
        assert abs(len(parts) / 4000 - share) < 0.03  # five deviations
        assert {*parts} == {*range(MOST_PARTS + 1)}
    assert Failures().drawn(0) == ("", 0)


@pytest.mark.parametrize(
    "value", ["404=0.1", "503=2", "503=0.6,break=0.6", "503=-0.1", "503", "nan", "503=0.1,503=0.2"]
)
def test_shares_that_are_none_are_refused(value: str) -> None:
    said = call("serve", "tiny_cpu", "--fail", value)
    assert said.status == 2 and "--fail" in said.err


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a", "http://a:99999", "http://a/v1?x=1", "http://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    said = call("route", url)
    assert said.status == 2 and "URL: got " in said.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--router", "robin"), "router.name: got 'robin', expected one of dynamo"),
        (("--router", "llmd", "--set", "router.thresh=1"), "router.thresh"),
        (("--set", "signals.metrics_s=0"), "signals.metrics_s: got 0, must be >= 0.001"),
        (("--set", "signals.events_s=1"), "--set signals.events_s=1: expected router.FIELD=VALUE, but router.name by"),
        (("--router", "llmd", "--set", "router.name=random"), "--set router.name=random: expected router.FIELD=VALUE"),
        (("--set", "pools.0.count=3"), "--set pools.0.count=3: expected router.FIELD=VALUE"),
        (("http://127.0.0.1:1/v1",), "URL: got http://127.0.0.1:1, http://127.0.0.1:1, expected each server once"),
        (("--host", "0.0.0.0"), "host 0.0.0.0 is open to other machines"),
        (("--tokenizer", "nowhere"), "nowhere/tokenizer.json: cannot be read"),
        (("--out", __file__), f"--out {__file__}: cannot be written: Not a directory"),
    ],
)
def test_mistakes_of_route_are_one_line(words: tuple[str, ...], says: str) -> None:
    refused(call("route", "http://127.0.0.1:1", *words), 2, says)


@pytest.mark.parametrize(
    ("pools", "words", "says"),
    [
        (
            "{count: 2, autoscale: {most: 4, rule: {name: hpa, target: 4}}}",
            (),
            "several.yaml: fleet.pools.0.autoscale: servers come",
        ),
        ("{count: 2}], failures: [{server: 0, at_s: 1}", (), "several.yaml: fleet.failures: servers come and go"),
        ("{count: 2}", ("--fail-seed", 3), "--fail-seed: got 3, expected --fail with it"),
        ("{count: 2}", ("--kv-events", 65535), "cannot publish KV events on 127.0.0.1:65536"),
        ("{count: 2}", ("--kv-events", 5557, "--host", "0.0.0.0"), "host 0.0.0.0 is open to other machines"),
        ("{count: 2}", ("--port", 65535), "--port: got 65535, expected at most 65534"),
    ],
)
def test_mistakes_of_a_served_fleet_are_one_line(pools: str, words: tuple[Any, ...], says: str, tmp_path: Path) -> None:
    """And no directory of a session that never was is left."""
    if "--kv-events" in words:
        pytest.importorskip("zmq", reason="needs the extra `kv-events`")
    (tmp_path / "several.yaml").write_text(FLEET.replace("{count: 2}", pools))
    refused(call("serve", tmp_path / "several.yaml", "--out", tmp_path / "runs", *words), 2, says)
    assert not (tmp_path / "runs").exists()


def test_a_fleet_is_served_and_routed_by_commands(tmp_path: Path) -> None:
    """Each server has a port and a run; of three requests about one fails with 503 there, and is tried at the other."""
    (tmp_path / "several.yaml").write_text(FLEET)
    words = ("serve", tmp_path / "several.yaml", "--port", 0, "--out", tmp_path, "--fail", "503=0.3", "--fail-seed", 2)
    with started("cbsim", *words) as served:
        assert served.stdout is not None
        lines = [served.stdout.readline() for _ in range(4)]
        addresses = [line.split(" at ")[1].partition(",")[0] for line in lines[:2]]
        runs = [Path(line.split()[1]) for line in lines[2:]]
        with started(
            "cbsim", "route", *addresses, "--router", "least_in_flight", "--port", 0, "--out", tmp_path
        ) as front:
            assert front.stdout is not None
            address = front.stdout.readline().split(" at ")[1].strip()
            run = Path(front.stdout.readline().split()[1])
            with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
                texts, refused = list[str](), 0
                for at in range(12):
                    try:
                        chat = [{"role": "user", "content": f"hello {at}"}]
                        answer = client.chat.completions.create(model="several", messages=chat, max_tokens=4)
                        texts.append(answer.choices[0].message.content)
                    except openai.InternalServerError as error:
                        refused += error.status_code == 503
            front.send_signal(signal.SIGINT)
            out, err = front.communicate(timeout=60)
            assert front.returncode == 0, err
        served.send_signal(signal.SIGINT)
        served.communicate(timeout=60)
        assert served.returncode == 0
    assert len(texts) + refused == 12 and len({*texts}) == 1
    assert f"12 requests: {len(texts)} finished, {refused} refused, 0 cancelled, 0 failed" in out
    said = call("replan", run, *runs)
    assert said.status == 0, said.out
    choices = int(said.out.split(" of ")[0].rsplit(" ", 1)[1])
    assert choices > 12 and f"{choices} of {choices} choices identical" in said.out
    assert said.out.count("plans identical") == 2


def test_a_router_of_a_user_that_chooses_no_server_ends_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With status 1 and one line, as that of a simulated fleet; the directory has the reason, and `replan` says it."""
    (tmp_path / "seven.py").write_text(
        "from cbsim.routers.base import RouterBase, RouterKind\n"
        "from cbsim.routers.simple import PlainSettings\n"
        "class Seven(RouterBase):\n"
        "    def choose(self, request, views, now_ns):\n"
        "        return 7\n"
        "KIND = RouterKind(name='seven', about='', settings=PlainSettings, make=lambda *_: Seven())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ("--router", "seven:KIND", "--port", 0, "--out", tmp_path / "runs")
    with started("cbsim", "serve", "tiny_cpu", "--port", 0, "--out", tmp_path, "--quiet") as server:
        assert server.stdout is not None
        url = server.stdout.readline().split(" at ")[1].partition(",")[0]
        with started("cbsim", "route", url, *words, PYTHONPATH=f"{tmp_path}:{environment()['PYTHONPATH']}") as front:
            assert front.stdout is not None
            address = front.stdout.readline().split(" at ")[1].strip()
            client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
            with client, pytest.raises(openai.InternalServerError, match="got 7, expected 0 to 0"):
                client.completions.create(model="any", prompt="hello", timeout=60)
            _, err = front.communicate(timeout=60)
    problem = "router seven:KIND, choose, request request-0: got 7, expected 0 to 0"
    assert (front.returncode, err) == (1, f"cbsim: {problem}\n")
    (path,) = (tmp_path / "runs").iterdir()
    assert (path / "INCOMPLETE").read_text() == f"{problem}\n"
    said = call("replan", path)
    assert said == (0, f"{path}: there was no choice to compare; the run is incomplete: {problem}\n", "")
    (path / "choices.jsonl").unlink()
    refused(
        call("replan", path), 2, "summary.json: schema_version: is missing: it is not that of a run", "choices.jsonl"
    )


def test_a_killed_server_fails_streams_under_way_and_takes_no_more(tmp_path: Path) -> None:
    """Streams that have begun at a server that is killed end with an error, those of the other one are whole; requests
    that come later, and one that waits for its answer as a whole, go to the other one.
    """
    slow = FLEET.replace("step_s: 0.001", "step_s: 0.02").split("fleet:")[0]
    (tmp_path / "slow.yaml").write_text(slow)
    words = ("serve", tmp_path / "slow.yaml", "--port", 0, "--out", tmp_path, "--grace", 0)
    with started("cbsim", *words) as killed, started("cbsim", *words) as left:
        assert killed.stdout is not None and left.stdout is not None
        addresses = [each.stdout.readline().split(" at ")[1].partition(",")[0] for each in (killed, left)]
        options = ("--router", "round_robin", "--port", 0, "--out", tmp_path)
        with started("cbsim", "route", *addresses, *options) as front:
            assert front.stdout is not None
            address, run = front.stdout.readline().split(" at ")[1].strip(), Path(front.stdout.readline().split()[1])
            ends = asyncio.run(_with_a_kill(address, killed.kill))
            front.send_signal(signal.SIGINT)
            out, err = front.communicate(timeout=60)
            assert front.returncode == 0, err
    assert ends == {"error": 3, "whole": 3 + 1 + 4}
    assert "11 requests: 8 finished, 0 refused, 0 cancelled, 3 failed" in out
    assert "choices identical" in call("replan", run).out


async def _with_a_kill(address: str, kill: Callable[[], None]) -> Counter[str]:
    """Six streams and an answer as a whole are under way when a server is killed; four more come later."""
    async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
        fields = {"model": "several", "prompt": "hello", "max_tokens": 60, "extra_body": {"ignore_eos": True}}

        async def rest(stream: Any) -> str:
            try:
                return "whole" if len([part async for part in stream]) == 59 else "cut"
            except openai.APIError:
                return "error"

        streams = [await client.completions.create(**fields, stream=True) for _ in range(6)]
        for stream in streams:
            await anext(aiter(stream))
        whole = asyncio.create_task(client.completions.create(**fields))
        await asyncio.sleep(0)
        kill()
        ends = [
            *await asyncio.gather(*map(rest, streams)),
            "whole" if (await whole).usage.completion_tokens == 60 else "",
        ]
        for _ in range(4):
            answer = await client.completions.create(**fields)
            ends.append("whole" if answer.usage.completion_tokens == 60 else "")
    return Counter(ends)
