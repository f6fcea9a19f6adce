"""What a cache held: closed forms, every table recounted token by token, and what is no run of the scenario."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.calls import call
from support.recordings import WORKLOADS, by_turns, recorded

import cbsim
from cbsim.policy.loop import Scheduler
from cbsim.policy.plan import StepPlan
from cbsim.policy.request import Status
from cbsim.record.tables import Steps
from cbsim.runs import reading, replan, result
from cbsim.runs.occupancy import Occupancy, Shares
from cbsim.runs.result import Result
from cbsim.scenario import scenario as scenarios
from cbsim.workload import generators

pytestmark = pytest.mark.usefixtures("no_pictures")

LOOPS = ("sync", "async")
BASE = {"question": "What is held?", "model": "tiny", "hardware": "laptop-cpu", "loop": {"mode": "sync"}}
NOTHING = {name: {"base_s": 0, "per_request_s": 0} for name in ("schedule", "prepare", "launch", "update")}


def asked(scheduler: Mapping[str, Any], blocks: int, size: int = 16, **workload: Any) -> dict[str, Any]:
    """A scenario of this workload, or of one request, under the synchronous loop."""
    requests = workload or {"requests": 1, "prompt_tokens": 1, "output_tokens": 1}
    scenario = BASE | {"workload": {"kind": "synthetic", **requests}, "scheduler": scheduler}
    return scenario | {"kv_cache": {"block_size": size, "num_blocks": blocks}}


def served(requests: Mapping[str, Any], scheduler: Mapping[str, Any], blocks: int, size: int = 1) -> Result:
    """Requests that all come at once, under steps of a second."""
    steps = {"cost": {"kind": "constant", "step_s": 1, "cpu": NOTHING}}
    count = len(requests["prompt_tokens"])
    answer = cbsim.run(asked(scheduler, blocks, size) | steps, requests={"arrival_s": [0.0] * count, **requests})
    assert isinstance(answer, Result)
    return answer


def contiguous(reserve: str, placement: str = "first_fit", **more: Any) -> dict[str, Any]:
    return {"name": "contiguous", "reserve": reserve, "placement": placement, "max_model_len": 64, **more}


# -- closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["first_fit", "best_fit", "buddy"])
@pytest.mark.parametrize(
    ("reserve", "reserved"), [("max_model_len", 64), ("max_tokens", 10 + 30), ("power_of_two", 10 + 32), ("exact", 31)]
)
def test_equal_requests(reserve: str, reserved: int, placement: str) -> None:
    """Four requests with prompts of 10 and 21 outputs hold 10 tokens in the first step and 30 in the last, the 21st: 20
    on average; 10 more come later. The rest of a reservation is never used: it is a power of two under `buddy`.
    """
    requests = {"prompt_tokens": [10] * 4, "output_tokens": [21] * 4, "max_tokens": [30] * 4}
    shares = served(requests, contiguous(reserve, placement), 256).occupancy.shares()
    granted = 64 if placement == "buddy" and reserved > 32 else 32 if placement == "buddy" else reserved
    wanted = Shares(20, 10, reserved - 30, granted - reserved, 0, 64 - granted)
    assert shares == pytest.approx([tokens / 64 for tokens in wanted])
    assert shares.kv_used_share == pytest.approx(20 / granted)


@pytest.mark.parametrize("scheduler", [{"name": "vllm"}, {"name": "static", "batch_size": 2}], ids=lambda s: s["name"])
def test_paged_blocks(scheduler: dict[str, Any]) -> None:
    """Two requests of 5 prompt tokens and 8 outputs in blocks of 4. Paged: 5 to 12 tokens are held in 2 and then 3
    blocks, and only the last block of each has room. A static batch reserves 13 tokens, 4 blocks, from the start.
    """
    requests = {"prompt_tokens": [5, 5], "output_tokens": [8, 8]}
    held = served(requests, scheduler, 21 if scheduler["name"] == "vllm" else 20, 4).occupancy
    rows = [row[:3] for row in held.table.tolist() if row[0]]
    blocks = [2, 2, 2, 2, 3, 3, 3, 3] if scheduler["name"] == "vllm" else [4] * 8
    lengths = [5, 6, 7, 8, 9, 10, 11, 12]
    later = [min(4 * b, 12) - n for n, b in zip(lengths, blocks, strict=True)]
    never = [4 * b - n - more for n, b, more in zip(lengths, blocks, later, strict=True)]
    assert rows == [[2 * n, 2 * a, 2 * b] for n, a, b in zip(lengths, later, never, strict=True)]
    assert held.tokens == 80


def test_shared_prefixes_are_held_once() -> None:
    """Ten requests with 32 tokens in common and 8 of their own, in blocks of 16, one output: 32 + 10 * 8 are held, and
    what ten tables list beyond that is one block each.
    """
    lengths = {"prompt_tokens": 40, "shared_prefix_tokens": 32, "output_tokens": 1}
    held = cbsim.run(asked({"name": "vllm"}, 101, requests=10, **lengths)).occupancy  # type: ignore[union-attr]
    assert held.table[0].tolist() == [32 + 10 * 8, 0, 10 * 8, 0, 0, 1600 - 12 * 16]
    assert held.saved[0] == 9 * 32
    assert held.saved_share(held.saved > 0) == 9 * 2 / 30


def test_scattered_space() -> None:
    """Thirteen tokens: pieces of 4, 5 and 4. The outer two end after two steps, the inner one after four: meanwhile 8
    are free, but not the 6 in a row that the next request waits for, and half of them lie apart. At last it gets them.
    """
    requests = {"prompt_tokens": [2, 1, 2, 5], "output_tokens": [2, 4, 2, 1]}
    held = served(requests, contiguous("exact", max_num_seqs=4), 13).occupancy
    assert held.table[:, 4].tolist() == [0, 0, 8, 8, 0]
    assert held.table[:, 5].tolist() == [0, 0, 0, 0, 7]
    assert held.largest.tolist() == [0, 0, 4, 4, 7]
    assert held.shares(held.waited).scattered == 4 / 13  # in two of the four steps
    assert held.fragmentation(held.waited) == 0.5
    assert held.fragmentation(~held.waited) == 0.0


@pytest.mark.parametrize("block_size", [4, 16])
def test_a_search_shares_what_its_texts_have_in_common(block_size: int) -> None:
    """Four texts of a prompt of 32 tokens and 5 outputs. When they begin, each reads the prompt's last token into a
    block of its own, and the full blocks before that are in four tables; later those of texts that agree as well.
    """
    beam, lengths = {"name": "beam", "num_beams": 4}, {"prompt_tokens": 32, "output_tokens": 5}
    held = cbsim.run(asked(beam, 64, block_size, requests=1, **lengths)).occupancy  # type: ignore[union-attr]
    at_first = 3 * (31 // block_size) * block_size  # all of the prompt that is computed before it is forked
    assert held.saved[:2].tolist() == [0, at_first]
    assert (held.saved[2:] >= at_first).all()
    assert held.saved.max() > at_first


# -- recounted --------------------------------------------------------------------------------------------------------


class Recount:
    """Cells of the cache, each a block and a place in it, that a table has and a token fills."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.reserved: list[int] = []
        self.saved: list[int] = []

    def __call__(self, policy: Scheduler, plan: StepPlan) -> None:
        pool, size = policy.pool, policy.pool.block_size
        full: set[tuple[int, int]] = set()
        for request, table in pool.tables.items():
            if request.status is not Status.FINISHED:
                full |= {(table[i // size], i % size) for i in range(request.computed)}
                full |= {(block, i) for block in table if block in pool._key_of for i in range(size)}
        self.held.append(len(full))
        blocks = [block for table in pool.tables.values() for block in table]
        self.reserved.append(len(set(blocks)) * size)
        self.saved.append((len(blocks) - len(set(blocks))) * size)


@by_turns(WORKLOADS, ["contiguous", "orca", "sarathi", "static", "transformers_fifo", "vllm"], LOOPS)
def test_every_token_counts_once(kind: str, scheduler: str, loop: str, tmp_path: Path) -> None:
    """With shared prefixes, preemption, stop tokens, chunks and refusals: cells recounted after every plan."""
    path = recorded(tmp_path, kind, f"scheduler.name={scheduler}", f"loop.mode={loop}")
    run, again = result.read(path), Recount()
    loaded = scenarios.load(path / "scenario.resolved.yaml")
    assert replan.derived(reading.load(path), loaded, generators.build(loaded), again).difference is None
    held: Occupancy = run.occupancy
    assert held.table[:, 0].tolist() == again.held
    assert held.table[:, :4].sum(axis=1).tolist() == again.reserved
    assert held.saved.tolist() == again.saved
    assert (held.table >= 0).all()
    assert (held.table.sum(axis=1) == held.tokens).all()
    used = run.step_numbers["used_blocks"] * loaded.block_size
    assert (held.table[:, :4].sum(axis=1) == used).all()
    assert sum(held.shares()) == pytest.approx(1)
    assert 0 < held.shares().kv_used_share <= 1


# -- the command, and mistakes ----------------------------------------------------------------------------------------


def test_the_command_prints_what_the_result_says(tmp_path: Path) -> None:
    path = recorded(tmp_path, "tight", "scheduler.name=contiguous", "loop.mode=sync")
    (said,) = json.loads(call("occupancy", path, "--json").out).values()
    held = result.read(path).occupancy
    assert said["all"] == {
        "kv_used_share": held.shares().kv_used_share,
        **held.shares()._asdict(),
        "fragmentation": held.fragmentation(),
        "saved_share": held.saved_share(),
    }
    assert said["requests wait"]["held"] == held.shares(held.waited).held
    header, _, *rows = call("occupancy", path).out.splitlines()
    assert header.split() == ["steps", "kv_used_share", *Shares._fields, "fragmentation", "saved_share"]
    assert [row.split(", ")[1].split("  ")[0] for row in rows] == ["all", "requests wait"]


def test_a_run_whose_plans_do_not_follow(tmp_path: Path) -> None:
    """Nothing is said of plans that are not the recorded ones."""
    run = served({"prompt_tokens": [9], "output_tokens": [9]}, contiguous("exact"), 64)
    table = run.step_numbers.table.copy()
    table[3, 2] += 1
    with pytest.raises(cbsim.RunError, match="its plans do not follow from its record: step 3: decode_rows is 1"):
        _ = replace(run, step_numbers=Steps(table)).occupancy


def test_a_run_without_steps() -> None:
    """Everybody was refused: there is nothing to say, and nothing fails."""
    run = served({"prompt_tokens": [90], "output_tokens": [9]}, contiguous("exact"), 64)
    assert run.occupancy.shares() == Shares(*[0.0] * 6)
    assert run.occupancy.shares().kv_used_share == run.occupancy.fragmentation() == 0.0
    assert np.shape(run.occupancy.table) == (0, 6)
