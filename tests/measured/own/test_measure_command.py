"""`cbsim measure` as a command, what it knows of a server, and the directory that it reads again."""

from __future__ import annotations

import asyncio
import builtins
import csv
import json
import math
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.calls import call, refused, started
from support.serving import serving

from cbsim.errors import ScenarioError, UserError
from cbsim.measured.own import campaign, measurement, server
from cbsim.measured.own.clients import Measured
from cbsim.measured.own.measurement import Facts

VLLM = """\
(APIServer pid=7) INFO 11-14 06:32:25 [api_server.py:1839] vLLM API server version 0.11.0
(APIServer pid=7) INFO 11-14 06:32:25 [utils.py:233] non-default args: {'host': '0.0.0.0', 'model': '/m/Q', \
'max_model_len': 8192, 'served_model_name': ['q'], 'gpu_memory_utilization': 0.85, 'enable_prefix_caching': False}
(EngineCore pid=9) INFO 11-14 06:33:10 [kv_cache_utils.py:1087] GPU KV cache size: 112,347 tokens
"""
SGLANG = """\
[2026-03-04 15:12:54] server_args=ServerArgs(model_path='m/L', tokenizer_mode='auto', trust_remote_code=False, \
mem_fraction_static=0.85, max_running_requests=None, context_length=-1, \
cpu_offload_gb=0, chunked_prefill_size=8192, page_size=1)
[2026-03-04 15:13:40] max_total_num_tokens=443000, chunked_prefill_size=8192, max_prefill_tokens=16384, context_len=8192
"""
METRICS = """\
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",num_gpu_blocks="7000"} 1.0
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="1",num_gpu_blocks="7000"} 1.0
vllm:num_requests_running{engine="0",model_name="a, \\"b\\""} 3.0
vllm:num_requests_running{engine="1",model_name="a"} 4.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:prompt_tokens_total{engine="0"} 1e+06
vllm:time_to_first_token_seconds_bucket{le="0.1"} 5.0
"""


class Pages:
    """A client of a server that has these pages."""

    def __init__(self, **pages: str) -> None:
        self.pages = pages

    async def get(self, url: str, **_: Any) -> str:
        return self.pages.get(url.rpartition("/")[2], "")


def known(log: Path | None = None, **pages: str) -> Facts:
    pages = {"models": json.dumps({"data": [{"id": "q", "owned_by": "vllm", "max_model_len": 4096}]})} | pages
    return asyncio.run(server.Server("http://x", Pages(**pages), 0).facts("", log))  # type: ignore[arg-type]


def test_each_fact_has_its_source(tmp_path: Path) -> None:
    """The first source of a fact counts; a fact of the log is one of the server's start."""
    log = tmp_path / "vllm.log"
    log.write_text(VLLM)
    facts = known(log, version='{"version": "0.11.1"}', metrics=METRICS)
    assert (facts.engine, facts.version, facts.max_model_len) == ("vllm", "0.11.1", 4096)
    assert (facts.num_blocks, facts.block_size, facts.sources["num_blocks"]) == (7000, 16, "/metrics")
    assert facts.flags["enable_prefix_caching"] is True and facts.flags["gpu_memory_utilization"] == 0.85
    assert facts.sources["flags.gpu_memory_utilization"] == str(log)
    alone = known(log)
    assert (alone.num_blocks, alone.sources["num_blocks"]) == (112_347 // 16, str(log))
    assert alone.sources["block_size"] == "assumed, the engine's default" and alone.version == "0.11.0"


def test_facts_that_cannot_be_are_left_out(tmp_path: Path) -> None:
    """Whatever a server says, it is said of it, or not known."""
    odd = 'vllm:cache_config_info{block_size="x",num_gpu_blocks="-1",sources="a",flags="b"} 1.0\n'
    odd += "sglang:max_total_num_tokens 1e99\nvllm:num_requests_running nan\n"
    models = json.dumps({"data": [{"id": "q", "owned_by": 3, "max_model_len": True}, "p", None]})
    facts = known(models=models, version='{"version": 1.5}', metrics=odd)
    assert facts == Facts(engine="vllm", model="q", flags=facts.flags, sources=facts.sources)
    assert facts.flags == {"max_total_num_tokens": int(1e99)} and len(facts.lines()) == 3


def test_facts_of_sglang(tmp_path: Path) -> None:
    log = tmp_path / "sglang.log"
    log.write_text(SGLANG)
    models = json.dumps({"data": [{"id": "L", "owned_by": "sglang"}]})
    facts = known(log, models=models, metrics='sglang:token_usage{model_name="L"} 0.28\n')
    assert (facts.engine, facts.num_blocks, facts.block_size) == ("sglang", 443_000, 1)
    assert facts.flags["mem_fraction_static"] == 0.85 and facts.sources["flags.mem_fraction_static"] == str(log)
    assert "max_running_requests" not in facts.flags, "it is None: not known"
    assert facts.max_model_len is None and facts.flags["cpu_offload_gb"] == 0


def test_a_reading_of_metrics() -> None:
    """Sums over engines, without their prefix; no buckets of histograms."""
    reading = asyncio.run(server.Server("http://x", Pages(metrics=METRICS), 0).reading())  # type: ignore[arg-type]
    del reading["s"]
    assert reading == {"num_requests_running": 7.0, "kv_cache_usage_perc": 0.75, "prompt_tokens": 1e6}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (VLLM + VLLM.replace("8192", "4096"), "holds the start of several servers"),
        ("INFO: nothing of interest\n", "has no line of vLLM's or SGLang's start .'non-default args', "),
    ],
)
def test_a_log_that_does_not_help(content: str, complaint: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(content)
    with pytest.raises(ScenarioError, match=complaint):
        known(log)


ROWS = [
    Measured("", 0, 2.0, 0.2, math.nan, 1.2, 100, 11, load="a, b", cached_tokens=0, repeat=1),
    Measured("", 0, 0.5, load="a, b", prompt_tokens=100, failed='lost, "x"'),
    Measured("", 0, 0.0, 0.1, math.nan, 1.1, 100, 11, load="a, b"),
]


def written(folder: Path, rows: list[Measured], **changes: Any) -> Path:
    content = {
        "schema_version": 1,
        "tool": "cbsim measure",
        "facts": {},
    } | changes
    (folder / "measurement.json").write_text(json.dumps(content))
    with (folder / "requests.csv").open("w", newline="") as file:
        csv.writer(file).writerows([measurement.COLUMNS, *(campaign.cells(row, 2) for row in rows)])
    return folder


def test_a_directory_is_read_again(tmp_path: Path) -> None:
    """In order of repeat and start; times to the nanosecond, nothing where there is none."""
    (load,) = measurement.read(written(tmp_path, ROWS)).loads
    assert load.name == "a, b"
    assert load.start_s.tolist() == [0.0, 0.5, 2.0] and load.repeat.tolist() == [0, 0, 1]
    assert load.failed.tolist() == [False, True, False] and load.reasons == ('lost, "x"',)
    assert load.estimate(load.ttft_s) == (pytest.approx(0.15), pytest.approx(0.05))
    assert load.estimate(load.tpot_s) == (pytest.approx(0.1), pytest.approx(0.0))
    assert (load.users, load.left_out, load.notes) == (2, "", ['lost, "x"'])
    (folder := tmp_path / "lost").mkdir()
    _, load = measurement.read(
        written(folder, [*ROWS, *(replace(row, load="b", failed="a pause") for row in ROWS)])
    ).loads
    assert (load.left_out, load.notes) == ("a pause", [])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"schema_version": 2}, "measurement.json: schema_version: got 2, expected 1"),
        (
            {"rows": [replace(ROWS[2], e2e_s=0.05)]},
            "requests.csv: e2e_s: got 0.05 of request 2, must be at least ttft_s",
        ),
        ({"rows": [replace(ROWS[2], ttft_s=math.nan)]}, "requests.csv:2: ttft_s: got ''"),
    ],
)
def test_a_directory_that_is_none(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    folder = written(tmp_path, change.pop("rows", ROWS), **change)
    with pytest.raises(UserError) as raised:
        measurement.read(folder)
    assert complaint in str(raised.value)


def test_a_row_that_is_cut_off_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, ROWS) / "requests.csv"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ScenarioError, match=r"requests.csv:4: "):
        measurement.read(tmp_path)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["ftp://x"], "URL: got ftp://x, expected the address of a server"),
        (["http://127.0.0.1:99999"], "URL: got http://127.0.0.1:99999"),
        (["http://key@127.0.0.1"], "URL: got http://key@127.0.0.1"),
        (["http://127.0.0.1\n:1"], "URL: got http://127.0.0.1"),
        (["http://127.0.0.1:1", "--yes"], "http://127.0.0.1:1: cannot be reached: "),
        (["http://127.0.0.1:1", "--api-key-file", "nowhere"], "nowhere: cannot be read"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], complaint: str, tmp_path: Path) -> None:
    refused(call("measure", *words, "--out", tmp_path / "out"), 2, complaint)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("budget", ["tokens=9", "users=1.5", "requests=7", "seconds=inf", "users", "users=5000"])
def test_a_budget_that_is_none(budget: str) -> None:
    said = call("measure", "http://127.0.0.1:1", "--budget", budget)
    assert said.status == 2 and "argument --budget: " in said.err


def test_a_folder_that_holds_something_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    refused(call("measure", "http://127.0.0.1:1", "--out", tmp_path), 2, "holds mine.txt")


def test_terms_are_not_written_to_a_folder(tmp_path: Path) -> None:
    """That is known before the work."""
    line = ["fit", tmp_path / "nothing", "--scenario", "tiny_cpu", "--out"]
    refused(call(*line, tmp_path), 2, f"--out: {tmp_path} is a folder, expected the name of a file")
    refused(call(*line, "/proc/nothing/terms.yaml"), 2, "/proc/nothing: cannot be written")


def test_without_the_client_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("cbsim.measured.own")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "openai", None)
    said = call("measure", "http://127.0.0.1:1")
    refused(said, 2, "openai is not installed: pip install -e '.[measure]'")


SLOW = ("--set", "cost={kind: constant, step_s: 0.004}", "--set", "scheduler.max_model_len=300")


def test_a_server_is_measured_over_its_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its key, after a yes, past any proxy; a wrong key and a no end before anything is written."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # where nothing listens
    words = ("--budget", "users=2,tokens=10_000", "--out", tmp_path / "out")
    with serving(tmp_path / "runs", *SLOW, CBSIM_API_KEY="secret") as session:
        refused(
            call("measure", session.address, *words), 2, "401: an API key is needed", "CBSIM_API_KEY or --api-key-file"
        )
        monkeypatch.setenv("CBSIM_API_KEY", "secret")
        refused(
            call("measure", f"{session.address}/nothing", *words), 2, "/v1/models lists no model; expected the address"
        )
        plans: list[str] = []
        for answer, status in (("", 2), ("n", 1), ("y", 0)):  # the first is the end of its input

            def reply(plan: str, answer: str = answer) -> str:
                plans.append(plan)
                if not answer:
                    raise EOFError
                return answer

            monkeypatch.setattr(builtins, "input", reply)
            said = call("measure", session.address, *words)
            assert said.status == status, said.err
            assert (tmp_path / "out").exists() == (answer == "y")
            assert ("--yes: is needed" in said.err) == (not answer)
        session.end(signal.SIGTERM)
    assert "requests, at most 2 at once. Go on? [y/N] " in plans[1]
    assert ["engine", "cbsim", "(/v1/models)"] in [
        line.split() for line in said.out.splitlines()
    ] and f"measured      {tmp_path / 'out'}" in said.out
    content = measurement.read(tmp_path / "out")
    assert content.provenance["tokens"] <= 10_000
    assert content.provenance["url"] == session.address.removesuffix("/v1")
    assert "secret" not in (tmp_path / "out" / "measurement.json").read_text()
    assert {load.name.split(" ")[0] for load in content.loads} >= {"unloaded-32", "decode-1", "decode-2"}


def test_ctrl_c_ends_it_and_keeps_what_there_is(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with serving(tmp_path / "runs", *SLOW) as session:
        with started("cbsim", "measure", session.address, "--out", out, "--yes", "--budget", "users=2") as process:
            while not (out / "requests.csv").exists() and process.poll() is None:
                pass
            process.send_signal(signal.SIGINT)
            _, complaint = process.communicate(timeout=60)
        session.end(signal.SIGTERM)
    assert process.returncode == 130 and "Traceback" not in complaint
    assert complaint.splitlines()[-1] == f"cbsim: interrupted; {out} has what was measured"
    assert json.loads((out / "measurement.json").read_text())["incomplete"] == "it was interrupted"
