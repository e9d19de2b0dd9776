"""Row classes: pass sizes whose rows agree bit for bit, and the choice of one. `docs/exactness.md` has the reasons.

Pure values; `localspec.probe` finds them on a loaded model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

AFFORDABLE = 1.05
"""What `exact="auto"` lets plain decoding cost, relative to free sizes."""
_TIE = 0.02
"""Classes whose plain decoding costs the same but for this are told apart by their cheapest cost per row."""
_WORTH_FILLING = 0.9
"""A pass is filled up to a larger size than it needs when that costs less than this share."""


@dataclass(frozen=True, slots=True)
class RowClass:
    """Sizes of one class."""

    sizes: tuple[int, ...]
    """Ascending."""
    seconds: tuple[float, ...] = ()
    """Median cost of a pass of each size; empty where it was not measured."""

    def __post_init__(self) -> None:
        if self.seconds and len(self.seconds) != len(self.sizes):
            raise ValueError("one cost per size")

    @property
    def plain(self) -> int:
        """The size that plain decoding uses."""
        return self.width(1)

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    def width(self, rows: int) -> int:
        """The size to run `rows` rows in, at most `largest`: the smallest that holds them, or a much cheaper one."""
        fitting = [size for size in self.sizes if size >= rows]
        if not fitting:
            raise ValueError(f"{rows} rows are more than this class has: {self.sizes}")
        if not self.seconds:
            return fitting[0]
        cheapest = min(fitting, key=self.cost)
        return cheapest if self.cost(cheapest) < _WORTH_FILLING * self.cost(fitting[0]) else fitting[0]

    def cost(self, size: int) -> float:
        """Seconds of a pass of one of the sizes; NaN where it was not measured."""
        return self.seconds[self.sizes.index(size)] if self.seconds else math.nan

    def up_to(self, largest: int) -> RowClass:
        """The same class without the sizes above `largest`; `sizes` may become empty."""
        count = sum(size <= largest for size in self.sizes)
        return RowClass(self.sizes[:count], self.seconds[:count])

    def describe(self) -> str:
        """ "3 to 6 rows", "4, 8 or 12 rows", "one row"."""
        return f"{_spans(self.sizes)} row{'' if self.sizes == (1,) else 's'}"


@dataclass(frozen=True, slots=True)
class RowClasses:
    """What a probe found on one model, on one machine."""

    classes: tuple[RowClass, ...]
    """By their smallest size. Every size that was tried is in one of them or in `unfit`."""
    unfit: tuple[int, ...]
    """Sizes that do not even agree with themselves: a row's bits depend on where in the pass it stands."""
    one_row_s: float
    """Median cost of a one-row pass."""
    lengths: tuple[int, ...]
    """Context lengths that were tried."""
    attention_by_row: bool
    """Whether all attention could be computed row by row; where not, other lengths may round otherwise."""
    passes: int
    probe_s: float

    @property
    def tried(self) -> tuple[int, ...]:
        return tuple(sorted([size for one in self.classes for size in one.sizes] + list(self.unfit)))

    @property
    def alike(self) -> bool:
        """Whether all sizes are of one class."""
        return len(self.classes) == 1 and not self.unfit

    def relative(self, one: RowClass) -> float:
        """What plain decoding costs in that class, relative to one-row passes; 1 where costs were not measured."""
        return one.cost(one.plain) / self.one_row_s if one.seconds else 1.0

    def best(self) -> RowClass | None:
        """The class to decode in: the cheapest for plain decoding of those that leave room for a draft."""
        if self.alike and self.classes[0].largest > 1:
            return self.classes[0]
        roomy = [one for one in self.classes if one.largest > 1]
        if not roomy:
            return None
        least = min(self.relative(one) for one in roomy)
        near = [one for one in roomy if self.relative(one) <= least * (1 + _TIE)]
        return min(near, key=lambda one: min(one.cost(size) / size for size in one.sizes))

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        best = self.best()
        return {
            "classes": [
                {"sizes": list(one.sizes), "seconds": list(one.seconds), "plain": one.plain} for one in self.classes
            ],
            "unfit": list(self.unfit),
            "best": None if best is None else list(best.sizes),
            "plain_cost": None if best is None else self.relative(best),
            "one_row_s": self.one_row_s,
            "context_lengths": list(self.lengths),
            "attention_by_row": self.attention_by_row,
            "passes": self.passes,
            "probe_s": self.probe_s,
        }


def _spans(sizes: Sequence[int]) -> str:
    words = {1: "one"} if len(sizes) == 1 else {}
    spans: list[list[int]] = []
    for size in sizes:
        if spans and size == spans[-1][1] + 1:
            spans[-1][1] = size
        else:
            spans.append([size, size])
    parts = []
    for low, high in spans:
        if high - low >= 2:
            parts.append(f"{low} to {high}")
        else:
            parts += [words.get(size, str(size)) for size in range(low, high + 1)]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"
