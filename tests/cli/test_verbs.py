"""The verbs of the three command lines: none means two things, each shows an example."""

from __future__ import annotations

import argparse
import shlex

import pytest

from analysis.cli import parser as analysis
from cbengine.cli import parser as engine
from cbsim.cli import parser as simulator

LINES = {
    "cbsim": (simulator.main, simulator._parser),
    "cbengine": (engine.main, engine.command_line),
    "analysis": (analysis.main, analysis._parser),
}


def verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """A command line's commands, by name."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(commands.choices)


VERBS = [(module, verb) for module, (_, make) in LINES.items() for verb in verbs(make())]


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
