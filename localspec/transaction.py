"""Cache transactions: what one target pass appended is kept in part, or taken back, and the result is checked.

Between rounds every cache holds the same number of tokens, and the session knows that number. Works on caches that can
be cut at the end; others are named by `blocking_cache`, and the engine then decodes plainly.
"""

from __future__ import annotations

from typing import Any

from localspec.errors import CacheError

_TRIMMABLE = ("KVCache", "QuantizedKVCache")


def blocking_cache(caches: list[Any]) -> str | None:
    """The type name of the first cache that cannot be rolled back exactly; None when all can."""
    for cache in caches:
        name = type(cache).__name__
        if name not in _TRIMMABLE:
            return name
    return None


class Transaction:
    """Passes over a list of caches: `begin(rows)`, run the pass, then `commit(length)`.

    Invariant outside of begin..commit: every cache holds exactly `length` tokens.
    """

    def __init__(self, caches: list[Any]) -> None:
        self.caches = caches
        self.blocked_by = blocking_cache(caches)
        """The cache type that rules out taking anything back; None when all can."""
        self.length = 0
        """Tokens committed to every cache."""
        self.held = 0
        """Tokens in the caches, those of passes begun and not yet committed included."""

    def begin(self, rows: int) -> None:
        """Announce a pass of `rows` rows, which the caller runs next."""
        self.held += rows

    def commit(self, length: int, in_flight: int = 0) -> None:
        """Keep the first `length` tokens of what the caches hold, and take the rest back.

        `in_flight`: rows behind those which belong to a pass that is still under way; they stay, uncommitted. Raises
        CacheError, naming the layer, when a cache does not follow or cannot be cut.
        """
        if self.blocked_by is None:
            for layer, cache in enumerate(self.caches):
                self._cut(layer, cache, length + in_flight)
        elif length + in_flight != self.held:
            raise CacheError(f"a {self.blocked_by} cannot be cut from {self.held} to {length + in_flight} tokens")
        self.length, self.held = length, length + in_flight

    def _cut(self, layer: int, cache: Any, length: int) -> None:
        held, excess = cache.offset, self.held - length
        trimmed = cache.trim(excess) if held == self.held and excess > 0 else 0
        if held != self.held or trimmed != excess or cache.offset != length:
            raise CacheError(
                f"the cache of layer {layer} ({type(cache).__name__}) holds {cache.offset} tokens where {length} "
                "were to be kept; start a new conversation"
            )
