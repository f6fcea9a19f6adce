"""Settings shared by all tests: property tests draw the same examples in every run."""

from __future__ import annotations

from calls import out, small  # noqa: F401 - fixtures
from hypothesis import HealthCheck, settings

settings.register_profile(
    "fixed",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=120,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("fixed")
