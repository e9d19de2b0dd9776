"""The record of one emitted token and of one round: facts from the engine that every view reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Source = Literal["plain", "ngram", "mtp", "draft", "skip", "text", "grammar", "resampled", "bonus"]
"""Where a token came from: `plain` (nothing was proposed), the drafter whose proposal was accepted (`ngram`, `mtp`,
`draft`, a small model; `skip`, some of the target's layers; `text`, a small model with another vocabulary; `grammar`,
which allowed nothing else), `resampled` (chosen by the target where it rejected a draft) or `bonus` (the target's own
token after a proposal that was accepted whole)."""
Level = Literal["context", "learned", "seed"]
"""Where an n-gram draft was found: in this context, in what earlier answers taught, or in the user's own texts."""


@dataclass(frozen=True, slots=True)
class Token:
    """One emitted token with its provenance."""

    id: int
    text: str
    """The text this token adds. Empty for an end token, for a token that leaves a character unfinished (the token
    that finishes it carries it), and for text cut off by a stop string."""
    source: Source
    position: int
    """Index in the whole sequence, prompt included: the position that keys this token's noise."""
    round: int
    """Index of the target pass that emitted it, from 0 in each generation."""
    p: float
    """Probability under the distribution that plain decoding samples from: grammar, temperature and filters applied."""
    q: float | None
    """Probability under the draft distribution, 1.0 for a deterministic draft; None when this was not a draft."""
    logprob: float
    """Natural logarithm of the model's probability before grammar, temperature and filters, and after logit bias,
    penalties and logits processors: what mlx-lm reports. Without those it is the model's own."""
    draft_index: int | None = None
    """Index within the proposal (0 is the first draft); None when this was not a draft."""
    match_length: int | None = None
    """Tokens that matched before the proposal's first token when an n-gram proposed it; None otherwise."""
    level: Level | None = None
    """Where the n-gram that proposed it was found; None when none did."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """(id, logprob) of the `logprobs=k` likeliest tokens at this place, the likeliest first and of equal ones the
    lowest id first; `logprob` as above. Empty unless asked for."""


@dataclass(frozen=True, slots=True)
class Round:
    """One target pass: what was proposed and what became of it."""

    index: int
    drafter: Source | None
    """Who proposed; None when nothing was proposed."""
    drafted: tuple[int, ...]
    """Proposed ids; `drafted[accepted:]` were rejected, or lay behind a stop."""
    accepted: int
    emitted: int
    """Tokens kept from this round, the resampled or bonus token included."""
    position: int
    """Position of the first token that the round decided."""
