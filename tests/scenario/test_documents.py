"""YAML as an attacker or an accident writes it, and paths and names that no system can look up: read in a moment, or
refused in short lines that name the place, before a run begins.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.calls import SMALL, Said, call, refused, runs

import cbsim
from cbsim.errors import UserError
from cbsim.scenario import documents

SCALE = 400  # far beyond what is allowed, yet quick to write down


def served(tmp_path: Path, content: str) -> Said:
    path = tmp_path / "s.yaml"
    path.write_text(content)
    return call("run", path, "--out", tmp_path / "out")


def bomb(levels: int) -> str:
    """Lists of nine lists of nine lists ...: 9 ** levels values in about 50 characters a level."""
    rows = [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(["x0: &x0 [a, a, a, a, a, a, a, a, a]", *rows, ""])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bomb(7) + SMALL, ":5: not valid YAML: holds too many values, must be <= 12,000, aliases written out"),
        (f"a: &a {'x' * 9000}\nb: [{'*a, ' * 2000}]\n", ":2: not valid YAML: holds too many values"),
        (SMALL + f"# {'x' * documents.MOST_BYTES}\n", ": is too large, must be <= 500,000 bytes"),
        (SMALL + f"a: {'[' * SCALE}{']' * SCALE}\n", ":12: not valid YAML: nested too deeply, must be <= 40 levels"),
        ("x0: &x0 [1]\n" + "".join(f"x{i}: &x{i} [*x{i - 1}]\n" for i in range(1, SCALE)), "nested too deeply"),
        (SMALL + "a: &a [*a]\n", ":12: not valid YAML: *a stands inside of what it names"),
        (SMALL + "a: &a 1\nb: &a [*a]\n", ":13: not valid YAML: *a stands inside of what it names"),
        (SMALL + "a: !!omap [b: 1]\n", ":12: not valid YAML: tag tag:yaml.org,2002:omap is not known here"),
        (SMALL + "a: !!int x\n", ":12: not valid YAML: got 'x', expected a whole number"),
        (SMALL + "a: 2026-13-51\n", ":12: not valid YAML: got '2026-13-51', expected timestamp"),
        (SMALL + f"seed: {'9' * 5000}\n", ":12: not valid YAML: got '999"),
        (SMALL + f"seed: 0x{'f' * 5000}\n", ":12: seed: got a number of thousands of digits, must be <"),
        (SMALL + f"question: {'x' * 5000}\n", ":12: not valid YAML: found duplicate key"),
        (SMALL + '"a\\nb": 1\n', ":12: a\\nb: unknown field"),
    ],
)
def test_a_text_that_would_become_too_much_is_one_short_line(tmp_path: Path, content: str, message: str) -> None:
    """Aliases that expand to millions of values, depth, size and tags: exit 2, the line, the bound, and no more."""
    result = served(tmp_path, content)
    assert (result.status, result.out) == (2, "")
    assert message in result.err
    assert len(result.err.splitlines()) == 1
    assert len(result.err) < 300 + len(str(tmp_path))


def test_aliases_within_the_bounds_are_read(tmp_path: Path) -> None:
    """Anchors, aliases, merge keys and a name given twice are ordinary YAML."""
    path = tmp_path / "s.yaml"
    path.write_text("a: &a {x: 1, y: [2]}\nb: {<<: *a, x: 3}\nc: &a 5\nd: *a\n")
    read = documents.read(path)
    assert read.data == {"a": {"x": 1, "y": [2]}, "b": {"x": 3, "y": [2]}, "c": 5, "d": 5}
    assert [read.line(("b", "x")), read.line(("a", "y", 0)), read.line(("nowhere",))] == [2, 1, None]


def test_hundreds_of_mistakes_are_told_by_their_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """400 bad entries: 20 lines and how many more; the file is parsed once, not again for every line number."""
    parses: list[object] = []
    compose = documents.YAML.compose
    monkeypatch.setattr(
        documents.YAML, "compose", lambda yaml, content: (parses.append(content), compose(yaml, content))[1]
    )
    entries = "".join("  - x\n" for _ in range(SCALE))
    result = served(tmp_path, SMALL.replace("loop:\n", f"  priorities:\n{entries}loop:\n").replace("  - ", "    - "))
    lines = result.err.splitlines()
    assert result.status == 2
    assert len(lines) == 21
    assert lines[1].endswith("s.yaml:12: workload.priorities.1: got 'x', expected a whole number")
    assert lines[-1].endswith("s.yaml: 380 more mistakes are not listed")
    assert sum("priorities" in str(content) for content in parses) == 1


def test_what_is_accepted_can_be_read_again(tmp_path: Path) -> None:
    """The longest samples that a scenario may hold, written out with every default, stay within the bounds."""
    sample = f"{{empirical: {{values: [{'12345678, ' * 5000}]}}}}"
    content = SMALL.replace("{uniform: {low: 20, high: 90}}", sample).replace("{uniform: {low: 2, high: 30}}", sample)
    result = served(tmp_path, content)
    assert result.status == 0, result.err
    (resolved,) = tmp_path.glob("out/*/scenario.resolved.yaml")
    assert len(documents.read(resolved).data["workload"]["prompt_tokens"]["empirical"]["values"]) == 5000
    sample = f"{{empirical: {{values: [{'1, ' * 5001}]}}}}"
    result = served(tmp_path, SMALL.replace("{uniform: {low: 20, high: 90}}", sample))
    assert "workload.prompt_tokens.empirical.values: got [1, 1" in result.err
    assert "needs at most 5000 entries" in result.err


def test_an_override_is_cut_in_its_error(tmp_path: Path) -> None:
    """What a user typed is repeated as far as it helps."""
    path = tmp_path / "s.yaml"
    path.write_text(SMALL)
    with pytest.raises(UserError) as caught:
        documents.parse("[" * SCALE, "--set x", lines=False)
    assert len(str(caught.value)) < 200
    result = call("run", path, "--set", f"workload.requests={'x' * 5000}")
    assert (result.status, len(result.err.splitlines())) == (2, 1)
    assert len(result.err) < 500


# -- paths and names ---------------------------------------------------------------------------------------------------

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
        ("cost={kind: table, path: 'a/*'}", ("cost.path: no folder of tables 'a/*'",)),
        ('cost={kind: table, path: "a\\0b"}', ("cost.path: no folder of tables 'a\\x00b'",)),
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


def test_a_long_file_name_still_names_its_run(tmp_path: Path) -> None:
    """The default name is the file's, cut so that the run directory can carry it too; a name too long is a path like
    any other.
    """
    for name in (LONG, f"{LONG}.yaml"):
        refused(call("run", name), 2, "cbsim: xxx", TOO_LONG)
    path = tmp_path / f"{'x' * 250}.yaml"
    path.write_text(SMALL)
    assert call("run", path, "--out", tmp_path / "out", "--quiet").status == 0
    assert "x" * 150 + "-sync" in runs(tmp_path / "out")[0].name


@pytest.mark.parametrize("file", ["x" * 200, "-.a b", "größe (2)", "…", "9.5"])
def test_a_file_gives_a_name_that_fits(file: str) -> None:
    """Whatever the file or the folder of a case is called."""
    name = documents.name_of(file, "usual")
    assert cbsim.load("8k_b32", {"name": name}).name == name
    assert (name == "usual") == (file == "…")
