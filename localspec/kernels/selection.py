"""Which kernels an engine uses: decided once for each, at its first use, and then for the engine's life.

Never breaks a generation: whatever goes wrong with a kernel, its reference runs instead, and one line says so.
`docs/kernels.md` has the rule.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import mlx.core as mx

from localspec.errors import KernelWarning
from localspec.kernels import place, registry
from localspec.kernels.choice import Choice, choices
from localspec.kernels.place import Place
from localspec.kernels.race import Clock
from localspec.kernels.records import Record, Records
from localspec.kernels.trial import FAULTS, one_line, try_out

Arrays = TypeVar("Arrays")
"""Arrays, in whatever tuples, lists and dictionaries MLX evaluates."""

_DECIDING = threading.Lock()
"""One at a time in this process: races that run side by side disturb each other, and the second can read the record."""


class Status(StrEnum):
    """What came of a kernel here."""

    IN_USE = "in use"
    NO_METAL = "no Metal here"
    OFF = "turned off"
    LOST = "lost its race"
    DISAGREES = "disagrees with its reference"
    FAILED = "failed to build or run"
    UNTRIED = "not tried yet"


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a kernel is used, and by what record."""

    status: Status
    record: Record | None = None


class Kernels:
    """One engine's choice of kernels."""

    def __init__(
        self, choice: str = "auto", *, notify: Callable[[str], None] | None = None, clock: Clock = time.perf_counter
    ) -> None:
        """choice: "auto", "on", "off", or NAME=on and so on, with commas between; what it leaves at auto is for
        LOCALSPEC_KERNELS to say. notify: told in one line of a kernel that is not used for a fault; None warns.

        Raises SettingsError.
        """
        self.choices = choices(choice)
        self.notices: list[str] = []
        """The lines so far."""
        self._tell = notify if notify is not None else _warn
        self._clock = clock
        self._decisions: dict[str, Decision] = {}

    def uses(self, name: str) -> bool:
        """Whether the kernel is to be used rather than its reference.

        Call it from the thread that decodes, whose default device decides for the whole engine: the first call may run
        a self-test and a race, for seconds. From any
        thread, all later ones look it up, and give the same answer unless the kernel failed since (`fall_back`).
        """
        return self.decision(name).status is Status.IN_USE

    def decision(self, name: str) -> Decision:
        """What `uses` goes by. KeyError for a name that no kernel has."""
        found = self._decisions.get(name)
        if found is not None:
            return found
        with _DECIDING:
            found = self._decisions.get(name)
            if found is not None:
                return found
            found = self._decide(name)
            self._decisions[name] = found
        self._explain(name, found)
        return found

    def run(
        self,
        name: str,
        ours: Callable[[], Arrays],
        reference: Callable[[], Arrays],
        evaluate: Callable[[Arrays], None] = mx.eval,
    ) -> Arrays:
        """What the kernel gives if it is used, else what its reference gives.

        Ours is evaluated here (`evaluate`: or begun, by mx.async_eval), because that is where MLX builds and runs it,
        and where it may fail. Then the reference is what is returned, now and from now on; unless that fails as well,
        and so the fault is not the kernel's.
        """
        if not self.uses(name):
            return reference()
        try:
            result = ours()
            evaluate(result)
        except FAULTS as error:
            result = reference()
            evaluate(result)
            self.fall_back(name, error)
        return result

    def fall_back(self, name: str, error: BaseException) -> None:
        """The kernel failed in use: its reference from now on, in this engine, in answers under way as well."""
        with _DECIDING:
            self._decisions[name] = Decision(Status.FAILED)
        self._notice(f"the {name} kernel failed ({one_line(error)}): {_INSTEAD}; --kernels {name}=off avoids it")

    def outlook(self, name: str) -> Decision:
        """What would be decided from what is known now; nothing is run."""
        return self._known(name, place.here())

    def test(self, name: str) -> Decision:
        """Run the self-test and the race now, whatever is known and wanted, and record how they went."""
        choice, here = self.choices.of(name), place.here()
        if here is None:
            return Decision(_status(choice, here, None))
        with _DECIDING:
            record = try_out(registry.kernel(name), here, racing=True, clock=self._clock)
            self._records().keep(record, replace=True)
        return Decision(_status(choice, here, record), record)

    def _decide(self, name: str) -> Decision:
        if name not in registry.names():
            raise KeyError(name)
        choice, here = self.choices.of(name), place.here()
        known = self._known(name, here)
        if known.status is not Status.UNTRIED or here is None:
            return known
        record = try_out(registry.kernel(name), here, racing=choice == "auto", clock=self._clock)
        record = self._records().keep(record)
        return Decision(_status(choice, here, record), record)

    def _known(self, name: str, here: Place | None) -> Decision:
        record = None if here is None else self._records().find(name, here)
        return Decision(_status(self.choices.of(name), here, record), record)

    def _records(self) -> Records:
        return Records(self._notice)

    def _explain(self, name: str, decision: Decision) -> None:
        detail = "" if decision.record is None else decision.record.detail
        again = "localspec doctor --test-kernels tests it again"
        if decision.status is Status.NO_METAL and self.choices.of(name) == "on":
            self._notice("kernels are forced on, but there is no Metal here: their references are used instead")
        elif decision.status is Status.DISAGREES:
            self._notice(f"the {name} kernel disagrees with its reference here ({detail}): {_INSTEAD}; {again}")
        elif decision.status is Status.FAILED:
            self._notice(f"the {name} kernel failed here ({detail}): {_INSTEAD}; {again}")

    def _notice(self, line: str) -> None:
        if line not in self.notices:
            self.notices.append(line)
            self._tell(line)


_INSTEAD = "its reference is used instead"


def _status(choice: Choice, here: Place | None, record: Record | None) -> Status:
    if choice == "off":
        return Status.OFF
    if here is None:
        return Status.NO_METAL
    if record is None:
        return Status.UNTRIED
    if record.outcome != "agreed":  # also when it is forced on
        return Status.DISAGREES if record.outcome == "disagreed" else Status.FAILED
    if choice == "on":
        return Status.IN_USE
    if record.race is None:
        return Status.UNTRIED
    return Status.IN_USE if record.race.won else Status.LOST


def _warn(line: str) -> None:
    warnings.warn(line, KernelWarning, stacklevel=2)
