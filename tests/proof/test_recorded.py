"""`score`: a recorded run replayed. A run of our own as the record must score zero; real ones keep their bars."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import packs
import pytest
from calls import Said, call, refused
from packs import Pack

from cbsim.proof.recorded import case, reenactment, score, verdict
from cbsim.proof.recorded.ablation import PARTS
from cbsim.proof.recorded.reenactment import Served
from cbsim.proof.recorded.score import METRICS, STATISTICS, MetricScore
from cbsim.scenario import catalog, shapes
from cbsim.scenario.fields import ScenarioError
from cbsim.scenario.schedulers import plain
from cbsim.workload.vllm_bench import TIMES

SHAPES: dict[str, dict[str, Any]] = {
    "one": {},
    "derived blocks": {"blocks": None},
    "skew": {"skew": True},
    "tensor parallel": {"tensor": 2, "blocks": None},
    "experts over two": {"ranks": 2, "moe": True, "blocks": None},
    "two of a dense model": {"ranks": 2},
}


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is written without --out lands beside the pack."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    return packs.pack(tmp_path / "pack")


def numbers(said: Said) -> Any:
    assert (said.status, said.err) == (0, ""), said
    return json.loads(said.out)


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
    assert (found["kv_blocks"], found["kv_blocks_source"]) == (
        120,
        "derived" if SHAPES[shape].get("blocks", 0) is None else "recorded",
    )
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
    alone = reenactment.Replayed(done.served, [other], done.total_blocks)
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


def test_an_error_relative_to_nothing() -> None:
    """Requests of one token have TPOT 0 on both sides, which is no error."""
    assert MetricScore("tpot", "mean", 0.0, 0.0).error == 0
    assert MetricScore("tpot", "mean", 1.0, 0.0).error == float("inf")


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
    assert [one["name"] for one in found] == list(PARTS)
    errors = {one["name"]: max(abs(part["error"]) for part in one["errors"]) for one in found}
    assert errors["as the run was"] == 0
    for name in ("no CPU cost, no time a row", "synchronous loop", "no prefix cache", "steps padded to graph sizes"):
        assert errors[name] > 0, name
    assert all(one["changes"] == json.loads(json.dumps(PARTS[one["name"]])) for one in found)
    assert "What carries the result" in call("score", pack.folder, "--ablate").out


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
    assert len(facts["data"]["ablation"]) == len(PARTS)
    assert call("score", pack.folder, "--out", out).status == 0
    assert not (out / "figures" / "ablation.png").exists()
    assert "What carries" not in (out / "report.md").read_text()


def test_out_does_not_write_over_anything_else(pack: Pack, tmp_path: Path) -> None:
    """A folder of other files is refused before the work is done, and stays as it is."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    shutil.rmtree(pack.root)  # not even the case is looked at
    refused(call("score", pack.folder, "--out", tmp_path / "mine"), 1, "thesis.tex", "no report")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


# -- what the case says -----------------------------------------------------------------------------------------------


def test_a_case_is_a_scenario(pack: Pack) -> None:
    """vLLM's options are those it resolved, else those it was asked for; the clock is the engine's."""
    pack.edit("meta.json", resolved_config__scheduler_config={"policy": "priority", "async_scheduling": False})
    found = pack.read()
    asked = found.scenario()
    options = plain(asked.scheduler)
    assert (options["max_num_seqs"], options["max_num_batched_tokens"], options["version"]) == (16, 256, "0.19")
    assert (options["policy"], asked.loop.mode, asked.kv_cache.num_blocks) == ("priority", "sync", 120)
    assert not found.scenario({"cost.skew": False, "scheduler.policy": "fcfs"}).cost.model_dump()["skew"]
    assert found.blocks_measured and found.ranks == 1
    assert found.taken[0] == (0, 0, 10**9, 2 * 10**9)


def test_newer_versions_have_newer_rules(pack: Pack) -> None:
    """0.26 and later by the rules of 0.33; a version that is neither is said so."""
    for version, rules, told in (("0.19.1", "0.19", False), ("0.26.0", "0.33", True), ("0.33.0", "0.33", False)):
        pack.edit("meta.json", vllm_version=version)
        assert plain(pack.read().scenario().scheduler)["version"] == rules
        assert (f"of vLLM {version}; it was replayed by the rules of {rules}" in call("score", pack.folder).out) == told


def test_type_auto_is_the_models_own(pack: Pack) -> None:
    """vLLM's default; a type that was not profiled is named."""
    pack.edit("meta.json", engine_kwargs__dtype="auto")
    pack.read()
    pack.edit("meta.json", engine_kwargs__dtype="float16")
    refused(call("score", pack.folder), 2, "fp16", "no profile there of me/Tiny on RTX4090 in float16")


GOLDEN_BLOCKS = [
    ("RTXPRO6000", "meta-llama/Llama-3.1-8B", 1, 1, 36_578),
    ("RTXPRO6000", "Qwen/Qwen3-32B", 2, 1, 28_614),
    ("RTXPRO6000", "Qwen/Qwen3-30B-A3B-Instruct-2507", 1, 2, 38_590),
]


@pytest.mark.parametrize(("hardware", "model", "tensor", "ranks", "blocks"), GOLDEN_BLOCKS)
def test_derived_blocks_golden(hardware: str, model: str, tensor: int, ranks: int, blocks: int, tmp_path: Path) -> None:
    """LLMServingSim's own numbers for 96 GiB at 0.9, from the weights of one GPU: tensor-parallel ones share all of
    them, expert-parallel ones the experts. Both cases also run on the real profiles, whatever their requests."""
    root = real("")
    folder = tmp_path / "case"
    instance = {"model_name": model, "hardware": hardware, "tp_size": tensor, "npu_mem": {"mem_size": 96}}
    packs.write(
        folder / "config.json", {"link_bw": 16, "link_latency": 0, "nodes": [{"instances": [instance] * ranks}]}
    )
    engine = {"max_num_seqs": 128, "max_num_batched_tokens": 2048, "enable_expert_parallel": ranks > 1}
    dataset = "sharegpt-llama-3.1-8b-300-sps10" if "Llama" in model else "sharegpt-qwen3-32b-300-sps10"
    meta = {"vllm_version": "0.19.0", "dataset_path": f"{dataset}.jsonl", "engine_kwargs": engine, "num_requests": 12}
    packs.write(folder / "meta.json", meta)
    rows = [
        json.loads(line) for line in (root / "workloads" / f"{dataset}.lengths.jsonl").read_text().splitlines()[:12]
    ]
    times = dict.fromkeys(TIMES, 1.0)
    packs.lines(folder / "requests.jsonl", [{"request_id": f"bench-{row['id']}", **row, **times} for row in rows])
    packs.table(folder / "timeseries.csv", ("t", "running", "waiting", "kv_cache_pct"), [(1, 1, 1, 1)])
    found = case.read(folder, root)
    assert (found.settings["kv_cache"]["num_blocks"], found.blocks_measured) == (blocks, False)
    done = reenactment.replay(found, found.scenario())
    assert len(done.steps) == ranks
    assert done.served.output_tokens.tolist() == [row["output_toks"] for row in rows]


# -- real runs --------------------------------------------------------------------------------------------------------


def real(name: str) -> Path:
    for folder in catalog.data_folders():
        if (folder / "measured_vllm" / name).is_dir():
            return folder / "measured_vllm" / name
    pytest.skip("recorded vLLM runs not present (measured_vllm in $CBSIM_DATA); docs/data.md says where to get them")


def errors(folder: Path) -> dict[tuple[str, str], float]:
    found = verdict.validate(folder, pack=None, hardware=None, overrides=(), ablate=False)
    return {(one.metric, one.statistic): one.error for one in found.scores}


def test_rtx4090_is_within_a_percent_everywhere() -> None:
    """The bar for a run whose cache vLLM recorded: every mean and every percentile within 1 %."""
    found = errors(real("cases/RTX4090__Llama-3.1-8B"))
    assert len(found) == 16
    assert {name: error for name, error in found.items() if abs(error) > 0.01} == {}


def test_rtxpro6000_means_are_within_their_bars() -> None:
    """TTFT 3 %, TPOT and E2E 1 %; LLMServingSim: 4.0, 1.0 and 1.8 %."""
    found = errors(real("cases/RTXPRO6000__Llama-3.1-8B"))
    assert abs(found["ttft", "mean"]) < 0.03
    assert abs(found["tpot", "mean"]) < 0.01
    assert abs(found["e2e", "mean"]) < 0.01


# -- what cannot be used ----------------------------------------------------------------------------------------------

Spoil = Callable[[Pack], object]


def gone(name: str) -> Spoil:
    return lambda pack: (pack.folder / name).unlink()


def broken(name: str, text: str) -> Spoil:
    return lambda pack: (pack.folder / name).write_text(text)


def edited(name: str, **changes: Any) -> Spoil:
    return lambda pack: pack.edit(name, **changes)


def instance(**changes: Any) -> Spoil:
    """A field of the instance changed, by names with `__`."""
    return lambda pack: pack.edit("config.json", **{f"nodes__0__instances__0__{k}": v for k, v in changes.items()})


def blocks_unknown(**changes: Any) -> Spoil:
    """The size of the cache has to be derived, from changed fields."""

    def spoil(pack: Pack) -> None:
        pack.edit("meta.json", kv_cache__num_gpu_blocks=None)
        packs.memory_for(pack, 120)
        instance(**changes)(pack)

    return spoil


def differing(pack: Pack) -> None:
    one = json.loads((pack.folder / "config.json").read_text())["nodes"][0]["instances"][0]
    pack.edit("config.json", nodes=[{"instances": [one]}, {"instances": [one | {"tp_size": 2}]}])


def engine(**changes: Any) -> Spoil:
    """A field of what vLLM was asked for."""
    return lambda pack: pack.edit("meta.json", **{f"engine_kwargs__{name}": value for name, value in changes.items()})


def several(**changes: Any) -> Spoil:
    def spoil(pack: Pack) -> None:
        instance(tp_size=2)(pack)
        pack.edit("config.json", **changes)

    return spoil


BAD: dict[str, tuple[Spoil, Sequence[str]]] = {
    "no config": (gone("config.json"), ["config.json: cannot be read: No such file"]),
    "no meta": (gone("meta.json"), ["meta.json: cannot be read: No such file"]),
    "no requests": (gone("requests.jsonl"), ["requests.jsonl: cannot be read: No such file"]),
    "no series": (gone("timeseries.csv"), ["timeseries.csv: cannot be read: No such file"]),
    "config is not JSON": (broken("config.json", "{"), ["config.json: not valid JSON"]),
    "meta is empty": (broken("meta.json", ""), ["meta.json: not valid JSON"]),
    "meta is deep": (broken("meta.json", "[" * 100_000), ["meta.json: not valid JSON"]),
    "config is a list": (broken("config.json", "[]"), ["config.json: got [], expected a JSON object"]),
    "meta is a number": (broken("meta.json", "3"), ["meta.json: got 3, expected a JSON object"]),
    "no nodes": (edited("config.json", nodes=[]), ["config.json: nodes: got 0 instances, expected one"]),
    "nodes of text": (edited("config.json", nodes=["a"]), ["config.json: nodes: got 0 instances"]),
    "instances of text": (
        edited("config.json", nodes=[{"instances": ["a"]}]),
        ["config.json: nodes.instances: got ['a'], expected a list of objects"],
    ),
    "no model": (instance(model_name=None), ["config.json: nodes.instances.model_name: is missing"]),
    "no hardware": (instance(hardware=None), ["config.json: nodes.instances.hardware: is missing"]),
    "a model of numbers": (instance(model_name=7), ["config.json: nodes.instances.model_name: got 7, expected text"]),
    "half a GPU": (instance(tp_size=0.5), ["config.json: nodes.instances.tp_size: got 0.5, expected a whole number"]),
    "instances that differ": (differing, ["config.json: nodes: got 2 instances, not all alike"]),
    "a link of text": (edited("config.json", link_bw="16"), ["config.json: link_bw: got '16', expected a number >= 0"]),
    "no tables of the degree": (several(), ["bf16: holds no tables for tensor parallelism 2 (found: tp1)"]),
    "unknown GPU": (instance(hardware="TPU"), ["unknown hardware 'TPU'", "--hardware"]),
    "another model in meta": (edited("meta.json", model="me/Other"), ["model: got 'me/Other', expected me/Tiny"]),
    "servers that meta denies": (engine(data_parallel_size=2), ["data_parallel_size: got 2, expected 1"]),
    "a degree that meta denies": (engine(tensor_parallel_size=2), ["tensor_parallel_size: got 2, expected 1"]),
    "pipelines": (engine(pipeline_parallel_size=2), ["pipeline_parallel_size: got 2, expected 1: anything else"]),
    "a narrow cache": (engine(kv_cache_dtype="fp8"), ["kv_cache_dtype: got 'fp8', expected auto: anything else"]),
    "too many requests": (edited("meta.json", num_requests=10**6), ["num_requests: got 1000000, expected at most"]),
    "a cache of text": (edited("meta.json", kv_cache="x"), ["meta.json: kv_cache: got 'x', expected an object"]),
    "unknown model": (
        instance(model_name="me/Large"),
        ["Large.json: no configuration of the case's model 'me/Large' (known: Tiny)"],
    ),
    "unknown size": (blocks_unknown(npu_mem=None), ["config.json: nodes.instances.npu_mem.mem_size: is missing"]),
    "memory of text": (
        blocks_unknown(npu_mem__mem_size="24 GB"),
        ["config.json: nodes.instances.npu_mem.mem_size: got '24 GB', expected a number"],
    ),
    "no room": (
        blocks_unknown(npu_mem__mem_size=0.0001),
        ["config.json: nodes.instances.npu_mem.mem_size: got 0.0001, expected more than", "of weights"],
    ),
    "no dataset": (edited("meta.json", dataset_path=None), ["meta.json: dataset_path: is missing"]),
    "unknown dataset": (
        edited("meta.json", dataset_path="a/tinny.jsonl"),
        ["meta.json: dataset_path: got 'tinny'", "did you mean tiny?"],
    ),
    "no version": (edited("meta.json", vllm_version=None), ["meta.json: vllm_version: is missing"]),
    "a version of words": (edited("meta.json", vllm_version="main"), ["meta.json: vllm_version: got 'main'"]),
    "no seats": (
        edited("meta.json", engine_kwargs__max_num_seqs=None),
        ["meta.json: engine_kwargs.max_num_seqs: is missing"],
    ),
    "seats of text": (
        edited("meta.json", engine_kwargs__max_num_seqs="many"),
        ["meta.json: engine_kwargs.max_num_seqs: got 'many', expected a whole number >= 1"],
    ),
    "ranks of text": (
        edited("meta.json", engine_kwargs__data_parallel_size="two"),
        ["meta.json: engine_kwargs.data_parallel_size: got 'two'"],
    ),
    "fewer than no requests": (edited("meta.json", num_requests=-1), ["meta.json: num_requests: got -1"]),
    "blocks of text": (
        edited("meta.json", kv_cache__num_gpu_blocks="all"),
        ["meta.json: kv_cache.num_gpu_blocks: got 'all'"],
    ),
    "a seat more than tokens": (edited("meta.json", engine_kwargs__max_num_seqs=999), ["max_num_batched_tokens"]),
    "too small for a request": (
        edited("meta.json", kv_cache__num_gpu_blocks=3),
        ["request 0 cannot be served: prompt of 96 tokens, max_model_len is 32"],
    ),
    "longer than the model": (
        edited("meta.json", engine_kwargs__max_model_len=20),
        ["cannot be served", "max_model_len is 20"],
    ),
    "no profile": (lambda pack: shutil.rmtree(pack.profile), ["bf16: no profile there of me/Tiny on RTX4090"]),
    "no layers": (
        edited("model_config/Tiny.json", num_hidden_layers=None),
        ["Tiny.json: num_hidden_layers: is missing"],
    ),
    "no heads": (edited("model_config/Tiny.json", num_attention_heads=0), ["Tiny.json: num_attention_heads: got 0"]),
    "a type unknown": (edited("model_config/Tiny.json", torch_dtype="int3"), ["Tiny.json: dtype: got 'int3'"]),
    "experts that are not profiled": (
        edited("model_config/Tiny.json", **packs.MOE),
        ["meta.yaml: architecture: got 'tiny'; either it or the model has experts"],
    ),
    "a request missing": (broken("requests.jsonl", "\n"), ["requests.jsonl: no request_id bench-0"]),
    "an empty series": (
        broken("timeseries.csv", "t,running,waiting,kv_cache_pct\n"),
        ["timeseries.csv: holds no rows"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_case_that_cannot_be_used_is_one_message(name: str, pack: Pack) -> None:
    """File and field, exit status 2, no traceback."""
    spoil, words = BAD[name]
    spoil(pack)
    refused(call("score", pack.folder), 2, *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("loop.mode=both", ["loop.mode: got 'both', expected sync or async"]),
        ("workload.limit=5", ["workload: got 5 requests, the recorded run has 40"]),
        ("kv_cache.num_blocks=3", ["cannot be served"]),
        ("kv_cache.blocks=3", ["--set kv_cache.blocks=3", "unknown field"]),
        ("cost.path=nowhere/at/all", ["cost.path: no tables 'nowhere/at/all'"]),
    ],
)
def test_set_that_cannot_be_used(change: str, words: Sequence[str], pack: Pack) -> None:
    refused(call("score", pack.folder, "--set", change), 2, *words)


def test_servers_that_share_experts_need_tables(tmp_path: Path) -> None:
    """Only they know what an exchange costs."""
    made = packs.pack(tmp_path, ranks=2, moe=True)
    refused(call("score", made.folder, "--set", "cost.kind=constant", "--set", "cost.step_s=1"), 2, "cost.kind")


def test_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "nowhere"):
        refused(call("score", path), 2, f"{path}: no such folder")


def test_shapes_with_experts_are_consistent() -> None:
    """As many experts a token as there are at most, one at least; none without experts."""
    tiny = shapes.model("tiny").model_dump(mode="json")
    for experts, chosen, fits in ((0, 0, True), (0, 1, False), (8, 0, False), (8, 9, False), (8, 8, True)):
        values = tiny | {"experts": experts, "experts_per_token": chosen}
        if fits:
            shapes.ModelShape.model_validate(values)
        else:
            with pytest.raises(ValueError, match="must be between"):
                shapes.ModelShape.model_validate(values)


def test_a_case_names_its_pack(pack: Pack, tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="holds no folder 'workloads'; name the pack of the case with --data"):
        case.read(pack.folder, tmp_path / "elsewhere")


def test_a_link_that_nobody_names_is_assumed_and_told(tmp_path: Path) -> None:
    """Several GPUs talk to each other over something; what was assumed of it stands in the answer, for one GPU not."""
    made = packs.pack(tmp_path / "two", tensor=2)
    packs.record(made)
    told = "config.json names no link between the GPUs: 16 GiB/s and 20 us a message are assumed."
    assert told not in call("score", made.folder, "--out", tmp_path / "a").out
    made.edit("config.json", link_bw=None)
    said = call("score", made.folder, "--out", tmp_path / "b")
    assert said.status == 0
    assert told in said.out
    alone = packs.pack(tmp_path / "one")
    packs.record(alone)
    assert told not in call("score", alone.folder, "--out", tmp_path / "c").out
