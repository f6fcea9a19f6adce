"""The environment of a run: enough to make it again, or to see why its results differ."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from cbsim.policy.value import running

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "CBSIM_COMMIT"
SIMULATED = "simulated"  # the device of a run that was not measured
PACKAGES = (
    *("simpy", "pydantic", "ruamel.yaml", "librt", "numpy", "pyarrow", "matplotlib"),
    *("torch", "triton", "transformers"),
)


def environment(command: str, workload_hash: str, seed: int) -> dict[str, Any]:
    """Return the contents of env.json."""
    return {
        "command": command,
        "started_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        **of_process(),
        "device": None,
        "driver": None,
        "workload_hash": workload_hash,
        "seed": seed,
    }


@cache
def of_process() -> Mapping[str, Any]:
    """Return the facts of a process, as they are at its first run: code, interpreter, libraries. It calls git."""
    return {
        "git": git_state(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages(),
        "core": running(),
    }


def packages() -> dict[str, str]:
    """Return the versions of the packages that a run uses, by name; those not installed are left out."""
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            its = distribution(name)  # whose `version` is found by parsing its whole description
            line = re.search(r"^Version: (\S+)$", its.read_text("METADATA") or "", re.MULTILINE)
            found[name] = line[1] if line else its.version
    return found


def git_state() -> dict[str, Any]:
    """Return the commit of the source tree and whether it has uncommitted changes. Outside a checkout they are read
    from the variable CBSIM_COMMIT, in the format of `code_version`; without it they are null. Files in reports/ are
    output: an earlier report does not make the next run's code a changed one.
    """
    if not (ROOT / ".git").exists():
        known = os.environ.get(COMMIT)
        return {"commit": known.partition("+")[0], "dirty": "+" in known} if known else {"commit": None, "dirty": None}
    commit = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!reports")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def code_version() -> str | None:
    """Return an identifier of the state of the code: the commit, and behind a + a hash of the changes to it. None if it
    is not known.
    """
    state = git_state()
    if not (ROOT / ".git").exists():
        return os.environ.get(COMMIT) or None
    if not state["dirty"]:
        return state["commit"] and str(state["commit"])
    changes = _git("diff", "HEAD", "--", ".", ":!reports") or ""
    return f"{state['commit']}+{hashlib.sha256(changes.encode()).hexdigest()[:8]}"


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
