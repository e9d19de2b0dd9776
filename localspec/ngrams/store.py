"""Which tokens followed which contexts, how often, and on what day last: columns, sorted by context.

A context is the last 2, 3, 4 or 6 tokens; of it only a hash is kept. Knows nothing of files, texts or tokenizers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localspec.ngrams.answers import Answers

ORDERS = (2, 3, 4, 6)
"""Context lengths, in tokens."""
LONGEST = ORDERS[-1]
MOST = 0xFFFF
"""Counts and days end here."""
ROW_BYTES = 18
HALF_LIFE = 30
"""Days unused after which a row is worth half."""
KEPT = 0.9
"""Share of the bound that is left after an eviction: the next one is some answers away then."""

Array = NDArray[np.generic]
Keys = NDArray[np.uint64]
Tokens = NDArray[np.uint32]
Shorts = NDArray[np.uint16]
Integers = NDArray[np.int64]
_View = tuple[int, Any, Any, Any, Any, Any]
"""Of a key's place: the bits to shift away and where keys begin that have the others; then the columns as memory."""

_WORD = (1 << 64) - 1
_START = 0x9E3779B97F4A7C15
_FACTOR = 0xD6E8FEB86659FD93
_MIX = 0xFF51AFD7ED558CCD
_NUMBER = 3
"""The lowest bits of a key are its order's number: eviction has to know it, and no two orders share a key."""
_HASHED = _WORD - _NUMBER
_EDGE_BITS = 16
"""Most leading bits of a key by which its place is looked up before it is searched for."""
_FINE = 256
"""Steps per day in which worth is compared."""
_WORTH = np.rint(_FINE * HALF_LIFE * np.log2(np.maximum(np.arange(MOST + 1), 1))).astype(np.int32)
"""Of so many hits: doubling them is worth HALF_LIFE days."""


class Found(NamedTuple):
    """What followed one context."""

    order: int
    token: int
    """What followed most often, the latest of equals."""
    hits: int
    """How often it did,"""
    seen: int
    """of how many times that anything did. At most MOST each; where there were more, both are in proportion."""


class Columns(NamedTuple):
    """Rows sorted by key, then favourite first; all arrays have shape [rows] and are never written to again."""

    keys: Keys
    followers: Tokens
    hits: Shorts
    """From 1 on."""
    seen: Shorts
    """Of the context: the same in all its rows, evicted followers included."""
    days: Shorts
    """Since 1970, when it was learned last."""


class NgramStore:
    """Counts that are looked up while they grow: a look-up in another thread sees them before a change or after."""

    def __init__(self) -> None:
        self.answers = Answers()
        """The latest answers, whole, where they are kept."""
        self.adopt(_EMPTY)

    @classmethod
    def from_arrays(cls, columns: Columns) -> NgramStore:
        """A store of these columns, which it shares."""
        store = cls()
        store.adopt(columns)
        return store

    def to_arrays(self) -> Columns:
        """Its columns, not a copy: not to be written to."""
        return self._columns

    def adopt(self, columns: Columns) -> None:
        """Hold these columns instead."""
        keys, followers, hits, seen, _ = columns
        bits = min(max(keys.size.bit_length() - 3, 1), _EDGE_BITS)
        edges = np.searchsorted(keys, np.arange(1 << bits, dtype=np.uint64) << np.uint64(64 - bits))
        edges = np.append(edges, keys.size)
        self._columns = columns
        self._view: _View = (64 - bits, edges.data, keys.data, followers.data, hits.data, seen.data)

    @property
    def rows(self) -> int:
        """(context, follower) pairs."""
        return self._columns.keys.size

    def matches(self, context: Sequence[int]) -> list[Found]:
        """What followed the last 2, 3, 4, 6 tokens, the shortest first, up to the first order that is unknown.

        A known context's suffixes are known too, so that nothing longer is missed.
        """
        # Once per drafted token: plain integers, and as few steps as possible.
        shift, edges, keys, followers, hits, seen = self._view
        found: list[Found] = []
        length, mixed, done = len(context), _START, 0
        for number, order in enumerate(ORDERS):
            if order > length:
                break
            while done < order:
                done += 1
                mixed = (mixed * _FACTOR + context[-done] + 1) & _WORD
            key = ((mixed ^ mixed >> 32) * _MIX) & _WORD
            key = (key ^ key >> 29) & _HASHED | number
            edge = key >> shift
            end = edges[edge + 1]
            at = bisect_left(keys, key, edges[edge], end)
            if at == end or keys[at] != key:
                break
            found.append(Found(order, followers[at], hits[at], seen[at]))
        return found

    def merge(self, keys: Keys, followers: Tokens, *, day: int) -> None:
        """Count sightings, keys and followers of shape [n], the earliest first: what `contexts` returns.

        day: days since 1970. Copies the columns, but sorts only what belongs to the contexts that are counted.
        """
        if keys.shape != followers.shape:
            raise ValueError(f"as many followers as keys are needed: {followers.shape} and {keys.shape}")
        if not keys.size:
            return
        new = _Sightings(keys, followers)
        columns = self._columns
        low = np.searchsorted(columns.keys, new.contexts, "left")
        known = np.searchsorted(columns.keys, new.contexts, "right") - low
        merged = _merged(columns, low, known, new, min(max(day, 0), MOST))
        self.adopt(_spliced(columns, low, known, merged))

    def shrink(self, most_rows: int) -> None:
        """Evict the least useful where there are more than `most_rows`, down to a share of them.

        A row is worth its hits, halved for every HALF_LIFE days since it was learned last. Of equals the longest
        contexts go first: a context goes before its suffixes, without which it would not be found.
        """
        excess = self.rows - int(most_rows * KEPT)
        if self.rows <= most_rows:
            return
        columns = self._columns
        worth = _WORTH[columns.hits] + columns.days * np.int32(_FINE)
        worth = worth * np.int32(len(ORDERS)) - (columns.keys & np.uint64(_NUMBER)).astype(np.int32)
        least = np.partition(worth, excess - 1)[excess - 1]
        evicted = worth < least
        equals = np.flatnonzero(worth == least)
        evicted[equals[: excess - int(np.count_nonzero(evicted))]] = True
        self.adopt(Columns(*(column[~evicted] for column in columns)))


def contexts(tokens: Sequence[int], start: int) -> tuple[Keys, Tokens]:
    """Every token from `start` on with its contexts of all orders, as far as the text reaches back.

    Returns keys and followers, of shape [n] each; what comes later in the text comes later among equal keys.
    Raises ValueError for tokens that are not in 0..2^32-1.
    """
    try:
        ids = np.asarray(tokens, dtype=np.int64)
    except OverflowError:
        ids = np.full(1, -1, np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() < 1 << 32:
        raise ValueError("token ids are numbers from 0 to 4294967295")
    text, first = ids.astype(np.uint64), max(start, 0)
    mixed = np.full(max(text.size - first, 0), _START, np.uint64)
    keys, followers = [_EMPTY.keys], [_EMPTY.followers]
    for done in range(1, LONGEST + 1):
        # One more token of what stands before each position, the newest first; the earliest positions run out of them.
        mixed = mixed[max(done - first, 0) :]
        first = max(first, done)
        if not mixed.size:
            break
        mixed = mixed * np.uint64(_FACTOR) + text[first - done : text.size - done] + np.uint64(1)
        if done in ORDERS:
            key = (mixed ^ mixed >> np.uint64(32)) * np.uint64(_MIX)
            key = (key ^ key >> np.uint64(29)) & np.uint64(_HASHED)
            keys.append(key | np.uint64(ORDERS.index(done)))
            followers.append(text[first:].astype(np.uint32))
    return np.concatenate(keys), np.concatenate(followers)


class _Sightings:
    """Sightings brought together: pairs of context and follower, sorted."""

    def __init__(self, keys: Keys, followers: Tokens) -> None:
        order = np.lexsort((followers, keys))
        keys, followers = keys[order], followers[order]
        heads = _heads(keys, followers)
        ends = np.append(heads[1:], keys.size)
        self.keys, self.followers = keys[heads], followers[heads]
        self.counts = ends - heads
        self.latest = order[ends - 1]
        """Place of each pair's last sighting among all."""
        self.heads = _heads(self.keys)
        """Each context's first pair."""
        self.contexts = self.keys[self.heads]
        self.seen = np.add.reduceat(self.counts, self.heads)
        """Sightings of each context."""


def _merged(columns: Columns, low: Integers, known: Integers, new: _Sightings, day: int) -> Columns:
    """All rows of the contexts of `new`, sorted; each had `known` rows from `low` on."""
    old = _ranges(low, known)
    keys = np.concatenate((columns.keys[old], new.keys))
    followers = np.concatenate((columns.followers[old], new.followers))
    counts = np.concatenate((columns.hits[old].astype(np.int64), new.counts))
    days = np.concatenate((columns.days[old], np.full(new.keys.size, day, np.uint16)))
    recent = np.concatenate((-1 - np.arange(old.size), new.latest))
    # The old row of a pair comes before the new one, which says the day.
    order = np.lexsort((followers, keys))
    heads = _heads(keys[order], followers[order])
    rows = order[np.append(heads[1:], order.size) - 1]
    hits = np.add.reduceat(counts[order], heads)
    keys, followers, days, recent = keys[rows], followers[rows], days[rows], recent[rows]
    groups = _heads(keys)
    before = np.zeros(known.size, np.int64)
    before[known > 0] = columns.seen[low[known > 0]]
    hits, seen = _bounded(hits, before + new.seen, groups)
    order = np.lexsort((-recent, -days.astype(np.int64), -hits, keys))
    return Columns(
        keys[order],
        followers[order],
        hits[order].astype(np.uint16),
        np.repeat(seen, _sizes(groups, keys.size)).astype(np.uint16),
        days[order],
    )


def _bounded(hits: Integers, seen: Integers, groups: Integers) -> tuple[Integers, Integers]:
    """Halve the counts of contexts that were seen more than MOST times, until they were not.

    hits: [rows]; seen: [contexts]; groups: [contexts], each one's first row. No row is halved to nothing.
    """
    seen, sizes = seen.copy(), _sizes(groups, hits.size)
    halvings = np.zeros(seen.size, np.int64)
    while (over := seen > MOST).any():
        halvings += over
        seen[over] >>= 1
    hits = np.maximum(hits >> np.repeat(halvings, sizes), 1)
    return hits, np.minimum(np.maximum(seen, np.add.reduceat(hits, groups)), MOST)


def _spliced(columns: Columns, low: Integers, known: Integers, merged: Columns) -> Columns:
    """The columns with the rows of some contexts, `known` of them from `low` on, replaced by `merged`."""
    groups = _heads(merged.keys)
    sizes = _sizes(groups, merged.keys.size)
    more = sizes - known  # never less: a merge adds
    shifts = np.cumsum(more) - more
    # Room for a context's further rows is made behind its old ones; then all its rows are written.
    room = _ranges(low + known + shifts, more)
    stays = np.ones(columns.keys.size + room.size, np.bool_)
    stays[room] = False
    target = _ranges(low + shifts, sizes)
    result: list[Any] = []
    column: Any
    for column, rows in zip(columns, merged, strict=True):
        spliced = np.empty(stays.size, column.dtype)
        spliced[stays] = column
        spliced[target] = rows
        result.append(spliced)
    return Columns(*result)


def _heads(*columns: Array) -> Integers:
    """Where a run of equal rows begins."""
    size = columns[0].size
    differs = np.zeros(size, np.bool_)
    differs[:1] = True
    for column in columns:
        differs[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(differs)


def _sizes(heads: Integers, size: int) -> Integers:
    return np.append(heads[1:], size) - heads


def _ranges(starts: Integers, sizes: Integers) -> Integers:
    """The numbers from each start on, `sizes` of them, one range after the other."""
    ranges: Integers = np.arange(sizes.sum()) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
    return ranges


_EMPTY = Columns(
    np.empty(0, np.uint64),
    np.empty(0, np.uint32),
    np.empty(0, np.uint16),
    np.empty(0, np.uint16),
    np.empty(0, np.uint16),
)
