"""A model directory is whole, or what it lacks is named."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import mlx.core as mx
import pytest
from checkpoints import isolate, one_line, save_model

from localspec import hub
from localspec.checkpoint import INDEX, read_checkpoint
from localspec.errors import IncompleteModelError, ModelNotFoundError


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(tmp_path, monkeypatch)


def test_complete_ones_resolve(tmp_path: Path) -> None:
    for number, shards in enumerate((1, 3)):
        save_model(tmp_path / str(number), shards=shards)
        assert hub.resolve(str(tmp_path / str(number))) == tmp_path / str(number)


def test_a_file_a_missing_directory_and_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "f.gguf").touch()
    with pytest.raises(ModelNotFoundError, match="is a file"):
        hub.resolve(str(tmp_path / "f.gguf"))
    with pytest.raises(ModelNotFoundError, match="no directory"):
        hub.resolve(str(tmp_path / "absent"))
    with pytest.raises(IncompleteModelError, match=r"config\.json is missing .a GGUF file is here"):
        hub.resolve(str(tmp_path))


def test_everything_missing_is_listed_at_once(tmp_path: Path) -> None:
    save_model(tmp_path, shards=3)
    (tmp_path / "model-00001-of-00003.safetensors").unlink()
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(IncompleteModelError) as caught:
        hub.check_complete(tmp_path, finish="localspec models pull org/name")
    text = one_line(caught)
    for word in ("model-00001-of-00003", "model-00003-of-00003", "tokenizer", "localspec models pull org/name"):
        assert word in text
    assert "model-00002-of-00003" not in text


def test_missing_shard_without_an_index(tmp_path: Path) -> None:
    save_model(tmp_path, shards=3)
    (tmp_path / INDEX).unlink()
    hub.check_complete(tmp_path)
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(IncompleteModelError, match=r"model-00003-of-00003\.safetensors is missing"):
        hub.check_complete(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_cut_off_weights(tmp_path: Path, keep: int) -> None:
    save_model(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(IncompleteModelError, match=r"model\.safetensors is cut off"):
        hub.check_complete(tmp_path)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "LFS"),
        (b"<html>not found</html>", "not a safetensors"),
        (struct.pack("<Q", 2) + b"[]", "not a safetensors"),
        (struct.pack("<Q", 2) + b"{}" + b"more", "damaged"),
    ],
)
def test_files_that_are_no_weights(tmp_path: Path, content: bytes, word: str) -> None:
    save_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(IncompleteModelError, match=word):
        hub.check_complete(tmp_path)


def test_stray_weights_do_not_belong_to_the_model(tmp_path: Path) -> None:
    save_model(tmp_path, shards=2)
    mx.save_safetensors(str(tmp_path / "model-old.safetensors"), {"model.norm.weight": mx.zeros((64,))})
    names = [f.name for f in read_checkpoint(tmp_path).weights]
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_stale_index(tmp_path: Path) -> None:
    weights = save_model(tmp_path, shards=2)
    for file in tmp_path.glob("model-*"):
        file.unlink()
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    with pytest.raises(IncompleteModelError, match="stale: it names none"):
        hub.check_complete(tmp_path)
    placed = dict.fromkeys([*weights, "model.layers.9.mlp.up_proj.weight"], "model.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(IncompleteModelError, match=r"stale: it places model.layers.9"):
        hub.check_complete(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {"a": "../../x.safetensors"}}'])
def test_bad_index(tmp_path: Path, index: str) -> None:
    save_model(tmp_path)
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(IncompleteModelError, match=INDEX):
        hub.check_complete(tmp_path)


def test_unrelated_weight_files_are_not_guessed_at(tmp_path: Path) -> None:
    save_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-a.safetensors")
    hub.check_complete(tmp_path)
    (tmp_path / "model-b.safetensors").write_bytes((tmp_path / "model-a.safetensors").read_bytes())
    with pytest.raises(IncompleteModelError, match="which belong together"):
        hub.check_complete(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_broken_config(tmp_path: Path, content: str) -> None:
    save_model(tmp_path)
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(IncompleteModelError, match=r"config\.json"):
        hub.check_complete(tmp_path)
