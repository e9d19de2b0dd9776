"""Kernels that need no Metal, on a machine that claims to have it: import as `from kernels import ...`.

Their cost is told to a clock that only they move.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from localspec.kernels import place, registry
from localspec.kernels.kernel import Heat, Kernel
from localspec.kernels.place import Place
from localspec.kernels.selection import Decision, Kernels, Status

MAC = Place("Apple M9", "27.1", "0.32.4", "0.32.2", "d" * 32)


class Using(Kernels):
    """Uses the kernels of these names, without a test."""

    def __init__(self, *names: str) -> None:
        self.told: list[str] = []
        super().__init__("off", notify=self.told.append)
        self._decisions = {name: Decision(Status.IN_USE) for name in names}


class Clock:
    """Seconds that pass when work is done."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> list[mx.array]:
        self.now += seconds
        return [mx.array(1.0)]


class Bench:
    """The kernels of the test and what was run of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
        self._patch = monkeypatch
        self.file = home / "kernels.json"
        self.clock = Clock()
        self.ran: list[str] = []
        """ "NAME test" and "NAME race", in the order in which they were run."""
        self.said: list[str] = []
        self.modules: dict[str, str] = {}
        monkeypatch.setattr(registry, "MODULES", self.modules)

    def add(self, name: str, difference: str | BaseException | None = None, ratio: float | BaseException = 2.0) -> None:
        """A kernel whose self-test says `difference` and that is `ratio` times as fast as MLX; errors are raised."""

        def self_test() -> str | None:
            self.ran.append(f"{name} test")
            if isinstance(difference, BaseException):
                raise difference
            return difference

        def heats() -> list[Heat]:
            self.ran.append(f"{name} race")
            if isinstance(ratio, BaseException):
                raise ratio
            ours = functools.partial(self.clock.spend, 0.01)
            return [Heat("all", ours, functools.partial(self.clock.spend, 0.01 * ratio))]

        self.modules[name] = f"fake_{name}"
        kernel = Kernel(name, f"test of {name}", self_test, heats)
        self._patch.setitem(sys.modules, f"fake_{name}", SimpleNamespace(KERNEL=kernel))  # type: ignore[arg-type]

    def kernels(self, choice: str = "auto") -> Kernels:
        """What a new engine would have."""
        return Kernels(choice, notify=self.said.append, clock=self.clock)

    def at(self, where: Place | None) -> None:
        """Go to another machine."""
        self._patch.setattr(place, "here", lambda: where)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A Mac with three kernels: "good" agrees and wins, "bad" disagrees, "slow" agrees and loses."""
    home = tmp_path / "home"
    monkeypatch.setenv("LOCALSPEC_HOME", str(home))
    monkeypatch.delenv("LOCALSPEC_KERNELS", raising=False)
    made = Bench(monkeypatch, home)
    made.at(MAC)
    made.add("good")
    made.add("bad", "row 3: 0.5 instead of 0.25")
    made.add("slow", ratio=0.9)
    return made
