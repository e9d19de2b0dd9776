"""Hidden states of a target's passes: the right rows at the right positions, whatever becomes of the passes."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import architectures
import mlx.core as mx
import numpy as np
import pytest
from heads import layer_outputs, target
from tiny import tiny_llama

from localspec.errors import UnsupportedModelError
from localspec.hidden import HiddenStates, Tap
from localspec.rows import RowClass
from localspec.target import Target
from localspec.transaction import Transaction
from localspec.trunk import trunk_of

TAPS: tuple[Tap, ...] = (0, 2, "before-norm", "after-norm")
IDS = [i * i * 7 % 64 for i in range(60)]


def _transaction(model: Any, taps: tuple[Tap, ...] = TAPS, **keywords: Any) -> Transaction:
    return Transaction(Target(model), hidden=HiddenStates(model, taps, **keywords))


def _expected(model: Any, ids: list[int]) -> list[np.ndarray]:
    outputs = layer_outputs(model, ids)
    return [outputs[0], outputs[2], outputs[-2], outputs[-1]]


def _assert_right(transaction: Transaction, ids: list[int], model: Any) -> None:
    hidden = transaction.hidden
    assert hidden is not None
    held = transaction.held
    assert hidden.spans(0, 10**6) == ([(0, held)] if held else [])
    if held:
        for found, expected in zip(hidden.rows(TAPS, 0, held), _expected(model, ids[:held]), strict=True):
            assert found.shape == expected.shape
            assert np.allclose(np.array(found), expected, atol=1e-5)


@pytest.mark.parametrize("row_class", [None, RowClass((2, 3, 4))])
def test_rows_follow_the_caches_through_random_passes(row_class: RowClass | None) -> None:
    """Prefills, passes kept in part, rewinds, passes in flight, aborted ones; with and without filler rows."""
    model = target()
    transaction = _transaction(model)
    transaction.row_class = row_class
    rng, ids = random.Random(3), list(IDS)
    transaction.prefill(ids[:7])
    _assert_right(transaction, ids, model)
    for step in range(60):
        held = transaction.held
        kind = rng.randrange(5) if held > 4 else 0
        rows = rng.randrange(1, 4)
        if held + 8 > len(ids):
            kind = 3
        if kind in (0, 1):  # a pass, of which some rows are kept
            wrong = [(token + step) % 64 for token in ids[held : held + rows]]
            fed = [ids[held], *wrong[1:]]
            mx.eval(transaction.forward(mx.array(fed, mx.uint32)))
            kept = 1 + next((i for i, (a, b) in enumerate(zip(fed[1:], ids[held + 1 :], strict=False)) if a != b), 0)
            transaction.commit(held + kept)
        elif kind == 2:  # one pass ahead of another, and taken back
            mx.eval(transaction.forward(mx.array(ids[held : held + 1], mx.uint32)))
            ahead = transaction.forward(mx.array([9], mx.uint32))
            transaction.commit(held + 1, 1)
            mx.eval(ahead)
            assert transaction.rewind(held + 1)
        elif kind == 3:
            assert transaction.rewind(rng.randrange(1, held))
        else:
            transaction.forward(mx.array(ids[held : held + rows], mx.uint32))
            transaction.abort()
        _assert_right(transaction, ids, model)
    assert transaction.held > 0


def test_nothing_is_evaluated_for_them_and_no_graph_is_kept() -> None:
    """What is kept was computed with the pass: looking at it afterwards computes nothing."""
    model = target()
    transaction = _transaction(model)
    transaction.prefill(IDS[:5])
    for i in range(5, 9):
        mx.eval(transaction.forward(mx.array([IDS[i]], mx.uint32)))
        transaction.commit(i + 1)
    assert transaction.hidden is not None
    before = mx.get_peak_memory(), mx.get_active_memory()
    arrays = transaction.hidden.arrays()
    assert len(arrays) == 5 * len(TAPS)
    mx.eval(arrays)
    assert mx.get_active_memory() == before[1]


def test_old_positions_are_forgotten() -> None:
    transaction = _transaction(target(), remembered=8)
    hidden = transaction.hidden
    assert hidden is not None
    for i in range(30):
        mx.eval(transaction.forward(mx.array([IDS[i]], mx.uint32)))
        transaction.commit(i + 1)
    assert hidden.spans(0, 30) == [(22, 30)]
    assert len(hidden.arrays()) == 8 * len(TAPS)
    with pytest.raises(LookupError, match="21"):
        hidden.rows(TAPS, 21, 25)
    assert hidden.rows((2,), 25, 27)[0].shape == (2, 32)


def test_gaps_are_told_apart() -> None:
    model = target()
    hidden = HiddenStates(model, (0,))
    for start, rows in ((3, 2), (5, 1), (9, 3)):
        with hidden.listening(start, rows):
            model(mx.array([IDS[:rows]]))
    assert hidden.spans(0, 20) == [(3, 6), (9, 12)]
    assert hidden.spans(4, 10) == [(4, 6), (9, 10)]
    assert hidden.spans(6, 9) == []
    hidden.cut(10)
    assert hidden.spans(0, 20) == [(3, 6), (9, 10)]
    with pytest.raises(LookupError):
        hidden.rows((0,), 5, 10)


def test_a_layer_that_is_not_there_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="layer 2 is to be tapped, and the model has layers 0 to 1"):
        HiddenStates(tiny_llama(), (0, 2))


def test_modules_are_given_back_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    transaction = _transaction(model, (0, "after-norm"))

    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(model.model.layers[1]), "__call__", fail)
    with pytest.raises(KeyboardInterrupt):
        transaction.forward(mx.array([1, 2], mx.uint32))
    transaction.abort()
    assert not any("lent_by" in vars(type(module)) for _, module in model.named_modules())
    assert transaction.hidden is not None
    assert transaction.hidden.spans(0, 9) == []


def test_they_are_freed_with_the_session_at_once() -> None:
    """No cycle holds on to them: with the collector off, the last reference is the last."""
    transaction = _transaction(target())
    transaction.prefill(IDS[:9])
    assert transaction.hidden is not None
    gone = weakref.ref(transaction.hidden)
    gc.disable()
    try:
        del transaction
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["llama", "gemma4_text", "qwen3_5", "deepseek_v3", "mimo", "glm4_moe", "qwen3_next"])
def test_the_families_that_have_heads_can_be_tapped(name: str) -> None:
    """The last norm's output makes the logits, by the output matrix, on every one of them; rows are right at T = 1."""
    model = architectures.build(name)
    trunk = trunk_of(model)
    transaction = Transaction(Target(model), hidden=HiddenStates(model, (0, "before-norm", "after-norm")))
    transaction.prefill(IDS[:9])
    logits = transaction.forward(mx.array(IDS[9:12], mx.uint32))
    assert transaction.hidden is not None
    before, after = transaction.hidden.rows(("before-norm", "after-norm"), 9, 12)
    assert mx.allclose(trunk.norm(before), after, atol=1e-5)
    found = trunk.logits(after)
    if name == "gemma4_text":
        found = mx.tanh(found / 30.0) * 30.0
    assert mx.allclose(found, logits, atol=1e-4)
