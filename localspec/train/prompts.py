"""Prompts made of tasks and what the tasks are about, read from prompts.toml.

Knows nothing of engines or tokenizers.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_SLOT = re.compile(r"\{([a-z]+)\}")


@dataclass(frozen=True, slots=True)
class Prompts:
    """What requests are made of."""

    tasks: tuple[str, ...]
    """Texts with one slot each: the name, in braces, of one of the fillings."""
    fillings: dict[str, tuple[str, ...]]
    follow_ups: tuple[str, ...]
    """Second turns that fit any answer."""

    def of(self, task: str) -> list[str]:
        """All requests that a task makes."""
        slot = _SLOT.search(task)
        if slot is None:
            return [task]
        return [task.replace(slot[0], filling) for filling in self.fillings[slot[1]]]

    def shuffled(self, seed: int) -> Iterator[str]:
        """Requests without end, always the same for a seed: in each round every task once, and each of its fillings
        once before any comes again."""
        shuffle = random.Random(seed).shuffle
        requests = [self.of(task) for task in self.tasks]
        for of_task in requests:
            shuffle(of_task)
        turn = 0
        while True:
            order = list(range(len(requests)))
            shuffle(order)
            for task in order:
                yield requests[task][turn % len(requests[task])]
            turn += 1


@cache
def read_prompts() -> Prompts:
    """The package's own."""
    found = tomllib.loads((files("localspec.train") / "prompts.toml").read_text(encoding="utf-8"))
    return Prompts(
        tuple(task.strip() for tasks in found["tasks"].values() for task in tasks),
        {name: tuple(filling.strip() for filling in fillings) for name, fillings in found["fillings"].items()},
        tuple(found["follow_ups"]),
    )
