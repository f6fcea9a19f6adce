"""The scripts under reports/, as modules."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from cbsim.scenario import catalog


def script(name: str) -> ModuleType:
    """The module of reports/NAME.py."""
    path = catalog.ROOT / "reports" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
