"""A client's file beside the run of its session: who is paired with whom, what differs, and when it is another one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import mutations
from support.calls import Said, call
from support.mutations import as_json, as_json_lines, edited, shuffled
from support.sessions import FILES, STEP_S, session
from support.validations import edited as changed

from analysis.cli.parser import main
from analysis.statistics import loading
from cbsim.measured.own import clients as files
from cbsim.measured.own.clients import Measured

AIPERF, VLLM, GUIDELLM = "aiperf.jsonl", "vllm_bench_detailed.json", "guidellm.json"


def requests_of(name: str) -> Sequence[Measured]:
    requests = files.client(FILES / name).requests
    assert requests is not None
    return requests


def ids(name: str) -> list[str]:
    """What the endpoint's record calls these requests: what the client gave, with a number of the session behind it."""
    if name == AIPERF:
        return [f"chatcmpl-{each.key}-{40 + number}" for number, each in enumerate(requests_of(name))]
    if name == VLLM:
        return [f"cmpl-bench-0a1b2c3d-{each.number}-{7 + each.number}" for each in requests_of(name)]
    return [each.key for each in requests_of(name)]


@pytest.fixture(scope="module", params=[AIPERF, VLLM, GUIDELLM])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    name = request.param
    return session(tmp_path_factory.mktemp("served") / "run", ids(name), requests_of(name)), name


@pytest.fixture(scope="module")
def aiperf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return session(tmp_path_factory.mktemp("aiperf") / "run", ids(AIPERF), requests_of(AIPERF))


def client(*words: object) -> Said:
    return call("client", *words, of=main)


def facts(run: Path, *files: Path) -> dict[str, Any]:
    said = client(run, *files, "--json")
    assert said.status == 0
    told: dict[str, Any] = json.loads(said.out)
    return told


def test_requests_are_paired_by_the_id_that_the_client_gave(served: tuple[Path, str]) -> None:
    """Every statistic of both sides and of their differences is that of a naive recount, one request at a time."""
    run, name = served
    (told,) = facts(run, FILES / name)["files"]
    assert (told["paired_by"], told["pairs"], told["doubts"]) == ("id", 6, [])
    (frame,) = (each.requests for each in loading.read([run]))
    rows = frame.set_index("id")
    names = dict(zip((each.number for each in requests_of(name)), ids(name), strict=True))
    for measure in ("ttft_s", "tpot_s", "e2e_s"):
        client = np.array([getattr(each, measure) for each in requests_of(name)])
        server = np.array([rows.loc[names[each.number]][measure] for each in requests_of(name)], dtype=float)
        numbers = told["measures"][measure]
        for side, values in (("client", client), ("server", server), ("per_request", client - server)):
            recount = {"mean": values.mean(), "p50": np.percentile(values, 50), "p99": np.percentile(values, 99)}
            assert numbers[side] == pytest.approx(recount), (measure, side)
        mean = numbers["client"]["mean"] - numbers["server"]["mean"]
        assert numbers["difference"]["mean"] == pytest.approx(mean) == pytest.approx(numbers["per_request"]["mean"])
    assert told["measures"]["tpot_s"]["server"]["mean"] == pytest.approx(STEP_S)
    assert told["measures"]["itl_s"]["server"]["p99"] == pytest.approx(STEP_S)


def test_a_session_may_have_had_other_clients(tmp_path: Path) -> None:
    """Warm-ups and probes are in the record and in no file: by ids the rest is compared all the same."""
    requests, names = requests_of(AIPERF), ids(AIPERF)
    more = [*requests, *requests[:2]]
    run = session(tmp_path / "run", [*names, "chatcmpl-5", "chatcmpl-6"], more)
    said = client(run, FILES / AIPERF)
    assert said.status == 0 and "6 requests, paired by id. 2 more of the session are left out." in said.out
    (told,) = facts(run, FILES / AIPERF)["files"]
    assert told["requests"] == {"succeeded": 6, "failed": 0, "server": 6}
    assert told["output_tokens"] == {"client": 30, "server": 30}


def test_without_ids_the_first_to_start_is_the_first_to_arrive(tmp_path: Path) -> None:
    run = session(tmp_path / "run", [f"chatcmpl-{number}" for number in range(6)], requests_of(AIPERF))
    ended, *streams = client(run, FILES / AIPERF)
    assert ended == 0
    said = streams[0]
    assert "6 requests, paired by order of arrival." in said and "may be swapped" in said
    (told,) = facts(run, FILES / AIPERF)["files"]
    assert (told["paired_by"], told["pairs"], told["doubts"]) == ("order of arrival", 6, [])


def test_statistics_alone_are_put_beside_the_whole_session(aiperf: Path) -> None:
    both = facts(aiperf, FILES / AIPERF, FILES / "aiperf.json")["files"]
    assert [each["paired_by"] for each in both] == ["id", None]
    for measure, numbers in both[0]["measures"].items():
        assert both[1]["measures"][measure]["server"] == numbers["server"]
        assert both[1]["measures"][measure]["client"] == pytest.approx(numbers["client"], abs=6e-6)
    assert set(both[1]["measures"]["ttft_s"]["per_request"].values()) == {None}


@pytest.mark.parametrize("name", ["vllm_bench.json", "aiperf.json", AIPERF])
def test_another_number_of_requests_is_another_session(name: str, tmp_path: Path) -> None:
    """Without ids. Exit 2; file, field, value and bound are named."""
    run = session(tmp_path / "run", list("abcde"), requests_of(AIPERF)[:5])
    ended, *streams = client(run, FILES / name, "--out", tmp_path / "report")
    assert ended == 2
    said = streams[1]
    assert f"{FILES / name} cannot be of the session {run}" in said
    assert "requests that succeeded: got 6, expected 5" in said and len(said.splitlines()) == 1
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (AIPERF, "1 of 6 requests have another number of output tokens than the session"),
        ("aiperf.json", "the client has 30 output tokens, the session 36"),
    ],
)
def test_other_tokens_make_a_session_doubtful(name: str, said: str, tmp_path: Path) -> None:
    first, *others = requests_of(AIPERF)
    run = session(tmp_path / "run", ids(AIPERF), [replace(first, output_tokens=11), *others])
    assert facts(run, FILES / name)["files"][0]["doubts"] == [said]
    assert f"Perhaps not of this session: {said}" in " ".join(client(run, FILES / name).out.split())


def test_requests_that_the_session_does_not_have_are_told(tmp_path: Path) -> None:
    run = session(tmp_path / "run", ids(AIPERF)[:4], requests_of(AIPERF)[:4])
    (told,) = facts(run, FILES / AIPERF)["files"]
    assert (told["pairs"], told["doubts"]) == (4, ["2 of 6 requests of the client are not in the session"])


@pytest.mark.parametrize("scale", [10, 0.5])
def test_simulated_seconds_of_a_scaled_session_are_divided(scale: float, aiperf: Path, tmp_path: Path) -> None:
    """All times of the server, none of the client's; and the reader is told."""
    run = shutil.copytree(aiperf, tmp_path / "scaled")
    changed(run / "env.json", time_scale=scale)
    plain, scaled = (facts(each, FILES / AIPERF)["files"][0]["measures"] for each in (aiperf, run))
    for measure, numbers in plain.items():
        assert scaled[measure]["client"] == numbers["client"]
        assert scaled[measure]["server"] == pytest.approx({name: v / scale for name, v in numbers["server"].items()})
    said = client(run, FILES / AIPERF)
    assert said.status == 0 and f"ran {scale:g} times as fast" in said.out


@pytest.mark.parametrize("value", [0, -1, "10", None, True, 1e999])
def test_a_scale_that_is_none_is_named(value: Any, aiperf: Path, tmp_path: Path) -> None:
    run = shutil.copytree(aiperf, tmp_path / "scaled")
    changed(run / "env.json", time_scale=value)
    said = client(run, FILES / AIPERF)
    assert said.status == 2 and "time_scale" in said.err


def test_a_session_that_was_late_is_told(aiperf: Path, tmp_path: Path) -> None:
    """Its tables have the modelled times, its clients the late ones."""
    run = shutil.copytree(aiperf, tmp_path / "late")
    for faithful, told in ((False, True), (True, False)):
        changed(run / "summary.json", served={"faithful": faithful, "lag_p99_s": 0.116, "lag_max_s": 0.137})
        late = "sent up to 137 ms late, 1 % of them 116 ms or more" in client(run, FILES / AIPERF).out
        assert late == told


def test_a_report_has_tables_and_a_figure_of_each_file(aiperf: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    assert client(aiperf, FILES / AIPERF, FILES / "aiperf.json", "--out", out).status == 0
    told = json.loads((out / "report.json").read_text())
    assert told["figures"] == ["client-1", "apart-1", "client-2"]
    assert all((out / "figures" / f"{key}.{kind}").stat().st_size for key in told["figures"] for kind in ("png", "svg"))
    assert [each["file"] for each in told["data"]["clients"]["files"]] == [AIPERF, "aiperf.json"]
    text = (out / "report.md").read_text()
    assert "| TTFT mean | 77 ms | 13 ms | +64 ms |" in text and "paired by id" in text
    assert client(aiperf, FILES / AIPERF, "--out", aiperf).status == 2


CHANGES = {
    AIPERF: (as_json_lines, edited, shuffled),
    "aiperf.json": (as_json, edited),
    VLLM: (as_json, edited),
    GUIDELLM: (as_json, edited),
}


@pytest.mark.parametrize("name", CHANGES)
def test_broken_files_end_with_a_status_and_a_short_message(name: str, aiperf: Path, tmp_path: Path) -> None:
    """Read, or refused in a line; never a traceback."""
    text, path, seen = (FILES / name).read_text(), tmp_path / "f", set()
    for case, rng in mutations.until(60, 15):
        path.write_text(rng.choice(CHANGES[name])(text, rng))

        seen.add(mutations.survived(f"{name} {case}", (0, 2), lambda: client(aiperf, path), path=aiperf))
    assert 2 in seen
