"""Gemma 4's assistant: a small model of its own, whose layers read the target's keys and values.

`pre_projection` of [target's embedding times sqrt(its width), target's hidden state after the last norm], a few
layers with queries only, `norm`; logits by the assistant's own embedding (or `lm_head`), and `post_projection` back to
the target's width for the next draft. Each layer attends to the keys and values of the target's last layer of its kind,
full or sliding, that has some. They stay as they are while drafts are made, and so does the position: that of the
newest token. Checkpoints with `masked_embedding` also have centroids, which stand for groups of ids and save the
product with the whole embedding; they are not used here.

Its layers are described by the `text_config` of its own config.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from localspec.checkpoint import Tensor
from localspec.errors import IncompatibleDrafterError, IncompleteModelError
from localspec.models.mtp.head import Head, Weights
from localspec.models.mtp.source import HeadSource
from localspec.trunk import Trunk

NAME = "gemma4"
_CENTROIDS = "masked_embedding."
_KINDS = ("full_attention", "sliding_attention")


def prefix(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str | None:
    """What the names of the head's tensors begin with; None where there is no such head."""
    for name in tensors:
        start, found, end = name.rpartition("pre_projection.weight")
        if found and not end and f"{start}post_projection.weight" in tensors:
            return start
    return None


@dataclass(frozen=True, slots=True)
class Borrowed:
    """The target's keys and values that layers of each kind read, in time order, and the newest token's position."""

    parts: dict[str, tuple[mx.array, mx.array]]
    position: int

    def cut(self, entries: int) -> None:
        """Nothing is appended, so nothing is taken back."""

    def arrays(self) -> list[mx.array]:
        """Nothing of its own."""
        return []


class _Inner(nn.Module):  # type: ignore[misc]
    def __init__(self, args: Any) -> None:
        from mlx_lm.models.gemma4_text import DecoderLayer

        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [DecoderLayer(args, layer_idx=i) for i in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)


class Gemma4Head(Head):
    """The assistant between its two projections."""

    borrows = True

    def __init__(self, trunk: Trunk, args: Any, *, tied: bool) -> None:
        super().__init__(trunk)
        width = trunk.hidden_size
        self.model = _Inner(args)
        self.pre_projection = nn.Linear(2 * width, args.hidden_size, bias=False)
        self.post_projection = nn.Linear(args.hidden_size, width, bias=False)
        if not tied:
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)
        own = trunk.args.layer_types[: len(trunk.layers) - trunk.args.num_kv_shared_layers]
        self._lenders = {kind: len(own) - 1 - own[::-1].index(kind) for kind in set(args.layer_types) & set(own)}

    def borrow(self, caches: Sequence[Any]) -> Borrowed:
        parts = {kind: _entries(caches[layer]) for kind, layer in self._lenders.items()}
        return Borrowed(parts, int(caches[0].offset))

    def run(self, hidden: mx.array, ids: mx.array, cache: Borrowed, position: int) -> mx.array:
        embedded = self.trunk.embed(ids) * self.trunk.hidden_size**0.5
        h = self.pre_projection(mx.concatenate([embedded, hidden], axis=-1))[None]
        for layer in self.model.layers:
            h, _, _ = layer(h, None, None, shared_kv=cache.parts[layer.layer_type], offset=cache.position)
        out: mx.array = self.model.norm(h)[0]
        return out

    def onward(self, outputs: mx.array) -> mx.array:
        hidden: mx.array = self.post_projection(outputs)
        return hidden

    def logits(self, outputs: mx.array) -> mx.array:
        out: mx.array = self.lm_head(outputs) if "lm_head" in self else self.model.embed_tokens.as_linear(outputs)
        return out


def build(trunk: Trunk, weights: Weights, source: HeadSource) -> tuple[Head, Weights]:
    """The head without its weights, and these under the names of its parameters."""
    from mlx_lm.models.gemma4_text import ModelArgs

    if type(trunk.layers[-1]).__module__ != "mlx_lm.models.gemma4_text":
        raise IncompatibleDrafterError(
            f"the head at {source.path} is an assistant of Gemma 4, and the target is no such model"
        )
    config = source.config.get("text_config")
    if not isinstance(config, dict):
        raise IncompleteModelError(f"{source.path}: the assistant's config.json, with its text_config, is missing")
    weights = {name: array for name, array in weights.items() if not name.startswith(_CENTROIDS)}
    try:
        width = weights["model.layers.0.mlp.gate_proj.weight"].shape[0]
        layers = int(config["num_hidden_layers"])
        own = {"num_kv_shared_layers": layers, "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False}
        args = ModelArgs.from_dict(config | own | {"intermediate_size": width})
        tied = "lm_head.weight" not in weights
        head = Gemma4Head(trunk, args, tied=tied)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise IncompleteModelError(f"{source.path}: the assistant's config.json does not fit ({error})") from None
    lacking = set(args.layer_types) - set(head._lenders)
    if lacking:
        raise IncompatibleDrafterError(
            f"the head at {source.path} reads layers with {sorted(lacking)[0]}, and the target has none"
        )
    return head, weights


def _entries(cache: Any) -> tuple[mx.array, mx.array]:
    """All keys and values that the next token may attend to, [1, heads, entries, width], in time order."""
    if hasattr(cache, "bits"):
        parts = []
        for packed in (cache.keys, cache.values):
            weight, scales, biases = (x[..., : cache.offset, :] for x in packed)
            parts.append(mx.dequantize(weight, scales, biases, cache.group_size, cache.bits))
        return parts[0], parts[1]
    end = getattr(cache, "_idx", cache.offset)
    window = getattr(cache, "max_size", None)
    first = 0 if window is None else max(end - min(cache.offset, window - 1), 0)
    return cache.keys[..., first:end, :], cache.values[..., first:end, :]
