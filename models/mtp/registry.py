"""The layouts that are known, and which of them a checkpoint, a folder or a file holds."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from localspec.checkpoint import Checkpoint, Tensor, read_header
from localspec.errors import IncompleteModelError
from localspec.models.mtp import deepseek, gemma4, mimo, own, qwen3_next
from localspec.models.mtp.source import HeadSource

FAMILIES: dict[str, ModuleType] = {family.NAME: family for family in (own, qwen3_next, deepseek, mimo, gemma4)}
"""By name. Each has `prefix(tensors, metadata)` and `build(trunk, weights, source)`; the first that claims wins."""

CONVERTED, VERSION, PREFIX = "localspec-head", "1", "head."
"""The metadata's format and version of a head that was converted, and what its tensors' names begin with."""
BESIDE = "mtp.safetensors"
"""The file beside a model's own that `localspec models add-head` writes; it goes before a head inside of those."""


def find(place: Checkpoint | str | os.PathLike[str]) -> HeadSource | None:
    """The head that comes with a model, or that a folder or file of its own holds; None where there is none.

    Raises IncompleteModelError for a file that cannot be read.
    """
    if isinstance(place, Checkpoint):
        beside = place.path / BESIDE
        head = _in_files(beside, (beside,)) if beside.is_file() else None
        return head or _in_tensors(place.path, place.weights, place.tensors, {})
    path = Path(place).expanduser()
    if path.is_file():
        return _in_files(path, (path,))
    if not path.is_dir():
        raise IncompleteModelError(f"there is no MTP head at {path}: no such file or folder")
    if (path / BESIDE).is_file():
        return _in_files(path / BESIDE, (path / BESIDE,))
    return _in_files(path, tuple(sorted(path.glob("*.safetensors"))))


def _in_files(path: Path, files: tuple[Path, ...]) -> HeadSource | None:
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for file in files:
        more, about = read_header(file)
        tensors |= more
        metadata |= about
    return _in_tensors(path, files, tensors, metadata)


def _in_tensors(
    path: Path, files: tuple[Path, ...], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> HeadSource | None:
    if metadata.get("format") == CONVERTED:
        return _converted(path, files, tensors, metadata)
    for name, family in FAMILIES.items():
        prefix = family.prefix(tensors, metadata)
        if prefix is not None:
            mine = {tensor: about for tensor, about in tensors.items() if tensor.startswith(prefix)}
            return HeadSource(name, path, files, prefix, mine, metadata, _config(path))
    return None


def _converted(
    path: Path, files: tuple[Path, ...], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> HeadSource:
    family, version = metadata.get("family", ""), metadata.get("version")
    if family not in FAMILIES or version != VERSION:
        raise IncompleteModelError(
            f"{path} was converted by another localspec (family {family!r}, version {version!r}); convert it again: "
            "localspec models add-head"
        )
    mine = {tensor: about for tensor, about in tensors.items() if tensor.startswith(PREFIX)}
    try:
        config = json.loads(metadata.get("config", "{}"))
    except ValueError:
        config = {}
    return HeadSource(family, path, files, PREFIX, mine, metadata, config if isinstance(config, dict) else {}, True)


def _config(path: Path) -> dict[str, Any]:
    """The config.json in the head's folder; empty where there is none."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
