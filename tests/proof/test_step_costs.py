"""`bench steps`: each case runs long enough, and is timed over the steps that it is about."""

from __future__ import annotations

import pytest

from cbsim.cli.parser import main
from cbsim.proof import step_costs
from cbsim.results.directory import RunError
from cbsim.scenario.scenario import Scenario
from cbsim.server.assemble import scheduler


@pytest.mark.parametrize("name", step_costs.CASES)
def test_every_case_has_a_server(name: str) -> None:
    """Its cache is never short: it holds all that may run at once, to the end of what is timed."""
    scenario = Scenario.model_validate(step_costs.CASES[name])
    pool = scheduler(scenario, "sync").pool
    longest = step_costs.SKIPPED + step_costs.STEPS + 16
    assert pool.num_blocks * pool.block_size >= max(step_costs.RUNNING) * longest


def test_a_step_has_a_cost_and_a_case_lasts_as_long_as_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_costs, "SKIPPED", 3)
    monkeypatch.setattr(step_costs, "STEPS", 5)
    monkeypatch.setattr(step_costs, "REPEATS", 2)
    case = step_costs.CASES["64 running, nothing changes"]
    assert step_costs.microseconds(Scenario.model_validate(case)) > 0
    short = case | {"workload": case["workload"] | {"output_tokens": 4}}
    with pytest.raises(RunError, match=r"the case ends after \d steps, needs 8"):
        step_costs.microseconds(Scenario.model_validate(short))


def test_the_command_prints_a_line_a_case(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_costs, "_in_fresh_process", lambda name: float(len(name)))
    assert main(["bench", "steps"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{name:<40} {float(len(name)):8.1f} us a step" for name in step_costs.CASES]
