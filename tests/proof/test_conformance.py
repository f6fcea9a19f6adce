"""Our policies against what real schedulers decided, and the check itself: it can fail, and it says where."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cbsim.proof.conformance.check import compare, run, traces

GOLDEN = Path(__file__).parents[1] / "golden"
Line = dict[str, Any]
VLLM, TRANSFORMERS = "vllm/0.33.0/w23_watermark_alone.sync", "transformers/5.17.0/w11_cancel_fifo_bs16"
FORKED, OFFLOADED = "transformers/5.17.0/f05_fork_edges_prefill_first", "transformers/5.17.0/o03_cpu_async_share"


@pytest.mark.parametrize("trace", traces(GOLDEN), ids=lambda p: str(p.relative_to(GOLDEN)).removesuffix(".jsonl.gz"))
def test_golden(trace: Path) -> None:
    """Every line of every recorded trace is ours too, and pool and cohort are consistent after each."""
    result = compare(trace, invariants=True)
    assert str(result).endswith("ok"), f"{result}"
    assert result.matched == result.total > 0


def lines(name: str) -> list[Line]:
    return [json.loads(line) for line in gzip.open(GOLDEN / f"{name}.jsonl.gz", "rt")]


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
    said: list[str] = []
    return run(paths, said.append), "\n".join(said)


def test_directories_are_searched_and_counted() -> None:
    """A directory stands for all traces below it; each is reported in a line, and the last line counts them."""
    status, said = ran(GOLDEN / "transformers")
    count = len(traces(GOLDEN / "transformers"))
    assert status == 0
    assert len(said.splitlines()) == count + 1
    assert said.splitlines()[-1].startswith(f"{count} traces compared: {count} ok (")


def _deeper(line: Line) -> None:
    line["reqs"][0]["computed"] += 1


def _preempted(line: Line) -> None:
    line["preempted"].append(["r9", 1, 1])


def _free_order(line: Line) -> None:
    line["after_schedule"]["uninit_order"].reverse()


def _batch(line: Line) -> None:
    line["batch"][-1]["past"] += 1


def _forked(line: Line) -> None:
    line["after_update"]["block_tables"]["r0__child#0"][-1] += 1


def _host(line: Line) -> None:
    line["after_schedule"]["cpu"]["free"].pop()


@pytest.mark.parametrize(
    ("name", "at", "alter", "field"),
    [
        (VLLM, 1, _deeper, "reqs[0].computed"),
        (VLLM, 100, lambda line: line.update(t=line["t"] + 1), "t"),
        (VLLM, 101, _preempted, "preempted"),
        (VLLM, -1, lambda line: line.update(prefix_cache_final_cached_blocks=0), "prefix_cache_final_cached_blocks"),
        (VLLM, -1, lambda line: line["requests"]["r000"].update(n_out=0), "requests.r000.n_out"),
        (VLLM, 7, lambda line: line.update(extra=1), "extra"),
        (TRANSFORMERS, 3, _free_order, "after_schedule.uninit_order"),
        (TRANSFORMERS, 5, _batch, "batch[2].past"),
        (TRANSFORMERS, -1, lambda line: line["outputs"].popitem(), "outputs"),
        (FORKED, 3, _forked, "after_update.block_tables.r0__child#0"),
        (OFFLOADED, 40, _host, "after_schedule.cpu.free"),
    ],
)
def test_one_altered_field_is_found(
    tmp_path: Path, name: str, at: int, alter: Callable[[Line], None], field: str
) -> None:
    """The check can fail: the altered line and field are named, status 1, and the lines before it count as matched."""
    trace = lines(name)
    at = at % len(trace)
    while name == VLLM and at < len(trace) - 1 and not trace[at].get("reqs"):
        at += 1
    alter(trace[at])
    status, said = ran(written(tmp_path, name, trace, workload(name)))
    assert status == 1
    assert f"{at - 1}/{len(trace) - 1} lines  MISMATCH" in said
    assert f"line {at + 1}" in said
    assert f"\n    {field}" in said


@pytest.mark.parametrize("name", [VLLM, TRANSFORMERS])
def test_a_shortened_or_lengthened_trace_is_found(tmp_path: Path, name: str) -> None:
    """A trace has to end where our replay ends."""
    trace = lines(name)
    status, said = ran(written(tmp_path, name, trace[:-1], workload(name)))
    assert status == 1
    assert "the trace ends, our replay goes on" in said
    status, said = ran(written(tmp_path, name, [*trace, trace[-1]], workload(name)))
    assert status == 1
    assert "our replay has ended, the trace goes on" in said


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
    status, said = ran(written(tmp_path, VLLM, trace, given))
    assert status == 1
    assert "MISMATCH" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "line 1: expected a JSON object"),
        ("no json\n", "line 1: expected a JSON object"),
        ("[1]\n", "line 1: expected a JSON object, got [1]"),
        ('{"a": 1}\n', "line 1: expected a trace header"),
        ('{"ev": "header", "vllm": 1}\n', "expected field vllm to be a str, got 1"),
        ('{"header": true}\n', "expected field resolved to be a dict"),
        ('{"ev": "header", "vllm": "0.33.0", "mode": "sync", "config": {}}\n', "its workload is missing, expected"),
    ],
)
def test_garbage_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    """Input that is no trace: status 2, with the file and what was expected."""
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    status, said = ran(path)
    assert status == 2
    assert f"{path}" in said
    assert expected in said


def test_broken_files_are_refused(tmp_path: Path) -> None:
    """A cut gzip, a broken line, a bad header and a missing path are named as such; nothing compared is status 2."""
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes((GOLDEN / f"{VLLM}.jsonl.gz").read_bytes()[:200])
    assert ran(cut)[0] == 2
    assert "gzipped" in ran(cut)[1]
    path = written(tmp_path, VLLM, lines(VLLM), workload(VLLM))
    path.write_text(path.read_text().replace('{"ev": "update"', "{ev", 1))
    assert ran(path)[0] == 2
    assert "line 3: expected a JSON object" in ran(path)[1]
    trace = lines(VLLM)
    del trace[0]["config"]["policy"]
    status, said = ran(written(tmp_path, VLLM, trace, workload(VLLM)))
    assert status == 2
    assert "no field 'policy'" in said
    assert ran(tmp_path / "nowhere")[0] == 2
    assert ran(tmp_path / f"{VLLM.rsplit('/', 1)[1].split('.', maxsplit=1)[0]}.json")[0] == 2
    (tmp_path / "empty").mkdir()
    assert ran(tmp_path / "empty") == (2, "0 traces compared: 0 ok (0 lines matched), 0 mismatched")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (VLLM, "version 0.21.0 is not followed, only 0.19, 0.33"),
        (VLLM, "option max_num_active_seqs is not modelled"),
        (TRANSFORMERS, "version 5.23.0 is not followed, only 5.17"),
        (TRANSFORMERS, "hybrid layer groups (layer_types) are not modelled"),
    ],
)
def test_what_is_outside_the_model_is_named(tmp_path: Path, name: str, reason: str) -> None:
    """Such a trace is listed with the reason and fails nothing; but if nothing else was compared, the status is 2."""
    trace, given = lines(name), workload(name)
    if "version" in reason:
        version = reason.split()[1]
        trace[0]["vllm"] = trace[0].setdefault("resolved", {})["transformers"] = version
    trace[0].setdefault("config", {})
    if "max_num_active_seqs" in reason:
        trace[0]["config"]["max_num_active_seqs"] = 4
    given.setdefault("model", {})["layer_types"] = ["full_attention"] * ("hybrid" in reason)
    path = written(tmp_path, name, trace, given)
    status, said = ran(path)
    assert status == 2
    assert f"not compared: {reason}" in said
    assert "1 not compared" in said
    assert ran(path, GOLDEN / f"{VLLM}.jsonl.gz")[0] == 0
