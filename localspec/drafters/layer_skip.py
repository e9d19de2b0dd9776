"""Drafts from the target itself, with most of its layers left out: works for most models, and needs no weights.

Zhang et al. 2023, "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding" leaves
layers out of the middle; Elhoushi et al. 2024, "LayerSkip", those at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localspec.drafters.shallow import ShallowModel, kinds_of_layers
from localspec.drafters.small_model import ModelDrafter
from localspec.errors import IncompatibleDrafterError
from localspec.tokens import Source

SHARE = 5 / 6
"""Of the target's layers, where none are named."""


class LayerSkipDrafter(ModelDrafter):
    """The target's own layers, some of them, and its own final norm and head, running ahead of the target.

    All arrays are the target's. Its caches are its own, of the layers that run.
    """

    name: Source = "skip"

    def __init__(self, model: Any, layers: int | Sequence[int] | None = None) -> None:
        """`model`: the target, what mlx_lm.load returned. `layers`: how many of its layers to run, or their indices
        from 0 on; None takes a share of them.

        Raises IncompatibleDrafterError where the model cannot be cut, or not in this way.
        """
        self.whole = model
        self.layers = choose_layers(model, layers)
        super().__init__(ShallowModel(model, self.layers))

    def fresh(self) -> LayerSkipDrafter:
        return LayerSkipDrafter(self.whole, self.layers)

    def check(self, target: Any, tokenizer: Any) -> None:
        if target is not self.whole:
            raise IncompatibleDrafterError(
                "a drafter that skips layers drafts for the model that it was made of, and for no other"
            )


def layer_skip(model: Any, layers: int | None = None) -> LayerSkipDrafter:
    """The drafter behind `--draft layers` and `--draft layers:N`."""
    return LayerSkipDrafter(model, layers)


def choose_layers(model: Any, layers: int | Sequence[int] | None) -> tuple[int, ...]:
    """The indices of the layers to run; at least one of each kind that the model has. See `LayerSkipDrafter`."""
    if layers is not None and not isinstance(layers, int):
        return tuple(layers)
    kinds = kinds_of_layers(model)
    count = max(round(SHARE * len(kinds)), 1) if layers is None else layers
    if not 1 <= count <= len(kinds):
        raise IncompatibleDrafterError(f"the model has {len(kinds)} layers: run 1 to {len(kinds)} of them, not {count}")
    chosen = set(default_layers(count, len(kinds)))
    for i, kind in enumerate(kinds):
        if all(kinds[layer] != kind for layer in chosen):
            chosen.add(i)
    return tuple(sorted(chosen))


def default_layers(count: int, of: int) -> list[int]:
    """Which `count` of `of` layers to run where nothing else is known: all but a block from the middle on.

    That keeps the ends, which no model does without, and was right more often than leaving out the last ones or every
    so many (docs/drafters.md).
    """
    start = min(of // 2, max(count - 1, 1))
    return [*range(start), *range(start + of - count, of)]
