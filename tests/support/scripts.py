"""The scripts under reports/, as modules."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from cbsim.scenario import catalog


def script(name: str) -> ModuleType:
    """The module of reports/NAME.py."""
    path = catalog.ROOT / "reports" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"reports.{name.replace('/', '.')}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
