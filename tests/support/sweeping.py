"""A small sweep for tests, and the scheduler of the documentation with traps in it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from own_policy import TEXT

SWEEP = """\
scenario: small.yaml
axes:
  workload.requests: [4, 8]
  scheduler.name: [vllm, static]
loop: [sync, async]
"""
TRAPS = """
    def schedule(self) -> StepPlan | None:
        import os
        import pathlib
        import signal
        seats, mark = self.options.seats, pathlib.Path(__file__).with_name("died")
        if seats == 66:
            raise RuntimeError("trapped")
        if seats == 67 or (seats == 68 and not mark.exists()):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while seats == 69:
            pathlib.Path(__file__).with_name("busy").touch()
        writing = pathlib.Path(__file__).with_name("writing")
        if seats == 70:
            def write(path, content):
                while True:
                    writing.touch()
            pathlib.Path.write_bytes = write
        while seats == 71 and not writing.exists():
            pass
"""


@pytest.fixture
def sweep(small: Path) -> Path:
    """A sweep of 8 points, in a folder with its scenario."""
    path = small.with_name("sizes.yaml")
    path.write_text(SWEEP)
    return path


@pytest.fixture
def trapped(small: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep of the scheduler of the documentation: seats 66 raises, 67 kills its process, 68 does so once, 69 never
    ends, 70 never ends to write its run, and 71 waits until it does.
    """
    text = TEXT.replace("\n    def schedule(self) -> StepPlan | None:\n", TRAPS)
    assert text != TEXT
    small.with_name("trapped.py").write_text(text)
    monkeypatch.syspath_prepend(str(small.parent))
    monkeypatch.delitem(sys.modules, "trapped", raising=False)
    return small.with_name("trap.yaml")


def seats(path: Path, *counts: int) -> Path:
    """A sweep over so many seats of the trapped scheduler."""
    points = [f'{{scheduler: {{name: "trapped:SHORTEST", seats: {count}}}}}' for count in counts]
    path.write_text("scenario: small.yaml\naxes:\n  - points: [" + ", ".join(points) + "]\n")
    return path
