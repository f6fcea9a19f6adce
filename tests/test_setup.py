"""The core is compiled where it can be; where not, the build says why and goes on in Python."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cbsim.policy import request
from cbsim.policy.value import running

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"CBSIM_PURE": "1"}, "CBSIM_PURE=1"),
        ({"CC": "false"}, "there is no C compiler, or Python's headers are missing"),
    ],
)
def test_without_a_compiler_the_core_is_python(variables: dict[str, str], why: str, tmp_path: Path) -> None:
    pytest.importorskip("mypyc")
    places = ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    words = [sys.executable, "setup.py", "-q", "build_ext", *places]
    environment = {**os.environ, **variables}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert f"cbsim: {why}: its core is not compiled" in done.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_what_scenarios_name_is_installed() -> None:
    """Each folder of names is a package with data; files of sweeps are given by their paths."""
    folders = {each.name for each in (ROOT / "scenarios").iterdir() if each.is_dir()} - {"sweeps"}
    said = (ROOT / "setup.py").read_text()
    assert [name for name in sorted(folders) if f'"cbsim.scenarios.{name}": "scenarios/{name}",' not in said] == []
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for name in folders:
        (pattern,) = data[f"cbsim.scenarios.{name}"]
        assert list((ROOT / "scenarios" / name).glob(pattern)), name


def test_the_core_says_what_it_is() -> None:
    source = Path(str(request.__file__))
    assert running() == ("python" if source.suffix == ".py" else "compiled")


def test_compiled_classes_get_their_arguments_one_by_one() -> None:
    """mypyc hands the arguments of `super().__init__(*arguments)` on as one: a model with windows could not run."""
    files = [
        file
        for room in ("policy", "kv", "schedulers", "cost", "machine")
        for file in (ROOT / "cbsim" / room).rglob("*.py")
    ]
    assert [file.name for file in files if "super().__init__(*" in file.read_text()] == []


def test_a_clone_that_is_called_cbsim_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen from beside it, it is a folder of the package's name, which Python takes for a namespace package unless the
    package is found on the path; a finder, as setuptools makes one of several folders, comes too late.
    """
    given: dict[str, Any] = {}
    monkeypatch.setattr("setuptools.setup", lambda **words: given.update(words))
    monkeypatch.setattr(sys, "argv", ["setup.py", "editable_wheel"])
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    assert given["package_dir"] == {"": "."}  # all that setuptools puts on the path as it is
    assert "cbsim" in given["packages"] and "cbsim.scenarios" not in given["packages"]
