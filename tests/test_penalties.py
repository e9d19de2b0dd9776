"""Bias and penalties are mlx-lm's to the last bit, for each row of a pass with that row's own history."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors
from tiny import TableModel, random_table, tiny_llama

from localspec.drafters import ModelDrafter
from localspec.drafters.protocol import Draw
from localspec.engine import Engine
from localspec.noise import Noise, Stream
from localspec.penalties import penalise, seen
from localspec.sampling import distribution
from localspec.settings import Settings

VOCABULARY = 9
SIZES = st.sampled_from([0, 1, 2, 3, 7, 20, 1000])
PENALTIES: dict[str, st.SearchStrategy[Any]] = {
    "repetition_penalty": st.sampled_from([None, 0, 1, 1.3, 0.6, 3]) | st.floats(0.01, 100),
    "repetition_context_size": SIZES,
    "presence_penalty": st.none() | st.sampled_from([0, 1.5, -0.7]) | st.floats(-100, 100),
    "presence_context_size": SIZES,
    "frequency_penalty": st.none() | st.sampled_from([0, 0.3, -0.7]) | st.floats(-100, 100),
    "frequency_context_size": SIZES,
    "logit_bias": st.dictionaries(
        st.integers(0, VOCABULARY - 1), st.sampled_from([-math.inf, 2.5, -100, 0]) | st.floats(-30, 30), max_size=4
    ),
}


def _theirs(logits: mx.array, keywords: dict[str, Any], tokens: list[int]) -> mx.array:
    """One row through mlx-lm's processors. A copy first: they write into the logits that they are given."""
    row = mx.array(np.array(logits))
    for processor in make_logits_processors(**keywords):
        row = processor(mx.array(tokens, mx.uint32), row)
    return row


@given(
    data=st.data(),
    history=st.lists(st.integers(0, VOCABULARY - 1), max_size=30),
    fed=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6),
    keywords=st.fixed_dictionaries(PENALTIES),
)
def test_each_row_is_mlx_lms_with_its_own_history(
    data: st.DataObject, history: list[int], fed: list[int], keywords: dict[str, Any]
) -> None:
    rows = data.draw(st.integers(1, len(fed)))
    values = st.sampled_from([0.0, -0.0, -math.inf, 1.0]) | st.floats(-20, 20, width=32)
    logits = mx.array(
        data.draw(st.lists(st.lists(values, min_size=VOCABULARY, max_size=VOCABULARY), min_size=rows, max_size=rows))
    )
    before = np.array(logits)
    ours = penalise(logits, Settings.from_keywords(**keywords), history, mx.array(fed, mx.uint32), VOCABULARY)
    for i in range(rows):
        row = _theirs(logits[i : i + 1], keywords, history + fed[: len(fed) - rows + 1 + i])
        assert mx.array_equal(ours[i : i + 1], row, equal_nan=True), (i, ours[i].tolist(), row.tolist())
    assert np.array_equal(np.array(logits), before, equal_nan=True)  # nothing is written into the model's logits


def test_nothing_asked_for_is_nothing_done() -> None:
    logits = mx.zeros((2, 5), mx.bfloat16)
    for keywords in ({}, {"repetition_penalty": 0, "presence_penalty": 0.0, "frequency_penalty": None}):
        assert penalise(logits, Settings(**keywords), [1], mx.array([2, 3], mx.uint32), 5) is logits


def test_narrow_logits_are_not_written_beyond_their_end() -> None:
    """Ids of the history, and of the bias, that have no logit change nothing; the others are as without them."""
    logits = mx.array([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]])
    settings = Settings(
        repetition_penalty=2, presence_penalty=1, frequency_penalty=0.5, logit_bias={1: 1.0, 3: 7.0, 60: 9.0}
    )
    wide = penalise(logits, settings, [63, 2, 40], mx.array([50, 0], mx.uint32), 64)
    known = Settings(repetition_penalty=2, presence_penalty=1, frequency_penalty=0.5, logit_bias={1: 1.0})
    first = penalise(logits[:1], known, [], mx.array([2], mx.uint32), 3)
    second = penalise(logits[1:], known, [2], mx.array([0], mx.uint32), 3)
    assert mx.array_equal(wide, mx.concatenate([first, second]))


def test_windows_by_hand() -> None:
    def windows(rows: int, size: int) -> list[list[int]]:
        ids, real = seen(mx.array([5, 6, 7, 8], mx.uint32), rows, size)
        return [[t for t, r in zip(*row, strict=True) if r] for row in zip(ids.tolist(), real.tolist(), strict=True)]

    assert windows(1, 2) == [[7, 8]]
    assert windows(3, 2) == [[5, 6], [6, 7], [7, 8]]
    assert windows(4, 2) == [[5], [5, 6], [6, 7], [7, 8]]
    assert windows(4, 0) == windows(4, 4) == windows(4, 99) == [[5], [5, 6], [5, 6, 7], [5, 6, 7, 8]]


def test_half_precision_logits_are_penalised_in_float32() -> None:
    logits = (mx.random.normal((2, 6), key=mx.random.key(1)) * 4).astype(mx.bfloat16)
    settings, fed = Settings(repetition_penalty=1.3, logit_bias={1: 0.001}), mx.array([3, 1], mx.uint32)
    ours = penalise(logits, settings, [2], fed, 6)
    assert ours.dtype == mx.float32
    assert mx.array_equal(ours, penalise(logits.astype(mx.float32), settings, [2], fed, 6))


RUNS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "repetition_context_size": 2},
    {"presence_penalty": 1.5, "presence_context_size": 0},
    {"frequency_penalty": 0.8, "frequency_context_size": 5},
    {"logit_bias": {3: 4.0, 9: -math.inf}},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {7: 2.0}},
]


@pytest.mark.parametrize("penalties", RUNS, ids=str)
def test_ids_and_logprobs_are_mlx_lms(penalties: dict[str, Any]) -> None:
    """Plain, with drafts, and with mlx-lm's own processors handed over: ids and values of its generate_step."""
    model = tiny_llama()
    engine = Engine(model, drafters=["ngram", ModelDrafter(tiny_llama(1, layers=1))])
    processors = make_logits_processors(**penalties)
    for prompt in ([7], [1, 2, 3] * 4, list(range(40))):
        steps = list(generate_step(mx.array(prompt), model, max_tokens=24, logits_processors=processors))
        ids, values = [int(t) for t, _ in steps], [float(logprobs[int(t)].item()) for t, logprobs in steps]
        for settings in (
            {"speculate": False},
            {"draft_length": 4},
            {"draft_length": 4, "logits_processors": processors},
        ):
            asked = settings if "logits_processors" in settings else {**settings, **penalties}
            generation = engine.generate(prompt, max_tokens=24, **asked)
            assert generation.ids == ids
            assert [token.logprob for token in generation.tokens] == values


def test_a_small_model_drafts_with_the_penalties_and_reports_that_q() -> None:
    """q of each draft is the draft's own distribution after bias, penalties (with the drafts before it) and filters."""
    table = random_table(5, 8)
    drafter = ModelDrafter(TableModel(table))
    settings = Settings(
        temperature=0.8,
        accept="rejection",
        top_k=6,
        repetition_penalty=1.5,
        frequency_penalty=0.7,
        frequency_context_size=3,
        logit_bias={2: 1.5, 4: -math.inf},
        xtc_probability=0.5,
        xtc_threshold=0.2,
    )
    drafter.follow([1, 2, 3, 2])
    tossed = set()
    for seed in range(12):
        draw = Draw(settings, Noise(seed), 8, (3,))
        proposal = drafter.propose(3, draw)
        assert proposal is not None
        assert proposal.q is not None
        tokens = [1, 2, 3, 2]
        for i, token in enumerate(proposal.tokens):
            logits = table[tokens[-2], tokens[-1]][None]
            adjusted = penalise(logits, settings, tokens[:-1], mx.array(tokens[-1:], mx.uint32), 8)
            coin = Noise(seed).uniform([len(tokens)], Stream.XTC)
            expected = distribution(adjusted, settings, coin, (3,)).probabilities()[0]
            assert mx.allclose(proposal.q[i], expected, atol=1e-6)
            assert expected[token].item() > 0
            tossed.add(coin.item() <= 0.5)
            tokens.append(token)
    assert tossed == {True, False}


@pytest.mark.parametrize("accept", ["coupled", "rejection"])
def test_a_draft_that_is_the_target_is_accepted_whole_under_penalties(accept: str) -> None:
    """Any difference in history, coin or order between the draft's distributions and the target's would show here."""
    model = tiny_llama()
    engine = Engine(model, drafters=[ModelDrafter(model)])
    for penalties in [*RUNS, {"xtc_probability": 0.6, "xtc_threshold": 0.05, "repetition_penalty": 1.2}]:
        generation = engine.generate(
            [1, 2, 3] * 4, max_tokens=40, temperature=0.9, seed=4, draft_length=3, accept=accept, **penalties
        )
        assert generation.stats.drafted > 0
        assert generation.stats.acceptance_rate == 1.0, penalties


def test_a_draft_with_fewer_rows_is_penalised_in_bounds() -> None:
    """The context has ids that the draft model has no logit for."""
    engine = Engine(tiny_llama(), drafters=[ModelDrafter(tiny_llama(5, vocabulary=48, layers=1))])
    settings: dict[str, Any] = {
        "max_tokens": 30,
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.5,
        "logit_bias": {60: 6.0, 50: 6.0, 3: -1.0},
    }
    for temperature in (0, 0.9):
        plain = engine.generate(list(range(64)), speculate=False, temperature=temperature, seed=2, **settings)
        drafted = engine.generate(list(range(64)), draft_length=4, temperature=temperature, seed=2, **settings)
        assert drafted.ids == plain.ids
        assert max(plain.ids) >= 48


def test_the_benchs_gap_knows_every_setting() -> None:
    """The token that was drawn has the largest key of all, by the pass that the bench judges near-ties with."""
    from localspec.bench.gap import key_gap

    def lift(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits + mx.where(mx.arange(64) == tokens[-1], 3.0, 0.0)

    engine = Engine(tiny_llama(), drafters=["ngram"])
    asked: dict[str, Any] = {**RUNS[-1], "xtc_probability": 0.5, "xtc_threshold": 0.02, "logits_processors": [lift]}
    generation = engine.generate([1, 2, 3] * 4, max_tokens=20, temperature=0.9, seed=4, **asked)
    context = list(generation.prompt_ids)
    for token in generation.ids:
        gap, tolerance = key_gap(engine, context, generation.settings, token, token)
        assert gap == pytest.approx(0, abs=1e-4)
        assert tolerance < 0.01
        context.append(token)
