"""Runs a part of the campaign from a pack: `python3 run.py PART ... [--results FILE]`. Standard library only.

It ends by itself after the minutes that the pack was made for. Everything measured comes back as one archive, which
is written every minute and at the end, however that comes; a call that finds the archive of an earlier one goes on from
it.
"""

from __future__ import annotations

import argparse
import gzip
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


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status of the part; 124 if it had to be ended."""
    parser = argparse.ArgumentParser(prog="python3 run.py", description="Run parts of the campaign from this pack.")
    parser.add_argument("parts", nargs="*", metavar="PART", help="first, second, third, or parts by name")
    parser.add_argument("--device", default="cuda", help="cuda (default); process or modelled rehearse on a CPU")
    parser.add_argument("--results", type=Path, default=Path("results.tgz"), metavar="FILE", help="read, then written")
    parser.add_argument(
        "--work", type=Path, default=Path("pack-work"), metavar="DIR", help="where the pack is unpacked"
    )
    given = parser.parse_args(argv)
    here = Path(__file__).resolve().parent
    manifest = json.loads((here / MANIFEST).read_text(encoding="utf-8"))
    work, results = given.work.resolve(), given.results.resolve()
    if (wanted := manifest["python"]) != (has := ".".join(platform.python_version_tuple()[:2])):
        print(f"run.py: wheels are for Python {wanted}, this is {has}", file=sys.stderr)
    environment = unpacked(here, work, manifest)
    out = work / "results"
    out.mkdir(exist_ok=True)
    if results.exists():
        with tarfile.open(results) as archive:
            archive.extractall(out, filter="data")
    command = [sys.executable, "-m", "cbengine", "hardware", *given.parts, "--device", given.device]
    command += ["--minutes", str(manifest["minutes"]), "--out", str(out)]
    with ended_politely():
        try:
            return run(command, environment, work, manifest["minutes"] * 60, lambda: save(out, results, manifest))
        finally:
            save(out, results, manifest)


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


@contextmanager
def ended_politely() -> Iterator[None]:
    """A request to end is an exception, so that results are saved."""

    def stop(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def save(out: Path, results: Path, manifest: dict[str, Any]) -> None:
    """One archive of what was measured: smaller files first, as far as its size allows; what is left out is listed in
    it. Written beside the old one, then moved in its place. Files that come and go meanwhile are no failure.
    """
    room, omitted = manifest["max_result_bytes"], []
    results.parent.mkdir(parents=True, exist_ok=True)
    unfinished = results.with_name(f"{results.name}.part")
    with (
        unfinished.open("wb") as raw,
        gzip.GzipFile(fileobj=raw, mode="wb") as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for size, name in sorted(listed(out)):
            packed.flush()  # so that `tell` counts all that was added
            if raw.tell() + size > room:
                omitted.append(f"{name} {size} bytes")
                continue
            with suppress(FileNotFoundError):
                _add(archive, name, (out / name).read_bytes())
        if omitted:
            _add(archive, LEFT_OUT, "\n".join(omitted).encode())
    unfinished.replace(results)


def listed(out: Path) -> Iterator[tuple[int, str]]:
    """(bytes, name) of every file there is."""
    for path in out.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file() and path.name != LEFT_OUT:
                yield path.stat().st_size, str(path.relative_to(out))


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime = len(content), int(time.time())
    archive.addfile(entry, io.BytesIO(content))


if __name__ == "__main__":
    sys.exit(main())
