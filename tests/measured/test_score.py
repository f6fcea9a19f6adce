"""`score`: a recorded run replayed. A run of our own as the record must score zero."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import packs
from support.calls import call, refused
from support.packs import Pack
from support.scoring import numbers

from cbsim.measured.recorded import case, score
from cbsim.measured.recorded.score import ABLATIONS, METRICS, STATISTICS, MetricScore, Served
from cbsim.workload.vllm_bench import TIMES

pytestmark = pytest.mark.usefixtures("elsewhere")

SHAPES: dict[str, dict[str, Any]] = {
    "one": {},
    "derived blocks": {"blocks": None},
    "skew": {"skew": True},
    "tensor parallel": {"tensor": 2, "blocks": None},
    "experts over two": {"ranks": 2, "moe": True, "blocks": None},
    "two of a dense model": {"ranks": 2},
}


# -- our own runs as records ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_of_our_own_scores_zero(shape: str, tmp_path: Path) -> None:
    """Every latency, the makespan and the series: what is compared is defined alike on both sides."""
    made = packs.pack(tmp_path, **SHAPES[shape])
    done = packs.record(made)
    found = numbers(call("score", made.folder, "--json"))
    names = [(one["metric"], one["statistic"]) for one in found["errors"]]
    assert names == [*((metric, name) for metric in METRICS for name in STATISTICS), ("makespan", "")]
    assert {one["error"] for one in found["errors"]} == {0.0}
    assert all(one["measured_s"] > 0 for one in found["errors"])
    assert found["mean_absolute_difference"] == pytest.approx({"running": 0, "waiting": 0, "kv_use": 0}, abs=1e-12)
    assert found["steps"] == sum(map(len, done.steps))
    source = "derived" if SHAPES[shape].get("blocks", 0) is None else "recorded"
    assert (found["kv_blocks"], found["kv_blocks_source"]) == (120, source)
    assert len(done.steps) == SHAPES[shape].get("ranks", 1)


def test_ranks_of_experts_step_together_and_those_of_a_dense_model_do_not(tmp_path: Path) -> None:
    """Servers that share nothing do not wait for each other; vLLM's do so only for a mixture of experts."""
    for name, together in (("experts over two", True), ("two of a dense model", False)):
        done = packs.record(packs.pack(tmp_path / name, **SHAPES[name]))
        first, second = (set(table["compute_end_ns"][table["rows"] > 0].tolist()) for table in done.steps)
        assert (len(first & second) > min(len(first), len(second)) / 2) == together


def test_a_rank_that_never_got_a_request(tmp_path: Path) -> None:
    """Requests that come one by one all go to the first of two idle ranks; the other has no steps at all."""
    made = packs.pack(tmp_path, ranks=2, moe=True)
    rows = [json.loads(line) for line in (made.folder / "requests.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row.update(dict.fromkeys(TIMES, 100.0 * number))
    packs.lines(made.folder / "requests.jsonl", rows)
    done = packs.record(made)
    assert [len(table) > 0 for table in done.steps] == [True, False]
    assert {one["error"] for one in numbers(call("score", made.folder, "--json"))["errors"]} == {0.0}


def test_a_rank_counts_from_its_first_step_to_its_last(tmp_path: Path) -> None:
    """The series adds up ranks: before a rank has run anything, and after its end, it has nothing running."""
    made = packs.pack(tmp_path, ranks=2, moe=True)
    done = packs.record(made)
    start = min(table["await_end_ns"][0] for table in done.steps)
    ends = sorted(int(table["await_end_ns"][-1]) for table in done.steps)
    late = max(done.steps, key=lambda table: int(table["await_end_ns"][0]))
    before = (late["await_end_ns"][0] - 1 - start) / 1e9
    other = next(table for table in done.steps if table is not late)
    alone = score.Replayed(done.served, [other], done.total_blocks)
    assert alone.at(np.array([before]), "running") > 0
    for column in ("running", "step"):
        assert done.at(np.array([before]), column) == alone.at(np.array([before]), column)
        assert done.at(np.array([(ends[-1] + 1 - start) / 1e9]), column) == 0


# -- what it says -----------------------------------------------------------------------------------------------------


def test_scores_by_hand() -> None:
    """TTFT from queued to first token; TPOT over the tokens after the first, and 0 for a single one; makespan from the
    first queued to the last token. Percentiles are numpy's linear ones."""
    simulated = Served(*(np.array(t) for t in ([0.0, 1.0], [0.5, 1.5], [1.0, 3.0], [5.0, 3.0])), np.array([5, 1]))
    measured = Served(*(np.array(t) for t in ([0.0, 1.0], [0.0, 2.0], [2.0, 3.0], [4.0, 3.0])), np.array([5, 1]))
    found = {(one.metric, one.statistic): one for one in score.scores(simulated, measured)}
    assert found["ttft", "mean"] == MetricScore("ttft", "mean", 1.5, 2.0)
    assert found["ttft", "mean"].error == -0.25
    assert found["ttft", "p90"].simulated_s == pytest.approx(1.9)
    assert found["tpot", "mean"] == MetricScore("tpot", "mean", 0.5, 0.25)
    assert found["e2e", "median"] == MetricScore("e2e", "median", 3.5, 3.0)
    assert found["makespan", ""] == MetricScore("makespan", "", 5.0, 4.0)
    assert MetricScore("tpot", "mean", 0.0, 0.0).error == 0, "requests of one token have TPOT 0 on both sides"
    assert MetricScore("tpot", "mean", 1.0, 0.0).error == float("inf")


def test_an_error_relative_to_nothing_is_not_printed(pack: Pack) -> None:
    """A statistic that was measured as 0 has no error in percent, and is not the largest one."""
    packs.record(pack)
    said = call("score", pack.folder, "--set", "scheduler.name=static")
    assert said.status == 0
    assert "inf" not in said.out.split() and "+inf%" not in said.out
    assert "  -\n" in said.out, "the queue of the first requests was measured as 0"


def test_requests_of_one_token_each(tmp_path: Path) -> None:
    """TPOT is 0 of 0; the answer is still numbers, and a table."""
    made = packs.pack(tmp_path)
    for path in (made.workload, made.folder / "requests.jsonl"):
        rows = [json.loads(line) | {"output_toks": 1} for line in path.read_text().splitlines()]
        packs.lines(path, rows)
    packs.record(made)
    assert {one["error"] for one in numbers(call("score", made.folder, "--json"))["errors"]} == {0.0}
    assert call("score", made.folder).status == 0


def test_what_is_printed(pack: Pack) -> None:
    """The latencies with their errors, the run, and sentences; nothing of an ablation that was not asked for."""
    packs.record(pack)
    said = call("score", pack.folder)
    assert (said.status, said.err) == (0, "")
    for word in ("TTFT mean, ms", "E2E p99, ms", "makespan, s", "+0.00%", "recorded", "Errors of the means:", "priors"):
        assert word in said.out
    assert "What carries" not in said.out


def test_set_is_the_scenarios_and_is_told(pack: Pack) -> None:
    """Any field of the scenario, and the JSON says what was run; a size that was given is said to be."""
    packs.record(pack)
    plain = numbers(call("score", pack.folder, "--json"))
    found = numbers(call("score", pack.folder, "--json", "--set", "cost.row_s=1e-3", "--set", "kv_cache.num_blocks=99"))
    assert found["set"] == ["cost.row_s=1e-3", "kv_cache.num_blocks=99"]
    assert plain["scenario"]["cost"]["row_s"] == case.ROW_S
    assert (found["kv_blocks"], found["kv_blocks_source"]) == (99, "given")
    assert min(one["error"] for one in found["errors"]) > 0.01


def test_set_may_choose_other_rules_and_costs(pack: Pack) -> None:
    """Another scheduler or cost model is a question like any other; the findings say which."""
    packs.record(pack)
    static = call("score", pack.folder, "--set", "scheduler.name=static", "--set", "scheduler.batch_size=4")
    assert "replayed by the rules of static" in static.out, static
    constant = call("score", pack.folder, "--set", "cost.kind=constant", "--set", "cost.step_s=0.01")
    assert "cost model constant" in constant.out, constant
    assert "us a request" not in constant.out


def test_data_and_hardware_name_what_lies_elsewhere(pack: Pack, tmp_path: Path) -> None:
    """A case outside its pack needs --data; a GPU without a data sheet --hardware."""
    packs.record(pack)
    alone = tmp_path / "alone" / "deep" / "tiny"
    shutil.copytree(pack.folder, alone)
    refused(call("score", alone), 2, str(alone.parents[1]), "--data")
    assert numbers(call("score", alone, "--data", pack.root, "--json"))["errors"][0]["error"] == 0
    pack.edit("config.json", nodes=[{"instances": [{"model_name": "me/Tiny", "hardware": "RTX9090"}]}])
    shutil.move(pack.profile.parents[2], pack.root / "perf" / "RTX9090")
    refused(call("score", pack.folder), 2, "RTX9090", "--hardware")
    found = numbers(call("score", pack.folder, "--hardware", "rtx-4090", "--json"))
    assert {one["error"] for one in found["errors"]} == {0.0}


@pytest.mark.parametrize(("blocks", "derived", "warns"), [(25, True, True), (25, False, False), (400, True, False)])
def test_a_derived_size_that_decides_is_warned_of(blocks: int, derived: bool, warns: bool, tmp_path: Path) -> None:
    """Only if the cache comes near its limit, and vLLM did not record its size."""
    made = packs.pack(tmp_path, blocks=None if derived else blocks)
    if derived:
        packs.memory_for(made, blocks)
    packs.record(made)
    said = call("score", made.folder)
    assert said.status == 0
    assert ("Capacity: KV use reaches" in said.out) == warns
    given = call("score", made.folder, "--set", "kv_cache.num_blocks=26")
    assert "Capacity" not in given.out


def test_ablation_has_all_parts_and_the_first_is_the_case(pack: Pack) -> None:
    """One part changed at a time; of a recorded run of our own the unchanged part scores zero, others do not."""
    packs.record(pack)
    found = numbers(call("score", pack.folder, "--json", "--ablate"))["ablation"]
    assert [one["name"] for one in found] == list(ABLATIONS)
    errors = {one["name"]: max(abs(part["error"]) for part in one["errors"]) for one in found}
    assert errors["as the run was"] == 0
    for name in ("no CPU cost, no time a row", "synchronous loop", "no prefix cache", "steps padded to graph sizes"):
        assert errors[name] > 0, name
    assert all(one["changes"] == json.loads(json.dumps(ABLATIONS[one["name"]])) for one in found)
    assert "What carries the result" in call("score", pack.folder, "--ablate").out


@pytest.mark.usefixtures("drawn")
def test_out_is_a_report_that_is_replaced_whole(pack: Pack, tmp_path: Path) -> None:
    """report.md, its figures, and the numbers; made again without the ablation, its figure is gone."""
    packs.record(pack)
    out = tmp_path / "report"
    assert call("score", pack.folder, "--ablate", "--out", out).status == 0
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    charts = {f"figures/{key}.{kind}" for key in ("series", "latencies", "ablation") for kind in ("png", "svg")}
    assert files == {"report.md", "report.json", *charts}
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in charts if name.endswith("png"))
    facts = json.loads((out / "report.json").read_text())
    assert facts["command"] == f"python -m cbsim score {pack.folder} --ablate --out {out}"
    assert len(facts["data"]["ablation"]) == len(ABLATIONS)
    assert call("score", pack.folder, "--out", out).status == 0
    assert not (out / "figures" / "ablation.png").exists()
    assert "What carries" not in (out / "report.md").read_text()


def test_out_does_not_write_over_anything_else(pack: Pack, tmp_path: Path) -> None:
    """A folder of other files is refused before the work is done, and stays as it is."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    shutil.rmtree(pack.root)  # not even the case is looked at
    refused(call("score", pack.folder, "--out", tmp_path / "mine"), 2, "thesis.tex", "no report")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
