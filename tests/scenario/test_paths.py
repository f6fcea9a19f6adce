"""Paths and names that no system can look up: refused with their field before a run begins."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.calls import SMALL, call, refused, runs

LONG = "x" * 5000
TOO_LONG = "a path has at most 1,000 characters, each name in it at most 255 bytes"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (f"name={LONG}", ("name: got 'xxx", "needs at most 150 characters")),
        (f"model={LONG}", ("model: got 'xxx", TOO_LONG)),
        (f"hardware={'x/' * 3000}", ("hardware: got 'x/x", TOO_LONG)),
        (f"workload={{kind: golden, path: {'ü' * 200}}}", ("workload.path: got 'üüü", TOO_LONG)),
        (f"workload.prompt_tokens={{empirical: {{path: {LONG}, column: a}}}}", ("empirical.path: got 'xxx", TOO_LONG)),
        (f"cost={{kind: table, path: {LONG}}}", ("cost.path: got 'xxx", TOO_LONG)),
        (f"cost={{kind: fitted, path: {LONG}}}", ("cost.path: got 'xxx", TOO_LONG)),
        ("cost={kind: table, path: 'a/*'}", ("cost.path: no tables 'a/*'",)),
        ('cost={kind: table, path: "a\\0b"}', ("cost.path: no tables 'a\\x00b'",)),
        (f"scheduler.name={LONG}", ("scheduler.name: got 'xxx",)),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_path_or_name_that_cannot_be_looked_up(tmp_path: Path, override: str, parts: tuple[str, ...]) -> None:
    """Exit 2, one line with the field; a * in the name of tables is a letter, not a wildcard."""
    (tmp_path / "small.yaml").write_text(SMALL)
    result = call("run", tmp_path / "small.yaml", "--set", override, "--out", tmp_path / "out")
    refused(result, 2, *parts)
    assert len(result.err) < 1000 + 2 * len(str(tmp_path))
    assert not (tmp_path / "out").exists()


def test_a_scenario_by_a_name_too_long() -> None:
    """The argument is a path like any other."""
    refused(call("run", LONG), 2, "cbsim: xxx", TOO_LONG)
    refused(call("run", f"{LONG}.yaml"), 2, "cbsim: xxx", TOO_LONG)


def test_a_long_file_name_still_names_its_run(tmp_path: Path) -> None:
    """The default name is the file's, cut so that the run directory can carry it too."""
    path = tmp_path / f"{'x' * 250}.yaml"
    path.write_text(SMALL)
    assert call("run", path, "--out", tmp_path / "out", "--quiet").status == 0
    assert "x" * 150 + "-sync" in runs(tmp_path / "out")[0].name
