"""The studies under reports/: closed forms against the simulator, what papers claim as directions, and committed
reports that are what runs now, to the last digit.
"""

from __future__ import annotations

import csv
import json
from functools import cache
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.reference import data

import cbsim
from cbsim.errors import ScenarioError
from cbsim.measured.points import published
from cbsim.policy.plan import Chunk, StepPlan, StepWork
from cbsim.policy.request import RequestSpec
from cbsim.policy.transfers import Direction
from cbsim.runs.assemble import copies, cost_model
from cbsim.scenario import catalog
from cbsim.schedulers import registry
from reports.doc_tables import facts
from reports.fidelity.apart_pays import make as apart
from reports.fidelity.async_map import make as async_map
from reports.fidelity.chunks import make as chunks
from reports.fidelity.curves import make as efficiency
from reports.fidelity.default import make as default
from reports.fidelity.fragmentation import make as fragmentation
from reports.fidelity.hopper import make as hopper
from reports.fidelity.landscape import make as landscape
from reports.fidelity.landscape.make import AGENTS, CONTENDERS, MIXED, Ran
from reports.fidelity.replicas_or_tp import make as layouts
from reports.fidelity.routers import make as routers
from reports.fidelity.schedulers_by_load import make as by_load
from reports.fidelity.speculation import make as validated
from reports.fidelity.speculation_pays import make as pays
from reports.fidelity.swap_or_recompute import make as swapping
from reports.fidelity.swap_or_recompute.make import BOTH_WAYS, GB, GPUS, MODELS, ONE_WAY, Terms

NS = 1e9


# -- the landscape ----------------------------------------------------------------------------------------------------


@cache
def ran(load: str, name: str) -> Ran:
    (contender,) = (contender for contender in CONTENDERS if contender.name == name)
    return landscape.run(load, contender)


def test_every_scheduler_is_in_the_landscape() -> None:
    """But for searches and those that reserve one piece, which have studies of their own."""
    kinds = {contender.kind for contender in CONTENDERS}
    assert kinds == {*registry.OURS} - {"beam", "contiguous", "transformers_prefill_first"}


def test_the_agents_are_those_of_the_seed() -> None:
    assert (catalog.ROOT / "scenarios" / "traces" / "agents.jsonl").read_text() == landscape.agents()


def test_orca_paged_blocks_and_chunks_gain_what_their_papers_say() -> None:
    """Iteration-level scheduling is above batches that end together, with the same reservation for all; paged blocks
    above reserved sequences. Prompts of thousands of tokens stop all who decode; in chunks they do not.
    """
    assert ran(MIXED, "orca").tokens_per_s > 1.5 * ran(MIXED, "faster_transformer").tokens_per_s
    assert ran(MIXED, "vllm_v0").tokens_per_s > 2 * ran(MIXED, "orca").tokens_per_s
    assert ran(AGENTS, "sarathi").stall < ran(AGENTS, "vllm_v0").stall / 20


def test_the_longest_prefix_first_hits_more() -> None:
    """On the tree of prefixes, four at a time, a quarter of the cache: whose prefix is there goes first, before it is
    evicted; those whose prefix is not there wait.
    """
    few = ("kv_cache.num_blocks=32768", "scheduler.max_running_requests=4")
    fcfs, lpm = (landscape.run(AGENTS, c, *few) for c in CONTENDERS if c.kind == "sglang")
    assert lpm.hits > fcfs.hits + 0.25
    assert lpm.tokens_per_s > fcfs.tokens_per_s
    assert lpm.ttft_p99 > 2 * fcfs.ttft_p99


def test_utilisation_costs_pauses() -> None:
    """More output from the same memory, for requests that are set back, and slower tokens for some."""
    most, safe = ran(MIXED, "trtllm MAX_UTILIZATION"), ran(MIXED, "trtllm")
    assert most.tokens_per_s > safe.tokens_per_s
    assert most.preemptions > safe.preemptions == 0
    assert most.tpot_p99 > safe.tpot_p99


def test_a_prefix_cache_is_what_agents_need() -> None:
    cached, plain = ran(AGENTS, "vllm"), ran(AGENTS, "trtllm")
    assert cached.hits > 0.9 and plain.hits == 0
    assert cached.tokens_per_s > 1.5 * plain.tokens_per_s


@pytest.mark.parametrize(("load", "name"), [(MIXED, "vllm"), (MIXED, "orca"), (AGENTS, "sarathi"), (AGENTS, "vllm")])
def test_the_landscape_is_what_runs(load: str, name: str) -> None:
    (recorded,) = (run for run in facts("landscape")["runs"] if (run["workload"], run["contender"]) == (load, name))
    assert ran(load, name)._asdict() == recorded | {"kv_used": pytest.approx(recorded["kv_used"], rel=1e-12)}


def test_the_page_quotes_the_landscape() -> None:
    """Five columns of it, scheduler by scheduler."""
    runs = {(entry["workload"], entry["contender"]): entry for entry in facts("landscape")["runs"]}
    page = (catalog.ROOT / "docs" / "landscape.md").read_text()
    for name in ("static", "orca", "sarathi", "trtllm", "transformers_fifo", "vllm", "sglang"):
        mixed, agents = runs[MIXED, name], runs[AGENTS, name]
        cells = [f"`{name}`", f"{mixed['tokens_per_s']:,.0f}", f"{mixed['ttft_p99']:.1f}"]
        cells += [f"{agents['tokens_per_s']:,.0f}", f"{1e3 * agents['stall']:,.0f}", f"{agents['hits']:.0%}"]
        assert "| " + " | ".join(cells) + " |" in page, cells


# -- goodput by load --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "loop", "rate"), [("vllm", "async", 4), ("sarathi", "sync", 64)])
def test_goodput_is_what_runs(name: str, loop: str, rate: int) -> None:
    """With the defaults and with the best settings."""
    published = facts("schedulers_by_load")
    (best,) = (entry["settings"] for entry in published["best"] if entry["scheduler"] == name)
    for group, chosen in (("points", {}), ("tuned", best)):
        (recorded,) = (p for p in published[group] if (p["scheduler"], p["rate"]) == (name, rate))
        assert recorded == by_load.point(name, loop, rate, chosen)._asdict()


def test_the_best_settings_are_what_tune_answers() -> None:
    """One search again: TensorRT-LLM's five budgets."""
    (recorded,) = (dict(entry) for entry in facts("schedulers_by_load")["best"] if entry["scheduler"] == "trtllm")
    again = json.loads(json.dumps(by_load.tuned("trtllm", "async", by_load.TUNED_AT)._asdict()))
    for name in ("scheduler", "settings"):
        assert again.pop(name) == recorded.pop(name)
    assert again == pytest.approx(recorded, rel=1e-9)


# -- the map of async -------------------------------------------------------------------------------------------------


def test_the_map_of_async_is_what_runs() -> None:
    """The cases of one model and GPU, and their gains: min / sum of the two times of a step."""
    model, gpu = "llama-3.1-8b", "h100-sxm"
    published = facts("async_map")
    then = [case for case in published["cases"] if (case["model"], case["gpu"]) == (model, gpu)]
    now = async_map.swept([model], [gpu])
    assert [(case.batch, case.context) for case in now] == [(case["batch"], case["context"]) for case in then]
    for case, recorded in zip(now, then, strict=True):
        assert case.gpu_ms == pytest.approx(recorded["gpu_ms"], rel=1e-9)
        assert min(case.matters_ms, case.gpu_ms) / (case.matters_ms + case.gpu_ms) == pytest.approx(async_map.MATTERS)
        for ms in async_map.CPU_MS:
            assert case.saved(ms) == pytest.approx(min(ms, case.gpu_ms) / (ms + case.gpu_ms), abs=0.001)
    assert [engine._asdict() for engine in async_map.ENGINES] == published["engines"]


def test_what_does_not_fit_is_left_out() -> None:
    """Of the small model all cases fit somewhere; four GPUs hold 70B and eight long contexts, no more."""
    assert (128, 32768) in {(case["batch"], case["context"]) for case in facts("async_map")["cases"]}
    large = async_map.swept(["llama-3.1-70b"], ["a100-80gb"], most=8)
    assert {(case.batch, case.context) for case in large} == {(b, c) for b in (1, 8) for c in (1024, 8192, 32768)}


def test_the_marks_of_the_older_engine_are_its_file_s() -> None:
    """Medians of three phases, summed, of Llama-2-7b on one GPU."""
    with data("cpu_overhead/cpu_overheads_history_bfb80913.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if "Llama-2-7b" in row["model_name"]]
    phases = ("schedule_median", "prepare_inputs_e2e_median", "process_model_outputs_median")
    for engine in async_map.ENGINES:
        if engine.name.startswith("vLLM"):
            batch = engine.name.rpartition(" ")[2]
            (row,) = (r for r in rows if (r["batch_size"], r["tensor_parallel_degree"]) == (batch, "1"))
            assert engine.cpu_ms == pytest.approx(sum(float(row[phase]) for phase in phases), abs=0.005)


# -- Hopper -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tables() -> None:
    """The measured kernels."""
    for gpu in hopper.GPUS.values():
        data(f"{hopper.TABLES}/{gpu}_sxm/gemm__{hopper.ENGINE}.csv.gz")


def stated(cpu_s: float) -> str:
    """An override: so much CPU time a step, whatever is in it."""
    none = "{base_s: 0, per_request_s: 0}"
    prepare = f"{{base_s: {cpu_s}, per_request_s: 0}}"
    return f"cost.cpu={{schedule: {none}, prepare: {prepare}, launch: {none}, update: {none}}}"


@pytest.mark.usefixtures("tables")
def test_one_run_of_hopper_gives_any_cpu_cost() -> None:
    """One run's kernels give the time of any other CPU cost: the sum of cpu + gpu, or of the larger of the two. At
    1.01 ms the CPU is the shorter in every step, at 10 ms in the later half of them, at 25 ms in none.
    """
    run = hopper.HopperRun.of("H100", hopper.LAYER_S)
    default = run.at(run.cpu_s)
    assert default.sync_s == pytest.approx(run.run.sync_s, rel=1e-6)
    assert default.async_s == pytest.approx(run.run.async_s, rel=1e-3)
    assert default.gpu_active == pytest.approx(run.run.gpu_active, rel=1e-6)
    assert (run.gpu_s.min() < 10e-3 < run.gpu_s.max() < 25e-3) and (run.cpu_s.max() < run.gpu_s.min())
    for cpu_s in (10e-3, 25e-3):
        both: Any = cbsim.run(hopper.scenario_on("H100", hopper.LAYER_S, stated(cpu_s), "loop.mode=both"))
        closed = run.at(cpu_s)
        assert both["sync"].summary["makespan_s"] == pytest.approx(closed.sync_s, rel=1e-3)
        assert both["async"].summary["makespan_s"] == pytest.approx(closed.async_s, rel=1e-3)


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize(("gpu", "batch", "context"), [("H100", 1, 1024), ("H200", 16, 32768), ("H200", 128, 4096)])
def test_the_map_of_hopper_is_what_the_simulator_takes(gpu: str, batch: int, context: int) -> None:
    """At corners of the map, vLLM's scheduler with all requests decoding: the steps around the one at which their mean
    context is that of the map. Every request is one token longer each step, so the mean of a few steps is the middle
    one's time.
    """
    (cell,) = [cell for cell in hopper.cells(gpu) if (cell.batch, cell.context) == (batch, context)]
    assert cell.fits
    workload = f"workload={{kind: synthetic, requests: {batch}, prompt_tokens: {context - 160}, output_tokens: 400}}"
    parts = ("scheduler={name: vllm}", "kv_cache={}", workload, "loop.mode=both")
    both: Any = cbsim.run(hopper.scenario_on(gpu, hopper.LAYER_S, *parts))
    expected = {"sync": cell.cpu_s + cell.gpu_s, "async": max(cell.cpu_s, cell.gpu_s)}
    for loop, step_s in expected.items():
        steps = both[loop].step_numbers
        means = steps["context_tokens"] / np.maximum(steps["decode_rows"], 1)
        (around,) = np.nonzero((steps["decode_rows"] == batch) & (np.abs(means - context) <= 8))
        assert len(around) in (16, 17)
        assert (np.diff(around) == 1).all()
        assert np.diff(steps["update_end_ns"][around]).mean() / NS == pytest.approx(step_s, rel=1e-3)


def test_where_async_begins_to_matter() -> None:
    """At a 19th of the GPU's time on the CPU async saves exactly 5 %; most, a half, where both take the same."""
    cell = hopper.Cell(batch=1, context=1024, gpu_s=0.019, cpu_s=0.002, fits=True, measured=True)
    assert cell.matters_s == pytest.approx(0.001)
    assert hopper.saved(cell.matters_s, cell.gpu_s) == pytest.approx(0.05)
    assert cell.saved == pytest.approx(2 / 21)
    assert [hopper.saved(cpu_s, 0.019) for cpu_s in (0.0, 0.019, 0.038)] == pytest.approx([0, 1 / 2, 1 / 3])


# -- swap or recompute ------------------------------------------------------------------------------------------------

PLACES = st.tuples(st.sampled_from(MODELS), st.sampled_from(GPUS))


def step_s(model: str, gpu: str, start: int, tokens: int, others: int) -> float:
    """The cost model's step of one chunk beside decoding rows of 100 tokens each."""
    chunk = Chunk(RequestSpec(0, "0", 0, 1, 1, 1), 0, start, tokens, (), 1)
    work = StepWork((chunk,), 0, others, others * 100, 100, tokens)
    return cost_model(swapping.scenario(model, gpu)).gpu_ns(StepPlan(0, work), tokens + others)[1] / NS


@given(place=PLACES, tokens=st.integers(1, 60_000), others=st.integers(0, 1500))
@settings(max_examples=40)
def test_recomputing_takes_what_the_roofline_says(place: tuple[str, str], tokens: int, others: int) -> None:
    """A chunk of everything and the next token against a row that hits everything, beside the same others."""
    extra = step_s(*place, 0, tokens + 1, others) - step_s(*place, tokens, 1, others)
    assert Terms.of(swapping.scenario(*place)).extra_s(tokens, others) == pytest.approx(extra, rel=1e-6, abs=3e-9)


@given(PLACES, st.floats(1e9, 200e9), st.integers(0, 3000), st.sampled_from([BOTH_WAYS, ONE_WAY]))
@settings(max_examples=60)
def test_swapping_pays_beyond_the_root(place: tuple[str, str], link: float, others: int, ways: int) -> None:
    """Recomputing is the cheaper a little below it, swapping a little above: exactly where two tokens of attention take
    longer to compute than to read.
    """
    terms = Terms.of(swapping.scenario(*place))
    root = terms.tokens(link, others, ways)
    assume(root > 2 * terms.cached_s / terms.pair_s + 2)
    above, below = int(root * 1.01) + 1, int(root * 0.99)
    assert terms.extra_s(above, others) > terms.transfer_s(above, link, ways)
    assert terms.extra_s(below, others) < terms.transfer_s(below, link, ways)
    assert terms.link_bytes_s(above, others, ways) < link < terms.link_bytes_s(below, others, ways)


def test_the_closed_form_by_hand() -> None:
    """Llama-3.1-8B on an H100: 32 layers of 218.1 million weights, so 2 x 6.98e9 / (0.6 x 989.4e12) = 23.5 us a token;
    131,072 bytes of KV. Far beyond the weights' 4.9 ms and short of attention's square, 2 x 131,072 bytes over 23.5 us:
    11.1 GB/s. Half of it if one way is hidden; nothing is fast enough for the tokens that the weights hide.
    """
    terms = Terms.of(swapping.scenario())
    assert terms.linear_s == pytest.approx(23.5e-6, rel=2e-3)
    assert terms.weights_s == pytest.approx(4.9e-3, rel=2e-3)
    assert terms.kv_bytes == 131072
    busy = 1000
    assert terms.link_bytes_s(200, busy) == pytest.approx(11.1 * GB, rel=5e-3)
    assert terms.link_bytes_s(200, busy, ONE_WAY) == terms.link_bytes_s(200, busy) / 2
    assert terms.tokens(64 * GB, busy) < 1
    assert terms.link_bytes_s(100) > 1000 * GB
    assert Terms(0.0, 1e-9, 1.0, 0.0, 0.0, 1).link_bytes_s(100) == inf
    case = swapping.scenario()
    copied = copies(case).ns(Direction.IN, 64) / NS
    assert terms.transfer_s(1024, case.hardware.pcie_bytes_s, ONE_WAY) == pytest.approx(copied, rel=1e-6)


@pytest.mark.parametrize(("prompt", "link"), [(1024, 12 * GB), (1024, 16 * GB), (4096, 8 * GB), (4096, 64 * GB)])
def test_a_pair_takes_what_the_closed_form_says(prompt: int, link: float) -> None:
    """Within 50 us of 3 to 80 ms: the copies of the inputs to the device."""
    pair = swapping.pair(prompt, link)
    assert pair["saved_s"] == pytest.approx(pair["closed_s"], abs=50e-6)
    assert (pair["saved_s"] > 0) == (link > Terms.of(swapping.scenario()).link_bytes_s(int(pair["tokens"])))
    assert pair in facts("swap_or_recompute")["pairs"]


def test_what_one_rule_transfers_the_other_computes_again() -> None:
    load = swapping.load(128, 256, 12, 64 * GB)
    swap, recompute = load["swap"], load["recompute"]
    assert swap["preemptions"] > 0 < recompute["preemptions"]
    assert (swap["recomputed_tokens"], recompute["blocks"]) == (0, 0)
    assert swap["blocks"] > 0 < recompute["recomputed_tokens"]
    assert load["closed"] == pytest.approx(load["gain"], abs=0.05)


# -- chunks, fragmentation --------------------------------------------------------------------------------------------


def test_what_the_roofline_says_of_chunks() -> None:
    """It is right on chunks of 2,048, says nothing of smaller chunks, and is far below every decode batch."""
    try:
        decodes, _, chunked, _ = chunks.points()
    except ScenarioError as error:
        pytest.skip(f"published data not present: {error}")
    model = cost_model(chunks.scenario())
    answers = [chunks.Answer(point, chunks.roofline_s(model, point)) for point in chunked]
    for answer, over_whole, over_reference, roofline in chunks.overheads(answers):
        assert (answer.point.chunk == 2048) <= (-0.04 < answer.error < 0.01)
        assert (answer.point.chunk < 2048) <= (over_reference > 1.15)
        assert roofline == pytest.approx(1, abs=1e-4)
        assert (answer.point.chunk == chunks.WHOLE) <= (over_whole == 1)
    assert all(-0.80 < chunks.roofline_s(model, p) / p.published_s - 1 < -0.55 for p in decodes)


def test_the_roofline_of_half_of_yi_by_hand() -> None:
    """One row on one of two GPUs: 16.73e9 weights of the layers and 32,000 x 7,168 of the head, 2 bytes each, read at
    0.85 x 1.935e12 bytes/s are 20.63 ms; 1,022 tokens of 60 x 4 x 128 x 4 bytes, at 0.7 of it, are 0.093 ms.
    """
    weights = 60 * (2 * 7168 * 128 * (28 + 4) + 3 * 7168 * 10240) + 32_000 * 7168
    seconds = 2 * weights / (0.85 * 1.935e12) + 1022 * 122_880 / (0.7 * 1.935e12)
    point = chunks.Point(0, 0, 1, 1021, 1)
    assert chunks.roofline_s(cost_model(chunks.scenario()), point) == pytest.approx(seconds, rel=1e-4)


def test_fragmentation_is_what_runs() -> None:
    """One of its runs, whole: what it held is what was published."""
    now = fragmentation.run(fragmentation.PAPER, "Orca (Max)")
    published, *_ = (one for one in facts("fragmentation")["runs"] if one["system"] == "Orca (Max)")
    assert now.shares._asdict() == pytest.approx(published["shares"], abs=1e-12)
    assert now.running == pytest.approx(published["running"], abs=1e-12)


# -- the default cost model -------------------------------------------------------------------------------------------


def test_curves_are_what_the_script_makes_of_the_tables() -> None:
    """The file of a card, but for the errors that are added when all are made, to the last digit."""
    data("public_measured/aiconfigurator/l40s/system.yaml")
    committed = json.loads((catalog.SCENARIOS / "curves" / "l40s.json").read_text())
    made = json.loads(json.dumps(efficiency.distil("l40s", "l40s")))
    assert {name: part for name, part in committed.items() if name not in ("error", "left_out")} == made


@pytest.mark.parametrize("without", [False, True])
def test_steps_by_curves_are_near_those_by_tables(monkeypatch: pytest.MonkeyPatch, without: bool) -> None:
    """90 % within 10 % by the card's own curves, within 25 % by those of the others: one model on 1 to 8 H100."""
    data("public_measured/aiconfigurator/h100_sxm/system.yaml")
    monkeypatch.setattr(efficiency, "MODELS", ("qwen3-14b",))
    errors = np.array([error for *_, error in efficiency.compared("h100_sxm", "h100-sxm", "vllm", without=without)])
    assert (abs(errors) < (0.25 if without else 0.1)).mean() > 0.9


def test_a_card_by_its_data_sheet_alone_is_what_other_generations_say() -> None:
    """One point of each card, computed now: by its own curves as published, otherwise by those of others. The errors
    that runs quote are those of the report."""
    data("public_measured/aiconfigurator/h100_sxm/system.yaml")
    made = facts("default")
    known = {each["id"]: each for each in made["points"]}
    points = [point for point in published.read(published.folder(None)) if point.id in known and point.concurrency == 4]
    points = [
        next(each for each in points if each.system == system and each.output == 1024) for system in default.CARDS
    ]
    for point, means in default.predicted(points):
        assert (means.ttft_ms, means.tpot_ms) == (known[point.id]["ttft_ms"], known[point.id]["tpot_ms"])
    own, near, far = (
        [means.tpot_ms for _, means in found]
        for found in (
            default.predicted(points),
            default.by_others(points, generation=False),
            default.by_others(points, generation=True),
        )
    )
    assert all(len({*times}) == 3 for times in zip(own, near, far, strict=True))
    for system, name in default.CARDS.items():
        quoted = json.loads((catalog.SCENARIOS / "curves" / f"{name}.json").read_text())["servers"]
        for kind in default.NAMES:
            assert quoted[kind] == pytest.approx(made["sheets"][kind][system], abs=1e-4)


def test_the_default_is_within_its_bars() -> None:
    """TPOT within 10 % and TTFT within 25 % in the mean of published servers, means of recorded runs within 10 %."""
    made = facts("default")
    assert made["servers"]["tpot"] < 0.1
    assert made["servers"]["ttft"] < 0.25
    means = [error for run in made["recorded"].values() for name, error in run.items() if name.endswith(" mean")]
    assert len(means) == 6
    assert max(map(abs, means)) < 0.1
    try:
        now = default.recorded("RTX4090__Llama-3.1-8B")
    except ScenarioError as error:
        pytest.skip(f"recorded run not present: {error}")
    published = made["recorded"]["RTX4090__Llama-3.1-8B"]
    assert {" ".join(key): error for key, error in now.items()} == pytest.approx(published, abs=1e-9)


# -- fleets -----------------------------------------------------------------------------------------------------------


def test_the_study_of_routers_is_what_runs() -> None:
    """One of its points, now, and every point that the script names once."""
    runs = facts("routers")["runs"]
    known = {routers.Point(*(run[name] for name in routers.Point._fields)): run for run in runs}
    assert list(known) == routers.points()
    point = routers.Point("llmd", routers.NEAR, 0.95, 0)
    assert routers.served(point)._asdict() == {name: known[point][name] for name in routers.Served._fields}


def test_short_lived_prefixes_are_used_ten_times_within_their_lives() -> None:
    """Of each prefix ten requests, none more than 20 s after another, seven of its eight blocks shared."""
    lines = [json.loads(line) for line in routers.short_lived(40.0, 1).splitlines()]
    uses: dict[tuple[int, ...], list[float]] = {}
    for line in lines:
        assert line["input_length"] == 512 * len(line["hash_ids"]) == routers.PROMPT
        uses.setdefault(tuple(line["hash_ids"][:7]), []).append(line["timestamp"] / 1e3)
    assert {len(times) for times in uses.values()} == {routers.USES}
    assert max(max(times) - min(times) for times in uses.values()) <= routers.LIFE_S
    assert len({line["hash_ids"][7] for line in lines}) == len(lines)


def test_the_study_of_layouts_is_what_runs() -> None:
    """The first rung of a layout with one seed, now; a rung's score is that of its 99th percentile."""
    data(f"{layouts.TABLES['path']}/system.yaml")
    model, gpus = "llama-3.1-70b", 8
    (known,) = (
        each for each in facts("replicas_or_tp")["layouts"] if (each["model"], each["tensor_parallel"]) == (model, gpus)
    )
    result: Any = cbsim.run(layouts.scenario(model, gpus, layouts.START[model], 0))
    rung = layouts.Rung(layouts.START[model], [layouts.latencies(result.requests)], 1.0)
    scores = [rung.score(bound_s) for bound_s in layouts.bounds_of(model)]
    assert scores == pytest.approx([of[0] for of in known["rungs"][0]["scores"]], rel=1e-9)
    ttft, tpot = rung.latencies[0]
    met = (ttft <= scores[0] * layouts.TTFT_S) & (tpot <= scores[0] * layouts.STRICT[model])
    assert met.mean() >= layouts.SHARE > (met.sum() - 1) / len(met)


@pytest.mark.parametrize("prefills", [0, 2])
def test_the_study_of_pools_apart_is_what_runs(prefills: int) -> None:
    """The first rung of replicas, and of servers apart, with one seed, now; prefills that were handed over are no
    requests.
    """
    data(f"{layouts.TABLES['path']}/system.yaml")
    arm = apart.Arm("8,192 / 256", chunk=0 if prefills else 2048, prefills=prefills)
    (known,) = (each for each in facts("apart_pays")["arms"] if {**each, "rungs": 0} == {**arm._asdict(), "rungs": 0})
    rate_s = apart.LOADS[arm.load].start
    result = apart.ran(apart.fields(arm, rate_s), 0)
    rung = apart.Rung(rate_s, [apart.latencies(result.requests)])
    assert rung.score(apart.TTFT_S, apart.LINK_TPOT_S) == pytest.approx(known["rungs"][0][1], rel=1e-9)
    ttft, tpot = rung.latencies[0]
    assert len(ttft) == len(tpot) == round(0.4 * result.summary["requests"]) and (ttft > 0).all() and (tpot > 0).all()


# -- speculation ------------------------------------------------------------------------------------------------------


def test_the_study_of_speculation_is_what_runs() -> None:
    """Steps of one model, card and context now, and one whole run, which its steps predict within 3 %."""
    published = facts("speculation_pays")
    where = ("llama-3.1-70b", "h100-sxm", 1024)
    for row in published["steps"]:
        if (row["model"], row["card"], row["context"]) == where and row["batch"] <= 64:
            now = pays.slower(*where, row["loop"], row["drafts"], row["batch"])
            assert now == pytest.approx(row["slower"], rel=1e-9)
    for run in published["runs"]:
        assert run["run"] == pytest.approx(run["steps"], rel=0.03)
    (known,) = (each["run"] for each in published["runs"] if list(each.values())[:3] == ["llama-3.1-8b", "async", 32])
    now = pays.ran("llama-3.1-8b", "h100-sxm", "async", 32, 0) / pays.ran("llama-3.1-8b", "h100-sxm", "async", 32, 3)
    assert now == pytest.approx(known, rel=1e-9)


def test_when_speculation_pays() -> None:
    """What is said of it: fewer drafts for larger batches, break-evens that rise with acceptance and fall with drafts,
    longer contexts that gain longer, and a synchronous loop that gains more."""
    at = "llama-3.1-70b", "h100-sxm"
    chosen = [pays.best(*at, 1024, "async", 0.7, batch)[1] for batch in pays.BATCHES]
    assert chosen == sorted(chosen, reverse=True) and chosen[0] == 7 and chosen[-1] == 1
    by_rate = [pays.pays_up_to(*at, 1024, "async", 3, rate) or pays.MOST for rate in pays.RATES]
    assert by_rate == sorted(by_rate) and by_rate[0] == 133
    by_drafts = [pays.pays_up_to(*at, 1024, "async", k, 0.5) or pays.MOST for k in pays.DRAFTS]
    assert by_drafts == sorted(by_drafts, reverse=True) and by_drafts[-1] == 58
    assert pays.pays_up_to(*at, 8192, "async", 7, 0.5) is None
    ups = [pays.speed_up("llama-3.1-8b", "h100-sxm", 1024, loop, 3, 0.7, 1) for loop in pays.LOOPS]
    assert ups[0] > ups[1] > 2


def test_published_speculation_is_predicted_as_said() -> None:
    """Speed-ups of the card within 15 %, all in the right direction; two or three drafts best up to 100 users; of the
    server that cannot be built, what is off is said. One point of it now."""
    made = facts("speculation")
    for point in made["card"]:
        theirs, ours = (point[of]["eagle"] / point[of]["none"] for of in ("published", "predicted"))
        assert theirs > 1 and ours == pytest.approx(theirs, rel=0.15)
    gains = {(each["users"], each["largest_graph"]): each["gains"] for each in made["gains"]}
    for users in (25, 50, 100):
        assert max(gains[users, 512]) - max(gains[users, 512][2:4]) < 0.005
    blocks = {(each["users"], each["drafts"]): each for each in made["blocks"]}
    alone = [
        abs(each["predicted"] / each["published"] - 1) for (users, k), each in blocks.items() if users > 1 and not k
    ]
    assert max(alone) < 0.11
    some = [each["predicted"] / each["published"] - 1 for (users, k), each in blocks.items() if 1 < users <= 64 and k]
    assert min(some) > 0 and max(some) < 0.2
    assert max(abs(each["drawn"] - each["published"]) for each in made["lengths"]) < 0.1
    lengths = {(each["curve"], each["drafts"]): each["drawn"] for each in made["lengths"]}
    data("public_measured/speculation/golden_acceptance.csv")
    assert validated.drawn_length("qwen3.5_mtp/on", 3) == lengths["qwen3.5_mtp/on", 3]
