"""Drafters: what guesses the next tokens. The classes load MLX only when they are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localspec.drafters.layer_skip import LayerSkipDrafter
    from localspec.drafters.ngram import NgramDrafter
    from localspec.drafters.protocol import Drafter, Proposal
    from localspec.drafters.small_model import ModelDrafter
    from localspec.drafters.through_text import TextDrafter

__all__ = ["Drafter", "LayerSkipDrafter", "ModelDrafter", "NgramDrafter", "Proposal", "TextDrafter"]

_HOMES = {
    "Drafter": "protocol",
    "LayerSkipDrafter": "layer_skip",
    "ModelDrafter": "small_model",
    "NgramDrafter": "ngram",
    "Proposal": "protocol",
    "TextDrafter": "through_text",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
