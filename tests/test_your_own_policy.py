"""The policy of docs/your_own_policy.md, exactly as it stands there: in both worlds, replayed, reported, listed."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_policy import TEXT
from support.calls import call, refused, runs

from analysis.cli.parser import main as analysis
from cbsim.runs.replan import rederive
from cbsim.schedulers import registry

NAME = 'scheduler={name: "shortest:SHORTEST", seats: 2}'


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """`shortest.py` in the folder where the user works."""
    path = tmp_path / "shortest.py"
    path.write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield path
    sys.modules.pop("shortest", None)


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) < 120
    assert len([line for line in TEXT.splitlines() if line.strip()]) < 100


@pytest.mark.parametrize("loop", ["sync", "async"])
def test_it_runs_simulated_is_derived_again_and_reported(small: Path, out: Path, loop: str) -> None:
    """The shortest prompt that waits goes first, the plans are derived again, a report is made."""
    said = call("run", small, "--set", NAME, "--loop", loop, "--out", out, "--quiet")
    assert (said.status, said.err) == (0, "")
    (run,) = runs(out)
    verdict = rederive(run)
    assert verdict.difference is None
    assert verdict.matched == verdict.steps > 0
    assert "shortest:SHORTEST" in (run / "scenario.resolved.yaml").read_text()
    assert analysis(["report", str(run), "--out", str(out / "report")]) == 0


@pytest.mark.parametrize("loop", ["sync", "async"])
def test_it_runs_on_the_engine(out: Path, loop: str) -> None:
    pytest.importorskip("torch", reason="the engine needs torch")
    from cbengine.cli.parser import main

    words = ["--set", NAME, "--set", "workload.requests=5", "--loop", loop, "--device", "inline", "--quiet"]
    assert main(["replay", "tiny_cpu", *words, "--out", str(out)]) == 0
    (run,) = runs(out)
    assert rederive(run).difference is None


def test_its_settings_are_checked(small: Path, out: Path) -> None:
    for fields, *words in (
        ('name: "shortest:SHORTEST", seats: 0', "seats", ">= 1"),
        ('name: "shortest:SHORTEST", seat: 1', "unknown field", "seats"),
        ('name: "shortest:NONE"', "shortest:NONE", "AttributeError"),
        ('name: "nowhere:KIND"', "nowhere", "ModuleNotFoundError"),
    ):
        refused(call("run", small, "--set", f"scheduler={{{fields}}}", "--out", out), 2, *words)


LINE, ROW, CHUNK = "        self.waiting.sort(", "if left and request.scheduled", "min(request.uncomputed, left), ())"
BREAKS = {  # what the text becomes another text in, and what is said of it
    "forgets": (LINE, f"        self.requests.pop(spec)\n{LINE}", "step 0, idle", "has not ended"),
    "no-request": (
        *(ROW, f"self.requests.pop(request.spec, None)\n            {ROW}"),
        *("step", "which is not one of the requests"),
    ),
    "a-block-twice": (CHUNK, CHUNK.replace("()", "(0,)"), "step", "in the pool"),
    "over-budget": ("tokens=self.step_tokens", "tokens=10", "step 0", "query tokens, 10 are allowed"),
    "raises": (LINE, f"        raise OSError('no file is read')\n{LINE}", "step 0, add", "OSError: no file is read"),
    "a-stolen-table": (
        *(".admit(request)", ".admit(request)\n            self.pool.tables[request] = [0]"),
        *("step", "breaks a rule"),
    ),
    "guesses": (CHUNK, CHUNK.replace(", ()", " + 1, (), guesses=1"), "schedule", "may yield several tokens"),
    "not-made": (
        *("        self.options, self", "        1 / 0\n        self.options, self"),
        *("cannot be made", "ZeroDivisionError"),
    ),
}


@pytest.mark.parametrize("fault", BREAKS)
def test_what_it_breaks_is_said_in_a_line(module: Path, small: Path, out: Path, fault: str) -> None:
    """Exit 1, one line with the scheduler's name: it is the policy's error, not ours."""
    before, after, *words = BREAKS[fault]
    assert before in TEXT
    module.write_text(TEXT.replace(before, after))
    said = call("run", small, "--set", NAME, "--out", out, "--quiet")
    refused(said, 1, "shortest:SHORTEST", *words)


def test_an_entry_point_is_listed_and_in_the_schema(small: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package's scheduler has a name of its own everywhere."""
    entry = importlib.metadata.EntryPoint("shortest", "shortest:SHORTEST", registry.GROUP)
    monkeypatch.setattr(
        registry, "entry_points", lambda group, name=None: [entry] if name in (None, "shortest") else []
    )
    assert "shortest prompt first" in call("list").out
    assert call("schema", "--out", out / "schemas").status == 0
    assert "ShortestSettings" in json.dumps(json.loads((out / "schemas" / "scenario.schema.json").read_text()))
    assert call("run", small, "--set", "scheduler.name=shortest", "--out", out / "runs", "--quiet").status == 0
    assert call("replan", *runs(out / "runs")).status == 0
