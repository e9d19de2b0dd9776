"""What all tests share: reproducible property tests, decisions that no clock takes part in, and the tiny models on the
import path."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings
from metal import compiler
from scripted_engine import Scripted

import localspec
from localspec.controller import Controller
from localspec.drafters.protocol import Offer

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


class SteadyController(Controller):
    """Learns that a pass costs 1 and a tenth per further row, and a draft a hundredth, whatever they took."""

    def learn(self, proposal: Offer, accepted: int, draft_s: float, verify_s: float, *, apart: bool = True) -> None:
        drafted = len(proposal)
        super().learn(proposal, accepted, 0.01 * drafted, 0.9 + 0.1 * self.width(drafted + 1), apart=apart)

    def learn_plain(self, seconds: float, *, ahead: bool = True) -> None:
        super().learn_plain(0.9 + 0.1 * self.width(1), ahead=ahead)


@pytest.fixture(scope="session", autouse=True)
def steady_costs() -> Iterator[None]:
    """Engines draft as on one machine, not as on this one at this moment: passes of tiny models take as long as the
    other programs let them. Tests of the controller make their own, which is the real one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("localspec.controller.Controller", SteadyController)
        patch.setattr("localspec.engine.Controller", SteadyController)
        ticks = itertools.count()
        # Every pass of a probe takes a millisecond.
        patch.setattr("localspec.probe.time", SimpleNamespace(perf_counter=lambda: 1e-3 * next(ticks)))
        yield


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Scripted:
    """What the commands load in place of a model."""
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path / "home"))
    engine = Scripted()
    monkeypatch.setattr(localspec, "load", engine.load)
    return engine
