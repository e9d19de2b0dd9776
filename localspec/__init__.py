"""Speculative decoding for language models on your own machine: the same tokens, sooner, their sources in sight.

Importing this package loads neither MLX nor anything else that is heavy; the names below load what they need.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localspec import drafters, grammar
    from localspec.conversation import Conversation
    from localspec.engine import Engine
    from localspec.errors import LocalspecError
    from localspec.generation import Generation
    from localspec.loading import load
    from localspec.settings import Settings
    from localspec.tokens import Round, Token

    __version__: str

__all__ = [
    "Conversation",
    "Engine",
    "Generation",
    "LocalspecError",
    "Round",
    "Settings",
    "Token",
    "__version__",
    "drafters",
    "grammar",
    "load",
]

_HOMES = {
    "Conversation": "localspec.conversation",
    "Engine": "localspec.engine",
    "Generation": "localspec.generation",
    "LocalspecError": "localspec.errors",
    "Round": "localspec.tokens",
    "Settings": "localspec.settings",
    "Token": "localspec.tokens",
    "load": "localspec.loading",
}


def __getattr__(name: str) -> Any:
    if name in ("drafters", "grammar"):
        return import_module(f"localspec.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("localspec")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'localspec' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
