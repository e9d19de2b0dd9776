"""Random numbers as a function of (seed, stream, position, id): no state, nothing to advance or to restore.

The generator is Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2,
3", SC 2011). The key is the 64-bit seed. The counter's first word holds the stream (8 bits) and half the id (24 bits),
its second word the position; each call yields the words of two neighbouring ids. The number that belongs to an id
therefore does not depend on how many rows or ids are asked for at once, on what was asked before, or on the thread.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from enum import IntEnum

import mlx.core as mx

_PARITY = 0x1BD11BDA
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_LARGEST_UNIFORM = 1 - 2.0**-24
"""The largest float32 below one: a uniform may not round up to one, its Gumbel value would be infinite."""
_REMEMBERED_ROWS = 64
_LONGEST_ROUND = 64
"""More than any draft is long; counters have room for 2^26 rounds of it."""


class Stream(IntEnum):
    """What a random number is used for: numbers of different streams are independent."""

    GUMBEL = 0
    """The noise that plain decoding, coupled verification and coupled drafters share."""
    COIN = 1
    """Acceptance coins of the rejection and the block rule."""
    RESIDUAL = 2
    """The draw after a rejection, or of the bonus token, in those rules."""
    DRAFT = 3
    """A drafter's own draws where they must be independent of the target's."""
    XTC = 4
    """Whether "exclude top choices" acts at a position: one coin for plain decoding, verification and drafters."""


def fresh_seed() -> int:
    """A seed from the operating system, short enough to read aloud and type again."""
    return secrets.randbelow(2**32)


def round_keys(first: int, count: int) -> range:
    """What stands for positions in numbers that belong to a round, the one that decides position `first`.

    A draft, or its coin, must not be used by the next round where this one has judged by it: the block rule looks
    behind the drafts that it keeps. Each position is the first of one round at most, so keys never come back.
    """
    if count > _LONGEST_ROUND:
        raise ValueError(f"a round has numbers for {_LONGEST_ROUND} drafts, not {count}")
    return range(first * _LONGEST_ROUND, first * _LONGEST_ROUND + count)


def _rotate(x: mx.array, bits: int) -> mx.array:
    return (x << bits) | (x >> (32 - bits))


def threefry(key: tuple[int, int], counter: tuple[mx.array, mx.array]) -> tuple[mx.array, mx.array]:
    """Threefry-2x32-20 of a 2 x 32-bit key and counters (uint32, any equal shapes); two uint32 arrays."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    x0, x1 = counter[0] + mx.array(keys[0], mx.uint32), counter[1] + mx.array(keys[1], mx.uint32)
    for group in range(5):
        for bits in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = _rotate(x1, bits) ^ x0
        x0 = x0 + mx.array(keys[(group + 1) % 3], mx.uint32)
        x1 = x1 + mx.array((keys[(group + 2) % 3] + group + 1) & 0xFFFFFFFF, mx.uint32)
    return x0, x1


def bits(seed: int, stream: Stream, positions: Sequence[int], size: int) -> mx.array:
    """Random words, uint32 [len(positions), size]; entry [i, id] depends on (seed, stream, positions[i], id) only."""
    pairs = (size + 1) // 2
    low = (mx.arange(pairs, dtype=mx.uint32) | mx.array(int(stream) << 24, mx.uint32))[None, :]
    high = mx.array(list(positions), mx.uint32)[:, None]
    shape = (len(positions), pairs)
    words = threefry((seed & 0xFFFFFFFF, seed >> 32), (mx.broadcast_to(low, shape), mx.broadcast_to(high, shape)))
    return mx.stack(list(words), axis=-1).reshape(len(positions), 2 * pairs)[:, :size]


def uniform(words: mx.array) -> mx.array:
    """Uniform floats in (0, 1), float32, from random words: (word + 1/2) / 2^32, never 0 and never 1."""
    return mx.minimum((words.astype(mx.float32) + 0.5) * 2.0**-32, _LARGEST_UNIFORM)


def gumbel(words: mx.array) -> mx.array:
    """Standard Gumbel values, float32, finite: -log E with E = -log(1 - u).

    Written with log1p because argmax is decided where E is small: there float32 keeps its full relative precision,
    while -log(-log u) for u near 1 has only 2^24 steps.
    """
    return -mx.log(-mx.log1p(-uniform(words)))


class Noise:
    """The random numbers of one generation.

    Rows of Gumbel noise are remembered for a while: the rows behind a rejected draft are wanted again in the next
    round, and their logarithms are the costly part.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._rows: OrderedDict[tuple[Stream, int, int], mx.array] = OrderedDict()

    def gumbel(self, positions: Sequence[int], size: int, stream: Stream = Stream.GUMBEL) -> mx.array:
        """Gumbel noise, float32 [len(positions), size]; row i belongs to positions[i], column j to token id j."""
        return mx.concatenate([self._row(stream, position, size) for position in positions])

    def uniform(self, positions: Sequence[int], stream: Stream = Stream.COIN) -> mx.array:
        """One uniform in (0, 1) per position, float32 [len(positions)]."""
        return uniform(bits(self.seed, stream, positions, 1))[:, 0]

    def _row(self, stream: Stream, position: int, size: int) -> mx.array:
        key = (stream, position, size)
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = gumbel(bits(self.seed, stream, [position], size))
            if len(self._rows) > _REMEMBERED_ROWS:
                self._rows.popitem(last=False)
        return row
