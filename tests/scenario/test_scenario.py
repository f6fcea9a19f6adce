"""Scenario files: defaults, overrides, round trips, errors that a user can act on, and calibrated terms."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.calls import ROOT

from cbsim.errors import ScenarioError
from cbsim.scenario import catalog, documents, scenario, terms
from cbsim.scenario.costs import sealed
from cbsim.scenario.demand import Slo
from cbsim.scenario.scenario import Scenario
from cbsim.schedulers.registry import OURS
from cbsim.schedulers.transformers.settings import TransformersOptions
from cbsim.schedulers.vllm.settings import VllmOptions

SMALL = """\
question: Does it load?
model: llama-3.1-8b
hardware: h100-sxm
workload:
  kind: synthetic
  requests: 4
  prompt_tokens: 100
  output_tokens: {uniform: {low: 1, high: 9}}
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def reload(value: Scenario, folder: Path) -> Scenario:
    path = folder / "again.yaml"
    path.write_text(scenario.dump(value))
    return scenario.load(path)


def refused(path: Path | str, *overrides: str) -> str:
    """The error's text, after checking that it has none of the libraries' own words."""
    with pytest.raises(ScenarioError) as caught:
        scenario.load(path, overrides)
    message = str(caught.value)
    assert not re.search(r"pydantic|Traceback|https?:|input_value|<[A-Z]", message), message
    return message


def test_a_model_is_read_again_once_its_file_is_written_anew(small: Path, tmp_path: Path) -> None:
    """Points of a sweep share what was read; a user who edits the file between two loads gets the new one."""
    mine = tmp_path / "mine.yaml"
    text = (catalog.SCENARIOS / "models" / "llama-3.1-8b.yaml").read_text()
    mine.write_text(text)
    first = scenario.load(small, [f"model={mine}"]).model
    assert scenario.load(small, [f"model={mine}"]).model is first
    mine.write_text(f"{text}weights_dtype: fp8\n")
    assert scenario.load(small, [f"model={mine}"]).model != first
    before, other = mine.stat(), tmp_path / "other.yaml"
    other.write_text(f"{text}weights_dtype: int4\n"[:-1])
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert other.stat().st_size == before.st_size
    other.replace(mine)
    assert scenario.load(small, [f"model={mine}"]).model.weights_dtype == "int4", "another file of that size and time"


def test_changes_hold_any_character(small: Path) -> None:
    """JSON writes those beyond the first 65,536 as two, which YAML knows not."""
    assert scenario.scenario_of(small, {"question": "Is it 😀?"}).question == "Is it 😀?"


def test_what_one_load_changes_in_an_override_no_other_load_sees(small: Path) -> None:
    """The value of an override is parsed once, whoever has it; a second override of a part of it stays in its load."""
    sizes = "loop.cuda_graphs.vllm_capture_sizes"
    assert scenario.load(small, [f"{sizes}=[1, 2, 4, 8]", f"{sizes}.2=3"]).loop.cuda_graphs.vllm_capture_sizes[2] == 3
    assert scenario.load(small, [f"{sizes}=[1, 2, 4, 8]"]).loop.cuda_graphs.vllm_capture_sizes == (1, 2, 4, 8)


# -- what a file means ------------------------------------------------------------------------------------------------


def test_defaults(small: Path) -> None:
    """A file needs question, model, hardware and workload; the rest is vLLM's server defaults and both loops."""
    s = scenario.load(small)
    assert (s.name, s.seed, s.block_size, s.graph_padding) == ("small", 0, 16, "vllm")
    assert scenario.loops(s) == ("sync", "async")
    options = s.options("async")
    assert isinstance(options, VllmOptions)
    assert (options.max_num_seqs, options.max_num_batched_tokens, options.version) == (1024, 8192, "0.33")
    assert options.max_model_len == 131_072
    capped = scenario.load(small, ["kv_cache.num_blocks=101"]).options("async")
    assert capped.max_model_len == 1600, "no longer than the cache, whose null block holds no token"


@pytest.mark.parametrize(("name", "margin"), [("transformers_fifo", 0.15), ("transformers_prefill_first", 0.0)])
def test_transformers_defaults_depend_on_the_scheduler(small: Path, name: str, margin: float) -> None:
    s = scenario.load(small, [f"scheduler.name={name}"])
    options = s.options("async")
    assert isinstance(options, TransformersOptions)
    assert (options.block_size, options.safety_margin, options.max_batch_tokens) == (256, margin, 8192)
    assert s.graph_padding == "transformers" and options.version == "5.17"


def test_transformers_523_defaults(small: Path) -> None:
    """8,192 tokens a step whatever the blocks, which are those of whole sectors."""
    s = scenario.load(small, ["scheduler={name: transformers_fifo, version: 5.23}", "kv_cache.num_blocks=100"])
    options = s.options("async")
    assert isinstance(options, TransformersOptions)
    assert (options.version, options.num_blocks, options.blocks_per_sector) == ("5.23", 100, 1)
    assert (options.max_batch_tokens, options.safety_margin) == (8192, 0.15)


def test_blocks_of_odd_sizes_share_sectors(small: Path) -> None:
    """A token of KV has 2 x layers x heads x values x 2 bytes = 40, a block of five 200: lcm(200, 128) = 3,200 bytes
    are 16 blocks. So 100 blocks become 112, and the host's 100 blocks 96."""
    sizes = "layers: 1, hidden: 64, heads: 4, kv_heads: 1, head_dim: 10, intermediate: 96, vocab: 199"
    shape = f"model={{name: odd, max_position: 4096, {sizes}}}"
    host = f"cpu_offload_gib: {100 * 200 / (1 << 30):.9f}"
    rules = f"scheduler={{name: transformers_fifo, version: 5.23, {host}}}"
    s = scenario.load(small, [shape, rules, "kv_cache={block_size: 5, num_blocks: 100}"])
    options = s.options("async")
    assert isinstance(options, TransformersOptions)
    assert (options.blocks_per_sector, options.num_blocks, options.host_blocks) == (16, 112, 96)


def test_static_defaults(small: Path) -> None:
    s = scenario.load(small, ["scheduler.name=static"])
    assert s.graph_padding == "none" and s.block_size == 16
    options = s.options("sync")
    assert not isinstance(options, VllmOptions | TransformersOptions) and options.batch_size == 32


def test_yaml_is_1_2(small: Path) -> None:
    """1e6 is a number (YAML 1.1 reads text), and `no` is text, not false. So is 1_0, which ruamel.yaml reads as 10."""
    assert scenario.load(small, ["workload.requests=1e3"]).workload.requests == 1000  # type: ignore[union-attr]
    assert "expected true or false" in refused(small, "loop.streams=no")
    assert "got '1_0', expected a whole number" in refused(small, "seed=1_0")
    assert "got '1_0.5', expected a number" in refused(small, "slo.ttft_s=1_0.5")
    assert scenario.load(small, ["name=1_0"]).name == "1_0"


def test_slo_preset_fills_what_is_not_given(small: Path) -> None:
    slo = scenario.load(small, ["slo={preset: llama3.1-8b-interactive, tpot_s: 0.1}"]).slo
    assert (slo.ttft_s, slo.tpot_s, slo.e2e_s) == (0.5, 0.1, None)


def test_data_beside_the_scenario_is_found_from_anywhere(small: Path, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("id,arrival_s,prefill_tokens,decode_tokens\na,0,1,1\n")
    s = scenario.load(small, ["workload={kind: csv, path: t.csv}"])
    assert s.workload.path == str(tmp_path / "t.csv")  # type: ignore[union-attr]


def test_fitted_coefficients_may_lie_in_the_current_folder(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever names a file on the command line means the one that he sees; one beside the scenario comes first."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (elsewhere / "c.yaml").write_text("base_s: 0.01\n")
    assert scenario.load(small, ["cost={kind: fitted, path: c.yaml}"]).cost.base_s == 0.01  # type: ignore[union-attr]
    (tmp_path / "c.yaml").write_text("base_s: 0.02\n")
    assert scenario.load(small, ["cost={kind: fitted, path: c.yaml}"]).cost.base_s == 0.02  # type: ignore[union-attr]


def test_fitted_coefficients_are_read_and_written_out(small: Path, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("base_s: 0.01\ncpu: {schedule: {base_s: 0.002}}\n")
    s = scenario.load(small, ["cost={kind: fitted, path: c.yaml, per_decode_row_s: 1e-4}"])
    assert (s.cost.base_s, s.cost.per_decode_row_s, s.cost.path) == (0.01, 1e-4, None)  # type: ignore[union-attr]
    assert reload(s, tmp_path / "..") == s
    (tmp_path / "c.yaml").write_text("base: 0.01\n")
    assert "c.yaml:1: base: unknown field; did you mean base_s?" in refused(small, "cost={kind: fitted, path: c.yaml}")


@pytest.mark.parametrize(
    ("terms", "free"),
    [
        ("", "steps"),
        ("base_s: 0, query_tokens: [{tokens: 1, s: 0}]", "steps"),
        ("gap_s: 0.1, h2d_s: 0.1, cpu: {schedule: {base_s: 1}}", "steps"),
        ("per_decode_row_s: 1e-4", "prefills"),
        ("per_chunk_s: 1e-4", "decodes"),
        ("base_s: 1e-3", None),
        ("query_tokens: [{tokens: 1, s: 1e-3}]", None),
        ("per_prefill_token_s: 1e-6, per_context_token_s: 1e-6", None),
    ],
)
def test_no_step_is_free(small: Path, terms: str, free: str | None) -> None:
    """Terms are 0 where none is given: without those that every step needs a GPU would be infinitely fast."""
    override = f"cost={{kind: fitted, {terms}}}"
    if free is None:
        assert scenario.load(small, [override]).cost.kind == "fitted"
    else:
        assert f"cost: {free} take no time: base_s or query_tokens is required" in refused(small, override)


def test_a_coefficient_file_that_was_cut_short_is_refused(small: Path, tmp_path: Path) -> None:
    """The first lines of a YAML file are one, too, and absent terms are 0: a digest tells. None is needed."""
    whole = "# By hand.\n" + sealed("query_tokens:\n- tokens: 1\n  s: 0.01\n- tokens: 8\n  s: 0.04\nper_chunk_s: 0.1\n")
    file, override = tmp_path / "c.yaml", "cost={kind: fitted, path: c.yaml}"
    file.write_text(whole)
    assert scenario.load(small, [override]).cost.per_chunk_s == 0.1  # type: ignore[union-attr]
    lines = whole.splitlines(keepends=True)
    for broken in ("".join(lines[:-1]), "".join(lines[:4]), whole[:-2], whole.replace("0.04", "0.05")):
        file.write_text(broken)
        assert "c.yaml: was cut short or changed after it was calibrated: restore it, or" in refused(small, override)
    file.write_text("".join([lines[0], *lines[2:]]).replace("0.04", "0.05"))
    assert scenario.load(small, [override]).cost.query_tokens[1].s == 0.05  # type: ignore[union-attr]


@pytest.mark.parametrize("name", catalog.names())
def test_reference_scenarios_load_and_round_trip(name: str, tmp_path: Path) -> None:
    path = catalog.scenario(name)
    assert path.read_text().startswith("# yaml-language-server: $schema=../schemas/scenario.schema.json\n")
    s = scenario.load(name)
    assert s.name == name and s.question.endswith("?")
    assert reload(s, tmp_path) == s
    assert scenario.dump(s) == documents.write(s.model_dump(mode="json"))  # in sections, each written once


@pytest.mark.parametrize("scheduler", sorted({*OURS} - {"beam", "sglang"}))
def test_landscape_takes_every_scheduler(scheduler: str) -> None:
    assert scenario.load("landscape", [f"scheduler.name={scheduler}"]).scheduler.name == scheduler


# -- round trip -------------------------------------------------------------------------------------------------------

lengths = st.one_of(
    st.integers(1, 10**6),
    st.builds(
        lambda a, b: {"uniform": {"low": min(a, b), "high": max(a, b)}}, st.integers(1, 999), st.integers(1, 999)
    ),
    st.builds(lambda m, s: {"lognormal": {"mean": m, "sigma": s}}, st.floats(1, 1e5), st.floats(0, 3)),
    st.lists(st.integers(1, 9999), min_size=1, max_size=5).map(lambda v: {"empirical": {"values": v}}),
)
rates = st.floats(1e-6, 1e6)
arrivals = st.one_of(
    st.just({"kind": "at_once"}),
    st.builds(lambda k, r: {"kind": k, "rate_per_s": r}, st.sampled_from(["constant", "poisson"]), rates),
    st.builds(lambda r, b: {"kind": "gamma", "rate_per_s": r, "burstiness": b}, rates, st.floats(1e-3, 1e6)),
    st.builds(lambda u, t: {"kind": "closed_loop", "users": u, "think_s": t}, st.integers(1, 99), st.floats(0, 1e9)),
)
seconds = st.floats(0, 1e3)
costs = st.one_of(
    st.builds(lambda s, t: {"kind": "constant", "step_s": s, "per_token_s": t}, seconds, seconds),
    st.builds(lambda s: {"kind": "roofline", "step_overhead_s": s, "cpu": {"update": {"per_block_s": s}}}, seconds),
    st.builds(lambda s: {"kind": "fitted", "base_s": s}, st.floats(1e-9, 1e3)),
)
STAGED = {"name": "sarathi", "enable_dynamic_chunking_schedule": True, "chunk_schedule_max_tokens": 4096}
CHUNKS = ("low_chunk_size", "high_chunk_size", "chunk_schedule_stages")
schedulers = st.one_of(
    st.builds(lambda b: {"name": "static", "batch_size": b}, st.integers(1, 999)),
    st.builds(lambda r: {"name": "contiguous", "reserve": r}, st.sampled_from(["max_tokens", "exact"])),
    st.builds(lambda n, s: {"name": n, "max_num_seqs": s}, st.sampled_from(["orca", "vllm_v0"]), st.integers(1, 99)),
    st.builds(
        lambda low, more, stages: STAGED | dict(zip(CHUNKS, (low, low + more, stages), strict=True)),
        *(st.integers(1, 999), st.integers(0, 999), st.integers(1, 9)),
    ),
    st.builds(
        lambda p, r: {"name": "trtllm", "capacity_scheduler_policy": p, "batch_wait_max_tokens_ratio": r},
        st.sampled_from(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"]),
        st.floats(0, 1),
    ),
    st.builds(lambda m: {"name": "transformers_fifo", "safety_margin": m}, st.none() | st.floats(0, 0.99)),
    st.builds(
        lambda p, w: {"name": "vllm", "policy": p, "watermark": w},
        st.sampled_from(["fcfs", "priority"]),
        rates.map(lambda r: r / 1e7),
    ),
)
questions = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(lengths, lengths, arrivals, costs, schedulers, questions, st.integers(0, 2**63))
def test_dump_and_load_are_inverse(
    tmp_path_factory: Any, prompt: Any, output: Any, arrival: Any, cost: Any, scheduler: Any, question: str, seed: int
) -> None:
    """A run directory's resolved scenario is the scenario: what a file says, dump writes a file that says it too."""
    lengths = {"prompt_tokens": prompt, "output_tokens": output}
    workload = {"kind": "synthetic", "requests": 3, "arrivals": arrival, **lengths}
    values = {"question": question, "seed": seed, "model": "qwen3-8b", "hardware": "h200-sxm", "workload": workload}
    s = Scenario.model_validate(values | {"cost": cost, "scheduler": scheduler})
    assert reload(s, tmp_path_factory.getbasetemp()) == s


# -- overrides --------------------------------------------------------------------------------------------------------


def scalars(values: Any, path: tuple[str, ...] = ()) -> list[tuple[str, Any]]:
    """(dotted path, value) of everything in a dump that is not a mapping or a list of many."""
    if isinstance(values, dict):
        return [leaf for key, value in values.items() for leaf in scalars(value, (*path, key))]
    if isinstance(values, list):
        return scalars(values[0], (*path, "0")) if values else []
    return [(".".join(path), values)]


def at(values: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        values = values[int(part)] if isinstance(values, list) else values[part]
    return values


@pytest.mark.parametrize(
    ("scheduler", "cost"),
    [
        ("static", "cost={kind: constant, step_s: 1}"),
        ("contiguous", "cost={kind: constant, step_s: 1}"),
        ("vllm_v0", "cost={kind: constant, step_s: 1}"),
        ("transformers_fifo", "cost.kind=roofline"),
        ("vllm", "cost={kind: fitted, base_s: 0.01}"),
    ],
)
def test_every_scalar_field_can_be_overridden(small: Path, scheduler: str, cost: str) -> None:
    """--set reaches every field of a resolved scenario, union members and list entries too, and wins over the file."""
    base = [f"scheduler.name={scheduler}", cost]
    for dotted, value in scalars(scenario.load(small, base).model_dump(mode="json")):
        s = scenario.load(small, [*base, f"{dotted}={json.dumps(value)}"])
        assert at(s.model_dump(mode="json"), dotted) == value
    numeric = ["seed", "model.layers", "workload.output_tokens.uniform.high", "loop.cuda_graphs.capture_s"]
    for dotted in numeric:
        assert at(scenario.load(small, [*base, f"{dotted}=40"]).model_dump(mode="json"), dotted) == 40


def test_query_heads_share_kv_heads_evenly(small: Path) -> None:
    with pytest.raises(ScenarioError, match=r"model\.kv_heads: got 3, must divide heads \(\d+\)"):
        scenario.load(small, ["model.kv_heads=3"])


def test_override_of_a_kind_drops_the_fields_of_the_other(small: Path) -> None:
    """landscape.yaml gives vLLM options; `--set scheduler.name=static` has to work on it all the same."""
    small.write_text(SMALL + "scheduler: {name: vllm, max_num_seqs: 7}\n")
    assert scenario.load(small, ["scheduler.name=static", "scheduler.batch_size=5"]).scheduler.batch_size == 5  # type: ignore[union-attr]
    assert "max_num_seqs: unknown field" in refused(small, "scheduler.max_num_seqs=3", "scheduler.name=static")


def test_override_of_a_kind_takes_the_new_kinds_defaults(small: Path) -> None:
    """A constant cost has no CPU time by default, though roofline, which the file would have, does."""
    s = scenario.load(small, ["cost.kind=constant", "cost.step_s=1", "cost.cpu.update.per_token_s=1"])
    assert s.cost.cpu.schedule.base_s == 0


def test_what_an_override_made_null_begins_from_nothing(small: Path) -> None:
    """... whatever the file gives; an override before it is undone, too. The order counts, also where one of them
    chooses a kind, which comes before fields of that kind only.
    """
    small.write_text(SMALL + "slo: {ttft_s: 2}\nspeculation: {method: ngram, k: 5, acceptance: {rate: 0.5}}\n")
    assert scenario.load(small, ["slo.e2e_s=3", "slo=null", "slo.tpot_s=1"]).slo == Slo(tpot_s=1.0)
    assert scenario.load(small, ["speculation.k=3", "speculation=null"]).speculation is None
    message = refused(small, "speculation=null", "speculation.k=3")
    assert "--set speculation=null: speculation.method: is required" in message
    kinds = ["cost.step_s=1", "cost={kind: fitted, base_s: 1}", "cost.kind=constant", "cost.step_s=2"]
    assert scenario.load(small, kinds).cost.step_s == 2  # type: ignore[union-attr]
    assert scenario.load(small, ["scheduler.name=static", "scheduler={name: vllm}"]).scheduler.name == "vllm"
    assert (
        scenario.load(small, ["scheduler={name: vllm}", "speculation=null", "scheduler.name=static"]).scheduler.name
        == "static"
    )


def test_by_rows_names_the_number_that_is_wrong(small: Path) -> None:
    small.write_text(SMALL + "speculation: {method: ngram, k: 3, acceptance: {rate: 0.5}}\n")
    assert "speculation.by_rows.0.1: got 4 drafts, must be 0 to k (3)" in refused(small, "speculation.by_rows=[[8, 4]]")
    assert "speculation.by_rows.0.0: got 0 rows, must be >= 1" in refused(small, "speculation.by_rows=[[0, 2]]")


LINEAR = (
    "model.attention=[linear, full]",
    "model.linear={rule: gated_delta, key_heads: 3, value_heads: 6, key_dim: 64, value_dim: 64}",
    "cost={kind: constant, step_s: 0.01}",
)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("scheduler={name: sglang}", "scheduler.disable_radix_cache: got false, must be true with linear layers"),
        ("scheduler={name: trtllm}", "model.attention: .* must be full or sliding with scheduler trtllm$"),
        ("scheduler={name: transformers_fifo}", "must be full or sliding with scheduler transformers_fifo$"),
        ("scheduler={name: beam}", "must be full with scheduler beam$"),
        ("cost={kind: fitted, base_s: 1}", "model.attention: .* must be full with cost.kind fitted"),
        (
            "model.attention=[linear]",
            "model.attention: got \\['linear'\\], must have linear and other layers with model.linear",
        ),
        ("model.linear=null", "model.attention: got .*, must not have linear layers without model.linear"),
        ("cost={kind: roofline, tensor_parallel: 4}", "cost.tensor_parallel: got 4, must divide linear.key_heads"),
        ("model.linear.key_heads=4", "model.linear.key_heads: got 4, must divide value_heads \\(6\\)"),
        ("model.linear.rule=mamba", "model.linear.rule: got 'mamba', expected one of gated_delta, kda, mamba2"),
    ],
)
def test_who_serves_layers_with_a_state(small: Path, override: str, words: str) -> None:
    """vllm, and sglang without its tree; others refuse them in one line, as do cost models without time for
    them, and GPUs that cannot share their heads."""
    for served in ("scheduler={name: vllm}", "scheduler={name: sglang, disable_radix_cache: true}"):
        assert scenario.load(small, [*LINEAR, served]).options("async").num_blocks > 2
    message = refused(small, *LINEAR, override)
    assert re.search(words, message), message
    assert "\n" not in message


def test_override_of_a_list_entry(small: Path) -> None:
    sizes = "loop.cuda_graphs.vllm_capture_sizes"
    s = scenario.load(small, [f"{sizes}=[1, 2, 4, 8]", f"{sizes}.2=3"])
    assert s.loop.cuda_graphs.vllm_capture_sizes == (1, 2, 3, 8)
    assert "expected a position from 0 to 3" in refused(small, f"{sizes}=[1, 2, 4, 8]", f"{sizes}.99=3")


# -- errors -----------------------------------------------------------------------------------------------------------


FIFO = "scheduler: {name: transformers_fifo}"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("kv_cache: {blok_size: 16}", ":9: kv_cache.blok_size: unknown field; did you mean block_size?"),
        ("kv_cache: {block_size: 0}", ":9: kv_cache.block_size: got 0, must be >= 1"),
        ("kv_cache: {memory_fraction: .nan}", ":9: kv_cache.memory_fraction: got nan, expected a finite number"),
        ("kv_cache: 16", ":9: kv_cache: got 16, expected fields"),
        ("loop: {mode: asnc}", "got 'asnc', expected one of sync, async, both; did you mean async?"),
        ("seed: -1", ":9: seed: got -1, must be >= 0"),
        ("seed: true", ":9: seed: got true, expected a whole number"),
        ("scheduler: {name: vlm}", ":9: scheduler.name: got 'vlm', expected one of beam, contiguous, dynamic_padded"),
        ("scheduler: {max_num_seqs: 3}", ":9: scheduler.name: is required: one of beam, contiguous, dynamic_padded"),
        ("scheduler: vllm", "scheduler: got 'vllm', expected fields, of which `name` is one of beam, contiguous"),
        ("scheduler: {name: vllm, max_num_seqs: 9000}", "got 8192, must be >= max_num_seqs (9000)"),
        ("scheduler: {name: vllm, version: 0.19, watermark: 0.1}", "scheduler.watermark: vLLM 0.19 has no such option"),
        ("scheduler: {name: vllm, version: 0.2}", "scheduler.version: got '0.2', expected one of 0.33, 0.19"),
        ("scheduler: {name: vllm, enable_chunked_prefill: false, max_num_batched_tokens: 9000}", ">= max_model_len (1"),
        ("scheduler: {name: vllm, max_model_len: 9, long_prefill_token_threshold: 10}", "must be <= max_model_len (9)"),
        ("scheduler: {name: transformers_fifo, version: 5.2}", "got '5.2', expected one of 5.17, 5.23"),
        (f"{FIFO}\nkv_cache: {{num_blocks: 9e5}}", ":10: kv_cache.num_blocks: got 900000, wh"),
        (f"{FIFO}\nkv_cache: {{block_size: 2}}", "block_size: got 2, must be >= 4 for trans"),
        ("cost: {kind: constant}", ":9: cost.step_s: is required"),
        ("slo: {ttft_s: 0}", "slo.ttft_s: got 0, must be > 0"),
        ("slo: {preset: llama3.1-8b}", "slo.preset: got 'llama3.1-8b', expected one of llama3.1-8b-server"),
        ("question: again", "not valid YAML: found duplicate key"),
        ("nme: x", ":9: nme: unknown field; did you mean name?"),
        ("name: 'a b'", ":9: name: got 'a b', must match"),
    ],
)
def test_errors_say_where_what_and_what_would_do(small: Path, line: str, expected: str) -> None:
    small.write_text(SMALL + line + "\n")
    message = refused(small)
    assert expected in message
    assert message.startswith(str(small)) and message.count("\n") <= 1


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("kv_cach.block_size=3", "--set kv_cach.block_size=3: kv_cach: unknown field; did you mean kv_cache?"),
        ("hardware=A100", "unknown hardware 'A100'; did you mean a100-40gb or a100-80gb? (known: "),
        ("hardware=H", "unknown hardware 'H'; did you mean h100-sxm, h20 or h200-sxm?"),
        ("model=Llama 3.1", "; did you mean llama-3.1-405b, llama-3.1-70b or llama-3.1-8b?"),
        ("workload.arrivals={kind: poisson, rate: 5}", "rate: unknown field; did you mean rate_per_s?"),
        ("scheduler.max_num=5", "or max_num_batched_tokens"),
        ("scheduler.seqs=5", "seqs: unknown field; did you mean max_num_seqs"),
        ("workload.prompt_tokens={unifrm: 3}", "one of uniform, lognormal, empirical; did you mean uniform?"),
        ("workload.prompt_tokens.uniform={low: 3, high: 2}", "100 has no field uniform"),
        ("workload.output_tokens.uniform.high=0", "workload.output_tokens.uniform.high: got 0, must be >= 1"),
        ("workload.arrivals.kind=poison", "workload.arrivals.kind: got 'poison', expected one of"),
        ("model=llama-3.1-8", "model: unknown model 'llama-3.1-8'; did you mean llama-3.1-8b"),
        ("seed.x=1", "--set seed.x=1: seed"),
        ("workload.arrivals={kind: gamma, rate_per_s: 1, burstiness: 1e-30}", "got 1e-30, must be >= 0.001"),
        ("workload.arrivals={kind: gamma, rate_per_s: 1, burstiness: 1e7}", "got 10000000.0, must be <= 1000000.0"),
        ("hardware.memory_bandwidth_bytes_s=1e-300", "hardware.memory_bandwidth_bytes_s: got 1e-300, must be >= 1"),
        ("hardware.flops.float16=0.5", "hardware.flops.float16: got 0.5, must be >= 1"),
        ("workload.arrivals={kind: poisson, rate_per_s: 1e-300}", "rate_per_s: got 1e-300, must be >= 1e-09"),
        ("workload.priorities=[-1e16]", "workload.priorities.0: got -1e+16, must be >= -1,000,000,000,000,000"),
        ('model.name="a\\e[31m"', "model.name: got 'a\\x1b[31m', expected one line without control characters"),
        ('hardware.name="a\\nb"', "hardware.name: got 'a\\nb', expected one line without control characters"),
        ('question="a\\e[31m"', "question: got 'a\\x1b[31m', expected one line without control characters"),
        ("hardware.memory_bytes=80", "hardware.memory_bytes: got 80, must be >= 100,000,000 (bytes)"),
    ],
)
def test_errors_of_overrides_name_the_override(small: Path, override: str, expected: str) -> None:
    """Memory in GB is refused also where a given num_blocks needs none."""
    assert expected in refused(small, override, "kv_cache.num_blocks=100")


# -- schema -----------------------------------------------------------------------------------------------------------


def test_every_field_has_a_description() -> None:
    schema = json.loads((ROOT / "schemas/scenario.schema.json").read_text())  # what `cbsim schema` writes
    for name, part in {"Scenario": schema, **schema["$defs"]}.items():
        assert part.get("description"), name
        for field, values in part.get("properties", {}).items():
            assert values.get("description"), f"{name}.{field}"


# -- calibrated terms --------------------------------------------------------------------------------------------------

VALUES = {"step_s": 1.0, "reduce_s@2": 2.0, "reduce_s@8": 8.0, "layer_s@0.16.0": 3.0, "large_products@h100_sxm": 4.0}


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        ((2, "h100_sxm", "0.16.0"), {"step_s": 1.0, "reduce_s": 2.0, "layer_s": 3.0, "large_products": 4.0}),
        ((8, "h100_sxm", "0.18.0"), {"step_s": 1.0, "reduce_s": 8.0, "layer_s": 3.0, "large_products": 4.0}),
        ((16, "a100_sxm", ""), {"step_s": 1.0, "reduce_s": 8.0, "layer_s": 3.0, "large_products": 4.0}),
    ],
)
def test_a_term_holds_for_what_it_names_else_the_last_does(
    server: tuple[int, str, str], expected: dict[str, float]
) -> None:
    assert terms.resolve(VALUES, *server) == expected


@pytest.mark.parametrize("name", catalog.names("terms"))
def test_the_projects_terms_are_whole(name: str) -> None:
    """Every curve has residuals, of no other users than the file says."""
    file = terms.load(name)
    assert all(curve.residuals for curve in file.curves.values())
    users = [each.users for curve in file.curves.values() for each in curve.residuals]
    assert (min(users), max(users)) == file.users


def cost(**fields: object) -> str:
    values = {"kind": "table", "path": "card", "engine": "vllm", **fields}
    return f"cost={{{', '.join(f'{name}: {value}' for name, value in values.items())}}}"


def test_terms_fill_what_is_not_given() -> None:
    file = terms.load("vllm-experts")
    made = scenario.load("rates", [cost(tensor_parallel=8, terms="vllm-experts", step_s=0.5)]).cost
    assert made.step_s == 0.5
    assert made.reduce_s == file.terms["reduce_s@8"].value
    assert made.calibrated.models == file.models
    again = scenario.load("rates", [f"cost={made.model_dump_json()}"]).cost
    assert again == made, "a resolved scenario is read as it is"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"terms": "unheard-of"}, r"cost\.terms: got 'unheard-of', expected one of .*vllm-experts"),
        ({"terms": "vllm-experts", "engine": "null"}, r"cost\.terms: needs engine"),
        ({"engine": "tgi"}, r"cost\.engine: got 'tgi'"),
    ],
)
def test_mistakes_name_the_field(change: dict[str, object], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        scenario.load("rates", [cost(**change)])
