"""MiMo's heads: `model.mtp_layers.{i}.*`.

`input_proj` of [hidden_layernorm(hidden state after the last norm), token_layernorm(embedding)], in this order, a
block as the target's, `final_layernorm`, whose output goes on and into the target's output matrix. Where there are
several, the first is applied again for deeper drafts.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn

from localspec.checkpoint import Tensor
from localspec.errors import IncompatibleDrafterError
from localspec.models.mtp.head import Block, Head, HeadCache, Weights, causal
from localspec.models.mtp.source import HeadSource
from localspec.trunk import Trunk

NAME = "mimo"
_OWN = ("token_layernorm.", "hidden_layernorm.", "input_proj.", "final_layernorm.", "block.")


def prefix(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str | None:
    """What the names of the head's tensors begin with; None where there is no such head."""
    for name in tensors:
        start, found, end = name.rpartition("mtp_layers.0.input_proj.weight")
        if found and not end:
            return f"{start}mtp_layers.0."
    return None


class MimoHead(Head):
    """The hidden state comes first in front of `input_proj`."""

    def __init__(self, trunk: Trunk) -> None:
        from mlx_lm.models.mimo import MLP, Attention

        super().__init__(trunk)
        args, width, eps = trunk.args, trunk.hidden_size, trunk.args.rms_norm_eps
        self.token_layernorm = nn.RMSNorm(width, eps=eps)
        self.hidden_layernorm = nn.RMSNorm(width, eps=eps)
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        self.block = Block(Attention(args), MLP(width, args.intermediate_size), width, eps)
        self.final_layernorm = nn.RMSNorm(width, eps=eps)

    def run(self, hidden: mx.array, ids: mx.array, cache: HeadCache, position: int) -> mx.array:
        embedded = self.token_layernorm(self.trunk.embed(ids))
        x = self.input_proj(mx.concatenate([self.hidden_layernorm(hidden), embedded], axis=-1))
        cache.offset = position
        out: mx.array = self.final_layernorm(self.block(x[None], causal(x.shape[0]), cache))[0]
        return out


def build(trunk: Trunk, weights: Weights, source: HeadSource) -> tuple[Head, Weights]:
    """The head without its weights, and these under the names of its parameters."""
    if type(trunk.layers[-1]).__module__ != "mlx_lm.models.mimo":
        raise IncompatibleDrafterError(f"the head at {source.path} is a MiMo's, and the target is no such model")
    named = {name if name.startswith(_OWN) else f"block.{name}": array for name, array in weights.items()}
    return MimoHead(trunk), named
