"""The heads of DeepSeek-V3 and GLM-4.5 / 4.6: one more layer behind the model's last, `model.layers.{N}.*`.

`eh_proj` of [enorm(embedding), hnorm(hidden state after the last norm)], a block as the target's last layer, and
`shared_head.norm` in front of the output matrix. What goes on to the next depth is the block's output before that norm.
Embedding and output matrix are stored once more with the head; they are copies of the target's, and are used only where
they turn out to be others.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from localspec.checkpoint import Tensor
from localspec.errors import IncompatibleDrafterError
from localspec.models.mtp.head import Head, HeadCache, Weights
from localspec.models.mtp.source import HeadSource
from localspec.trunk import Trunk

NAME = "deepseek"
TARGETS = ("deepseek_v3", "glm4_moe")
"""Architectures of mlx-lm whose last layer can stand behind itself."""
_OWN = ("enorm.", "hnorm.", "eh_proj.", "shared_head.", "embed_tokens.")
_PROBED = 64
_ALIKE = 0.95


def prefix(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str | None:
    """What the names of the head's tensors begin with; None where there is no such head. Of several, the first."""
    starts = [name.removesuffix("eh_proj.weight") for name in tensors if name.endswith(".eh_proj.weight")]
    whole = [start for start in starts if f"{start}enorm.weight" in tensors and f"{start}hnorm.weight" in tensors]
    return min(whole, key=lambda start: (len(start), start), default=None)


class _SharedHead(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, eps: float, output: tuple[int, int] | None) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=eps)
        if output is not None:
            self.head = nn.Linear(output[1], output[0], bias=False)


class DeepseekHead(Head):
    """`eh_proj`, and a block of the target's own kind."""

    def __init__(self, trunk: Trunk, embedding: int | None, output: int | None) -> None:
        """embedding, output: rows of matrices of its own; None where the target's are used."""
        super().__init__(trunk)
        width, eps = trunk.hidden_size, trunk.args.rms_norm_eps
        self.enorm = nn.RMSNorm(width, eps=eps)
        self.hnorm = nn.RMSNorm(width, eps=eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block = type(trunk.layers[-1])(trunk.args, len(trunk.layers) - 1)
        self.shared_head = _SharedHead(width, eps, None if output is None else (output, width))
        if embedding is not None:
            self.embed_tokens = nn.Embedding(embedding, width)

    def run(self, hidden: mx.array, ids: mx.array, cache: HeadCache, position: int) -> mx.array:
        embedded = self.embed_tokens(ids) if "embed_tokens" in self else self.trunk.embed(ids)
        x = self.eh_proj(mx.concatenate([self.enorm(embedded), self.hnorm(hidden)], axis=-1))
        rows, before = x.shape[0], cache.entries
        mask = None
        if rows > 1:  # as an array: latent attention adds its own scores
            mask = mx.arange(before + rows)[None] <= mx.arange(before, before + rows)[:, None]
        cache.offset = position
        out: mx.array = self.block(x[None], mask, cache)[0]
        return out

    def logits(self, outputs: mx.array) -> mx.array:
        normed = self.shared_head.norm(outputs)
        out: mx.array = self.shared_head.head(normed) if "head" in self.shared_head else self.trunk.logits(normed)
        return out


def build(trunk: Trunk, weights: Weights, source: HeadSource) -> tuple[Head, Weights]:
    """The head without its weights, and these under the names of its parameters."""
    kind = type(trunk.layers[-1]).__module__.rpartition(".")[2]
    if kind not in TARGETS:
        raise IncompatibleDrafterError(
            f"the head at {source.path} goes with {' or '.join(TARGETS)}, and the target's layers are {kind}'s"
        )
    if not source.converted:
        weights = _sanitized(trunk, _without_copies(trunk, weights))
    embedding, output = weights.get("embed_tokens.weight"), weights.get("shared_head.head.weight")
    head = DeepseekHead(
        trunk, None if embedding is None else embedding.shape[0], None if output is None else output.shape[0]
    )
    return head, weights


def _sanitized(trunk: Trunk, weights: Weights) -> Weights:
    """The block's weights as mlx-lm wants a layer's, which joins experts, splits projections and unpacks 8-bit floats:
    the target's own rules, told that the block is the first and only layer of a model."""
    layer = "model.layers.0."
    model: Any = sys.modules[type(trunk.layers[-1]).__module__].Model
    alone = SimpleNamespace(args=replace(trunk.args, num_hidden_layers=1))
    named = {name if name.startswith(_OWN) else f"{layer}{name}": array for name, array in weights.items()}
    found: Weights = model.sanitize(alone, named)
    return {n.replace(layer, "block.") if n.startswith(layer) else n: array for n, array in found.items()}


def _without_copies(trunk: Trunk, weights: Weights) -> Weights:
    """Without the matrices that the target has itself; without the shares of a quantized one either."""
    dropped: list[str] = []
    for name, rows_of in (("embed_tokens.", trunk.embed), ("shared_head.head.", trunk.output_rows)):
        own = weights.get(f"{name}weight")
        if own is None:
            continue
        size = own.shape[0]
        ids = mx.array(sorted({i * size // _PROBED for i in range(_PROBED)}), mx.int32)
        if f"{name}scales" in weights or (own.shape[1] == trunk.hidden_size and _alike(own[ids], rows_of(ids))):
            dropped.append(name)
    return {name: array for name, array in weights.items() if not name.startswith(tuple(dropped))}


def _alike(a: mx.array, b: mx.array) -> bool:
    """Whether rows point the same way, but for what quantizing one of them does."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    cosine = (a * b).sum() / mx.maximum(mx.linalg.norm(a) * mx.linalg.norm(b), 1e-12)
    return bool((cosine > _ALIKE).item())
