"""A model whose rounding is planted, so that its row classes are known: import as `from planted import ...`.

Each row is computed by itself with element-wise operations and sums over the row's own keys, so that the backend's own
rounding does not depend on the rows of a pass. What a test wants to depend on them is passed in as `shift`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

WIDTH, VOCABULARY, WINDOW = 32, 48, 12
Shift = Callable[["Situation"], Sequence[float]]


class Situation(SimpleNamespace):
    """What a planted error may depend on: `rows` of the pass, `ids` of them, `start`: tokens in the caches."""

    rows: int
    ids: list[int]
    start: int


class OddCache(KVCache):
    """A kind of cache that nobody has seen."""


class Planted(nn.Module):
    """Layers of the `kinds` "plain", "window", "recurrent", "odd". `shift` gives an error per row, added to the input;
    `stored_shift` one that only the keys get which are left in the caches; `state_shift(rows)` one for recurrent state
    after that many rows at once. `positions`: rows of a table of learned positions, which nothing may read beyond."""

    def __init__(
        self,
        kinds: Sequence[str] = ("plain",),
        *,
        shift: Shift | None = None,
        stored_shift: Shift | None = None,
        state_shift: Callable[[int], float] | None = None,
        positions: int | None = None,
    ) -> None:
        super().__init__()
        keys = mx.random.split(mx.random.key(3), 3)
        self.embedding = mx.random.normal((VOCABULARY, WIDTH), key=keys[0])
        self.head = mx.random.normal((VOCABULARY, WIDTH), key=keys[1])
        self.layers = [_Recurrence(state_shift) if kind == "recurrent" else _Attention() for kind in kinds]
        if positions is not None:
            self.wpe = nn.Embedding(positions, WIDTH)
        self.kinds, self.shift, self.stored_shift = list(kinds), shift, stored_shift
        self.args = SimpleNamespace(vocab_size=VOCABULARY)
        self.seen: list[tuple[int, int]] = []
        """(start, rows) of every pass."""
        mx.eval(self.parameters())

    def make_cache(self) -> list[Any]:
        made: dict[str, Callable[[], Any]] = {
            "plain": KVCache,
            "odd": OddCache,
            "window": lambda: RotatingKVCache(max_size=WINDOW),
            "recurrent": lambda: ArraysCache(2),
        }
        return [made[kind]() for kind in self.kinds]

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        rows = inputs.shape[1]
        start = next((c.offset for c in cache if hasattr(c, "offset")), 0)
        self.seen.append((start, rows))
        h = self.embedding[inputs[0]]
        if "wpe" in self:
            assert start + rows <= self.wpe.weight.shape[0], "read beyond the table of positions"
            h = h + self.wpe(mx.arange(start, start + rows))
        stored = mx.zeros((rows, 1))
        if self.shift is not None or self.stored_shift is not None:
            # Only drafters' and plain passes are looked into: the ids of a pipelined one are not known yet.
            situation = Situation(rows=rows, start=start, inputs=inputs)
            if self.shift is not None:
                h = h + mx.array(list(self.shift(situation)))[:, None]
            if self.stored_shift is not None:
                stored = mx.array(list(self.stored_shift(situation)))[:, None]
        for layer, held in zip(self.layers, cache, strict=True):
            h = layer(h[None], held, stored)[0]
        return mx.stack([(self.head * row).sum(-1) for row in _rows(h)])[None] * 0.3


class _Attention(nn.Module):
    def __call__(self, h: mx.array, cache: Any, stored: mx.array) -> mx.array:
        rows, most = h.shape[1], getattr(cache, "max_size", None) or 2**31
        fed = (h + stored)[:, None]
        keys, values = (_plain(part, cache) for part in cache.update_and_fetch(fed, fed))
        out = []
        for i, row in enumerate(_rows(h[0])):
            end = keys.shape[2] - rows + i + 1
            first = max(0, end - most)
            k, v = keys[0, 0, first:end], values[0, 0, first:end]
            weights = mx.exp((k * row).sum(-1) * 0.1)
            out.append(row + (v * weights[:, None]).sum(0) / weights.sum())
        return mx.stack(out)[None]


class _Recurrence(nn.Module):
    def __init__(self, state_shift: Callable[[int], float] | None) -> None:
        super().__init__()
        self.state_shift = state_shift

    def __call__(self, h: mx.array, cache: Any, stored: mx.array) -> mx.array:
        state = mx.zeros((WIDTH,)) if cache[0] is None else cache[0]
        out = []
        for row in _rows(h[0]):
            state = state * 0.8 + mx.tanh(row)
            out.append(row + state)
        cache[0] = state if self.state_shift is None else state + self.state_shift(h.shape[1])
        cache[1] = h[:, -1]
        return mx.stack(out)[None]


def _rows(h: mx.array) -> list[mx.array]:
    return [h[i] for i in range(h.shape[0])]


def _plain(part: Any, cache: Any) -> mx.array:
    if isinstance(part, tuple | list):
        return mx.dequantize(*part, group_size=cache.group_size, bits=cache.bits)
    return part  # type: ignore[no-any-return]


def by_size(*classes: Sequence[int], error: float = 0.3) -> Shift:
    """Errors that are the same within each class of sizes; sizes in none of them are a class of their own together."""

    def shift(situation: Situation) -> list[float]:
        index = next((i for i, sizes in enumerate(classes) if situation.rows in sizes), len(classes))
        return [error * index] * situation.rows

    return shift
