"""A Llama in torch, for making data: batched decoding, and the hidden states of given texts.

Matrices are multiplied in bfloat16, which CPUs with AMX do many times faster than anything in float32; what is added up
along the layers (the residual stream) and the logits of the likeliest tokens stay in float32. Knows nothing of texts.
Needs the extra `train`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import torch
import torch.nn.functional as F
from mlx.utils import tree_flatten
from torch import Tensor

from localspec.errors import UnsupportedModelError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SURE = 8
"""How many of the likeliest tokens get logits in float32: bfloat16 would make ties of them."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""From a layer's number, queries [batch, heads, tokens, size], keys and values [batch, key heads, tokens, size] to what
the heads say, shaped like the queries."""


class TorchLlama:
    """The weights of an MLX Llama, and its passes."""

    def __init__(self, model: Any) -> None:
        """UnsupportedModelError when `model` is not a Llama of mlx-lm with float weights and shared embeddings."""
        args = model.args
        parameters: dict[str, Any] = dict(tree_flatten(model.parameters()))
        if getattr(args, "model_type", None) != "llama" or not args.tie_word_embeddings or args.rope_scaling:
            raise UnsupportedModelError("only a Llama with shared embeddings and plain RoPE can be run by torch")
        if any(name.endswith("scales") for name in parameters):
            raise UnsupportedModelError("torch needs the model in float32: load it with dtype float32")
        weights = {
            name.removeprefix("model."): torch.from_numpy(np.array(array.astype(mx.float32)))
            for name, array in parameters.items()
        }
        self.hidden_size: int = args.hidden_size
        self.layers: int = args.num_hidden_layers
        self.heads: int = args.num_attention_heads
        self.kv_heads: int = args.num_key_value_heads
        self.head_size: int = args.head_dim or args.hidden_size // args.num_attention_heads
        self.rope_theta: float = args.rope_theta
        self.rms_eps: float = args.rms_norm_eps
        self.weights = weights
        """In float32, by their names without `model.`."""
        self._embedding = weights["embed_tokens.weight"].bfloat16()
        self._layers = [self._packed(f"layers.{n}.") for n in range(self.layers)]

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., hidden size], float32."""
        return F.embedding(ids, self.weights["embed_tokens.weight"])

    def batch(self, prompts: Sequence[Sequence[int]], most: int) -> TorchBatch:
        """As localspec.train.decoding wants it."""
        return TorchBatch(self, prompts, most)

    def taps(self, ids: Tensor, layers: Sequence[int]) -> Tensor:
        """What the residual stream is behind some layers: [batch, tokens, len(layers), hidden size], bfloat16.

        ids: [batch, tokens] texts from their beginning on, padded at the end with anything.
        """
        found: dict[int, Tensor] = {}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        with torch.inference_mode():
            self.run(ids, torch.arange(ids.shape[1]), attend, found)
            return torch.stack([found[layer].bfloat16() for layer in layers], dim=2)

    def normed(self, stream: Tensor) -> Tensor:
        """What the output matrix gets for a residual stream behind the last layer, float32."""
        return F.rms_norm(stream.float(), (self.hidden_size,), self.weights["norm.weight"], self.rms_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary], float32, of `normed` hidden states [rows, hidden size].

        The likeliest few are exact, so that their order is right; the others are rounded to bfloat16.
        """
        logits = F.linear(hidden.bfloat16(), self._embedding).float()
        top = logits.topk(_SURE, dim=-1).indices
        exact = torch.einsum("rkh,rh->rk", self.embed(top), hidden)
        return logits.scatter_(1, top, exact)

    def run(self, ids: Tensor, positions: Tensor, attend: Attend, found: dict[int, Tensor] | None = None) -> Tensor:
        """The residual stream [batch, tokens, hidden size] behind the last layer, float32.

        positions: [tokens] or [batch, tokens]. `found` is given what is behind each layer.
        """
        batch, tokens = ids.shape
        frequencies = self.rope_theta ** (-torch.arange(0, self.head_size, 2).float() / self.head_size)
        angles = (positions[..., None].float() * frequencies).expand(batch, tokens, -1)[:, None]
        cos, sin = angles.cos(), angles.sin()
        x = self.embed(ids)
        for number, layer in enumerate(self._layers):
            y = F.rms_norm(x, (self.hidden_size,), layer["input_norm"], self.rms_eps).bfloat16()
            heads = F.linear(y, layer["qkv"]).view(batch, tokens, -1, self.head_size).transpose(1, 2)
            turned, v = heads.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
            q, k = rotate(turned, cos, sin).bfloat16().split((self.heads, self.kv_heads), dim=1)
            said = attend(number, q, k, v)
            x = x + F.linear(said.transpose(1, 2).reshape(batch, tokens, -1), layer["o"])
            y = F.rms_norm(x, (self.hidden_size,), layer["mlp_norm"], self.rms_eps).bfloat16()
            gate, up = F.linear(y, layer["gate_up"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
            if found is not None:
                found[number] = x
        return x

    def _packed(self, prefix: str) -> dict[str, Tensor]:
        """One layer's matrices in bfloat16, those with the same input as one."""

        def matrix(*names: str) -> Tensor:
            return torch.cat([self.weights[f"{prefix}{name}.weight"] for name in names]).bfloat16()

        return {
            "input_norm": self.weights[f"{prefix}input_layernorm.weight"],
            "mlp_norm": self.weights[f"{prefix}post_attention_layernorm.weight"],
            "qkv": matrix("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "o": matrix("self_attn.o_proj"),
            "gate_up": matrix("mlp.gate_proj", "mlp.up_proj"),
            "down": matrix("mlp.down_proj"),
        }


class TorchBatch:
    """Rows padded on the left, so that all of them write their keys at the same column."""

    def __init__(self, model: TorchLlama, prompts: Sequence[Sequence[int]], most: int) -> None:
        self._model = model
        width = max(len(prompt) for prompt in prompts) - 1
        self._column = width
        self._padding = torch.tensor([width - (len(prompt) - 1) for prompt in prompts])
        shape = (len(prompts), model.kv_heads, width + most, model.head_size)
        self._keys = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(model.layers)]
        self._values = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(model.layers)]
        if width:
            with torch.inference_mode():
                self._prefill(torch.tensor([[0] * (width + 1 - len(p)) + list(p[:-1]) for p in prompts]))

    def step(self, last: Sequence[int]) -> NDArray[np.float32]:
        """Append a token to each row; logits [rows, vocabulary] of what follows."""
        model, column = self._model, self._column
        rows = len(last)
        seen = torch.arange(column + 1) >= self._padding[:, None]
        mask = torch.zeros(seen.shape, dtype=torch.bfloat16).masked_fill_(~seen, -torch.inf)[:, None, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._keys[layer][:, :, column] = k[:, :, 0]
            self._values[layer][:, :, column] = v[:, :, 0]
            # The heads that share keys stand where otherwise tokens do.
            q = q.reshape(rows, model.kv_heads, -1, model.head_size)
            keys, values = self._keys[layer][:, :, : column + 1], self._values[layer][:, :, : column + 1]
            said = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            return said.reshape(rows, model.heads, 1, model.head_size)

        with torch.inference_mode():
            stream = model.run(torch.tensor(last)[:, None], (column - self._padding)[:, None], attend)
            self._column += 1
            found: NDArray[np.float32] = model.logits(model.normed(stream[:, 0])).numpy()
            return found

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone, in this order."""
        chosen = torch.tensor(rows)
        self._padding = self._padding[chosen]
        self._keys = [keys[chosen] for keys in self._keys]
        self._values = [values[chosen] for values in self._values]

    def _prefill(self, ids: Tensor) -> None:
        """ids: [rows, width], padded on the left."""
        width = ids.shape[1]
        columns = torch.arange(width)
        seen = (columns >= self._padding[:, None])[:, None] & (columns <= columns[:, None])
        # Padding sees itself: a row of nothing but -inf would make it NaN.
        mask = (seen | torch.eye(width, dtype=torch.bool))[:, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._keys[layer][:, :, :width] = k
            self._values[layer][:, :, :width] = v
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

        self._model.run(ids, (columns - self._padding[:, None]).clamp(min=0), attend)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on x [batch, heads, tokens, size] whose halves are pairs; cos and sin: [.., tokens, size / 2]."""
    one, other = x.float().chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)
