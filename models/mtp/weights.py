"""A head's weights from its files into its modules: complete, of the right shapes, and of the target's kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from localspec.casting import as_float, cast
from localspec.errors import IncompatibleDrafterError, IncompleteModelError, LocalspecError
from localspec.hidden import Tap
from localspec.models.mtp.head import Head, Weights
from localspec.models.mtp.registry import FAMILIES
from localspec.models.mtp.source import HeadSource
from localspec.trunk import Trunk, trunk_of
from localspec.vocabulary import fingerprint

_PACKED = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}
"""(bits, group size) of the formats whose scales are bytes."""


def load_head(source: HeadSource, model: Any, tokenizer: Any = None, *, hidden: Tap | None = None) -> Head:
    """The head of `source` for `model`, what mlx_lm.load returned; its weights evaluated, in the calling thread.

    tokenizer: the model's; with it, a head that names its vocabulary is held to that. hidden: the hidden state that it
    is given, where its family's is not the one that it was trained on. Where the model's matrices are floats the head's
    are too, of the same dtype; where they are quantized, the head's stay as they are stored. Raises
    IncompatibleDrafterError for another model's head, IncompleteModelError for one that lacks tensors, or has some that
    no training touched.
    """
    trunk = trunk_of(model)
    head = build_head(source, trunk, tokenizer)
    if hidden is not None:
        if len(head.taps) != 1:
            raise IncompatibleDrafterError(f"the head at {source.path} reads several hidden states, not one to choose")
        head.taps = (hidden,)
    quantized = any("scales" in module for module in _modules(trunk.layers))
    with _faults_of(source):
        _cast(head, trunk.dtype, keep_quantized=quantized)
        evaluate(head)
    return head


def build_head(source: HeadSource, trunk: Trunk, tokenizer: Any = None) -> Head:
    """The head with its weights as they are stored, lazy. Raises as `load_head` does."""
    with _faults_of(source):
        found: tuple[Head, Weights] = FAMILIES[source.family].build(trunk, _read(source), source)
        head, weights = found
        _require_fit(head, source, tokenizer)
        _fill(head, weights, source)
    return head


@contextmanager
def _faults_of(source: HeadSource) -> Iterator[None]:
    """A file may be wrong in more ways than anybody thinks of: whatever fails over it is said in one line."""
    try:
        yield
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        if isinstance(error, LocalspecError):
            raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise IncompleteModelError(f"{source.path} cannot be read as an MTP head: {reason}") from error


def evaluate(head: Head) -> None:
    """Compute all that is in the head, in the calling thread."""
    head.eval()
    # One by one, and not parameters only: what waits for this thread's stream could not be computed in another one.
    for module in _modules([head]):
        for value in module.values():
            if isinstance(value, mx.array):
                mx.eval(value)


def _require_fit(head: Head, source: HeadSource, tokenizer: Any) -> None:
    beyond = [tap for tap in head.taps if isinstance(tap, int) and not 0 <= tap < len(head.trunk.layers)]
    if beyond:
        raise IncompatibleDrafterError(
            f"the head at {source.path} is another model's: it reads layer {beyond[0]}, and the target has layers 0 to "
            f"{len(head.trunk.layers) - 1}"
        )
    wanted = source.metadata.get("vocabulary")
    if wanted is not None and tokenizer is not None and wanted != fingerprint(tokenizer):
        raise IncompatibleDrafterError(
            f"the head at {source.path} was made for another vocabulary: its ids mean other tokens than the target's"
        )


def _read(source: HeadSource) -> Weights:
    """The head's tensors by their names behind the prefix, lazy."""
    found: Weights = {}
    for file in source.files:
        held: Weights = mx.load(str(file))  # type: ignore[assignment]
        found |= {name: array for name, array in held.items() if name in source.tensors}
    missing = [name for name in source.tensors if name not in found]
    if missing:
        raise IncompleteModelError(f"{source.path}: {missing[0]} cannot be read")
    return {name.removeprefix(source.prefix): array for name, array in found.items()}


def _fill(head: Head, weights: Weights, source: HeadSource) -> None:
    def quantization(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        scales, inputs = weights[f"{path}.scales"], module.weight.shape[-1]
        group_size = inputs // scales.shape[-1]
        bits = weights[f"{path}.weight"].shape[-1] * 32 // inputs
        mode = "affine" if scales.dtype != mx.uint8 else _PACKED.get((bits, group_size))
        if mode is None:
            raise IncompleteModelError(f"{source.path}: {path} is quantized in a way that is not known")
        return {"group_size": group_size, "bits": bits, "mode": mode}

    nn.quantize(head, class_predicate=quantization)
    expected = dict(tree_flatten(head.parameters()))
    missing = sorted(expected.keys() - weights.keys())
    if missing:
        raise IncompleteModelError(
            f"{source.path} is not a whole head: {source.prefix}{missing[0]} is missing"
            + (f", and {len(missing) - 1} others" if len(missing) > 1 else "")
        )
    odd = sorted(weights.keys() - expected.keys())
    if odd:
        raise IncompleteModelError(
            f"{source.path}: {source.prefix}{odd[0]} has no place in a head of the {source.family} layout"
        )
    for name, array in weights.items():
        if array.shape != expected[name].shape:
            raise IncompatibleDrafterError(
                f"the head at {source.path} is another model's: {source.prefix}{name} is {list(array.shape)}, and for "
                f"this target it would be {list(expected[name].shape)}"
            )
        if not (mx.issubdtype(array.dtype, mx.floating) or array.dtype in (mx.uint32, mx.uint8)):
            raise IncompleteModelError(f"{source.path}: {source.prefix}{name} holds no weights, but {array.dtype}")
        _require_trained(f"{source.prefix}{name}", array, source)
    head.load_weights(list(weights.items()), strict=True)


def _require_trained(name: str, array: mx.array, source: HeadSource) -> None:
    """A loader that lost a matrix leaves zeros or ones, which draft nothing and say nothing."""
    if mx.issubdtype(array.dtype, mx.floating) and not mx.isfinite(array).all().item():
        raise IncompleteModelError(f"{source.path}: {name} is not finite; the file may be damaged")
    matrix = array.ndim > 1 and min(array.shape[-2:]) > 1 and not name.endswith((".scales", ".biases"))
    if matrix and (array == array.reshape(-1)[0]).all().item():
        raise IncompleteModelError(
            f"{source.path}: {name} holds one value throughout, as before any training; the head would draft nothing"
        )


def _cast(head: Head, dtype: mx.Dtype, *, keep_quantized: bool) -> None:
    if keep_quantized:
        cast(head, dtype)
    else:
        as_float(head, dtype)


def _modules(roots: list[Any]) -> list[nn.Module]:
    return [module for root in roots for _, module in root.named_modules()]
