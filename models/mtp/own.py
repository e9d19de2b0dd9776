"""Our own heads, trained by `localspec.train`: one block, several taps, a reduced draft vocabulary.

One safetensors file. Metadata, all of it text: format "localspec-mtp", version "1", taps ("9,19,29": layers, from 0,
whose outputs are joined), heads, kv_heads, rope_theta, rms_eps, vocabulary (`localspec.vocabulary.fingerprint`) and, if
it is known, layers (how many the target has). Tensors, H the width of the target, R the draft vocabulary's size:

    mtp.tap_norms.{i}.weight [H]                  one for each tap
    mtp.fuse.weight [H, taps * H]
    mtp.pre_fc_norm_embedding.weight [H], mtp.pre_fc_norm_hidden.weight [H]
    mtp.fc.weight [H, 2 H]                        of embedding, hidden
    mtp.layers.0.*                                a Llama block, under Llama's names
    mtp.norm.weight [H]
    mtp.draft_ids [R], int32, ascending           the target's ids of the columns

The rows of the target's output matrix for those ids are the head's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn

from localspec.checkpoint import Tensor
from localspec.errors import IncompleteModelError
from localspec.models.mtp.head import Head, HeadCache, Weights, causal
from localspec.models.mtp.source import HeadSource
from localspec.trunk import Trunk

FORMAT, VERSION = "localspec-mtp", "1"
NAME = "localspec"
_DRAFT_IDS = "draft_ids"


def prefix(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str | None:
    """What the names of the head's tensors begin with; None where there is no such head."""
    return "mtp." if metadata.get("format") == FORMAT and "mtp.fuse.weight" in tensors else None


class OwnHead(Head):
    """Fused taps and an embedding through one Llama block."""

    def __init__(
        self,
        trunk: Trunk,
        *,
        taps: Sequence[int],
        heads: int,
        kv_heads: int,
        head_dim: int,
        intermediate: int,
        rope_theta: float,
        eps: float,
        draft_ids: mx.array,
    ) -> None:
        from mlx_lm.models.llama import ModelArgs, TransformerBlock

        super().__init__(trunk, taps)
        width = trunk.hidden_size
        self.tap_norms = [nn.RMSNorm(width, eps=eps) for _ in taps]
        self.fuse = nn.Linear(len(taps) * width, width, bias=False)
        self.pre_fc_norm_embedding = nn.RMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(width, eps=eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        block = ModelArgs(
            model_type="llama",
            hidden_size=width,
            num_hidden_layers=1,
            intermediate_size=intermediate,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=eps,
            vocab_size=1,
            rope_theta=rope_theta,
        )
        self.layers = [TransformerBlock(block)]
        self.norm = nn.RMSNorm(width, eps=eps)
        self._draft_ids = draft_ids
        self._output = trunk.output_rows(draft_ids)

    def join(self, rows: Sequence[mx.array]) -> mx.array:
        normed = [norm(row) for norm, row in zip(self.tap_norms, rows, strict=True)]
        fused: mx.array = self.fuse(mx.concatenate(normed, axis=-1))
        return fused

    def run(self, hidden: mx.array, ids: mx.array, cache: HeadCache, position: int) -> mx.array:
        embedded = self.pre_fc_norm_embedding(self.trunk.embed(ids))
        x = self.fc(mx.concatenate([embedded, self.pre_fc_norm_hidden(hidden)], axis=-1))
        cache.offset = position
        out: mx.array = self.norm(self.layers[0](x[None], causal(x.shape[0]), cache))[0]
        return out

    def logits(self, outputs: mx.array) -> mx.array:
        return outputs @ self._output.T


def build(trunk: Trunk, weights: Weights, source: HeadSource) -> tuple[Head, Weights]:
    """The head without its weights, and these under the names of its parameters."""
    metadata = source.metadata
    if metadata.get("version") != VERSION:
        raise IncompleteModelError(
            f"{source.path}: this localspec reads version {VERSION} of its head format, not {metadata.get('version')!r}"
        )
    try:
        taps = [int(tap) for tap in metadata["taps"].split(",")]
        heads, kv_heads = int(metadata["heads"]), int(metadata["kv_heads"])
        rope_theta, eps = float(metadata["rope_theta"]), float(metadata["rms_eps"])
        rows = weights["layers.0.self_attn.q_proj.weight"].shape[0]
        intermediate = weights["layers.0.mlp.gate_proj.weight"].shape[0]
        draft_ids = weights[_DRAFT_IDS]
    except (KeyError, ValueError) as error:
        raise IncompleteModelError(f"{source.path} is not a whole head: {error} is missing or wrong") from None
    if min(heads, kv_heads) < 1 or rows % heads or heads % kv_heads:
        raise IncompleteModelError(f"{source.path}: {rows} query rows do not make {heads} heads over {kv_heads}")
    if not (math.isfinite(rope_theta) and rope_theta > 0 and math.isfinite(eps) and eps > 0):
        raise IncompleteModelError(f"{source.path}: rope_theta and rms_eps must be positive numbers")
    whole = draft_ids.ndim == 1 and mx.issubdtype(draft_ids.dtype, mx.integer)
    ids: list[int] = draft_ids.tolist() if whole else []  # type: ignore[assignment]
    size = int(trunk.logits(mx.zeros((1, trunk.hidden_size), trunk.dtype)).shape[-1])
    size = min(size, getattr(trunk.args, "vocab_size", size))
    if not ids or any(a >= b for a, b in pairwise(ids)) or ids[0] < 0 or ids[-1] >= size:
        raise IncompleteModelError(
            f"{source.path}: draft_ids must be integers that ascend, from 0 to below the target's {size} ids"
        )
    head = OwnHead(
        trunk,
        taps=taps,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=rows // heads,
        intermediate=intermediate,
        rope_theta=rope_theta,
        eps=eps,
        draft_ids=draft_ids.astype(mx.int32),
    )
    return head, {name: array for name, array in weights.items() if name != _DRAFT_IDS}
