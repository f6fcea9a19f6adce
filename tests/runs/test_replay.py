"""Replay: from a run directory alone the same plans follow, for every scheduler, loop and kind of workload; and what
was altered afterwards is noticed, as the first difference or as a clear refusal.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from support.recordings import GOLDEN, SESSIONS, WORKLOADS, by_turns, column, golden_run, recorded, replayed

import cbsim
from cbsim.cli.parser import main
from cbsim.record import directory
from cbsim.runs import reading, replan
from cbsim.runs.replan import rederive

pytestmark = pytest.mark.usefixtures("no_pictures")

SERVE = ("faster_transformer", "orca", "sarathi", "simple_chunking", "vllm_v0")
SCHEDULERS = (
    *("contiguous", "dynamic_padded", "static", "tgi", "transformers_fifo", "transformers_prefill_first"),
    *("trtllm", "vllm", *SERVE),
)
LOOPS = ("sync", "async")


@by_turns(WORKLOADS, SCHEDULERS, LOOPS)
def test_a_recorded_run_follows_from_its_record(kind: str, scheduler: str, loop: str, tmp_path: Path) -> None:
    """Every scheduler under every loop, with open and closed loops, sessions, shared prefixes, stop tokens, refusals
    and a cache too small for its requests: all plans hash to what was recorded, and there is no plan more.
    """
    path = recorded(tmp_path, kind, f"scheduler.name={scheduler}", f"loop.mode={loop}")
    run = reading.load(path)
    assert rederive(path) == (len(run.steps), len(run.steps), None)
    assert len(run.steps) > 20
    statuses = [row.status for row in run.requests]
    assert "length" in statuses
    if kind == "sessions":
        assert len(statuses) == len(SESSIONS)
        assert "refused" in statuses
    if kind == "tight" and scheduler == "vllm":
        assert run.summary["preemptions"] > 0
    if kind == "poisson":
        assert "stop" in statuses


def test_a_run_keeps_the_file_of_its_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace may be changed or deleted after a run, a copy of the run may be saved elsewhere: its plans and its
    occupancy follow from the directory. A file too large is not kept.
    """
    (trace := tmp_path / "lengths.csv").write_text("num_prefill_tokens,num_decode_tokens\n40,5\n30,9\n")
    lengths = {"empirical": {"path": str(trace), "column": "num_prefill_tokens"}}
    fields = {"kind": "synthetic", "requests": 5, "prompt_tokens": lengths, "output_tokens": 4}
    runs = []
    for workload in ({"kind": "lengths", "path": str(trace)}, fields):
        words = ["run", "tiny_cpu", "--set", f"workload={json.dumps(workload)}", "--set", "loop.mode=sync", "--quiet"]
        assert main([*words, "--out", str(tmp_path / workload["kind"])]) == 0
        runs += [*(tmp_path / workload["kind"]).iterdir()]
    loaded = cbsim.run("tiny_cpu", [f"workload={json.dumps(fields)}", "loop.mode=sync"]).save(tmp_path / "saved")
    for name, run in (("path", runs[0]), ("prompt_tokens.empirical.path", runs[1])):
        assert gzip.decompress((run / f"workload.{name}.gz").read_bytes()) == trace.read_bytes()
    for changed in ("num_prefill_tokens,num_decode_tokens\n1,1\n", None):
        trace.unlink() if changed is None else trace.write_text(changed)
        for number, run in enumerate([*runs, loaded, cbsim.read(runs[0]).save(tmp_path / f"copy {changed is None}")]):
            assert rederive(run).difference is None, number
            assert cbsim.read(run).occupancy
    monkeypatch.setattr(directory, "MOST_INPUT_BYTES", 10)
    trace.write_text("num_prefill_tokens,num_decode_tokens\n40,5\n")
    whole = cbsim.run("tiny_cpu", [f"workload={json.dumps({'kind': 'lengths', 'path': str(trace)})}", "loop.mode=sync"])
    assert not [*whole.save(tmp_path / "large").glob("workload*")]


GOLDENS = {
    "w11_cancel_fifo_bs16": "transformers_fifo",
    "x0096_cancel_prefill_first_async_noshare_bs32": "transformers_prefill_first",
    "x0104_tinycancel_fifo_sync_share_bs4": "transformers_fifo",
    **dict.fromkeys(("p004", "p011", "r036", "p012", "x008", "r105", "r088"), "vllm"),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("name", "scheduler"), GOLDENS.items())
def test_a_golden_workload_with_cancels(name: str, scheduler: str, loop: str, tmp_path: Path) -> None:
    """Requests given up while they wait and while they run, several in one poll in the order in which the policy was
    told, on a pool as small as recorded. A pass takes 10 ms, as the workload's step_s has it, so that cancels meet
    their requests; the workloads of vLLM say in microseconds when a client goes away.
    """
    packed = GOLDEN / scheduler.partition("_")[0] / "workloads" / f"{name}.json.gz"
    pool = json.loads(gzip.decompress(packed.read_bytes())).get("cb", {"block_size": 16, "num_blocks": 60})
    blocks = f"block_size: {pool['block_size']}, num_blocks: {pool['num_blocks']}"
    settings = f"scheduler: {{name: {scheduler}}}\nkv_cache: {{{blocks}}}\nloop: {{mode: {loop}}}\n"
    path = golden_run(tmp_path, packed, settings)
    run = reading.load(path)
    assert sum(row.status == "aborted" for row in run.requests) > 0
    assert rederive(path) == (len(run.steps), len(run.steps), None)


# -- what was altered -------------------------------------------------------------------------------------------------


def changed(table: pa.Table, name: str, row: int, value: Any) -> pa.Table:
    place, cells = table.column_names.index(name), table[name].to_pylist()
    cells[row] = value(cells[row]) if callable(value) else value
    return table.set_column(place, name, pa.array(cells, table[name].type))


def alter(file: Path, name: str, row: int, change: Callable[[Any], Any]) -> None:
    """Change one cell of a table."""
    pq.write_table(changed(pq.read_table(file), name, row, change), file)


def test_untouched(run: Path) -> None:
    """The copy itself is identical: what the tests below find is what they altered."""
    steps = len(reading.load(run).steps)
    assert replayed(run) == (0, f"{run}: {steps} of {steps} plans identical\n", "")


def test_a_run_without_a_plan(tmp_path: Path) -> None:
    """If every request was refused there is nothing to derive: that is said, not that none of none is identical."""
    run = cbsim.run("rates", {"loop.mode": "sync", "workload.requests": 5, "scheduler.max_model_len": 16})
    path = run.save(tmp_path / "run")
    assert replayed(path) == (0, f"{path}: there was no plan to compare\n", "")


@pytest.mark.parametrize("name", replan.COMPARED)
def test_an_altered_step(run: Path, name: str) -> None:
    """One number of step 17 altered: 17 plans are identical, and the difference names step, column and both values."""
    before = column(run / "steps.parquet", name)[17]
    alter(run / "steps.parquet", name, 17, lambda value: value + 1)
    status, out, err = replayed(run)
    steps = len(reading.load(run).steps)
    assert (status, err) == (1, "")
    assert out.startswith(
        f"{run}: 17 of {steps} plans identical, then step 17: {name} is {before}, recorded {before + 1}"
    )


def test_a_step_too_few_or_too_many(run: Path) -> None:
    """A complete run without its last step: it is planned, but was not recorded. One with a step more: it is not."""
    table = pq.read_table(run / "steps.parquet")
    last = table.slice(len(table) - 1)
    for altered, problem in (
        (table.slice(0, len(table) - 1), f"step {len(table) - 1} is planned, but was not recorded"),
        (pa.concat_tables([table, last]), f"only {len(table)} steps are planned"),
    ):
        pq.write_table(altered, run / "steps.parquet")
        status, out, _ = replayed(run)
        assert status == 1 and problem in out


DAMAGES: dict[str, tuple[Callable[[pa.Table], pa.Table | None], str]] = {
    "absent": (lambda rows: None, "got (), expected rows of"),
    "empty": (lambda rows: rows.slice(0, 0), "got (), expected rows of"),
    "dropped": (
        lambda rows: pa.concat_tables([rows.slice(0, 9), rows.slice(10)]),
        "expected rows of (request, drafts, proposed) up to",
    ),
    "doubled": (
        lambda rows: pa.concat_tables([rows.slice(0, 9), rows.slice(8)]),
        "expected rows of (request, drafts, proposed) up to",
    ),
    "reversed": (lambda rows: rows.take(list(range(len(rows)))[::-1]), "step: row 1: got "),
    "late": (lambda rows: changed(rows, "step", -1, 10**6), "got 1000000, expected steps in order, from 0 to "),
    "early": (lambda rows: changed(rows, "step", 0, -1), "step: row 0: got -1, expected steps in order, from 0 to "),
    "request": (lambda rows: changed(rows, "request", 5, 99), "99"),
    "accepted": (lambda rows: changed(rows, "accepted", -3, 4), ", 3, 4, "),
    "drafts": (lambda rows: changed(rows, "drafts", -3, 4), ", 4, "),
    "proposed": (lambda rows: changed(rows, "proposed", -3, 4), ", 4)"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_altered_drafts_are_refused(damage: str, tmp_path: Path) -> None:
    """The table of drafts has a row of each that samples, with no more drafts than planned: anything else is told."""
    drafts = "speculation={method: ngram, k: 3, acceptance: {rate: 0.5}}"
    run = recorded(tmp_path, "poisson", "scheduler.name=vllm", "loop.mode=async", drafts)
    assert replayed(run)[0] == 0
    change, words = DAMAGES[damage]
    altered = change(pq.read_table(run / "drafts.parquet"))
    (run / "drafts.parquet").unlink()
    if altered is not None:
        pq.write_table(altered, run / "drafts.parquet")
    status, out, err = replayed(run)
    assert (status, out) == (2, "")
    assert err.startswith(f"cbsim: {run / 'drafts.parquet'}: ") and words in err and err.count("\n") == 1


def dropped(rows: pa.Table, row: int) -> pa.Table:
    return pa.concat_tables([rows.slice(0, row), rows.slice(row + 1)])


def doubled(rows: pa.Table, row: int) -> pa.Table:
    return pa.concat_tables([rows.slice(0, row + 1), rows.slice(row)])


def later(*names: str, by: int = 10**7, row: int = 4) -> Callable[[pa.Table], pa.Table]:
    """Add a number to columns of a row."""

    def change(rows: pa.Table) -> pa.Table:
        for name in names:
            rows = changed(rows, name, row, lambda value: value + by)
        return rows

    return change


APART = (
    *("poisson", "scheduler.name=vllm", "loop.mode=sync", "workload.requests=6"),
    "fleet={pools: [{role: prefill}, {role: decode}], router: {name: random}, hand_off: {link: {bandwidth_gb_s: 8}}}",
)
OFFLOADED = ("poisson", "scheduler={name: vllm, kv_connector: simple_cpu, cpu_bytes_to_use: 1e8}", "loop.mode=sync")
PIPED = ("poisson", "scheduler.name=vllm", "loop.mode=async", "cost={kind: roofline, pipeline_parallel: 2}")
TWO_PIPED = (*PIPED, "fleet={pools: [{count: 2}], router: {name: round_robin}}")
OTHERS: dict[str, tuple[tuple[str, ...], str, Callable[[pa.Table], pa.Table | None], str]] = {
    "hand-offs absent": (APART, "hand_offs", lambda _: None, "hand_off.transfers is 6, that of hand_offs.parquet is 0"),
    "hand-offs empty": (APART, "hand_offs", lambda rows: rows.slice(0, 0), "that of hand_offs.parquet is 0"),
    "hand-off dropped": (APART, "hand_offs", lambda rows: dropped(rows, 2), "that of hand_offs.parquet is 5"),
    "hand-off doubled": (APART, "hand_offs", lambda rows: doubled(rows, 2), "that of hand_offs.parquet is 7"),
    "hand-off's fate": (APART, "hand_offs", later("fate", by=1), "that of hand_offs.parquet is 5"),
    "hand-off's bytes": (APART, "hand_offs", later("bytes", by=1), "hand_off.bytes is "),
    "hand-off's prefill": (APART, "hand_offs", later("prefilled_ns"), "hand_off.after_prefill_mean_s is "),
    "hand-off's blocks": (APART, "hand_offs", later("blocks", by=1), "each hand-off is one move out"),
    "hand-off's source": (APART, "hand_offs", later("source", by=-1, row=0), "each hand-off is one move out"),
    "hand-off's times": (APART, "hand_offs", later("prefilled_ns", "start_ns", "end_ns"), "each hand-off is one move"),
    "KV's times": (APART, "moves", later("start_ns", by=1), "each hand-off is one move out"),
    "KV unreported": (APART, "moves", lambda _: None, "each hand-off is one move out"),
    "transfers absent": (OFFLOADED, "moves", lambda _: None, "kv_moves.out_blocks is "),
    "transfer dropped": (OFFLOADED, "moves", lambda rows: dropped(rows, 4), "_blocks is "),
    "transfer's end": (OFFLOADED, "moves", later("end_ns", by=1000), "_busy is "),
    "transfer's times": (OFFLOADED, "moves", later("start_ns", "end_ns", by=-(10**12)), "begins after it was planned"),
    "transfer too late": (OFFLOADED, "moves", later("start_ns", "end_ns", by=10**12), "until a transfer is over"),
    "transfer's request": (OFFLOADED, "moves", later("request", by=1), "expected rows of (request, job, way, blocks)"),
    "transfer's step": (OFFLOADED, "moves", later("step", by=-1), "expected rows of (request, job, way, blocks)"),
    "transfer's strange step": (OFFLOADED, "moves", later("step", by=10**6), "expected rows of (request, job, way"),
    "stages absent": (PIPED, "stages", lambda _: None, "each step has a row for each stage: row 0 has 0"),
    "stages absent of two": (TWO_PIPED, "stages", lambda _: None, "each step has a row for each stage: row 0 has 0"),
    "stage dropped": (TWO_PIPED, "stages", lambda rows: dropped(rows, 5), "each step has a row for each stage"),
    "stages reversed": (
        TWO_PIPED,
        "stages",
        lambda rows: rows.take(list(range(len(rows)))[::-1]),
        "steps are in order",
    ),
    "stage's number": (TWO_PIPED, "stages", later("stage", by=1), "stages are in order"),
    "stage too late": (TWO_PIPED, "stages", later("start_ns", "end_ns"), "a stage waits for the one before"),
    "stage's end": (TWO_PIPED, "stages", later("end_ns", row=5), "the last stage has the kernels' times"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[str]], Path]:
    """Runs by kind of workload and overrides, each made once."""
    return cache(lambda fields: recorded(tmp_path_factory.mktemp("run"), *fields))


@pytest.mark.parametrize("damage", OTHERS)
def test_other_tables_that_were_altered_or_deleted_are_refused(
    damage: str, tmp_path: Path, runs: Callable[[Sequence[str]], Path]
) -> None:
    """Transfers are those of the plans, and hand-offs theirs; steps are on all stages; and summary.json has their
    numbers. So whatever is missing or altered is told in a line with the table's name.
    """
    fields, table, change, words = OTHERS[damage]
    run = shutil.copytree(runs(fields), tmp_path / "run")
    assert replayed(run)[0] == 0
    file = run / f"{table}.parquet"
    altered = change(pq.read_table(file))
    file.unlink()
    if altered is not None:
        pq.write_table(altered, file)
    status, out, err = replayed(run)
    assert (status, out) == (2, "")
    assert err.startswith(f"cbsim: {run}/") and ".parquet" in err and words in err and err.count("\n") == 1, err


@pytest.mark.parametrize("name", ["prompt_tokens", "output_tokens", "max_tokens", "priority", "id"])
def test_an_altered_request_is_refused(run: Path, name: str) -> None:
    """A request that is not the workload's any more is refused by name, before anything is derived."""
    alter(run / "requests.parquet", name, 3, lambda value: f"{value}x" if name == "id" else value + 1000)
    status, out, err = replayed(run)
    assert (status, out) == (2, "")
    assert err.startswith(f"cbsim: {run / 'requests.parquet'}: request 3")
    assert err.endswith(" is not one of the scenario's workload\n")


def test_an_altered_number_is_refused(run: Path) -> None:
    """Numbers tell requests apart, and ascend: one out of order is no table, a strange one is of another workload."""
    last = len(reading.load(run).requests) - 1
    alter(run / "requests.parquet", "index", last, lambda value: value + 1000)
    assert replayed(run)[2].endswith(f"request {last} is not one of the scenario's workload\n")
    alter(run / "requests.parquet", "index", 3, lambda value: value + 10)
    assert "index of request 4 is 4, expected more than 13" in replayed(run)[2]


@pytest.mark.parametrize(
    ("name", "change"), [("queued_poll", lambda poll: poll + 10), ("cancelled_poll", lambda _: 5), ("index", None)]
)
def test_an_altered_poll_or_a_request_less(run: Path, name: str, change: Callable[[Any], Any] | None) -> None:
    """A request queued ten polls later than it was, cancelled in the fifth, or removed: the plans differ."""
    file = run / "requests.parquet"
    if change is None:
        table = pq.read_table(file)
        pq.write_table(table.filter(pc.not_equal(table[name], 2)), file)
    else:
        alter(file, name, 0, change)
    status, out, _ = replayed(run)
    assert status == 1
    assert " plans identical, then " in out


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("max_num_seqs: 8", "max_num_seqs: 7", "plans identical, then step "),
        ("max_num_batched_tokens: 64", "max_num_batched_tokens: 65", "plans identical, then step "),
        ("num_blocks: 40", "num_blocks: 41", "plans identical, then step "),
        ("mode: async", "mode: sync", "plans identical, then step "),
        ("seed: 0", "seed: 1", "is not one of the scenario's workload"),
        ("requests: 30", "requests: 29", "is not one of the scenario's workload"),
        ("seed: 0", "seed: [", "not valid YAML"),
    ],
)
def test_an_altered_scenario(run: Path, before: str, after: str, words: str) -> None:
    """Another policy, loop or workload than the one that ran: a difference, or a refusal that names it."""
    file = run / "scenario.resolved.yaml"
    text = file.read_text()
    assert text.count(before) == 1, text
    file.write_text(text.replace(before, after))
    status, out, err = replayed(run)
    assert status in (1, 2)
    assert words in out + err


# -- what is no run ---------------------------------------------------------------------------------------------------


def cut_short(run: Path, steps: int) -> None:
    """Leave as many steps in both tables, as a run does that was interrupted then."""
    table = pq.read_table(run / "steps.parquet")
    pq.write_table(table.slice(0, steps), run / "steps.parquet")
    table = pq.read_table(run / "requests.parquet")
    rows = table.to_pylist()
    for row in rows:
        pairs = zip(row["token_runs"][::2], row["token_runs"][1::2], strict=True)
        row["token_runs"] = [n for first, count in pairs if first < steps for n in (first, min(count, steps - first))]
        row["first_step"] = row["first_step"] if row["first_step"] < steps else -1
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), run / "requests.parquet")


def test_an_interrupted_run_is_compared_as_far_as_it_goes(run: Path) -> None:
    """A directory marked as incomplete has fewer steps than the policy would plan: no difference, and that is said."""
    cut_short(run, 20)
    (run / directory.MARKER).write_text("interrupted after 20 steps\n")
    status, out, err = replayed(run)
    said = "20 of 20 plans identical; the run is incomplete: interrupted after 20 steps"
    assert (status, out, err) == (0, f"{run}: {said}\n", "")


def test_a_scenario_without_its_loop_is_refused(run: Path) -> None:
    """The loop of a recorded run is one of two: a file that lost it is named, not taken for one of both loops."""
    file = run / "scenario.resolved.yaml"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if not line.startswith("  mode:")))
    status, _, err = replayed(run)
    assert (status, err) == (2, f"cbsim: {file}: loop.mode is missing or null, expected sync or async\n")


def test_several_runs(run: Path, original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each run has its line; one that differs makes the status 1, and those after it are still looked at."""
    alter(run / "steps.parquet", "plan_hash", 0, lambda value: value + 1)
    status = main(["replan", str(run), str(original)])
    first, second = capsys.readouterr().out.splitlines()
    assert status == 1
    assert first.startswith(f"{run}: 0 of ")
    assert first.endswith("(the counts agree, the rows or blocks do not)")
    assert second.endswith("plans identical")
