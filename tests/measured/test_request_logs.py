"""Request logs: what their prompts share, and what their study says of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import calls, reference, request_folders
from support.calls import Said
from support.request_folders import PAIR, RUN
from support.scoring import numbers

from reports.fidelity.request_logs import log, make, replay
from reports.fidelity.request_logs.log import Key, Log, Start
from reports.fidelity.request_logs.replay import BUILT, CALIBRATED, missing

BLOCK = log.BLOCK_TOKENS


def a_log(scenario: str, lengths: Sequence[tuple[int, int]]) -> Log:
    some, (inputs, outputs) = np.arange(len(lengths), dtype=float), zip(*lengths, strict=True)
    return Log(Key(RUN, scenario, 1.0), some, inputs, outputs, some, some)


def in_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Leading blocks that two chains share; after the first that differs none may be equal."""
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert not set(one[same:]) & set(other[same:])
    return same


# -- prompts ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(40, 500), st.integers(0, 100)), min_size=2, max_size=8), st.data())
def test_prompts_share_the_start_that_the_file_tells(rows: list[tuple[int, int]], data: st.DataObject) -> None:
    """A prompt has the tokens that its characters make, of the one it continues, in whole blocks; of others the head of
    the chat template, or what they share by way of a third.
    """
    of = [None, *(data.draw(st.none() | st.integers(0, at - 1)) for at in range(1, len(rows)))]
    starts = [Start(100, before, percent) for (_, percent), before in zip(rows, of, strict=True)]
    chains = log.shared_starts(a_log("sharegpt", [(prompt, 1) for prompt, _ in rows]), starts)
    for (prompt, percent), before, chain in zip(rows, of, chains, strict=True):
        assert len(chain) == prompt // BLOCK
        if before is not None:
            tokens = log.HEAD_TOKENS + (prompt - log.HEAD_TOKENS - log.TAIL_TOKENS) * percent // 100
            assert in_common(chain, chains[before]) == min(tokens // BLOCK, len(chain), len(chains[before]))
        assert in_common(chain, chains[0]) >= min(log.HEAD_TOKENS, prompt) // BLOCK


def test_a_users_next_prompt_has_all_that_was_said() -> None:
    """Two users in turns: 76 tokens and 20 of output, then 125. Each finds its own 96 in whole blocks, and of the
    other's no more than the greeting.
    """
    first, second, again, also = log.conversations(a_log("short_input", [(76, 20), (76, 20), (125, 20), (125, 20)]))
    greeting = log.GREETING_TOKENS // BLOCK
    assert in_common(first, second) == in_common(first, also) == in_common(second, again) == greeting
    assert in_common(first, again) == in_common(second, also) == 96 // BLOCK


# -- the study --------------------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    request_folders.tables(tmp_path)
    monkeypatch.setenv("CBSIM_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def study(*words: object) -> Said:
    return calls.call(*words, of=make.main)


def refused(said: Said, *words: str) -> None:
    calls.refused(said, 2, *words, program="reports.fidelity.request_logs.make")


def rows_of(run: str, count: int, seed: int = 0, qps: float = 2.0) -> list[list[Any]]:
    rng = np.random.default_rng(seed)
    launches = np.cumsum(rng.exponential(0.5, count)) - 0.25
    lengths = rng.integers([50, 2], [900, 60], (count, 2))
    rows = zip(launches - launches[0], lengths, strict=True)
    return [[run, "sharegpt", qps, f"{at:.6f}", float(prompt), float(output), 1, 1] for at, (prompt, output) in rows]


def starts_of(count: int) -> list[tuple[int, int, int, int]]:
    return [(at, 1000, at - 3 if at > 2 else -1, 600 if at > 2 else 0) for at in range(count)]


def test_a_run_of_our_own_is_met_exactly(data: Path) -> None:
    """Latencies that the simulator gave are put into a log, as a client sees them: it is scored without an error. So
    clocks, order and definitions of the log are those of the simulation.
    """
    rows, starts = rows_of(RUN, 30), starts_of(30)
    folder = request_folders.folder(data / "logs", rows, starts)
    [one] = log.read(folder)
    deployment = BUILT[RUN]
    scenario = deployment.scenario(folder, one.key, ())
    specs = log.specs(one, log.starts(folder), deployment.front_s)
    served = replay.serve(scenario, specs, 1, deployment.front_s, seed=0).served
    first, last = (part + deployment.front_s for part in (served.first_token_s, served.last_token_s))
    for row, at, end in zip(rows, first.tolist(), last.tolist(), strict=True):
        row[6:] = [at - float(row[3]), end - at]
    request_folders.folder(folder, rows, starts)
    [scored] = numbers(study(folder, "--json"))["runs"]
    assert scored["requests"] == 30
    assert 0 < scored["hits"] < 0.6
    for number in scored["errors"]:
        assert number["simulated_s"] == pytest.approx(number["measured_s"], abs=1e-5), number


def test_two_servers_are_drawn_several_times(data: Path) -> None:
    """The mean lies between the least and the largest draw, which differ: servers are reached at random."""
    folder = request_folders.folder(data / "logs", rows_of(PAIR, 40), starts_of(40))
    [scored] = numbers(study(folder, "--json"))["runs"]
    assert scored["servers"] == 2
    assert scored["errors"]
    for number in scored["errors"]:
        assert number["low_s"] <= number["simulated_s"] <= number["high_s"]
    assert any(number["low_s"] < number["high_s"] for number in scored["errors"])


def test_runs_that_cannot_be_built_are_named_with_the_reason(data: Path) -> None:
    lost, other = rows_of(RUN, 4, seed=1, qps=3.0), rows_of("openshift/exp-0/lmcache-llm-d-70b", 5)
    folder = request_folders.folder(data / "logs", [*rows_of(RUN, 5), *lost, *other], starts_of(5))
    out = data / "report"
    said = study(folder, "--out", out)
    assert (said.status, said.err) == (0, "")
    assert "4 of 5 requests are recorded" in said.out
    assert "LMCache keeps KV in the CPU's memory" in said.out
    facts = calls.read(out / "report.json")
    assert facts["command"] == f"python -m reports.fidelity.request_logs.make {folder} --out {out}"
    assert [run["kind"] for run in facts["runs"]] == ["simulated against recorded runs"]
    assert (out / "report.md").is_file()
    said = study(folder, "--where", "run=lmcache-llm-d-70b")
    refused(said, "none of those chosen can be built", "LMCache")


def test_where_chooses(data: Path) -> None:
    rows = [*rows_of(RUN, 5, qps=0.5), *rows_of(RUN, 5), *rows_of(PAIR, 5)]
    folder = request_folders.folder(data / "logs", rows, starts_of(5))
    told = numbers(study(folder, "--json", "--where", "run=vllm-70b,qps=0.5", "--where", "scenario=sharegpt"))
    assert [(run["run"], run["qps"]) for run in told["runs"]] == [(RUN, 0.5)]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--where", "rate=1"), ("--where", "'rate'", "run, scenario, qps")),
        (("--where", "run=vllm-7b"), ("--where: run", "'vllm-7b'", RUN)),
        (("--where", "qps=7"), ("--where: qps", "'7'", "one of 2")),
        (("--set", "cost.elementwise=-1"), ("cost.elementwise", "-1")),
        (("--set", "loop.mode=both"), ("loop.mode", "'both'", "sync or async")),
        (("--set", "kv_cache.num_blocks=20"), ("cannot be served", "the cache has 19")),
    ],
)
def test_words_that_make_no_sense(data: Path, words: Sequence[str], told: Sequence[str]) -> None:
    folder = request_folders.folder(data / "logs", rows_of(RUN, 5), starts_of(5))
    refused(study(folder, "--json", *words), *told)


@pytest.mark.parametrize(
    ("at", "value", "told"),
    [
        (3, "-1", ("requests.csv.gz:3: launch_s", "'-1'", ">= 0")),
        (4, "1.5", ("requests.csv.gz:3: prompt_tokens", "'1.5'", "whole number >= 1")),
        (5, "0", ("requests.csv.gz:3: generation_tokens", "'0'", ">= 1")),
        (6, "", ("requests.csv.gz:3: ttft_s", "''", ">= 0")),
        (2, "fast", ("requests.csv.gz:3: qps", "'fast'")),
        (3, "9999", ("launch_s goes back", RUN)),
        (0, PAIR, ("do not stand together", RUN)),
    ],
)
def test_rows_that_cannot_be_used(data: Path, at: int, value: str, told: Sequence[str]) -> None:
    rows = rows_of(RUN, 5)
    rows[1][at] = value
    refused(study(request_folders.folder(data / "logs", rows, starts_of(5)), "--json"), *told)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ((7, 10, -1, 0), ("sharegpt_prefix.csv:4: index", "2, the number of the row")),
        ((2, 10, 2, 0), ("shares_prefix_with", "at most 1")),
        ((2, 10, 1, 11), ("shared_prefix_chars", "input_chars (10)")),
        ((2, 0, 1, 0), ("input_chars", "a whole number from 1 to")),
    ],
)
def test_starts_that_cannot_be_used(data: Path, row: tuple[int, ...], told: Sequence[str]) -> None:
    starts = [(0, 10, -1, 0), (1, 10, 0, 5), row]
    refused(study(request_folders.folder(data / "logs", rows_of(RUN, 3), starts), "--json"), *told)


def test_logs_are_no_case(data: Path) -> None:
    folder = request_folders.folder(data / "logs", rows_of(RUN, 5), starts_of(5))
    calls.refused(calls.call("score", folder), 2, f"{folder / 'config.json'}: cannot be read")


# -- the recorded runs ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded() -> Path:
    return reference.data("public_measured/llm-d_requests/requests.csv.gz").parent


def test_what_was_looked_at_can_be_built() -> None:
    assert all(missing(key, 252, 252) is None for key in CALIBRATED)


def test_a_saturated_run_is_predicted(recorded: Path) -> None:
    """1.34 requests a second are more than the server can do, and no number of this run was used: the cache's size is
    derived, and decides how many wait. A cache of 10 % more or fewer blocks moves TTFT by more than is allowed here.
    """
    [one] = log.chosen(log.read(recorded), {"run": "exp-0/vllm-70b", "qps": "1.34"})
    scored = replay.score(recorded, one, log.starts(recorded), ())
    assert scored.calibrated is None
    assert abs(scored.error("ttft", "mean")) < 0.2
    assert abs(scored.error("tpot", "mean")) < 0.1
    assert abs(scored.error("e2e", "mean")) < 0.1
    assert scored.number("ttft", "mean").score.measured_s == pytest.approx(9.235, abs=1e-3)  # as in summary.csv
