"""Our policies against what real schedulers decided, and the check itself: it can fail, and it says where."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from cbsim.conformance.check import TraceResult, compare, run
from cbsim.conformance.reader import traces
from cbsim.conformance.sarathi_traces import SarathiReplay
from cbsim.conformance.vllm_traces import VllmReplay

GOLDEN = Path(__file__).parents[1] / "golden"
Line, Change = dict[str, Any], Callable[[Any], Any]
SARATHI, STAGED = "sarathi/96f9911/sa3_pressure", "sarathi/96f9911/ft6_pipeline2"
VLLM, TRANSFORMERS = "vllm/0.33.0/w23_watermark_alone.sync", "transformers/5.17.0/w11_cancel_fifo_bs16"
GROUPED = "vllm/0.33.0/h10_five_to_one.async"
TRTLLM = "trtllm/002f3cc/t03_max_utilization"
SECTORS, SECTORS_HOST = "transformers/5.23.0/w03_softreset_fifo_share_bs16", "transformers/5.23.0/o03_cpu_async_share"
FORKED, OFFLOADED = "transformers/5.17.0/f05_fork_edges_prefill_first", "transformers/5.17.0/o03_cpu_async_share"


def sample() -> list[Path]:
    """Forty traces, drawn with a seed: of every family and version in turn. `.ci/run` compares all of them."""
    drawn = random.Random(0)
    folders = [traces(folder) for folder in sorted({trace.parent for trace in traces(GOLDEN)})]
    turns = zip_longest(*(drawn.sample(folder, len(folder)) for folder in folders))
    return [trace for turn in turns for trace in turn if trace is not None][:40]


@pytest.mark.parametrize("trace", sample(), ids=lambda p: str(p.relative_to(GOLDEN)).removesuffix(".jsonl.gz"))
def test_golden(trace: Path) -> None:
    """Every line of a recorded trace is ours too, and pool and decode batch are consistent after each."""
    result = compare(trace, invariants=True)
    assert str(result).endswith("ok"), f"{result}"
    assert result.matched == result.total > 0


def lines(name: str) -> list[Line]:
    """The lines of a golden trace; its header does not state its workload's digest, so that either may be changed."""
    document = gzip.decompress((GOLDEN / f"{name}.jsonl.gz").read_bytes())
    read: list[Line] = [json.loads(line) for line in document.splitlines()]
    read[0].pop("workload_sha256", None)
    return read


def workload(name: str) -> Line:
    folder, file = (GOLDEN / name).parent.parent / "workloads", name.rsplit("/", 1)[1].split(".", maxsplit=1)[0]
    read: Line = json.loads(gzip.decompress((folder / f"{file}.json.gz").read_bytes()))
    return read


def written(folder: Path, name: str, trace: list[Line], given: Line) -> Path:
    """A trace and its workload beside it, neither of them gzipped."""
    path = folder / f"{name.rsplit('/', 1)[1]}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in trace))
    (folder / f"{path.name.split('.')[0]}.json").write_text(json.dumps(given))
    return path


def ran(*paths: Path) -> tuple[int, str]:
    output: list[str] = []
    return run(paths, output.append, output.append), "\n".join(output)


def table(output: str) -> list[list[str]]:
    """The rows of the table at the end, the header's first; what there is no version of is the sum."""
    lines = output.splitlines()
    return [line.split() for line in lines[lines.index(next(line for line in lines if "scheduler  " in line)) :]]


def test_directories_are_searched_and_counted() -> None:
    """A directory stands for all traces below it; each is reported in a line that begins with its name, and a table at
    the end counts traces, their lines and the lines that matched, by scheduler and version.
    """
    status, output = ran(GOLDEN / "transformers")
    listed = traces(GOLDEN / "transformers")
    assert status == 0
    reported = output.splitlines()[: len(listed)]
    assert [line.split()[0] for line in reported] == [path.name.removesuffix(".jsonl.gz") for path in listed]
    header, rule, *rows, total = table(output)
    assert header == ["scheduler", "version", "traces", "lines", "matched"]
    assert len(rule) == 1
    assert [row[:2] for row in rows] == [["transformers", "5.17.0"], ["transformers", "5.23.0"]]
    assert total[:2] == ["all", str(len(listed))]
    for place in (-1, -2, -3):
        assert sum(int(row[place]) for row in rows) == int(total[place])
    assert int(total[-1]) == int(total[-2]) > 10_000
    assert len(output.splitlines()) == len(listed) + len(rows) + 3


def test_the_table_counts_what_differs(tmp_path: Path) -> None:
    """Lines before the first difference have matched, the others of the trace have not; skipped traces have none."""
    trace = lines(VLLM)
    trace[9]["extra"] = 1
    path = written(tmp_path, VLLM, trace, workload(VLLM))
    skipped = tmp_path / "other.sync.jsonl"
    skipped.write_text(json.dumps(trace[0] | {"vllm": "0.21.0"}))
    status, output = ran(path, skipped)
    assert status == 1
    counts = ["1", f"{len(trace) - 1}", "8"]
    assert table(output)[2:] == [["vllm", "0.33.0", *counts], ["all", *counts]]


def test_a_trace_without_a_mode_is_a_line_too() -> None:
    """What begins a line is the trace's name; schedulers of one loop say no mode."""
    assert f"{TraceResult('a01', 'any', '1.0', '', 5, 5)}" == "a01  any 1.0  5/5 lines  ok"


def altered(line: Line, path: str, change: Change) -> None:
    """Change the value at a path such as `reqs[0].computed`."""
    *parents, last = [int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", path)]
    value: Any = line
    for part in parents:
        value = value[part]
    value[last] = change(value[last] if isinstance(last, int) else value.get(last))


def more(value: int) -> int:
    return value + 1


@pytest.mark.parametrize(
    ("name", "at", "path", "change"),
    [
        (VLLM, 1, "reqs[0].computed", more),
        (VLLM, 101, "preempted", lambda value: [*value, ["r9", 1, 1]]),
        (VLLM, -1, "requests.r000.n_out", lambda _: 0),
        (VLLM, 7, "extra", lambda _: 1),
        (GROUPED, 40, "reqs[0].live", lambda value: [*value, 1]),
        (TRANSFORMERS, 3, "after_schedule.uninit_order", lambda value: value[::-1]),
        (TRANSFORMERS, 5, "batch[2].past", more),
        (TRANSFORMERS, -1, "outputs", lambda value: dict(list(value.items())[1:])),
        (FORKED, 3, "after_update.block_tables.r0__child#0", lambda value: [*value[:-1], value[-1] + 1]),
        (OFFLOADED, 40, "after_schedule.cpu.free", lambda value: value[:-1]),
        (SECTORS, 6, "after_schedule.free_block_trees.full_attention", lambda value: value | {"5": []}),
        (SECTORS, 6, "schedule_events[3].no_cache", lambda _: None),
        (SECTORS_HOST, 13, "after_schedule.cpu.held.r5.full_attention", lambda value: [value[0] - 1, *value[1:]]),
        (SARATHI, 287, "reqs[0].done", lambda _: 0),
        (STAGED, 60, "finished", lambda value: [*value, "r000"]),
        (STAGED, -1, "lost_outputs", lambda value: [*value, 1]),
        (TRTLLM, 53, "blocks", lambda _: 5),
        (TRTLLM, 54, "fitting", lambda value: value[::-1]),
        (TRTLLM, 54, "reqs[6].held", lambda _: 5),
        (TRTLLM, -1, "end_us", lambda _: 0),
        ("sarathi/96f9911/sa8_dynamic", 0, "effective._chunk_sizes", lambda sizes: sizes[::-1]),
        (GROUPED, 0, "effective.groups[0].layers", lambda layers: layers[::-1]),
    ],
)
def test_one_altered_field_is_found(tmp_path: Path, name: str, at: int, path: str, change: Change) -> None:
    """The check can fail: the altered line and field are named, status 1, and the lines before it count as matched.
    What follows from a workload's settings stands in the header, which is compared before any line.
    """
    trace = lines(name)
    at = at % len(trace)
    while name in (VLLM, GROUPED) and 0 < at < len(trace) - 1 and not trace[at].get("reqs"):
        at += 1
    altered(trace[at], path, change)
    status, output = ran(written(tmp_path, name, trace, workload(name)))
    assert status == 1
    assert f"{max(at - 1, 0)}/{len(trace) - 1} lines  MISMATCH" in output
    assert f"line {at + 1}" in output
    assert f"\n    {path}" in output


@pytest.mark.parametrize("name", [VLLM, TRANSFORMERS, SARATHI, TRTLLM])
def test_a_shortened_or_lengthened_trace_is_found(tmp_path: Path, name: str) -> None:
    """A trace has to end where our replay ends; one without its last line is cut off, and compared with nothing."""
    trace = lines(name)
    status, said = ran(written(tmp_path, name, trace[:-1], workload(name)))
    assert status == 2 and "the trace is cut off" in said
    shorter = ran(written(tmp_path, name, [*trace[:-3], trace[-1]], workload(name)))
    longer = ran(written(tmp_path, name, [*trace, trace[-1]], workload(name)))
    assert shorter[0] == longer[0] == 1
    assert f"line {len(trace) - 2}" in shorter[1]
    assert "our replay has ended, the trace goes on" in longer[1]


def test_a_null_is_an_absent_field(tmp_path: Path) -> None:
    """Recorders may write null for a time that never came; the order of ids in `finished` is a set's."""
    trace = lines(VLLM)
    trace[-1]["requests"]["r000"]["aborted_ts"] = None
    for line in trace:
        if line["ev"] == "schedule":
            line["finished"].reverse()
    assert ran(written(tmp_path, VLLM, trace, workload(VLLM)))[0] == 0


def test_a_failing_replay_is_a_mismatch(tmp_path: Path) -> None:
    """A workload that our policy cannot finish is reported with the reason, not with a traceback."""
    trace, given = lines(VLLM), workload(VLLM)
    trace[0]["config"]["num_blocks"] = 3
    status, output = ran(written(tmp_path, VLLM, trace, given))
    assert status == 1
    assert "MISMATCH" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "line 1: not valid JSON: "),
        ("no json\n", "line 1: not valid JSON: "),
        ("[" * 100_000, "line 1: not valid JSON: "),
        ("[1]\n", "line 1: got [1], expected a JSON object"),
        ('{"a": 1}\n', "line 1: expected a trace header that names its scheduler and version"),
        ('{"ev": "header", "vllm": 1}\n', "expected field vllm to be a str, got 1"),
        ('{"ev": "header", "sarathi": "1", "config": {}}\n', "expected field scheduler to be a str, got None"),
        ('{"ev": "header", "tensorrt_llm_commit": 1}\n', "expected field tensorrt_llm_commit to be a str, got 1"),
        ('{"ev": "header", "tensorrt_llm_commit": "", "config": {}}\n', "no field 'policy'"),
        ('{"header": true}\n', "expected field resolved to be a dict"),
        ('{"ev": "header", "vllm": "0.33.0", "mode": "sync", "config": {}}\n', "its workload is missing, expected"),
    ],
)
def test_garbage_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    """Input that is no trace: status 2, with the file and what was expected."""
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    status, output = ran(path)
    assert status == 2
    assert output.startswith("x  unreadable: ")
    assert f"{path}" in output
    assert expected in output.splitlines()[0]
    assert "scheduler  " not in output  # nothing was compared: there is no table


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("format", 5, "line 1: format: got 5, expected one of 0, 1, 2, 3"),
        ("format", "2", "line 1: format: got '2', expected one of 0, 1, 2, 3"),
        ("format", None, "line 1: format: got None, expected one of 0, 1, 2, 3"),
        ("mode", "x", "line 1: mode: got 'x', expected one of 'sync', 'async'"),
        ("workload_sha256", "12", "expected the workload of w23_watermark_alone.sync.jsonl, whose SHA-256 is '12'"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(tmp_path: Path, field: str, value: Any, expected: str) -> None:
    """An unknown format, or the workload of another trace, is status 2 and names the field."""
    trace = lines(VLLM)
    trace[0][field] = value
    status, output = ran(written(tmp_path, VLLM, trace, workload(VLLM)))
    assert status == 2
    assert "unreadable: " in output and expected in output


def test_broken_files_are_refused(tmp_path: Path) -> None:
    """A cut gzip, a broken line, a bad header and a missing path are named as such; nothing compared is status 2."""
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes((GOLDEN / f"{VLLM}.jsonl.gz").read_bytes()[:200])
    assert ran(cut)[0] == 2
    assert "gzipped" in ran(cut)[1]
    path = written(tmp_path, VLLM, lines(VLLM), workload(VLLM))
    path.write_text(path.read_text().replace('{"ev": "update"', "{ev", 1))
    assert ran(path)[0] == 2
    assert "line 3: not valid JSON" in ran(path)[1]
    trace = lines(VLLM)
    del trace[0]["config"]["policy"]
    status, output = ran(written(tmp_path, VLLM, trace, workload(VLLM)))
    assert status == 2
    assert "no field 'policy'" in output
    assert ran(tmp_path / "nowhere")[0] == 2
    assert ran(tmp_path / f"{VLLM.rsplit('/', 1)[1].split('.', maxsplit=1)[0]}.json")[0] == 2
    (tmp_path / "empty").mkdir()
    status, output = ran(tmp_path / "empty")
    assert (status, output) == (2, f"no trace to compare in {tmp_path / 'empty'}")
    assert ran(cut, GOLDEN / f"{VLLM}.jsonl.gz")[0] == 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (VLLM, "version 0.21.0 is not followed, only 0.19, 0.33"),
        (VLLM, "option max_num_active_seqs is not modelled"),
        (VLLM, "speculation with a connector is not modelled"),
        (TRANSFORMERS, "version 5.20.0 is not followed, only 5.17, 5.23, 5.24"),
        (TRANSFORMERS, "layers with chunked_attention are not modelled"),
        (SARATHI, "commit 1234567 is not followed, only 96f9911"),
        (SARATHI, "option max_num_active_seqs is not modelled"),
        (TRTLLM, "option beams is not modelled"),
        (TRTLLM, "policy MAX_REQUESTS is not modelled"),
        (TRTLLM, "chunking FORCE_CHUNK is not modelled"),
    ],
)
def test_what_is_outside_the_model_is_named(tmp_path: Path, name: str, reason: str) -> None:
    """Such a trace is listed with the reason and fails nothing; but if nothing else was compared, the status is 2."""
    trace, given = lines(name), workload(name)
    if "version" in reason:
        version = reason.split()[1]
        trace[0]["vllm"] = trace[0].setdefault("resolved", {})["transformers"] = version
    if "commit" in reason:
        trace[0]["sarathi"] = reason.split()[1]
    config = trace[0].setdefault("config", {})
    if name == TRTLLM:
        what, value = reason.split()[:2]
        config |= {"option": {"beams": 2}, "policy": {"policy": value}, "chunking": {"chunking": [value, 4]}}[what]
    if "max_num_active_seqs" in reason:
        trace[0]["config"]["max_num_active_seqs"] = 4
    if "speculation" in reason:
        trace[0]["config"] |= {"spec": {"method": "eagle", "k": 3}, "connector": {"kind": "pd", "role": "kv_producer"}}
    given.setdefault("model", {})["layer_types"] = ["chunked_attention"] * ("chunked" in reason)
    path = written(tmp_path, name, trace, given)
    status, output = ran(path)
    assert status == 2
    assert output.splitlines()[0].endswith(f"not compared: {reason}")
    assert ran(path, GOLDEN / f"{VLLM}.jsonl.gz")[0] == 0


# -- what no recorded trace shows -------------------------------------------------------------------------------------

SIZES = {"block_size": 4, "num_blocks": 7, "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32}
RULES = dict.fromkeys(("enable_chunked_prefill", "enable_prefix_caching", "scheduler_reserve_full_isl"), True)
TIMES = {"base_us": 1000, "per_token_us": 0, "per_kv_token_us": 0, "sched_us": 0, "update_us": 0}
CONFIG: Line = {**SIZES, **RULES, "policy": "fcfs", "long_prefill_token_threshold": 0, "timing": TIMES}


def test_cancellations_due_together_come_as_their_format_has_it() -> None:
    """In format 0 in that of their times, in format 1 by id, in format 2 one at a time by their times."""
    requests: list[Line] = []
    for number, abort_us in enumerate((None, 2700, 2300, 2500)):
        tokens = list(range(number * 100, number * 100 + 20))
        texts = {"prompt_token_ids": tokens[:8], "output_token_ids": tokens[8:]}
        requests.append({"id": f"r{number}", "arrival_us": 0, "abort_us": abort_us, **texts})
    for trace_format, order in ((0, [["r2", "r3", "r1"]]), (1, [["r1", "r2", "r3"]]), (2, [["r2"], ["r3"], ["r1"]])):
        header = {"vllm": "0.33.0", "mode": "sync", "format": trace_format, "config": CONFIG}
        replayed = VllmReplay(header, {"config": CONFIG, "requests": requests}).lines()
        assert [line["ids"] for line in replayed if line["ev"] == "abort"] == order


def test_the_result_of_a_row_from_before_a_preemption_counts() -> None:
    """Two stages: r1's whole prompt is in flight when it is preempted and planned again in the same pass. Both results
    are of a complete prompt, so each gives it a token, and its limit of 5 began again: 6 outputs."""
    sizes = {"block_size": 4, "num_blocks": 6, "max_model_len": 48, "max_num_seqs": 6, "pipeline": 2}
    timing = {"base_us": 1000, "per_token_us": 10}
    config = {"scheduler": "sarathi", **sizes, "options": {"chunk_size": 32}, "timing": timing}
    requests = [
        {"id": "r0", "arrival_us": 0, "prompt": 13, "output": 3},
        {"id": "r1", "arrival_us": 0, "prompt": 5, "output": 5},
    ]
    replayed = [*SarathiReplay(config, {"requests": requests}).lines()]
    again = next(line for line in replayed if line["ev"] == "schedule" and line["step"] == 5)
    assert again["preempted"] == ["r1"] and again["reqs"][0]["id"] == "r1" and again["reqs"][0]["n"] == 6
    tokens = {line["step"]: line["tokens"] for line in replayed if line["ev"] == "update"}
    assert "r1" in tokens[4] and "r1" in tokens[5]
    assert replayed[-1]["requests"]["r1"]["n_out"] == 6
