"""Which head drafts for a model: one that is named, one that comes with the model, or one that ships with localspec."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from localspec.checkpoint import Checkpoint
from localspec.errors import IncompatibleDrafterError, IncompleteModelError
from localspec.models import catalogue
from localspec.models.mtp.registry import FAMILIES, find
from localspec.models.mtp.source import HeadSource
from localspec.vocabulary import fingerprint


def choose(checkpoint: Checkpoint, tokenizer: Any, choice: str | os.PathLike[str] | None) -> HeadSource | None:
    """The head for a model. choice: `auto`, `none` (or None), or the path of a file or folder with a head.

    Raises IncompleteModelError where nothing at the path is a head, or a file is damaged, and IncompatibleDrafterError
    for a head in the model's own files that is known, by its config, not to be for such a model.
    """
    if choice is None or choice == "none":
        return None
    if choice == "auto":
        source = find(checkpoint)
        if source is not None:
            _require_target(source, checkpoint)
        return source or shipped(checkpoint, tokenizer)
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


def _require_target(source: HeadSource, checkpoint: Checkpoint) -> None:
    """Raise IncompatibleDrafterError where the config alone tells that the layout goes with other architectures.

    A config with a text_config may be built of any layers: `load_head` looks at those.
    """
    from mlx_lm.utils import _get_classes

    targets: tuple[str, ...] | None = getattr(FAMILIES[source.family], "TARGETS", None)
    if targets is None or "text_config" in checkpoint.config or "model_file" in checkpoint.config:
        return
    try:
        model, _ = _get_classes(config=checkpoint.config)
    except (ValueError, KeyError, TypeError, ImportError):
        return  # loading says more
    kind = model.__module__.rpartition(".")[2]
    if kind not in targets:
        raise IncompatibleDrafterError(
            f"the head at {source.path} goes with {' or '.join(targets)}, and the target's layers are {kind}'s"
        )


def _fits(source: HeadSource, checkpoint: Checkpoint, tokenizer: Any) -> bool:
    """Whether a head of our own format is one for this model, by headers, config and tokenizer alone."""
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
