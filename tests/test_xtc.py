"""XTC: mlx-lm's rule, with one coin per position that plain decoding, verification and drafts share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc
from odds import FALSE_ALARM, chi_square
from tiny import TableModel, chat_engine, random_table

from localspec.drafters import ModelDrafter
from localspec.drafters.protocol import Draw
from localspec.engine import Engine
from localspec.noise import Noise, Stream
from localspec.sampling import distribution, exclude_top_choices
from localspec.settings import Settings


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """mlx-lm compiles its filters anew for each size and setting: seconds each on a CPU."""
    mx.disable_compile()
    yield
    mx.enable_compile()


ROWS = st.lists(st.integers(-2000, 2000).map(lambda n: n / 256), min_size=2, max_size=40, unique=True)


@given(
    row=ROWS,
    threshold=st.sampled_from([0.0, 0.1, 0.5]) | st.floats(0, 0.5),
    filters=st.fixed_dictionaries(
        {
            "top_p": st.just(1.0) | st.floats(0.3, 1),
            "min_p": st.just(0.0) | st.floats(0.01, 0.3),
            "top_k": st.integers(0, 9),
        }
    ),
    exempt=st.lists(st.integers(0, 50), max_size=3),
)
def test_survivors_are_mlx_lms(row: list[float], threshold: float, filters: dict[str, Any], exempt: list[int]) -> None:
    """In the whole chain, where it stands between min-p and top-k; the coin is heads, then tails."""
    logits = mx.array([row])
    settings = Settings(temperature=1.0, xtc_probability=0.5, xtc_threshold=threshold, **filters)
    for coin, probability in ((0.5, 1.0), (0.5001, 0.0)):
        theirs = logits - mx.logsumexp(logits, keepdims=True)
        if filters["top_p"] < 1:
            theirs = apply_top_p(theirs, filters["top_p"])
        if filters["min_p"] > 0:
            theirs = apply_min_p(theirs, filters["min_p"])
        if probability:
            known = [token for token in exempt if token < len(row)]
            theirs = apply_xtc(theirs, probability, threshold, known)
        if 0 < filters["top_k"] < len(row):
            theirs = apply_top_k(theirs, filters["top_k"])
        ours = distribution(logits, settings, mx.array([coin]), exempt).scores
        assert mx.array_equal(mx.isfinite(ours), mx.isfinite(theirs))
        assert mx.isfinite(ours).any().item()


def test_by_hand() -> None:
    logprobs = mx.log(mx.array([[0.4, 0.3, 0.15, 0.1, 0.05]] * 2))

    def kept(threshold: float, act: bool = True, exempt: tuple[int, ...] = ()) -> list[int]:
        rows = exclude_top_choices(logprobs, threshold, mx.array([not act, act]), exempt)
        return np.isfinite(np.array(rows))[1].nonzero()[0].tolist()

    assert kept(0.12) == [2, 3, 4]
    assert kept(0.35) == kept(0.45) == [0, 1, 2, 3, 4]  # one choice above the threshold, or none: nothing to exclude
    assert kept(0.0) == [4]
    assert kept(0.12, act=False) == [0, 1, 2, 3, 4]
    assert kept(0.12, exempt=(0, 99)) == [0, 2, 3, 4]


def test_tied_choices_stay_together() -> None:
    tied = mx.log(mx.array([[0.25, 0.25, 0.25, 0.25]]))
    assert mx.isfinite(exclude_top_choices(tied, 0.1, mx.array([True]))).all().item()


def test_each_row_has_its_own_coin_and_is_by_itself() -> None:
    logits = mx.random.normal((8, 33), key=mx.random.key(8))
    settings = Settings(temperature=0.8, xtc_probability=0.5, xtc_threshold=0.02)  # several choices in every row
    coins = Noise(3).uniform(range(8), Stream.XTC)
    acts = (coins <= 0.5).tolist()
    assert set(acts) == {True, False}  # type: ignore[arg-type]
    whole = distribution(logits, settings, coins, (4,)).scores
    for i, j in ((0, 1), (2, 5), (7, 8)):
        assert mx.array_equal(distribution(logits[i:j], settings, coins[i:j], (4,)).scores, whole[i:j])
    off = distribution(logits, Settings(temperature=0.8)).scores
    assert [not mx.array_equal(whole[i], off[i]) for i in range(8)] == acts


def test_coins_are_a_function_of_seed_and_position() -> None:
    settings = Settings(temperature=1, xtc_probability=0.3)
    draw = Draw(settings, Noise(5), 8)
    whole = draw.coins(10, 6)
    assert whole is not None
    assert [draw.coins(10 + i, 1).item() for i in (5, 0, 3)] == [whole[i].item() for i in (5, 0, 3)]  # type: ignore[union-attr]
    assert Draw(settings, Noise(6), 8).coins(10, 6).tolist() != whole.tolist()  # type: ignore[union-attr]
    assert Draw(Settings(temperature=0, xtc_probability=0.3), Noise(5), 8).coins(10, 6) is None
    assert Draw(Settings(temperature=1), Noise(5), 8).coins(10, 6) is None


def test_coins_fall_as_often_as_asked_and_independently_of_the_other_streams() -> None:
    """Odds of a false alarm: 1e-6 each."""
    n, noise = 50_000, Noise(11)
    coins = np.array(noise.uniform(range(n), Stream.XTC))
    others = np.array(noise.uniform(range(n), Stream.COIN))
    heads = coins <= 0.3
    assert chi_square([heads.sum(), n - heads.sum()], [0.3, 0.7]) > FALSE_ALARM
    cells = np.histogram2d(coins, others, bins=4, range=[[0, 1], [0, 1]])[0]
    assert chi_square(cells, np.ones((4, 4))) > FALSE_ALARM
    neighbours = np.histogram2d(coins[1:], coins[:-1], bins=4, range=[[0, 1], [0, 1]])[0]
    assert chi_square(neighbours, np.ones((4, 4))) > FALSE_ALARM


def test_a_missing_coin_is_not_taken_for_tails() -> None:
    with pytest.raises(ValueError, match="coin"):
        distribution(mx.zeros((1, 4)), Settings(temperature=1, xtc_probability=0.5))


def test_newline_and_end_tokens_are_exempt_as_in_mlx_lm() -> None:
    engine = chat_engine()
    theirs = engine.tokenizer.encode("\n") + list(engine.tokenizer.eos_token_ids)
    assert set(engine.xtc_exempt()) == set(theirs)
    assert Engine(engine.model).xtc_exempt() == ()
    seen: list[tuple[int, ...]] = []
    sampled = engine.generate([1, 5, 7], max_tokens=4, temperature=1.0, seed=1, xtc_probability=1.0, xtc_threshold=0.0)
    seen.append(sampled._xtc_exempt)
    assert seen == [engine.xtc_exempt()]


VOCABULARY = 5
TARGET, DRAFT = random_table(1, VOCABULARY, 1.2), random_table(2, VOCABULARY, 1.2)
SETTINGS: dict[str, Any] = {"temperature": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.05}


def _pairs() -> np.ndarray:
    """Exact probabilities of all strings of two tokens after (1, 2): a position's coin is its own, so its two
    distributions mix there."""
    flat = TARGET.reshape(-1, VOCABULARY)
    mixed = np.zeros((VOCABULARY,) * 3)
    for coin in (0.0, 1.0):
        rows = distribution(flat, Settings(**SETTINGS), mx.full((flat.shape[0],), coin)).probabilities()
        mixed += 0.5 * np.array(rows, np.float64).reshape(mixed.shape)
    out = np.zeros((VOCABULARY,) * 2)
    for x, y in itertools.product(range(VOCABULARY), repeat=2):
        out[x, y] = mixed[1, 2, x] * mixed[2, x, y]
    return out


def _p_value(accept: str, runs: int) -> float:
    engine = Engine(TableModel(TARGET), drafters=[ModelDrafter(TableModel(DRAFT))])
    session, counts = engine.new_session(), np.zeros((VOCABULARY,) * 2)
    for seed in range(runs):
        settings = Settings(max_tokens=2, seed=seed, accept=accept, draft_length=1, **SETTINGS)  # type: ignore[arg-type]
        counts[tuple(engine.generation(session, [1, 2], settings).run().ids)] += 1
    return chi_square(counts, _pairs())


@pytest.mark.parametrize("accept", ["coupled", "rejection"])
def test_joint_distribution_of_two_tokens(accept: str) -> None:
    """600 runs over 25 strings. Odds of a false alarm: 1e-6 each."""
    assert _p_value(accept, 600) > FALSE_ALARM


def test_joint_distribution_finds_a_coin_shared_by_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    coins = Draw.coins
    monkeypatch.setattr(Draw, "coins", lambda self, position, rows: mx.repeat(coins(self, 0, 1), rows))
    assert _p_value("coupled", 300) < FALSE_ALARM
