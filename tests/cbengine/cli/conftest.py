"""What tests of the engine's command line start from: a small scenario, and a folder of weights."""

from __future__ import annotations

from support.engine.calls import folder, small  # noqa: F401 - fixtures
