"""vLLM's log of iterations: its steps as requests, beside those of the simulated server that made the steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.own_servers import SMALL

import cbsim
from cbsim.errors import RunError
from cbsim.measured.own.measurement import measurement

WORKLOAD = {
    "kind": "synthetic",
    "requests": 80,
    "prompt_tokens": {"uniform": {"low": 16, "high": 3000}},  # more than a step's tokens
    "output_tokens": {"uniform": {"low": 20, "high": 100}},
    "arrivals": {"kind": "poisson", "rate_per_s": 4},
}


def logged(run: cbsim.Result) -> Iterator[str]:
    """The steps of a run as vLLM 0.33 logs them: the wait for each, at the second of its end."""
    for at, step in enumerate(run.steps.to_pylist()):
        second, wait_ms = step["update_end_ns"] // 10**9, (step["await_end_ns"] - step["await_start_ns"]) / 1e6
        decoding = step["decode_rows"]
        rows = f"{step['rows'] - decoding} context requests, {step['prefill_tokens']} context tokens, "
        rows += (
            f"{decoding} generation requests, {decoding} generation tokens, iteration elapsed time: {wait_ms:.2f} ms"
        )
        stamp = f"11-14 06:{second // 60:02}:{second % 60:02}"
        yield f"(APIServer pid=7) INFO {stamp} [loggers.py:199] Engine 000: Iteration({at}): {rows}, GPU KV cache usage"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_steps_are_the_requests_that_made_them(mode: str, tmp_path: Path) -> None:
    """TPOT to two percent, as it is not known which of them ends; TTFT to a tenth, as the wait for a request's first
    step is a mean.
    """
    run = cbsim.run(cbsim.load(SMALL | {"workload": WORKLOAD, "loop": {"mode": mode}}))
    assert isinstance(run, cbsim.Result)
    path = tmp_path / "server.log"
    path.write_text("\n".join([f"non-default args: {{'async_scheduling': {mode == 'async'}}}", *logged(run)]))
    (load,) = measurement([path], {}).loads
    ours = {name: np.array(run.requests[name].to_pylist(), float) for name in ("ttft_s", "tpot_s", "prompt_tokens")}
    assert len(load) in (79, 80) and load.users is None, "one that ends with the log is left out"
    assert load.tpot_s.mean() == pytest.approx(ours["tpot_s"].mean(), rel=0.02)
    assert load.ttft_s.mean() == pytest.approx(ours["ttft_s"].mean(), rel=0.1)
    assert load.prompt_tokens.mean() == pytest.approx(ours["prompt_tokens"].mean(), rel=0.02)


LINE = "INFO 11-14 06:00:{:02} Iteration({}): 0 context requests, 0 context tokens, 2 generation requests, "
LINE += "2 generation tokens, iteration elapsed time: 100.00 ms"
STEPS = [LINE.format(at // 10, at) for at in range(99)]


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (STEPS[:30], "decodes for 1 s without a pause, needs 5 s"),
        ([*STEPS, STEPS[0].replace("2 generation tokens", "5 generation tokens")], "of speculative decoding"),
        ([*STEPS, STEPS[0].replace("Iteration", "Engine 001: Iteration")], "is of several engines"),
        ([*STEPS, STEPS[0].replace("11-14", "13-14")], "does not match format"),
        (STEPS, "no request in it has succeeded"),
    ],
)
def test_a_log_that_does_not_show_requests(lines: list[str], complaint: str, tmp_path: Path) -> None:
    """The last one holds only steps of requests that began before it did."""
    (tmp_path / "log").write_text("\n".join(lines))
    with pytest.raises(RunError, match=complaint):
        measurement([tmp_path / "log"], {})
