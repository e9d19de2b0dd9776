"""The heads of Qwen3-Next, 3.5, 3.6 and 3.8, dense and MoE: `mtp.*` beside the model's own tensors.

`fc` of [norm(embedding), norm(hidden state after the last norm)], a gated full-attention block as the target's, `norm`.
15 tensors where the MLP is dense. Of experts there are three spellings: one tensor each, all of a kind in one
(`experts.gate_up_proj`, `experts.down_proj`), and mlx-lm's (`switch_mlp.*`).

Norm weights are stored zero-centred (the factor is 1 + weight) in the original checkpoints, and shifted in converted
ones; some converters shift a part. Decided by what the weights are: a block's norms have factors around 1, so where
the median of their means is below SHIFTED they are zero-centred. The two norms in front of `fc` go with them, since
their factors may be small (0.27 and 0.49 in one checkpoint); the last norm goes by its own mean.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from statistics import median

import mlx.core as mx
import mlx.nn as nn

from localspec.checkpoint import Tensor
from localspec.errors import IncompatibleDrafterError, IncompleteModelError
from localspec.models.mtp.head import Block, Head, HeadCache, Weights, causal
from localspec.models.mtp.source import HeadSource
from localspec.trunk import Trunk

NAME = "qwen3_next"
SHIFTED = 0.5
"""Mean above which norm weights are factors, and below which they are factors less 1."""
_BLOCK_NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
_FIRST_NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden")
_SHARED = ("embed_tokens.", "lm_head.")


def prefix(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str | None:
    """What the names of the head's tensors begin with; None where there is no such head."""
    for name in tensors:
        start, found, end = name.rpartition("pre_fc_norm_hidden.weight")
        if found and not end and f"{start}fc.weight" in tensors:
            return start
    return None


class Qwen3NextHead(Head):
    """One block between `fc` and `norm`; the norm's output is what goes on, and into the target's output matrix."""

    def __init__(self, trunk: Trunk, mlp: nn.Module) -> None:
        from mlx_lm.models.qwen3_next import Qwen3NextAttention

        super().__init__(trunk)
        width, eps = trunk.hidden_size, trunk.args.rms_norm_eps
        self.pre_fc_norm_embedding = nn.RMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(width, eps=eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = [Block(Qwen3NextAttention(trunk.args), mlp, width, eps)]
        self.norm = nn.RMSNorm(width, eps=eps)

    def run(self, hidden: mx.array, ids: mx.array, cache: HeadCache, position: int) -> mx.array:
        embedded = self.pre_fc_norm_embedding(self.trunk.embed(ids))
        x = self.fc(mx.concatenate([embedded, self.pre_fc_norm_hidden(hidden)], axis=-1))
        cache.offset = position
        out: mx.array = self.norm(self.layers[0](x[None], causal(x.shape[0]), cache))[0]
        return out


def build(trunk: Trunk, weights: Weights, source: HeadSource) -> tuple[Head, Weights]:
    """The head without its weights, and these under the names of its parameters."""
    from mlx_lm.models.qwen3_next import Qwen3NextMLP, Qwen3NextSparseMoeBlock

    if not hasattr(trunk.args, "full_attention_interval"):
        raise IncompatibleDrafterError(f"the head at {source.path} is a Qwen3-Next's, and the target is no such model")
    if not source.converted:
        weights = _with_factors(_stacked(_first_layer(weights)), source)
    if "layers.0.mlp.gate.weight" in weights:
        return Qwen3NextHead(trunk, Qwen3NextSparseMoeBlock(trunk.args)), weights
    gate = weights.get("layers.0.mlp.gate_proj.weight")
    if gate is None:
        raise IncompleteModelError(
            f"{source.path} is not a whole head: {source.prefix}layers.0.mlp.gate_proj.weight is missing"
        )
    return Qwen3NextHead(trunk, Qwen3NextMLP(trunk.hidden_size, gate.shape[0])), weights


def _first_layer(weights: Weights) -> Weights:
    """Without copies of what the target has, and without the blocks behind the first: that one is applied again."""
    behind = re.compile(r"layers\.[1-9]")
    return {n: w for n, w in weights.items() if not n.startswith(_SHARED) and not behind.match(n)}


def _stacked(weights: Weights) -> Weights:
    """Experts under mlx-lm's names, all of a kind in one array [experts, outputs, inputs]."""
    mlp = "layers.0.mlp."
    found = {name: array for name, array in weights.items() if not name.startswith(f"{mlp}experts.")}
    joined = weights.get(f"{mlp}experts.gate_up_proj")
    if joined is not None:
        half = joined.shape[-2] // 2
        found[f"{mlp}switch_mlp.gate_proj.weight"] = joined[..., :half, :]
        found[f"{mlp}switch_mlp.up_proj.weight"] = joined[..., half:, :]
        found[f"{mlp}switch_mlp.down_proj.weight"] = weights[f"{mlp}experts.down_proj"]
        return found
    for kind in ("gate_proj", "up_proj", "down_proj"):
        for part in ("weight", "scales", "biases"):
            each = [n for n in weights if re.fullmatch(rf"layers\.0\.mlp\.experts\.\d+\.{kind}\.{part}", n)]
            if each:
                each.sort(key=lambda name: int(name.split(".")[4]))
                found[f"{mlp}switch_mlp.{kind}.{part}"] = mx.stack([weights[name] for name in each])
    return found


def _with_factors(weights: Weights, source: HeadSource) -> Weights:
    """Norm weights as factors, whichever way they are stored."""

    def mean(name: str) -> float:
        array = weights.get(f"{name}.weight")
        if array is None:
            raise IncompleteModelError(f"{source.path} is not a whole head: {source.prefix}{name}.weight is missing")
        return array.astype(mx.float32).mean().item()  # type: ignore[return-value]

    block = [f"layers.0.{name}" for name in _BLOCK_NORMS]
    centred = [*block, *_FIRST_NORMS] if median(map(mean, block)) < SHIFTED else []
    if mean("norm") < SHIFTED:
        centred.append("norm")
    return weights | {f"{name}.weight": weights[f"{name}.weight"].astype(mx.float32) + 1 for name in centred}
