"""Rate ladders of fleets: reading, the client's stages, simulated stages, the bars. All data are made up."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from cbsim.errors import ScenarioError
from cbsim.record.columns import NS
from reports.fidelity.fleets import ladder, make
from reports.fidelity.fleets.ladder import GAP_S, Stage

HEADER = "set,arm,router,engine,rate,stage_s,output_tok_s,ttft_mean_s,ttft_p50_s,ttft_p90_s"
ROWS = """x1,service,by connection,e,4,5,200,0.3,,0.5
x1,service,by connection,e,2,5,100,,,0.2
x1,service,warm-up stage,e,15,50,150,,0.9,
x1,llm-d,scorers,e,2,5,100,,,
x1,llm-d,scorers,e,4,5,400,0.1,,
x1,llm-d,scorers,e,peak,,500,,,
x2,precise,scorers,e,2,5,90,0.4,,
x9,llm-d,scorers,e,2,5,90,0.4,,
"""
SERVERS = """
x1: &one
  prompts: {groups: 3, each: 2, shared: 32, own: 16, output: 4}
  front_s: 0.5
  scenario:
    model: tiny
    hardware: h100-sxm
    scheduler: {name: vllm, version: "0.19", max_num_seqs: 64, max_num_batched_tokens: 512, max_model_len: 128}
    kv_cache: {block_size: 16, num_blocks: 400}
    loop: {mode: sync}
    cost: {kind: constant, step_s: 0.01}
  fleet: {pools: [{count: 2}]}
  arms:
    service: {router: {name: kubernetes_service}}
    llm-d: {router: {name: llmd}, front_s: 0.25, cost: {step_s: 0.02}, chosen: {4: front_s}}
x2: {<<: *one, against: x1, arms: {precise: {router: {name: llmd, index: precise}}}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "llm-d_ladder.csv").write_text(f"{HEADER}\n{ROWS}")
    (tmp_path / "servers.yaml").write_text(SERVERS)
    monkeypatch.setattr(ladder, "SERVERS", tmp_path / "servers.yaml")
    monkeypatch.setattr(ladder, "WARM_UP_S", (3.0, 2.0))
    return tmp_path


def test_stages_are_read_by_rate_the_warm_up_first_and_peaks_not_at_all(folder: Path) -> None:
    arms = {str(arm): arm for arm in ladder.read(folder, {})}
    assert list(arms) == ["x1 service", "x1 llm-d", "x2 precise", "x9 llm-d"]
    service = arms["x1 service"].stages
    assert [(at, stage.rate) for at, stage in service.items()] == [(0, 15.0), (1, 2.0), (2, 4.0)]
    assert service[2].ttft_s == {"mean": 0.3, "p90": 0.5}
    assert list(arms["x1 llm-d"].stages) == [1, 2]
    assert arms["x9 llm-d"].own is None  # nothing is known of its servers


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"set": "x3"}, "set: got 'x3', expected one of x1, x2, x9"),
        ({"rate": "3"}, "rate: got '3', expected one of set, arm"),
        ({"set": "x9"}, "no servers that are known: x9 llm-d"),
    ],
)
def test_arms_that_are_not_there_are_an_error(folder: Path, where: dict[str, str], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        ladder.read(folder, where)


def test_a_folder_without_ladders_and_a_rate_that_is_no_number_are_errors(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="none of llm-d_ladder"):
        ladder.read(tmp_path / "elsewhere", {})
    (folder / "llm-d_ladder.csv").write_text(f"{HEADER}\nx1,service,r,e,fast,5,1,,,\n")
    with pytest.raises(ScenarioError, match=r"llm-d_ladder.csv:2: rate: got .*fast"):
        ladder.read(folder, {})


def test_every_stage_begins_with_the_first_prompt_of_one_order(folder: Path) -> None:
    arm = ladder.read(folder, {"set": "x1", "arm": "service"})[0]
    stages = ladder.requests(arm, seed=1)
    assert [len(stage) for stage in stages] == [6, 10, 20]
    order = [spec.prefix for spec in stages[0]]
    assert sorted(order) == [(group, 6 + prompt) for group in range(3) for prompt in (2 * group, 2 * group + 1)]
    assert all([spec.prefix for spec in stage] == (order * 4)[: len(stage)] for stage in stages)
    assert all(spec.block_key(1, 16) == spec.prefix[0] << 24 | 1 for spec in stages[0])  # shared by a group
    assert all(spec.block_key(2, 16) == spec.prefix[1] << 24 | 2 for spec in stages[0])  # the prompt's own
    assert all(a.arrival_ns <= b.arrival_ns for stage in stages for a, b in pairwise(stage))
    assert ladder.requests(arm, seed=1)[2][5].arrival_ns == stages[2][5].arrival_ns
    assert ladder.requests(arm, seed=2)[2][5].arrival_ns != stages[2][5].arrival_ns


def test_a_stage_follows_the_last_answer_of_the_one_before(folder: Path) -> None:
    first, second = ladder.requests(ladder.read(folder, {"arm": "service"})[0], seed=0)[:2]
    follow = ladder.Stages([first[:3], second])
    ended = [follow.after(spec, at_ns) for spec, at_ns in zip(first, (5 * NS, 9 * NS, 7 * NS), strict=False)]
    assert [len(each) for each in ended] == [0, 0, len(second)]
    assert ended[2][0].arrival_ns - second[0].arrival_ns == (9 + GAP_S) * NS


def test_a_simulated_stage_is_seen_from_its_client(folder: Path) -> None:
    """Steps take 10 or 20 ms whatever they hold: TTFT is one or two and the front's latency, an answer four or five."""
    service, routed = ladder.read(folder, {"set": "x1"})
    for arm, step_s, front_s in ((service, 0.01, 0.5), (routed, 0.02, 0.25)):
        seen = ladder.climb(arm, 3, [])
        assert seen.keys() == arm.stages.keys()
        last = seen[2]
        assert front_s + step_s - 1e-6 <= last.ttft_s["p50"] <= last.ttft_s["p90"] <= front_s + 2 * step_s + 1e-6
        sent_s = [spec.arrival_ns / NS for spec in ladder.requests(arm, 3)[2]]
        span_s = sent_s[-1] - sent_s[0] + front_s
        assert 80 / (span_s + 5 * step_s + 1e-6) <= last.output_tok_s <= 80 / (span_s + 4 * step_s - 1e-6)
        assert last.hits == 2 / 3  # the same six prompts again: all full blocks but the last of each
    assert ladder.climb(service, 3, []) == ladder.climb(service, 3, [])
    assert ladder.climb(service, 3, ["cost.step_s=0.5"])[2].output_tok_s < ladder.climb(service, 3, [])[2].output_tok_s


def climbed(arm: ladder.Arm, output: float, ttft: float) -> make.Climbed:
    """Every published number times a factor, in two draws around it."""
    draws = [
        {
            number: Stage(
                stage.rate,
                stage.stage_s,
                stage.output_tok_s * output * of,
                {name: value * ttft * of for name, value in stage.ttft_s.items()},
                0.5,
            )
            for number, stage in arm.stages.items()
        }
        for of in (0.9, 1.1)
    ]
    return make.Climbed(arm, draws)


def test_the_bars(folder: Path) -> None:
    arms = {str(arm): arm for arm in ladder.read(folder, {})}
    service = climbed(arms["x1 service"], 1.05, 1.2)
    assert [service.verdict(number) for number in (0, 1, 2)] == ["", make.WITHIN, make.WITHIN]
    assert climbed(arms["x1 service"], 1.05, 1.45).verdict(2) == make.BEYOND
    assert climbed(arms["x1 service"], 1.05, 1.40).verdict(2) == make.WITHIN  # 0.3 may be 0.35, of which 0.42 is 20 %
    late = replace(arms["x1 service"], stages={**arms["x1 service"].stages, 3: Stage(8, 5, 200, {"mean": 1.0})})
    assert climbed(late, 1, 9).verdict(3) == ""  # five times 0.2 s: saturated
    routed = climbed(arms["x1 llm-d"], 1.25, 2)
    assert [routed.verdict(number) for number in (1, 2)] == ["", make.CHOSEN]  # no TTFT; looked at
    assert [row[-1] for row in make.peaks([service, routed]).rows] == [make.WITHIN, make.BEYOND]


def test_ratios_are_to_the_service_of_the_set_or_of_the_one_it_is_against(folder: Path) -> None:
    arms = ladder.read(folder, {})
    found = [climbed(arms[0], 1, 1), climbed(arms[1], 1.3, 1), climbed(arms[2], 1.1, 1)]
    names = [row[0] for row in make.ratios(found).rows]
    assert names == [
        *(f"x1 llm-d, {at}" for at in ("2/s", "4/s", "peak")),
        *(f"x2 precise, {at}" for at in ("2/s", "peak")),
    ]
    assert make.ratios(found).rows[1][1:] == ("2.00", "2.60", "+30.0%", make.BEYOND)
    assert make.ratios(found).rows[3][1:] == ("0.90", "0.99", "+10.0%", make.WITHIN)


def test_the_command_prints_the_tables_of_a_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["make", str(folder), "--where", "set=x1", "--draws", "1"])
    make.main()
    printed = capsys.readouterr().out
    assert "x1 service, warm-up" in printed
    assert "Ratio to the Service" in printed
    monkeypatch.setattr("sys.argv", ["make", str(folder), "--where", "set=x7"])
    with pytest.raises(SystemExit) as error:
        make.main()
    assert error.value.code == 2
    assert "got 'x7'" in capsys.readouterr().err
