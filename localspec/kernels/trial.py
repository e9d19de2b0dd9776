"""Tries a kernel on this machine: its self-test, then its race."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from localspec.kernels.kernel import Kernel
from localspec.kernels.place import Place
from localspec.kernels.race import Clock, Race, race
from localspec.kernels.records import Outcome, Record

FAULTS = (RuntimeError, ValueError, MemoryError, OSError)
"""What MLX raises where a kernel cannot be built or run, and Python where its source cannot be read."""
_MISFITS = (*FAULTS, AttributeError, ImportError, TypeError)
"""The same, and what comes of an MLX or mlx-lm that is not as a self-test or a race expects it."""
_LONGEST = 200


def try_out(kernel: Kernel, place: Place, *, racing: bool, clock: Clock = time.perf_counter) -> Record:
    """What the self-test says, and the race where that agrees and `racing`. Runs in this thread; raises nothing of
    those."""

    def record(outcome: Outcome, detail: str = "", race: Race | None = None) -> Record:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return Record(kernel.name, place, outcome, one_line(detail), race, now)

    try:
        difference = kernel.self_test()
    except _MISFITS as error:
        return record("failed", f"self-test: {error}")
    if difference is not None:
        return record("disagreed", difference)
    if not racing:
        return record("agreed")
    try:
        return record("agreed", race=race(kernel.heats(), clock))
    except _MISFITS as error:
        return record("failed", f"race: {error}")


def one_line(text: object) -> str:
    """Of compiler output and the like: its beginning."""
    line = " ".join(str(text).split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
