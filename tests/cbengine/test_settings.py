"""Requests with sampling settings of their own: how they are given, what is refused, and no batch mixes them up."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="greedy text is compared with transformers'")

from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from support.engine.served import (
    CHUNKS,
    INLINE,
    LOOPS,
    MS,
    PROMPTS,
    SCHEDULERS,
    Case,
    Run,
    asked,
    check_text,
    least_blocks,
    server,
    shared,
    spec,
)

from cbengine import build
from cbengine.cli.parser import main
from cbengine.device.layout import Header
from cbengine.errors import UsageError
from cbengine.sampling import Sampling, SamplingSettings
from cbsim.errors import ScenarioError
from cbsim.policy.plan import StepPlan
from cbsim.policy.request import RequestSpec
from cbsim.workload.requests import Workload

USUAL = Sampling(temperature=0.9, top_k=50, top_p=0.9, seed=5)
GREEDY = {
    "r0": Sampling(),
    "r1": Sampling(temperature=1.7, top_k=1, seed=8),
    "r2": Sampling(top_k=3, top_p=0.5, seed=1),
}
SAMPLED = {"r3": Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=3), "r4": Sampling(temperature=2.0, seed=3)}
OWN = SamplingSettings(GREEDY | SAMPLED)  # r5, r6 and r7 have the run's
MIXED = replace(INLINE, sampling=USUAL, requests=OWN)
SPECS = [
    spec(i, PROMPTS[i % 5], 6 + 2 * i, arrival_ns=9 * MS * i, **(shared(i % 2, 4) if i % 5 > 1 else {}))
    for i in range(8)
]


def run_of(specs: list[RequestSpec], scheduler: str, loop: str, sizes: Any, setup: build.Setup = MIXED) -> Run:
    return Case(sizes, Workload(list(specs), len(specs))).run(loop, setup)


# -- mixed batches ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def said_alone() -> dict[int, list[int]]:
    """What each request says with nobody beside it, ever: a run of its own, with its settings as the run's."""
    sizes = server("vllm 0.33", 16, 200, 4096, 1, sharing=False)
    said = {}
    for one in SPECS:
        said |= run_of([one], "vllm", "sync", sizes, replace(INLINE, sampling=OWN.of(one, USUAL))).texts
    return said


def check_mixed(run: Run, said_alone: dict[int, list[int]]) -> None:
    """Everybody says what they say alone, and the greedy ones, top-k 1 included, what `generate` says."""
    assert run.texts == said_alone
    for one, text in run.engine.sequences.items():
        if one.id in GREEDY:
            check_text(text)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@given(
    block_size=st.integers(4, 16),
    extra=st.sampled_from((0, 1, 8, 200)),
    budget=st.sampled_from(CHUNKS),
    seats=st.integers(2, 8),
    sharing=st.booleans(),
)
@examples(max_examples=3)
def test_no_batch_mixes_requests_up(
    scheduler: str,
    loop: str,
    block_size: int,
    extra: int,
    budget: int,
    seats: int,
    sharing: bool,
    said_alone: dict[int, list[int]],
) -> None:
    """Whatever the scheduler, the batch, chunks, shared blocks and preemption; in static batches, too."""
    blocks = least_blocks(scheduler, block_size, SPECS) + extra
    sizes = server(scheduler, block_size, blocks, budget, seats, sharing=sharing)
    check_mixed(run_of(SPECS, scheduler, loop, sizes), said_alone)


def test_settings_make_a_difference(said_alone: dict[int, list[int]]) -> None:
    """What is compared above is not the same text by chance: those who sample say something else than greedily."""
    greedy = run_of(SPECS, "vllm", "sync", server("vllm", 16, 200, 4096, 8, sharing=True), INLINE).texts
    assert [i for i in greedy if greedy[i] != said_alone[i]] == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("usual", "own", "random"),
    [
        (Sampling(), {}, False),
        (Sampling(), {"r1": Sampling(top_k=7, top_p=0.5, seed=3)}, False),
        (USUAL, {f"r{i}": Sampling() for i in range(8)}, False),
        (Sampling(), {"r7": USUAL}, True),
        (USUAL, {"r1": Sampling()}, True),
    ],
)
def test_a_step_without_anyone_who_draws_is_greedy(usual: Sampling, own: dict[str, Sampling], random: bool) -> None:
    """It has no array for what nobody draws; nor has any step of a run that is greedy, or whose every request is."""
    setup = replace(INLINE, sampling=usual, requests=SamplingSettings(own))
    engine, device = build.engine(asked("vllm"), "sync", Workload(list(SPECS), 8), setup)
    headers: list[Header] = []

    def launched(slot: int, header: Header, plan: StepPlan, *excess: Any) -> None:
        headers.append(header)
        type(device).launch(device, slot, header, plan, *excess)

    with mock.patch.object(device, "launch", launched):
        engine.run()
    engine.close()
    assert any(header.random for header in headers) == random
    assert all((header.lengths.temperature > 0) == header.random for header in headers)


# -- the file ---------------------------------------------------------------------------------------------------------


def test_a_line_says_what_differs_from_the_run(tmp_path: Path) -> None:
    """What it leaves out is the run's; blank lines say nothing; what is written out is read back."""
    file = tmp_path / "own.jsonl"
    file.write_text('{"id": "a/0", "temperature": 0}\n\n{"top_p": 1, "seed": 7, "id": "é"}\n{"id": ""}\n')
    found = SamplingSettings.read(file, USUAL)
    assert found.by_id == {"a/0": replace(USUAL, temperature=0), "é": replace(USUAL, top_p=1, seed=7), "": USUAL}
    assert found.lines == {"a/0": 1, "é": 3, "": 4}
    file.write_bytes(found.file())
    assert SamplingSettings.read(file, Sampling()).by_id == found.by_id
    assert found.facts == {"file": str(file), "requests": 3}
    assert SamplingSettings().facts == {"file": None, "requests": 0}
    assert json.loads(found.file().splitlines()[0]) == {"id": "a/0", **asdict(USUAL), "temperature": 0}


WRONG: list[tuple[bytes, str]] = [
    (b'{"id": "0", "temperature": -1}', ":1: temperature: got -1, expected a finite number >= 0 (0: greedy)"),
    (b'\n{"id": "0", "temperature": NaN}', ":2: temperature: got nan, expected a finite number >= 0"),
    (b'{"id": "0", "top_k": true}', ":1: top_k: got True, expected a whole number"),
    (b'{"id": "0", "top_p": 0}', ":1: top_p: got 0, expected a number > 0 and <= 1"),
    (b'{"id": "0", "seed": null}', ":1: seed: got None, expected a whole number >= 0"),
    (b'{"id": "0", "seeds": 1}', ":1: seeds: is unknown, expected id, temperature, top_k, top_p or seed; did"),
    (b'{"temperature": 1}', ":1: id: got nothing, expected the id of a request, a text"),
    (b'{"id": 0}', ":1: id: got 0, expected the id of a request, a text"),
    (b'{"id": "0"}\n{"id": "0"}', ":2: id: got '0', expected another id: line 1 has that"),
    (b'{"id": "0"}\n[1]', ":2: row: got [1], expected a JSON object"),
    (b'{"id": "0",}', ":1: not valid JSON: "),
    (b"[" * 100_000, ":1: not valid JSON: "),
    (b'{"id": "\xff"}', ": is not UTF-8 text"),
    (b'\n{"id": "00", "top_k": 4}', ":2: id: got '00', expected the id of one of the 3 requests; did you mean"),
]


@pytest.mark.parametrize(("content", "says"), WRONG, ids=[says for _, says in WRONG])
def test_what_cannot_be_used_is_named(content: bytes, says: str, tmp_path: Path) -> None:
    """File, line, field, value and bound; exit status 2, and nothing is written."""
    file = tmp_path / "own.jsonl"
    file.write_bytes(content)
    check_refused(file, f"{file}{says}")


def check_refused(file: Path, message: str) -> None:
    out, err = file.parent / "out", io.StringIO()
    words = ["replay", "tiny_cpu", "--set", "workload.requests=3", "--device", "inline", "--loop", "both"]
    with redirect_stderr(err):
        assert main([*words, "--sampling", str(file), "--out", str(out)]) == 2
    assert err.getvalue().startswith(f"cbengine: {message}")
    assert err.getvalue().count("\n") == 1
    assert not out.exists()


def test_python_is_told_of_a_request_that_is_not_there() -> None:
    setup = replace(INLINE, requests=SamplingSettings({"r9": Sampling()}))
    with pytest.raises(UsageError, match=r"^sampling: id: got 'r9', expected the id of one of the 8 requests$"):
        build.engine(asked("vllm"), "sync", Workload(list(SPECS), 8), setup)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(
    lines=st.lists(
        st.dictionaries(st.sampled_from(["id", "temperature", "top_k", "top_p", "seed", "x"]), JSON), max_size=3
    )
)
def test_no_line_fails_but_with_a_named_error(
    tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, Any]]
) -> None:
    """Any field may be anything: the file is read, and what is written of it reads the same, or it is refused."""
    file = tmp_path_factory.getbasetemp() / "any.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    try:
        found = SamplingSettings.read(file, USUAL)
    except (ScenarioError, UsageError) as error:
        assert str(error).startswith(f"{file}:")  # noqa: PT017
        return
    file.write_bytes(found.file())
    assert SamplingSettings.read(file, Sampling()).by_id == found.by_id
