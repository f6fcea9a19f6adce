"""Simulated against measured: how the two are compared, on numbers made up, and what is simulated for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

from served import asked

from cbengine import calibrate, cli, commands, validate
from cbengine.calibrate import Calibration
from cbengine.validate import ABSURD, CASES, METRICS, MODELLED_BOUND, SPEED_UP, Line
from cbsim import assemble, documents, runs, scenario, terminal
from cbsim.cost.cpu import PHASES
from cbsim.scenario import Scenario

FOUND = Calibration(
    {
        "base_s": 1e-3,
        "per_decode_row_s": 1e-5,
        "launch_s_per_layer": 0.0,
        "cpu": {
            phase: {"base_s": 1e-4, "per_request_s": 1e-6, "per_token_s": 0.0, "per_block_s": 0.0} for phase in PHASES
        },
    },
    {},
    "little",
)


def summary(makespan_s: float, **others: Any) -> dict[str, Any]:
    """A summary with all that is compared; `others` by dotted name."""
    values = {metric: 1.0 for _, metric, _ in METRICS} | {"gpu_active": 0.5, "makespan_s": makespan_s} | others
    nested: dict[str, Any] = {}
    for metric, value in values.items():
        name, _, statistic = metric.partition(".")
        if statistic:
            nested.setdefault(name, {})[statistic] = value
        else:
            nested[name] = value
    return nested


# -- comparison -------------------------------------------------------------------------------------------------------


def test_a_time_is_compared_by_ratio_and_a_share_by_points() -> None:
    """Simulated 11 s against measured 10 s is +10 %; 80 % active against 75 % is +5 points, not +6.7 %."""
    predicted = {"sync": summary(11.0, **{"gpu_active": 0.8, "ttft_s.p50": 0.9})}
    lines = validate.compared("case", predicted, {"sync": summary(10.0, gpu_active=0.75)})
    assert [(line.case, line.loop) for line in lines] == [("case", "sync")] * len(METRICS)
    found = {line.metric: (line.simulated, line.measured, line.error) for line in lines}
    assert found["makespan"] == pytest.approx((11, 10, 0.1))
    assert found["GPU active"] == pytest.approx((0.8, 0.75, 0.05))
    assert found["TTFT p50"] == pytest.approx((0.9, 1, -0.1))
    assert found["E2E p50"] == (1, 1, 0)


def test_what_asynchrony_gains_is_compared_in_points() -> None:
    """12 s against 10 s is a gain of 20 %; measured 11 against 10 is 10 %: 10 points too many. One loop has no gain."""
    predicted = {"sync": summary(12.0), "async": summary(10.0)}
    measured = {"sync": summary(11.0), "async": summary(10.0)}
    lines = validate.compared("case", predicted, measured)
    assert len(lines) == 2 * len(METRICS) + 1
    assert lines[-1] == Line("case", "both", SPEED_UP, *(pytest.approx(gain) for gain in (0.2, 0.1, 0.1)))  # type: ignore[arg-type]
    one = {"async": summary(10.0)}
    assert {line.metric for line in validate.compared("case", one, one)} == {label for label, _, _ in METRICS}


def lines(*errors: tuple[str, float]) -> list[Line]:
    return [Line("case", "sync", metric, 1.0, 1.0, error) for metric, error in errors]


def test_modelled_kernels_leave_no_excuse() -> None:
    """Every metric too far off by more than the bound fails, in either direction; at the bound none does."""
    at, beyond = MODELLED_BOUND, MODELLED_BOUND * 1.001
    told = lines(("makespan", at), ("TTFT p50", -at), ("TPOT p99", beyond), ("GPU active", -beyond), (SPEED_UP, beyond))
    assert [line.metric for line in validate.failures("modelled", told)] == ["TPOT p99", "GPU active", SPEED_UP]


def test_on_real_timing_only_an_absurd_makespan_fails() -> None:
    told = lines(("makespan", ABSURD), ("TTFT p50", 3.0), ("GPU active", 0.9), ("makespan", -1.001 * ABSURD))
    assert validate.failures("process", told) == told[-1:]


def test_a_metric_that_is_no_number_fails() -> None:
    """NaN is no agreement."""
    assert validate.failures("modelled", lines(("makespan", float("nan"))))
    assert validate.failures("process", lines(("makespan", float("nan"))))


def test_the_table() -> None:
    """A Markdown table, a line each: ratios in percent, shares in points."""
    told = [Line("a", "sync", "makespan", 1.5, 1.0, 0.5), Line("a", "both", SPEED_UP, 0.201, 0.1, 0.101)]
    assert validate.table(told).splitlines() == [
        "| case | loop | metric | simulated | measured | error |",
        "|---|---|---|---:|---:|---:|",
        "| a | sync | makespan | 1.50 s | 1.00 s | +50.0% |",
        "| a | both | async speed-up | 20.10% | 10.00% | +10.10 pt |",
    ]


# -- what is simulated ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", CASES)
def test_cases_are_scenarios_and_differ(device: str) -> None:
    """Each loads with both loops, so that the speed-up is compared, too; each asks something else."""
    loaded = [(scenario.load(validate.BASE, case.overrides), case.injected_ms) for case in CASES[device]]
    assert all(scenario.loops(asked) == ("sync", "async") for asked, _ in loaded)
    assert len({(scenario.dump(asked), injected) for asked, injected in loaded}) == len(CASES[device])


def test_what_is_predicted_has_the_measured_coefficients_in_it() -> None:
    """All of them where kernels are real, the CPU's alone where they are modelled; the injected work is in the phase
    that was made longer, once.
    """
    real = validate.predictable(asked("vllm"), FOUND, 4.0)
    modelled = validate.predictable(asked("vllm", "cost={kind: constant, step_s: 0.02}"), FOUND, 0.0)
    assert real.cost.kind == "fitted"
    assert modelled.cost.kind == "constant"
    for wanted, injected in ((real, 4e-3), (modelled, 0.0)):
        cpu = wanted.cost.model_dump()["cpu"]
        for phase in PHASES:
            more = injected if phase == "prepare" else 0.0
            assert cpu[phase]["base_s"] == pytest.approx(1e-4 + more), phase
            assert cpu[phase]["per_request_s"] == 1e-6
        assert Scenario.model_validate(wanted.model_dump(mode="json")) == wanted
        assert assemble.cost_model(wanted)
    assert real.cost.model_dump()["base_s"] == 1e-3
    assert FOUND.coefficients["cpu"]["prepare"]["base_s"] == 1e-4, "the calibration is left as it is"


def test_the_simulator_is_asked_as_a_user_asks_it(tmp_path: Path) -> None:
    """Summaries of both loops; its run directories stay. What it refuses is an error that says why."""
    small = asked("vllm", "workload.requests=2", "workload.output_tokens=3")
    said = validate.simulated(validate.predictable(small, FOUND, 0.0), tmp_path / "simulated")
    assert list(said) == ["sync", "async"]
    assert len(list((tmp_path / "simulated").iterdir())) == 2
    assert (tmp_path / "simulated.yaml").exists(), "what was asked can be asked again"
    (tmp_path / "file").touch()
    with pytest.raises(runs.ServerError, match=r"the simulator failed: cbsim: .*cannot be created"):
        validate.simulated(small, tmp_path / "file")


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "status"), [(0.01, 0), (0.04, 3)])
def test_the_exit_status_and_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: float, status: int
) -> None:
    """3 if anything is too far apart, said on stderr; the table is printed and kept in either case."""
    told = lines(("makespan", error))
    monkeypatch.setattr(commands.validate, "validate", lambda *_: told)
    assert cli.main(["validate", "--device", "modelled", "--out", str(tmp_path)]) == status
    said = capsys.readouterr()
    assert said.out == validate.table(told) + "\n" == (tmp_path / "modelled.md").read_text()
    assert said.err == ("too far apart: case, sync, makespan: +4.0%\n" if status else "")


def test_a_case_from_measuring_to_the_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small case on the modelled device, the calibration made up: measured and simulated runs lie in the folder, and
    what was injected was given to the engine alone.
    """
    small = ("cost={kind: constant, step_s: 0.02}", "workload.requests=2", "workload.output_tokens=3")
    monkeypatch.setattr(validate, "CASES", {"modelled": (validate.Case("small", small, 2.0),)})
    monkeypatch.setattr(calibrate, "calibrate", lambda *_, **__: FOUND)
    simulated: list[Scenario] = []

    def answered(wanted: Scenario, out: Path) -> dict[str, Any]:
        simulated.append(wanted)
        return {loop: summary(0.1) for loop in scenario.loops(wanted)}

    monkeypatch.setattr(validate, "simulated", answered)
    found = validate.validate("modelled", tmp_path, commands.maker, lambda _: None)
    assert [line.loop for line in found] == ["sync"] * len(METRICS) + ["async"] * len(METRICS) + ["both"]
    for line, (_, metric, _) in zip(found, METRICS, strict=False):
        assert line.simulated == terminal.lookup(summary(0.1), metric)
    assert simulated[0].cost.model_dump()["cpu"]["prepare"]["base_s"] == pytest.approx(2.1e-3)
    assert documents.read(tmp_path / "modelled.fitted.yaml").data == FOUND.coefficients
    measured = list((tmp_path / "small" / "measured").iterdir())
    assert len(measured) == 2
    for path in measured:
        assert '"prepare": 2.0' in (path / "env.json").read_text()
        assert "python -m cbengine replay tiny_cpu" in (path / "env.json").read_text()
        assert "--device modelled --inject prepare=2" in (path / "env.json").read_text()
