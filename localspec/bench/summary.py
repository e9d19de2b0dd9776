"""Figures from pairs: medians and spreads over pairs, ratios of pooled counts. Pure arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from localspec.bench.pairs import Pair
from localspec.stats import DrafterStats


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and its range; made of at least one value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """None when no value is there."""
        known = [value for value in values if value is not None]
        return cls(statistics.median(known), min(known), max(known)) if known else None

    def as_dict(self) -> dict[str, float]:
        return {"median": self.median, "min": self.low, "max": self.high}


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one kind of work, or of everything."""

    name: str
    title: str
    pairs: int
    speedup: Spread | None
    """Of the pairs' decoding times."""
    end_to_end_speedup: Spread | None
    total_speedup: float | None
    """Sum of plain decoding times / sum of speculative ones, per token."""
    end_to_end_total_speedup: float | None
    tokens_per_pass: float | None
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    acceptance_by_position: list[float]
    by_drafter: dict[str, dict[str, Any]]
    plain_decode_tps: float | None
    """Median over the plain runs."""
    speculative_decode_tps: float | None
    identical: int
    """Pairs with identical ids."""

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON, under the names that the design gives the metrics."""
        return {
            "name": self.name,
            "title": self.title,
            "pairs": self.pairs,
            "speedup": _spread_dict(self.speedup),
            "end_to_end_speedup": _spread_dict(self.end_to_end_speedup),
            "total_speedup": self.total_speedup,
            "end_to_end_total_speedup": self.end_to_end_total_speedup,
            "tokens_per_pass": self.tokens_per_pass,
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_by_position": self.acceptance_by_position,
            "by_drafter": self.by_drafter,
            "decode_tps": {"plain": self.plain_decode_tps, "speculative": self.speculative_decode_tps},
            "identical": self.identical,
        }


def summarize(name: str, title: str, pairs: Sequence[Pair]) -> Summary:
    """Pool the pairs: times by median and sum, counts by sum, so that a long answer weighs as much as it took."""
    speculative = [pair.speculative.stats for pair in pairs]
    pooled = pool(stats.all_drafters for stats in speculative)
    names = sorted({drafter for stats in speculative for drafter in stats.by_drafter})
    emitted, passes = sum(s.emitted for s in speculative), sum(s.target_passes for s in speculative)
    plain_tps = Spread.of(pair.plain.stats.decode_tps for pair in pairs)
    speculative_tps = Spread.of(stats.decode_tps for stats in speculative)
    return Summary(
        name=name,
        title=title,
        pairs=len(pairs),
        speedup=Spread.of(pair.speedup for pair in pairs),
        end_to_end_speedup=Spread.of(pair.end_to_end_speedup for pair in pairs),
        total_speedup=_total(pairs, [(p.plain.decode_s, p.speculative.decode_s) for p in pairs]),
        end_to_end_total_speedup=_total(pairs, [(p.plain.wall_s, p.speculative.wall_s) for p in pairs]),
        tokens_per_pass=emitted / passes if passes else None,
        acceptance_rate=pooled.acceptance_rate,
        mean_acceptance_length=pooled.mean_acceptance_length,
        acceptance_by_position=pooled.acceptance_by_position,
        by_drafter={
            drafter: pool(s.by_drafter[drafter] for s in speculative if drafter in s.by_drafter).as_dict()
            for drafter in names
        },
        plain_decode_tps=plain_tps.median if plain_tps else None,
        speculative_decode_tps=speculative_tps.median if speculative_tps else None,
        identical=sum(pair.identical for pair in pairs),
    )


def pool(parts: Iterable[DrafterStats]) -> DrafterStats:
    """The draft counts of several generations as one."""
    total = DrafterStats()
    for part in parts:
        total.rounds += part.rounds
        total.drafted += part.drafted
        total.accepted += part.accepted
        _add(total.offered_at, part.offered_at)
        _add(total.accepted_at, part.accepted_at)
    return total


def _add(into: list[int], counts: Sequence[int]) -> None:
    into.extend([0] * (len(counts) - len(into)))
    for index, count in enumerate(counts):
        into[index] += count


def _total(pairs: Sequence[Pair], seconds: Sequence[tuple[float, float]]) -> float | None:
    plain_s, speculative_s = sum(s[0] for s in seconds), sum(s[1] for s in seconds)
    plain_tokens = sum(len(pair.plain.ids) for pair in pairs)
    speculative_tokens = sum(len(pair.speculative.ids) for pair in pairs)
    if not plain_tokens or not speculative_tokens or plain_s <= 0 or speculative_s <= 0:
        return None
    return (plain_s / plain_tokens) / (speculative_s / speculative_tokens)


def _spread_dict(spread: Spread | None) -> dict[str, float] | None:
    return None if spread is None else spread.as_dict()
