"""The leaves of a model's cache list, and how each kind can be put back: by cutting its end, or from a snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from localspec.caches.window import WindowCache
from localspec.errors import CacheError


@dataclass(frozen=True, slots=True)
class CutMark:
    """A moment of a cache that counts its tokens."""

    offset: int


class CutLeaf:
    """A key/value cache whose newest tokens can be dropped."""

    def __init__(self, cache: Any, name: str) -> None:
        self.cache = cache
        self.name = name
        """Where it stands and what it is, for messages."""

    def mark(self) -> CutMark:
        """This moment, to come back to."""
        return CutMark(self.cache.offset)

    def arrays(self) -> list[mx.array]:
        """All arrays in it."""
        return list(_arrays(_attributes(self.cache)))

    def can_cut(self, rows: int) -> bool:
        """Whether the newest `rows` tokens can be dropped."""
        if isinstance(self.cache, WindowCache):
            return self.cache.can_trim(rows)
        if isinstance(self.cache, ChunkedKVCache):
            # The next row attends from the beginning of its chunk on; passes since may have dropped some of that.
            end = self.cache.offset - rows
            return bool(end >= 0 and self.cache.start_position <= end // self.cache.chunk_size * self.cache.chunk_size)
        return bool(rows <= self.cache.offset)

    def cut(self, rows: int) -> None:
        """Drop the newest `rows` tokens; raises CacheError, naming the layer, when the cache does not follow."""
        if not rows:
            return
        before = self.cache.offset
        if isinstance(self.cache, ConcatenateKVCache):
            # Its own trim moves the offset only, and the next update would append behind the dropped rows. Before the
            # offset says that they are gone: an interrupt between the two can be made good.
            end = max(before - rows, 0)
            self.cache.keys, self.cache.values = self.cache.keys[..., :end, :], self.cache.values[..., :end, :]
        trimmed = self.cache.trim(rows) if rows > 0 else 0
        if trimmed != rows or self.cache.offset != before - rows:
            raise CacheError(f"{self.name} gave back {trimmed} of {rows} tokens; start a new conversation")


class SnapshotLeaf:
    """Recurrent state, or a kind of cache that nobody here has seen: all its attributes are kept and put back."""

    def __init__(self, cache: Any, name: str) -> None:
        self.cache = cache
        self.name = name
        """Where it stands and what it is, for messages."""

    def mark(self) -> dict[str, Any]:
        """This moment, to come back to; right however the cache is used afterwards."""
        return {key: _own(value) for key, value in _attributes(self.cache).items()}

    def restore(self, mark: dict[str, Any]) -> None:
        """Come back to the moment of `mark`, as often as wanted."""
        for key in list(_attributes(self.cache)):
            if key not in mark:
                delattr(self.cache, key)
        for key, value in mark.items():
            # Handles of its own again, or the next pass would write into the mark.
            setattr(self.cache, key, _own(value))

    def arrays(self) -> list[mx.array]:
        """All arrays in it."""
        return list(_arrays(_attributes(self.cache)))


Leaf = CutLeaf | SnapshotLeaf


def leaves_of(caches: list[Any]) -> list[Leaf]:
    """The leaves of a cache list in order, lists within it included."""
    return [leaf for layer, cache in enumerate(caches) for leaf in _leaves(cache, f"the cache of layer {layer}")]


def with_windows(cache: Any) -> Any:
    """The same cache with each fresh RotatingKVCache replaced by a WindowCache, which can take rows back."""
    if type(cache) is RotatingKVCache and cache.keep == 0 and cache.offset == 0:
        return WindowCache(cache.max_size)
    if type(cache) is CacheList:
        cache.caches = tuple(with_windows(inner) for inner in cache.caches)
    return cache


_CUT = (KVCache, QuantizedKVCache, ConcatenateKVCache, ChunkedKVCache, WindowCache)


def _leaves(cache: Any, name: str) -> Iterator[Leaf]:
    if type(cache) is CacheList:
        for index, inner in enumerate(cache.caches):
            yield from _leaves(inner, f"{name}, part {index}")
    else:
        # By exact type: a subclass may keep more than its parent's `trim` knows of.
        kind = CutLeaf if type(cache) in _CUT else SnapshotLeaf
        yield kind(cache, f"{name} ({type(cache).__name__})")


def window_of(leaf: Leaf) -> int:
    """Tokens that a sliding window (or a chunk of attention) holds at most; 0 where there is none."""
    return int(getattr(leaf.cache, "max_size", None) or getattr(leaf.cache, "chunk_size", None) or 0)


def is_recurrent(leaf: Leaf) -> bool:
    """Whether the leaf is mlx-lm's holder of recurrent state."""
    return isinstance(leaf.cache, ArraysCache)


def _attributes(holder: Any) -> dict[str, Any]:
    attributes = dict(getattr(holder, "__dict__", {}))
    for kind in type(holder).__mro__:
        for slot in getattr(kind, "__slots__", ()):
            if hasattr(holder, slot):
                attributes[slot] = getattr(holder, slot)
    return attributes


def _own(value: Any) -> Any:
    """A copy that later changes cannot reach. Arrays get a handle of their own: `a[...] = b` changes the old one."""
    if isinstance(value, mx.array):
        return mx.array(value)
    if isinstance(value, list):
        return [_own(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_own(item) for item in value)
    if isinstance(value, dict):
        return {key: _own(item) for key, item in value.items()}
    if isinstance(value, int | float | str | bool | bytes | type(None)):
        return value
    if hasattr(value, "__dict__") and not callable(value):
        twin = object.__new__(type(value))
        for key, item in _attributes(value).items():
            setattr(twin, key, _own(item))
        return twin
    return value


def _arrays(value: Any) -> Iterator[mx.array]:
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _arrays(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _arrays(item)
    elif hasattr(value, "__dict__") and not callable(value):
        yield from _arrays(_attributes(value))
