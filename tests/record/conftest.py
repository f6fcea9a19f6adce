"""What tests of a run directory start from: a run, and its directory."""

from __future__ import annotations

from support.written import complete, server  # noqa: F401 - fixtures
