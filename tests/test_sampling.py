"""The sampling distribution is mlx-lm's, in float32, whatever the filters; and draws follow it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_sampler
from odds import FALSE_ALARM, chi_square

from localspec.noise import Noise, Stream, bits, gumbel
from localspec.sampling import distribution, keep_top_k, keep_top_p, ranked
from localspec.settings import Settings


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """mlx-lm compiles its filters anew for each size and setting: seconds each on a CPU."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def _theirs(logits: mx.array, settings: Settings) -> mx.array:
    """Log-probabilities that mlx-lm's sampler draws from: generate_step's normalisation, then make_sampler's chain."""
    logits = logits.astype(mx.float32)
    scores = logits - mx.logsumexp(logits, keepdims=True)
    if 0 < settings.top_p < 1:
        scores = apply_top_p(scores, settings.top_p)
    if settings.min_p != 0:
        scores = apply_min_p(scores, settings.min_p)
    if 0 < settings.top_k < logits.shape[-1]:
        scores = apply_top_k(scores, settings.top_k)
    heated = scores * (1.0 / settings.temperature)
    return heated - mx.logsumexp(heated, axis=-1, keepdims=True)


def _ours(logits: mx.array, settings: Settings) -> mx.array:
    scores = distribution(logits, settings).scores
    return scores - mx.logsumexp(scores, axis=-1, keepdims=True)


SETTINGS = st.builds(
    Settings,
    temperature=st.floats(0.05, 5),
    top_p=st.just(1.0) | st.just(0.0) | st.floats(1e-6, 1),
    top_k=st.just(0) | st.integers(1, 80),
    min_p=st.just(0.0) | st.floats(1e-4, 1),
)
# Distinct logits: which of several tokens tied at the edge of top-k stays is open in mlx-lm.
ROWS = st.lists(st.integers(-4000, 4000).map(lambda n: n / 256), min_size=2, max_size=60, unique=True)


@given(row=ROWS, settings=SETTINGS)
def test_distribution_is_mlx_lms(row: list[float], settings: Settings) -> None:
    logits = mx.array([row])
    ours, theirs = np.array(_ours(logits, settings)), np.array(_theirs(logits, settings))
    assert (np.isfinite(ours) == np.isfinite(theirs)).all()
    kept = np.isfinite(ours)
    assert np.allclose(ours[kept], theirs[kept], rtol=2e-5, atol=2e-5)


@given(row=ROWS, settings=SETTINGS)
def test_survivors_are_exactly_mlx_lms(row: list[float], settings: Settings) -> None:
    """Bit for bit before the temperature: the same filters on the same numbers."""
    cool = replace(settings, temperature=1.0)
    logits = mx.array([row])
    logprobs = logits - mx.logsumexp(logits, keepdims=True)
    scores = distribution(logits, cool).scores
    theirs = _theirs(logits, cool)
    assert mx.array_equal(mx.isfinite(scores), mx.isfinite(theirs))
    shifted = logprobs - logprobs.max(axis=-1, keepdims=True)
    assert mx.array_equal(mx.where(mx.isfinite(scores), shifted, -math.inf), scores)


def test_the_comparison_notices_a_wrong_order() -> None:
    """Mutant: temperature before the filters, and top-k before top-p. Both must differ somewhere."""
    logits = mx.random.normal((1, 40), key=mx.random.key(3)) * 2
    settings = Settings(temperature=0.5, top_p=0.8, top_k=12, min_p=0.02)
    right = _theirs(logits, settings)
    heated = _theirs(logits * 2, Settings(temperature=1.0, top_p=0.8, top_k=12, min_p=0.02))
    assert not mx.array_equal(mx.isfinite(right), mx.isfinite(heated))
    wide = Settings(temperature=0.5, top_p=0.7, top_k=12)
    scores = apply_top_p(apply_top_k(logits - mx.logsumexp(logits), 12), 0.7)
    assert not mx.array_equal(mx.isfinite(scores), mx.isfinite(_theirs(logits, wide)))
    assert mx.array_equal(mx.isfinite(_ours(logits, settings)), mx.isfinite(right))
    assert mx.array_equal(mx.isfinite(_ours(logits, wide)), mx.isfinite(_theirs(logits, wide)))


@given(
    values=st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=2, max_size=12),
    settings=SETTINGS,
)
def test_at_least_one_token_survives_and_ties_are_settled_alike(values: list[float], settings: Settings) -> None:
    scores = distribution(mx.array([values, values]), settings).scores
    kept = np.isfinite(np.array(scores))
    assert kept.any(axis=-1).all()
    assert kept[:, int(np.argmax(values))].all()  # the first of the largest is always among them
    assert (kept[0] == kept[1]).all()
    if 0 < settings.top_k < len(values):
        assert kept[0].sum() <= settings.top_k


def test_ties_at_the_edges() -> None:
    tied = mx.log(mx.array([[0.25, 0.25, 0.25, 0.25]]))
    assert np.isfinite(np.array(_ours(tied, Settings(temperature=1, top_k=2))))[0].tolist() == [
        True,
        True,
        False,
        False,
    ]
    # top-p and min-p keep all that are tied with the last one kept, as mlx-lm does.
    for settings in (Settings(temperature=1, top_p=0.3), Settings(temperature=1, min_p=1.0)):
        assert np.isfinite(np.array(_ours(tied, settings))).all()
        assert mx.array_equal(mx.isfinite(_ours(tied, settings)), mx.isfinite(_theirs(tied, settings)))
    row = mx.array([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    kept = [np.isfinite(np.array(keep_top_k(row, k)))[0].nonzero()[0].tolist() for k in range(1, 6)]
    assert kept == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [0, 1, 2, 3, 4]]


def test_a_mass_of_exactly_top_p_is_enough() -> None:
    logits = mx.array([[0.0, 0.0, -200.0, -200.0, -300.0]])  # two tokens of exactly 1/2, the others underflow to 0
    for top_p, survivors in ((0.5, 2), (1.0 - 2**-20, 2)):  # tied tokens stay together
        kept = np.isfinite(np.array(_ours(logits, Settings(temperature=1, top_p=top_p))))
        assert kept.sum() == survivors
    one = mx.array([[0.0, -200.0, -200.0]])  # above the second there is a mass of exactly 1, and 1 >= 1 * total
    scores = keep_top_p(one - mx.logsumexp(one, axis=-1, keepdims=True), 1.0)
    assert np.isfinite(np.array(scores)).tolist() == [[True, False, False]]
    assert mx.array_equal(scores, apply_top_p(one - mx.logsumexp(one, axis=-1, keepdims=True), 1.0))


@pytest.mark.parametrize("top_k", [40, 41, 10**9])
def test_top_k_of_the_vocabulary_and_more_means_all(top_k: int) -> None:
    logits = mx.random.normal((2, 40), key=mx.random.key(1))
    assert mx.array_equal(
        distribution(logits, Settings(temperature=1, top_k=top_k)).scores,
        distribution(logits, Settings(temperature=1)).scores,
    )
    # And mlx's global random state is whole afterwards: mlx-lm's own check breaks it.
    assert mx.random.uniform(shape=(3,)).shape == (3,)


@pytest.mark.parametrize("top_p", [5e-324, 1e-185, 1e-45, 1e-30, 1e-7])
def test_tiny_top_p_keeps_the_top_token(top_p: float) -> None:
    """mlx-lm gives not-a-number for the smallest ones: the threshold rounds to 0 and every token is dropped."""
    logits = mx.random.normal((2, 40), key=mx.random.key(1))
    kept = np.isfinite(np.array(distribution(logits, Settings(temperature=1, top_p=top_p)).scores))
    assert kept.sum(axis=-1).tolist() == [1, 1]
    assert kept.argmax(axis=-1).tolist() == mx.argmax(logits, axis=-1).tolist()


def test_top_p_0_is_off_and_min_p_1_is_greedy_as_in_mlx_lm() -> None:
    logits = mx.random.normal((1, 40), key=mx.random.key(1))
    assert np.isfinite(np.array(_ours(logits, Settings(temperature=1, top_p=0.0)))).all()
    assert np.isfinite(np.array(_ours(logits, Settings(temperature=1, min_p=1.0)))).sum() == 1


@pytest.mark.parametrize("temperature", [5e-324, 1e-46, 1e-38, 1e-20, 1e-6])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = mx.random.normal((5, 300), key=mx.random.key(2))
    drawn = distribution(logits, Settings(temperature=temperature))
    noise = Noise(1).gumbel(range(5), 300)
    assert mx.array_equal(drawn.choose(noise), mx.argmax(logits, axis=-1))
    assert np.allclose(np.array(drawn.probabilities().max(axis=-1)), 1)
    assert not np.isnan(np.array(drawn.scores)).any()
    assert np.allclose(np.array(drawn.log_probability_of(mx.argmax(logits, axis=-1))), 0)


@pytest.mark.parametrize("temperature", [1e6, 1e30, 1.7e308])
def test_huge_temperatures_are_uniform_over_the_survivors(temperature: float) -> None:
    logits = mx.random.normal((1, 64), key=mx.random.key(2)) * 3
    drawn = distribution(logits, Settings(temperature=temperature, top_k=10))
    p = np.array(drawn.probabilities())[0]
    assert (p > 0).sum() == 10
    assert np.allclose(p[p > 0], 0.1, rtol=1e-4)


def test_float16_and_bfloat16_logits_are_treated_in_float32() -> None:
    logits = (mx.random.normal((3, 50), key=mx.random.key(2)) * 4).astype(mx.bfloat16)
    settings = Settings(temperature=0.7, top_p=0.9, min_p=0.01)
    assert distribution(logits, settings).scores.dtype == mx.float32
    assert mx.array_equal(_ours(logits, settings), _ours(logits.astype(mx.float32), settings))


def test_each_row_is_by_itself() -> None:
    """A row's distribution does not depend on the rows beside it, bit for bit: speculation relies on that."""
    logits = mx.random.normal((9, 333), key=mx.random.key(8)) * 3
    settings = Settings(temperature=0.8, top_p=0.9, top_k=50, min_p=0.001)
    whole = distribution(logits, settings)
    for i, j in ((0, 1), (3, 5), (2, 9), (8, 9)):
        part = distribution(logits[i:j], settings)
        assert mx.array_equal(part.scores, whole.scores[i:j])
        assert mx.array_equal(part.logprobs, whole.logprobs[i:j])


def test_temperature_0_is_one_hot_and_ignores_filters_and_noise() -> None:
    logits = mx.array([[1.0, 5.0, 5.0, 2.0]])
    drawn = distribution(logits, Settings(temperature=0, top_p=0.1, top_k=1, min_p=0.9))
    assert drawn.choose(mx.array([[0.0, 0.0, 9.0, 99.0]])).tolist() == [1]  # ties go to the lowest id
    assert drawn.probabilities().tolist() == [[0.0, 1.0, 0.0, 0.0]]
    assert drawn.log_probability_of(mx.array([1])).tolist() == [0.0]
    assert drawn.log_probability_of(mx.array([2])).tolist() == [-math.inf]
    expected = 5.0 - math.log(math.exp(1) + 2 * math.exp(5) + math.exp(2))
    assert drawn.logprob_of(mx.array([2])).tolist() == pytest.approx([expected], abs=1e-5)


def test_filtered_tokens_have_no_probability_and_are_never_drawn() -> None:
    logits = mx.random.normal((1, 30), key=mx.random.key(5))
    drawn = distribution(logits, Settings(temperature=2.0, top_k=3))
    top = set(np.argsort(-np.array(logits)[0])[:3].tolist())
    for i in range(30):
        assert math.isfinite(drawn.log_probability_of(mx.array([i])).item()) == (i in top)
    rows = mx.broadcast_to(drawn.scores, (500, 30))
    assert set(mx.argmax(rows + Noise(2).gumbel(range(500), 30), axis=-1).tolist()) == top


def test_gumbel_max_draws_follow_the_distribution() -> None:
    """100,000 draws each for three settings. Odds of a false alarm: 3 checks at 1e-6.

    Mutants that must fail: no noise scale (noise divided by the temperature), noise of the wrong sign.
    """
    vocabulary, draws = 12, 100_000
    logits = mx.random.normal((1, vocabulary), key=mx.random.key(6)) * 1.5
    noise = gumbel(bits(7, Stream.GUMBEL, range(draws), vocabulary))
    for settings in (
        Settings(temperature=1.0),
        Settings(temperature=0.6, top_p=0.9, top_k=8),
        Settings(temperature=1.7, min_p=0.1),
    ):
        drawn = distribution(logits, settings)
        p = np.array(mx.exp(_theirs(logits, settings)))[0]

        def draw(noise: mx.array, scores: mx.array = drawn.scores) -> np.ndarray:
            return np.bincount(np.array(mx.argmax(scores + noise, axis=-1)), minlength=vocabulary)

        assert chi_square(draw(noise), p) > FALSE_ALARM
        assert chi_square(draw(noise * 1.2), p) < FALSE_ALARM
        assert chi_square(draw(-noise), p) < FALSE_ALARM


def test_mlx_lms_own_sampler_agrees() -> None:
    """The reference chain above is really mlx-lm's sampler: its draws fit. Odds of a false alarm: 1e-6."""
    logits = mx.random.normal((1, 10), key=mx.random.key(9))
    settings = Settings(temperature=0.7, top_p=0.85, top_k=6, min_p=0.05)
    sampler = make_sampler(temp=0.7, top_p=0.85, top_k=6, min_p=0.05)
    mx.random.seed(4)
    rows = mx.broadcast_to(logits - mx.logsumexp(logits), (20_000, 10))
    counts = np.bincount(np.array(sampler(rows)), minlength=10)
    assert chi_square(counts, np.array(mx.exp(_theirs(logits, settings)))[0]) > FALSE_ALARM


def test_unusable_rows_show_in_the_normalizer() -> None:
    rows = [[0.0, 1.0], [math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf], [-math.inf, 1.0]]
    for settings in (Settings(), Settings(temperature=0.5, top_p=0.9)):
        finite = [math.isfinite(n) for n in distribution(mx.array(rows), settings).normalizer.tolist()]
        assert finite == [True, False, False, False, True]


@given(
    rows=st.lists(
        st.lists(
            st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 2.0]) | st.floats(-9, 9, width=32), min_size=7, max_size=7
        ),
        min_size=1,
        max_size=4,
    ),
    count=st.integers(1, 9),
)
def test_top_are_the_largest_and_of_equal_ones_the_lowest_ids(rows: list[list[float]], count: int) -> None:
    rows = [[*row, 1.0] for row in rows]  # at least one is finite
    drawn = distribution(mx.array(rows), Settings(temperature=1.0, top_k=1))
    found = ranked(drawn.top(count), len(rows))
    for row, pairs in zip(drawn.logprobs.tolist(), found, strict=True):
        best = sorted(range(8), key=lambda i: (-row[i], i))[:count]
        assert pairs == tuple((i, row[i]) for i in best)


def test_top_of_a_row_that_is_not_a_number_stays_within_it() -> None:
    for bad in ([math.nan] * 5, [math.nan, 0.0, 1.0, 2.0, 3.0], [math.inf] * 5, [-math.inf] * 5):
        ids, values = distribution(mx.array([bad, [1.0, 2.0, 3.0, 4.0, 5.0]]), Settings()).top(3)
        assert (ids < 5).all().item()
        assert sorted(ids[1].tolist()) == [2, 3, 4]
        assert values.shape == (2, 3)


def test_order_of_filters_is_top_p_min_p_top_k() -> None:
    """All six orders on one row: only mlx-lm's gives our survivors (the row is chosen so that orders differ)."""
    steps = {
        "p": lambda x: apply_top_p(x, 0.72),
        "m": lambda x: apply_min_p(x, 0.12),
        "k": lambda x: apply_top_k(x, 5),
    }
    settings = Settings(temperature=1, top_p=0.72, min_p=0.12, top_k=5)
    differing = 0
    for seed in range(40):
        logits = mx.random.normal((1, 24), key=mx.random.key(seed)) * 1.6
        logprobs = logits - mx.logsumexp(logits)
        ours = np.isfinite(np.array(_ours(logits, settings)))
        for order in itertools.permutations("pmk"):
            scores = logprobs
            for step in order:
                scores = steps[step](scores)
            kept = np.isfinite(np.array(scores))
            if order == ("p", "m", "k"):
                assert (ours == kept).all()
            differing += int((ours != kept).any())
    assert differing > 0
