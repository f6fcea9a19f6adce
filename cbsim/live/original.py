"""What an original has to offer so that its decisions can be compared: workloads drawn over all options that our rules
have, and the recording of one workload. Each is a module of this room, imported only where its package is installed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol, cast

from cbsim.errors import UserError

Line = dict[str, Any]


class Original(Protocol):
    """A recorded package. `versions`: those that our rules were read from, the newest last. `lengths`: the fields of a
    request that hold lists of tokens or numbers of them. `options`: the field of a workload that holds its options,
    and `plain` their values that a smallest workload has, `...` for those that stay. Others may be left out.
    """

    versions: Sequence[str]
    lengths: Sequence[str]
    options: str
    plain: Line

    def draw(self, rng: random.Random, number: int) -> Line:
        """Return a workload, by its name."""

    def modes(self, workload: Line) -> Sequence[str]:
        """Return the modes in which a workload can be recorded; "" where the workload itself says it."""

    def record(self, workload: Line, mode: str) -> list[Line]:
        """Run a workload with the original. Return the trace, header first. An original that fails raises."""

    def read_as(self, header: Line, version: str) -> Line:
        """Return a trace's header with another version in it."""


def load(package: str) -> tuple[Original, str]:
    """Return a package's recorder and its version. Raises UserError that says what cannot be imported."""
    try:
        installed = version(package)
        return cast("Original", import_module(f"cbsim.live.{package}")), installed
    except PackageNotFoundError:
        raise UserError(f"--live {package}: {package} is not installed in this environment") from None
    except ImportError as error:
        missing = f"no module named {error.name}" if isinstance(error, ModuleNotFoundError) else str(error)
        raise UserError(f"--live {package}: {package} {installed} cannot be imported here: {missing}") from error


def rules_for(installed: str, versions: Sequence[str]) -> str:
    """Return the version whose rules are compared with a package: its own, or the newest one before it, or the first.

    >>> rules_for("0.34.1", ["0.19.0", "0.33.0"])
    '0.33.0'
    """
    earlier = [each for each in versions if numbers(each) <= numbers(installed)]
    return earlier[-1] if earlier else versions[0]


def numbers(release: str) -> list[int]:
    """Return a version as numbers that can be compared."""
    return [int(part) for part in release.split(".") if part.isdecimal()]
