"""The token rules, coupled and rejection, leave the target's distribution as it is: by exact integration.

Block verification has its own file, the engine around the rules too (`test_block.py`, `test_joint.py`).

Every check must also reject planted wrong rules (the table in the papers' errata of practice): a check that passes
everything proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from odds import FALSE_ALARM, chi_square

from localspec.acceptance import accept_coupled, accept_rejection, draw, residual
from localspec.noise import Stream, bits, gumbel

JUST_UNDER_1 = float(np.nextafter(np.float32(1), np.float32(0)))


def _pair(seed: int, vocabulary: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """A random target and draft distribution, float32, as softmax gives them."""
    keys = mx.random.split(mx.random.key(seed))
    p, q = (mx.softmax(mx.random.normal((vocabulary,), key=key) * 1.5) for key in keys)
    return np.array(p), np.array(q)


def _filtered(p: np.ndarray, k: int) -> np.ndarray:
    kept = np.where(p >= np.sort(p)[-k], p, 0)
    return (kept / kept.sum()).astype(np.float32)


PAIRS = [_pair(seed) for seed in range(20)]
PAIRS += [(_filtered(p, 5), q) for p, q in PAIRS[:3]]  # the target filters, the draft does not
PAIRS += [(p, _filtered(q, 5)) for p, q in PAIRS[:3]]
PAIRS += [(PAIRS[0][0], PAIRS[0][0])]  # p equals q
PAIRS += [(_filtered(PAIRS[0][0], 3), _filtered(PAIRS[1][1], 3))]  # little or nothing in common

Accept = Callable[[mx.array, "mx.array | None", mx.array, mx.array], mx.array]
Residual = Callable[[mx.array, "mx.array | None", mx.array], mx.array]


def _chance_of_passing(accept: Accept, p: np.ndarray, q: np.ndarray | None, draft: int) -> float:
    """The exact measure of the coins that pass, found by bisection: a pass must be an interval that starts at 0."""
    n = 48
    low, high = 0.0, 1.0
    ps, qs = mx.array(np.tile(p, (n, 1))), None if q is None else mx.array(np.tile(q, (n, 1)))
    for _ in range(6):
        grid = np.linspace(low, high, n, dtype=np.float64)
        coins = np.minimum(grid, JUST_UNDER_1).astype(np.float32)
        passed = np.array(accept(ps, qs, mx.full((n,), draft, mx.uint32), mx.array(coins)))
        count = int(passed.sum())
        assert passed[:count].all()
        if count == n:
            return 1.0 if high == 1.0 else (low + high) / 2
        if count == 0:
            return 0.0 if low == 0.0 else (low + high) / 2
        low, high = float(grid[count - 1]), float(grid[count])
    return (low + high) / 2


def _output(p: np.ndarray, q: np.ndarray, accept: Accept, left: Residual, drawn_from: np.ndarray) -> np.ndarray:
    """P(the token that comes out), every draft and coin integrated; drafts come from `drawn_from`, q is reported."""
    out = np.zeros(len(p), np.float64)
    ids = np.flatnonzero(drawn_from)
    one_hot = q.max() == 1.0
    reported = None if one_hot else q
    for draft in ids:
        chance = _chance_of_passing(accept, p, reported, int(draft))
        out[draft] += drawn_from[draft] * chance
        if chance < 1:
            rest = np.array(
                left(mx.array(p), None if reported is None else mx.array(reported), mx.array(draft)), np.float64
            )
            out += drawn_from[draft] * (1 - chance) * rest / rest.sum()
    return out


def _distance(p: np.ndarray, out: np.ndarray) -> float:
    return float(np.abs(out - p).sum() / 2)


EXACT = 2e-6
"""Total variation that float32 rounding of p and q can make."""


@pytest.mark.parametrize("index", range(len(PAIRS)))
def test_rejection_with_a_sampled_draft_is_exact(index: int) -> None:
    p, q = PAIRS[index]
    assert _distance(p, _output(p, q, accept_rejection, residual, q.astype(np.float64) / q.sum())) < EXACT


def test_rejection_with_a_deterministic_draft_is_exact() -> None:
    for p, _ in PAIRS[:3]:
        for draft in (int(p.argmax()), int(p.argmin()), 7):
            q = np.eye(len(p), dtype=np.float32)[draft]
            assert _distance(p, _output(p, q, accept_rejection, residual, q.astype(np.float64))) < EXACT


def _redraw_from_p(p: mx.array, q: mx.array | None, draft: mx.array) -> mx.array:
    return p


def _by_argmax(p: mx.array, q: mx.array | None, draft: mx.array) -> mx.array:
    return (mx.arange(p.size) == mx.argmax(residual(p, q, draft))).astype(mx.float32)


def _always(p: mx.array, q: mx.array | None, drafts: mx.array, coins: mx.array) -> mx.array:
    return mx.ones(coins.shape, mx.bool_)


def _target_only(p: mx.array, q: mx.array | None, drafts: mx.array, coins: mx.array) -> mx.array:
    return accept_rejection(p, None, drafts, coins)


def _wrong_rules(p: np.ndarray, q: np.ndarray) -> dict[str, np.ndarray]:
    drawn = q.astype(np.float64) / q.sum()
    greedy = np.eye(len(q))[q.argmax()]
    top = _filtered(q, 10).astype(np.float64)
    return {
        "accept p/q, on rejection draw from p": _output(p, q, accept_rejection, _redraw_from_p, drawn),
        "greedy draft scored with its soft q": _output(p, q, accept_rejection, residual, greedy),
        "draft drawn from the top 10, ratio with unfiltered q": _output(p, q, accept_rejection, residual, top),
        "residual by argmax": _output(p, q, accept_rejection, _by_argmax, drawn),
        "always accept": _output(p, q, _always, residual, drawn),
        "accept with p, not p/q, residual of q": _output(p, q, _target_only, residual, drawn),
    }


def test_planted_wrong_rules_are_found() -> None:
    """On each of five pairs, by the very check that the right rule passes, and with the known size of the error."""
    found: dict[str, list[float]] = {}
    for p, q in PAIRS[:5]:
        for name, out in _wrong_rules(p, q).items():
            assert abs(out.sum() - 1) < 1e-5
            found.setdefault(name, []).append(_distance(p, out))
    for name, distances in found.items():
        assert min(distances) > 100 * EXACT, name


def test_coins_at_both_ends() -> None:
    p = mx.array([[0.0, 0.5, 0.5, 0.0]] * 4)
    q = mx.array([[0.25, 0.25, 0.5, 0.0]] * 4)
    zero, top = mx.zeros((4,)), mx.full((4,), JUST_UNDER_1)
    drafts = mx.array([0, 1, 2, 3], mx.uint32)
    # Impossible tokens do not pass even a coin of exactly 0; possible ones do.
    assert accept_rejection(p, q, drafts, zero).tolist() == [False, True, True, False]
    assert accept_rejection(p, None, drafts, zero).tolist() == [False, True, True, False]
    # p >= q passes even the largest coin; a certain token passes it as a deterministic draft.
    assert accept_rejection(p, q, drafts, top).tolist() == [False, True, True, False]
    assert accept_rejection(p, None, drafts, top).tolist() == [False, False, False, False]
    certain = mx.array([[0.0, 1.0]])
    assert accept_rejection(certain, None, mx.array([1]), top[:1]).tolist() == [True]
    assert accept_rejection(certain, None, mx.array([0]), zero[:1]).tolist() == [False]


def test_p_equal_to_q_always_passes_and_leaves_no_uniform_draw() -> None:
    p = mx.softmax(mx.random.normal((6, 40), key=mx.random.key(1)))
    drafts = mx.array([0, 3, 5, 9, 39, 20], mx.uint32)
    assert accept_rejection(p, p, drafts, mx.full((6,), JUST_UNDER_1)).all().item()
    # A residual of zero can only be asked for through rounding: it is p then, not uniform, not NaN.
    assert mx.array_equal(residual(p[0], p[0], mx.array(3)), p[0])
    one_hot = mx.array([0.0, 1.0, 0.0])
    assert mx.array_equal(residual(one_hot, None, mx.array(1)), one_hot)


def test_draw_never_gives_a_token_without_weight() -> None:
    noise = mx.array([9.0, 22.8, -2.8])
    assert draw(mx.array([1e-30, 0.0, 0.0]), noise).item() == 0
    assert draw(mx.array([0.0, 0.0, 1.0]), noise).item() == 2
    weights = mx.array([[0.2, 0.0, 0.3, 0.5]] * 2000)
    counts = np.bincount(np.array(draw(weights, gumbel(bits(1, Stream.RESIDUAL, range(2000), 4)))), minlength=4)
    assert counts[1] == 0
    assert chi_square(counts, [0.2, 0, 0.3, 0.5]) > FALSE_ALARM  # odds of a false alarm: 1e-6


def test_inputs_are_unchanged() -> None:
    """One implementation zeroed the target's probabilities in place before they were copied."""
    p, q = (mx.array(np.tile(x, (3, 1))) for x in PAIRS[0])
    before = p.tolist(), q.tolist()
    drafts, coins = mx.array([1, 2, 3], mx.uint32), mx.array([0.1, 0.9, 0.5])
    accept_rejection(p, q, drafts, coins)
    accept_rejection(p, None, drafts, coins)
    residual(p[0], q[0], drafts[0])
    residual(p[0], None, drafts[0])
    draw(p, q)
    assert (p.tolist(), q.tolist()) == before
    assert drafts.tolist() == [1, 2, 3]


def test_more_target_rows_than_drafts_are_not_read() -> None:
    p, q = (mx.array(np.tile(x, (3, 1))) for x in PAIRS[0])
    bonus = mx.concatenate([p, mx.full((1, 50), math.nan)])
    drafts, coins = mx.array([1, 2, 3], mx.uint32), mx.array([0.1, 0.9, 0.5])
    assert mx.array_equal(accept_rejection(bonus, q, drafts, coins), accept_rejection(p, q, drafts, coins))


def test_coupled_counts_the_leading_agreement() -> None:
    for n in range(5):
        for agreeing in range(n + 1):
            tokens = list(range(10, 10 + n + 1))
            drafts = [t if i < agreeing else t + 100 for i, t in enumerate(tokens[:-1])]
            assert accept_coupled(tokens, drafts) == agreeing
    assert accept_coupled([1, 2, 3], [9, 2]) == 0  # later agreement behind a wrong draft does not count


def test_coupled_draws_follow_the_target_whatever_the_draft_and_agree_often() -> None:
    """200,000 draws with shared noise: the emitted token's marginal is p, drafts agree as theory says they must.

    Odds of a false alarm: 2 checks at 1e-6, and a bound (Daliri et al.: P(differ) <= 2 TV / (1 + TV)) at six standard
    deviations. Mutants: emit the draft where p gives it more than 0.05 (changes p); draft with noise of its own (agrees
    less).
    """
    p, q = _pair(3, 10)
    n = 200_000
    noise = gumbel(bits(5, Stream.GUMBEL, range(n), 10))
    target = np.array(mx.argmax(mx.log(mx.array(p)) + noise, axis=-1))
    draft = np.array(mx.argmax(mx.log(mx.array(q)) + noise, axis=-1))
    emitted = [
        t if accept_coupled([t, 0], [d]) == 0 else d for t, d in zip(target.tolist(), draft.tolist(), strict=True)
    ]
    assert chi_square(np.bincount(emitted, minlength=10), p) > FALSE_ALARM
    assert chi_square(np.bincount(draft, minlength=10), q) > FALSE_ALARM
    distance = float(np.abs(p - q).sum() / 2)
    bound = 1 - 2 * distance / (1 + distance)
    agreement = float((target == draft).mean())
    assert bound - 6 * math.sqrt(0.25 / n) < agreement <= 1 - distance + 6 * math.sqrt(0.25 / n)
    lenient = np.where(p[draft] > 0.05, draft, target)
    assert chi_square(np.bincount(lenient, minlength=10), p) < FALSE_ALARM
    own = np.array(mx.argmax(mx.log(mx.array(q)) + gumbel(bits(6, Stream.DRAFT, range(n), 10)), axis=-1))
    assert float((target == own).mean()) < bound - 6 * math.sqrt(0.25 / n)
