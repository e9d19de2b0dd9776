"""Tiny targets and heads of each family in its exact key layout, and what the heads compute: import from here.

`FAMILIES` names a target of mlx-lm and the head that goes with it. Everything is random, and small.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import architectures
import mlx.core as mx
import numpy as np
from checkpoints import save_tokenizer
from heads import Array, Reference, attend, in_float64, llama_block, mlp, rms, rotate, sigmoid, softmax
from mlx.utils import tree_flatten

VOCABULARY, WIDTH, HEADS, KV_HEADS, DEPTH = 258, 32, 4, 2, 8
EPS, THETA = 1e-5, 10000.0
EXPERTS, CHOSEN = 4, 2


def configuration(name: str) -> dict[str, Any]:
    """Of a tiny target, as its config.json holds it."""
    config = json.loads(json.dumps(architectures.configuration(name)))
    for table in (config, config.get("text_config", {})):
        table["vocab_size"] = VOCABULARY
        if "rope_scaling" in table:
            table["rope_scaling"] = None
        if table.get("model_type", "").startswith("qwen3_5"):
            table["rope_parameters"] = {"type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.5}
        if table.get("model_type") == GEMMA:
            table |= {"rope_parameters": _ROPES, "vocab_size_per_layer_input": VOCABULARY}
    return config | {"bos_token_id": 256, "eos_token_id": 257}


def build(name: str, seed: int = 1) -> Any:
    """A tiny target with random weights, in float32."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs.from_dict(configuration(name)))
    keys = iter(mx.random.split(mx.random.key(seed), 1024))
    for _, part in model.named_modules():
        for key, value in list(part.items()):
            if isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating):
                part[key] = architectures._random(key, value, next(keys), 2.0)
    # Else it would make no difference which side of it a hidden state comes from.
    _inner(model)[1].norm.weight = 1 + 0.3 * mx.random.normal((WIDTH,), key=mx.random.key(seed + 1))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model


def write(folder: Path, name: str, head: dict[str, mx.array], *, seed: int = 1) -> Path:
    """A model directory with the target's tensors and the head's in one file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(configuration(name)))
    save_tokenizer(folder)
    weights = dict(tree_flatten(build(name, seed).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights | head, {"format": "mlx"})
    return folder


def random_head(shapes: dict[str, tuple[int, ...]], seed: int = 3, *, centred: bool = False) -> dict[str, mx.array]:
    """Norms around 1, or around 0 where they are stored zero-centred; matrices of standard deviation 2 / sqrt(in)."""
    keys = iter(mx.random.split(mx.random.key(seed), len(shapes)))
    found = {}
    for name, shape in shapes.items():
        noise = mx.random.normal(shape, key=next(keys))
        bias = name.endswith("bias")
        found[name] = (
            noise * 0.2 + (0 if centred or bias else 1) if len(shape) == 1 else noise * (2.0 / shape[-1] ** 0.5)
        )
    return found


def mlp_shapes(prefix: str, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (inner, WIDTH),
        f"{prefix}up_proj.weight": (inner, WIDTH),
        f"{prefix}down_proj.weight": (WIDTH, inner),
    }


def norms(prefix: str, *names: str, width: int = WIDTH) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}{name}.weight": (width,) for name in names}


# Qwen3-Next and its successors.

QWEN = "mtp."
_Q = f"{QWEN}layers.0."


def qwen_shapes() -> dict[str, tuple[int, ...]]:
    return {
        f"{QWEN}fc.weight": (WIDTH, 2 * WIDTH),
        **norms(QWEN, "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
        **norms(_Q, "input_layernorm", "post_attention_layernorm"),
        f"{_Q}self_attn.q_proj.weight": (HEADS * DEPTH * 2, WIDTH),
        f"{_Q}self_attn.k_proj.weight": (KV_HEADS * DEPTH, WIDTH),
        f"{_Q}self_attn.v_proj.weight": (KV_HEADS * DEPTH, WIDTH),
        f"{_Q}self_attn.o_proj.weight": (WIDTH, HEADS * DEPTH),
        **norms(_Q, "self_attn.q_norm", "self_attn.k_norm", width=DEPTH),
    }


def qwen_dense() -> dict[str, mx.array]:
    """15 tensors, norms zero-centred, as in the original checkpoints."""
    return random_head(qwen_shapes() | mlp_shapes(f"{_Q}mlp.", 48), centred=True)


def qwen_moe() -> dict[str, mx.array]:
    """19 tensors, all experts of a kind in one."""
    moe: dict[str, tuple[int, ...]] = {
        f"{_Q}mlp.gate.weight": (EXPERTS, WIDTH),
        f"{_Q}mlp.experts.gate_up_proj": (EXPERTS, 48, WIDTH),
        f"{_Q}mlp.experts.down_proj": (EXPERTS, WIDTH, 24),
        f"{_Q}mlp.shared_expert_gate.weight": (1, WIDTH),
        **mlp_shapes(f"{_Q}mlp.shared_expert.", 24),
    }
    return random_head(qwen_shapes() | moe, centred=True)


def qwen_experts_apart(head: dict[str, mx.array]) -> dict[str, mx.array]:
    """The same, spelled as Qwen3-Next does: a tensor for each expert."""
    found = {name: array for name, array in head.items() if ".experts." not in name}
    joined, down = head[f"{_Q}mlp.experts.gate_up_proj"], head[f"{_Q}mlp.experts.down_proj"]
    for i in range(EXPERTS):
        found[f"{_Q}mlp.experts.{i}.gate_proj.weight"] = joined[i, :24]
        found[f"{_Q}mlp.experts.{i}.up_proj.weight"] = joined[i, 24:]
        found[f"{_Q}mlp.experts.{i}.down_proj.weight"] = down[i]
    return found


class QwenReference(Reference):
    """Gated attention with normed queries and keys; a dense MLP, or experts and a shared one."""

    def __init__(self, model: Any, head: dict[str, mx.array], faults: Collection[str] = ()) -> None:
        super().__init__(*_ends(model), faults)
        self.w = in_float64(head, QWEN)
        shift = 2 if "norms" in self.faults else 1
        self.w = {name: w + shift if w.ndim == 1 else w for name, w in self.w.items()}

    def run(self, hidden: Array, embedded: Array, positions: Sequence[int]) -> Array:
        w, block = self.w, "layers.0."
        e, h = rms(embedded, w["pre_fc_norm_embedding.weight"], EPS), rms(hidden, w["pre_fc_norm_hidden.weight"], EPS)
        x = self.pair(e, h) @ w["fc.weight"].T
        rows = len(x)
        y = rms(x, w[f"{block}input_layernorm.weight"], EPS)
        both = (y @ w[f"{block}self_attn.q_proj.weight"].T).reshape(rows, HEADS, 2 * DEPTH)
        q, gate = both[..., :DEPTH], both[..., DEPTH:].reshape(rows, -1)
        k = (y @ w[f"{block}self_attn.k_proj.weight"].T).reshape(rows, KV_HEADS, DEPTH)
        v = (y @ w[f"{block}self_attn.v_proj.weight"].T).reshape(rows, KV_HEADS, DEPTH)
        q, k = rms(q, w[f"{block}self_attn.q_norm.weight"], EPS), rms(k, w[f"{block}self_attn.k_norm.weight"], EPS)
        q, k = rotate(q, positions, THETA, DEPTH // 2), rotate(k, positions, THETA, DEPTH // 2)
        x = x + (attend(q, k, v, DEPTH**-0.5) * sigmoid(gate)) @ w[f"{block}self_attn.o_proj.weight"].T
        x = x + self._mlp(rms(x, w[f"{block}post_attention_layernorm.weight"], EPS), f"{block}mlp.")
        return rms(x, w["norm.weight"], EPS)

    def _mlp(self, x: Array, prefix: str) -> Array:
        w = self.w
        if f"{prefix}gate.weight" not in w:
            return mlp(x, w, prefix)
        shares = softmax(x @ w[f"{prefix}gate.weight"].T)
        out = sigmoid(x @ w[f"{prefix}shared_expert_gate.weight"].T) * mlp(x, w, f"{prefix}shared_expert.")
        for row, share in enumerate(shares):
            chosen = np.argsort(-share)[:CHOSEN]
            for i in chosen:
                gate_up, down = w[f"{prefix}experts.gate_up_proj"][i], w[f"{prefix}experts.down_proj"][i]
                one = {"gate_proj.weight": gate_up[:24], "up_proj.weight": gate_up[24:], "down_proj.weight": down}
                out[row] += share[i] / share[chosen].sum() * mlp(x[row], one, "")
        return out


# DeepSeek-V3 and GLM.

LAYER = "model.layers.4."


def _one_more_layer() -> dict[str, tuple[int, ...]]:
    return {
        f"{LAYER}eh_proj.weight": (WIDTH, 2 * WIDTH),
        **norms(LAYER, "enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm"),
    }


def _sparse_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        f"{LAYER}mlp.gate.weight": (EXPERTS, WIDTH),
        f"{LAYER}mlp.gate.e_score_correction_bias": (EXPERTS,),
        **mlp_shapes(f"{LAYER}mlp.shared_experts.", 24),
    }
    for i in range(EXPERTS):
        shapes |= mlp_shapes(f"{LAYER}mlp.experts.{i}.", 24)
    return shapes


def deepseek(model: Any) -> dict[str, mx.array]:
    """Latent attention; the target's embedding and output matrix are stored once more."""
    attention: dict[str, tuple[int, ...]] = {
        f"{LAYER}self_attn.q_a_proj.weight": (16, WIDTH),
        **norms(LAYER, "self_attn.q_a_layernorm", width=16),
        f"{LAYER}self_attn.q_b_proj.weight": (HEADS * 16, 16),
        f"{LAYER}self_attn.kv_a_proj_with_mqa.weight": (16 + 8, WIDTH),
        **norms(LAYER, "self_attn.kv_a_layernorm", width=16),
        f"{LAYER}self_attn.kv_b_proj.weight": (HEADS * 16, 16),
        f"{LAYER}self_attn.o_proj.weight": (WIDTH, HEADS * 8),
    }
    return random_head(_one_more_layer() | attention | _sparse_shapes()) | {
        f"{LAYER}embed_tokens.weight": model.model.embed_tokens.weight,
        f"{LAYER}shared_head.head.weight": model.lm_head.weight,
    }


def glm(model: Any) -> dict[str, mx.array]:
    attention: dict[str, tuple[int, ...]] = {
        f"{LAYER}self_attn.q_proj.weight": (HEADS * DEPTH, WIDTH),
        f"{LAYER}self_attn.k_proj.weight": (KV_HEADS * DEPTH, WIDTH),
        f"{LAYER}self_attn.v_proj.weight": (KV_HEADS * DEPTH, WIDTH),
        f"{LAYER}self_attn.o_proj.weight": (WIDTH, HEADS * DEPTH),
        **norms(LAYER, "self_attn.q_norm", "self_attn.k_norm", width=DEPTH),
    }
    return random_head(_one_more_layer() | attention | _sparse_shapes()) | {
        f"{LAYER}embed_tokens.weight": model.model.embed_tokens.weight,
    }


class _OneMoreLayer(Reference):
    """enorm, hnorm, eh_proj, a block with experts, shared_head.norm before the output matrix only."""

    def __init__(self, model: Any, head: dict[str, mx.array], faults: Collection[str] = ()) -> None:
        super().__init__(*_ends(model), faults)
        self.w = in_float64(head, LAYER)
        if "norms" in self.faults:
            self.w = {name: w + 1 if "norm" in name else w for name, w in self.w.items()}

    def run(self, hidden: Array, embedded: Array, positions: Sequence[int]) -> Array:
        w = self.w
        x = (
            self.pair(rms(embedded, w["enorm.weight"], EPS), rms(hidden, w["hnorm.weight"], EPS))
            @ w["eh_proj.weight"].T
        )
        x = x + self.attention(rms(x, w["input_layernorm.weight"], EPS), positions) @ w["self_attn.o_proj.weight"].T
        return x + self._experts(rms(x, w["post_attention_layernorm.weight"], EPS))

    def onward(self, outputs: Array) -> Array:
        return rms(outputs, self.w["shared_head.norm.weight"], EPS) if "onward" in self.faults else outputs

    def logits(self, outputs: Array) -> Array:
        return super().logits(rms(outputs, self.w["shared_head.norm.weight"], EPS))

    def attention(self, y: Array, positions: Sequence[int]) -> Array:
        raise NotImplementedError

    def _experts(self, x: Array) -> Array:
        w = self.w
        scores = sigmoid(x @ w["mlp.gate.weight"].T)
        out = mlp(x, w, "mlp.shared_experts.")
        for row, score in enumerate(scores):
            chosen = np.argsort(-(score + w["mlp.gate.e_score_correction_bias"]))[:CHOSEN]
            for i in chosen:
                out[row] += score[i] / score[chosen].sum() * mlp(x[row], w, f"mlp.experts.{i}.")
        return out


class DeepseekReference(_OneMoreLayer):
    """Queries and keys of a part that is rotated (neighbours) and one that is not; values from the same latent."""

    def attention(self, y: Array, positions: Sequence[int]) -> Array:
        w, rows = self.w, len(y)
        q = rms(y @ w["self_attn.q_a_proj.weight"].T, w["self_attn.q_a_layernorm.weight"], 1e-6)
        q = (q @ w["self_attn.q_b_proj.weight"].T).reshape(rows, HEADS, 16)
        latent = y @ w["self_attn.kv_a_proj_with_mqa.weight"].T
        rotated = rotate(latent[:, None, 16:], positions, THETA, 8, neighbours=True)
        kv = rms(latent[:, :16], w["self_attn.kv_a_layernorm.weight"], EPS) @ w["self_attn.kv_b_proj.weight"].T
        kv = kv.reshape(rows, HEADS, 16)
        k = np.concatenate([kv[..., :8], np.repeat(rotated, HEADS, axis=1)], axis=-1)
        q = np.concatenate([q[..., :8], rotate(q[..., 8:], positions, THETA, 8, neighbours=True)], axis=-1)
        return attend(q, k, kv[..., 8:], 16**-0.5)


class GlmReference(_OneMoreLayer):
    """Normed queries and keys, half of which is rotated."""

    def attention(self, y: Array, positions: Sequence[int]) -> Array:
        w, rows = self.w, len(y)
        q = (y @ w["self_attn.q_proj.weight"].T).reshape(rows, HEADS, DEPTH)
        k = (y @ w["self_attn.k_proj.weight"].T).reshape(rows, KV_HEADS, DEPTH)
        v = (y @ w["self_attn.v_proj.weight"].T).reshape(rows, KV_HEADS, DEPTH)
        q, k = rms(q, w["self_attn.q_norm.weight"], EPS), rms(k, w["self_attn.k_norm.weight"], EPS)
        q, k = rotate(q, positions, THETA, DEPTH // 2), rotate(k, positions, THETA, DEPTH // 2)
        return attend(q, k, v, DEPTH**-0.5)


# MiMo.

MIMO = "model.mtp_layers.0."


def mimo(model: Any) -> dict[str, mx.array]:
    shapes: dict[str, tuple[int, ...]] = {
        f"{MIMO}input_proj.weight": (WIDTH, 2 * WIDTH),
        **norms(MIMO, "token_layernorm", "hidden_layernorm", "final_layernorm"),
        **norms(MIMO, "input_layernorm", "post_attention_layernorm"),
        f"{MIMO}self_attn.o_proj.weight": (WIDTH, WIDTH),
        **mlp_shapes(f"{MIMO}mlp.", 48),
    }
    for name, rows in (("q_proj", WIDTH), ("k_proj", WIDTH // 2), ("v_proj", WIDTH // 2)):
        shapes |= {f"{MIMO}self_attn.{name}.weight": (rows, WIDTH), f"{MIMO}self_attn.{name}.bias": (rows,)}
    return random_head(shapes)


class MimoReference(Reference):
    """The hidden state first; a block with biases on queries, keys and values."""

    def __init__(self, model: Any, head: dict[str, mx.array], faults: Collection[str] = ()) -> None:
        super().__init__(*_ends(model), faults)
        self.w = in_float64(head, MIMO)
        if "norms" in self.faults:
            self.w = {name: w + 1 if "norm" in name else w for name, w in self.w.items()}

    def run(self, hidden: Array, embedded: Array, positions: Sequence[int]) -> Array:
        w = self.w
        e, h = rms(embedded, w["token_layernorm.weight"], EPS), rms(hidden, w["hidden_layernorm.weight"], EPS)
        x = self.pair(h, e) @ w["input_proj.weight"].T
        x = llama_block(x, positions, w, "", heads=HEADS, kv_heads=KV_HEADS, theta=THETA, eps=EPS)
        return rms(x, w["final_layernorm.weight"], EPS)


@dataclass(frozen=True)
class Family:
    """A target of mlx-lm, a head in the layout of its checkpoints, and what that computes."""

    target: str
    make: Callable[[Any], dict[str, mx.array]]
    reference: Callable[..., Reference]


FAMILIES: dict[str, Family] = {
    "qwen3.5": Family("qwen3_5", lambda _: qwen_dense(), QwenReference),
    "qwen3.5-moe": Family("qwen3_5_moe", lambda _: qwen_moe(), QwenReference),
    "qwen3-next": Family("qwen3_next", lambda _: qwen_moe(), QwenReference),
    "deepseek-v3": Family("deepseek_v3", deepseek, DeepseekReference),
    "glm-4.5": Family("glm4_moe", glm, GlmReference),
    "mimo": Family("mimo", mimo, MimoReference),
}


def _inner(model: Any) -> tuple[Any, Any]:
    """What holds the output matrix, and the layers' owner."""
    outer = getattr(model, "language_model", model)
    return outer, outer.model


def _ends(model: Any) -> tuple[Array, Array]:
    outer, inner = _inner(model)
    embedding = np.array(inner.embed_tokens.weight, np.float64)
    return embedding, np.array(outer.lm_head.weight, np.float64) if "lm_head" in outer else embedding


def hidden_states(model: Any, ids: Sequence[int]) -> tuple[Array, Array]:
    """Of the last norm, what it is given and what it makes of that, [tokens, hidden], without any cache."""
    _, inner = _inner(model)
    norm, seen = inner.norm, []

    class Seen(type(norm)):  # type: ignore[misc]
        def __call__(self, x: mx.array) -> mx.array:
            seen.append(x)
            out: mx.array = super().__call__(x)
            return out

    norm.__class__ = Seen
    try:
        after = inner(mx.array([list(ids)]))
    finally:
        norm.__class__ = Seen.__base__
    return np.array(seen[0][0], np.float64), np.array(after[0], np.float64)


# Gemma 4's assistant.

GEMMA, GEMMA_WINDOW = "gemma4_text", 12
_ROPES = {kind: {"rope_type": "default", "rope_theta": THETA} for kind in ("full_attention", "sliding_attention")}
ASSISTANT: dict[str, Any] = {
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": WIDTH,
    "text_config": {
        "model_type": "gemma4_text",
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "rms_norm_eps": EPS,
        "vocab_size": VOCABULARY,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": GEMMA_WINDOW,
        "rope_parameters": _ROPES,
        "num_kv_shared_layers": 4,
    },
}


def assistant() -> dict[str, mx.array]:
    """49 tensors: queries only, a scalar for each layer, and centroids that are not used."""
    shapes: dict[str, tuple[int, ...]] = {
        "pre_projection.weight": (16, 2 * WIDTH),
        "post_projection.weight": (WIDTH, 16),
        "model.embed_tokens.weight": (VOCABULARY, 16),
        "masked_embedding.centroids.weight": (8, 16),
        **norms("model.", "norm", width=16),
    }
    sandwich = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    for i, kind in enumerate(ASSISTANT["text_config"]["layer_types"]):
        layer, width = f"model.layers.{i}.", 16 if kind == "full_attention" else 8
        shapes |= {
            **norms(layer, *sandwich, width=16),
            **norms(layer, "self_attn.q_norm", width=width),
            f"{layer}self_attn.q_proj.weight": (4 * width, 16),
            f"{layer}self_attn.o_proj.weight": (16, 4 * width),
            f"{layer}mlp.gate_proj.weight": (24, 16),
            f"{layer}mlp.up_proj.weight": (24, 16),
            f"{layer}mlp.down_proj.weight": (16, 24),
            f"{layer}layer_scalar": (1,),
        }
    return random_head(shapes)


class GemmaReference:
    """One draft after the other over the same keys and values, all at the newest token's position."""

    def __init__(self, model: Any, head: dict[str, mx.array], faults: Collection[str] = ()) -> None:
        self.w, self.faults = in_float64(head, ""), frozenset(faults)
        self.embedding = np.array(model.model.embed_tokens.weight, np.float64)

    def follow(
        self, hidden: Array, newest: int, position: int, kv: dict[str, tuple[Array, Array]], drafts: Sequence[int]
    ) -> list[Array]:
        """Logits of each draft. hidden: of the token before the newest. kv: per kind [entries, key heads, width]."""
        found, token = [], newest
        for step, draft in enumerate(drafts):
            at = position + (step if "position" in self.faults else 0)
            scale = 1.0 if "scale" in self.faults else WIDTH**0.5
            halves = [self.embedding[token] * scale, hidden]
            x = np.concatenate(halves[::-1] if "concat" in self.faults else halves)[None]
            x = x @ self.w["pre_projection.weight"].T
            for i, kind in enumerate(ASSISTANT["text_config"]["layer_types"]):
                x = self._layer(x, f"model.layers.{i}.", kv[kind], at)
            x = rms(x, self.w["model.norm.weight"], EPS)
            found.append((x @ self.w["model.embed_tokens.weight"].T)[0])
            hidden, token = (x @ self.w["post_projection.weight"].T)[0], draft
        return found

    def _layer(self, x: Array, layer: str, kv: tuple[Array, Array], position: int) -> Array:
        def weight(name: str) -> Array:
            return self.w[f"{layer}{name}.weight"]

        keys, values = (np.repeat(part, 2, axis=1) for part in kv)
        q = (rms(x, weight("input_layernorm"), EPS) @ weight("self_attn.q_proj").T).reshape(1, 4, -1)
        q = rotate(rms(q, weight("self_attn.q_norm"), EPS), [position], THETA, q.shape[-1])[0]
        shares = softmax(np.einsum("hd,khd->hk", q, keys))
        out = np.einsum("hk,khd->hd", shares, values).reshape(1, -1) @ weight("self_attn.o_proj").T
        x = x + rms(out, weight("post_attention_layernorm"), EPS)
        y = rms(x, weight("pre_feedforward_layernorm"), EPS)
        gate = y @ weight("mlp.gate_proj").T
        gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        y = (gelu * (y @ weight("mlp.up_proj").T)) @ weight("mlp.down_proj").T
        return (x + rms(y, weight("post_feedforward_layernorm"), EPS)) * self.w[f"{layer}layer_scalar"]


def write_assistant(folder: Path, head: dict[str, mx.array], **changes: Any) -> Path:
    """The assistant's own folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(ASSISTANT | changes))
    mx.save_safetensors(str(folder / "model.safetensors"), head)
    return folder
