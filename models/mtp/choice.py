"""Which head drafts for a model: one that is named, one that comes with the model, or one that ships with localspec."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from localspec.checkpoint import Checkpoint
from localspec.errors import IncompleteModelError
from localspec.models import catalogue
from localspec.models.mtp.registry import find
from localspec.models.mtp.source import HeadSource
from localspec.vocabulary import fingerprint


def choose(checkpoint: Checkpoint, tokenizer: Any, choice: str | os.PathLike[str] | None) -> HeadSource | None:
    """The head for a model. choice: `auto`, `none` (or None), or the path of a file or folder with a head.

    Raises IncompleteModelError where nothing at the path is a head.
    """
    if choice is None or choice == "none":
        return None
    if choice == "auto":
        return find(checkpoint) or shipped(checkpoint, tokenizer)
    source = find(choice)
    if source is None:
        raise IncompleteModelError(
            f"{os.fspath(choice)} holds no MTP head of a layout that is known: no file in it has such tensors"
        )
    return source


def shipped(checkpoint: Checkpoint, tokenizer: Any) -> HeadSource | None:
    """The head of the catalogue that fits the model, if one does: same width, layers where it taps, same vocabulary.

    The weights themselves are not compared: a model that was trained further from the same one may use the head of the
    first, which changes no token, and is switched off where it guesses nothing.
    """
    for file in shipped_files():
        source = find(file)
        if source is not None and _fits(source, checkpoint, tokenizer):
            return source
    return None


def shipped_files() -> list[Path]:
    """The catalogue's heads, as far as they are here."""
    folder = Path(str(files("localspec.models").joinpath("heads")))
    named = [folder / entry.head for entry in catalogue().values() if entry.head is not None]
    return [file for file in named if file.is_file()]


def _fits(source: HeadSource, checkpoint: Checkpoint, tokenizer: Any) -> bool:
    text = checkpoint.config.get("text_config")
    config = text if isinstance(text, dict) else checkpoint.config
    norm = source.tensors.get(f"{source.prefix}norm.weight")
    if norm is None or config.get("hidden_size") != norm.shape[0]:
        return False
    layers = config.get("num_hidden_layers")
    last = max((int(tap) for tap in source.metadata.get("taps", "").split(",") if tap.isdecimal()), default=-1)
    named = source.metadata.get("layers")
    if not isinstance(layers, int) or last >= layers or (named is not None and named != str(layers)):
        return False
    return tokenizer is not None and source.metadata.get("vocabulary") == fingerprint(tokenizer)
