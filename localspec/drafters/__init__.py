"""Drafters: what guesses the next tokens. The classes load MLX only when they are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localspec.drafters.mtp import MTPDrafter
    from localspec.drafters.ngram import NgramDrafter
    from localspec.drafters.protocol import Drafter, Proposal, UnreadProposal
    from localspec.drafters.small_model import ModelDrafter

__all__ = ["Drafter", "MTPDrafter", "ModelDrafter", "NgramDrafter", "Proposal", "UnreadProposal"]

_HOMES = {
    "Drafter": "protocol",
    "MTPDrafter": "mtp",
    "ModelDrafter": "small_model",
    "NgramDrafter": "ngram",
    "Proposal": "protocol",
    "UnreadProposal": "protocol",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
