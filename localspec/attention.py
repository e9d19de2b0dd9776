"""Attention of the rows of one pass, each computed as a pass of that row alone would compute it.

A matrix product with the weights depends on the number of rows in a pass and on nothing else of it, so that whether it
rounds alike can be measured once. Attention also depends on how many keys there are: libraries change their order of
summation at lengths of their own choosing, for each number of rows at another one, and what was measured at one length
says little about the next. Inside `by_row` each row is therefore handed the keys up to its own, and only those: how
many rows stand beside it makes no difference then, at any length. Where a shape was found to give the same bits in one
call over all rows (`shapes.py`), that is made instead: a call per row and layer adds up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from localspec.shapes import Shapes
from localspec.wrappers import Place, Wrappers

Attend = Callable[..., mx.array]


class _Pass(threading.local):
    """The pass that this thread is building."""

    rows = 1
    calls = 0
    windows: dict[int, tuple[mx.array, int, int]]
    shapes: Shapes | None = None

    def __init__(self) -> None:
        self.windows = {}


_pass = _Pass()


@contextmanager
def by_row(rows: int, shapes: Shapes | None = None) -> Iterator[None]:
    """Have the attention of the pass of `rows` rows that is built inside computed row by row, or as if it were.

    shapes: what is known of the model's shapes; without it there always is a call per row.
    """
    if rows == 1:
        yield
        return
    try:
        _wrappers.enter()
        _pass.rows, _pass.calls, _pass.windows, _pass.shapes = rows, 0, {}, shapes
        yield
    finally:
        _pass.rows, _pass.windows, _pass.shapes = 1, {}, None
        _wrappers.leave()


def calls() -> int:
    """How many attention calls of this thread's last pass inside `by_row` were, in all their parts, computed so."""
    return _pass.calls


def note_window(mask: mx.array, most: int, window: int) -> None:
    """Tell: `mask` is a sliding window's: alone, a row would get its newest `most` keys and see `window` of those."""
    if _pass.rows > 1:
        # The array is kept as well: its id is its own only as long as it lives.
        _pass.windows[id(mask)] = (mask, most, window)


def _attend_float(queries: mx.array, keys: Any, values: Any, **options: Any) -> Any:
    return _attend(_wrappers.original("scaled_dot_product_attention"), queries, keys, values, **options)


def _attend_quantized(
    queries: mx.array, q_keys: Any, q_values: Any, scale: float, mask: Any, group_size: int = 64, bits: int = 8
) -> Any:
    return _attend(
        _wrappers.original("quantized_scaled_dot_product_attention"),
        queries,
        q_keys,
        q_values,
        scale=scale,
        mask=mask,
        group_size=group_size,
        bits=bits,
    )


def _places() -> list[Place]:
    from mlx_lm.models import base

    return [
        (mx.fast, "scaled_dot_product_attention", _attend_float),
        (base, "quantized_scaled_dot_product_attention", _attend_quantized),
    ]


_wrappers = Wrappers(_places)


def _attend(original: Attend, queries: mx.array, keys: Any, values: Any, *, mask: Any = None, **options: Any) -> Any:
    rows = queries.shape[2]
    held = (keys[0] if isinstance(keys, tuple | list) else keys).shape[2]
    causal = isinstance(mask, str) and mask == "causal"
    rowwise = isinstance(mask, mx.array) and mask.ndim >= 2 and mask.shape[-2:] == (rows, held)
    # Anything else is not what a decoder's rows ask of their own keys: other rows (another model's, another thread's),
    # or rows that see each other.
    if rows == 1 or rows != _pass.rows or held < rows or not (causal or rowwise):
        return original(queries, keys, values, mask=mask, **options)
    # A mask of numbers is a part of the scores that the model computed itself, for all rows and keys at once.
    _pass.calls += causal or mask.dtype == mx.bool_
    special = any(value is not None for name, value in options.items() if name != "scale")
    if _pass.shapes is not None and causal and isinstance(keys, mx.array) and not special:
        counts, end, blocks = _pass.shapes.parts(original, queries, keys, values), held - rows, []
        for count in counts:
            end += count
            own_rows = queries[:, :, end - count - held + rows : end - held + rows]
            own_mask = None if count == 1 else mask
            blocks.append(original(own_rows, keys[..., :end, :], values[..., :end, :], mask=own_mask, **options))
        return blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=2)
    _, most, window = _pass.windows.get(id(mask), (None, held, 0))
    parts = []
    for i in range(rows):
        end = held - rows + i + 1
        first = max(0, end - most)
        own = None if causal or end - first <= window else mask[..., i : i + 1, first:end]
        parts.append(
            original(
                queries[:, :, i : i + 1],
                _between(keys, first, end),
                _between(values, first, end),
                mask=own,
                **options,
            )
        )
    return mx.concatenate(parts, axis=2)


def _between(entries: Any, first: int, end: int) -> Any:
    if isinstance(entries, tuple | list):
        return type(entries)(_between(part, first, end) for part in entries)
    return entries[..., first:end, :]
