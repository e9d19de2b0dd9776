"""GGUF files become MLX model directories that say the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from checkpoints import byte_tokens
from gguf_writer import dequantised, gguf_arrays, metadata, save, tiny, write_quantised
from mlx_lm.utils import load_model, load_tokenizer

from localspec.checkpoint import check_complete
from localspec.errors import UnsupportedModelError
from localspec.gguf import convert


@pytest.mark.parametrize("tied", [True, False])
def test_converted_model_computes_the_same(tmp_path: Path, tied: bool) -> None:
    model, weights = tiny(tie_word_embeddings=tied)
    out = tmp_path / "out"
    out.mkdir()
    convert(save(tmp_path / "m.gguf", weights), out)
    check_complete(out)
    converted, config = load_model(out)
    ids = mx.array([[1, 2, 3, 200, 5, 256]])
    assert mx.array_equal(model(ids), converted(ids))
    assert config["tie_word_embeddings"] is tied
    assert config["rms_norm_eps"] == 1e-5
    assert config["max_position_embeddings"] == 512
    assert json.loads((out / "generation_config.json").read_text()) == {"bos_token_id": 256, "eos_token_id": 257}


def test_tokenizer_round_trips_and_splits_digits(tmp_path: Path) -> None:
    convert(save(tmp_path / "m.gguf", tiny()[1]), tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for text in ("  two spaces a", "世界 👩‍👩‍👧 é", "\n\tx = 12345\n", " a a"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("b a") == [byte_tokens().index("b"), 258]  # the merge is used, no start token is added
    assert tokenizer.encode("<|end|>") == [257]
    assert tokenizer.eos_token_ids == {257}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "b"}])[0] == 256


def test_start_token_is_added_when_the_file_says_so(tmp_path: Path) -> None:
    flag = {"tokenizer.ggml.add_bos_token": mx.array(True)}
    convert(save(tmp_path / "m.gguf", tiny()[1], **flag), tmp_path)
    assert load_tokenizer(tmp_path).encode("b")[0] == 256


def test_norms_that_half_precision_would_change_stay(tmp_path: Path) -> None:
    _, weights = tiny()
    norms = {"exact": "model.layers.0.input_layernorm.weight", "finer": "model.norm.weight"}
    weights[norms["exact"]] = mx.full((64,), 1.5, mx.float32)
    weights[norms["finer"]] = mx.full((64,), 1.0001, mx.float32)
    convert(save(tmp_path / "m.gguf", weights), tmp_path)
    saved = mx.load(str(tmp_path / "model.safetensors"))
    assert saved[norms["exact"]].dtype == mx.float16
    assert saved[norms["finer"]].dtype == mx.float32
    assert mx.array_equal(saved[norms["finer"]], weights[norms["finer"]])


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"general.architecture": "falcon"}, "falcon"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer"),
        ({"tokenizer.ggml.pre": "qwen2"}, "qwen2"),
        ({"llama.expert_count": mx.array(8, mx.uint32)}, "experts"),
        ({"llama.rope.scaling.type": "yarn"}, "rotary"),
        ({"llama.rope.dimension_count": mx.array(8, mx.uint32)}, "part of each head"),
        ({"llama.block_count": None}, "llama.block_count"),
    ],
)
def test_what_cannot_be_converted_is_refused_in_one_line(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    file = save(tmp_path / "m.gguf", tiny()[1], **changes)
    with pytest.raises(UnsupportedModelError, match=word) as caught:
        convert(file, tmp_path)
    assert "\n" not in str(caught.value)


def test_unknown_tensor_and_garbage_are_refused(tmp_path: Path) -> None:
    arrays = gguf_arrays(tiny()[1]) | {"blk.0.attn_sinks.weight": mx.zeros((4,))}
    mx.save_gguf(str(tmp_path / "m.gguf"), arrays, metadata())
    with pytest.raises(UnsupportedModelError, match=r"attn_sinks"):
        convert(tmp_path / "m.gguf", tmp_path)
    (tmp_path / "g.gguf").write_bytes(b"not a model" * 100)
    with pytest.raises(UnsupportedModelError, match="cannot be read"):
        convert(tmp_path / "g.gguf", tmp_path)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_quantised_blocks_keep_their_numbers(tmp_path: Path, kind: str) -> None:
    """A file with hand-written blocks, read through the converted directory, against the format's own formula."""
    _, weights = tiny(tie_word_embeddings=False)
    quantised = {"token_embd.weight": "Q8_0"} | {
        f"blk.{n}.ffn_{w}.weight": kind for n in (0, 1) for w in ("up", "down")
    }
    source = tmp_path / "q.gguf"
    blocks = write_quantised(source, gguf_arrays(weights), metadata(), quantised)
    out = tmp_path / "out"
    out.mkdir()
    convert(source, out)
    model, config = load_model(out)
    expected = dequantised(blocks["blk.1.ffn_down.weight"], kind)
    layer = model.model.layers[1].mlp.down_proj
    assert isinstance(layer, nn.QuantizedLinear)
    parts = [a.astype(mx.float32) for a in (layer.scales, layer.biases)]
    got = mx.dequantize(layer.weight, *parts, group_size=layer.group_size, bits=layer.bits)
    assert mx.allclose(got, mx.array(expected), rtol=0, atol=1e-6 if kind != "Q4_0" else 1e-5)
    assert isinstance(model.model.embed_tokens, nn.QuantizedEmbedding)
    assert model.model.embed_tokens.bits == 8
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear
    assert config["quantization"]["group_size"] == 32
