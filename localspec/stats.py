"""Counts and times of one generation, under the names that the bench, the JSON and the UI share.

Knows nothing of models: the engine books each round and each token, and the ratios are derived from those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from localspec.tokens import Level, Round, Source, Token


@dataclass(slots=True)
class DrafterStats:
    """The draft counts of one drafter, or of all."""

    rounds: int = 0
    """Rounds that drafted."""
    drafted: int = 0
    accepted: int = 0
    offered_at: list[int] = field(default_factory=list)
    """offered_at[i]: rounds that drafted at least i+1 tokens."""
    accepted_at: list[int] = field(default_factory=list)

    def book(self, drafted: int, accepted: int) -> None:
        if not drafted:
            return
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        while len(self.offered_at) < drafted:
            self.offered_at.append(0)
            self.accepted_at.append(0)
        for i in range(drafted):
            self.offered_at[i] += 1
            self.accepted_at[i] += i < accepted

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted; None when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / rounds that drafted."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Entry i: rounds that accepted draft i / rounds that drafted at least i+1."""
        return [a / o for a, o in zip(self.accepted_at, self.offered_at, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_by_position": self.acceptance_by_position,
        }


@dataclass(slots=True)
class Stats:
    """One generation. Times are seconds of wall clock."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Prompt tokens that were in the cache already and were not computed again."""
    emitted: int = 0
    target_passes: int = 0
    """Passes that decided tokens; prompt processing is not counted."""
    all_drafters: DrafterStats = field(default_factory=DrafterStats)
    by_drafter: dict[str, DrafterStats] = field(default_factory=dict)
    by_source: dict[str, int] = field(default_factory=dict)
    """Emitted tokens per source."""
    by_level: dict[str, int] = field(default_factory=dict)
    """Those of n-grams, per level at which these were found."""
    ttft_s: float = 0.0
    """From the call to the first token, prompt processing included."""
    prefill_s: float = 0.0
    """Prompt processing."""
    total_s: float = 0.0
    """From the call to the last token so far."""
    draft_s: float = 0.0
    """Drafting. Where a model's drafts went into their pass without anybody waiting for them, only the round as a whole
    is timed: the pass counts with what passes of its width took in the rounds that were timed in two, and what is left
    counts as drafting."""
    verify_s: float = 0.0
    """Target passes that decided tokens, from the launch to the decision."""

    def book_round(self, record: Round) -> None:
        """Count one target pass. Drafts behind a stop count as drafted, not as accepted."""
        self.target_passes += 1
        self.emitted += record.emitted
        if record.drafter is not None:
            self.all_drafters.book(len(record.drafted), record.accepted)
            self.by_drafter.setdefault(record.drafter, DrafterStats()).book(len(record.drafted), record.accepted)

    def book_token(self, source: Source, level: Level | None) -> None:
        """Count one emitted token."""
        self.by_source[source] = self.by_source.get(source, 0) + 1
        if level is not None:
            self.by_level[level] = self.by_level.get(level, 0) + 1

    def recount(self, rounds: Sequence[Round], tokens: Sequence[Token]) -> list[Round]:
        """Count anew as if only `tokens` had been emitted; returns the rounds, cut accordingly."""
        self.target_passes = self.emitted = 0
        self.all_drafters, self.by_drafter, self.by_source, self.by_level = DrafterStats(), {}, {}, {}
        left, kept = len(tokens), []
        for record in rounds:
            emitted = min(record.emitted, left)
            if emitted == 0:
                break
            left -= emitted
            kept.append(replace(record, emitted=emitted, accepted=min(record.accepted, emitted)))
            self.book_round(kept[-1])
        for token in tokens:
            self.book_token(token.source, token.level)
        return kept

    @property
    def drafted(self) -> int:
        return self.all_drafters.drafted

    @property
    def accepted(self) -> int:
        return self.all_drafters.accepted

    @property
    def acceptance_rate(self) -> float | None:
        return self.all_drafters.acceptance_rate

    @property
    def tokens_per_pass(self) -> float | None:
        """Emitted tokens / target passes."""
        return self.emitted / self.target_passes if self.target_passes else None

    @property
    def tpot_s(self) -> float | None:
        """(total - ttft) / (n - 1); None below two tokens."""
        return (self.total_s - self.ttft_s) / (self.emitted - 1) if self.emitted > 1 else None

    @property
    def decode_tps(self) -> float | None:
        """Tokens per second after the first one; None where one pass decided all, which leaves no time to measure."""
        tpot = self.tpot_s
        return 1 / tpot if tpot and self.target_passes > 1 else None

    @property
    def host_s(self) -> float:
        """Time that was neither prompt processing nor a drafter's nor a target pass."""
        return max(self.total_s - self.prefill_s - self.draft_s - self.verify_s, 0.0)

    def as_dict(self) -> dict[str, Any]:
        """All metrics, ready for JSON."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "emitted": self.emitted,
            "target_passes": self.target_passes,
            "tokens_per_pass": self.tokens_per_pass,
            **self.all_drafters.as_dict(),
            "by_drafter": {name: stats.as_dict() for name, stats in self.by_drafter.items()},
            "by_source": dict(self.by_source),
            "by_level": dict(self.by_level),
            "ttft_s": self.ttft_s,
            "prefill_s": self.prefill_s,
            "tpot_s": self.tpot_s,
            "decode_tps": self.decode_tps,
            "draft_s": self.draft_s,
            "verify_s": self.verify_s,
            "host_s": self.host_s,
            "total_s": self.total_s,
        }
