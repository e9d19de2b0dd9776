"""MTP drafting: what the head says by the layout, and the same ids whatever it says."""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from heads import OwnReference, drafted, easy_llama, layer_outputs, softmax, target, write_own
from odds import FALSE_ALARM, chi_square

from localspec.drafters import ModelDrafter, MTPDrafter
from localspec.drafters import mtp as mtp_module
from localspec.drafters.protocol import Draw
from localspec.drafters.trial import ROUNDS, Trial
from localspec.engine import Engine
from localspec.errors import DrafterWarning, IncompatibleDrafterError, IncompleteModelError
from localspec.hidden import HiddenStates
from localspec.models import mtp
from localspec.noise import Noise
from localspec.settings import Settings
from localspec.target import Target
from localspec.transaction import Transaction

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 9, 7]
TAPS = (0, 1, 2)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, mx.array]]:
    file = tmp_path_factory.mktemp("head") / "head.safetensors"
    return file, write_own(file, target(), taps=TAPS)


@pytest.fixture(scope="module")
def head(weights: tuple[Path, dict[str, mx.array]]) -> mtp.Head:
    return _load(weights[0], target())


def _load(file: Path, model: Any) -> mtp.Head:
    source = mtp.find(file)
    assert source is not None
    return mtp.load_head(source, model)


def _draw(size: int = 64, **settings: Any) -> Draw:
    return Draw(Settings(**settings), Noise(1), size)


def _drafter(head: mtp.Head, context: Sequence[int], model: Any = None) -> MTPDrafter:
    """A drafter whose context and hidden states are those of a session that holds `context`."""
    model = target() if model is None else model
    drafter = MTPDrafter(head)
    transaction = Transaction(Target(model), hidden=HiddenStates(model, drafter.taps))
    transaction.prefill(context[:-1])
    drafter.watch(transaction)
    drafter.follow(list(context))
    return drafter


def _taps(context: Sequence[int]) -> list[np.ndarray]:
    outputs = layer_outputs(target(), context[:-1])
    return [outputs[tap] for tap in TAPS]


# What the head computes.


def test_drafts_are_those_of_the_layout(head: mtp.Head, weights: tuple[Path, dict[str, mx.array]]) -> None:
    reference = OwnReference(target(), weights[1])
    for length in (2, 3, 9):
        context = PROMPT[:length]
        proposal = _drafter(head, context).propose(3, _draw())
        assert proposal is not None
        assert proposal.source == "mtp"
        assert proposal.tokens == drafted(reference, _taps(context), context, 3)
        assert proposal.probabilities is None
        assert proposal.q is None


@pytest.mark.parametrize("settings", [{}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.05, "xtc_probability": 0.5}])
def test_q_is_that_of_the_layout_at_every_depth(
    head: mtp.Head, weights: tuple[Path, dict[str, mx.array]], settings: dict[str, Any]
) -> None:
    """Zero outside of the draft vocabulary; where nothing is filtered, the reference's softmax; where something is,
    its largest entries in its proportions."""
    reference = OwnReference(target(), weights[1])
    draw = _draw(temperature=1.0, accept="rejection", **settings)
    proposal = _drafter(head, PROMPT).propose(3, draw)
    assert proposal is not None
    assert proposal.q is not None
    q = np.array(proposal.q, np.float64)
    assert np.allclose(q.sum(axis=-1), 1, atol=1e-5)
    assert set(np.flatnonzero(q.sum(axis=0))) <= set(reference.ids)
    assert proposal.probabilities == pytest.approx([q[i, token] for i, token in enumerate(proposal.tokens)], rel=1e-4)
    for row, logits in zip(q, reference.follow(_taps(PROMPT), PROMPT, proposal.tokens), strict=True):
        expected = np.zeros(64)
        expected[reference.ids] = softmax(logits)
        expected[row == 0] = 0
        assert np.allclose(row, expected / expected.sum(), atol=2e-5)
        if not settings:
            assert (row > 0).sum() == len(reference.ids)


@pytest.mark.parametrize("fault", ["norms", "concat", "norm"])
def test_a_head_that_is_built_in_wrongly_is_found(
    head: mtp.Head, weights: tuple[Path, dict[str, mx.array]], fault: str
) -> None:
    """The comparison of the tests above, with a reference that makes the mistake: it must not agree."""
    wrong = OwnReference(target(), weights[1], {fault})
    proposal = _drafter(head, PROMPT).propose(1, _draw(temperature=1.0, accept="rejection"))
    assert proposal is not None
    assert proposal.q is not None
    said = softmax(wrong.follow(_taps(PROMPT), PROMPT, proposal.tokens)[0])
    assert np.abs(np.array(proposal.q[0])[wrong.ids] - said).max() > 1e-3


def test_taps_of_other_layers_are_found(weights: tuple[Path, dict[str, mx.array]], head: mtp.Head) -> None:
    wrong = [layer_outputs(target(), PROMPT[:-1])[tap] for tap in (0, 1, 3)]
    reference = OwnReference(target(), weights[1])
    q = softmax(reference.follow(wrong, PROMPT, [0])[0])
    proposal = _drafter(head, PROMPT).propose(1, _draw(temperature=1.0, accept="rejection"))
    assert proposal is not None
    assert proposal.q is not None
    assert np.abs(np.array(proposal.q[0])[reference.ids] - q).max() > 1e-3


def test_drafts_follow_the_context_whatever_came_before(
    head: mtp.Head, weights: tuple[Path, dict[str, mx.array]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random commits after proposals, proposals never committed, rewinds and jumps, in a session of its own; prompts
    longer than a chunk of the head's. The cache holds the context's pairs after each, and no others."""
    monkeypatch.setattr(mtp_module, "CHUNK", 4)
    reference = OwnReference(target(), weights[1])
    engine = Engine(target(), drafters=[MTPDrafter(head)])
    session = engine.new_session()
    (drafter,) = session.drafters
    assert isinstance(drafter, MTPDrafter)
    rng = random.Random(4)
    session.prepare(PROMPT)
    for _ in range(40):
        length = rng.randrange(1, 4)
        proposal = drafter.propose(length, _draw())
        assert proposal is not None
        assert drafter.context == session.ids
        assert proposal.tokens == drafted(reference, _taps(session.ids), session.ids, length)
        pairs = len(session.ids) - 1
        assert drafter._pairs == list(range(pairs))
        assert drafter._cache.entries == pairs
        kind = rng.randrange(5)
        if kind <= 1:
            kept = [*proposal.tokens[: rng.randrange(length + 1)], rng.randrange(64)]
            mx.eval(session.transaction.forward(mx.array([session.ids[-1], *kept], mx.uint32)))
            session.transaction.commit(len(session.ids) + len(kept) - 1)
            session.extend(kept)
        elif kind == 2:
            pass  # proposed, and nothing came of it
        elif kind == 3:
            session.truncate(rng.randrange(2, len(session.ids) + 1))
        else:
            session.prepare([*session.ids[: rng.randrange(1, len(session.ids) + 1)], rng.randrange(64), 7])


def test_pairs_without_hidden_states_are_left_out(head: mtp.Head) -> None:
    """A drafter that joins late, or a context longer than what is remembered: it drafts from what it saw, at the
    right positions, and not before it saw the newest."""
    drafter = MTPDrafter(head)
    hidden = HiddenStates(target(), drafter.taps)
    drafter.watch(Transaction(Target(target()), hidden=hidden))
    drafter.follow(PROMPT)
    assert drafter.longest() == 0
    assert drafter.propose(2, _draw()) is None
    for start, rows in ((2, 3), (9, len(PROMPT) - 10)):
        with hidden.listening(start, rows):
            target()(mx.array([PROMPT[start : start + rows]]))
    assert drafter.propose(2, _draw()) is not None
    assert drafter._pairs == [2, 3, 4, *range(9, len(PROMPT) - 1)]
    drafter.commit([])
    drafter.rewind(11)
    assert drafter._pairs == [2, 3, 4, 9]
    drafter.rewind(6)
    assert drafter._pairs == [2, 3, 4]
    assert drafter.longest() > 0
    drafter.rewind(1)
    assert drafter.longest() == 0


def test_positions_count_where_pairs_are_missing(head: mtp.Head, weights: tuple[Path, dict[str, mx.array]]) -> None:
    """With a gap the distance between pairs is that of their tokens."""
    drafter = _drafter(head, PROMPT)
    hidden = drafter._hidden()
    gap = hidden._passes[0]
    hidden._passes = [
        type(gap)(gap.start, 3, gap.outputs),
        type(gap)(8, gap.stop, [output[:, 8:] for output in gap.outputs]),
    ]
    reference = OwnReference(target(), weights[1])
    kept = [*range(3), *range(8, len(PROMPT) - 1)]
    taps = [tap[kept] for tap in _taps(PROMPT)]
    outputs = reference.run(reference.join(taps), reference.embedding[[PROMPT[i + 1] for i in kept]], kept)
    proposal = drafter.propose(1, _draw(temperature=1.0, accept="rejection"))
    assert proposal is not None
    assert proposal.q is not None
    q = np.array(proposal.q[0])[reference.ids]
    assert np.allclose(q, softmax(reference.logits(outputs[-1])), atol=2e-5)
    outputs = reference.run(reference.join(taps), reference.embedding[[PROMPT[i + 1] for i in kept]], range(len(kept)))
    assert not np.allclose(q, softmax(reference.logits(outputs[-1])), atol=2e-5)


# What the engine makes of it.

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "logit_bias": {3: 1.0}},
    {"temperature": 1.0, "xtc_probability": 0.5},
]


@pytest.fixture(scope="module")
def engine(head: mtp.Head) -> Engine:
    return Engine(target(), drafters=[MTPDrafter(head)])


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_ids_are_those_of_plain_decoding(engine: Engine, length: int, settings: dict[str, Any]) -> None:
    keywords: dict[str, Any] = {"max_tokens": 50, "seed": 3, **settings}
    plain = engine.generate(PROMPT, speculate=False, **keywords)
    fast = engine.generate(PROMPT, draft_length=length, **keywords)
    assert fast.ids == plain.ids
    stats = fast.stats.by_drafter["mtp"]
    assert stats.drafted > 20
    assert 5 < stats.accepted < stats.drafted
    assert fast.stats.by_source["mtp"] == stats.accepted


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_turns_rewinds_and_interrupts_change_nothing(engine: Engine, temperature: float) -> None:
    """One session through second turns, edited turns, closed and failing generations; each answer is a cold one's."""
    session, cold = engine.new_session(), Engine(target(), drafters=[])
    rng = random.Random(5)
    context = list(PROMPT)
    for turn in range(14):
        settings = Settings(max_tokens=12, seed=turn, temperature=temperature, draft_length=1 + turn % 4)
        plain = cold.generation(cold.new_session(), context, settings).run().ids
        generation = engine.generation(session, context, settings)
        kind = turn % 5
        if kind in (0, 1):
            assert generation.run().ids == plain
        elif kind == 2:
            assert [next(generation).id for _ in range(5)] == plain[:5]
            generation.close()
        elif kind == 3:
            _fail_after(session, 3, lambda run=generation: run.run())
            assert generation.ids == plain[: len(generation.ids)]
        else:
            assert [next(generation).id for _ in range(3)] == plain[:3]
            del generation
        answer = [] if kind == 4 else session.ids[len(context) :]
        context = context + answer + [rng.randrange(64) for _ in range(3)]
        if kind == 1:
            context = [*context[: rng.randrange(5, len(context))], 11]


def _fail_after(session: Any, passes: int, run: Any) -> None:
    """Have the target raise in one of its passes."""
    original = type(session.transaction).forward
    left = [passes]

    def forward(self: Any, ids: mx.array) -> mx.array:
        left[0] -= 1
        out: mx.array = original(self, ids)
        if left[0] == 0:
            raise RuntimeError("planted")
        return out

    type(session.transaction).forward = forward
    try:
        with pytest.raises(RuntimeError, match="planted"):
            run()
    finally:
        type(session.transaction).forward = original


def test_a_failure_while_drafting_is_put_right(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    session = engine.new_session()
    sampled: dict[str, Any] = {"temperature": 0.8, "seed": 4}
    settings = Settings(max_tokens=20, draft_length=3, **sampled)
    cold = Settings(max_tokens=20, speculate=False, **sampled)
    plain = engine.generation(engine.new_session(), PROMPT, cold).run().ids
    generation = engine.generation(session, PROMPT, settings)
    first = [next(generation).id for _ in range(4)]

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("localspec.drafters.drawing.distribution", fail)
        with pytest.raises(KeyboardInterrupt):
            generation.run()
    kept = generation.ids
    assert kept[: len(first)] == first
    rest = Settings(max_tokens=20 - len(kept), draft_length=3, **sampled)
    again = engine.generation(session, PROMPT + kept, rest).run().ids
    assert kept + again == plain


def test_plain_rounds_in_between_are_caught_up_with(engine: Engine) -> None:
    """Rounds that did not draft, pipelined ones too, leave their hidden states: the head reads them when it is next
    asked, and drafts as well as if it had been asked all along."""
    session = engine.new_session()
    first = engine.generation(session, PROMPT, Settings(max_tokens=15, speculate=False)).run().ids
    second = engine.generation(session, PROMPT + first, Settings(max_tokens=15, draft_length=2)).run()
    alone = engine.generate(PROMPT + first, max_tokens=15, draft_length=2)
    assert second.ids == alone.ids
    assert second.stats.by_drafter["mtp"].accepted == alone.stats.by_drafter["mtp"].accepted
    assert second.stats.reused_tokens == len(PROMPT) + 14


def test_it_takes_turns_with_other_drafters(head: mtp.Head) -> None:
    both = Engine(target(), drafters=["ngram", MTPDrafter(head)])
    plain = both.generate(PROMPT, max_tokens=80, speculate=False)
    fast = both.generate(PROMPT, max_tokens=80, draft_length=3)
    assert fast.ids == plain.ids
    assert {"ngram", "mtp"} <= fast.stats.by_drafter.keys()


def test_its_draws_follow_q(head: mtp.Head) -> None:
    """500 first drafts over 54 ids. Odds of a false alarm: 1e-6."""
    drafter = _drafter(head, PROMPT)
    settings = Settings(temperature=1.2, accept="rejection")
    counts, q = np.zeros(64), None
    for seed in range(500):
        proposal = drafter.propose(1, Draw(settings, Noise(seed), 64))
        assert proposal is not None
        counts[proposal.tokens[0]] += 1
        q = proposal.q
    assert q is not None
    likely = np.array(q[0]) > 0.01
    expected = np.array(q[0])[likely]
    assert chi_square(np.append(counts[likely], counts[~likely].sum()), np.append(expected, 1 - expected.sum())) > (
        FALSE_ALARM
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_ends_where_the_grammar_allows_no_id_of_its_own(head: mtp.Head, temperature: float) -> None:
    """Nothing can be drawn from logits of which none is left; the head has no column for 0, 7, 14 and so on."""
    assert head.draft_ids is not None
    theirs = [i for i in range(64) if i not in head.draft_ids.tolist()]  # type: ignore[operator]
    drafter = _drafter(head, PROMPT)

    def allowed(drafts: Sequence[int]) -> np.ndarray:
        """Ids of both kinds at first, and behind `ours` drafts no id of the head's."""
        mask = np.zeros(64, dtype=bool)
        mask[theirs] = True
        if len(drafts) < ours:
            mask[[8, 9]] = True
        return mask

    for ours in (0, 1, 3):
        draw = Draw(Settings(temperature=temperature), Noise(1), 64, allowed=allowed)
        proposal = drafter.propose(4, draw)
        tokens = [] if proposal is None else proposal.tokens
        assert len(tokens) == ours
        assert set(tokens) <= {8, 9}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_it_ends_where_nothing_allowed_has_a_logit(head: mtp.Head, temperature: float, monkeypatch: Any) -> None:
    """What is drawn there is no token, and the grammar must not be asked about it."""
    drafter, logits = _drafter(head, PROMPT), type(head).logits
    passes = itertools.count()

    def lost(head: mtp.Head, outputs: mx.array) -> mx.array:
        found = logits(head, outputs)
        return mx.full(found.shape, -math.inf) if next(passes) == 2 else found

    monkeypatch.setattr(type(head), "logits", lost)
    mask = np.zeros(64, dtype=bool)
    mask[[8, 9]] = True

    def allowed(drafts: Sequence[int]) -> np.ndarray:
        assert all(mask[draft] for draft in drafts)
        return mask

    proposal = drafter.propose(6, Draw(Settings(temperature=temperature), Noise(1), 64, allowed=allowed))
    assert proposal is not None
    assert len(proposal.tokens) == 3
    assert set(proposal.tokens[:2]) <= {8, 9}


# Heads that are no good.


@pytest.mark.parametrize("accept", ["rejection", "block"])
def test_a_seed_means_the_same_before_and_after_a_head_is_switched_off(accept: str, tmp_path: Path) -> None:
    def other(weights: dict[str, mx.array], _: dict[str, str]) -> None:
        weights["mtp.fc.weight"] = mx.random.normal((32, 64), key=mx.random.key(3))

    write_own(tmp_path / "head.safetensors", target(), change=other)
    head = _load(tmp_path / "head.safetensors", target())
    engine = Engine(target(), drafters=[MTPDrafter(head, trial=Trial("mtp", lambda line: None))])
    sampled = {"max_tokens": 12, "temperature": 0.8, "seed": 7, "accept": accept}
    before = engine.generate(PROMPT, **sampled)
    engine.generate(PROMPT, max_tokens=120, draft_length=3)
    assert engine.drafters[0].trial.failed  # type: ignore[attr-defined]
    after = engine.generate(PROMPT, **sampled)
    assert after.ids == before.ids
    assert after.stats.drafted == before.stats.drafted > 0
    assert engine.generate(PROMPT, max_tokens=12).stats.drafted == 0


def test_a_head_that_drafts_nonsense_is_switched_off_and_said_so_once(tmp_path: Path) -> None:
    def other(weights: dict[str, mx.array], _: dict[str, str]) -> None:
        weights["mtp.fc.weight"] = mx.random.normal((32, 64), key=mx.random.key(3))

    write_own(tmp_path / "head.safetensors", target(), change=other)
    drafter = MTPDrafter(_load(tmp_path / "head.safetensors", target()))
    engine = Engine(target(), drafters=[drafter])
    with pytest.warns(DrafterWarning, match="mtp is switched off") as caught:
        first = engine.generate(PROMPT, max_tokens=120, draft_length=3)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert "\n" not in message
    assert all(cause in message for cause in ("shifted", "hidden state", "order", "scale"))
    assert first.stats.by_drafter["mtp"].rounds == ROUNDS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = engine.generate(PROMPT, max_tokens=120, draft_length=3)
    assert "mtp" not in second.stats.by_drafter
    assert first.ids == second.ids


def test_a_trial_counts_drafts_that_were_judged() -> None:
    trial = Trial("mtp")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(ROUNDS):
            trial.book(4, 1)
            trial.book(0, 0)
        for _ in range(1000):
            trial.book(1, 0)  # later rounds decide nothing
    assert not trial.failed


def _zero(name: str) -> Any:
    def change(weights: dict[str, mx.array], _: dict[str, str]) -> None:
        weights[name] = mx.zeros_like(weights[name])

    return change


def _without(name: str) -> Any:
    return lambda weights, _: weights.pop(name)


def _metadata(**values: str) -> Any:
    return lambda _, metadata: metadata.update(values)


def _put(name: str, array: mx.array) -> Any:
    return lambda weights, _: weights.update({name: array})


WRONG: dict[str, tuple[Any, str]] = {
    "zeros": (_zero("mtp.layers.0.mlp.up_proj.weight"), r"mtp.layers.0.mlp.up_proj.weight holds one value throughout"),
    "ones": (_put("mtp.fuse.weight", mx.ones((32, 96))), r"mtp.fuse.weight holds one value throughout"),
    "not finite": (_put("mtp.norm.weight", mx.full((32,), float("nan"))), "mtp.norm.weight is not finite"),
    "missing": (_without("mtp.layers.0.self_attn.o_proj.weight"), "mtp.layers.0.self_attn.o_proj.weight is missing"),
    "missing ids": (_without("mtp.draft_ids"), "draft_ids"),
    "too many": (_put("mtp.extra.weight", mx.ones((2,))), "mtp.extra.weight has no place"),
    "no taps": (_metadata(taps=""), "missing or wrong"),
    "version": (_metadata(version="2"), "version 1 of its head format, not '2'"),
    "heads": (_metadata(heads="5"), "do not make 5 heads"),
    "ids that descend": (_put("mtp.draft_ids", mx.array([3, 2], mx.int32)), "draft_ids must be integers that ascend"),
    "ids beyond the target": (_put("mtp.draft_ids", mx.array([3, 64], mx.int32)), "below the target's 64"),
    "ids that are no integers": (_put("mtp.draft_ids", mx.array([0.0, float("nan")])), "must be integers"),
    "ids that are truths": (_put("mtp.draft_ids", mx.array([False, True])), "must be integers"),
    "a matrix without sides": (_put("mtp.layers.0.self_attn.q_proj.weight", mx.array(1.0)), "cannot be read|wrong"),
    "complex": (_put("mtp.norm.weight", mx.ones((32,), mx.complex64)), "holds no weights"),
    "integers": (_put("mtp.norm.weight", mx.ones((32,), mx.int32)), "holds no weights"),
    "a scale without columns": (_put("mtp.fc.scales", mx.zeros((32, 0))), "cannot be read as an MTP head"),
    "eps": (_metadata(rms_eps="-1"), "must be positive numbers"),
    "theta": (_metadata(rope_theta="nan"), "must be positive numbers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_head_that_is_not_whole_is_refused(name: str, tmp_path: Path) -> None:
    change, message = WRONG[name]
    file = tmp_path / "head.safetensors"
    write_own(file, target(), change=change)
    with pytest.raises(IncompleteModelError, match=message) as caught:
        _load(file, target())
    assert "\n" not in str(caught.value)


def test_a_head_of_another_model_is_refused(head: mtp.Head, tmp_path: Path) -> None:
    write_own(tmp_path / "head.safetensors", target(), change=_put("mtp.fc.weight", mx.random.normal((32, 80))))
    with pytest.raises(IncompatibleDrafterError, match=r"mtp.fc.weight is \[32, 80\].* \[32, 64\]"):
        _load(tmp_path / "head.safetensors", target())
    with pytest.raises(IncompatibleDrafterError, match="loaded for another model"):
        Engine(easy_llama(9), drafters=[MTPDrafter(head)])


def test_taps_that_the_target_lacks_are_refused(tmp_path: Path) -> None:
    write_own(tmp_path / "head.safetensors", target(), taps=(0, 5, 2))
    with pytest.raises(IncompatibleDrafterError, match="layer 5"):
        _load(tmp_path / "head.safetensors", target())


def test_there_is_no_head_where_there_are_no_tensors(tmp_path: Path) -> None:
    assert mtp.find(tmp_path) is None
    mx.save_safetensors(str(tmp_path / "other.safetensors"), {"model.embed_tokens.weight": mx.ones((2, 2))})
    assert mtp.find(tmp_path) is None
    with pytest.raises(IncompleteModelError, match="no such file"):
        mtp.find(tmp_path / "nowhere")
    (tmp_path / "broken.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(IncompleteModelError, match=r"broken\.safetensors"):
        mtp.find(tmp_path / "broken.safetensors")


def test_sessions_share_the_weights_and_free_the_rest(engine: Engine) -> None:
    a, b = engine.new_session(), engine.new_session()
    (one,), (other,) = a.drafters, b.drafters
    assert isinstance(one, MTPDrafter)
    assert isinstance(other, MTPDrafter)
    assert one.head is other.head
    assert one._cache is not other._cache
    assert one._hidden() is a.transaction.hidden
    a.clear()
    assert one._hidden() is a.transaction.hidden


def test_engines_without_taps_keep_nothing() -> None:
    session = Engine(target(), drafters=["ngram", ModelDrafter(target())]).new_session()
    assert session.transaction.hidden is None
