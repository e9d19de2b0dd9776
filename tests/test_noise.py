"""Noise is a function of (seed, stream, position, id), with known answers, and distributed as it says."""

from __future__ import annotations

import math
import random
import threading

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from odds import FALSE_ALARM, chi_square, chi_square_tail, kolmogorov_smirnov

from localspec.noise import Noise, Stream, bits, fresh_seed, gumbel, threefry, uniform

KNOWN = [  # Random123's kat_vectors, threefry2x32 with 20 rounds: counter, key, answer
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


def _array(*values: int) -> mx.array:
    return mx.array(np.array(values, np.uint32))


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_threefry_known_answers(counter: tuple[int, int], key: tuple[int, int], answer: tuple[int, int]) -> None:
    words = threefry(key, (_array(counter[0]), _array(counter[1])))
    assert tuple(int(word.item()) for word in words) == answer


def _reference(seed: int, stream: int, position: int, token: int) -> int:
    """One word in plain Python integers, from the paper's description and the layout in the module's docstring."""
    mask = 0xFFFFFFFF
    key = [seed & mask, seed >> 32]
    key.append(key[0] ^ key[1] ^ 0x1BD11BDA)
    x = [((stream << 24 | token >> 1) + key[0]) & mask, (position + key[1]) & mask]
    for r in range(20):
        rotation = (13, 15, 26, 6, 17, 29, 16, 24)[r % 8]
        x[0] = (x[0] + x[1]) & mask
        x[1] = ((x[1] << rotation | x[1] >> (32 - rotation)) & mask) ^ x[0]
        if r % 4 == 3:
            s = r // 4 + 1
            x[0] = (x[0] + key[s % 3]) & mask
            x[1] = (x[1] + key[(s + 1) % 3] + s) & mask
    return x[token & 1]


@given(
    seed=st.integers(0, 2**64 - 1),
    stream=st.sampled_from(Stream),
    positions=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=3),
    size=st.integers(1, 9),
)
def test_words_equal_a_scalar_reference(seed: int, stream: Stream, positions: list[int], size: int) -> None:
    words = bits(seed, stream, positions, size).tolist()
    assert words == [[_reference(seed, stream, p, i) for i in range(size)] for p in positions]


def test_a_number_does_not_depend_on_how_many_are_asked_for() -> None:
    """Neither the words nor the Gumbel values, bit for bit: batch shape, order, vocabulary size, and parity."""
    seed, positions = 20240607, [0, 1, 2, 77, 4095, 2**31 + 5]
    whole = Noise(seed).gumbel(positions, 1031)
    for size in (1, 2, 3, 7, 8, 15, 16, 17, 500, 1030):
        assert mx.array_equal(Noise(seed).gumbel(positions, size), whole[:, :size]), size
    for i, position in enumerate(positions):
        assert mx.array_equal(Noise(seed).gumbel([position], 1031)[0], whole[i])
        assert mx.array_equal(gumbel(bits(seed, Stream.GUMBEL, positions, 1031))[i], whole[i])
    coins = Noise(seed).uniform(positions)
    assert [Noise(seed).uniform([p]).item() for p in positions] == coins.tolist()


def test_a_number_does_not_depend_on_what_was_asked_before() -> None:
    forth, back = Noise(5), Noise(5)
    order = list(range(200))  # more than are remembered
    first = {p: forth.gumbel([p], 33).tolist() for p in order}
    random.Random(1).shuffle(order)
    for p in order:
        back.uniform([p])
        back.gumbel([p], 33, Stream.RESIDUAL)
        back.gumbel([p], 32)
        assert back.gumbel([p], 33).tolist() == first[p]


def test_a_number_does_not_depend_on_the_thread_or_on_global_random_state() -> None:
    here = Noise(9).gumbel([3, 4], 100).tolist()
    mx.random.seed(123)
    found: list[list[list[float]]] = []

    def work() -> None:
        mx.random.seed(77)
        found.append(Noise(9).gumbel([3, 4], 100).tolist())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [here] * 3
    before = mx.random.state[0].tolist()
    Noise(10).gumbel([3], 100)
    assert mx.random.state[0].tolist() == before


def test_seed_stream_position_and_id_each_matter() -> None:
    """Rows that should be unrelated agree at no place and do not correlate.

    Odds of a false alarm: 4 x 4096 x 2^-32 = 4e-6 for the places, 4 x 2e-9 for the correlations.
    """
    base = np.array(bits(1, Stream.GUMBEL, [10], 4096))[0]
    others = {
        "seed": bits(2, Stream.GUMBEL, [10], 4096),
        "high half of the seed": bits(1 + 2**32, Stream.GUMBEL, [10], 4096),
        "stream": bits(1, Stream.RESIDUAL, [10], 4096),
        "position": bits(1, Stream.GUMBEL, [11], 4096),
    }
    for name, row in others.items():
        other = np.array(row)[0]
        assert (base == other).sum() == 0, name
        correlation = float(np.corrcoef(base.astype(np.float64), other.astype(np.float64))[0, 1])
        assert abs(correlation) < 6 / math.sqrt(4096), name  # six standard deviations: 2e-9
    assert len(set(base.tolist())) > 4090


def test_neither_end_is_infinite() -> None:
    ends = _array(0, 1, 2**31, 2**32 - 2, 2**32 - 1)
    u = np.array(uniform(ends))
    assert (u > 0).all()
    assert (u < 1).all()
    g = np.array(gumbel(ends))
    assert np.isfinite(g).all()
    # Increasing in the word, and with a tail as heavy as 32 bits allow (24 bits would end at 16.6).
    assert (np.diff(g) >= 0).all() or (np.diff(g) <= 0).all()
    assert g.max() > 22
    assert g.min() < -2.7


def test_the_winning_tail_has_full_resolution() -> None:
    """Neighbouring words at the winners' end give different Gumbel values; -log(-log u) in float32 would not."""
    rising = np.array(gumbel(_array(*range(64))), np.float64)
    assert len(set(np.round(rising, 6))) == 64
    exact = [-math.log(-math.log1p(-(word + 0.5) * 2.0**-32)) for word in range(64)]
    assert np.allclose(rising, exact, rtol=1e-6)
    u = np.float32(1) - (np.arange(64, dtype=np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    with np.errstate(divide="ignore"):
        naive = -np.log(-np.log(u))
    assert len(set(naive.tolist())) < 8


def _gumbel_p_values(values: np.ndarray) -> tuple[float, float, float]:
    """p-values: Kolmogorov-Smirnov, mean, variance; of values that should be standard Gumbel."""
    n = len(values)
    ks = kolmogorov_smirnov(np.exp(-np.exp(-values.astype(np.float64))))
    mean_z = (values.mean() - 0.5772156649) / (math.pi / math.sqrt(6 * n))
    # The fourth central moment of the Gumbel distribution is 3 pi^4 / 20.
    variance, fourth = math.pi**2 / 6, 3 * math.pi**4 / 20
    variance_z = (values.var() - variance) / math.sqrt((fourth - variance**2) / n)
    return ks, math.erfc(abs(mean_z) / math.sqrt(2)), math.erfc(abs(variance_z) / math.sqrt(2))


def test_gumbel_distribution_over_ids_and_over_positions() -> None:
    """200,000 values each way. Odds of a false alarm: 6 checks at 1e-6."""
    across = np.array(gumbel(bits(11, Stream.GUMBEL, range(100), 2000))).ravel()
    along = np.array(gumbel(bits(2**40 + 11, Stream.DRAFT, range(100_000), 2))).ravel()
    for values in (across, along):
        assert min(_gumbel_p_values(values)) > FALSE_ALARM
    # The check has the power to see the classic slips: noise of the wrong sign, a logistic, a scale off by 3 %.
    u = np.random.default_rng(0).random(200_000)
    for wrong in (-across, np.log(u / (1 - u)), across * 1.03):
        assert min(_gumbel_p_values(wrong)) < FALSE_ALARM


def test_coins_are_uniform_and_independent_of_their_neighbours() -> None:
    """100,000 coins in 100 cells, and pairs of neighbours in 10 x 10 cells. Odds of a false alarm: 3 checks at 1e-6."""
    coins = np.array(Noise(3).uniform(range(100_000)), np.float64)
    assert chi_square(np.histogram(coins, 100, (0, 1))[0], np.full(100, 0.01)) > FALSE_ALARM
    assert kolmogorov_smirnov(coins) > FALSE_ALARM
    pairs = np.histogram2d(coins[:-1], coins[1:], 10, ((0, 1), (0, 1)))[0]
    assert chi_square(pairs, np.full(100, 0.01)) > FALSE_ALARM
    wrong = np.where(coins < 0.02, 0.5, coins)
    assert chi_square(np.histogram(wrong, 100, (0, 1))[0], np.full(100, 0.01)) < FALSE_ALARM
    assert kolmogorov_smirnov(coins**1.03) < FALSE_ALARM


def test_every_bit_is_fair() -> None:
    """Each of 32 bits over 100,000 words within six standard deviations. Odds of a false alarm: 32 x 2e-9."""
    words = np.array(bits(4, Stream.COIN, range(1000), 100)).ravel()
    for bit in range(32):
        ones = int((words >> bit & 1).sum())
        assert abs(ones - 50_000) < 6 * math.sqrt(25_000), bit


def test_a_fresh_seed_varies_and_is_short() -> None:
    """Odds of a false alarm (a repetition among ten of 2^32): 1e-8."""
    seeds = {fresh_seed() for _ in range(10)}
    assert len(seeds) == 10
    assert all(0 <= seed < 2**32 for seed in seeds)


@pytest.mark.parametrize(
    ("statistic", "freedom", "tail"),
    [(3.841458820694124, 1, 0.05), (18.307038053275146, 10, 0.05), (67.50480654, 50, 0.05), (149.4492528, 100, 1e-3)],
)
def test_the_ruler_itself(statistic: float, freedom: int, tail: float) -> None:
    """The chi-square tail used by all these tests, against printed tables."""
    assert chi_square_tail(statistic, freedom) == pytest.approx(tail, rel=1e-5)
