"""Whether kernels are wanted: what the user said, in an option, a keyword or the environment.

Knows nothing of kernels but their names, and loads none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from localspec.errors import SettingsError
from localspec.kernels import registry

Choice = Literal["auto", "on", "off"]
"""auto: used where it agreed with its reference and won its race. on: the race does not matter. off: the reference."""

VARIABLE = "LOCALSPEC_KERNELS"
_CHOICES: dict[str, Choice] = {choice: choice for choice in get_args(Choice)}


@dataclass(frozen=True, slots=True)
class Choices:
    """One for each kernel."""

    rest: Choice = "auto"
    """For kernels that have none of their own."""
    named: Mapping[str, Choice] = field(default_factory=dict)

    def of(self, name: str) -> Choice:
        """The choice for one kernel."""
        return self.named.get(name, self.rest)


def choices(text: str = "auto") -> Choices:
    """What `text` says; what it leaves at auto is for LOCALSPEC_KERNELS to say. Raises SettingsError."""
    own = parse(text)
    if own.rest != "auto":  # it speaks of all kernels, so nothing is left to say
        return own
    environment = parse(os.environ.get(VARIABLE) or "auto", VARIABLE)
    return Choices(environment.rest, {**environment.named, **own.named})


def parse(text: str, what: str = "kernels") -> Choices:
    """`auto`, `on` or `off` for all kernels, NAME=CHOICE for one, or several of these with commas between.

    `what` is the setting's name for the SettingsError.
    """
    rest: list[Choice] = []
    named: dict[str, Choice] = {}
    for item in text.split(",") if isinstance(text, str) else [repr(text)]:
        name, equals, value = (part.strip().lower() for part in item.rpartition("="))
        choice = _CHOICES.get(value)
        if choice is None or (equals and name not in registry.names()):
            known = f"NAME is one of {', '.join(registry.names())}"
            raise SettingsError(f"{what}: {item.strip()!r} is not auto, on, off or NAME=on; {known}")
        if name in named if equals else rest:
            raise SettingsError(f"{what}: {item.strip()!r} is one choice too many for {name or 'all kernels'}")
        if equals:
            named[name] = choice
        else:
            rest.append(choice)
    return Choices(rest[0] if rest else "auto", named)
