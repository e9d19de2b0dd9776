"""From names to engines: formats, memory, drafts, and what is refused."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from checkpoints import CONFIG, byte_tokens, isolate, random_model, save_model
from mlx.utils import tree_flatten, tree_map

from localspec import loading, memory
from localspec.checkpoint import INDEX, context_length, end_ids, read_checkpoint
from localspec.errors import (
    IncompatibleDrafterError,
    IncompleteModelError,
    InsufficientMemoryError,
    ModelNotFoundError,
    SettingsError,
    UnsupportedModelError,
)
from localspec.loading import load, load_tokenizer, load_weights

IDS = mx.array([[1, 2, 3, 200, 5]])


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(tmp_path, monkeypatch)


def save_quantised(path: Path, **changes: Any) -> Any:
    """A checkpoint with 4-bit layers and an 8-bit embedding; returns the model."""
    save_model(path, **changes)
    config = CONFIG | changes
    model = random_model(config)
    model.set_dtype(mx.float16)

    def widths(name: str, module: Any) -> Any:
        return {"group_size": 32, "bits": 8 if "embed" in name else 4} if hasattr(module, "to_quantized") else False

    nn.quantize(model, group_size=32, bits=4, class_predicate=widths)
    config["quantization"] = {"group_size": 32, "bits": 4, "model.embed_tokens": {"group_size": 32, "bits": 8}}
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (path / "config.json").write_text(json.dumps(config))
    return model


class TestWeights:
    def test_as_stored(self, tmp_path: Path) -> None:
        model = save_quantised(tmp_path)
        loaded = load_weights(read_checkpoint(tmp_path), "quantized")
        assert isinstance(loaded.model.embed_tokens, nn.QuantizedEmbedding)
        assert mx.array_equal(loaded(IDS), model(IDS))

    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_floats_are_the_stored_numbers_rounded_once(self, tmp_path: Path, dtype: str, tied: bool) -> None:
        model = save_quantised(tmp_path, tie_word_embeddings=tied)
        loaded = load_weights(read_checkpoint(tmp_path), dtype)
        kinds = {array.dtype for _, array in tree_flatten(loaded.parameters())}
        assert kinds == {getattr(mx, dtype)}
        assert ("lm_head" in loaded) is not tied
        for stored, plain in (
            (model.model.embed_tokens, loaded.model.embed_tokens),
            (model.model.layers[1].mlp.down_proj, loaded.model.layers[1].mlp.down_proj),
        ):
            scales, biases = (a.astype(mx.float32) for a in (stored.scales, stored.biases))
            exact = mx.dequantize(stored.weight, scales, biases, stored.group_size, stored.bits)
            assert mx.array_equal(plain.weight, exact.astype(getattr(mx, dtype)))
            assert not isinstance(plain, nn.QuantizedLinear | nn.QuantizedEmbedding)
        if dtype == "float32":
            model.apply(lambda array: array.astype(mx.float32) if array.dtype == mx.float16 else array)
            assert mx.allclose(loaded(IDS), model(IDS), atol=1e-4)

    def test_stray_weights_are_not_merged(self, tmp_path: Path) -> None:
        weights = save_model(tmp_path, shards=2)
        for stray in ("model-00000-of-00002.safetensors", "model-zzz.safetensors"):  # before and after the real ones
            mx.save_safetensors(str(tmp_path / stray), tree_map(mx.zeros_like, weights))
        loaded = dict(tree_flatten(load_weights(read_checkpoint(tmp_path), "quantized").parameters()))
        assert loaded.keys() == weights.keys()
        assert all(mx.array_equal(loaded[name], weights[name]) for name in weights)

    def test_indexed_files_of_any_name_are_used(self, tmp_path: Path) -> None:
        weights = save_model(tmp_path)
        (tmp_path / "model.safetensors").rename(tmp_path / "consolidated.safetensors")
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(weights, "consolidated.safetensors")}))
        loaded = dict(tree_flatten(load_weights(read_checkpoint(tmp_path), "quantized").parameters()))
        assert all(mx.array_equal(loaded[name], weights[name]) for name in weights)

    def test_nothing_waits_for_the_thread_that_loaded(self, tmp_path: Path) -> None:
        scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        save_model(tmp_path, rope_scaling=scaling | {"original_max_position_embeddings": 64})
        results: list[Any] = []

        def run() -> None:
            results.append(load_weights(read_checkpoint(tmp_path), "bfloat16"))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        logits = results[0](IDS)
        mx.eval(logits)
        assert logits.shape == (1, 5, 258)

    def test_code_in_a_checkpoint_is_never_run(self, tmp_path: Path) -> None:
        save_model(tmp_path, model_file="evil.py", auto_map={"AutoModel": "evil.Model"})
        (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
        settings["auto_map"] = {"AutoTokenizer": ["evil.Tokenizer", None]}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        with pytest.raises(UnsupportedModelError, match="model_file"):
            load(str(tmp_path), dtype="quantized")
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize(
        ("changes", "error", "word"),
        [
            ({"model_type": "no_such"}, UnsupportedModelError, "no_such"),
            ({"model_type": None}, UnsupportedModelError, "cannot be loaded"),
            ({"hidden_size": "wide"}, UnsupportedModelError, "llama"),
            ({"num_hidden_layers": 3}, IncompleteModelError, "do not match"),
            ({"num_hidden_layers": 1}, IncompleteModelError, "do not match"),
            ({"intermediate_size": 128}, IncompleteModelError, "do not match"),
        ],
    )
    def test_weights_and_config_that_disagree(
        self, tmp_path: Path, changes: dict[str, Any], error: type[Exception], word: str
    ) -> None:
        save_model(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
        with pytest.raises(error, match=word) as caught:
            load_weights(read_checkpoint(tmp_path), "quantized")
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600


class TestTokenizer:
    def test_end_ids_of_all_files_are_united(self, tmp_path: Path) -> None:
        save_model(tmp_path, eos_token_id=[10, 257], text_config={"eos_token_id": 11})
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [12, 99999]}))
        checkpoint = read_checkpoint(tmp_path)
        assert end_ids(checkpoint) == {10, 11, 12, 257, 99999}
        assert load_tokenizer(checkpoint).eos_token_ids == {
            10,
            11,
            12,
            257,
        }  # an id outside the vocabulary ends nothing

    @pytest.mark.parametrize("value", [None, True, "2", -1, [None, "x"]])
    def test_nonsense_end_ids_are_ignored(self, tmp_path: Path, value: Any) -> None:
        save_model(tmp_path, eos_token_id=value)
        (tmp_path / "generation_config.json").write_text("{broken")
        assert end_ids(read_checkpoint(tmp_path)) == set()

    def test_broken_tokenizer_is_one_line(self, tmp_path: Path) -> None:
        save_model(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{\n")
        with pytest.raises(UnsupportedModelError, match="tokenizer") as caught:
            load_tokenizer(read_checkpoint(tmp_path))
        assert "\n" not in str(caught.value)


def test_context_length_is_found_where_configs_put_it() -> None:
    assert context_length({"max_position_embeddings": 512}) == 512
    assert context_length({"text_config": {"max_position_embeddings": 99}}) == 99
    assert context_length({"max_position_embeddings": None, "n_positions": 7}) == 7
    assert context_length({"text_config": None}) is None


class TestMemory:
    def test_estimate_is_what_loading_takes(self, tmp_path: Path) -> None:
        save_quantised(tmp_path, tie_word_embeddings=False)
        checkpoint = read_checkpoint(tmp_path)
        for dtype in loading.DTYPES:
            model = load_weights(checkpoint, dtype)
            taken = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
            assert memory.weights_bytes(checkpoint, dtype) == taken

    def test_refused_before_loading(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save_model(tmp_path / "m")
        monkeypatch.setattr(loading, "load_weights", lambda *_: pytest.fail("loaded all the same"))
        monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
        with pytest.raises(InsufficientMemoryError, match=r"needs .* and 1 kB is available") as caught:
            load(str(tmp_path / "m"), dtype="float32")
        assert "\n" not in str(caught.value)

    def test_advice(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save_quantised(tmp_path / "m")
        checkpoint = read_checkpoint(tmp_path / "m")
        monkeypatch.setattr(memory, "_FLOOR", 0)
        between = (checkpoint.bytes + memory.weights_bytes(checkpoint, "float32")) // 2
        monkeypatch.setattr(memory, "available_bytes", lambda: between)
        with pytest.raises(InsufficientMemoryError, match="as stored it would fit"):
            load(str(tmp_path / "m"), dtype="float32")
        load(str(tmp_path / "m"), dtype="quantized")

    def test_draft_counts_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save_model(tmp_path / "m", num_hidden_layers=8)
        save_model(tmp_path / "d", num_hidden_layers=7)
        monkeypatch.setattr(memory, "needed_bytes", lambda weights: weights)
        one = read_checkpoint(tmp_path / "m").bytes
        monkeypatch.setattr(memory, "available_bytes", lambda: one)
        monkeypatch.setattr("localspec.pairing.check_same_vocabulary", lambda *_: pytest.fail("went on"))
        with pytest.raises(InsufficientMemoryError, match="with the draft d"):
            load(str(tmp_path / "m"), draft=str(tmp_path / "d"), dtype="quantized")
        assert load(str(tmp_path / "m"), dtype="quantized").name == "m"

    def test_big_catalogue_models_are_refused_before_the_download(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(memory, "available_bytes", lambda: 4 * 10**9)
        with pytest.raises(InsufficientMemoryError, match=r"qwen3-32b needs about 21 GB .* 4 GB .* qwen3-4b"):
            load("qwen3-32b")
        with pytest.raises(InsufficientMemoryError, match="qwen3-32b"):
            load("mlx-community/Qwen3-32B-4bit")

    def test_linux_takes_the_tighter_of_machine_and_container(self, tmp_path: Path) -> None:
        (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    2000 kB\n")
        assert memory._meminfo(tmp_path / "meminfo") == 2000 * 1024
        assert memory._meminfo(tmp_path / "absent") is None
        assert memory._cgroup(tmp_path) is None
        for name, text in {
            "memory.max": "1000\n",
            "memory.current": "700\n",
            "memory.stat": "inactive_file 50\n",
        }.items():
            (tmp_path / name).write_text(text)
        assert memory._cgroup(tmp_path) == 350
        (tmp_path / "memory.max").write_text("max\n")
        assert memory._cgroup(tmp_path) is None
        available = memory.available_bytes()
        assert available is None or available > 10**6

    @pytest.mark.parametrize(
        ("count", "text"),
        [(0, "0 bytes"), (999, "999 bytes"), (98_362_432, "98.4 MB"), (999_600, "1 MB"), (21 * 10**9, "21 GB")],
    )
    def test_sizes_read_well(self, count: int, text: str) -> None:
        assert memory.format_bytes(count) == text


class TestLoad:
    def test_engine_of_a_directory(self, tmp_path: Path) -> None:
        save_model(tmp_path / "tiny-one")
        engine = load(tmp_path / "tiny-one", dtype="float32")
        assert (engine.name, engine.context_length) == ("tiny-one", 512)
        assert engine.tokenizer.eos_token_ids == {257}
        assert len(engine.generate("abc", max_tokens=5).ids) <= 5

    def test_draft_runs_last_and_changes_nothing(self, tmp_path: Path) -> None:
        save_model(tmp_path / "target", seed=1)
        save_model(tmp_path / "draft", seed=2, num_hidden_layers=1)
        alone = load(tmp_path / "target", dtype="float32", drafters=())
        both = load(tmp_path / "target", draft=tmp_path / "draft", dtype="float32")
        assert [drafter.name for drafter in both.drafters] == ["ngram", "draft"]
        assert both.generate("abcabc", max_tokens=24).ids == alone.generate("abcabc", max_tokens=24).ids

    def test_another_vocabulary_is_refused_before_any_weights(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokens = byte_tokens()
        tokens[0], tokens[1] = tokens[1], tokens[0]
        save_model(tmp_path / "target")
        save_model(tmp_path / "draft", tokens=tokens)
        monkeypatch.setattr(loading, "load_weights", lambda *_: pytest.fail("loaded all the same"))
        with pytest.raises(IncompatibleDrafterError, match="id 0 "):
            load(tmp_path / "target", draft=tmp_path / "draft", dtype="float32")

    def test_bad_dtype_and_bad_names(self, tmp_path: Path) -> None:
        save_model(tmp_path / "m")
        with pytest.raises(SettingsError, match="float32, bfloat16, float16, quantized"):
            load(tmp_path / "m", dtype="int8")
        with pytest.raises(ModelNotFoundError, match="smollm2"):
            load("smolm2")
        with pytest.raises(ModelNotFoundError):
            load(tmp_path / "m", draft=tmp_path / "absent")
        (tmp_path / "m" / "model.safetensors").write_bytes(b"12345678")
        with pytest.raises(IncompleteModelError):
            load(tmp_path / "m", dtype="float32")

    def test_the_machine_chooses_the_format(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save_model(tmp_path / "m")
        monkeypatch.setattr("localspec.precision.choose_dtype", lambda model_dir=None: "bfloat16")
        engine = load(tmp_path / "m")
        on_gpu = mx.default_device().type == mx.DeviceType.gpu
        expected = mx.float32 if on_gpu else mx.bfloat16
        assert engine.model.model.embed_tokens.weight.dtype == expected
