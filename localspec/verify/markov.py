"""A model small enough that all it can say has a known probability: the next token depends on the last one only."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache


class Markov(nn.Module):  # type: ignore[misc]
    """Logits `table[last token]`, float32 [size, size]. Tokens are kept in a cache, as a real model keeps its keys."""

    def __init__(self, table: np.ndarray) -> None:
        super().__init__()
        self.table = mx.array(table.astype(np.float32))
        self.args = SimpleNamespace(vocab_size=len(table))

    def make_cache(self) -> list[KVCache]:
        return [KVCache()]

    def __call__(self, inputs: mx.array, cache: list[KVCache]) -> mx.array:
        kept = inputs.astype(mx.float32)[:, None, :, None]
        ids = cache[0].update_and_fetch(kept, kept)[0][0, 0, :, 0].astype(mx.int32)
        return self.table[ids[-inputs.shape[1] :]][None]


def strings(table: np.ndarray, temperature: float, start: int) -> np.ndarray:
    """Probability of each three tokens behind `start`, float64 [size, size, size]."""
    heated = table.astype(np.float64) / temperature
    p = np.exp(heated - heated.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    size = len(table)
    out = np.zeros((size,) * 3)
    for x, y, z in itertools.product(range(size), repeat=3):
        out[x, y, z] = p[start, x] * p[x, y] * p[y, z]
    return out
