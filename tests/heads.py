"""MTP heads for tests: targets that one can follow, checkpoints in each layout, and what these compute, in float64.

The arithmetic here is written from the layouts with NumPy alone, and runs all pairs anew for every draft: it shares no
code, no cache and no shortcut with what it is compared to. `faults` names mistakes that it can be told to make.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map_with_path
from mlx_lm.models import llama
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weights = dict[str, Array]


# Arithmetic.


def rms(x: Array, weight: Array | None, eps: float) -> Array:
    normed = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed if weight is None else normed * weight


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def rotate(x: Array, positions: Sequence[int], theta: float, dims: int, *, neighbours: bool = False) -> Array:
    """Rotary embedding of [rows, heads, width] on the first `dims` numbers; pairs are halves apart, or neighbours."""
    half = dims // 2
    angle = np.asarray(positions, np.float64)[:, None] / theta ** (np.arange(half) * 2 / dims)[None]
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    out = x.copy()
    first = np.arange(half) * 2 if neighbours else np.arange(half)
    second = first + 1 if neighbours else first + half
    a, b = x[..., first], x[..., second]
    out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
    return out


def attend(q: Array, k: Array, v: Array, scale: float) -> Array:
    """Causal attention of [rows, heads, width] over [rows, key heads, width]; [rows, heads * width of v]."""
    rows, heads = q.shape[:2]
    k, v = (np.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * scale
    scores = np.where(np.tril(np.ones((rows, rows), bool))[None], scores, -np.inf)
    return np.einsum("hqk,khd->qhd", softmax(scores), v).reshape(rows, -1)


def mlp(x: Array, w: Weights, prefix: str) -> Array:
    gate, up = x @ w[f"{prefix}gate_proj.weight"].T, x @ w[f"{prefix}up_proj.weight"].T
    return (silu(gate) * up) @ w[f"{prefix}down_proj.weight"].T


def llama_block(
    x: Array, positions: Sequence[int], w: Weights, prefix: str, *, heads: int, kv_heads: int, theta: float, eps: float
) -> Array:
    """A block as Llama's and Qwen 2's (which has biases)."""
    rows = len(x)
    y = rms(x, w[f"{prefix}input_layernorm.weight"], eps)

    def project(name: str, count: int) -> Array:
        out = y @ w[f"{prefix}self_attn.{name}.weight"].T + w.get(f"{prefix}self_attn.{name}.bias", 0.0)
        return out.reshape(rows, count, -1)

    q, k, v = project("q_proj", heads), project("k_proj", kv_heads), project("v_proj", kv_heads)
    width = q.shape[-1]
    q, k = rotate(q, positions, theta, width), rotate(k, positions, theta, width)
    x = x + attend(q, k, v, width**-0.5) @ w[f"{prefix}self_attn.o_proj.weight"].T
    return x + mlp(rms(x, w[f"{prefix}post_attention_layernorm.weight"], eps), w, f"{prefix}mlp.")


# What is compared.


class Reference:
    """A head in float64. `faults` are mistakes to make on purpose."""

    def __init__(self, embedding: Array, output: Array, faults: Collection[str] = ()) -> None:
        self.embedding, self.output, self.faults = embedding, output, frozenset(faults)
        self.ids = np.arange(len(output))
        """The target's id of each column."""

    def join(self, taps: Sequence[Array]) -> Array:
        return taps[0]

    def run(self, hidden: Array, embedded: Array, positions: Sequence[int]) -> Array:
        """Outputs of all pairs."""
        raise NotImplementedError

    def onward(self, outputs: Array) -> Array:
        return outputs

    def logits(self, outputs: Array) -> Array:
        return outputs @ self.output.T

    def pair(self, embedded: Array, hidden: Array) -> Array:
        """The two halves as the layout has them, or, by mistake, the other way round."""
        halves = [hidden, embedded] if "concat" in self.faults else [embedded, hidden]
        return np.concatenate(halves, axis=-1)

    def follow(self, taps: Sequence[Array], ids: Sequence[int], drafts: Sequence[int]) -> list[Array]:
        """Logits of each draft, over the head's columns, when the drafts before it are those.

        taps: of the tokens but the newest, [tokens - 1, hidden] each. ids: all tokens of the context.
        """
        hidden, tokens = self.join(taps), list(ids[1:])
        found = []
        for draft in [*drafts, 0]:
            outputs = self.run(hidden, self.embedding[tokens], range(len(tokens)))
            found.append(self.logits(outputs[-1]))
            hidden = np.concatenate([hidden, self.onward(outputs[-1:])])
            tokens.append(draft)
        return found[: len(drafts)]


def drafted(reference: Reference, taps: Sequence[Array], ids: Sequence[int], depth: int) -> list[int]:
    """The greedy drafts."""
    drafts: list[int] = []
    for _ in range(depth):
        drafts.append(int(reference.ids[np.argmax(reference.follow(taps, ids, [*drafts, 0])[-1])]))
    return drafts


# A target that can be followed.


def easy_llama(seed: int = 0, *, vocabulary: int = 64, layers: int = 3, effect: float = 0.3) -> Any:
    """A random Llama, tied, whose next token hangs mostly by the last one: its layers change little, by `effect`."""
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=layers,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=vocabulary,
        rope_theta=10000.0,
        tie_word_embeddings=False,
    )
    model = llama.Model(args)
    keys = iter(mx.random.split(mx.random.key(seed), 256))

    def fill(name: str, x: mx.array) -> mx.array:
        if x.ndim == 1:
            return 1 + 0.2 * mx.random.normal(x.shape, key=next(keys))
        scale = (
            1.0 if "embed" in name else 2.0 / x.shape[-1] ** 0.5 if "lm_head" in name else effect / x.shape[-1] ** 0.5
        )
        return mx.random.normal(x.shape, key=next(keys)) * scale

    model.update(tree_map_with_path(fill, model.parameters()))
    mx.eval(model.parameters())
    return model


def layer_outputs(model: Any, ids: Sequence[int]) -> list[Array]:
    """Of each layer, and of the last norm, [tokens, hidden]: the layers called one after the other, without caches."""
    from mlx_lm.models.base import create_attention_mask

    trunk = model.model
    h = trunk.embed_tokens(mx.array([list(ids)]))
    found = []
    for layer in trunk.layers:
        h = layer(h, create_attention_mask(h, None), None)
        found.append(np.array(h[0], np.float64))
    found.append(np.array(trunk.norm(h)[0], np.float64))
    return found


def matrices(model: Any) -> tuple[Array, Array]:
    """Embedding and output matrix."""
    embedding = np.array(model.model.embed_tokens.weight, np.float64)
    return embedding, np.array(model.lm_head.weight, np.float64) if "lm_head" in model else embedding


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int, effect: float) -> dict[str, mx.array]:
    """Norms near 1, matrices of standard deviation effect / sqrt(inputs)."""
    keys = iter(mx.random.split(mx.random.key(seed), len(shapes)))
    return {
        name: 1 + 0.2 * mx.random.normal(shape, key=next(keys))
        if len(shape) == 1
        else mx.random.normal(shape, key=next(keys)) * (effect / shape[-1] ** 0.5)
        for name, shape in shapes.items()
    }


def passes_embedding(half: int, width: int, seed: int) -> mx.array:
    """[width, 2 width]: takes the half that is the embedding, as it is, and next to nothing of the other."""
    noise = mx.random.normal((width, width), key=mx.random.key(seed)) * (0.1 / width**0.5)
    return mx.concatenate([mx.eye(width), noise] if half == 0 else [noise, mx.eye(width)], axis=-1)


def in_float64(weights: dict[str, mx.array], prefix: str) -> Weights:
    return {
        name.removeprefix(prefix): np.array(array.astype(mx.float32), np.float64) for name, array in weights.items()
    }


# Our own layout.

OWN = {"format": "localspec-mtp", "version": "1", "rope_theta": "5000.0", "rms_eps": "1e-05", "vocabulary": "none"}


def write_own(
    file: Path,
    model: Any,
    *,
    taps: Sequence[int] = (0, 1, 2),
    draft_ids: Sequence[int] = tuple(i for i in range(64) if i % 7),
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 5,
    effect: float = 0.4,
    change: Callable[[dict[str, mx.array], dict[str, str]], None] | None = None,
) -> dict[str, mx.array]:
    """A head that follows `easy_llama`; `change` may spoil tensors and metadata. Returns the tensors."""
    width = model.args.hidden_size
    block = "mtp.layers.0."
    shapes: dict[str, tuple[int, ...]] = {f"mtp.tap_norms.{i}.weight": (width,) for i in range(len(taps))} | {
        "mtp.fuse.weight": (width, len(taps) * width),
        "mtp.pre_fc_norm_embedding.weight": (width,),
        "mtp.pre_fc_norm_hidden.weight": (width,),
        f"{block}input_layernorm.weight": (width,),
        f"{block}post_attention_layernorm.weight": (width,),
        f"{block}self_attn.q_proj.weight": (width, width),
        f"{block}self_attn.k_proj.weight": (width * kv_heads // heads, width),
        f"{block}self_attn.v_proj.weight": (width * kv_heads // heads, width),
        f"{block}self_attn.o_proj.weight": (width, width),
        f"{block}mlp.gate_proj.weight": (40, width),
        f"{block}mlp.up_proj.weight": (40, width),
        f"{block}mlp.down_proj.weight": (width, 40),
        "mtp.norm.weight": (width,),
    }
    weights = random_weights(shapes, seed, effect)
    weights["mtp.fc.weight"] = passes_embedding(0, width, seed + 1)
    weights["mtp.draft_ids"] = mx.array(sorted(draft_ids), mx.int32)
    metadata = OWN | {"taps": ",".join(map(str, taps)), "heads": str(heads), "kv_heads": str(kv_heads)}
    if change is not None:
        change(weights, metadata)
    mx.save_safetensors(str(file), weights, metadata)
    return weights


class OwnReference(Reference):
    """One block over [norm(embedding), norm(fused taps)]."""

    def __init__(self, model: Any, weights: dict[str, mx.array], faults: Collection[str] = ()) -> None:
        embedding, output = matrices(model)
        self.w = in_float64(weights, "mtp.")
        super().__init__(embedding, output[self.w["draft_ids"].astype(int)], faults)
        self.ids = self.w["draft_ids"].astype(int)
        if "norms" in self.faults:
            self.w = {name: w + 1 if w.ndim == 1 and name != "draft_ids" else w for name, w in self.w.items()}

    def join(self, taps: Sequence[Array]) -> Array:
        normed = [rms(tap, self.w[f"tap_norms.{i}.weight"], 1e-5) for i, tap in enumerate(taps)]
        return np.concatenate(normed, axis=-1) @ self.w["fuse.weight"].T

    def run(self, hidden: Array, embedded: Array, positions: Sequence[int]) -> Array:
        e = rms(embedded, self.w["pre_fc_norm_embedding.weight"], 1e-5)
        g = rms(hidden, self.w["pre_fc_norm_hidden.weight"], 1e-5)
        x = self.pair(e, g) @ self.w["fc.weight"].T
        x = llama_block(x, positions, self.w, "layers.0.", heads=4, kv_heads=2, theta=5000.0, eps=1e-5)
        return x if "norm" in self.faults else rms(x, self.w["norm.weight"], 1e-5)


@functools.cache
def target(seed: int = 0) -> Any:
    """One `easy_llama` for many tests."""
    return easy_llama(seed)
