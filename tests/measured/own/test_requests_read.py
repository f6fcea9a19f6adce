"""Measurements of a server as loads: sweeps, inference-perf, CSV; and what is refused, because it is not of one server,
one clock, one unit.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from support.sessions import FILES

from cbsim.errors import UserError
from cbsim.measured.own.measurement import measurement


def swept(folder: Path, *combinations: str) -> Path:
    """What `vllm bench sweep serve` leaves: a folder a combination, in it a file a run with its parameters."""
    result = json.loads((FILES / "vllm_bench_detailed.json").read_text())
    for at, name in enumerate(combinations):
        for run in range(2):
            path = folder / name / f"run={run}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result | {"run_number": run, "max_concurrency": at + 1, "request_rate": "inf"}))
        (folder / name / "summary.json").write_text("[]")
    return folder


def test_a_sweep_is_a_load_for_every_run(tmp_path: Path) -> None:
    of = measurement([swept(tmp_path, "BENCH--few", "BENCH--many")], {})
    assert [(load.name, load.users) for load in of.loads] == [
        *((f"BENCH--few/run={run}", 1) for run in range(2)),
        *((f"BENCH--many/run={run}", 2) for run in range(2)),
    ]
    assert (of.tool, of.facts.model, len(of.loads[0])) == ("vllm bench serve", "tiny", 6)


def lived(start: float, tokens: int, *, new: bool, model: str = "m", error: Any = None) -> dict[str, Any]:
    """A request of inference-perf: first token after 0.1 s, the next ones each 0.01 s."""
    answer = {"output_tokens": tokens, "output_token_times": [start + 0.1 + 0.01 * at for at in range(tokens)]}
    info = {"input_tokens": 30, "response_metrics": answer | {"server_usage": {"prompt_tokens": 31}}} if new else None
    request = json.dumps({"model": model, "prompt": "x"})
    times = {"start_time": start, "end_time": start + 0.1 + 0.01 * tokens}
    return {**times, "request": request, "response": "", "info": info or answer | {"input_tokens": 30}, "error": error}


@pytest.mark.parametrize("new", [False, True])
def test_inference_perf_has_a_load_for_every_stage(tmp_path: Path, new: bool) -> None:
    """Its files of stages count their requests, which follow each other; old and new forms of an answer."""
    path = tmp_path / "per_request_lifecycle_metrics.json"
    rows = [lived(float(at), 5, new=new) for at in (3, 0, 1, 2)]
    path.write_text(json.dumps([*rows, lived(4.0, 5, new=new, error={"error_type": "x"})]))
    for stage, count in enumerate((2, 3)):
        counted = {"load_summary": {"count": count}}
        (tmp_path / f"stage_{stage}_lifecycle_metrics.json").write_text(json.dumps(counted))
    of = measurement([tmp_path], {})
    assert [(load.name, load.start_s.tolist()) for load in of.loads] == [("stage 0", [0, 1]), ("stage 1", [2, 3])]
    assert (of.tool, of.facts.model) == ("inference-perf", "m")
    assert of.loads[0].ttft_s == pytest.approx([0.1, 0.1])
    assert of.loads[0].tpot_s == pytest.approx([0.01, 0.01])
    assert of.loads[0].prompt_tokens.tolist() == [31 if new else 30] * 2


CSV = """load,users,start_ms,ttft_ms,generation_s,input_tokens,output_tokens,error
one,,0,100,0.4,30,5,
one,,250,100,0.4,30,5,
"""


def test_times_of_a_csv_have_the_units_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(CSV)
    (load,) = measurement([tmp_path / "a.csv"], {}).loads
    assert (load.name, load.users) == ("one", None)
    assert load.start_s == pytest.approx([0.0, 0.25])
    assert load.e2e_s == pytest.approx([0.5, 0.5])
    assert load.tpot_s == pytest.approx([0.1, 0.1])


def test_requests_that_failed_are_kept(tmp_path: Path) -> None:
    """What is not known of them may be empty; from one in twenty on, the load is not used."""
    rows = [f"one,,{at},100,0.4,30,5," for at in range(40)[::-1]]
    rows.insert(20, "one,,,,,30,,lost")
    path = tmp_path / "a.csv"
    path.write_text("\n".join([CSV.partition("\n")[0], *rows, "two,,1,1,1,1,1,", "two,,1,,,,,no"]))
    one, two = measurement([path], {}).loads
    assert (one.failed.sum(), one.notes, one.left_out) == (1, ["lost"], "")
    starts = one.start_s[~one.failed].tolist()
    assert starts == sorted(starts)
    assert two.left_out == "50% of its requests failed"


LOG = "run,scenario,qps,launch_s,prompt_tokens,generation_tokens,ttft_s,generation_s\n"
LOG += "x/a,chat,0.5,0.0,10.0,5.0,0.1,0.4\nx/a,chat,1,0.0,10.0,5.0,0.1,0.4\nx/b,chat,1,0.0,10.0,5.0,0.2,0.4\n"


def test_a_log_of_several_servers_needs_a_choice(tmp_path: Path) -> None:
    """The form of llm-d's logs, gzipped: servers are its runs, loads its scenarios and rates."""
    path = tmp_path / "requests.csv.gz"
    path.write_bytes(gzip.compress(LOG.encode()))
    with pytest.raises(UserError, match=r"is of 2 runs \(x/a, x/b\); choose one with --where run="):
        measurement([path], {})
    assert [load.name for load in measurement([path], {"run": "a"}).loads] == ["chat 0.5", "chat 1"]
    path.write_bytes(gzip.compress(LOG.encode())[:-20])
    with pytest.raises(UserError, match="cannot be read: "):
        measurement([path], {"run": "a"})


BAD = {
    "times of two clocks or units": CSV.replace("250,100,0.4", "250,100,-0.4").replace("generation_s", "e2e_s"),
    "are these milliseconds": CSV.replace("0.4", "400"),
    "times of two clocks": CSV.replace("250", "1795420956951"),
    r"ttft_s is in 2 columns \(ttft_ms, ttft_s\)": CSV.replace("generation_s", "ttft_s"),
    "no column ttft_s; it has": CSV.replace("ttft_ms", "first"),
    "got 3 cells, expected 8": CSV + "one,,0\n",
    r"is of 2 models \(m, n\); choose one": CSV.replace("users", "model")
    .replace("one,,0", "one,m,0")
    .replace("one,,", "one,n,"),
    "all requests failed": CSV.replace("5,\n", "5,lost\n"),
    "no request in it has succeeded": CSV.partition("\n")[0],
    "prompt_tokens: got 30.5 of request 2, must be a whole number from 1": CSV.replace("30,", "30.5,"),
    "output_tokens: got 0 of request 2": CSV.replace("5,\n", "0,\n"),
    "got 1e.30 of request 2, must be a whole number from 1 to 1,000,000,000": CSV.replace("5,\n", "1e30,\n"),
    "ttft_s: got 0 of request 2, must be > 0": CSV.replace("0,100", "0,0"),
    "was nothing streamed": CSV.replace("0.4", "0"),
    "--where: chooses rows of CSV files; .*is none": "",
    "is not whole": "",
    "has statistics only": "",
    "is of 2 models ": "",
    "is of 2 servers": "",
    "holds no run=0.json": "",
}


@pytest.mark.parametrize("said", BAD)
def test_what_is_not_of_one_server_clock_and_unit_is_refused(tmp_path: Path, said: str) -> None:
    path = tmp_path / "a.csv"
    if BAD[said]:
        path.write_text(BAD[said].replace("-0.4", "0.04"))
    elif said == "is not whole":
        path = tmp_path / "a.json"
        path.write_text((FILES / "vllm_bench_detailed.json").read_text()[:-50])
    elif said == "has statistics only":
        path = FILES / "vllm_bench.json"
    elif said == "is of 2 models ":
        path = tmp_path / "a.json"
        path.write_text(json.dumps([lived(0.0, 5, new=True), lived(1.0, 5, new=True, model="n")]))
    else:
        path = FILES / "vllm_bench.json" if "where" in said else tmp_path
        path = swept(tmp_path, "SERVE--a-BENCH--x", "SERVE--b-BENCH--x") if "2 servers" in said else path
    with pytest.raises(UserError, match=said):
        measurement([path], {"run": "a"} if "where" in said else {})


def test_files_of_two_models_are_of_two_servers(tmp_path: Path) -> None:
    other = json.loads((FILES / "vllm_bench_detailed.json").read_text()) | {"model_id": "other"}
    (tmp_path / "a.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match=r"model: got other, that of .* is tiny: of another server"):
        measurement([FILES / "vllm_bench_detailed.json", tmp_path / "a.json"], {})
