"""Which head drafts for a model: named, in its files, beside them, or shipped with localspec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from checkpoints import byte_tokens, save_model
from heads import write_own

import localspec
from localspec.checkpoint import read_checkpoint
from localspec.engine import Engine
from localspec.errors import IncompatibleDrafterError, IncompleteModelError
from localspec.loading import load_tokenizer, load_weights
from localspec.models import catalogue, mtp
from localspec.models.mtp import choice
from localspec.vocabulary import fingerprint


def _head(file: Path, folder: Path, taps: tuple[int, ...] = (0, 1), **metadata: str) -> Path:
    """A head of our own for the llama in `folder`."""
    checkpoint = read_checkpoint(folder)
    model = load_weights(checkpoint, "float32")
    vocabulary = fingerprint(load_tokenizer(checkpoint))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_own(file, model, taps=taps, change=lambda _, m: m.update({"vocabulary": vocabulary} | metadata))
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path / "model", seed=1)
    return tmp_path / "model"


def _names(engine: Engine) -> list[str]:
    return [drafter.name for drafter in engine.drafters]


def _ship(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "shipped_files", lambda: [file])


def test_a_shipped_head_is_used_for_any_model_that_it_fits(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fine-tune of the same model among them: its weights are others, and its ids stay those of plain decoding."""
    _ship(_head(tmp_path / "heads" / "h.safetensors", folder, layers="2"), monkeypatch)
    assert _names(localspec.load(folder, dtype="float32")) == ["ngram", "mtp"]
    save_model(tmp_path / "tuned", seed=2)
    tuned = localspec.load(tmp_path / "tuned", dtype="float32")
    assert _names(tuned) == ["ngram", "mtp"]
    plain = tuned.generate([5, 6, 7], max_tokens=20, speculate=False)
    assert tuned.generate([5, 6, 7], max_tokens=20, draft_length=2).ids == plain.ids


OTHERS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "another width": ({"hidden_size": 32}, {}),
    "another number of layers": ({"num_hidden_layers": 3}, {"layers": "2"}),
    "fewer layers than are tapped": ({"num_hidden_layers": 1}, {}),
    "another vocabulary": ({"tokens": [*reversed(byte_tokens()[:256]), *byte_tokens()[256:]]}, {}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_shipped_head_is_not_used_for_others(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, metadata = OTHERS[name]
    _ship(_head(tmp_path / "heads" / "h.safetensors", folder, **metadata), monkeypatch)
    save_model(tmp_path / "other", **changes)
    assert _names(localspec.load(tmp_path / "other", dtype="float32")) == ["ngram"]


def test_what_is_named_goes_before_what_comes_with_the_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is named, then one beside the model, then a shipped one; "none" and named drafters leave all out."""
    shipped = _head(tmp_path / "heads" / "h.safetensors", folder)
    _ship(shipped, monkeypatch)
    checkpoint = read_checkpoint(folder)
    tokenizer = load_tokenizer(checkpoint)
    assert (found := mtp.choose(checkpoint, tokenizer, "auto")) is not None
    assert found.path == shipped
    beside = _head(folder / "mtp.safetensors", folder)
    assert (found := mtp.choose(checkpoint, tokenizer, "auto")) is not None
    assert found.path == beside
    assert (found := mtp.choose(checkpoint, tokenizer, shipped)) is not None
    assert found.path == shipped
    assert mtp.choose(checkpoint, tokenizer, "none") is None
    assert mtp.choose(checkpoint, tokenizer, None) is None
    assert _names(localspec.load(folder, mtp="none", draft="none", dtype="float32")) == ["ngram"]
    assert _names(localspec.load(folder, drafters=[], dtype="float32")) == []
    assert _names(localspec.load(folder, drafters=[], mtp=shipped, dtype="float32")) == ["mtp"]


def test_a_named_head_that_does_not_fit_is_an_error(folder: Path, tmp_path: Path) -> None:
    """In one line each: another vocabulary, another width, no head at all."""
    head = _head(tmp_path / "h.safetensors", folder)
    save_model(tmp_path / "other", tokens=[*reversed(byte_tokens()[:256]), *byte_tokens()[256:]])
    with pytest.raises(IncompatibleDrafterError, match="another vocabulary"):
        localspec.load(tmp_path / "other", mtp=head, dtype="float32")
    save_model(tmp_path / "wide", hidden_size=32)
    with pytest.raises(IncompatibleDrafterError, match="another model's"):
        localspec.load(tmp_path / "wide", mtp=head, dtype="float32")
    mx.save_safetensors(str(tmp_path / "none.safetensors"), {"a": mx.ones((2,))})
    with pytest.raises(IncompleteModelError, match="holds no MTP head"):
        localspec.load(folder, mtp=tmp_path / "none.safetensors", dtype="float32")


def test_heads_of_the_catalogue_have_plain_names() -> None:
    """No paths: a head is a file in models/heads."""
    heads = [entry.head for entry in catalogue().values() if entry.head is not None]
    assert heads
    assert all(Path(head).name == head and head.endswith(".safetensors") for head in heads)
