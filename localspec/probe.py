"""Finds on a loaded model which pass sizes agree bit for bit: `docs/exactness.md` says what is compared and why.

A size agrees with itself when a token's row comes out the same wherever in the pass it stands and whatever filler rows
stand behind it, and with another size when the rows of both come out the same, from the same caches. Compared are the
logits of each row and all that it leaves in the caches, bit by bit: keys and values, and recurrent state after keeping
each number of rows. What follows from equal caches is equal, so pairs of passes stand for all sequences of them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

import mlx.core as mx
import numpy as np

from localspec import attention
from localspec.caches.leaves import CutLeaf, SnapshotLeaf, leaves_of, window_of
from localspec.rows import AFFORDABLE, RowClass, RowClasses
from localspec.target import Target
from localspec.transaction import Transaction

MOST = 16
SHORT, LONG = 12, 1100
"""Tokens of context: few, and more than where MLX's Metal attention changes its algorithm (1024)."""
WIDE = 13
"""The longest draft that the controller considers, and the token before it: screening looks no further."""
_ROOMY = 5
"""Sizes that agree with one row are of use from here on: room for four drafts."""
_SCREENED = (*range(2, 10), WIDE)
"""Sizes that screening looks at. Passes between nine rows and WIDE are filled up to WIDE: that costs little more."""
_LONG_S = 6.0
"""Seconds of screening after which wider passes are done without. All that is used agrees, however far that goes."""
_USELESS = 4.0
"""Sizes are tried up to where they cost this many one-row passes: drafts gain nothing there."""
_PROMISING, _NOISE = 1.15, 0.03
"""Measured this near to a one-row pass in two tries, a wider pass is timed more often; and what is then let pass."""
_ROUNDS = 3
"""Interleaved timings of the sizes that plain decoding may use."""


@dataclass(slots=True)
class _Rows:
    """What one size gave at one context length: digests by row, and of recurrent state by the number of rows kept."""

    rows: list[bytes] = field(default_factory=list)
    states: dict[int, bytes] = field(default_factory=dict)
    steady: bool = True
    """Whether the same rows came out the same one place further to the front, with other rows behind them."""

    def agrees(self, other: _Rows) -> bool:
        both = min(len(self.rows), len(other.rows))
        shared = self.states.keys() & other.states.keys()
        return self.rows[:both] == other.rows[:both] and all(self.states[n] == other.states[n] for n in shared)


def probe(target: Target, *, most: int = MOST, context_length: int | None = None) -> RowClasses:
    """Find the classes of the sizes 1 to `most`, fewer where larger ones cost too much to be of use.

    `context_length`: the most tokens that the model can attend to; None means unknown. Takes a few passes of each size.
    """
    return _Probe(target, context_length).run(most)


def screen(target: Target, *, context_length: int | None = None) -> RowClasses | None:
    """The sizes up to WIDE that agree with one row, where two do; the classes, if a wider pass costs next to nothing.

    None when passes of one row and of two round differently and wider ones cost notably more: found in few passes.
    """
    return _Probe(target, context_length).screen()


class _Probe:
    def __init__(self, target: Target, context_length: int | None) -> None:
        self._target = target
        room = min(n for n in (context_length, target.positions, 2**31) if n is not None)
        self._short, self._long = min(SHORT, max(room - 2 * MOST, 1)), min(LONG, room - 2 * MOST)
        self._windows = [w for w in (window_of(leaf) for leaf in leaves_of(target.new_caches())) if w]
        if self._windows:
            # Past the largest window, so that all of them slide.
            self._long = min(max(self._long, max(self._windows) + MOST), room - 2 * MOST)
        self._times: dict[int, list[float]] = {}
        self._lengths: list[int] = []
        self._passes = 0
        self._by_row = True
        self._started = time.perf_counter()

    def screen(self) -> RowClasses | None:
        short = self._at(self._short)
        alike, others = self._like_one(short)
        if alike[-1] >= _ROOMY:
            # Without costs, so that no pass is filled up further than it must be: it would only be a guess.
            return self._report([RowClass(tuple(alike))], others)
        return self.run(MOST) if self._wider_costs_nothing(short) else None

    def _like_one(self, short: Transaction) -> tuple[list[int], list[int]]:
        """The sizes up to WIDE whose rows come out as passes of one give them, one itself included, and the others.

        It gives up where two rows differ from one, and goes no further than _ROOMY when that took long.
        """
        if any(isinstance(leaf, SnapshotLeaf) for leaf in leaves_of(short.caches)):
            one = self._measure(short, 1)

            def as_one(size: int) -> bool:
                wider = self._measure(short, size)
                return wider.steady and wider.agrees(one)
        else:
            if not self._as_alone(short, 2):
                return [1], [2]
            # Where most can be different: behind a long context.
            behind = self._lengthened(short)
            start, alone = behind.held, []
            for place in range(start, start + WIDE):
                alone += self._pass(behind, 1, self._tokens(place, 1)).rows
            behind.rewind(start)

            def as_one(size: int) -> bool:
                together = self._pass(behind, size, self._tokens(start, size))
                behind.rewind(start)
                return together.rows == alone[:size]

        alike: list[int] = [1]
        others: list[int] = []
        for size in _SCREENED:
            (alike if as_one(size) else others).append(size)
            if len(alike) == 1 or (size >= _ROOMY and time.perf_counter() - self._started > _LONG_S):
                break
        return alike, others

    def _useless(self, size: int) -> bool:
        """Whether passes of that size cost too much. Two in a row: one alone may have been slowed by other programs."""
        return all(min(self._times[n]) > _USELESS * min(self._times[1]) for n in (size - 1, size) if n in self._times)

    def _as_alone(self, transaction: Transaction, size: int) -> bool:
        """Whether a pass of `size` rows gives its first and its last but fillers as passes of one row do. Not for
        recurrent state."""
        start = transaction.held
        first = self._pass(transaction, 1, self._tokens(start, 1))
        transaction.rewind(start)
        last = max(size - 2, 1)
        together = self._pass(transaction, size, self._tokens(start, last + 1))
        transaction.rewind(start + last)
        alone = self._pass(transaction, 1, self._tokens(start + last, 1))
        transaction.rewind(start)
        return [together.rows[0], together.rows[last]] == first.rows + alone.rows

    def _wider_costs_nothing(self, short: Transaction) -> bool:
        """Whether a pass of two or of four rows may cost no more than AFFORDABLE."""
        for rounds, limit in ((2, _PROMISING), (_ROUNDS, AFFORDABLE + _NOISE)):
            for _ in range(rounds):
                for size in (1, 2, 4):
                    if rounds == 2 and len(self._times.get(size, ())) >= 2:
                        continue  # a first look at what was not timed while the sizes were compared
                    self._pass(short, size, self._tokens(short.held, size))
                    short.rewind(short.length)
            # The fastest passes: what is added to them is other programs' work.
            if min(*self._times[2], *self._times[4]) > limit * min(self._times[1]):
                return False
        return True

    def run(self, most: int) -> RowClasses:
        short = self._at(self._short)
        found: dict[int, _Rows] = {}
        for size in range(1, most + 1):
            found[size] = self._measure(short, size)
            if self._useless(size):
                break
        groups, unfit = _groups(found)
        if self._long > self._short:
            at_length = self._at(self._long)
            # Between the ends of a class nothing changes with length, when attention does not know of sizes.
            ends = {size for group in groups for size in ((group[0], group[-1]) if self._by_row else group)}
            longer = {size: self._measure(at_length, size) for size in sorted(ends)}
            if not _consistent(groups, longer):
                for group in groups:
                    longer |= {size: self._measure(at_length, size) for size in group if size not in longer}
                parted = [_groups({size: longer[size] for size in group}) for group in groups]
                groups = [part for parts, _ in parted for part in parts]
                unfit += [size for _, bad in parted for size in bad]
        if short.rollback == "replay":
            groups = _replayable(groups)
        plain = {1} | {RowClass(tuple(group), self._costs(group)).plain for group in groups}
        for _ in range(_ROUNDS if len(plain) > 1 else 0):
            for size in sorted(plain):
                self._pass(short, size, self._tokens(short.held, size))
                short.rewind(short.length)
        return self._report([RowClass(tuple(group), self._costs(group)) for group in groups], sorted(unfit))

    def _at(self, length: int) -> Transaction:
        """Caches with `length` tokens."""
        transaction = Transaction(self._target)
        real = min(length, self._short) if _stretchable(transaction) else length
        transaction.prefill(self._tokens(0, real))
        return self._lengthened(transaction, length)

    def _lengthened(self, transaction: Transaction, length: int | None = None) -> Transaction:
        """The same caches with `length` tokens, None for the long context: more of the same, or copies of it."""
        length = max(self._long, self._short) if length is None else length
        if _stretchable(transaction):
            _stretch(transaction, length)
        else:
            transaction.prefill(self._tokens(transaction.held, length - transaction.held))
        if length not in self._lengths:
            self._lengths.append(length)
        return transaction

    def _measure(self, transaction: Transaction, size: int) -> _Rows:
        """Two passes: one full of tokens, one from the second of them on with fillers behind."""
        start = transaction.held
        transaction.rewind(start)
        first = self._pass(transaction, size, self._tokens(start, size))
        transaction.rewind(start + 1)
        # With few fillers in one place and many in the other, every row is compared and fillers of all counts are met.
        real = max(1, size - 1 if start == self._short else (size + 1) // 2)
        second = self._pass(transaction, size, self._tokens(start + 1, real))
        transaction.rewind(start)
        if size == 1:
            return _Rows(first.rows + second.rows, first.states | {n + 1: d for n, d in second.states.items()})
        real = min(real, size - 1)
        first.steady = first.rows[1 : real + 1] == second.rows[:real] and all(
            second.states[n] == first.states[n + 1] for n in range(1, real + 1) if n in second.states
        )
        return first

    def _pass(self, transaction: Transaction, size: int, ids: list[int]) -> _Rows:
        """One pass of `size` rows, of which `ids` are the first; leaves those in the caches."""
        transaction.row_class = RowClass((size,))
        fed = mx.array(ids, mx.uint32)
        started = time.perf_counter()
        logits = transaction.forward(fed)
        mx.eval(logits)
        self._times.setdefault(size, []).append(time.perf_counter() - started)
        self._passes += 1
        leaves = leaves_of(transaction.caches)
        cut = [leaf for leaf in leaves if isinstance(leaf, CutLeaf) and leaf.cache.offset]
        if size > 1 and attention.calls() < len(cut):
            self._by_row = False
        held = [(logits, 0)] + [(part, -2) for leaf in cut for part in _newest(leaf, size) if part.size]
        digests = _row_digests(held, len(ids))
        states = {}
        kept = [leaf for leaf in leaves if isinstance(leaf, SnapshotLeaf)]
        if kept:
            start = transaction.held - len(ids)
            for count in range(len(ids), 0, -1):
                transaction.rewind(start + count)
                states[count] = _digest([array for leaf in kept for array in leaf.arrays()])
        return _Rows(digests, states)

    def _tokens(self, start: int, count: int) -> list[int]:
        """The ids at the positions from `start` on of an endless text of all sorts of tokens."""
        size = self._target.vocabulary_size
        return [(n * 7919 + n * n * 104729 + 13) % size for n in range(start, start + count)]

    def _costs(self, sizes: Sequence[int]) -> tuple[float, ...]:
        return tuple(median_low(self._times[size]) for size in sizes)

    def _report(self, classes: list[RowClass], unfit: list[int]) -> RowClasses:
        mx.clear_cache()
        return RowClasses(
            classes=tuple(sorted(classes, key=lambda one: one.sizes)),
            unfit=tuple(unfit),
            one_row_s=median_low(self._times[1]),
            lengths=tuple(sorted(self._lengths)),
            attention_by_row=self._by_row,
            passes=self._passes,
            probe_s=time.perf_counter() - self._started,
        )


def affordable(classes: RowClasses | None) -> bool:
    """Whether decoding in the best class costs plain decoding no more than `exact="auto"` allows."""
    best = None if classes is None else classes.best()
    if best is None or classes is None:
        return False
    return classes.alike or classes.relative(best) <= AFFORDABLE


def _groups(found: dict[int, _Rows]) -> tuple[list[list[int]], list[int]]:
    """Sizes that all agree with each other, and those that do not agree with themselves."""
    groups: list[list[int]] = []
    for size, rows in found.items():
        if not rows.steady:
            continue
        group = next((g for g in groups if all(rows.agrees(found[other]) for other in g)), None)
        if group is None:
            groups.append([size])
        else:
            group.append(size)
    return groups, [size for size, rows in found.items() if not rows.steady]


def _consistent(groups: list[list[int]], found: dict[int, _Rows]) -> bool:
    return all(
        found[a].steady and found[a].agrees(found[b])
        for group in groups
        for a in group
        for b in group
        if a in found and b in found
    )


def _replayable(groups: list[list[int]]) -> list[list[int]]:
    """Where kept rows are run again, passes of any smaller size occur: the class must hold them all from one on."""
    first = next((group for group in groups if 1 in group), [])
    run = [size for count, size in enumerate(first, 1) if size == count]
    return [run] if run else []


def _newest(leaf: CutLeaf, rows: int) -> list[mx.array]:
    """The newest `rows` entries of a key/value cache, or as many as it keeps, [batch, heads, rows, width] each."""
    cache: Any = leaf.cache
    end = getattr(cache, "_idx", cache.offset - getattr(cache, "start_position", 0))
    parts: list[mx.array] = []
    for entries in (cache.keys, cache.values):
        parts += entries if isinstance(entries, tuple | list) else [entries]
    return [part[..., max(end - rows, 0) : end, :] for part in parts]


def _row_digests(parts: Sequence[tuple[mx.array, int]], rows: int) -> list[bytes]:
    """One digest per row of all arrays together; each comes with the axis along which its rows stand."""
    by_row = [mx.contiguous(mx.moveaxis(array, axis, 0)[:rows].reshape(rows, -1)) for array, axis in parts]
    mx.eval(by_row)
    raw = [np.array(array.view(mx.uint8)) for array in by_row]
    return [hashlib.blake2b(b"".join(part[i].tobytes() for part in raw), digest_size=16).digest() for i in range(rows)]


def _digest(arrays: Sequence[mx.array]) -> bytes:
    flat = [mx.contiguous(array.reshape(-1)) for array in arrays if array.size]
    mx.eval(flat)
    whole = b"".join(np.array(array.view(mx.uint8)).tobytes() for array in flat)
    return hashlib.blake2b(whole, digest_size=16).digest()


def _stretchable(transaction: Transaction) -> bool:
    return transaction.rollback != "replay" and all(
        hasattr(leaf.cache, "update_and_fetch") and not hasattr(leaf.cache, "bits")
        for leaf in leaves_of(transaction.caches)
        if isinstance(leaf, CutLeaf)
    )


def _stretch(transaction: Transaction, length: int) -> None:
    """Lengthen the caches by copies of what they hold: attention's arithmetic does not ask what the keys mean."""
    while transaction.held < length:
        rows = min(512, length - transaction.held)
        for leaf in leaves_of(transaction.caches):
            if not isinstance(leaf, CutLeaf) or not leaf.cache.offset:
                continue
            trim: Callable[[], None] = getattr(leaf.cache, "maybe_trim_front", lambda: None)
            trim()
            parts = _newest(leaf, min(rows, leaf.cache.offset, SHORT))
            keys, values = (mx.concatenate([part] * -(-rows // part.shape[2]), axis=2)[..., :rows, :] for part in parts)
            leaf.cache.update_and_fetch(keys, values)
        transaction.held += rows
    transaction.length = transaction.held
    transaction.evaluate()
