"""`cbsim tune`: knobs as they are written, and searches whose answer is known from the scenario."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.calls import SMALL, call, out, refused, small  # noqa: F401

import cbsim
from cbsim.errors import ScenarioError
from cbsim.metrics.checks import objective, parse
from cbsim.search import tune
from cbsim.search.racing import Goal
from cbsim.search.tune import Tuned
from cbsim.sweeps.store import Progress, Runs, Store
from cbsim.sweeps.work import Here

# -- knobs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("512..4096", [512, 1024, 2048, 4096]),
        ("512..4000", [512, 1024, 2048]),
        ("0.1..0.5", [0.1, 0.2, 0.4]),
        ("1..4:1", [1, 2, 3, 4]),
        ("0.5..1:0.25", [0.5, 0.75, 1]),
        ("1e2..4e2", [100, 200, 400]),
        ("vllm,sglang", ["vllm", "sglang"]),
        ("8, 16 ,8", [8, 16]),
        ("true,false", [True, False]),
        ("16", [16]),
        ("[null, 4]", [None, 4]),
        ("[{name: vllm}, {name: tgi}]", [{"name": "vllm"}, {"name": "tgi"}]),
    ],
)
def test_knobs_are_ranges_or_lists(text: str, values: list[Any]) -> None:
    assert list(tune.parse_knobs([f"scheduler.x={text}"])["scheduler.x"]) == values


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["x"], "--knob x: expected FIELD=A..B"),
        (["=1..2"], "expected FIELD=A..B"),
        (["x="], "expected FIELD=A..B"),
        (["x=8..2"], "--knob x=8..2: got 2, must be > 8"),
        (["x=0..2"], "--knob x=0..2: got 0.0, must be > 0 where it doubles; x=A..B:STEP may begin with less"),
        (["x=1..2:0"], "must be > 0"),
        (["x=1..9e9:1"], "more than 100,000 values"),
        *(
            ([f"x={values}"], "expected FIELD=A..B")
            for values in ("1.2.3..4", "4..", "..4", "1...4", "a..b", "4..8:", "1..\uff14")
        ),
        (["x=[1, 2"], "not valid YAML"),
        (["x=1,2", "x=3"], "x has another knob"),
    ],
)
def test_knobs_that_are_none(texts: list[str], says: str) -> None:
    with pytest.raises(ScenarioError, match="--knob") as error:
        tune.parse_knobs(texts)
    assert says in str(error.value)


# -- searches ---------------------------------------------------------------------------------------------------------

CONSTANT = """\
question: A step takes as long whatever is in it, so more seats are more tokens; which is known without a run.
model: llama-3.1-8b
hardware: h200-sxm
workload:
  {kind: synthetic, requests: 12, prompt_tokens: 16, output_tokens: {uniform: {low: 8, high: 16}},
  arrivals: {kind: at_once}}
scheduler: {name: vllm}
loop: {mode: sync}
cost: {kind: constant, step_s: 0.01}
slo: {ttft_s: 1}
"""


@pytest.fixture
def constant(tmp_path: Path) -> Path:
    path = tmp_path / "constant.yaml"
    path.write_text(CONSTANT)
    return path


def tuned(scenario: Path, store: Path, knob: str, goal: Goal) -> Tuned:
    return tune.tune(tune.candidates(scenario, [], tune.parse_knobs([knob]), goal), goal, Runs(Store(store), Here()))


def goal(name: str = "throughput", *conditions: str, most: int = 5) -> Goal:
    return Goal(objective(name, ""), [parse(text, "--check") for text in conditions], 0.95, most)


def test_more_seats_win_where_steps_cost_the_same(constant: Path, tmp_path: Path) -> None:
    """12 seats hold all; 24 seats are the same, and the search says so."""
    found = tuned(constant, tmp_path / "store", "scheduler.max_num_seqs=1,4,12,24", goal())
    outcome = found.outcome
    assert outcome.best is not None and found.settings(outcome.best) == {"scheduler.max_num_seqs": 12}
    assert [found.settings(i)["scheduler.max_num_seqs"] for i in outcome.left] == [12, 24]
    assert outcome.against(3).none and not outcome.won
    said = tune.study(found)
    assert "max_num_seqs=12: the best of them, and 1 the same in every replicate." in said.findings
    assert [row[-1] for row in said.tables[0].rows] == ["best mean", "the same", "worse", "worse"]


def test_where_the_seed_changes_nothing_no_confidence_is_claimed(constant: Path, tmp_path: Path) -> None:
    """All requests are given, as those of a trace: a candidate has one run, and a difference no interval; the same of
    a sweep's table, whatever the number of its replicates."""
    constant.write_text(CONSTANT.replace("{uniform: {low: 8, high: 16}}", "16"))
    store = tmp_path / "store"
    found = tuned(constant, store, "scheduler.max_num_seqs=1,4", goal())
    assert len([*(store / "runs").glob("*/*")]) == 2
    said = tune.study(found)
    assert said.data["confidence"] is None
    text = " ".join(said.findings)
    assert "without an interval" in text and "from" not in text and "confidence" not in text
    assert {row[-4:-2] for row in said.tables[0].rows} == {("-", "-")}
    sweep = tmp_path / "sweep.yaml"
    axes = "axes: {scheduler.max_num_seqs: [1, 4]}\nreplicates: 3\n"
    sweep.write_text(f"name: still\nscenario: {constant.name}\n{axes}")
    assert call("sweep", sweep, "--store", store, "--jobs", "1", "--quiet").status == 0
    contrast = call("contrast", store / "still.parquet", "--by", "max_num_seqs", "--metric", "throughput")
    assert contrast.status == 0 and "without an interval" in contrast.out, contrast


def test_the_best_number_of_drafts(constant: Path, tmp_path: Path) -> None:
    """Steps cost the same, and each draft 0.3 of one: (1 - 0.7^(k+1)) / 0.3 / (1 + 0.3 k) is 1.31, 1.37 and 1.26 for
    1, 2 and 4 drafts. All requests are given, but which drafts come true is drawn, so a difference has an interval."""
    acceptance = "acceptance: {rate: 0.7}, drafter: {fraction: 0.3}"
    text = CONSTANT.replace("{uniform: {low: 8, high: 16}}", "400")
    constant.write_text(text + f"speculation: {{method: eagle, k: 1, {acceptance}}}\n")
    found = tuned(constant, tmp_path / "store", "speculation.k=1..6", goal(most=10))
    outcome = found.outcome
    assert [found.settings(at)["speculation.k"] for at in range(3)] == [1, 2, 4]
    assert outcome.best is not None and found.settings(outcome.best) == {"speculation.k": 2}
    assert outcome.won and not found.still


def test_a_condition_takes_the_best_away(constant: Path, tmp_path: Path) -> None:
    """Whoever waits for a seat breaks a limit on TTFT; of the others the fewest seats are best for nothing but this."""
    found = tuned(
        constant, tmp_path / "store", "scheduler.max_num_seqs=1,4,12", goal("min:throughput", "ttft.max<=15ms")
    )
    assert found.outcome.won and found.called(2) == "max_num_seqs=12" and found.outcome.best == 2
    assert {trial.why for trial in found.outcome.trials[:2]} == {"ttft.max<=15ms"}


def test_a_fleet_is_tuned_by_servers_and_router(constant: Path, tmp_path: Path) -> None:
    """Of one seat each more servers do more, most of it in turns; a GPU without a price is named with its pool."""
    constant.write_text(f"{CONSTANT}fleet: {{pools: [{{name: a}}, {{}}], router: {{name: session_hash}}}}\n")
    knobs, most = tune.parse_knobs(["fleet.pools.0.count=1,3", "fleet.router.name=session_hash,round_robin"]), goal()
    of = tune.candidates(constant, ["scheduler.max_num_seqs=1"], knobs, most)
    found = tune.tune(of, most, Runs(Store(tmp_path / "store"), Here()))
    assert found.best == {"fleet.pools.0.count": 3, "fleet.router.name": "round_robin"}
    knobs = tune.parse_knobs(["fleet.router.virtual_nodes=1,160"])
    assert len(tune.candidates(constant, [], knobs, most)) == 2
    unpriced = ["fleet.pools.1.server.hardware=l40s", "fleet.pools.1.server.hardware.price_usd_hour=null"]
    with pytest.raises(ScenarioError, match=r"needs --set fleet.pools.1.server.hardware.price_usd_hour"):
        tune.candidates(constant, unpriced, knobs, goal("cost.usd_per_million_tokens"))


def test_loops_are_candidates(constant: Path, tmp_path: Path) -> None:
    """A scenario with both loops is tuned over them; where the CPU costs nothing they are the same."""
    of = tune.candidates(constant, ["loop.mode=both"], tune.parse_knobs(["scheduler.max_num_seqs=12"]), goal())
    found = tune.tune(of, goal("requests_per_s"), Runs(Store(tmp_path / "store"), Here()))
    assert [found.called(i) for i in range(2)] == ["max_num_seqs=12, loop=sync", "max_num_seqs=12, loop=async"]


def test_a_search_goes_on_where_it_stopped(constant: Path, tmp_path: Path) -> None:
    """The second search runs nothing; one with more replicates runs what is new. The numbers are the same."""
    begun: list[int] = []

    class Begun(Progress):
        def begin(self, total: int) -> None:
            begun.append(total)
            super().begin(total)

    of = tune.candidates(constant, [], tune.parse_knobs(["scheduler.max_num_seqs=4,6"]), goal())
    runs = Runs(Store(tmp_path / "store"), Here(), Begun(silent=True))
    results = [tune.tune(of, goal(most=most), runs) for most in (3, 3, 5)]
    assert begun == [6, 0, 4]
    assert results[0].outcome.trials == results[1].outcome.trials
    assert results[2].outcome.trials[0].runs[:3] == results[0].outcome.trials[0].runs


def test_from_python(constant: Path, tmp_path: Path) -> None:
    """The same search: an answer with the settings, and one that prints as the command does."""
    knob = {"scheduler.max_num_seqs": [1, 4]}
    found = cbsim.tune(constant, knob, "throughput", slo=["ttft.p99<=9s"], replicates=3, store=tmp_path / "store")
    assert found.best == {"scheduler.max_num_seqs": 4} and found.won
    assert "max_num_seqs=4: the best that keeps the conditions, with a confidence of at least 0.95." in str(found)
    with pytest.raises(ScenarioError, match="replicates: got 1, must be from 2"):
        cbsim.tune(constant, knob, "throughput", replicates=1)


# -- the command ------------------------------------------------------------------------------------------------------


def test_tune_says_what_it_found(constant: Path, tmp_path: Path) -> None:
    words = ("--knob", "scheduler.max_num_seqs=1..4", "--maximise", "throughput", "--check", "ttft.p99<=9s")
    more = ("--replicates", "3", "--store", tmp_path / "store", "--jobs", "1", "--json")
    said = call("tune", constant, "--loop", "async", *words, *more)
    assert said.status == 0
    found = json.loads(said.out)
    assert found["best"] == {"scheduler.max_num_seqs": 4}
    run = next((tmp_path / "store" / "runs").glob("*/*/summary.json"))
    assert json.loads(run.read_text())["loop"] == "async"
    assert found["won"] and found["sure_to_hold"]
    assert [len(each["values"]["output_tokens_per_s"]) for each in found["candidates"]] == [3, 3, 3]
    assert found["candidates"][0]["behind_best"]["high"] < 0
    nobody = call("tune", constant, *words[:-1], "ttft.p99<=1us", *more[:-1], "--out", tmp_path / "report")
    assert nobody.status == 3
    assert "No candidate keeps all conditions." in nobody.out
    assert "--check 'ttft.p99<=1us'" in (tmp_path / "report" / "report.md").read_text()
    assert nobody.out.endswith(f"\nreport    {tmp_path / 'report' / 'report.md'}\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--knob", "scheduler.max_num_seq=1..4"), ("max_num_seq: unknown field", "did you mean max_num_seqs?")),
        (("--knob", "nosuch=1"), ("cbsim: --knob: point 0 (nosuch=1): nosuch: unknown field",)),
        (
            ("--knob", "scheduler.max_num_seqs=1,2", "--set", "nosuch=1"),
            ("point 0 (scheduler.max_num_seqs=1) and 1 more: --set nosuch=1: nosuch: unknown field",),
        ),
        (("--knob", "scheduler.max_num_seqs=4..1"), ("got 1, must be > 4",)),
        (
            ("--knob", "scheduler.max_num_seqs=8,16", "--set", "scheduler.max_num_seqs=4"),
            ("cbsim: --set scheduler.max_num_seqs: is set by --knob, too; expected one of them",),
        ),
        (
            ("--knob", "scheduler=[{name: vllm, max_num_seqs: 2}]", "--set", "scheduler.max_num_seqs=4"),
            ("cbsim: --set scheduler.max_num_seqs: is set by --knob, too; expected one of them",),
        ),
        (("--knob", "loop.mode=sync,async", "--loop", "sync"), ("--set loop.mode: is set by --knob, too",)),
        (("--knob", "scheduler.name=vllm", "--check", "tttf.p99<=1s"), ("--check 'tttf.p99<=1s'", "did you mean")),
        (("--knob", "scheduler.name=vllm", "--set", "slo=null"), ("slo",)),
        (("--knob", "seed=1,2"), ("seed is no knob", "replicates take seeds of their own")),
        (("--knob", "scheduler.name=vllm", "--replicates", "1"), ("'1': expected a whole number from 2 to 10,000",)),
        (("--knob", "scheduler.name=vllm", "--confidence", "10%"), ("'10%': expected a share from 0.5",)),
    ],
)
def test_mistakes_run_nothing(constant: Path, tmp_path: Path, words: tuple[str, ...], says: tuple[str, ...]) -> None:
    said = call("tune", constant, "--maximise", "goodput", "--store", tmp_path / "store", *words)
    assert said.status == 2 and not said.out and "Traceback" not in said.err
    assert [word for word in says if word not in said.err] == []
    assert not (tmp_path / "store").exists()


def test_a_mistake_of_many_values_is_told_once(constant: Path, tmp_path: Path) -> None:
    """... whatever its numbers are, with the first value and how many others there are."""
    words = ("--maximise", "goodput", "--store", tmp_path / "store", "--knob", "scheduler.max_num_seqs=1..10000000000")
    said = call("tune", constant, *words, "--set", "scheduler.max_num_batched_tokens=64")
    head, *lines = said.err.splitlines()
    assert (said.status, head) == (2, "cbsim: --knob: 27 points cannot be built; nothing was run")
    assert len(lines) == 1 and lines[0].startswith("  point 7 (scheduler.max_num_seqs=128) and 26 more: ")


def test_nothing_is_announced_before_a_refusal(small: Path, tmp_path: Path) -> None:  # noqa: F811
    """How many candidates there are says nothing where their runs cannot be stored."""
    words = ("--knob", "scheduler.max_num_seqs=1..4", "--maximise", "throughput", "--store", small)
    refused(call("tune", small, *words), 2, f"--store {small}: cannot be written")


def test_metrics_that_no_run_will_have_are_refused(small: Path, tmp_path: Path) -> None:  # noqa: F811
    words = ("--knob", "scheduler.max_num_seqs=1..4", "--store", tmp_path / "store")
    refused(call("tune", small, *words, "--maximise", "goodput"), 2, "small has no slo", "--set slo.ttft_s=2")
    unpriced = ("--set", "hardware.price_usd_hour=null")
    cost = "cost.usd_per_million_tokens"
    refused(call("tune", small, *words, *unpriced, "--minimise", cost), 2, "has no price")
