"""Everything that a machine without network needs to run the campaign, in one folder of limited size.

OUT/run.py            the runner (`pack_run`): standard library only
OUT/pack.json         commit, date, minutes of a call, most bytes of its results, every file's size and SHA-256
OUT/tree.tar.gz       the project: what git tracks, changes included; reports and golden traces left out
OUT/wheels/*.whl      packages that GPU images rarely have, for their Python
OUT/triton-cache.tar.gz   compiled kernels, if they were given
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cbengine.errors import UsageError
from cbengine.first import pack_run
from cbsim.results.environment import code_version, git_state
from cbsim.server.running import ServerError

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = ("reports/", "tests/golden/", ".github/")
WHEELS = ("simpy", "pydantic", "ruamel.yaml", "librt")
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64")


@dataclass(frozen=True, slots=True)
class PackOptions:
    """`pack`, parsed. `python`: the version on the other machine."""

    out: Path
    max_mb: float
    part_minutes: float
    max_result_mb: float
    python: str
    triton_cache: Path | None


def pack(options: PackOptions, say: Callable[[str], None]) -> None:
    """Write the folder, in place of an earlier pack. Raises UsageError for a folder that holds anything else, for what
    is too large, and where there is no checkout; ServerError where wheels cannot be had. Then nothing has changed.
    """
    _check(options)
    made = options.out.with_name(f"{options.out.name}.part")
    try:
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        whole = _fill(made, options, say)
        shutil.rmtree(options.out, ignore_errors=True)
        made.rename(options.out)
    except OSError as error:
        raise UsageError(f"--out: {error.filename or options.out}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
    say(f"{whole / 1e6:.1f} MB in {options.out}; copy it, and run there: python3 {options.out.name}/run.py first")


def _fill(out: Path, options: PackOptions, say: Callable[[str], None]) -> int:
    """Write everything; returns the bytes."""
    say("the project's files")
    _tree(out / "tree.tar.gz")
    say(f"wheels for Python {options.python}: {', '.join(WHEELS)} and what they need")
    _wheels(out / "wheels", options.python)
    if options.triton_cache is not None:
        kernels = [path for path in sorted(options.triton_cache.rglob("*")) if _plain(path)]
        _archive(out / "triton-cache.tar.gz", options.triton_cache, kernels)
    shutil.copyfile(Path(pack_run.__file__), out / "run.py")
    files = {str(path.relative_to(out)): _size_and_sum(path) for path in _files(out)}
    content = {
        "version": code_version(),
        **git_state(),
        "packed_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": options.python,
        "minutes": options.part_minutes,
        "max_result_bytes": round(options.max_result_mb * 1e6),
        "files": files,
    }
    (out / pack_run.MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _check_size(options, files)
    return sum(size for size, _ in files.values())


def _check(options: PackOptions) -> None:
    out = options.out
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UsageError(f"--out: {out} is no folder")
    others = _others(out)
    if others:
        raise UsageError(f"--out: {out} holds other files than a pack's, such as {others[0]}: name an empty folder")
    if git_state()["commit"] is None:
        raise UsageError("pack: needs a git checkout of the project, to say which files belong to it")
    if options.triton_cache is not None and not options.triton_cache.is_dir():
        raise UsageError(f"--triton-cache: {options.triton_cache} is no folder")


def _others(out: Path) -> list[str]:
    """Files of a folder that no earlier pack has written."""
    try:
        ours = {pack_run.MANIFEST, *json.loads((out / pack_run.MANIFEST).read_text(encoding="utf-8"))["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        ours = set()
    return [name for path in _files(out) if (name := str(path.relative_to(out))) not in ours]


def _tree(path: Path) -> None:
    """Files as they are now, changed ones included."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    names = sorted(name for name in set(listed) if name and not name.startswith(LEFT_OUT) and _plain(ROOT / name))
    _archive(path, ROOT, [ROOT / name for name in names])


def _plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _archive(path: Path, root: Path, files: Sequence[Path]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for file in files:
            archive.add(file, str(file.relative_to(root)), recursive=False)


def _wheels(folder: Path, python: str) -> None:
    """Those of `constraints.txt`'s versions, as another machine would install them."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    words = ["pip", "download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:", *platforms]
    words += ["--python-version", python, "--implementation", "cp", "--constraint", str(ROOT / "constraints.txt")]
    done = subprocess.run(
        [sys.executable, "-m", *words, "--dest", str(folder), *WHEELS], capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise ServerError(f"pack: wheels for Python {python} cannot be had: {' '.join(lines)[:500]}")


def _files(out: Path) -> list[Path]:
    return sorted(path for path in out.rglob("*") if path.is_file())


def _size_and_sum(path: Path) -> tuple[int, str]:
    """(bytes, SHA-256)."""
    content = path.read_bytes()
    return len(content), hashlib.sha256(content).hexdigest()


def _check_size(options: PackOptions, files: dict[str, tuple[int, str]]) -> None:
    whole = sum(size for size, _ in files.values())
    if whole > options.max_mb * 1e6:
        largest = sorted(files.items(), key=lambda item: -item[1][0])[:3]
        sizes = ", ".join(f"{name} {size / 1e6:.1f}" for name, (size, _) in largest)
        raise UsageError(f"--max-mb: the pack takes {whole / 1e6:.1f} MB, must be <= {options.max_mb:g}; MB: {sizes}")
