"""The target model as the engine sees it: rows of tokens in, logits out, over caches that it is handed.

Knows nothing of drafts or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from localspec.caches.leaves import with_windows
from localspec.caches.quantization import KVQuantization
from localspec.errors import SettingsError
from localspec.shapes import Shapes


class Target:
    """A model that mlx-lm built, ready to be passed rows."""

    def __init__(
        self,
        model: Any,
        kv_quantization: KVQuantization | None = None,
        *,
        few_rows: bool = False,
        replay_kernel: bool = False,
    ) -> None:
        self.model = model
        self.kv_quantization = kv_quantization
        self.vocabulary_size = _vocabulary_size(model)
        self.positions = _positions(model)
        """Positions that the model has a learned vector for; None where it needs none."""
        self.shapes = Shapes()
        """What is known of how its attention rounds."""
        self.few_rows = few_rows
        """Whether products of passes of 1 to 8 rows go through our kernel (`kernels/matmul.py`). Set it before anything
        is measured: passes round by it."""
        self.replay_kernel = replay_kernel
        """Whether recorded gated delta layers are replayed by our kernel (`kernels/recurrence.py`)."""

    def new_caches(self) -> list[Any]:
        """The model's empty caches, of the types it asks for but for sliding windows, which are ours."""
        from mlx_lm.models.cache import make_prompt_cache

        return [with_windows(cache) for cache in make_prompt_cache(self.model)]

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise SettingsError unless every id is a row of the embedding: MLX itself reads out of bounds in silence."""
        for i in ids:
            if not 0 <= i < self.vocabulary_size:
                raise SettingsError(f"token id {i} is outside the model's vocabulary (0 to {self.vocabulary_size - 1})")

    def forward(self, ids: mx.array, caches: list[Any]) -> mx.array:
        """One pass over `ids`, integer [rows]; logits [rows, vocabulary], lazy, in the model's dtype.

        Appends the rows to the caches.
        """
        logits: mx.array = self.model(ids[None], cache=caches)[0]
        return logits


def _positions(model: Any) -> int | None:
    """Rows of a table of learned positions."""
    for name, module in model.named_modules():
        if name.endswith(("wpe", "position_embeddings", "embed_positions")) and "weight" in module:
            return int(module.weight.shape[0])
    return None


def _vocabulary_size(model: Any) -> int:
    """Rows of the embedding; the model's arguments carry the figure under one name or another."""
    args = getattr(model, "args", None)
    for holder in (args, getattr(model, "language_model", None) and model.language_model.args):
        size = getattr(holder, "vocab_size", None)
        if isinstance(size, int) and size > 0:
            return size
    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", "wte", "embeddings", "tok_embeddings")):
            return int(module.weight.shape[0])
    raise SettingsError("cannot tell the model's vocabulary size: no args.vocab_size, no embedding of a known name")
