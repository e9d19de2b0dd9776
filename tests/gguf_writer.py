"""Writes GGUF files with quantised blocks for tests (`mx.save_gguf` writes floats only)."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from checkpoints import CONFIG, SPECIAL, byte_tokens, random_model
from mlx.utils import tree_flatten

F32, F16, ALIGNMENT = 0, 1, 32
TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 8}
Blocks = dict[str, np.ndarray]


def quantised(array: np.ndarray, kind: str) -> Blocks:
    """A [rows, columns] matrix in blocks of 32 numbers, as the format defines them: d, m [blocks]; q [blocks, 32]."""
    x = array.astype(np.float32).reshape(-1, 32)
    if kind == "Q8_0":
        d = (np.abs(x).max(axis=1) / 127).astype(np.float16)
        m = np.zeros_like(d)
        levels = (-127, 127)
    elif kind == "Q4_0":
        d = (np.abs(x).max(axis=1) / 7).astype(np.float16)
        m = (-8 * d).astype(np.float16)
        levels = (0, 15)
    else:
        d = ((x.max(axis=1) - x.min(axis=1)) / 15).astype(np.float16)
        m = x.min(axis=1).astype(np.float16)
        levels = (0, 15)
    scale = np.where(d == 0, 1, d).astype(np.float32)[:, None]
    q = np.clip(np.round((x - m.astype(np.float32)[:, None]) / scale), *levels).astype(np.int8)
    return {"d": d, "m": m, "q": q, "shape": np.array(array.shape)}


def dequantised(blocks: Blocks, kind: str) -> np.ndarray:
    """The numbers that the blocks stand for, float32."""
    d = blocks["d"].astype(np.float32)[:, None]
    if kind == "Q4_0":
        x = d * (blocks["q"].astype(np.float32) - 8)
    else:
        x = d * blocks["q"].astype(np.float32) + blocks["m"].astype(np.float32)[:, None]
    return x.reshape(blocks["shape"])


def write_quantised(
    path: Path, arrays: dict[str, mx.array], metadata: dict[str, Any], kinds: dict[str, str]
) -> dict[str, Blocks]:
    """Write a GGUF file in which the tensors named in `kinds` are quantised; returns their blocks."""
    made: dict[str, Blocks] = {}
    head = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(arrays), len(metadata)))
    for key, value in metadata.items():
        head += _string(key) + _value(value)
    body = bytearray()
    for name, array in arrays.items():
        values = np.array(array.astype(mx.float32))
        if name in kinds:
            made[name] = quantised(values, kinds[name])
            type_, data = TYPES[kinds[name]], _packed(made[name], kinds[name])
        elif array.dtype == mx.float16:
            type_, data = F16, values.astype(np.float16).tobytes()
        else:
            type_, data = F32, values.tobytes()
        body += b"\0" * (-len(body) % ALIGNMENT)
        dimensions = struct.pack(f"<{array.ndim}Q", *reversed(array.shape))
        head += _string(name) + struct.pack("<I", array.ndim) + dimensions + struct.pack("<IQ", type_, len(body))
        body += data
    path.write_bytes(bytes(head) + b"\0" * (-len(head) % ALIGNMENT) + bytes(body))
    return made


def _packed(blocks: Blocks, kind: str) -> bytes:
    out = bytearray()
    for d, m, q in zip(blocks["d"], blocks["m"], blocks["q"], strict=True):
        out += d.tobytes()
        if kind == "Q4_1":
            out += m.tobytes()
        out += q.tobytes() if kind == "Q8_0" else (q[:16] | (q[16:] << 4)).astype(np.uint8).tobytes()
    return bytes(out)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_string(v) for v in value)
    kind, code = {mx.uint32: (4, "I"), mx.int32: (5, "i"), mx.float32: (6, "f"), mx.bool_: (7, "?")}[value.dtype]
    if value.ndim:
        return struct.pack("<IIQ", 9, kind, value.size) + struct.pack(f"<{value.size}{code}", *value.tolist())
    return struct.pack(f"<I{code}", kind, value.item())


NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def metadata(**changes: Any) -> dict[str, Any]:
    tokens = byte_tokens()
    fields: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.embedding_length": mx.array(64, mx.uint32),
        "llama.block_count": mx.array(2, mx.uint32),
        "llama.feed_forward_length": mx.array(96, mx.uint32),
        "llama.attention.head_count": mx.array(4, mx.uint32),
        "llama.attention.head_count_kv": mx.array(2, mx.uint32),
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5, mx.float32),
        "llama.context_length": mx.array(512, mx.uint32),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["Ġ a"],
        "tokenizer.ggml.token_type": mx.array([3 if t in SPECIAL else 1 for t in tokens], mx.int32),
        "tokenizer.ggml.bos_token_id": mx.array(256, mx.uint32),
        "tokenizer.ggml.eos_token_id": mx.array(257, mx.uint32),
        "tokenizer.chat_template": "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}",
    }
    fields["tokenizer.ggml.tokens"] = [*tokens, "Ġa"]
    fields["tokenizer.ggml.token_type"] = mx.array([*fields["tokenizer.ggml.token_type"].tolist(), 1], mx.int32)
    return {k: v for k, v in (fields | changes).items() if v is not None}


def gguf_arrays(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Under GGUF's names, q and k rows in GGUF's order: the two halves of each head interleaved."""
    out = {}
    for name, array in weights.items():
        stem, _, leaf = name.rpartition(".")
        if stem.startswith("model.layers."):
            _, _, number, inner = stem.split(".", 3)
            key = f"blk.{number}.{NAMES[inner]}"
        else:
            inner, key = stem, NAMES[stem]
        if inner in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = 4 if inner.endswith("q_proj") else 2
            rows, columns = array.shape
            array = array.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        out[f"{key}.{leaf}"] = mx.contiguous(array)
    return out


def save(path: Path, weights: dict[str, mx.array], **changes: Any) -> Path:
    mx.save_gguf(str(path), gguf_arrays(weights), metadata(**changes))
    return path


def tiny(**changes: Any) -> tuple[Any, dict[str, mx.array]]:
    model = random_model(CONFIG | {"vocab_size": 259} | changes)
    model.set_dtype(mx.float16)
    return model, dict(tree_flatten(model.parameters()))
