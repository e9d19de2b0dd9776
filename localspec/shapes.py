"""Shapes of attention in which several rows come out as each of them alone does, found out on random numbers.

The order in which a library sums depends on the shapes of its operands, not on what is in them. So where one causal
call over all rows of a pass gives, on random numbers, the bits that a call per row gives, it does on the model's
numbers, as long as these are finite: if the orders differed, hardly all of the thousands of sums would agree. That is
so in float32. In 16 bits the rounding of the results hides most differences, so that such calls are never shared. One
test costs about as much as two layers' attention, and what it finds holds for all layers of that shape.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx

_STEP = 256
"""Key/value caches of mlx-lm grow by so many places: the test's keys lie in memory as theirs do."""
_LANES = 8
"""Numbers that a processor adds at once. Sums over lengths with the same multiple of it below them are the likeliest
to be taken in the same order: the rest is added behind, one by one, and what a mask took away adds nothing."""
_PATIENCE = 4
"""Tests in a row that failed, of like shapes of about one length, after which no more are made there."""
_ABOUT = 64
"""Lengths are about the same within a multiple of this."""
_REMEMBERED = 8192
"""Most shapes that are remembered; then all are forgotten, and found out again."""


class Shapes:
    """What is known of the attention shapes of one model. Safe to use from several threads."""

    def __init__(self) -> None:
        self._alike: dict[tuple[Any, ...], bool] = {}
        self._failed: dict[tuple[Any, ...], int] = {}
        self._lock = threading.Lock()

    def parts(self, attend: Callable[..., mx.array], queries: mx.array, keys: mx.array, values: mx.array) -> list[int]:
        """Into how many rows each to part a pass, so that a causal call per part is as good as one per row.

        Arguments as for `alike`. One part is all of them; as many parts as rows is a call per row.
        """
        rows, length, parts = queries.shape[2], keys.shape[2], []
        done = 0
        while done < rows:
            first = length - rows + done + 1
            for count in (rows - done, min(rows - done, _LANES - first % _LANES), 1):
                end = first + count - 1
                shaped = queries[:, :, done : done + count], keys[..., :end, :], values[..., :end, :]
                if count == 1 or self.alike(attend, *shaped):
                    break
            parts.append(count)
            done += count
        return parts

    def alike(self, attend: Callable[..., mx.array], queries: mx.array, keys: mx.array, values: mx.array) -> bool:
        """Whether `attend` of these shapes with mask="causal" gives each row the bits that it gives the row alone.

        queries: [batch, heads, rows, width]; keys, values: [batch, key heads, length, width], length at least rows.
        Only their shapes and dtypes are looked at. False also where they are not float32, and where no more is tested
        because tests of like shapes failed.
        """
        if not queries.dtype == keys.dtype == values.dtype == mx.float32:
            return False
        shape = (*(x.shape for x in (queries, keys, values)), mx.default_device().type)
        known = self._alike.get(shape)
        if known is None:
            rows, length = queries.shape[2], keys.shape[2]
            like = queries.shape[1:], keys.shape[1], values.shape[3], mx.default_device().type
            kind = *like, length // _ABOUT, length // _LANES == (length - rows + 1) // _LANES
            if self._failed.get(kind, 0) >= _PATIENCE:
                return False
            known = _test(attend, queries, keys, values)
            with self._lock:
                if len(self._alike) >= _REMEMBERED:
                    self._alike.clear()
                    self._failed.clear()
                self._alike[shape] = known
                self._failed[kind] = 0 if known else self._failed.get(kind, 0) + 1
        return known


def row_by_row(attend: Callable[..., mx.array], queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """Causal attention with a call per row, each with the keys up to its own; `attend(queries, keys, values)`.

    Arguments as for `Shapes.alike`; the result has the queries' rows: [batch, heads, rows, value width].
    """
    rows, length = queries.shape[2], keys.shape[2]
    ends = range(length - rows + 1, length + 1)
    parts = [attend(queries[:, :, i : i + 1], keys[..., :n, :], values[..., :n, :]) for i, n in enumerate(ends)]
    return mx.concatenate(parts, axis=2)


def _test(attend: Callable[..., mx.array], queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    length = keys.shape[2]
    room = -(-length // _STEP) * _STEP
    seeds = mx.random.split(mx.random.key(0), 3)

    def like(x: mx.array, places: int, seed: mx.array) -> mx.array:
        return mx.random.normal((*x.shape[:2], places, x.shape[3]), key=seed).astype(x.dtype)

    q, k, v = like(queries, queries.shape[2], seeds[0]), like(keys, room, seeds[1]), like(values, room, seeds[2])
    k, v = k[..., :length, :], v[..., :length, :]
    scale = q.shape[-1] ** -0.5
    together = attend(q, k, v, scale=scale, mask="causal")
    alone = row_by_row(lambda *row: attend(*row, scale=scale, mask=None), q, k, v)
    return bool(mx.array_equal(together, alone).item())
