"""Where a model of mlx-lm keeps what drafters that build on it need: layers, last norm, embedding, output matrix.

Found by the names that mlx-lm's architectures use; a model that is built otherwise is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from localspec.errors import UnsupportedModelError

_INNER = ("language_model", "model", "transformer", "backbone")
_NORMS = ("norm", "norm_f", "ln_f", "final_layernorm")
_EMBEDDINGS = ("embed_tokens", "wte", "embeddings", "tok_embeddings", "word_embeddings")


@dataclass(frozen=True, slots=True, eq=False)
class Trunk:
    """The parts of one model. The modules are the model's own."""

    layers: list[nn.Module]
    norm: nn.Module
    """Of the last layer's output."""
    embedding: nn.Module
    owner: nn.Module
    """What holds the output matrix, where that is not the embedding's: it has an `lm_head`."""
    args: Any
    """The settings that it was built with."""

    def embed(self, ids: mx.array) -> mx.array:
        """Rows of the embedding, [*ids.shape, hidden], unscaled, in the dtype that the model computes in."""
        rows: mx.array = self.embedding(ids)
        return rows

    def logits(self, hidden: mx.array) -> mx.array:
        """[..., hidden] after the last norm to [..., vocabulary]: the output matrix alone, no soft cap."""
        head = getattr(self.owner, "lm_head", None)
        out: mx.array = self.embedding.as_linear(hidden) if head is None else head(hidden)
        return out

    def output_rows(self, ids: mx.array) -> mx.array:
        """Rows of the output matrix, [ids, hidden], in the dtype that the model computes in."""
        head = getattr(self.owner, "lm_head", None)
        if head is None:
            return self.embed(ids)
        if not isinstance(head, nn.QuantizedLinear):
            rows: mx.array = head.weight[ids]
            return rows
        biases = None if head.get("biases") is None else head.biases[ids]
        return mx.dequantize(
            head.weight[ids], head.scales[ids], biases, head.group_size, head.bits, getattr(head, "mode", "affine")
        ).astype(self.dtype)

    @property
    def dtype(self) -> mx.Dtype:
        """What the model computes in."""
        return self.embed(mx.zeros((1,), mx.uint32)).dtype

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return int(self.embed(mx.zeros((1,), mx.uint32)).shape[-1])


def trunk_of(model: nn.Module) -> Trunk:
    """Raises UnsupportedModelError for a model without the parts that a drafter could build on."""
    owner = node = model
    while node is not None:
        layers, norm, embedding = getattr(node, "layers", None), _first(node, _NORMS), _first(node, _EMBEDDINGS)
        if isinstance(layers, list) and layers and norm is not None and embedding is not None:
            return Trunk(layers, norm, embedding, owner, getattr(owner, "args", None))
        owner, node = node, _first(node, _INNER)
    kind = getattr(model, "model_type", type(model).__name__)
    raise UnsupportedModelError(
        f"cannot tell where a {kind} model keeps its layers, last norm and embedding, so nothing can draft from its "
        "hidden states"
    )


def _first(node: nn.Module, names: tuple[str, ...]) -> Any:
    """The first of the attributes that is a module."""
    found = (getattr(node, name, None) for name in names)
    return next((part for part in found if isinstance(part, nn.Module)), None)
