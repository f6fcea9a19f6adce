"""`bench` and the scripts of reports/speed: what they print. Speed depends on the machine; no test asserts a time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial

import pytest
from support.calls import process
from support.scripts import script

from cbsim import bench
from cbsim.bench import CASES
from cbsim.cli.parser import main
from cbsim.errors import RunError
from cbsim.sweeps.work import Here

peers, many_runs = script("speed/peers"), script("speed/many_runs")
FEW = {
    "kind": "synthetic",
    "requests": 2,
    "prompt_tokens": 9,
    "output_tokens": 2,
    "arrivals": {"kind": "poisson", "rate_per_s": 1},
}


def test_json_has_the_promised_keys() -> None:
    """`bench --json` prints one object, case -> seconds, steps, requests, peak_mb (the issue's keys). decode_64 is 64
    requests of 16 and 2,000 tokens at once: 1 step for the prompts and a token each, 1,999 more, and the empty one in
    which vLLM hears that all have ended.
    """
    said = process("bench", "--json", "decode_64")  # the peak of a child is at least what its parent has when it starts
    assert (said.status, said.err) == (0, "")
    results = json.loads(said.out)
    assert list(results) == ["decode_64"]
    result = results["decode_64"]
    assert {"seconds", "steps", "requests", "peak_mb"} <= result.keys()
    assert (result["steps"], result["requests"]) == (2001, 64)
    assert result["seconds"] > 0
    assert 10 < result["peak_mb"] < 600  # an interpreter with numpy has more than the one, the target is the other


def test_an_unknown_case(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2, a near miss and the known names, before any case is run."""
    assert main(["bench", "decode_64", "decode_65"]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err.startswith("cbsim: unknown case 'decode_65'; did you mean decode_64?")
    assert all(name in said.err for name in CASES)
    assert len(said.err.splitlines()) == 1


def test_the_cases_of_the_issue(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without names all cases run, among them the two whose decode steps are compared, and a person is told the ratio:
    here 3 us against 2 us, made up, in place of the measurements.
    """
    made_up = {
        "seconds": 2.0, "steps": 10, "requests": 5, "peak_mb": 100.0, "steps_per_s": 5.0, "requests_per_s": 2.5,
        "core": "python"
    }  # fmt: skip
    cost = {"splitwise_conv": 1.0, "decode_64": 2.0, "decode_1024": 3.0}
    monkeypatch.setattr(bench, "_in_fresh_process", lambda name: made_up | {"us_per_step": cost[name]})
    assert main(["bench"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(CASES) == list(cost)
    assert "1.50x" in last


def test_the_long_case_comes_by_its_name_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`bench million` measures the cases that it is compared with in the same sitting, and says how many times as long
    it takes and its peak, beside the goals: here of made-up measurements."""
    made_up = {"steps": 10, "requests": 5, "steps_per_s": 5.0, "requests_per_s": 2.5, "core": "python"}
    seconds = {"splitwise_conv": 4.0, "splitwise_like": 5.0, "million": 260.0}
    monkeypatch.setattr(
        bench, "_in_fresh_process", lambda name: made_up | {"seconds": seconds[name], "peak_mb": 2 * seconds[name]}
    )
    assert "million" not in CASES
    assert main(["bench", "million"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(seconds)
    assert (
        "65.0 times as long as splitwise_conv (goal 55), 52.0 times as long as splitwise_like" in last
        and "peak 520 MB" in last
    )
    like, long = (bench.EXTRA[name]()["workload"] for name in ("splitwise_like", "million"))
    assert like == bench.chat_like() and long == like | {"requests": 1_000_000}


def test_sglang_is_measured_beside_vllm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same requests under other rules, in the same sitting, with the ratio: here of made-up measurements."""
    made_up = {"seconds": 2.0, "steps": 10, "requests": 5, "steps_per_s": 5.0, "requests_per_s": 2.5, "core": "python"}
    cost = {"splitwise_conv": 1.0, "splitwise_sglang": 1.5}
    monkeypatch.setattr(
        bench,
        "_in_fresh_process",
        lambda name: made_up | {"peak_mb": 1.0, "cpu_seconds": cost[name], "us_per_step": cost[name] ** 2},
    )
    assert main(["bench", "splitwise_sglang"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(cost)
    assert "1.50 times the CPU time of splitwise_conv, a step 2.25 times as long" in last
    theirs, ours = (bench.ALL[name]() for name in cost)
    assert theirs["workload"] == ours["workload"] and ours["kv_cache"]["block_size"] == 1


def test_a_fleet_is_measured_behind_both_kinds_of_router(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`bench fleet` prints what a step costs beside others and what its router does, and seconds, requests/s and MB of
    requests over all servers: here of a few. Servers of one count have the load of those of another."""
    monkeypatch.setattr(bench, "SERVERS", (1, 2))
    monkeypatch.setattr(bench, "EACH", 3)
    small = {name: partial(bench.fleet, name, 2, 6) for name in bench.ROUTERS}
    monkeypatch.setattr(bench, "ALL", bench.ALL | small)
    monkeypatch.setattr(bench, "_in_fresh_process", bench.measure)
    assert main(["bench", "fleet"]) == 0
    *lines, blind, books = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["fleet_blind", "fleet_books"]
    assert all("6 requests, " in line and "requests/s; peak " in line for line in lines)
    for line in (blind, books):
        assert re.search(r"a step costs [\d.]+ us with 1 server, [\d.]+x with 2; the router [\d.]+ us", line)
    assert blind.endswith("router 0.0 us") and not books.endswith("router 0.0 us")
    one, many = (bench.fleet("fleet_blind", count, 100 * count)["workload"] for count in (1, 64))
    assert many["arrivals"]["rate_per_s"] == 64 * one["arrivals"]["rate_per_s"]
    assert bench.FLEETS["fleet_books_million"]()["workload"]["requests"] == 1_000_000


def test_a_case_that_fails_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong in the process of a case is exit 1 and a line with its name."""

    def fail(name: str) -> None:
        raise RunError(f"bench case {name} failed: out of memory")

    monkeypatch.setattr(bench, "_in_fresh_process", fail)
    assert main(["bench", "decode_64"]) == 1
    assert capsys.readouterr().err == "cbsim: bench case decode_64 failed: out of memory\n"


def test_a_sweep_is_measured_in_one_process_and_in_several(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here of two points, both times in this process."""
    monkeypatch.setattr(many_runs, "POINTS", (2, 1))
    monkeypatch.setattr(many_runs, "REPEATS", 1)
    monkeypatch.setattr(many_runs, "Processes", lambda _: Here())
    monkeypatch.setattr(many_runs, "SCENARIO", many_runs.SCENARIO | {"workload": FEW})
    many_runs.main()
    one, two, ratio = capsys.readouterr().out.splitlines()
    for line, jobs in ((one, 1), (two, 2)):
        assert re.fullmatch(rf"{jobs} at a time: [\d.]+ points/s; CPU [\d.]+ ms each, [\d.]+ in this process", line)
    assert re.fullmatch(r"2 at a time make [\d.]+ times the points a second, [\d.]+ by CPU time \(\w+ core\)", ratio)


# -- peers ------------------------------------------------------------------------------------------------------------


def test_the_peer_gets_the_requests_of_the_case_and_nobody_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = list(peers._requests())[:50]
    monkeypatch.setattr(peers, "_requests", lambda: requests)
    lines = peers._mooncake()
    assert [(line["input_length"], line["output_length"]) for line in lines] == [
        (spec.prompt_tokens, spec.output_tokens) for spec in requests
    ]
    hashes = [fresh for line in lines for fresh in line["hash_ids"]]
    assert len(set(hashes)) == len(hashes) == sum(-(-spec.prompt_tokens // 512) for spec in requests)


def test_the_python_core_is_read_from_its_sources() -> None:
    """Whatever is installed: of modules that are compiled, too."""
    program = peers.SOURCES_ONLY + "from cbsim.policy import request, value; import numpy; "
    program += "print(value.running(), request.__file__)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert said[0] == "python"
    assert said[1].endswith("request.py")
