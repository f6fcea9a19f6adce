"""The verbs of the three command lines: none means two things, each shows an example, old names say the new one."""

from __future__ import annotations

import argparse
import shlex

import pytest

from analysis.cli import parser as analysis
from cbengine.cli import arguments as engine_arguments
from cbengine.cli import parser as engine
from cbsim.cli import parser as simulator

LINES = {
    "cbsim": (simulator.main, simulator._parser, simulator.RENAMED),
    "cbengine": (engine.main, engine_arguments.command_line, engine_arguments.RENAMED),
    "analysis": (analysis.main, analysis._parser, analysis.RENAMED),
}
OLD = [(module, old, new) for module, (_, _, names) in LINES.items() for old, new in names.items()]


def verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """A command line's commands, by name."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(commands.choices)


VERBS = [(module, verb) for module, (_, make, _) in LINES.items() for verb in verbs(make())]


def test_no_verb_means_two_things() -> None:
    """`serve` means one thing: the same endpoint, in front of a simulated server or a real one."""
    names = [verb for pair in VERBS if pair != ("cbengine", "serve") for verb in pair[1:]]
    assert ("cbsim", "serve") in VERBS
    assert len(set(names)) == len(names)
    assert {"run", "conformance", "list", "schema", "bench", "replan", "score"} <= set(names)
    assert {("cbengine", "replay"), ("cbengine", "predict"), ("analysis", "compare")} <= set(VERBS)


@pytest.mark.parametrize(("module", "verb"), VERBS)
def test_help_ends_with_a_complete_example(module: str, verb: str) -> None:
    """It is one command of that name, which the parser takes."""
    parser = LINES[module][1]()
    label, _, example = verbs(parser)[verb].format_help().splitlines()[-1].partition(": ")
    words = shlex.split(example)
    assert (label, words[:4]) == ("example", ["python", "-m", module, verb])
    assert parser.parse_args(words[3:]).command == verb


@pytest.mark.parametrize("module", LINES)
def test_the_help_of_all_commands_ends_with_one(module: str) -> None:
    parser = LINES[module][1]()
    *_, last = parser.format_help().splitlines()
    assert last.startswith(f"example: python -m {module} ")
    assert parser.parse_args(shlex.split(last)[4:]).command


@pytest.mark.parametrize(("module", "old", "new"), OLD)
@pytest.mark.parametrize("more", [[], ["--help"], ["anything", "--at-all"]], ids=len)
def test_an_old_name_says_the_new_one(
    module: str, old: str, new: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit 2, and the new one is there."""
    main, make, _ = LINES[module]
    assert main([old, *more]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"{module}: {old} is now called {new}: python -m {module} {new}\n")
    assert new in verbs(make()) and old not in verbs(make())
