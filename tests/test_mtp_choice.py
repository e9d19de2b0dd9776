"""Which head drafts for a model: named, in its files, beside them, or shipped with localspec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from checkpoints import byte_tokens, save_model
from heads import write_own

import localspec
from localspec import memory, pairing
from localspec.checkpoint import read_checkpoint
from localspec.engine import Engine
from localspec.errors import (
    DrafterWarning,
    IncompatibleDrafterError,
    IncompleteModelError,
    InsufficientMemoryError,
    LocalspecError,
    UnsupportedModelError,
)
from localspec.loading import load_tokenizer, load_weights
from localspec.models import catalogue, mtp
from localspec.models.mtp import choice
from localspec.plan import plan_of
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


def _told(folder: Path, **keywords: Any) -> tuple[list[str], list[str]]:
    """What drafts, and what was said of the head."""
    said: list[str] = []
    return _names(localspec.load(folder, dtype="float32", notify=said.append, **keywords)), said


def _damaged(folder: Path) -> Path:
    (folder / "mtp.safetensors").write_bytes(b"cut")
    return folder / "mtp.safetensors"


def _of_another_architecture(folder: Path) -> Path:
    """Raw tensors in the model's own file, as if a checkpoint of an architecture that no head is known for."""
    file = folder / "model.safetensors"
    held: dict[str, mx.array] = dict(mx.load(str(file)))  # type: ignore[arg-type]
    layer = "model.layers.2."
    head = {f"{layer}eh_proj.weight": mx.ones((64, 128))} | {f"{layer}{n}norm.weight": mx.ones((64,)) for n in "eh"}
    mx.eval(held)
    mx.save_safetensors(str(file), held | head)
    return folder


def _too_wide(folder: Path) -> Path:
    """Found out when the weights are there."""
    save_model(folder.parent / "wide", hidden_size=32)
    return _head(folder / "mtp.safetensors", folder.parent / "wide")


@pytest.mark.parametrize("spoil", [_damaged, _of_another_architecture, _too_wide])
def test_a_head_that_nobody_named_and_that_is_of_no_use_is_left_out(folder: Path, spoil: Any) -> None:
    """The model loads, drafts without it, and says why in one line; where the head is named it is an error."""
    head = spoil(folder)
    names, said = _told(folder)
    assert names == ["ngram"]
    (line,) = said
    assert str(folder) in line
    assert line.endswith("; decoding goes on without that MTP head")
    assert "\n" not in line
    with pytest.warns(DrafterWarning, match="goes on without that MTP head"):
        localspec.load(folder, dtype="float32")
    assert _told(folder, mtp="none") == (["ngram"], [])
    with pytest.raises(LocalspecError):
        _told(folder, mtp=head)


def test_a_model_whose_hidden_states_cannot_be_read_loads_without_its_head(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(_: Any) -> Any:
        raise UnsupportedModelError("cannot tell where a llama model keeps its layers")

    head = _head(folder / "mtp.safetensors", folder)
    monkeypatch.setattr("localspec.models.mtp.weights.trunk_of", unsupported)
    chosen: list[str] = []
    names, said = _told(folder, on_choice=chosen.append)
    assert names == ["ngram"]
    assert len(said) == 1
    assert not chosen  # nobody is told that a head drafts which is then left out
    with pytest.raises(UnsupportedModelError):
        _told(folder, mtp=head)


def test_a_head_takes_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is named and has no room is an error, one that nobody named is left out."""
    head = _head(folder / "mtp.safetensors", folder)
    source = mtp.find(head)
    assert source is not None
    need = plan_of("target", folder, "float32").bytes + source.bytes
    monkeypatch.setattr(memory, "needed_bytes", lambda weights: weights)
    monkeypatch.setattr(memory, "available_bytes", lambda: need)
    assert _told(folder) == (["ngram", "mtp"], [])
    monkeypatch.setattr(memory, "available_bytes", lambda: need - 1)
    names, (line,) = _told(folder)
    assert names == ["ngram"]
    assert "an MTP head needs" in line
    with pytest.raises(InsufficientMemoryError, match="and an MTP head needs"):
        _told(folder, mtp=head)


@pytest.mark.parametrize("spoil", [_damaged, _of_another_architecture])
def test_a_small_model_takes_the_place_of_a_head_that_is_known_to_be_of_no_use(
    folder: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any
) -> None:
    spoil(folder)
    target = plan_of("target", folder, "float32")
    monkeypatch.setattr(pairing, "_best", lambda *_: pairing.Pairing(line="a small model"))
    said: list[str] = []
    assert pairing.pair(target, None, "auto", load_tokenizer, notify=said.append).line == "a small model"
    assert len(said) == 1


def test_heads_of_the_catalogue_have_plain_names() -> None:
    """No paths: a head is a file in models/heads."""
    heads = [entry.head for entry in catalogue().values() if entry.head is not None]
    assert heads
    assert all(Path(head).name == head and head.endswith(".safetensors") for head in heads)
