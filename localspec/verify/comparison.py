"""One answer decoded twice, plainly and with drafts: where the two part, by how much, and what to think of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from localspec.bench.gap import key_gap, top_two_gap
from localspec.bench.pairs import Difference, first_difference
from localspec.settings import Settings

if TYPE_CHECKING:
    from localspec.engine import Engine
    from localspec.generation import Generation
    from localspec.tokens import Token

Outcome = Literal["identical", "near-tie", "bug"]

FAR = 10.0
"""Times the tolerance for logits that a log-probability may be off, before that is called a bug where last bits may
differ: what follows from a wrong row in a cache is larger by far, what rounding does smaller."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What the engine promises under the settings that are verified."""

    line: str
    """In the engine's words."""
    tolerance: float
    """How much last bits may move the difference of two logits in this model's format."""

    @property
    def bits(self) -> bool:
        """Whether every last bit is promised, wherever it is looked at."""
        # "bit for bit with ... tokens of context, where tried: ..." promises less.
        return self.line.startswith("bit for bit:")


@dataclass(frozen=True, slots=True)
class Case:
    """What was decoded, and how."""

    way: str
    """Who drafted: "ngram", "all drafters", "forced rejections", ..."""
    prompt: str
    temperature: float
    seed: int
    draft_length: int | str
    window: int | None = None
    """The sliding window that filled on the way."""

    @property
    def title(self) -> str:
        return f"{self.way}, {self.prompt}, temperature {self.temperature:g}, seed {self.seed}"

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came out of one case."""

    case: Case
    promise: Promise
    tokens: int = 0
    """Compared: up to the first that differs, that one included."""
    other_bits: int = 0
    """Equal tokens whose log-probability has other bits."""
    farthest: float = 0.0
    """Largest difference of a log-probability of equal tokens."""
    difference: Difference | None = None
    position: int | None = None
    """Of the first token that differs, prompt included."""
    top_two: float | None = None
    """How far apart the target's two first choices are there (their keys: noise included above temperature 0)."""
    drafted: int = 0
    accepted: int = 0
    kept: tuple[int, ...] = ()
    """Drafts kept, for each pass in which the next draft was rejected."""
    error: str = ""
    """What ended the run instead."""

    @property
    def outcome(self) -> Outcome:
        bits = self.promise.bits
        if self.error or (bits and self.other_bits) or not self.farthest <= FAR * self.promise.tolerance:
            return "bug"
        if self.difference is None:
            return "identical"
        return "near-tie" if self.difference.near_tie and not bits else "bug"

    def sentence(self) -> str:
        """What is not identical, in one line."""
        if self.error:
            return f"{self.case.title}: failed: {self.error}"
        found = []
        if self.difference is not None:
            found.append(self._parted(self.difference))
        if self.promise.bits and self.other_bits:
            found.append(f"{self.other_bits} log-probabilities have other bits, by up to {self.farthest:.2g}: a bug")
        elif self.outcome == "bug" and (self.difference is None or self.difference.near_tie):
            found.append(f"a log-probability is {self.farthest:.2g} off, more than rounding does: a bug")
        return f"{self.case.title}: {'; '.join(found)}"

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON; what is infinite is null."""
        return {
            **self.case.as_dict(),
            "outcome": self.outcome,
            "tokens": self.tokens,
            "other_bits": self.other_bits,
            "largest_logprob_difference": _finite(self.farthest),
            "difference": None if self.difference is None else self.difference.as_dict(),
            "position": self.position,
            "top_two_gap": _finite(self.top_two),
            "drafted": self.drafted,
            "accepted": self.accepted,
            "kept_before_a_rejection": list(self.kept),
            "error": self.error or None,
        }

    def _parted(self, found: Difference) -> str:
        ids = " and ".join("the end" if id is None else f"id {id}" for id in (found.plain_id, found.speculative_id))
        where = f"token {found.index} (position {self.position}) is {ids}"
        verdict = "a near-tie" if self.outcome == "near-tie" else "a bug"
        if found.gap is None:
            return f"{where}: {verdict}"
        two = "" if self.top_two is None else f"top two {self.top_two:.2g} apart, "
        return f"{where}, up to {found.gap:.2g} below the top; {two}last bits move {found.tolerance:.2g}: {verdict}"


def compare(engine: Engine, case: Case, promise: Promise, plain: Generation, drafted: Generation) -> Comparison:
    """Compare two answers to one prompt; the gap where they part is computed by passes of its own."""
    difference = first_difference(plain.ids, drafted.ids)
    same = len(plain.ids) if difference is None else difference.index
    other_bits, farthest = _bits(plain.tokens[:same], drafted.tokens[:same])
    found = Comparison(
        case,
        promise,
        tokens=same + (difference is not None),
        other_bits=other_bits,
        farthest=farthest,
        drafted=drafted.stats.drafted,
        accepted=drafted.stats.accepted,
        kept=_kept(drafted),
    )
    if difference is None:
        return found
    context = [*plain.prompt_ids, *plain.ids[:same]]
    first, second, top_two = difference.plain_id, difference.speculative_id, None
    if first is not None and second is not None:
        settings = Settings(temperature=case.temperature, seed=case.seed)
        gap, tolerance = key_gap(engine, context, settings, first, second)
        difference = replace(difference, gap=gap, tolerance=tolerance)
        top_two = top_two_gap(engine, context, settings)
    return replace(found, difference=difference, position=len(context), top_two=top_two)


def joined(first: Comparison, second: Comparison) -> Comparison:
    """Two turns of one case as one comparison; nothing may differ in the first but bits.

    A fault of the first is the case's: the second may have been promised less.
    """
    if first.outcome == "bug":
        return first
    return replace(
        second,
        tokens=first.tokens + second.tokens,
        other_bits=first.other_bits + second.other_bits,
        farthest=max(first.farthest, second.farthest),
        drafted=first.drafted + second.drafted,
        accepted=first.accepted + second.accepted,
        kept=first.kept + second.kept,
    )


def _bits(plain: Sequence[Token], drafted: Sequence[Token]) -> tuple[int, float]:
    """(how many log-probabilities differ, by how much at most)."""
    apart = [abs(a.logprob - b.logprob) for a, b in zip(plain, drafted, strict=True) if a.logprob != b.logprob]
    # Where one is not a number nothing compares with it: as far off as can be.
    return len(apart), max((math.inf if math.isnan(d) else d for d in apart), default=0.0)


def _kept(generation: Generation) -> tuple[int, ...]:
    """Drafts kept in each pass that rejected one. A pass cut short by the limit has not come to a rejection."""
    return tuple(r.accepted for r in generation.rounds if r.accepted < len(r.drafted) and r.emitted == r.accepted + 1)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
