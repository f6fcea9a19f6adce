"""A report's folder: what is written, and that nothing else is written over."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from analysis.index import FACTS
from cbsim.trace import RunError

OURS = {FACTS, "report.md", "report.html", "figures"}


def check(folder: Path) -> None:
    """Raises RunError if there is such a folder and it holds anything but an earlier report, or cannot be read."""
    try:
        present = {path.name for path in folder.iterdir()} if folder.exists() else set()
    except OSError as error:
        raise RunError(f"--out {folder}: cannot be written: {error.strerror or error}") from None
    if present and FACTS not in present:
        raise RunError(f"--out {folder}: holds {min(present)}, which is no report; name a new or an empty folder")


def clear(folder: Path) -> None:
    """Remove an earlier report, so that none of its figures passes for one of the next."""
    for path in (folder / name for name in sorted(OURS)):
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise RunError(f"{path}: cannot be removed: {error.strerror or error}") from None


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files by their name in the folder. Raises RunError naming the one that cannot be written."""
    for name, content in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError as error:
            raise RunError(f"{path}: cannot be written: {error.strerror or error}") from None


def facts(title: str, question: str, command: str, runs: list[dict[str, object]]) -> bytes:
    """report.json: what the index says of the report, and the numbers of its tiles."""
    content = {"title": title, "question": question, "command": command, "runs": runs}
    return (json.dumps(content, indent=2) + "\n").encode()
