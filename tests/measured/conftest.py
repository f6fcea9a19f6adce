"""What tests of `score` start from: a pack of their own, and the folder beside it."""

from __future__ import annotations

from support.scoring import elsewhere, pack  # noqa: F401 - fixtures
