"""Simulated against measured: which workloads, what is simulated for them, and what lies there afterwards. What was
measured is never looked at here: the modelled device and made-up coefficients serve.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from cbsim.errors import ServerError

pytest.importorskip("torch", reason="the engine needs torch")

from support import calls
from support.engine.served import asked

from cbengine import build
from cbengine.build import Setup
from cbengine.cli import parser
from cbengine.errors import UsageError
from cbengine.measure import calibrate, predict, probes, suite
from cbengine.measure.suite import SuiteCase
from cbsim.cost.base import PHASES
from cbsim.metrics import bars
from cbsim.metrics.bars import BARS
from cbsim.runs import assemble
from cbsim.scenario import documents, scenario
from cbsim.scenario.scenario import Scenario

FOUND: dict[str, Any] = {
    "query_tokens": [{"tokens": 1, "s": 1e-3}, {"tokens": 64, "s": 2e-3}],
    "per_decode_row_s": 1e-5,
    "launch_s_per_layer": 0.0,
    "cpu": {phase: {"base_s": 1e-4, "per_request_s": 1e-6, "per_token_s": 0.0, "per_block_s": 0.0} for phase in PHASES},
}
SMALL = (
    *("model=tiny", "hardware=laptop-cpu", "workload.requests=4", "workload.prompt_tokens=20"),
    *("workload.output_tokens=6", "kv_cache={num_blocks: 400, block_size: 16}", "scheduler.max_num_seqs=4"),
)
CASES = {
    "plain": SuiteCase("plain", "batch", "as it is"),
    "slow": SuiteCase("slow", "cpu", "2 ms more", (), 2.0, curve="tiny"),
    "busy": SuiteCase("busy", "load", "arrivals", (), load=0.5),
}
REACH = probes.Reach(4, 64, 32, 256)


@pytest.fixture(scope="module", autouse=True)
def _simulator_here() -> Iterator[None]:
    """The simulator in this process: one of its own takes seconds to begin, and the first test of it has one."""

    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        said = calls.call(*words[3:])
        return subprocess.CompletedProcess(words, said.status, said.out, said.err)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predict, "subprocess", SimpleNamespace(run=run))
        yield


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three workloads of a tiny model on the modelled device, and short probes."""
    monkeypatch.setattr(suite, "cases", lambda device: CASES)
    monkeypatch.setattr(probes, "GPU_REACH", REACH)


def call(out: Path, *words: str) -> int:
    changes = [word for change in SMALL for word in ("--set", change)]
    return parser.main(["predict", "--device", "modelled", "--quick", "--out", str(out), *changes, *words])


class Measured(NamedTuple):
    """What a call left in a folder, its exit status, and what it said."""

    folder: Path
    status: int
    out: str


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """The three workloads, measured once for all tests."""
    out, said = tmp_path_factory.mktemp("validation"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(suite, "cases", lambda device: CASES)
        patch.setattr(probes, "GPU_REACH", REACH)
        status = call(out)
    return Measured(out / "cpu-modelled", status, said.getvalue())


def copied(whole: Measured, out: Path, *names: str) -> Path:
    """As the call of `whole` would have left `out`, had it been asked for these workloads."""
    place = out / "cpu-modelled"
    shutil.copytree(whole.folder, place)
    for case in (place / "validation").iterdir():
        if case.name not in names:
            shutil.rmtree(case)
    return place


def content(folder: Path) -> dict[str, str]:
    """Every file under a folder with when it was written."""
    return {str(path.relative_to(folder)): str(path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


# -- the workloads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda", "process"])
def test_cases_are_scenarios_and_differ(device: str) -> None:
    """Each loads with both loops, so that the speed-up is compared, too; each asks something else; a case under load
    can be given arrivals.
    """
    loaded = []
    for name, case in suite.cases(device).items():
        assert name == case.name
        ready = scenario.load(suite.base(device), case.overrides)
        assert scenario.loops(ready) == ("sync", "async")
        assert case.load is None or ready.workload.kind == "synthetic"
        loaded.append((scenario.dump(ready), case.injected_ms, case.load))
    assert len(set(loaded)) == len(loaded)


def test_a_name_is_a_workload_or_a_group() -> None:
    """All without one; in their own order and once each; one that is neither is an error that lists both."""
    everything = list(suite.cases("cuda").values())
    assert suite.chosen((), "cuda") == everything
    some = suite.chosen(("cpu-5", "chunk", "chunk-512"), "cuda")
    assert [case.name for case in some] == ["chunk-512", "chunk-2048", "chunk-8192", "cpu-5"]
    with pytest.raises(
        UsageError, match=r"case 'chunks': expected a group \(reference, load, .*cpu, 1b\) or a workload .*8k_b32"
    ):
        suite.chosen(("chunks",), "cuda")


# -- what is simulated ------------------------------------------------------------------------------------------------


def test_what_is_predicted_has_the_measured_coefficients_in_it() -> None:
    """All of them, and the injected work once, in the phase that was made longer."""
    for injected in (0.0, 4.0):
        wanted = predict.predictable(asked("vllm"), FOUND, injected)
        assert wanted.cost.kind == "fitted"
        cpu = wanted.cost.model_dump()["cpu"]
        for phase in PHASES:
            more = injected / 1e3 if phase == "prepare" else 0.0
            assert cpu[phase]["base_s"] == pytest.approx(1e-4 + more), phase
            assert cpu[phase]["per_request_s"] == 1e-6
        assert Scenario.model_validate(wanted.model_dump(mode="json")) == wanted
        assert assemble.cost_model(wanted)
    assert FOUND["cpu"]["prepare"]["base_s"] == 1e-4, "the calibration is left as it is"


def test_the_simulator_is_asked_as_a_user_asks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: summaries of both loops; its run directories stay, those of before do not. What it
    refuses is an error that says why, and what it warns of is said.
    """
    monkeypatch.setattr(predict, "subprocess", subprocess)
    few, said = asked("vllm", "workload.requests=2", "workload.output_tokens=3"), list[str]()
    for _ in range(2):
        found = predict.simulated(predict.predictable(few, FOUND, 0.0), tmp_path / "simulated", said.append)
    assert list(found) == ["sync", "async"]
    assert len(list((tmp_path / "simulated").iterdir())) == 2
    assert (tmp_path / "simulated.yaml").exists(), "what was asked can be asked again"
    assert not list(tmp_path.rglob("timeline.json.gz"))
    assert said == []
    calibrated = {"device": "d", "model": "8B", "dtype": "float32", "scheduler": "vllm", "commit": "c", "date": "2026"}
    other = FOUND | {"calibrated": calibrated | {"rows": 8, "tokens": 9999, "context_tokens": 9999}}
    predict.simulated(predict.predictable(few, other, 0.0), tmp_path / "simulated", said.append)
    assert "  warning: sync: beyond the calibration: the coefficients were measured with model 8B" in said[0]
    (tmp_path / "file").touch()
    with pytest.raises(ServerError, match=r"the simulator failed: cbsim: .*cannot be written"):
        predict.simulated(few, tmp_path / "file", said.append)


def test_a_curve_is_predicted_between_its_measured_points(
    small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where the CPU's work equals the GPU's the curve turns, and that need not be where somebody measured: the first
    case of a curve holds the simulated speed-up at other milliseconds.
    """
    monkeypatch.setattr(suite, "cases", lambda device: {"first": SuiteCase("first", "cpu", "0 ms", curve="tiny")})
    monkeypatch.setattr(suite, "PREDICTED_MS", (1, 3))
    call(tmp_path)
    place = tmp_path / "cpu-modelled" / "validation" / "first"
    predicted = json.loads((place / "case.json").read_text())["predicted"]
    assert list(predicted) == ["1", "3"] and 0 < predicted["1"] < 1
    assert sorted(path.name for path in place.iterdir()) == ["case.json", "measured", "simulated", "simulated.yaml"]


# -- the command ------------------------------------------------------------------------------------------------------


def test_from_probes_to_scores_and_on_from_there(
    small: None, whole: Measured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every workload is measured and simulated under both loops and told; a second call measures nothing again, and one
    that asks for a second measurement adds it. With `--later` nothing is simulated.
    """
    assert whole.status in (0, 3)
    place = copied(whole, tmp_path, *CASES)
    assert json.loads((place / "provenance.json").read_text())["device"].startswith("CPU (modelled)")
    for name, case in CASES.items():
        here = place / "validation" / name
        facts = json.loads((here / "case.json").read_text())
        assert (facts["name"], facts["load"], facts["curve"]) == (name, case.load, case.curve)
        assert (facts["rate_per_s"] is None) == (case.load is None)
        assert facts["predicted"] == {}, "a curve's other points lie beside its first, which is not among these"
        measured, simulated = (list((here / kind).iterdir()) for kind in ("measured", "simulated"))
        assert len(measured) == len(simulated) == 2
        for path in measured:
            command = json.loads((path / "env.json").read_text())["command"]
            assert (f"rate_per_s: {facts['rate_per_s']}" in command) == (case.load is not None), (
                "it runs the same again"
            )
            assert json.loads((path / "env.json").read_text())["injected_ms"] == {"prepare": case.injected_ms}
            assert not (path / "timeline.json.gz").exists() and (path / "steps.parquet").exists()
        assert whole.out.count(f"| {name} |") == 2 * (len(BARS) - 1) + 1
    (fitted,) = (place / "calibration").glob("*.yaml")
    assert fitted.name == "tiny-vllm.fitted.yaml"
    assert documents.read(fitted).data["calibrated"]["device"] == "CPU, modelled device: no GPU"

    kept = {name: when for name, when in content(place).items() if "measured" in name or "probes" in name}
    assert call(tmp_path, "busy", "--repeat", "2") in (0, 3)
    said = capsys.readouterr().err
    assert said.count("measuring sync") == said.count("measuring async") == 1
    assert "probe" not in said
    now = content(place)
    assert kept.items() <= now.items()
    assert len(list((place / "validation" / "busy" / "measured").iterdir())) == 4
    shutil.rmtree(place / "validation" / "busy" / "simulated")
    assert call(tmp_path, "busy", "--repeat", "2", "--later") == 0
    assert capsys.readouterr().out == f"predict   python -m cbengine predict --again {place}\n"
    assert not (place / "validation" / "busy" / "simulated").exists()


def test_without_a_device_what_was_measured_is_predicted_again(
    whole: Measured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--again` fits and simulates anew from what lies there, wherever it was measured: the same scores. A name
    chooses; one that is not there, and a folder that is none, are said.
    """
    place = copied(whole, tmp_path, "plain", "busy")
    before = "".join(line for line in whole.out.splitlines(keepends=True) if not line.startswith("| slow |"))
    monkeypatch.setattr(build, "adapted", None)  # no device is asked for
    assert parser.main(["predict", "--again", str(place)]) in (0, 3)
    after, said = capsys.readouterr()
    assert sorted(after.splitlines()) == sorted(before.splitlines())
    assert "measuring" not in said and "probe" not in said
    parser.main(["predict", "load", "--again", str(place)])
    assert {line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()[2:]} == {"| busy"}
    for words, says in (
        (["nothing", "--again", str(place)], f"case 'nothing': {place} has busy, plain"),
        (["--again", str(tmp_path)], f"{tmp_path}: holds no validation/CASE/case.json"),
    ):
        assert parser.main(["predict", *words]) == 2
        assert says in capsys.readouterr().err
    next((place / "calibration").glob("*.parquet")).unlink()
    assert parser.main(["predict", "--again", str(place)]) == 2
    assert "tiny-vllm.probes.parquet: no such file: nothing has been probed there" in capsys.readouterr().err


def test_coefficients_of_other_settings_are_not_taken_for_these(
    small: None, whole: Measured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other kernels, or half of a calibration: refused by name before anything is measured or written over."""
    copied(whole, tmp_path, "plain")
    assert call(tmp_path, "slow", "--set", "cost={kind: constant, step_s: 0.02}") == 2
    assert "tiny-vllm.fitted.yaml: was probed with another model, block size or cost" in capsys.readouterr().err
    (fitted,) = tmp_path.rglob("*.fitted.yaml")
    fitted.unlink()
    probed = calibrate.steps_of(fitted).read_bytes()
    assert call(tmp_path, "slow") == 2
    assert f"{fitted}: no such file, but tiny-vllm.probes.parquet is there" in capsys.readouterr().err
    assert calibrate.steps_of(fitted).read_bytes() == probed


def test_again_takes_no_options_of_a_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--set", "seed=1"], ["--repeat", "2"], ["--device", "process"], ["--quick"]):
        assert parser.main(["predict", "--again", "x", *words]) == 2
        assert "--again: measures nothing" in capsys.readouterr().err


def test_runs_of_another_scenario_are_not_taken_for_this_one(
    small: None, whole: Measured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied(whole, tmp_path, "plain")
    before = content(tmp_path)
    assert call(tmp_path, "plain", "--set", "workload.requests=5") == 2
    assert "was measured on another scenario than this call's: name another --out" in capsys.readouterr().err
    assert content(tmp_path) == before, "refused before anything is written"


def test_the_exit_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """3 if a bar is missed; under real timing on a CPU only for an absurd makespan. What was missed is on stderr."""
    summary = {
        "gpu_active": 0.5,
        "output_tokens_per_s": 1.0,
        "tpot_s": {"p50": 1.0, "p99": 1.0},
        "ttft_s": {"p50": 1.0},
    }
    for error, device, status in (
        (0.02, "modelled", 0),
        (0.05, "modelled", 3),
        (0.05, "process", 0),
        (0.3, "process", 3),
    ):
        ours, theirs = summary | {"makespan_s": 1 + error}, summary | {"makespan_s": 1.0}
        found = {"plain": bars.scores({"sync": ours}, {"sync": [theirs]}, None)}
        monkeypatch.setattr(predict.Session, "predict", lambda *_, found=found: found)
        assert parser.main(["predict", "--device", device, "--out", str(tmp_path)]) == status
        said = capsys.readouterr()
        assert said.out == predict.table(found) + "\n"
        assert said.err == (f"missed: plain, sync, makespan: {error:+.1%}\n" if status else "")


def test_the_modelled_device_captures_and_launches_as_a_gpu_does() -> None:
    """Decoding steps at a captured size, others kernel by kernel: 50 us a layer of the CPU's time, and no kernel ends
    before it is launched.
    """
    setup = Setup(device="modelled")
    ready = build.adapted(
        scenario.load("validation", [*SMALL, "cost={kind: roofline, launch_s_per_layer: 0.01}"]), setup
    )
    plans, steps, _ = probes._run(ready, "sync", setup)
    eager = [any(chunk.tokens > 1 for chunk in plan.work.chunks) for plan in plans]
    assert any(eager) and not all(eager)
    for at, plan, launched in zip(range(len(plans)), plans, eager, strict=True):
        tokens = plan.work.tokens
        took = steps.lane("launch")[at]
        assert (took >= 0.04e9) == launched
        assert steps["compute_end_ns"][at] >= steps["launch_start_ns"][at] + 0.04e9 or not launched
        assert steps["padded_tokens"][at] == (tokens if launched else {0: 0, 1: 1, 2: 2, 3: 4, 4: 4}[tokens])


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("case.json", "[]", "case.json: got [], expected a JSON object"),
        ("case.json", "{", "case.json: not valid JSON: "),
        ("case.json", "{}", "case.json: name: is required"),
        ("case.json", {"injected_ms": -5}, "case.json: injected_ms: got -5, must be >= 0"),
        ("case.json", {"injected_ms": None}, "case.json: injected_ms: "),
        ("case.json", {"load": "x"}, "case.json: load: "),
        ("summary.json", "{}", "summary.json: loop is nothing, expected sync or async"),
        ("summary.json", {"makespan_s": 0}, "summary.json: makespan_s is 0, expected a number >= 0"),
        ("summary.json", {"tpot_s": {"p50": "fast"}}, "summary.json: tpot_s.p50 is 'fast', expected a number >= 0"),
        ("scenario.resolved.yaml", "model: 5\n", "scenario.resolved.yaml"),
        ("scenario.resolved.yaml", None, "scenario.resolved.yaml"),
        (".probes.parquet", "no table", "not a calibration: "),
        (".fitted.yaml", "calibrated: 5\n", "not a calibration: "),
    ],
)
def test_what_lies_there_may_be_broken(
    whole: Measured, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: Any, says: str
) -> None:
    """File and field are named, nobody sees a traceback, and nothing is measured over."""
    place = copied(whole, tmp_path, "plain")
    target = next(path for path in sorted(place.rglob(f"*{name}")) if "simulated" not in str(path))
    if content is None:
        target.unlink()
    elif isinstance(content, dict):
        target.write_text(json.dumps(json.loads(target.read_text()) | content))
    else:
        target.write_text(content)
    capsys.readouterr()
    assert parser.main(["predict", "--again", str(place)]) == 2
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said
