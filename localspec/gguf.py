"""Turn a GGUF file of the llama architecture into an MLX model directory, keeping its quantised numbers as they are.

Knows nothing about where the file came from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localspec.errors import UnsupportedModelError

if TYPE_CHECKING:
    import mlx.core as mx
    from tokenizers import Tokenizer

GROUP_SIZE = 32
"""Numbers per scale in Q4_0, Q4_1 and Q8_0, which MLX reads as its own affine quantisation."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"^blk\.(\d+)\.(\w+)$")
_CONTROL, _USER_DEFINED = 3, 4  # token types of the GGUF format


def convert(source: Path, destination: Path) -> None:
    """Write an MLX model directory at `destination` (an existing, empty folder) from a GGUF file.

    Raises UnsupportedModelError, in one line, for what it cannot convert exactly.
    """
    import mlx.core as mx

    try:
        loaded: Any = mx.load(str(source), format="gguf", return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise UnsupportedModelError(f"{source.name} cannot be read as GGUF: {error}") from error
    arrays, metadata = loaded
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedModelError(f"{source.name} has the architecture {architecture!r}; only llama is converted")
    tokenizer, special = _tokenizer(metadata, source.name)
    config = _config(metadata, arrays, source.name)
    weights = _weights(arrays, config, source.name)
    quantization = _quantization(weights)
    if quantization:
        config["quantization"] = quantization
    mx.save_safetensors(str(destination / "model.safetensors"), weights, metadata={"format": "mlx"})
    tokenizer.save(str(destination / "tokenizer.json"))
    _write(destination / "config.json", config)
    _write(destination / "tokenizer_config.json", special)
    ends = {"bos_token_id": config.get("bos_token_id"), "eos_token_id": config.get("eos_token_id")}
    _write(destination / "generation_config.json", {k: v for k, v in ends.items() if v is not None})


def _config(metadata: Mapping[str, Any], arrays: Mapping[str, mx.array], name: str) -> dict[str, Any]:
    """config.json for mlx-lm's llama model."""
    if _text(metadata, "llama.rope.scaling.type") not in (None, "none") or "rope_freqs.weight" in arrays:
        raise UnsupportedModelError(f"{name} scales its rotary positions; such GGUF files are not converted")
    if _number(metadata, "llama.expert_count", 0):
        raise UnsupportedModelError(f"{name} is a mixture of experts; such GGUF files are not converted")
    hidden = int(_number(metadata, "llama.embedding_length"))
    heads = int(_number(metadata, "llama.attention.head_count"))
    head_size = int(_number(metadata, "llama.attention.key_length", hidden // heads))
    if int(_number(metadata, "llama.rope.dimension_count", head_size)) != head_size:
        raise UnsupportedModelError(f"{name} rotates only part of each head; such GGUF files are not converted")
    if "token_embd.weight" not in arrays:
        raise UnsupportedModelError(f"{name} has no token_embd.weight: it holds no model")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": int(_number(metadata, "llama.block_count")),
        "intermediate_size": int(_number(metadata, "llama.feed_forward_length")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(_number(metadata, "llama.attention.head_count_kv", heads)),
        "head_dim": head_size,
        "rms_norm_eps": _number(metadata, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": _number(metadata, "llama.rope.freq_base", 10000.0),
        "max_position_embeddings": int(_number(metadata, "llama.context_length")),
        "vocab_size": int(arrays["token_embd.weight"].shape[0]),
        "tie_word_embeddings": "output.weight" not in arrays,
    }
    for key, field in (("bos_token_id", "bos"), ("eos_token_id", "eos")):
        value = _number(metadata, f"tokenizer.ggml.{field}_token_id", -1)
        if value >= 0:
            config[key] = int(value)
    return config


def _weights(arrays: Mapping[str, mx.array], config: Mapping[str, Any], name: str) -> dict[str, mx.array]:
    """The tensors under mlx-lm's names, rows of q and k in its order."""
    weights: dict[str, mx.array] = {}
    for key, array in arrays.items():
        stem, _, leaf = key.rpartition(".")
        match = _BLOCK.match(stem)
        if match and match[2] in _LAYER:
            target = f"model.layers.{match[1]}.{_LAYER[match[2]]}"
        elif stem in _TOP:
            target = _TOP[stem]
        else:
            target = ""
        if not target or leaf not in ("weight", "scales", "biases"):
            raise UnsupportedModelError(f"{name} holds a tensor that the llama architecture has not: {key}")
        if target.endswith("q_proj"):
            array = _unpermute(array, config["num_attention_heads"])
        elif target.endswith("k_proj"):
            array = _unpermute(array, config["num_key_value_heads"])
        weights[f"{target}.{leaf}"] = _narrow(array) if target.endswith("norm") else array
    return weights


def _unpermute(array: mx.array, heads: int) -> mx.array:
    """GGUF interleaves the two halves that a rotation pairs; [rows, columns] back to halves one after the other."""
    rows, columns = array.shape
    return array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _narrow(array: mx.array) -> mx.array:
    """float16 where that loses nothing: a float32 norm would drag every activation of a half-precision model along."""
    import mlx.core as mx

    half = array.astype(mx.float16)
    return half if mx.array_equal(half.astype(array.dtype), array).item() else array


def _quantization(weights: Mapping[str, mx.array]) -> dict[str, Any]:
    """The `quantization` entry: the commonest width for all, the others by name; empty when nothing is quantised."""
    bits: dict[str, int] = {}
    for key, scales in weights.items():
        stem, _, leaf = key.rpartition(".")
        if leaf == "scales":
            bits[stem] = weights[f"{stem}.weight"].shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE)
    if not bits:
        return {}
    widths = list(bits.values())
    usual = max(set(widths), key=widths.count)
    own = {s: {"group_size": GROUP_SIZE, "bits": b} for s, b in sorted(bits.items()) if b != usual}
    return {"group_size": GROUP_SIZE, "bits": usual, **own}


def _tokenizer(metadata: Mapping[str, Any], name: str) -> tuple[Tokenizer, dict[str, Any]]:
    """The byte-level BPE tokenizer, and tokenizer_config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    kind, split = _text(metadata, "tokenizer.ggml.model"), _text(metadata, "tokenizer.ggml.pre")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind != "gpt2" or split not in (None, "default", "gpt-2", "smollm"):
        raise UnsupportedModelError(f"{name} has a {kind} tokenizer with splitting {split!r}, which is not converted")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ", 1)) for pair in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, fuse_unk=False))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_]) if split == "smollm" else bytes_
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"].tolist()
    for token, type_ in zip(tokens, types, strict=True):
        if type_ == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif type_ == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    special: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(_number(metadata, "llama.context_length")),
    }
    for field, key in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        value = int(_number(metadata, f"tokenizer.ggml.{field}_token_id", -1))
        if 0 <= value < len(tokens):
            special[f"{key}_token"] = tokens[value]
    if "bos_token" in special and bool(_number(metadata, "tokenizer.ggml.add_bos_token", 0)):
        start = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, tokens.index(start))]
        )
    template = _text(metadata, "tokenizer.chat_template")
    if template:
        special["chat_template"] = template
    return tokenizer, special


def _text(metadata: Mapping[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    return value if isinstance(value, str) else None


def _number(metadata: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number of the metadata as written in decimal (float32 1e-05 stays 1e-05)."""
    value = metadata.get(key)
    if value is None:
        if default is None:
            raise UnsupportedModelError(f"the GGUF file lacks {key}")
        return default
    number = value.item()
    return float(f"{number:.7g}") if isinstance(number, float) else number


def _write(file: Path, document: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
