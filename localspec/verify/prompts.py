"""What verification decodes from: a few built-in texts, and one as long as each sliding window that is to fill."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localspec.errors import LocalspecError

if TYPE_CHECKING:
    from localspec.engine import Engine

KINDS = ("open-chat", "json", "quoting")
"""Of the bench's workloads: one whose answer repeats little of its prompt, one that repeats much, one nearly all."""
LONGEST = 256
"""Tokens; of a longer text the end is taken."""
WINDOW_LIMIT, QUICK_WINDOW_LIMIT = 4096, 1024
"""The longest window that is filled."""
_FOLLOW_UP = "\nNow say the same again in other words."
_SPARE = 64
"""Tokens of context beyond prompt and answers: filler rows, and a follow-up turn's question."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids to start from."""

    name: str
    ids: list[int]
    window: int | None = None
    """The sliding window that fills while this one's answer is decoded."""


@dataclass(frozen=True, slots=True)
class Windows:
    """The sliding windows of a model, in tokens, and which of them prompts pass."""

    sizes: list[int]
    passed: list[int]
    limit: int
    """The longest context that was to be tried."""

    @property
    def left_out(self) -> list[int]:
        """Those that are too long for it."""
        return [size for size in self.sizes if size > max(self.passed, default=0)]


def windows(engine: Engine, tokens: int, limit: int) -> Windows:
    """The model's windows; of those that fill within `limit` and the model's context the smallest and the largest are
    passed: what lies between fills on the way to the largest."""
    from localspec.caches.leaves import leaves_of, window_of

    sizes = sorted({size for size in map(window_of, leaves_of(engine.target.new_caches())) if size})
    most = min(limit, _room(engine, tokens))
    within = [size for size in sizes if size <= most]
    return Windows(sizes, sorted({within[0], within[-1]}) if within else [], most)


def prompts(engine: Engine, tokens: int, *, quick: bool, passed: Sequence[int]) -> list[Prompt]:
    """The built-in prompts for answers of `tokens` tokens (two of them when `quick`), and one for each window of
    `passed`. Raises LocalspecError where the model's context is too short for any."""
    room = min(LONGEST, _room(engine, tokens))
    if room < 8:
        raise LocalspecError(f"{engine.name}'s context is too short for answers of {tokens} tokens: give fewer")
    texts = _texts(engine) if engine.tokenizer is not None else _numbers(engine)
    chosen = [Prompt(name, ids[-room:]) for name, ids in texts[: 2 if quick else None]]
    whole = [token for _, ids in texts for token in ids]
    for size in passed:
        length = max(size - tokens // 2, 4)
        chosen.append(Prompt(f"window of {size}", (whole * (length // len(whole) + 1))[:length], size))
    return chosen


def follow_up(engine: Engine) -> list[int]:
    """What a second turn adds behind the first one's answer."""
    if engine.tokenizer is None:
        return [id % engine.target.vocabulary_size for id in (3, 14, 15, 9, 2, 6)]
    return engine.tokenize(_FOLLOW_UP)[: _SPARE // 2]


def _room(engine: Engine, tokens: int) -> int:
    """Tokens that a prompt may have, for two answers to follow it."""
    known = [n for n in (engine.context_length, engine.target.positions) if n is not None]
    return min(known, default=2**31) - 2 * tokens - _SPARE


def _texts(engine: Engine) -> list[tuple[str, list[int]]]:
    """The shortest prompt of each kind."""
    from localspec.bench.run import encode
    from localspec.bench.workloads import choose_workloads

    found = []
    for kind in KINDS:
        (workload,) = choose_workloads([kind])
        encoded = [(f"{kind}/{prompt.name}", encode(engine, prompt)) for prompt in workload.prompts]
        found.append(min(encoded, key=lambda one: len(one[1])))
    return found


def _numbers(engine: Engine) -> list[tuple[str, list[int]]]:
    """Ids at random, with blocks that come again, for models without a tokenizer."""
    chance, size = random.Random(11), engine.target.vocabulary_size

    def some(count: int) -> list[int]:
        return [chance.randrange(size) for _ in range(count)]

    block, other = some(9), some(5)
    repeats = [*block, *other, *block, *some(3), *other, *block[:4]]
    return [("ids at random", some(24)), ("ids that repeat", repeats), ("a few ids", some(5))]
