"""MTP heads: what predicts the tokens after the next one from the target's own hidden states.

One file per layout. Import as `localspec.models.mtp`; the names below load MLX when they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localspec.models.mtp.choice import choose
    from localspec.models.mtp.convert import add_head
    from localspec.models.mtp.head import Head
    from localspec.models.mtp.registry import find
    from localspec.models.mtp.source import HeadSource
    from localspec.models.mtp.weights import load_head

__all__ = ["Head", "HeadSource", "add_head", "choose", "find", "load_head"]

_HOMES = {
    "Head": "head",
    "HeadSource": "source",
    "add_head": "convert",
    "choose": "choice",
    "find": "registry",
    "load_head": "weights",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
