"""A machine without network gets one folder and gives one archive back: small enough, and the next call goes on.

Wheels are not downloaded here: `pip` is another program. What it is asked for is looked at, and that only missing
packages are taken from wheels.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the engine's extra: pip install -e '.[engine]'")

from cbengine.cli import parser
from cbengine.first import pack, pack_run
from cbsim.results import environment

MINUTES = 0.2


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What pip is asked for; it makes a wheel of a package that nobody has, and of one that everybody has."""
    real, asked = subprocess.run, []

    def run(words: Any, **more: Any) -> Any:
        if "pip" not in words:
            return real(words, **more)
        asked.append(list(words))
        folder = Path(words[words.index("--dest") + 1])
        folder.mkdir()
        for name in ("nobody_has_it", "pydantic"):
            with zipfile.ZipFile(folder / f"{name}-9.9-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"{name}/__init__.py", "here = True\n")
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(pack.subprocess, "run", run)
    return asked


@pytest.fixture
def made(tmp_path: Path, pip: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pack of this tree."""
    if environment.git_state()["commit"] is None:
        pytest.skip("needs a git checkout")
    out = tmp_path / "pack"
    words = ["pack", "--out", str(out), "--part-minutes", str(MINUTES), "--max-result-mb", "0.2", "--python", "3.12"]
    assert parser.main(words) == 0
    monkeypatch.chdir(tmp_path)
    return out


def called(made: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The runner, as a user starts it, without this environment's PYTHONPATH."""
    settled = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, str(made / "run.py"), *words], capture_output=True, text=True, env=settled, check=False
    )


def replace_engine(made: Path, body: str) -> None:
    """Instead of the project: an engine whose `campaign` does what `body` says; `out` is its folder."""
    head = "import os, sys, pathlib, time\nout = pathlib.Path(sys.argv[sys.argv.index('--out') + 1])\n"
    folder = made.parent / "engine" / "cbengine"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "__main__.py").write_text(head + body)
    pack._archive(made / "tree.tar.gz", folder.parent, sorted(folder.parent.rglob("*.py")))
    sealed(made)


def sealed(made: Path, **changes: Any) -> None:
    """The manifest after files, or fields of it, were changed on purpose."""
    manifest = json.loads((made / "pack.json").read_text()) | changes
    manifest["files"] = {name: pack._size_and_sum(made / name) for name in manifest["files"]}
    (made / "pack.json").write_text(json.dumps(manifest))


def test_a_pack_has_what_is_needed_and_says_what(made: Path, pip: list[list[str]]) -> None:
    """The tree without reports and golden traces, the runner, wheels for the other Python, and every file's size."""
    manifest = json.loads((made / "pack.json").read_text())
    assert manifest["commit"] == environment.git_state()["commit"]
    assert (manifest["minutes"], manifest["max_result_bytes"], manifest["python"]) == (MINUTES, 200_000, "3.12")
    for name, (size, _) in manifest["files"].items():
        assert (made / name).stat().st_size == size
    with tarfile.open(made / "tree.tar.gz") as archive:
        names = archive.getnames()
    assert {
        "cbengine/device/cuda.py",
        "cbsim/__main__.py",
        "scenarios/8k_b32.yaml",
        "tests/cbengine/device/test_cuda.py",
    } <= {*names}
    assert not [name for name in names if name.startswith(("reports/", "tests/golden/", ".git/"))]
    (words,) = pip
    assert words[words.index("--python-version") + 1] == "3.12"
    assert {"simpy", "pydantic", "ruamel.yaml", "librt", "--only-binary=:all:"} <= {*words}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--max-mb", "0.1"], "--max-mb: the pack takes "),
        (["--max-mb", "0"], "argument --max-mb: '0': expected a number > 0"),
        (["--python", "three"], "argument --python: 'three': expected a version of Python 3 such as 3.12"),
        (["--triton-cache", "nowhere"], "--triton-cache: nowhere is no folder"),
    ],
)
def test_bad_arguments(
    words: list[str], says: str, tmp_path: Path, pip: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = parser.main(["pack", "--out", str(tmp_path / "pack"), *words])
    except SystemExit as stop:
        code = int(str(stop.code))
    assert code == 2
    assert says in capsys.readouterr().err


def test_other_people_s_files_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    assert parser.main(["pack", "--out", str(tmp_path)]) == 2
    assert "holds other files than a pack's" in capsys.readouterr().err
    assert (tmp_path / "mine").exists()


def test_results_come_back_and_the_next_call_finds_them(made: Path, tmp_path: Path) -> None:
    """Also when the part fails: its exit status is the runner's. Another machine has nothing but the archive."""
    replace_engine(
        made,
        "import nobody_has_it\n"
        "import pydantic\n"
        "print(os.environ['CBSIM_COMMIT'], hasattr(pydantic, 'here'), sys.argv[1:3])\n"
        "(out / 'one').mkdir(exist_ok=True)\n"
        "with (out / 'one' / 'book').open('a') as book: book.write('called\\n')\n"
        "sys.exit(7)\n",
    )
    done = called(made, "first", "--results", "back.tgz", "--work", "here")
    assert done.returncode == 7, done.stderr
    assert done.stdout.split()[0] == environment.code_version()
    assert "False ['campaign', 'first']" in done.stdout, "a package that is installed is not replaced"
    assert called(made, "second", "--results", "back.tgz", "--work", "elsewhere").returncode == 7
    with tarfile.open("back.tgz") as archive:
        book = archive.extractfile("one/book")
        assert book is not None
        assert book.read() == b"called\ncalled\n"
        assert archive.getnames() == ["one/book"]


def test_an_archive_has_a_limit(made: Path) -> None:
    """Small files first; what did not fit is named."""
    replace_engine(made, "(out / 'large').write_bytes(os.urandom(300_000))\n(out / 'small').write_text('x' * 1000)\n")
    done = called(made, "--results", "back.tgz")
    assert done.returncode == 0
    assert "left out: large 300000 bytes" in done.stderr
    assert Path("back.tgz").stat().st_size <= 200_000
    with tarfile.open("back.tgz") as archive:
        assert archive.getnames() == ["small", "left_out.txt"]
        left = archive.extractfile("left_out.txt")
        assert left is not None
        assert left.read() == b"large 300000 bytes"


def test_what_was_left_out_before_stays_named(made: Path) -> None:
    """On another machine nobody has it any more."""
    replace_engine(
        made,
        "if not (out / 'small').exists():\n    (out / 'large').write_bytes(os.urandom(300_000))\n"
        "(out / 'small').write_text('x')\n",
    )
    assert called(made, "--results", "back.tgz", "--work", "here").returncode == 0
    assert "left out: large 300000 bytes" in called(made, "--results", "back.tgz", "--work", "elsewhere").stderr


def test_what_is_newer_is_kept(made: Path) -> None:
    """An archive of an earlier call does not undo a later one on the same machine."""
    replace_engine(made, "with (out / 'book').open('a') as book: book.write('called\\n')\n")
    assert called(made, "--results", "old.tgz").returncode == 0
    Path("new.tgz").write_bytes(Path("old.tgz").read_bytes())
    assert called(made, "--results", "new.tgz").returncode == 0
    assert called(made, "--results", "old.tgz").returncode == 0
    assert Path("pack-work/results/book").read_text() == "called\n" * 3


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        (lambda made: (made / "pack.json").unlink(), "pack.json: no manifest of a pack: FileNotFoundError"),
        (lambda made: (made / "pack.json").write_text("{}"), "pack.json: no manifest of a pack: KeyError"),
        (lambda made: (made / "pack.json").write_text("[1"), "pack.json: no manifest of a pack: JSONDecodeError"),
        (lambda made: sealed(made, minutes="x"), "pack.json: no manifest of a pack: ValueError"),
        (lambda made: sealed(made, minutes=-1), "minutes, max_result_bytes: got (-1.0, 200000), must be > 0"),
        (lambda made: (made / "tree.tar.gz").write_bytes(b"x"), "tree.tar.gz: is not as it was packed"),
        (lambda made: (made / "tree.tar.gz").unlink(), "tree.tar.gz: is not as it was packed"),
        (lambda made: Path("back.tgz").write_bytes(b"garbage"), "--results: "),
        (lambda made: Path("back.tgz").write_bytes(b""), "--results: "),
        (lambda made: Path("back.tgz").mkdir(), "--results: "),
        (lambda made: Path("pack-work").write_text("a file"), "pack-work"),
    ],
)
def test_what_cannot_be_begun_is_said_at_once(made: Path, breaks: Any, says: str) -> None:
    """One line, exit status 2, nothing is measured and nothing that was there is lost."""
    replace_engine(made, "sys.exit(9)\n")
    breaks(made)
    done = called(made, "--results", "back.tgz")
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_earlier_pack_is_replaced_whole_or_not_at_all(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files beside a pack's own keep it from being removed; so does a new pack that is too large."""
    before = (made / "pack.json").read_text()
    assert parser.main(["pack", "--out", str(made), "--max-mb", "0.1"]) == 2
    assert (made / "pack.json").read_text() == before
    (made / "results.tgz").touch()
    assert parser.main(["pack", "--out", str(made)]) == 2
    assert "holds other files than a pack's, such as results.tgz" in capsys.readouterr().err
    (made / "results.tgz").unlink()
    assert parser.main(["pack", "--out", str(made)]) == 0
    assert not made.with_name(f"{made.name}.part").exists()


def test_many_files_fill_an_archive_and_no_more(tmp_path: Path) -> None:
    """The limit holds for the archive as it is written, whatever compresses how well."""
    out, draw = tmp_path / "out", random.Random(1)
    out.mkdir()
    for i in range(60):
        (out / f"{i:02}").write_bytes(draw.randbytes(4000 + i) if i % 2 else b"a" * 9000)
    pack_run.save(out, tmp_path / "back.tgz", {"max_result_bytes": 60_000})
    size = (tmp_path / "back.tgz").stat().st_size
    assert 40_000 < size < 62_000
    with tarfile.open(tmp_path / "back.tgz") as archive:
        assert archive.getnames()[-1] == "left_out.txt"


def test_a_part_ends_by_itself(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve seconds, and a grace: the engine and its children are ended, and what there is comes back."""
    replace_engine(made, "(out / 'begun').touch()\ntime.sleep(600)\n")
    script = (made / "run.py").read_text()
    (made / "run.py").write_text(script.replace("GRACE_S = 60.0", "GRACE_S = 1.0"))
    sealed(made, minutes=0.02)
    done = called(made, "--results", "back.tgz")
    assert done.returncode == pack_run.TIMED_OUT
    assert "ended after 0.02 minutes" in done.stderr
    with tarfile.open("back.tgz") as archive:
        assert archive.getnames() == ["begun"]


def test_a_call_that_is_cut_off_brings_back_what_it_has(made: Path) -> None:
    """SIGTERM, as a lease that ends sends it."""
    replace_engine(made, "(out / 'begun').touch()\nprint('begun', flush=True)\ntime.sleep(600)\n")
    words = [sys.executable, str(made / "run.py"), "--results", "back.tgz"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    with tarfile.open("back.tgz") as archive:
        assert archive.getnames() == ["begun"]


def test_what_the_campaign_started_ends_with_it(made: Path, tmp_path: Path) -> None:
    """Its commands are in groups of their own: it is asked to end them before it is ended itself."""
    child = tmp_path / "child"
    replace_engine(
        made,
        "import signal, subprocess\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        f"pathlib.Path({str(child)!r}).write_text(str(child.pid))\n"
        "try:\n    time.sleep(600)\nfinally:\n    child.kill()\n    child.wait()\n",
    )
    script = (made / "run.py").read_text()
    (made / "run.py").write_text(script.replace("GRACE_S = 60.0", "GRACE_S = 2.0"))
    sealed(made, minutes=0.02)
    assert called(made).returncode == pack_run.TIMED_OUT
    assert not Path(f"/proc/{child.read_text()}").exists()


def test_files_that_come_and_go_are_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are saved while the campaign writes and removes files."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "stays").write_text("here")
    monkeypatch.setattr(pack_run, "listed", lambda _: [(4, "stays"), (4, "gone")])
    pack_run.save(tmp_path / "out", tmp_path / "back.tgz", {"max_result_bytes": 1000})
    with tarfile.open(tmp_path / "back.tgz") as archive:
        assert archive.getnames() == ["stays"]


def test_results_are_saved_while_a_part_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is taken away without a word has brought back all but the last minute."""
    saved: list[float] = []
    monkeypatch.setattr(pack_run, "SAVED_S", 0.0)
    monkeypatch.setattr(pack_run, "POLL_S", 0.01)
    (tmp_path / "tree").mkdir()
    words = [sys.executable, "-c", "import time; time.sleep(0.3)"]
    code = pack_run.run(words, dict(os.environ), tmp_path, 60, lambda: saved.append(time.monotonic()))
    assert code == 0
    assert len(saved) > 2
