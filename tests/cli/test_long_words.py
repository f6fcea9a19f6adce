"""Words of thousands of characters: refused with their option before anything is run, in a short message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.calls import call

from analysis.cli import parser as reports
from cbengine.cli import parser as engine
from cbsim.cli import parser as simulator
from cbsim.cli.arguments import brief

LONG = "x" * 5000
Main = Callable[[Sequence[str]], int]


@pytest.mark.parametrize(
    ("main", "words", "option"),
    [
        (simulator.main, ("run", "worked_example"), "--out"),
        (simulator.main, ("score", "case"), "--data"),
        (simulator.main, ("replan",), "RUN"),
        (engine.main, ("replay", "tiny_cpu"), "--weights"),
        (reports.main, ("compare", "run", "other"), "--out"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_path_that_no_system_can_look_up(
    main: Main, words: tuple[str, ...], option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 2 with the option, whichever command; nothing has been loaded, run or written."""
    monkeypatch.chdir(tmp_path)
    for path in (LONG, "a/" * 600, "ü" * 200):
        said = call(*words, *([option] if option.startswith("-") else []), path, of=main)
        message = said.err.splitlines()[0]
        assert (said.status, said.out) == (2, "")
        assert f"argument {option}: got {path[:9]!r}"[:-1] in message, message
        assert "a path has at most 1,000 characters, each name in it at most 255 bytes" in message
        assert len(message) < 250
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (simulator.main, (LONG,)),
        (simulator.main, ("run", "worked_example", "--loop", LONG)),
        (simulator.main, ("run", "worked_example", "--check", LONG)),
        (engine.main, ("replay", "tiny_cpu", "--inject", LONG)),
        (reports.main, ("compare", "run", "other", "--fail-if", LONG)),
    ],
    ids=lambda value: value[-2][:20] if isinstance(value, tuple) and len(value) > 1 else "",
)
def test_the_message_is_short(main: Main, words: tuple[str, ...]) -> None:
    """What a user wrote is shown as far as it is recognised; a usage below it is ours."""
    said = call(*words, of=main)
    assert said.status == 2
    assert "xxx..." in said.err
    assert len(said.err.splitlines()[0]) < 500


def test_no_path_is_cut() -> None:
    """A path that may exist stays whole in a message."""
    path = f"{'x' * 990}/a.yaml"
    assert brief(f"{path}: no such file") == f"{path}: no such file"
    assert brief(f"got {LONG}, expected a") == f"got {'x' * 40}... expected a"
