"""Some of the target's own layers as its draft: cut rightly, sharing every array, and changing no id."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from architectures import ARCHITECTURES, FAULTS_OF_MLX_LM, VOCABULARY, build
from checkpoints import save_model
from mlx.utils import tree_flatten
from tiny import TableModel, chat_engine, random_table, tiny_gemma, tiny_llama

from localspec import load
from localspec.drafters import LayerSkipDrafter, shallow
from localspec.drafters.layer_skip import choose_layers, default_layers, layer_skip
from localspec.drafters.shallow import ShallowModel, Skipped
from localspec.engine import Engine
from localspec.errors import IncompatibleDrafterError, SettingsError
from localspec.pairing import own_layers
from localspec.settings import Settings
from localspec.target import Target

IDS = [(13 * i + 5) % VOCABULARY for i in range(30)]


def _apart(model: ShallowModel) -> float:
    """How far logits in passes of several rows and of one are from those of one pass, whose caches cannot be wrong."""
    target = Target(model)
    caches = target.new_caches()
    parts = [IDS[:7], IDS[7:20], *[[i] for i in IDS[20:26]], IDS[26:]]
    stepwise = mx.concatenate([target.forward(mx.array(part, mx.uint32), caches) for part in parts])
    whole = model.inner(mx.array([IDS], mx.uint32))[0]
    scale = mx.maximum(mx.max(mx.abs(whole)), 1)
    return float((mx.max(mx.abs(stepwise - whole)) / scale).item())


def _shares(cut: Any, model: Any) -> bool:
    """Whether every array of the one is an array of the other: the object, not its value."""
    own = {id(array) for _, array in tree_flatten(model.parameters())}
    arrays = [array for _, array in tree_flatten(cut.parameters())]
    return bool(arrays) and all(id(array) in own for array in arrays)


class TestShallowModel:
    def test_is_the_model_built_with_those_layers_only(self) -> None:
        model = tiny_llama(layers=5)
        reference = tiny_llama(9, layers=2)
        reference.update({"lm_head": dict(model.lm_head)})
        reference.model.embed_tokens, reference.model.norm = model.model.embed_tokens, model.model.norm
        reference.model.layers = [model.model.layers[1], model.model.layers[4]]
        ids = mx.array([IDS], mx.uint32) % 64
        cut = ShallowModel(model, (1, 4))
        assert mx.array_equal(cut(ids, cut.make_cache()), reference(ids))
        assert not mx.array_equal(cut(ids, cut.make_cache()), model(ids))

    def test_shares_every_array_and_leaves_the_model_alone(self) -> None:
        model = tiny_gemma()
        layers, before = list(model.layers), model(mx.array([IDS], mx.uint32) % 64)
        cut = ShallowModel(model, (0, 1))
        assert _shares(cut, model)
        assert not _shares(copy.deepcopy(cut), model)
        cut = ShallowModel(tiny := tiny_llama(layers=4), (0, 3))
        count = len(tree_flatten(tiny.layers[0].parameters()))
        assert len(tree_flatten(cut.parameters())) == len(tree_flatten(tiny.parameters())) - 2 * count
        assert all(one is other for one, other in zip(model.layers, layers, strict=True))
        assert not any(isinstance(layer, Skipped) for layer in [*model.layers, *tiny.layers])
        assert mx.array_equal(model(mx.array([IDS], mx.uint32) % 64), before)

    def test_has_the_caches_of_its_own_layers(self) -> None:
        model = build("gemma3_text")
        cut = ShallowModel(model, (1, 2))
        assert [type(cache).__name__ for cache in cut.make_cache()] == ["KVCache", "RotatingKVCache"]
        assert cut.kept == (1, 2)
        assert cut.args is model.args

    def test_sees_later_changes_of_the_weights(self) -> None:
        model = tiny_llama(layers=3)
        cut = ShallowModel(model, (0,))
        ids = mx.array([[1, 2, 3]], mx.uint32)
        before = cut(ids, cut.make_cache())
        model.layers[0].mlp.gate_proj.weight = model.layers[0].mlp.gate_proj.weight * 2
        assert not mx.array_equal(cut(ids, cut.make_cache()), before)

    @pytest.mark.parametrize("kept", [(), (2,), (-1,), (1, 0), (0, 0)])
    def test_layers_that_are_none_are_refused(self, kept: tuple[int, ...]) -> None:
        with pytest.raises(IncompatibleDrafterError, match=r"it has 2, from 0 on"):
            ShallowModel(tiny_llama(), kept)

    def test_a_kind_of_layer_that_is_left_out_is_named(self) -> None:
        with pytest.raises(IncompatibleDrafterError, match="take layer 1 as well"):
            ShallowModel(tiny_gemma(), (0,))

    @pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next", "llama4_text"])
    def test_masks_come_from_a_cache_of_the_layers_kind(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Layers 2 and 3: masks and offsets that the model takes from layers 0 and 1, which do not run."""
        assert _apart(ShallowModel(build(name), (2, 3))) < 1e-4
        if name == "gemma3_text":
            wrong = lambda kinds, kept: tuple(max(i - kept[0], 0) for i, _ in enumerate(kinds))  # noqa: E731
            monkeypatch.setattr(shallow, "_stand_ins", wrong)
            with pytest.raises(ValueError, match="broadcast"):
                _apart(ShallowModel(build(name), (2, 3)))


_CACHES, _MORE = "caches for . layers", "more than one array"
REFUSED: dict[str, str] = {
    "afm7": "not one list in one place",
    "deepseek_v41": _MORE,
    "gemma3n": _CACHES,
    "gemma4": _CACHES,
    "gemma4_text": _CACHES,
    "hunyuan": _MORE,
    "iquestloopcoder": _CACHES,
    "kimi_k3": _MORE,
    "longcat_flash_ngram": _CACHES,
    "nanbeige": _CACHES,
    "nemotron-nas": _CACHES,
    "nemotron_h": _CACHES,
    "rwkv7": _MORE,
}
"""Architectures that cannot be cut, and a piece of the reason."""


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_cut_rightly_or_refused(name: str) -> None:
    model = build(name)
    if name in REFUSED:
        with pytest.raises(IncompatibleDrafterError, match=REFUSED[name]) as caught:
            LayerSkipDrafter(model)
        assert "\n" not in str(caught.value)
        return
    # The last layers and those that every model has to keep: masks come from layers that do not run.
    of = len(model.layers)
    drafter = LayerSkipDrafter(model, sorted({*choose_layers(model, 1), *range(of // 2, of)}))
    assert _shares(drafter.model, model)
    if name not in FAULTS_OF_MLX_LM:
        assert _apart(drafter.model) < 1e-4


DRAFTS: dict[str, Callable[[Any], LayerSkipDrafter]] = {
    "default": LayerSkipDrafter,
    "first": lambda model: LayerSkipDrafter(model, [0]),
    "ends": lambda model: LayerSkipDrafter(model, [0, 3]),
    "all": lambda model: LayerSkipDrafter(model, [0, 1, 2, 3]),
}


@pytest.mark.parametrize("temperature", [0, 0.9])
@pytest.mark.parametrize("draft", DRAFTS)
def test_ids_are_those_of_plain_decoding(draft: str, temperature: float) -> None:
    model = tiny_llama(3, layers=4)
    engine = Engine(model, drafters=[DRAFTS[draft](model)])
    settings: dict[str, Any] = {"max_tokens": 24, "temperature": temperature, "seed": 5}
    plain = engine.generate([1, 2, 3], speculate=False, **settings).ids
    rates = []
    for length in (1, 4):
        generation = engine.generate([1, 2, 3], draft_length=length, **settings)
        assert generation.ids == plain
        assert {token.source for token in generation.tokens} <= {"plain", "skip", "resampled", "bonus"}
        rates.append(generation.stats.acceptance_rate)
    if draft == "all":
        assert rates == [1.0, 1.0]  # to the end: no row of its caches is ever wrong
    else:
        assert all(rate is not None and rate < 1 for rate in rates)


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next", "deepseek_v3", "recurrent_gemma"])
def test_rollback_on_other_kinds_of_caches(name: str) -> None:
    """All layers accept everything, whatever their caches are; half of them change nothing."""
    model = build(name)
    for drafter in (LayerSkipDrafter(model, range(len(model.layers))), LayerSkipDrafter(model)):
        engine = Engine(model, drafters=[drafter])
        plain = engine.generate(IDS, max_tokens=24, speculate=False).ids
        generation = engine.generate(IDS, max_tokens=24, draft_length=3)
        assert generation.ids == plain
        if len(drafter.layers) == len(model.layers):
            assert generation.stats.acceptance_rate == 1.0


def test_its_caches_hold_what_is_kept() -> None:
    model = tiny_llama(3, layers=4)
    engine = Engine(model, drafters=[LayerSkipDrafter(model, 2)])
    session = engine.new_session()
    (drafter,) = session.drafters
    assert isinstance(drafter, LayerSkipDrafter)
    for _ in engine.generation(session, [1, 2, 3], Settings(max_tokens=30, draft_length=4)):
        held = drafter._transaction.held
        assert held <= len(drafter.context)
        assert [cache.offset for cache in drafter._transaction.caches] == [held, held]
    assert drafter.context == session.ids


def test_a_chat_of_two_turns() -> None:
    plain, own = chat_engine(), chat_engine()
    own = Engine(own.model, own.tokenizer, drafters=["ngram", LayerSkipDrafter(own.model, 1)])
    for turn in ("hello", "and again"):
        answers = []
        for engine in (plain, own):
            chat = engine.conversation()
            answers.append(chat.send(turn, max_tokens=20, draft_length=3).run().ids)
        assert answers[0] == answers[1]


class TestChoice:
    def test_counts_indices_and_the_default(self) -> None:
        model = tiny_llama(layers=6)
        assert choose_layers(model, [4, 5]) == (4, 5)
        assert choose_layers(model, 6) == (0, 1, 2, 3, 4, 5)
        for count in range(1, 7):
            assert len(choose_layers(model, count)) == count
        assert 1 < len(choose_layers(model, None)) < 6
        assert layer_skip(model, 2).layers == choose_layers(model, 2)
        assert LayerSkipDrafter(model, 2).fresh().layers == choose_layers(model, 2)

    @pytest.mark.parametrize("count", [0, -1, 7])
    def test_counts_that_cannot_be(self, count: int) -> None:
        with pytest.raises(IncompatibleDrafterError, match="run 1 to 6 of them, not"):
            choose_layers(tiny_llama(layers=6), count)

    def test_every_kind_of_layer_runs(self) -> None:
        assert choose_layers(tiny_gemma(), 1) == (0, 1)

    def test_the_default_takes_so_many_different_ones(self) -> None:
        for of in range(2, 40):
            for count in range(1, of + 1):
                layers = default_layers(count, of)
                assert layers == sorted(set(layers))
                assert len(layers) == count
                assert layers[0] >= 0
                assert layers[-1] < of

    @pytest.mark.parametrize(
        ("draft", "layers"), [("layers", 0), ("layers:7", 7), (None, None), ("smollm2", None), ("./layers", None)]
    )
    def test_as_it_is_asked_for(self, draft: str | None, layers: int | None) -> None:
        assert own_layers(draft) == layers

    @pytest.mark.parametrize("draft", ["layers:", "layers:0", "layers:-1", "layers:x", "layers:²", "layers:1.5"])
    def test_asked_for_wrongly(self, draft: str) -> None:
        with pytest.raises(SettingsError, match="layers:N"):
            own_layers(draft)


def test_another_model_is_refused() -> None:
    with pytest.raises(IncompatibleDrafterError, match="for no other"):
        Engine(tiny_llama(), drafters=[LayerSkipDrafter(tiny_llama())])


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(IncompatibleDrafterError, match="no list of layers"):
        LayerSkipDrafter(TableModel(random_table(1, 6)))


def test_load_makes_one(tmp_path: Path) -> None:
    save_model(tmp_path / "target", num_hidden_layers=4)
    engine = load(tmp_path / "target", draft="layers:3", dtype="float32")
    assert [drafter.name for drafter in engine.drafters] == ["ngram", "skip"]
    assert isinstance(engine.drafters[1], LayerSkipDrafter)
    assert len(engine.drafters[1].layers) == 3
    plain = engine.generate("abc", max_tokens=20, speculate=False).ids
    assert engine.generate("abc", max_tokens=20, draft_length=3).ids == plain
    with pytest.raises(IncompatibleDrafterError, match="not 5"):
        load(tmp_path / "target", draft="layers:5", dtype="float32")
