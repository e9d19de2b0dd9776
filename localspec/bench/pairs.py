"""What was measured: one run of the engine, a pair of them, and where their ids part.

Knows nothing of how runs are made or shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from localspec.stats import Stats


@dataclass(frozen=True, slots=True)
class Run:
    """One generation and its wall clock."""

    ids: tuple[int, ...]
    wall_s: float
    """From the call to the end of the generation, as the caller sees it."""
    stats: Stats

    @property
    def decode_s(self) -> float:
        """Wall clock without prompt processing, which is the same work in both runs of a pair."""
        return max(self.wall_s - self.stats.prefill_s, 0.0)

    def as_dict(self) -> dict[str, Any]:
        """The raw figures, ready for JSON."""
        return {"wall_s": self.wall_s, "decode_s": self.decode_s, **self.stats.as_dict()}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two runs part; an id is None where that run had ended."""

    index: int
    """Index among the emitted tokens, from 0."""
    plain_id: int | None
    speculative_id: int | None
    gap: float | None = None
    """How far below the top the farther of the two ids is, by a pass of its own; None when it was not computed."""
    tolerance: float | None = None
    """How much the last bits of the logits can move that distance."""

    @property
    def near_tie(self) -> bool | None:
        """Whether the last bits explain the difference; None when the gap is unknown."""
        if self.gap is None or self.tolerance is None:
            return None
        return self.gap <= self.tolerance

    def sentence(self) -> str:
        """What parted, and what to think of it."""
        where = f"token {self.index}: plain {_show(self.plain_id)}, speculative {_show(self.speculative_id)}"
        if self.gap is None:
            return f"{where}: a near-tie in the last bits or a bug, the gap between the two is unknown"
        verdict = "a near-tie in the last bits" if self.near_tie else "no near-tie, so this is a bug"
        return f"{where}: both within {self.gap:.2g} of the top, where last bits move {self.tolerance:.2g}: {verdict}"

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON, where an infinite gap has no number and is null."""
        return {
            "index": self.index,
            "plain_id": self.plain_id,
            "speculative_id": self.speculative_id,
            "gap": self.gap if self.gap is not None and math.isfinite(self.gap) else None,
            "tolerance": self.tolerance,
            "near_tie": self.near_tie,
        }


def first_difference(plain: Sequence[int], speculative: Sequence[int]) -> Difference | None:
    """Where two lists of ids part first, or None when they are identical."""
    if list(plain) == list(speculative):
        return None
    shorter = min(len(plain), len(speculative))
    index = next((i for i in range(shorter) if plain[i] != speculative[i]), shorter)
    return Difference(index, _at(plain, index), _at(speculative, index))


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt decoded both ways, one right after the other, with one seed."""

    kind: str
    prompt: str
    repeat: int
    order: str
    """"plain first" or "speculative first"."""
    plain: Run
    speculative: Run
    difference: Difference | None
    """Where the ids part; None when they are identical."""

    @property
    def identical(self) -> bool:
        return self.difference is None

    @property
    def speedup(self) -> float | None:
        """Plain decoding time / speculative decoding time, per token should the runs differ in length."""
        return _ratio(self.plain.decode_s, self.plain, self.speculative.decode_s, self.speculative)

    @property
    def end_to_end_speedup(self) -> float | None:
        """The same with prompt processing in both times."""
        return _ratio(self.plain.wall_s, self.plain, self.speculative.wall_s, self.speculative)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "kind": self.kind,
            "prompt": self.prompt,
            "repeat": self.repeat,
            "order": self.order,
            "speedup": self.speedup,
            "end_to_end_speedup": self.end_to_end_speedup,
            "identical": self.identical,
            "difference": None if self.difference is None else self.difference.as_dict(),
            "plain": self.plain.as_dict(),
            "speculative": self.speculative.as_dict(),
        }


def _ratio(plain_s: float, plain: Run, speculative_s: float, speculative: Run) -> float | None:
    if not plain.ids or not speculative.ids or speculative_s <= 0 or plain_s <= 0:
        return None
    return (plain_s / len(plain.ids)) / (speculative_s / len(speculative.ids))


def _at(values: Sequence[int], index: int) -> int | None:
    return values[index] if index < len(values) else None


def _show(token_id: int | None) -> str:
    return "had ended" if token_id is None else f"has id {token_id}"
