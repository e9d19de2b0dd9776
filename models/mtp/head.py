"""What an MTP head is: a block behind the target's own layers that says what follows the token after the next one.

A head works on pairs. Pair t joins the target's hidden state of the token at position t with the embedding of the
token at t + 1, and predicts the token at t + 2. Deeper drafts apply the same head to its own output and to the token
that it drafted. The embedding and, unless a family says otherwise, the output matrix are the target's. Knows nothing
of sampling.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from localspec.hidden import Tap
from localspec.trunk import Trunk

Weights = dict[str, mx.array]
"""A head's tensors, or some of them, by name."""
_STEP = 256
"""Entries by which a cache grows."""


class HeadCache:
    """Keys and values of the pairs that a head has run, in the form that mlx-lm's attention modules expect.

    A pair's entry and its position are two things: where hidden states were not at hand, pairs are left out.
    """

    def __init__(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.entries = 0
        self.offset = 0
        """The position of the next pair that is run; attention rotates by it."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append rows [batch, heads, rows, width]; all entries."""
        rows = keys.shape[2]
        end = self.entries + rows
        self.keys = self._with_room(self.keys, keys, end)
        self.values = self._with_room(self.values, values, end)
        self.keys[..., self.entries : end, :] = keys
        self.values[..., self.entries : end, :] = values
        self.entries, self.offset = end, self.offset + rows
        return self.keys[..., :end, :], self.values[..., :end, :]

    def cut(self, entries: int) -> None:
        """Keep the first `entries` of them."""
        self.entries = min(self.entries, entries)

    def arrays(self) -> list[mx.array]:
        """What is in it."""
        return [array for array in (self.keys, self.values) if array is not None]

    def _with_room(self, old: mx.array | None, new: mx.array, end: int) -> mx.array:
        if old is not None and old.shape[2] >= end:
            return old
        size = -(-end // _STEP) * _STEP - self.entries
        room = mx.zeros((*new.shape[:2], size, new.shape[3]), new.dtype)
        return room if old is None else mx.concatenate([old[..., : self.entries, :], room], axis=2)


class Head(nn.Module):  # type: ignore[misc]
    """One head on one target. Its parameters are the checkpoint's, under the checkpoint's names behind the prefix."""

    borrows = False
    """Whether it has no keys and values of its own: only the newest pair of a context is run, over the target's."""

    def __init__(self, trunk: Trunk, taps: Sequence[Tap] = ("after-norm",)) -> None:
        """`taps`: the hidden states that `join` takes, in its order."""
        super().__init__()
        self.trunk = trunk
        self.taps = tuple(taps)
        self._draft_ids: mx.array | None = None

    @property
    def draft_ids(self) -> mx.array | None:
        """The id of each column of the logits, ascending, integer [columns]; None where they are the target's."""
        return self._draft_ids

    def cast_predicate(self, path: str) -> bool:
        """Whether a parameter may be cast; mlx-lm's converter asks the same. Which expert is taken hangs by a
        correction, which stays as it is stored."""
        return not path.endswith("e_score_correction_bias")

    def new_cache(self) -> Any:
        """An empty cache for `run`."""
        return HeadCache()

    def borrow(self, caches: Sequence[Any]) -> Any:
        """For `run`, what a head that borrows reads of the target's caches, as they are now."""
        raise NotImplementedError

    def join(self, rows: Sequence[mx.array]) -> mx.array:
        """The hidden states [rows, hidden] that pairs are made of, from those of the taps, [rows, hidden] each."""
        return rows[0]

    @abstractmethod
    def run(self, hidden: mx.array, ids: mx.array, cache: Any, position: int) -> mx.array:
        """Run the pairs of `hidden` [rows, hidden] and the embeddings of `ids`, integer [rows], lazily.

        They stand at `position` and behind, later than all in the cache, and attend to those and each other causally.
        Returns their outputs [rows, width].
        """

    def onward(self, outputs: mx.array) -> mx.array:
        """What the next deeper pair has for a hidden state, [rows, hidden], from outputs of `run`."""
        return outputs

    def logits(self, outputs: mx.array) -> mx.array:
        """[rows, columns] from outputs of `run`, in the dtype that the target computes in."""
        return self.trunk.logits(outputs)


def causal(rows: int) -> str | None:
    """The mask for new rows behind those of a cache, as MLX's attention takes it."""
    return "causal" if rows > 1 else None


class Block(nn.Module):  # type: ignore[misc]
    """A transformer block with norms before attention and MLP, put together from mlx-lm's own parts."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, width: int, eps: float) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)

    def __call__(self, x: mx.array, mask: mx.array | str | None, cache: HeadCache) -> mx.array:
        """[1, rows, width] to the same, appending to the cache."""
        x = x + self.self_attn(self.input_layernorm(x), mask, cache)
        out: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return out
