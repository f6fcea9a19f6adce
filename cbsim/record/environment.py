"""Where a run was made: enough to make it again, or to see why it came out otherwise."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cbsim.policy.value import running

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "CBSIM_COMMIT"
PACKAGES = (
    *("simpy", "pydantic", "ruamel.yaml", "librt", "numpy", "pyarrow", "matplotlib"),
    *("torch", "triton", "transformers"),
)


def environment(
    command: str, workload_hash: str, seed: int, process: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The contents of env.json. `process` is what `of_process` returns, if it is known already."""
    return {
        "command": command,
        "started_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        **(of_process() if process is None else process),
        "device": None,
        "driver": None,
        "workload_hash": workload_hash,
        "seed": seed,
    }


def of_process() -> dict[str, Any]:
    """What holds of every run of a process: code, interpreter, libraries. It asks git, which takes as long as a run."""
    return {
        "git": git_state(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages(),
        "core": running(),
    }


def packages() -> dict[str, str]:
    """Versions of what a run rests on, by name; what is not installed is left out."""
    return {name: installed for name in PACKAGES if (installed := _version(name))}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_state() -> dict[str, Any]:
    """Commit of the source tree and whether it has uncommitted changes. Outside a checkout what the variable
    CBSIM_COMMIT says, as `code_version` does; without it nulls.

    What lies in reports/ is output: a report written before does not make the next run's code a changed one.
    """
    if not (ROOT / ".git").exists():
        known = os.environ.get(COMMIT)
        return {"commit": known.partition("+")[0], "dirty": "+" in known} if known else {"commit": None, "dirty": None}
    commit = _git(ROOT, "rev-parse", "HEAD")
    status = _git(ROOT, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!reports")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def code_version() -> str | None:
    """What tells one state of the code from another: the commit, and behind a + a hash of the changes to it. None where
    it is not known.
    """
    state = git_state()
    if not (ROOT / ".git").exists():
        return os.environ.get(COMMIT) or None
    if not state["dirty"]:
        return state["commit"] and str(state["commit"])
    changes = _git(ROOT, "diff", "HEAD", "--", ".", ":!reports") or ""
    return f"{state['commit']}+{hashlib.sha256(changes.encode()).hexdigest()[:8]}"


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *arguments], cwd=root, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
