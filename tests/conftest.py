"""What all tests share: reproducible property tests, and the tiny models on the import path."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# The machines that run this are slow at odd moments: no deadlines. The same examples every time: a red run is a change.
settings.register_profile(
    "localspec", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("localspec")
