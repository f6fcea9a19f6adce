"""What clients write is read as they mean it: their own statistics follow from the requests that we read.

The files were written by the tools themselves against a stand-in server, which answers after 50 ms with a token each
10 ms, and shortened: aiperf 0.13.0, vllm bench serve 0.33.0, GuideLLM 0.8.1. Those in `failing` had every third request
answered with status 500.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.sessions import FILES

from cbsim.errors import RunError
from cbsim.measured.own import clients as files
from cbsim.measured.own.clients import MEASURES, STATISTICS

WRITTEN = {
    "aiperf.jsonl": ("aiperf", 295),
    "aiperf.json": ("aiperf", 295),
    "vllm_bench_detailed.json": ("vllm bench serve", 51),
    "vllm_bench.json": ("vllm bench serve", 51),
    "guidellm.json": ("GuideLLM", 90),
}


@pytest.mark.parametrize(("name", "says"), WRITTEN.items())
def test_a_file_is_known_by_its_content(name: str, says: tuple[str, int], tmp_path: Path) -> None:
    """Whatever it is called: tool, six requests of five tokens each, and times that the stand-in gave."""
    path = tmp_path / "anything.txt"
    path.write_bytes((FILES / name).read_bytes())
    client = files.client(path)
    assert (client.tool, client.succeeded, client.failed) == (says[0], 6, 0)
    assert (client.prompt_tokens, client.output_tokens) == (says[1], 30)
    for measure in set(MEASURES) - {"itl_s"}:
        assert set(client.distribution(measure)) == set(STATISTICS)
    assert 0.05 < client.distribution("ttft_s")["mean"] < client.distribution("e2e_s")["mean"] < 0.2
    assert 0.009 < client.distribution("tpot_s")["p50"] < 0.012
    assert bool(client.distribution("itl_s")) == (client.tool != "GuideLLM")  # keeps no times of single tokens


@pytest.mark.parametrize("measure", MEASURES)
def test_requests_of_aiperf_give_its_own_statistics(measure: str) -> None:
    """Its inter-token latency is our TPOT, its inter-chunk latency our ITL."""
    ours, theirs = (files.client(FILES / file).distribution(measure) for file in ("aiperf.jsonl", "aiperf.json"))
    assert theirs == pytest.approx(dict(ours), abs=1e-9)


@pytest.mark.parametrize(
    ("measure", "word"), {"ttft_s": "ttft", "tpot_s": "tpot", "itl_s": "itl", "e2e_s": "e2el"}.items()
)
def test_requests_of_vllm_bench_give_its_own_statistics(measure: str, word: str) -> None:
    file = FILES / "vllm_bench_detailed.json"
    told = json.loads(file.read_text())
    theirs = {
        name: told[f"{key}_{word}_ms"] / 1e3 for name, key in (("mean", "mean"), ("p50", "median"), ("p99", "p99"))
    }
    assert dict(files.client(file).distribution(measure)) == pytest.approx(theirs)


def test_requests_of_guidellm_have_its_own_times() -> None:
    """TPOT is its inter-token latency: its time per output token counts the first one."""
    file = FILES / "guidellm.json"
    (benchmark,) = json.loads(file.read_text())["benchmarks"]
    requests = files.client(file).requests
    assert requests is not None
    for ours, theirs in zip(requests, benchmark["requests"]["successful"], strict=True):
        assert ours.key == theirs["response_id"]
        timings = theirs["info"]["timings"]
        assert ours.ttft_s == pytest.approx(timings["first_token_iteration"] - timings["request_start"])
        decode_s = timings["last_token_iteration"] - timings["first_token_iteration"]
        assert ours.tpot_s == pytest.approx(decode_s / (theirs["output_tokens"] - 1))


@pytest.mark.parametrize("name", WRITTEN)
def test_requests_that_failed_are_counted_and_not_timed(name: str) -> None:
    client = files.client(FILES / "failing" / name)
    assert (client.succeeded, client.failed) == (4, 2)
    assert 0.05 < client.distribution("e2e_s")["mean"] < 0.5
    if client.requests is not None and client.tool != "GuideLLM":
        assert len({request.number for request in client.requests}) == 4
        assert max(request.number for request in client.requests) < 6


def test_requests_of_a_warm_up_are_left_out(tmp_path: Path) -> None:
    first, *others = (FILES / "aiperf.jsonl").read_text().splitlines()
    warm_up = json.loads(first)
    warm_up["metadata"]["benchmark_phase"] = "warmup"
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps(warm_up), *others]))
    assert files.client(tmp_path / "a.jsonl").succeeded == 5


# -- mistakes


def changed(name: str, *path: str | int, value: Any) -> str:
    """The text of a file with one value changed; of JSONL in its first line."""
    text = (FILES / name).read_text()
    head, _, rest = text.partition("\n") if name.endswith("jsonl") else (text, "", "")
    document = json.loads(head)
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return f"{json.dumps(document)}\n{rest}"


TTFT = "metrics", "time_to_first_token"
BAD = {
    "line 1: metrics.time_to_first_token.value: got -1, must be >= 0": changed(
        "aiperf.jsonl", *TTFT, "value", value=-1
    ),
    "line 1: metrics.time_to_first_token.unit: got 'fortnights', expected one of ns, us, ms": changed(
        "aiperf.jsonl", *TTFT, "unit", value="fortnights"
    ),
    "line 1: metrics: got 3, expected fields": changed("aiperf.jsonl", "metrics", value=3),
    "request_latency.avg: got 'x', expected a number": changed("aiperf.json", "request_latency", "avg", value="x"),
    "request_count.avg: got 1.5, input should be a multiple of 1": changed(
        "aiperf.json", "request_count", "avg", value=1.5
    ),
    "ttfts[2]: got nan, expected a finite number": changed("vllm_bench_detailed.json", "ttfts", 2, value=float("nan")),
    "input_lens: got 1 entries, expected 6": changed("vllm_bench_detailed.json", "input_lens", value=[1]),
    "benchmarks[0].requests.successful[1].request_latency: is required": changed(
        "guidellm.json", "benchmarks", 0, "requests", "successful", 1, "request_latency", value=None
    ),
    "benchmarks: is required": changed("guidellm.json", "benchmarks", value=None),
    "no request in it has succeeded": changed("guidellm.json", "benchmarks", value=[]),
    "holds several results, must be 1": "\n".join([changed("vllm_bench.json", "label", value="a")] * 2),
    "it is none of these": '{"ttft": 1}',
    "time_to_first_token.p99: got 'soon', expected a number": changed(
        "aiperf.json", "time_to_first_token", "p99", value="soon"
    ),
    "request_count.avg: is required": changed("aiperf.json", "request_count", value=None),
}


@pytest.mark.parametrize(("said", "text"), BAD.items(), ids=range(len(BAD)))
def test_a_mistake_names_file_field_value_and_bound(said: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text(text)
    with pytest.raises(RunError) as error:
        files.client(path)
    assert str(error.value).startswith(f"{path}: ") and said in str(error.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(RunError, match="it is none of these"):
        files.client(tmp_path / "empty")
    for place, said in ((tmp_path, "it is not a regular file"), (tmp_path / "nowhere", "No such file")):
        with pytest.raises(RunError, match=said):
            files.client(place)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunError, match="is not UTF-8 text"):
        files.client(tmp_path / "bytes")
