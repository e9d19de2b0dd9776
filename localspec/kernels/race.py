"""The race of a kernel against MLX's own operations on this machine.

Each heat runs both in turn, one right after the other and in changing order, so that whatever else the machine does
meets both. A run is one evaluation, with what starting it costs: work that is too short to be timed that way has to be
made longer by the heat itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import mlx.core as mx

from localspec.kernels.kernel import Heat

FASTER = 1.03
"""theirs / ours that the median heat must reach. MLX's own operations are the better choice at a tie."""
SECONDS = 1.0
"""About what a race takes, all heats together."""
WARM_UPS = 2
FEWEST_PAIRS, MOST_PAIRS = 5, 50

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Lap:
    """How one heat went."""

    name: str
    ratio: float
    """Median over the pairs of theirs / ours: above 1 the kernel is faster."""
    least: float
    ours_ms: float
    theirs_ms: float
    """Medians."""
    pairs: int


@dataclass(frozen=True, slots=True)
class Race:
    """How all heats went; there is at least one."""

    laps: tuple[Lap, ...]

    @property
    def ratio(self) -> float:
        """theirs / ours in the median heat."""
        return median(lap.ratio for lap in self.laps)

    @property
    def won(self) -> bool:
        """Whether the median heat is faster by more than noise, and none is slower than it may be."""
        return self.ratio >= FASTER and all(lap.ratio >= lap.least for lap in self.laps)


def race(heats: Sequence[Heat], clock: Clock = time.perf_counter) -> Race:
    """Run all heats in this thread, in about a second (longer where single runs are long)."""
    if not heats:
        raise ValueError("a race needs a heat")
    laps = tuple(_lap(heat, SECONDS / len(heats), clock) for heat in heats)
    mx.clear_cache()
    return Race(laps)


def _lap(heat: Heat, seconds: float, clock: Clock) -> Lap:
    for _ in range(WARM_UPS):  # the first run also builds the kernel
        _timed(heat.ours, clock)
        _timed(heat.theirs, clock)
    ours: list[float] = []
    theirs: list[float] = []
    sides = [(heat.ours, ours), (heat.theirs, theirs)]
    end = clock() + seconds
    while len(ours) < FEWEST_PAIRS or (len(ours) < MOST_PAIRS and clock() < end):
        for work, times in sides:
            times.append(_timed(work, clock))
        sides.reverse()
    ratio = median(b / a for a, b in zip(ours, theirs, strict=True))
    return Lap(heat.name, ratio, heat.least, median(ours) * 1000, median(theirs) * 1000, len(ours))


def _timed(work: Callable[[], Sequence[mx.array]], clock: Clock) -> float:
    start = clock()
    mx.eval(*work())
    return max(clock() - start, 1e-9)
