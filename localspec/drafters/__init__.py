"""Drafters: what guesses the next tokens. The classes load MLX only when they are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localspec.drafters.layer_skip import LayerSkipDrafter
    from localspec.drafters.mtp import MTPDrafter
    from localspec.drafters.ngram import NgramDrafter
    from localspec.drafters.protocol import Drafter, Proposal, UnreadProposal
    from localspec.drafters.small_model import ModelDrafter
    from localspec.drafters.through_text import TextDrafter

__all__ = [
    "Drafter",
    "LayerSkipDrafter",
    "MTPDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "Proposal",
    "TextDrafter",
    "UnreadProposal",
]

_HOMES = {
    "Drafter": "protocol",
    "LayerSkipDrafter": "layer_skip",
    "MTPDrafter": "mtp",
    "ModelDrafter": "small_model",
    "NgramDrafter": "ngram",
    "Proposal": "protocol",
    "TextDrafter": "through_text",
    "UnreadProposal": "protocol",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
