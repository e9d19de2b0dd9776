"""The head of localspec.train.head_file in torch: its pass over texts, and several drafts deep.

Knows nothing of files, texts and training. Needs the extra `train`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from localspec.train.head_file import HeadShape
from localspec.train.torch_llama import TorchLlama, rotate

Keys = tuple[Tensor, Tensor]
"""Keys and values [batch, key heads, tokens, size]."""


class Head(nn.Module):
    """Parameters by the names that the file has, without `mtp.`."""

    def __init__(self, shape: HeadShape, hidden_size: int, head_size: int, mlp_size: int) -> None:
        super().__init__()
        self.shape = shape
        self.head_size = head_size

        def norm() -> nn.RMSNorm:
            return nn.RMSNorm(hidden_size, eps=shape.rms_eps)

        def matrix(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.tap_norms = nn.ModuleList([norm() for _ in shape.taps])
        self.fuse = matrix(len(shape.taps) * hidden_size, hidden_size)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(), norm()
        self.fc = matrix(2 * hidden_size, hidden_size)
        attention = {
            "q_proj": matrix(hidden_size, shape.heads * head_size),
            "k_proj": matrix(hidden_size, shape.kv_heads * head_size),
            "v_proj": matrix(hidden_size, shape.kv_heads * head_size),
            "o_proj": matrix(shape.heads * head_size, hidden_size),
        }
        mlp = {
            "gate_proj": matrix(hidden_size, mlp_size),
            "up_proj": matrix(hidden_size, mlp_size),
            "down_proj": matrix(mlp_size, hidden_size),
        }
        layer = {
            "input_layernorm": norm(),
            "self_attn": nn.ModuleDict(attention),
            "post_attention_layernorm": norm(),
            "mlp": nn.ModuleDict(mlp),
        }
        self.layers = nn.ModuleList([nn.ModuleDict(layer)])
        self.norm = norm()

    def begin(self, llama: TorchLlama) -> None:
        """Start as the target's last layer over the last tap, so that it says at first what the target just said."""
        last = f"layers.{llama.layers - 1}."
        own = {f"layers.0.{name.removeprefix(last)}": w for name, w in llama.weights.items() if name.startswith(last)}
        own["norm.weight"] = llama.weights["norm.weight"]
        size = llama.hidden_size
        own["fuse.weight"] = torch.cat([torch.zeros(size, size * (len(self.shape.taps) - 1)), torch.eye(size)], dim=1)
        own["fc.weight"] = torch.cat([torch.eye(size), torch.eye(size)], dim=1)
        current = self.state_dict()
        for name, start in own.items():
            if current[name].shape == start.shape:
                current[name].copy_(start)
            else:  # a wider MLP: what is added stays as random as it is
                current[name][tuple(slice(length) for length in start.shape)] = start
        for name in ("layers.0.self_attn.o_proj.weight", "layers.0.mlp.down_proj.weight"):
            current[name].mul_(_QUIET)

    def drafts(self, taps: Tensor, embeddings: Tensor, depth: int) -> list[Tensor]:
        """What the output matrix gets for each of `depth` drafts in a row, begun at every position of a text.

        taps: [batch, tokens, taps, hidden size]; embeddings: [batch, tokens, hidden size], of the text's own tokens,
        which are taken to be what was drafted. Number d of the result: [batch, tokens - 2 - d, hidden size]; its row t
        says what token t + 2 + d may be, knowing the taps up to t and the tokens up to t + 1 + d. As in drafting,
        a deeper draft sees the keys of whole pairs up to t and behind them those of its own chain (EAGLE-3's
        training-time test).
        """
        count = taps.shape[1] - 2
        hidden = self.fused(taps[:, :count])
        found: list[Tensor] = []
        chain: list[Keys] = []
        for d in range(depth):
            hidden, keys = self._draft(hidden[:, : count - d], embeddings[:, 1 + d : 1 + count], d, chain)
            chain.append(keys)
            found.append(hidden)
        return found

    def fused(self, taps: Tensor) -> Tensor:
        """One hidden state of several: [..., taps, hidden size] to [..., hidden size]."""
        normed = [norm(taps[..., n, :].float()) for n, norm in enumerate(self.tap_norms)]
        fused: Tensor = self.fuse(torch.cat(normed, dim=-1)).float()
        return fused

    def _draft(self, hidden: Tensor, embeddings: Tensor, depth: int, chain: list[Keys]) -> tuple[Tensor, Keys]:
        count = hidden.shape[1]
        layer = self.layers[0]
        pair = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(torch.cat(pair, dim=-1)).float()
        y = layer["input_layernorm"](x)
        q, k, v = (self._heads(layer["self_attn"][name](y)) for name in ("q_proj", "k_proj", "v_proj"))
        frequencies = self.shape.rope_theta ** (-torch.arange(0, self.head_size, 2).float() / self.head_size)
        angles = (torch.arange(count) + depth)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        said = self._attend(q, [*((keys[:, :, :count], values[:, :, :count]) for keys, values in chain), (k, v)])
        x = x + layer["self_attn"]["o_proj"](said)
        y = layer["post_attention_layernorm"](x)
        mlp = layer["mlp"]
        x = x + mlp["down_proj"](F.silu(mlp["gate_proj"](y)) * mlp["up_proj"](y))
        result: Tensor = self.norm(x)
        return result, (k, v)

    def _attend(self, q: Tensor, seen: list[Keys]) -> Tensor:
        """seen: the keys of whole pairs, of which each query sees those up to its own, and of each deeper draft, of
        which it sees the one of its own chain."""
        batch, heads, count, size = q.shape
        keys, values = (torch.cat(parts, dim=2) for parts in zip(*seen, strict=True))
        group = heads // keys.shape[1]
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        if len(seen) == 1:
            said = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
        else:
            own = torch.eye(count, dtype=torch.bool)
            mask = torch.cat([torch.ones_like(own).tril(), *[own] * (len(seen) - 1)], dim=1)
            said = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return said.transpose(1, 2).reshape(batch, count, heads * size)

    def _heads(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        return x.view(batch, tokens, -1, self.head_size).transpose(1, 2)


_QUIET = 0.05
"""The target's last layer adds to a residual stream that is tens of times larger than a normed hidden state."""


def new_head(shape: HeadShape, llama: TorchLlama, mlp_size: int) -> Head:
    """A head that has learned nothing yet."""
    head = Head(shape, llama.hidden_size, llama.head_size, mlp_size)
    head.begin(llama)
    return head


def head_of(shape: HeadShape, weights: Mapping[str, NDArray[np.float32]]) -> Head:
    """The head of a file."""
    hidden_size = weights["fc.weight"].shape[0]
    head_size = weights["layers.0.self_attn.q_proj.weight"].shape[0] // shape.heads
    head = Head(shape, hidden_size, head_size, weights["layers.0.mlp.gate_proj.weight"].shape[0])
    head.load_state_dict({name: torch.from_numpy(weight) for name, weight in weights.items()})
    return head
