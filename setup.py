"""What pyproject.toml cannot say: the scenarios lie at the top and go into the package when it is installed; and its
core is compiled where there is a compiler.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from sysconfig import get_paths

from setuptools import Extension, find_packages, setup
from setuptools.errors import CompileError

DATA = {
    "cbsim.scenarios": "scenarios",
    "cbsim.scenarios.models": "scenarios/models",
    "cbsim.scenarios.hardware": "scenarios/hardware",
    "cbsim.scenarios.lengths": "scenarios/lengths",
    "cbsim.scenarios.servers": "scenarios/servers",
    "cbsim.scenarios.tables": "scenarios/tables",
    "cbsim.scenarios.terms": "scenarios/terms",
    "cbsim.scenarios.curves": "scenarios/curves",
    "cbsim.scenarios.traces": "scenarios/traces",
}
CORE = (
    "cbsim/policy",
    "cbsim/kv",
    "cbsim/schedulers",
    "cbsim/cost",
    "cbsim/machine",
    "cbsim/record/record.py",
    "cbsim/runs/inbox.py",
    "cbsim/runs/rules.py",
)
PYTHON = (
    "__init__.py",
    "value.py",
    "kind.py",
    "marks.py",
    "registry.py",
    "queues.py",
    "observer.py",
    "settings.py",
    "*_settings.py",
)
"""What stays Python in these folders: nothing of it runs in a step; users inherit from it."""


def core() -> list[Extension]:
    """The core as extension modules; none if it is not asked for or cannot be compiled, which is said."""
    if not {"bdist_wheel", "build_ext"} & {*sys.argv}:  # an editable installation is Python
        return []
    if os.environ.get("CBSIM_PURE") == "1":
        return pure("CBSIM_PURE=1")
    try:
        from mypyc.build import mypycify
    except ImportError:
        return pure("mypyc is not installed")
    if not compiles():
        return pure("there is no C compiler, or Python's headers are missing")
    checked = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]  # by CI's mypy, in full
    return mypycify([*checked, *modules()], opt_level="2", debug_level="0", group_name="cbsim")


def pure(why: str) -> list[Extension]:
    print(f"cbsim: {why}: its core is not compiled", file=sys.stderr)
    return []


def modules() -> Sequence[str]:
    found = [file for place in map(Path, CORE) for file in (place.rglob("*.py") if place.is_dir() else [place])]
    return sorted(str(file) for file in found if not any(file.match(name) for name in PYTHON))


def compiles() -> bool:
    """Is there a C compiler that finds Python.h?"""
    from distutils.ccompiler import new_compiler  # setuptools brings it along
    from distutils.sysconfig import customize_compiler

    compiler = new_compiler()
    customize_compiler(compiler)
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "tried.c"
        source.write_text("#include <Python.h>\n")
        try:
            compiler.compile([str(source)], output_dir=place, include_dirs=[get_paths()["include"]])
        except (CompileError, OSError):
            return False
    return True


FOUND = find_packages(include=["cbsim*", "cbengine*", "analysis*"])
# In an editable installation this folder is on the path: a finder of single packages would come after the namespace
# package that Python makes of a clone called cbsim, seen from the folder beside it.
EDITABLE = "editable_wheel" in sys.argv
setup(
    packages=FOUND if EDITABLE else [*FOUND, *DATA],
    package_dir={"": "."} if EDITABLE else DATA,
    ext_modules=core(),
)
