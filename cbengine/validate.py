"""Simulated against measured, on whatever device there is: calibrate on probes, predict other workloads, run them.

The simulator is started as a user would start it, on the same scenario with the calibrated coefficients in it. On the
`modelled` device the kernels take exactly the scenario's cost model, so only the CPU's work and the loop are predicted,
and every metric has to agree within MODELLED_BOUND. On real CPU timing the table is published, and only an absurd
makespan fails.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cbengine import build, calibrate
from cbengine.build import Setup
from cbengine.calibrate import Calibration
from cbsim import runs, scenario, terminal
from cbsim.runs import Maker, RunOptions
from cbsim.scenario import Scenario

MODELLED_BOUND = 0.03
ABSURD = 0.25
BASE = "tiny_cpu"
ROWS, LONGEST = 16, 160  # what the probes cover: tiny_cpu's seats and sequences
METRICS = (  # label, metric, unit
    ("makespan", "makespan_s", "s"),
    ("output tokens/s", "output_tokens_per_s", "number"),
    ("TTFT p50", "ttft_s.p50", "s"),
    ("TPOT p50", "tpot_s.p50", "s"),
    ("TPOT p99", "tpot_s.p99", "s"),
    ("E2E p50", "e2e_s.p50", "s"),
    ("GPU active", "gpu_active", "fine share"),
)
SPEED_UP = "async speed-up"


@dataclass(frozen=True, slots=True)
class Case:
    """A workload that no probe has seen. `injected_ms` of CPU work are added to the phase `prepare` of every step."""

    name: str
    overrides: tuple[str, ...] = ()
    injected_ms: float = 0.0

    @property
    def slug(self) -> str:
        """Its folder: lower case, words joined by hyphens."""
        return "-".join(re.findall(r"[a-z0-9]+", self.name.lower()))


@dataclass(frozen=True, slots=True)
class Line:
    """One metric of one case and loop. `error` is relative, or in points of a share."""

    case: str
    loop: str
    metric: str
    simulated: float
    measured: float
    error: float


MODELLED = (
    "cost={kind: constant, step_s: 0.03, per_token_s: 4e-5}",
    "workload.requests=24",
)
CASES: dict[str, tuple[Case, ...]] = {
    "modelled": (
        Case("as it is", MODELLED),
        Case("12 ms of CPU", MODELLED, 12.0),
        Case("transformers, 6 ms of CPU", (*MODELLED, "scheduler.name=transformers_fifo"), 6.0),
    ),
    "process": (
        Case("as it is"),
        Case("4 ms of CPU", (), 4.0),
        Case("transformers, 4 ms of CPU", ("scheduler.name=transformers_fifo",), 4.0),
    ),
}


def validate(device: str, out: Path, maker: Callable[[Setup], Maker], say: Callable[[str], None]) -> list[Line]:
    """Calibrate, simulate and run every case of `device`.

    Run directories are left in `out`/CASE/simulated and `out`/CASE/measured.
    """
    setup = Setup(device="modelled" if device == "modelled" else "process")
    fixed = ("cost={kind: constant, step_s: 0.01}",) if device == "modelled" else ()
    base = build.adapted(scenario.load(BASE, fixed), setup)
    calibrate.check_writable(out / f"{device}.fitted.yaml")
    found = calibrate.calibrate(base, setup, say, rows=ROWS, longest=LONGEST, quick=True)
    calibrate.write(out / f"{device}.fitted.yaml", found, base, device)
    lines: list[Line] = []
    for case in CASES[device]:
        asked = build.adapted(scenario.load(BASE, case.overrides), setup)
        say(f"{case.name}: measuring")
        injected = replace(setup, injected=(("prepare", round(case.injected_ms * 1e6)),))
        place = out / case.slug
        options = _options(case, device, place / "measured")
        measured = {one: runs.one_loop(asked, one, options, maker(injected)).summary for one in scenario.loops(asked)}
        say(f"{case.name}: simulating")
        lines += compared(
            case.name, simulated(predictable(asked, found, case.injected_ms), place / "simulated"), measured
        )
    return lines


def _options(case: Case, device: str, out: Path) -> RunOptions:
    injected = ("--inject", f"prepare={case.injected_ms:g}") if case.injected_ms else ()
    return RunOptions(
        scenario=BASE,
        overrides=case.overrides,
        out=out,
        window=(0, 2000),
        span_s=None,
        conditions=(),
        as_json=False,
        quiet=True,
        command=("cbengine", "replay"),
        extra=("--device", device, *injected),
    )


def predictable(asked: Scenario, found: Calibration, injected_ms: float) -> Scenario:
    """The scenario with what was measured in it: all coefficients, or only the CPU's where the kernels are modelled."""
    cpu: dict[str, Any] = {name: dict(terms) for name, terms in found.coefficients["cpu"].items()}
    cpu["prepare"]["base_s"] += injected_ms / 1e3
    data = asked.model_dump(mode="json")
    if data["cost"]["kind"] == "constant":
        data["cost"]["cpu"] = cpu
    else:
        data["cost"] = {"kind": "fitted", **found.coefficients, "cpu": cpu}
    return Scenario.model_validate(data)


def simulated(asked: Scenario, out: Path) -> dict[str, Any]:
    """Summaries by loop, from `python -m cbsim run` on a scenario file that stays beside `out`."""
    file = out.with_name(f"{out.name}.yaml")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(scenario.dump(asked), encoding="utf-8")
    except OSError as error:
        raise runs.ServerError(f"{file}: cannot be written: {error.strerror or error}") from error
    words = [sys.executable, "-m", "cbsim", "run", str(file), "--out", str(out), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise runs.ServerError(f"the simulator failed: {done.stderr.strip()}")
    summaries: dict[str, Any] = json.loads(done.stdout)
    return summaries


def compared(case: str, predicted: dict[str, Any], measured: dict[str, Any]) -> list[Line]:
    """A line for every metric of every loop, and one for what the asynchronous loop gains."""
    lines = []
    for loop in measured:
        for label, metric, unit in METRICS:
            ours, theirs = (float(terminal.lookup(one[loop], metric)) for one in (predicted, measured))
            error = ours - theirs if unit.endswith("share") else ours / theirs - 1
            lines.append(Line(case, loop, label, ours, theirs, error))
    if len(measured) == len(("sync", "async")):
        ours, theirs = (one["sync"]["makespan_s"] / one["async"]["makespan_s"] - 1 for one in (predicted, measured))
        lines.append(Line(case, "both", SPEED_UP, ours, theirs, ours - theirs))
    return lines


def failures(device: str, lines: Sequence[Line]) -> list[Line]:
    """The lines that must not be: any beyond the bound where kernels are modelled, else an absurd makespan."""
    if device == "modelled":
        return [line for line in lines if not abs(line.error) <= MODELLED_BOUND]  # what is no number fails, too
    return [line for line in lines if line.metric == "makespan" and not abs(line.error) <= ABSURD]


def table(lines: Sequence[Line]) -> str:
    """The lines as a Markdown table."""
    units = {label: unit for label, _, unit in METRICS} | {SPEED_UP: "fine share"}
    rows = ["| case | loop | metric | simulated | measured | error |", "|---|---|---|---:|---:|---:|"]
    for line in lines:
        unit = units[line.metric]
        error = f"{line.error * 100:+.2f} pt" if unit.endswith("share") else f"{line.error:+.1%}"
        values = " | ".join(terminal.shown(value, unit) for value in (line.simulated, line.measured))
        rows.append(f"| {line.case} | {line.loop} | {line.metric} | {values} | {error} |")
    return "\n".join(rows)
