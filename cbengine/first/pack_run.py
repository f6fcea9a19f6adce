"""Runs a part of the campaign from a pack: `python3 run.py PART ... [--results FILE]`. Standard library only.

It ends by itself after the minutes that the pack was made for. Everything measured comes back as one archive, which
is written every minute and at the end, however that comes; a call that finds the archive of an earlier one goes on from
it.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

MANIFEST, LEFT_OUT = "pack.json", "left_out.txt"
SAVED_S = 60.0  # how often results are saved while a part runs
GRACE_S = 60.0  # from the end of a part's time to that of its processes: imports before it, what it ends itself
ASKED_S = 10.0  # from asking a process to end to ending it
POLL_S = 0.5
TIMED_OUT = 124


class PackError(Exception):
    """What stands in the way of a call, before anything is measured."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status of the part; 124 if it had to be ended, 2 if it cannot be begun."""
    parser = argparse.ArgumentParser(prog="python3 run.py", description="Run parts of the campaign from this pack.")
    parser.add_argument("parts", nargs="*", metavar="PART", help="first, second, third, or parts by name")
    parser.add_argument("--device", default="cuda", help="cuda (default); process or modelled rehearse on a CPU")
    parser.add_argument("--results", type=Path, default=Path("results.tgz"), metavar="FILE", help="read, then written")
    parser.add_argument(
        "--work", type=Path, default=Path("pack-work"), metavar="DIR", help="where the pack is unpacked"
    )
    given = parser.parse_args(argv)
    here, work, results = Path(__file__).resolve().parent, given.work.resolve(), given.results.resolve()
    out = work / "results"
    try:
        manifest = checked(here)
        environment = unpacked(here, work, manifest)
        out.mkdir(exist_ok=True)
        resume(results, out)
        save(out, results, manifest)  # if that cannot be done, it is better known now
    except PackError as error:
        return refused(str(error))
    except OSError as error:
        return refused(f"{error.filename or given.work}: {error.strerror or error}")
    command = [sys.executable, "-m", "cbengine", "campaign", *given.parts, "--device", given.device]
    command += ["--minutes", str(manifest["minutes"]), "--out", str(out)]
    with ended_politely():
        try:
            return run(command, environment, work, manifest["minutes"] * 60, lambda: save(out, results, manifest))
        finally:
            omitted = save(out, results, manifest)
            print(f"run.py: results are in {results}", *omitted, sep="\n  left out: ", file=sys.stderr, flush=True)


def refused(reason: str) -> int:
    print(f"run.py: {reason}", file=sys.stderr)
    return 2


def checked(here: Path) -> dict[str, Any]:
    """The manifest, once every file is there as it was packed. Raises PackError."""
    try:
        manifest: dict[str, Any] = json.loads((here / MANIFEST).read_text(encoding="utf-8"))
        numbers = float(manifest["minutes"]), int(manifest["max_result_bytes"])
        sums = {name: str(entry[1]) for name, entry in manifest["files"].items()}
        wanted = str(manifest["python"]), str(manifest["version"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise PackError(f"{here / MANIFEST}: no manifest of a pack: {type(error).__name__}: {error}") from None
    if not all(number > 0 for number in numbers):
        raise PackError(f"{here / MANIFEST}: minutes, max_result_bytes: got {numbers}, must be > 0")
    for name, expected in sums.items():
        path = here / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != expected:
            raise PackError(f"{path}: is not as it was packed: copy the pack again")
    has = ".".join(platform.python_version_tuple()[:2])
    if has != wanted[0] and not all(map(installed, ("pydantic", "pydantic_core"))):
        raise PackError(f"the wheels are for Python {wanted[0]}, this is {has}: pack with --python {has}")
    return manifest


def resume(results: Path, out: Path) -> None:
    """Unpack what earlier calls brought back, but for what is here and newer. Raises PackError."""
    if not results.exists():
        return
    try:
        with tarfile.open(results) as archive:
            for member in archive:
                here = out / member.name
                if not here.exists() or here.stat().st_mtime < member.mtime:
                    archive.extract(member, out, filter="data")
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        reason = str(error).partition("\n")[0]
        raise PackError(
            f"--results: {results}: no archive of results: {reason}: move it away, or name another"
        ) from None


def unpacked(here: Path, work: Path, manifest: dict[str, Any]) -> dict[str, str]:
    """Unpack the project and those packages that this Python lacks; returns the environment to run in."""
    tree, site, cache = work / "tree", work / "site", work / "triton"
    for folder in (tree, site):
        folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(here / "tree.tar.gz") as archive:
        archive.extractall(tree, filter="data")
    for wheel in sorted((here / "wheels").glob("*.whl")):
        if not installed(wheel.name.split("-")[0]):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
    if (here / "triton-cache.tar.gz").exists():
        with tarfile.open(here / "triton-cache.tar.gz") as archive:
            archive.extractall(cache, filter="data")
    paths = [str(tree), str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "CBSIM_COMMIT": manifest["version"],
        "TRITON_CACHE_DIR": str(cache),
        "HF_HUB_OFFLINE": "1",
    }


def installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def run(command: Sequence[str], environment: dict[str, str], work: Path, limit_s: float, save_results: Any) -> int:
    """Run to its end, or to the end of its time and a little more; save what there is now and then."""
    process = subprocess.Popen(command, cwd=work / "tree", env=environment, start_new_session=True)
    until, saved = time.monotonic() + limit_s + GRACE_S, time.monotonic()
    try:
        while (code := process.poll()) is None:
            if time.monotonic() > until:
                print(f"run.py: ended after {limit_s / 60:g} minutes", file=sys.stderr, flush=True)
                return TIMED_OUT
            if time.monotonic() - saved > SAVED_S:
                with suppress(OSError):  # the next minute, or the end, may have more luck
                    save_results()
                saved = time.monotonic()
            time.sleep(POLL_S)
        return code
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask first: the campaign ends the processes that it has started, which are in groups of their own."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(ASKED_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def ended_politely(signals: Sequence[signal.Signals] = ENDS) -> Iterator[None]:
    """A request to end is an exception, so that results are saved and processes ended."""

    def stop(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def save(out: Path, results: Path, manifest: dict[str, Any]) -> list[str]:
    """One archive of what was measured: smaller files first, as far as its size allows; what is left out, now or by a
    call before, is listed in it and returned. Written beside the old one, then moved in its place. Files that come and
    go meanwhile are no failure.
    """
    room, files = manifest["max_result_bytes"], sorted(listed(out))
    names = {name for _, name in files}
    omitted = [line for line in lines(out / LEFT_OUT) if line.rpartition(" ")[0].rpartition(" ")[0] not in names]
    results.parent.mkdir(parents=True, exist_ok=True)
    unfinished = results.with_name(f"{results.name}.part")
    with (
        unfinished.open("wb") as raw,
        gzip.GzipFile(fileobj=raw, mode="wb") as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for size, name in files:
            packed.flush()  # so that `tell` counts all that was added
            if raw.tell() + size > room:
                omitted.append(f"{name} {size} bytes")
                continue
            with suppress(FileNotFoundError):
                _add(archive, name, (out / name).read_bytes(), (out / name).stat().st_mtime)
        if omitted:
            _add(archive, LEFT_OUT, "\n".join(omitted).encode(), time.time())
    unfinished.replace(results)
    return omitted


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def listed(out: Path) -> Iterator[tuple[int, str]]:
    """(bytes, name) of every file there is."""
    for path in out.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file() and path.name != LEFT_OUT:
                yield path.stat().st_size, str(path.relative_to(out))


def _add(archive: tarfile.TarFile, name: str, content: bytes, changed_s: float) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime = len(content), int(changed_s)
    archive.addfile(entry, io.BytesIO(content))


if __name__ == "__main__":
    sys.exit(main())
