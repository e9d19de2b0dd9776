"""What all tests share: reproducible property tests, and the tiny models on the import path."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from metal import compiler
from scripted_engine import Scripted

import localspec

# The machines that run this are slow at odd moments: no deadlines. The same examples every time: a red run is a change.
settings.register_profile(
    "localspec", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("localspec")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Without a compiler every test of a kernel would fail at length: say it once."""
    if any(item.path.name.startswith("test_kernel") or item.path.parent.name == "metal" for item in session.items):
        try:
            compiler.require()
        except compiler.CompilerError as error:
            pytest.exit(str(error), returncode=1)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Scripted:
    """What the commands load in place of a model."""
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path / "home"))
    engine = Scripted()
    monkeypatch.setattr(localspec, "load", engine.load)
    return engine
