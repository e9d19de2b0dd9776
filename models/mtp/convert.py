"""A head out of a checkpoint into one file beside a target, in the target's format: `localspec models add-head`."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from localspec.casting import cast
from localspec.checkpoint import Checkpoint
from localspec.errors import LocalspecError
from localspec.loading import load_tokenizer, open_model
from localspec.models.mtp import own
from localspec.models.mtp.head import Head
from localspec.models.mtp.registry import BESIDE, CONVERTED, PREFIX, VERSION
from localspec.models.mtp.source import HeadSource
from localspec.models.mtp.weights import build_head
from localspec.trunk import trunk_of


def add_head(source: HeadSource, target: Checkpoint) -> Path:
    """Store the head of `source` beside `target`, quantized as that is, and return the file.

    What was there before stays until the new file is whole. The target's weights are not read, but for a few rows.
    Raises IncompatibleDrafterError for another model's head, IncompleteModelError for a head that is not whole, and
    LocalspecError where the file cannot be written.
    """
    place = target.path / BESIDE
    model = open_model(target)
    head = build_head(source, trunk_of(model), load_tokenizer(target))
    if source.family == own.NAME:
        with _replacing(place) as file:  # one file that says all about itself, in whatever format
            file.write_bytes(source.files[0].read_bytes())
        return place
    _as_the_target(head, model, target.config)
    metadata = {"format": CONVERTED, "version": VERSION, "family": source.family}
    if source.config.get("text_config") is not None:
        metadata["config"] = json.dumps({"text_config": source.config["text_config"]})
    tensors = {f"{PREFIX}{name}": array for name, array in tree_flatten(head.parameters())}
    with _replacing(place) as file:
        mx.save_safetensors(str(file), tensors, metadata)
    return place


def _as_the_target(head: Head, model: Any, config: dict[str, Any]) -> None:
    """Matrices packed as the target's config says, and as its architecture wants single ones; floats in its dtype."""
    cast(head, head.trunk.dtype)
    quantization = config.get("quantization") or {}
    if not isinstance(quantization, dict) or "bits" not in quantization:
        return
    bits, group_size, mode = quantization["bits"], quantization["group_size"], quantization.get("mode", "affine")
    wanted = getattr(model, "quant_predicate", None) or (lambda _path, _module: True)

    def packed(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized"):
            return False
        how: bool | dict[str, Any] = wanted(path, module)
        group = how.get("group_size", group_size) if isinstance(how, dict) else group_size
        return how if module.weight.shape[-1] % group == 0 else False

    nn.quantize(head, group_size, bits, mode=mode, class_predicate=packed)


@contextmanager
def _replacing(place: Path) -> Iterator[Path]:
    """A new file that takes the place of `place` when all went well, and is gone otherwise."""
    try:
        handle, name = tempfile.mkstemp(prefix=".mtp-", suffix=".safetensors", dir=place.parent)
        os.close(handle)
        file = Path(name)
        try:
            yield file
            with file.open("rb+") as stream:
                os.fsync(stream.fileno())
            file.chmod(0o644)
            file.replace(place)
        finally:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise LocalspecError(f"cannot write {place}: {error.strerror or error}") from error
