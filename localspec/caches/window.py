"""A sliding-window key/value cache that can take rows back.

mlx-lm's RotatingKVCache overwrites its oldest entry with each new token, so a rejected token cannot be undone once the
window is full, and its entries stand in another order after a pass of one row than after a pass of several. This one
keeps them in time order in a buffer with room behind the window: rows are written at the end, and the window is moved
to the front now and then. Attention sums over them in one order, whatever the passes were.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import RotatingKVCache

from localspec.attention import note_window

UNDOABLE = 64
"""Entries kept beyond the window: as many of the newest tokens can always be taken back."""
_ROOM = 256
"""Free entries after each move of the window; one move per so many tokens."""


class WindowCache(RotatingKVCache):  # type: ignore[misc]
    """In the place of a RotatingKVCache without kept entries; models cannot tell them apart."""

    keys: Any
    values: Any
    offset: int
    _idx: int

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size=max_size, keep=0)
        self._shown = 0
        """Entries that the last update returned."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append rows [batch, heads, rows, width]; what the new rows may attend to, in time order."""
        rows = keys.shape[2]
        if self.keys is None or self._idx + rows > self.keys.shape[2]:
            self._make_room(keys, values)
        end = self._idx + rows
        self.keys[..., self._idx : end, :] = keys
        self.values[..., self._idx : end, :] = values
        # In one step: an interrupt between the two would leave an entry too many.
        self._idx, self.offset = end, self.offset + rows
        self._shown = min(end, self.max_size - 1 + rows)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        first = self._idx - self._shown
        return self.keys[..., first : self._idx, :], self.values[..., first : self._idx, :]

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Take back the newest `n` tokens; returns 0, having done nothing, when older ones it needs are gone."""
        if not self.can_trim(n):
            return 0
        self._idx, self.offset = self._idx - n, self.offset - n
        return n

    def can_trim(self, n: int) -> bool:
        """Whether the newest `n` tokens can go while all that the window needs then are still here."""
        return n <= self.offset and self._idx - n >= min(self.offset - n, int(self.max_size) - 1)

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        """The mask for `N` new rows over what update_and_fetch will return; mlx-lm's meaning of the arguments."""
        # A mask wider than the window (one model asks for it) would let a row of a longer pass see more than a pass of
        # one row, which has no more than the window to see.
        window = min(window_size or self.max_size, self.max_size)
        before = min(self.max_size - 1, self.offset)
        if N > 1:
            if before + N > window or return_array:
                mask: mx.array = create_causal_mask(N, before, window_size=window)
                note_window(mask, self.max_size, window)
                return mask
            return "causal"
        if before + 1 <= window:
            return None
        return mx.arange(before + 1) >= before + 1 - window

    def _make_room(self, keys: mx.array, values: mx.array) -> None:
        kept = min(self._idx, self.max_size - 1 + UNDOABLE)
        size = kept + keys.shape[2] + _ROOM

        def moved(old: mx.array | None, new: mx.array) -> mx.array:
            room = mx.zeros((*new.shape[:2], size - kept, new.shape[3]), new.dtype)
            return room if old is None else mx.concatenate([old[..., self._idx - kept : self._idx, :], room], axis=2)

        self.keys, self.values, self._idx = moved(self.keys, keys), moved(self.values, values), kept
