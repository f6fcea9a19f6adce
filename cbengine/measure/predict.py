"""A comparison of simulation and engine: calibrate on short probes, predict workloads that no probe contains, run them.

    OUT/<device>/provenance.json                         device, driver, versions, commit
    OUT/<device>/calibration/<model>-<scheduler>.fitted.yaml, .probes.parquet
    OUT/<device>/validation/<case>/case.json             the case, the rate of its arrivals
    OUT/<device>/validation/<case>/measured/<run>        one or more of each loop
    OUT/<device>/validation/<case>/simulated/<run>       one of each loop, and the scenario they come from

Measured runs are not measured again: a call continues where another stopped. Predictions are derived anew from the
probes' recorded steps, and `again` does only that: a better fit or simulator needs no device. The simulator is started
as a user would start it, on the same scenario with the calibrated coefficients in it.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from pydantic import Field

from cbengine import build, servers
from cbengine.build import Setup
from cbengine.errors import UsageError
from cbengine.measure import calibrate, probes, provenance, suite
from cbengine.measure.suite import SuiteCase
from cbsim.errors import ServerError
from cbsim.files import read_json
from cbsim.metrics import bars
from cbsim.metrics.bars import BARS, Score
from cbsim.metrics.terminal import lookup
from cbsim.record import directory
from cbsim.runs import run_command
from cbsim.runs.run_command import RunOptions
from cbsim.scenario import scenario as scenarios
from cbsim.scenario.demand import Synthetic
from cbsim.scenario.documents import Document
from cbsim.scenario.fields import Frozen, Real, shown
from cbsim.scenario.scenario import Scenario

ABSURD = 0.25  # on a CPU, whose own speed varies, only a makespan error above this is a defect of ours
Progress = Callable[[str], None]
Scores = Mapping[str, Sequence[Score]]  # of the runs of each case


class CaseFile(Frozen):
    """The content of case.json: the case, and what was determined when it was measured."""

    name: str
    group: str
    about: str
    model: str
    scheduler: str
    injected_ms: Annotated[Real, Field(ge=0, le=10_000)]
    load: Annotated[Real, Field(gt=0)] | None
    curve: str | None
    rate_per_s: Annotated[Real, Field(gt=0)] | None
    predicted: dict[str, float] = Field(default_factory=dict)


def again(names: Sequence[str], folder: Path, progress: Progress) -> Scores:
    """Predict again the cases (names, groups or all) of this folder, from its files alone. Raises UserError."""
    scored = {}
    for name, case in _measured_cases(names, folder).items():
        progress(name)
        own = folder / "validation" / name
        measured = {summary["loop"]: path for path, summary in _runs(own / "measured")}
        for loop in sorted({"sync", "async"} - measured.keys()):
            progress(f"  the {loop} loop was not measured: left out")
        if measured:
            ready = _both(next(iter(measured.values())) / "scenario.resolved.yaml")
            file = _coefficient_file(folder, ready)
            if not calibrate.steps_of(file).exists():
                raise UsageError(f"{calibrate.steps_of(file)}: no such file: nothing has been probed there")
            coefficients = calibrate.refit(file, ready.model.layers)
            scored[name] = _predict(own, case, ready, coefficients, progress)
    return scored


def _measured_cases(names: Sequence[str], folder: Path) -> dict[str, CaseFile]:
    """Return the cases in a folder, filtered by names and groups if there are any. Raises UsageError."""
    folders = sorted(path for path in (folder / "validation").glob("*/") if path.is_dir())
    cases = {path.name: case for path in folders if (case := _case_file(path / "case.json"))}
    known = {key for name, case in cases.items() for key in (name, case.group)}
    for name in names:
        if name not in known:
            raise UsageError(f"case {name!r}: {folder} has {', '.join(cases) or 'none'}")
    if not cases:
        unpack = f"; `python reports/hardware/packed.py unpack {folder}` writes them from the packed runs"
        packed = (folder / "runs.parquet").exists()
        raise UsageError(f"{folder}: holds no validation/CASE/case.json{unpack if packed else ''}")
    return {name: case for name, case in cases.items() if not names or {name, case.group} & set(names)}


def _both(file: Path) -> Scenario:
    """Return the scenario of a run, under both loops. Raises ScenarioError."""
    return scenarios.load(str(file), ["loop.mode=both"])


def _predict(
    folder: Path, case: CaseFile, ready: Scenario, coefficients: Mapping[str, Any], progress: Progress
) -> list[Score]:
    """Simulate a case, and the other points of its curve; return the scores against what was measured."""
    curve = {}
    if case.curve is not None and not case.injected_ms:
        curve = {f"{ms:g}": round(_gain(predictable(ready, coefficients, ms)), 6) for ms in suite.PREDICTED_MS}
    _write_case(folder, case.model_copy(update={"predicted": curve}))
    summaries = simulated(predictable(ready, coefficients, case.injected_ms), folder / "simulated", progress)
    measured: dict[str, list[dict[str, Any]]] = {}
    for _, summary in _runs(folder / "measured"):
        measured.setdefault(summary["loop"], []).append(summary)
    return bars.scores(summaries, measured, case.load)


def _write_case(folder: Path, case: CaseFile) -> None:
    provenance.write_json(folder / "case.json", case.model_dump(), ServerError)


def _gain(scenario: Scenario) -> float:
    """Return the asynchronous loop's simulated speed-up and keep no runs; the case itself has shown the warnings."""
    with TemporaryDirectory() as folder:
        return bars.speed_up(simulated(scenario, Path(folder) / "run", lambda _: None))


@dataclass(frozen=True, slots=True)
class Session:
    """A call of `predict`: its options, the number of runs of each loop among them, and the coefficients so far."""

    device: build.DeviceName
    out: Path
    overrides: Sequence[str]
    repeat: int
    quick: bool
    progress: Progress
    later: bool = False  # only measure: `again` predicts
    fitted: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.out / provenance.slug(self.device)

    @property
    def setup(self) -> Setup:
        return Setup(device=self.device)

    def predict(self, names: Sequence[str]) -> Scores:
        """Predict and run these cases and groups. Raises UsageError, ScenarioError, ServerError, RunError."""
        chosen = suite.chosen(names, self.device)
        for case in chosen:  # impossible cases are refused before anything is measured
            self.scenario(*case.overrides)
        provenance.begin(self.folder / "provenance.json", self.device)
        return {case.name: self.case(case) for case in chosen}

    def case(self, case: SuiteCase) -> list[Score]:
        folder = self.folder / "validation" / case.name
        self.progress(f"{case.name}: {case.about}")
        known, ready = _case_file(folder / "case.json"), self.scenario(*case.overrides)
        rate = known.rate_per_s if known and case.load is not None else None
        if rate is not None:  # the rate of the earlier measurements
            case, ready = self._arriving(case, rate)
        for loop in scenarios.loops(ready):  # runs of another scenario are refused before anything is written
            _complete(folder / "measured", loop, ready)
        coefficients = self._coefficients(ready)
        if case.load is not None and rate is None:
            rate = self._rate(case, ready, coefficients, folder)
            case, ready = self._arriving(case, rate)
        facts = {name: value for name, value in asdict(case).items() if name != "overrides"}
        described = CaseFile(**facts, model=ready.model.name, scheduler=ready.scheduler.name, rate_per_s=rate)
        _write_case(folder, described.model_copy(update={"predicted": known.predicted if known else {}}))
        self._measure(case, ready, folder / "measured")
        if self.later:
            return []
        return _predict(folder, described, ready, coefficients, self.progress)

    def _arriving(self, case: SuiteCase, rate: float) -> tuple[SuiteCase, Scenario]:
        """Return the case with Poisson arrivals at this rate, in requests a second."""
        arrivals = f"workload.arrivals={{kind: poisson, rate_per_s: {rate}}}"
        case = replace(case, overrides=(*case.overrides, arrivals))
        return case, self.scenario(*case.overrides)

    def scenario(self, *overrides: str) -> Scenario:
        scenario = scenarios.load(suite.base(self.device), [*overrides, *self.overrides])
        return build.adapted(scenario, self.setup)

    def _coefficients(self, ready: Scenario) -> dict[str, Any]:
        """Return the coefficients of the model and the family of schedulers; earlier probes are used again."""
        file = _coefficient_file(self.folder, ready)
        if file.name not in self.fitted:
            self.fitted[file.name] = self._calibrated(file, ready)
        return self.fitted[file.name]

    def _calibrated(self, file: Path, ready: Scenario) -> dict[str, Any]:
        steps, device = calibrate.steps_of(file), build.device_name(self.setup)
        if steps.exists() != file.exists():
            lost, there = (file, steps) if steps.exists() else (steps, file)
            raise UsageError(f"{lost}: no such file, but {there.name} is there: put it back, or remove that, too")
        if file.exists():
            calibrate.check_settings(file, ready, device)
            return calibrate.refit(file, ready.model.layers)
        calibrate.check_writable(file)
        shape = json.dumps(ready.model.model_dump(mode="json"))  # with every field, so that any model will do
        changes = [f"model={shape}", f"scheduler={{name: {ready.scheduler.name}}}"]
        probed, reach = self.scenario(*changes), probes.CPU_REACH if self.device == "process" else probes.GPU_REACH
        measured = calibrate.calibrate(probed, self.setup, self.progress, reach=reach, quick=self.quick)
        return calibrate.write(file, measured, probed, device)

    def _rate(self, case: SuiteCase, ready: Scenario, coefficients: dict[str, Any], folder: Path) -> float:
        """Return a loaded case's arrival rate in requests a second: its share of the simulated capacity."""
        assert case.load is not None
        if not isinstance(ready.workload, Synthetic):
            bound = f"must be synthetic for {case.name}, which is a load"
            raise UsageError(f"workload.kind: got {ready.workload.kind}, {bound}")
        count = ready.workload.requests * 4  # all at once, a queue so long that its ends do not matter
        flood = self.scenario(*case.overrides, f"workload.requests={count}", "loop.mode=sync")
        flooded = predictable(flood, coefficients, case.injected_ms)
        summary = simulated(flooded, folder / "capacity", self.progress)["sync"]
        return float(f"{case.load * summary['requests_per_s']:.4g}")

    def _measure(self, case: SuiteCase, ready: Scenario, out: Path) -> None:
        """Measure the missing runs. The loops' order alternates: a machine that becomes slower does so for both."""
        setup = replace(self.setup, injected=(("prepare", round(case.injected_ms * 1e6)),))
        loops = scenarios.loops(ready)
        for turn in range(self.repeat):
            for loop in loops if turn % 2 == 0 else loops[::-1]:
                if len(_complete(out, loop, ready)) > turn:
                    continue
                self.progress(f"  measuring {loop}")
                base, overrides = suite.base(self.device), (*case.overrides, *self.overrides)
                sets = (part for override in overrides for part in ("--set", override))
                injected = ("--inject", f"prepare={case.injected_ms:g}") if case.injected_ms else ()
                words = ("python", "-m", "cbengine", "replay", base, *sets, "--device", self.device, *injected)
                options = RunOptions(base, overrides, out, window=(0, 1), quiet=True, line=shlex.join(words))
                _trim(run_command.one_loop(ready, loop, options, servers.maker(setup)).folder)


def _coefficient_file(folder: Path, ready: Scenario) -> Path:
    """Return the coefficient file of a model and a family of schedulers."""
    parts = re.findall(r"[a-z0-9.]+", f"{ready.model.name} {ready.scheduler.name.partition('_')[0]}".lower())
    return folder / "calibration" / f"{'-'.join(parts)}.fitted.yaml"


def _complete(out: Path, loop: str, ready: Scenario) -> list[Path]:
    """Return the complete runs of this loop. Raises UsageError for one of another scenario, ScenarioError."""
    complete = [path for path, summary in _runs(out) if summary["loop"] == loop]
    for path in complete:
        if _served(_both(path / "scenario.resolved.yaml")) != _served(ready):
            raise UsageError(f"{path}: was measured on another scenario than this call's: name another --out")
    return complete


def _served(scenario: Scenario) -> dict[str, Any]:
    """Return what a measured run depends on in its scenario: neither the loop's mode nor the simulated CPU's cost."""
    return scenario.model_dump(mode="json", exclude={"loop": {"mode"}, "cost": {"cpu"}})


def _runs(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield complete run directories with their summaries, in the order in which they were made."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir() and not (path / directory.MARKER).exists():
            yield path, _summary(path / "summary.json")


def _summary(file: Path) -> dict[str, Any]:
    """Return the summary of a run, with checked scores. Raises UsageError."""
    summary = read_json(file, UsageError)
    if summary.get("loop") not in ("sync", "async"):
        raise UsageError(f"{file}: loop is {shown(summary.get('loop'))}, expected sync or async")
    for bar in BARS:
        value = lookup(summary, bar.metric) if bar.metric else None
        least = value is None or (isinstance(value, int | float) and value >= 0)
        if not least or (bar.metric == "makespan_s" and not value):
            raise UsageError(f"{file}: {bar.metric} is {shown(value)}, expected a number >= 0")
    return summary


def _case_file(file: Path) -> CaseFile | None:
    """Return the content of a case.json; None if there is none. Raises UsageError."""
    if not file.exists():
        return None
    return Document(str(file), None, read_json(file, UsageError), error_type=UsageError).checked(CaseFile)


def _trim(path: Path) -> None:
    """Remove the parts of a run that are large and can be made again."""
    for name in ("timeline.json.gz", "figures"):  # can be made again from its tables
        rest = path / name
        shutil.rmtree(rest) if rest.is_dir() else rest.unlink(missing_ok=True)


def predictable(scenario: Scenario, coefficients: Mapping[str, Any], injected_ms: float) -> Scenario:
    """Return the scenario with the measured coefficients, and the injected work in the phase that was made longer."""
    cpu: dict[str, Any] = {name: dict(terms) for name, terms in coefficients["cpu"].items()}
    cpu["prepare"]["base_s"] += injected_ms / 1e3
    data = scenario.model_dump(mode="json")
    data["cost"] = {"kind": "fitted", **coefficients, "cpu": cpu}
    return Scenario.model_validate(data)


def simulated(scenario: Scenario, out: Path, progress: Progress) -> dict[str, Any]:
    """Run `python -m cbsim run` on a scenario file kept beside `out`, and return summaries by loop. Replaces `out`."""
    file = out.with_name(f"{out.name}.yaml")
    shutil.rmtree(out, ignore_errors=True)
    provenance.write(file, scenarios.dump(scenario).encode(), ServerError)
    command = [sys.executable, "-m", "cbsim", "run", str(file), "--out", str(out), "--json"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    if done.returncode:
        raise ServerError(f"the simulator failed: {done.stderr.strip()}")
    for line in done.stderr.splitlines():
        progress(f"  {line}")
    for path, _ in _runs(out):
        _trim(path)
    summaries: dict[str, Any] = json.loads(done.stdout)
    return summaries


def failures(cases: Scores, *, absurd_only: bool) -> list[tuple[str, Score]]:
    """Return the bars that were missed; on a CPU under real timing only an absurd makespan error."""
    scores = [(case, score) for case, own in cases.items() for score in own]
    if absurd_only:
        return [(case, one) for case, one in scores if one.bar.label == "makespan" and not abs(one.error) <= ABSURD]
    return [(case, one) for case, one in scores if one.verdict == "missed"]


def table(cases: Scores) -> str:
    """Return the scores as a Markdown table."""
    rows = [
        "| workload | loop | metric | simulated | measured | error | repeats | bar |",
        "|---|---|---|---:|---:|---:|---:|---|",
    ]
    for case, own in cases.items():
        for score in own:
            apart = "" if score.spread is None else f"{score.spread * 100:.1f} {'pt' if score.bar.points else '%'}"
            cells = (case, score.loop, score.bar.label, *score.shown(), apart, score.verdict)
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)
