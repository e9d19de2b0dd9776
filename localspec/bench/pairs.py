"""What was measured: one run of the engine, a pair of them, and where their ids part.

Knows nothing of how runs are made or shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from localspec.stats import Stats

NEAR_TIE = 1e-3
"""Log-probabilities this close are told apart by the last bits of a logit, which passes of different sizes may round
differently; measured differences are below 1e-4 in float32."""


@dataclass(frozen=True, slots=True)
class Run:
    """One generation and its wall clock."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Per token, before temperature and filters."""
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
    plain_logprob: float | None
    speculative_logprob: float | None
    greedy: bool

    @property
    def near_tie(self) -> bool | None:
        """Whether the last bits of two logits explain it; None where that cannot be told from the record."""
        if not self.greedy or self.plain_logprob is None or self.speculative_logprob is None:
            return None  # with sampling the noise decides as well, and the record does not hold it
        # Before the first difference the contexts are equal, so each run's choice is its own most probable token.
        return abs(self.plain_logprob - self.speculative_logprob) < NEAR_TIE

    def sentence(self) -> str:
        """What parted, and what to think of it."""
        where = f"token {self.index}: plain {_show(self.plain_id)}, speculative {_show(self.speculative_id)}"
        if self.near_tie is None:
            return f"{where}: a near-tie in the last bits or a bug, this record cannot tell which"
        assert self.plain_logprob is not None
        assert self.speculative_logprob is not None
        scores = f"log-probabilities {self.plain_logprob:.6f} and {self.speculative_logprob:.6f}"
        return f"{where}: {scores}, {'a near-tie in the last bits' if self.near_tie else 'no near-tie: this is a bug'}"

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "index": self.index,
            "plain_id": self.plain_id,
            "speculative_id": self.speculative_id,
            "plain_logprob": self.plain_logprob,
            "speculative_logprob": self.speculative_logprob,
            "near_tie": self.near_tie,
        }


def first_difference(plain: Run, speculative: Run, *, greedy: bool) -> Difference | None:
    """Where the ids part first, or None when they are identical."""
    if plain.ids == speculative.ids:
        return None
    shorter = min(len(plain.ids), len(speculative.ids))
    index = next((i for i in range(shorter) if plain.ids[i] != speculative.ids[i]), shorter)
    return Difference(
        index,
        _at(plain.ids, index),
        _at(speculative.ids, index),
        _at(plain.logprobs, index),
        _at(speculative.logprobs, index),
        greedy,
    )


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
    greedy: bool
    difference: Difference | None = field(init=False)

    def __post_init__(self) -> None:
        found = first_difference(self.plain, self.speculative, greedy=self.greedy)
        object.__setattr__(self, "difference", found)

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


def _at(values: Sequence[Any], index: int) -> Any:
    return values[index] if index < len(values) else None


def _show(token_id: int | None) -> str:
    return "had ended" if token_id is None else f"has id {token_id}"
