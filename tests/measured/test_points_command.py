"""`score-points` and reports/calibrate_terms.py from end to end, on made-up servers whose tables are in closed form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import engine_folder
from test_points_built import HEADER, POINT, changed

from analysis.statistics import loading, trust
from cbsim.cli.parser import main
from cbsim.measured.own.least_squares import Prior
from cbsim.measured.points import build, published, score
from cbsim.scenario import catalog, terms
from cbsim.sweeps.work import Here
from reports import calibrate_terms
from reports.calibrate_terms import Calibration, calibrations

TRUTH = {"layer_s": 2e-5, "reduce_s@2": 4e-6, "reduce_s@4": 6e-6, "front_s": 0.02}
PRIORS = {
    "layer_s": Prior(1e-5, 1e-5, 3e-6),
    "reduce_s@2": Prior(2e-6, 4e-6, 2e-6),
    "reduce_s@4": Prior(3e-6, 4e-6, 2e-6),
    "front_s": Prior(0.01, 0.02, 0.01),
}
MADE = Calibration(
    name="made", about="Made-up servers.", backend="vllm", systems=("h200_sxm",), family="dense", more=PRIORS
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder: tables of a card, six points of three servers that our own simulator made with TRUTH, and the
    terms that are calibrated on them.
    """
    place = tmp_path_factory.mktemp("data")
    engine_folder.make(place / build.TABLES / "h200_sxm", "vllm_0.18.0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CBSIM_DATA", str(place))
        build.tables_of.cache_clear()
        rows = [_row(tensor, prompt, users) for tensor, prompt in ((2, 128), (4, 128), (2, 512)) for users in (2, 8)]
        broken = _line(POINT.model_dump() | {"id": "x", "curve": "x", "mode": "disagg"})
        folder = place / "points"
        folder.mkdir()
        (folder / "measured.csv").write_text("\n".join([HEADER, *rows, broken]) + "\n")
        patch.setattr(calibrate_terms, "calibrations", lambda: {"made": MADE})
        assert calibrate_terms.main(["--data", str(folder), "--jobs", "1", "--out", str(place)]) == 0, "all: that one"
        build.tables_of.cache_clear()
    return place


def _row(tensor: int, prompt: int, users: int) -> str:
    point = changed(tensor=tensor, prompt=prompt, output=64, concurrency=users)
    values = terms.resolve(TRUTH, tensor, point.system, point.version)
    front = values.pop("front_s")
    (means,) = score.predict([build.build(point, values)], Here())
    assert isinstance(means, published.Means)
    name = f"{tensor}-{prompt}"
    fields = point.model_dump() | {"id": f"{name}-{users}", "curve": name, "mode": "agg"}
    return _line(fields | {"ttft_ms": means.ttft_ms + 1e3 * front, "tpot_ms": means.tpot_ms})


def _line(fields: dict[str, object]) -> str:
    names = {"isl": "prompt", "osl": "output", "tp_size": "tensor", "model_path": "model", "backend_version": "version"}
    names |= {"attention_dp_size": "attention_ranks", "moe_tp_size": "experts_tensor", "moe_ep_size": "experts_ranks"}
    names |= {"silicon_ttft_ms": "ttft_ms", "silicon_tpot_ms": "tpot_ms"}
    cells = {**fields, "first_of_duplicates": True, "batch_size": ""}
    return ",".join(str(cells[names.get(column, column)]) for column in HEADER.split(","))


@pytest.fixture
def calibrated(servers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same, with its terms as the project's only ones."""
    monkeypatch.setenv("CBSIM_DATA", str(servers))
    scenarios = tmp_path / "scenarios"
    scenarios.mkdir()
    for part in ("models", "hardware"):
        (scenarios / part).symlink_to(catalog.SCENARIOS / part)
    (scenarios / "terms").mkdir()
    (scenarios / "terms" / "made.yaml").symlink_to(servers / "made.yaml")
    monkeypatch.setattr(catalog, "SCENARIOS", scenarios)
    terms.every.cache_clear()
    build.tables_of.cache_clear()
    yield servers
    terms.every.cache_clear()
    build.tables_of.cache_clear()


def test_the_terms_that_made_the_points_are_found(calibrated: Path) -> None:
    """Each with its interval, and without each of the three curves; those say how sure a prediction is."""
    file = terms.load("made")
    assert file.terms["layer_s"].value == pytest.approx(2e-5, rel=0.2)
    assert file.terms["front_s"].value == pytest.approx(0.02, rel=0.1)
    assert sorted(file.curves) == ["2-128", "2-512", "4-128"]
    assert all(abs(each.tpot) < 0.05 for name in ("2-128", "2-512") for each in file.curves[name].residuals)
    assert all(0.05 < each.tpot < 0.3 for each in file.curves["4-128"].residuals), "nobody else knows 4 GPUs"


def test_every_calibration_has_been_made() -> None:
    assert set(calibrations()) == set(catalog.names("terms"))


def test_every_prior_is_that_of_a_term_and_its_scope() -> None:
    """The table gives a field for each card or version, all-reduces by GPUs, and exceptions to usual priors."""
    every = calibrations()
    for each in every.values():
        assert {name.partition("@")[0] for name in each.priors} <= {*terms.FIELDS}
        assert terms.resolve({name: prior.value for name, prior in each.priors.items()}, 8, each.systems[0], "")
    experts = every["vllm-experts"].priors
    assert [name for name in experts if "@" in name] == [f"layer_s@0.1{at}.0" for at in (6, 8)] + [
        "reduce_s@4",
        "reduce_s@8",
    ]
    assert experts["layer_s@0.16.0"].value == 6e-5 != experts["layer_s@0.18.0"].value == 3e-5


def test_points_are_scored_with_terms_that_their_curve_did_not_teach(
    calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["score-points", "--data", str(calibrated / "points"), "--store", str(tmp_path / "store"), "--jobs", "1"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["points"], len(found["predicted"])) == (7, 6)
    assert found["not_built"]["by_reason"] == {build.APART: 1}
    assert found["not_built"]["by_set"] == [{"reasons": [build.APART], "points": 1}]
    assert found["not_built"]["points"] == {"x": [build.APART]}
    assert all(each["terms"] == {"file": "made", "curve": each["id"].rpartition("-")[0]} for each in found["predicted"])
    assert all(abs(each["errors"]["tpot"]) < 0.2 for each in found["predicted"])
    assert found["classes"]["dense, vLLM, H100 and H200"]["points"] == 6
    runs = sorted((tmp_path / "store").rglob("summary.json"))
    assert main([*words, "--where", "tp_size=4", "--out", str(tmp_path / "report")]) == 0
    said = capsys.readouterr().out
    assert "2 points, 2 can be built, 0 cannot" in said and "h200_sxm vllm Llama-3.1-70B TP4 128/64" in said
    assert sorted((tmp_path / "store").rglob("summary.json")) == runs, "nothing is simulated twice"
    assert (tmp_path / "report" / "figures" / "residuals.png").is_file()


def test_a_run_says_how_sure_it_is(calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A scenario with calibrated terms prints them with their intervals, and where it leaves what they rest on. A
    report of the run repeats the latter.
    """
    cost = f"{{kind: table, path: {build.TABLES}/h200_sxm, engine: vllm, tensor_parallel: 4, terms: made}}"
    scenario = tmp_path / "mine.yaml"
    scenario.write_text(
        "question: How fast?\nmodel: llama-3.1-70b\nhardware: h200-sxm\nworkload: {kind: synthetic, requests: 4, "
        f"prompt_tokens: 64, output_tokens: 8}}\nscheduler: {{name: vllm}}\nloop: {{mode: async}}\ncost: {cost}\n"
    )
    assert main(["run", str(scenario), "--out", str(tmp_path / "runs")]) == 0
    said = "".join(capsys.readouterr())
    assert "terms made, with 80 % intervals: layer_s" in said
    assert "tables of vllm_0.18.0 and terms made" in said, "without a version: the tables that the terms add to"
    for text in ("weights in bfloat16", "arrivals that are no closed loop"):
        assert f"beyond the calibration: {text}, unlike what the terms made were calibrated on" in said
    assert "in place of" not in said
    runs = loading.read([*(tmp_path / "runs").iterdir()])
    (caveat,) = [each for each in trust.caveats(runs) if each.kind == "calibration"]
    unlike = "unlike what the terms made were calibrated on"
    assert caveat.reason.count(unlike) == said.count("beyond the calibration: ")
    words = ["--set", "cost.layer_s=1", "--set", "cost.fastest=false", "--set", "loop.mode=sync"]
    words += ["--set", "scheduler={name: sglang}", "--set", "workload.arrivals={kind: closed_loop, users: 99}"]
    assert main(["run", str(scenario), "--out", str(tmp_path / "runs"), *words]) == 0
    said = "".join(capsys.readouterr())
    for text in ("layer_s 1 in place of", "fastest false", "a synchronous loop", "engine sglang", "99 users"):
        assert f"beyond the calibration: {text}" in said
    assert "80 % intervals: reduce_s" in said, "what was given is no calibrated term"
    resolved = next((tmp_path / "runs").rglob("scenario.resolved.yaml"))
    assert main(["run", str(resolved), "--out", str(tmp_path / "again")]) == 0


def test_mistakes_are_told(calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["score-points", "--data", str(tmp_path / "none")], "--data: got"),
        (["score-points", "--where", "isl"], "argument --where: 'isl': expected FIELD=VALUE"),
        (["score-points", "--where", "isl=1,isl=2"], "argument --where: 'isl=1,isl=2': expected FIELD=VALUE"),
        (["score-points", "--where", "isl=1", "--where", "isl=2"], "argument --where: isl is given twice"),
        (["score-points", "--data", str(calibrated / "points"), "--where", "bogus=1"], "--where bogus: is no column"),
    ):
        assert _status(main, words) == 2, words
        assert message in capsys.readouterr().err


def test_mistakes_of_a_calibration_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["nothing"], "argument NAME: invalid choice: 'nothing' (choose from vllm-dense, "),
        (["--data", str(tmp_path / "none")], "reports.calibrate_terms: --data: got"),
        (["--bogus"], "unrecognized arguments: --bogus"),
    ):
        assert _status(calibrate_terms.main, words) == 2, words
        assert message in capsys.readouterr().err


def _status(program: Callable[[list[str]], int], words: list[str]) -> int:
    try:
        return program(words)
    except SystemExit as stop:
        return int(stop.code or 0)
