"""A report's folder: its files are written, and no file of anything else is overwritten."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from cbsim.errors import RunError, UserError
from cbsim.files import access
from cbsim.record.directory import write_whole

FACTS = "report.json"
OURS = ("report.md", "report.html")
KINDS = ("png", "svg")  # of a figure's files


def check(folder: Path, *, shared: bool = False) -> None:
    """Raise UserError if the folder cannot be one, or unless it may be `shared`, if it holds what is no report."""
    with access(f"--out {folder}", UserError, "written"):
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        present = [path.name for path in there.iterdir()]
        with tempfile.TemporaryDirectory(dir=there):  # no permission says so as surely
            pass
    if present and there == folder and not shared and not _written(folder):
        raise UserError(f"--out {folder}: holds {min(present)}, which is no report; name a new or an empty folder")


def _written(folder: Path) -> set[str]:
    """Return the files that the report in this folder lists as its own; none if it is not one of ours."""
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        ours = facts["command"].startswith(("python -m analysis ", "python -m cbsim "))
        figures = {f"figures/{Path(key).name}.{kind}" for key in facts["figures"] for kind in KINDS}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()
    return {*OURS, *figures, FACTS} if ours else set()


def clear(folder: Path) -> None:
    """Remove an earlier report, so that none of its figures is taken for one of the next. Other files are kept."""
    for path in (folder / name for name in sorted(_written(folder))):
        with access(path, RunError, "removed"):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # a user's own files may be in it
        (folder / "figures").rmdir()


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files by name into the folder, which is created. Raises RunError naming what cannot be written."""
    with access(f"--out {folder}", RunError, "written"):
        folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        with access(folder / name, RunError, "written"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(folder / name, content)
