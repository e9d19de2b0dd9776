"""Small model directories for tests: real files that mlx-lm loads, with random weights and a byte tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|start|>", "<|end|>")
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 258,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


def byte_tokens() -> list[str]:
    """256 single-byte tokens, in the byte-level alphabet's order, and then SPECIAL."""
    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL]


def save_tokenizer(path: Path, tokens: list[str] | None = None) -> None:
    tokens = byte_tokens() if tokens is None else tokens
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[0], "eos_token": SPECIAL[1]}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def random_model(config: dict[str, Any], seed: int = 0) -> llama.Model:
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    return model


def save_model(
    path: Path, *, shards: int = 1, seed: int = 0, tokens: list[str] | None = None, **changes: Any
) -> dict[str, mx.array]:
    """A complete llama checkpoint at `path`; returns its weights. `changes` are put into config.json."""
    path.mkdir(parents=True, exist_ok=True)
    config = CONFIG | changes
    weights = dict(tree_flatten(random_model(config, seed).parameters()))
    (path / "config.json").write_text(json.dumps(config))
    save_tokenizer(path, tokens)
    if shards == 1:
        mx.save_safetensors(str(path / "model.safetensors"), weights)
        return weights
    names = sorted(weights)
    placed: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in names[number::shards]}
        mx.save_safetensors(str(path / file), part)
        placed.update(dict.fromkeys(part, file))
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return weights


def isolate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, and no models but the test's own."""
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def one_line(caught: pytest.ExceptionInfo[BaseException]) -> str:
    """The message, which must be one line."""
    text = str(caught.value)
    assert "\n" not in text
    return text
