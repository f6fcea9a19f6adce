"""What tests of replay start from: a recorded run, one that may be spoiled, and no pictures."""

from __future__ import annotations

from support.recordings import no_pictures, original, run  # noqa: F401 - fixtures
