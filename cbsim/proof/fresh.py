"""Commands whose time is measured have a process of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from cbsim.results.directory import RunError


def printed(command: Sequence[str], what: str) -> str:
    """What a command prints. Raises RunError that says `what` failed, with the last line of its complaint."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"{what} failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return done.stdout


def python(program: str) -> list[str]:
    """A program as a command."""
    return [sys.executable, "-c", program]
