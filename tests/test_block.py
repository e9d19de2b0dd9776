"""Block verification by exact enumeration: every draft, every outcome of the coins, every string that comes out.

Small vocabularies and drafts of one to three tokens, target and draft both dependent on the context. The coins are
independent and draft i passes with chance h_i, so the chance that exactly k drafts are kept is h_k times the product of
the later 1 - h_i: nothing is sampled here, and nothing can fail by chance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest

from localspec.acceptance import accept_block, accept_rejection, block_chances, block_weights, residual

JUST_UNDER_1 = float(np.nextafter(np.float32(1), np.float32(0)))
EXACT = 1e-6
"""Total variation that float32 rounding may make."""


@dataclass(frozen=True)
class Tables:
    """Rows of the target and the draft for every context: `p[k][x_1, ..., x_k]` is a distribution, float32."""

    p: list[np.ndarray]
    q: list[np.ndarray]
    drawn: list[np.ndarray] | None = None
    """What drafts are really drawn from; None means q."""

    @property
    def length(self) -> int:
        return len(self.q)

    @property
    def vocabulary(self) -> int:
        return len(self.p[0])

    def drafts(self) -> list[tuple[tuple[int, ...], float]]:
        """Every draft that can be drawn, with its probability."""
        found = []
        for draft in itertools.product(range(self.vocabulary), repeat=self.length):
            chance = math.prod(float(row[draft[: i + 1]]) for i, row in enumerate(self.drawn or self.q))
            if chance > 0:
                found.append((draft, chance))
        return found

    def rows(self, draft: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """p [n+1, vocabulary] and q [n, vocabulary] along a draft."""
        p = np.stack([row[draft[:i]] for i, row in enumerate(self.p)])
        return p, np.stack([row[draft[:i]] for i, row in enumerate(self.q)])

    def behind(self, kept: int) -> np.ndarray:
        """The target's probability of all tokens of a string behind its first `kept`, for every string."""
        n = self.length + 1
        whole = np.ones((self.vocabulary,) * n)
        for row in self.p[kept:]:
            whole = whole * row.astype(np.float64).reshape(row.shape + (1,) * (n - row.ndim))
        return whole


def _softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return (e / e.sum(axis=-1, keepdims=True)).astype(np.float32)


def _top(p: np.ndarray, k: int) -> np.ndarray:
    kept = np.where(p >= np.sort(p, axis=-1)[..., -k, None], p, 0)
    return (kept / kept.sum(axis=-1, keepdims=True)).astype(np.float32)


def tables(seed: int, vocabulary: int = 3, length: int = 3, spread: float = 1.5) -> Tables:
    rng = np.random.default_rng(seed)
    shapes = [(vocabulary,) * (k + 1) for k in range(length + 1)]
    p = [_softmax(rng.normal(0, spread, shape)) for shape in shapes]
    return Tables(p, [_softmax(rng.normal(0, spread, shape)) for shape in shapes[:-1]])


def _cases() -> dict[str, Tables]:
    cases = {
        f"vocabulary {vocabulary}, length {length}, {seed}": tables(seed, vocabulary, length)
        for vocabulary, length, seeds in ((3, 1, 3), (4, 1, 3), (3, 2, 10), (4, 2, 10), (3, 3, 20), (4, 3, 4))
        for seed in range(seeds)
    }
    base = cases["vocabulary 3, length 3, 0"]
    wide = cases["vocabulary 4, length 2, 0"]
    cases["a filtered target"] = replace(wide, p=[_top(row, 2) for row in wide.p])
    cases["a filtered draft"] = replace(wide, q=[_top(row, 2) for row in wide.q])
    cases["both filtered, each for itself"] = replace(
        base, p=[_top(r, 2) for r in base.p], q=[_top(r, 2) for r in base.q]
    )
    cases["p is q"] = replace(base, q=base.p[:-1])
    cases["p is q behind the first draft"] = replace(base, q=[base.q[0], *base.p[1:-1]])
    cases["p is q but for the last draft"] = replace(base, q=[*base.p[:-2], base.q[-1]])
    cases["p and q all but certain"] = tables(5, 3, 3, spread=12.0)
    never = [np.eye(3, dtype=np.float32)[0] * np.ones(row.shape, np.float32) for row in base.p]
    cases["a draft that is never right"] = Tables(never, [np.roll(row, 1, axis=-1) for row in never[:-1]])
    cases["a draft that is always right"] = Tables(never, never[:-1])
    return cases


CASES = _cases()


@dataclass(frozen=True)
class Rule:
    """A way to judge a draft: the right one, and wrong ones by the part that is exchanged."""

    chances: Callable[[mx.array, mx.array | None, mx.array], mx.array] = block_chances
    """h, [n]."""
    weights: Callable[[mx.array, mx.array | None, mx.array], mx.array] = block_weights
    """w, [n+1]: the share of p in the residual."""
    left: Callable[[mx.array, mx.array | None, mx.array], mx.array] = residual
    first_failure: bool = False
    """Stop at the first coin that fails, as the token rule does, instead of taking the last that passes."""

    def judge(self, p: np.ndarray, q: np.ndarray | None, draft: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """P(k drafts kept), [n+1], and the distribution of the next token then, [n+1, vocabulary]."""
        ps, qs, ids = mx.array(p), None if q is None else mx.array(q), mx.array(draft, mx.uint32)
        h = np.clip(np.array(self.chances(ps, qs, ids), np.float64), 0, 1)
        n = len(draft)
        if self.first_failure:
            kept = [math.prod(h[:k]) * (1 - h[k] if k < n else 1) for k in range(n + 1)]
        else:
            kept = [(h[k - 1] if k else 1) * math.prod(1 - h[k:]) for k in range(n + 1)]
        w = self.weights(ps, qs, ids)
        rest = [self.left(w[k] * ps[k], None if qs is None else qs[k], ids[k]) for k in range(n)]
        following = np.array(mx.stack([*rest, ps[n]]), np.float64)
        total = following.sum(axis=-1, keepdims=True)
        assert (total[np.array(kept) > 0] > 0).all()
        return np.array(kept), np.divide(following, total, out=np.zeros_like(following), where=total > 0)


BLOCK = Rule()


def outcome(case: Tables, rule: Rule, *, one_hot: bool = False) -> tuple[np.ndarray, float]:
    """(P(string) for all strings of n+1 tokens, expected number of drafts kept).

    What a round leaves open of the n+1 tokens is the target's, as later rounds give it.
    """
    strings = np.zeros((case.vocabulary,) * (case.length + 1))
    expected = 0.0
    behind = [case.behind(k) for k in range(case.length + 2)]
    for draft, chance in case.drafts():
        p, q = case.rows(draft)
        kept, following = rule.judge(p, None if one_hot else q, draft)
        for k in range(case.length + 1):
            prefix = draft[:k]
            later = behind[k + 1][prefix]
            strings[prefix] += chance * kept[k] * following[k].reshape(-1, *[1] * (later.ndim - 1)) * later
        expected += chance * float(kept @ np.arange(case.length + 1))
    return strings, expected


def distance(case: Tables, strings: np.ndarray) -> float:
    assert abs(strings.sum() - 1) < 1e-5
    return float(np.abs(strings - case.behind(0)).sum() / 2)


def token_rule(case: Tables) -> float:
    """Expected number of drafts that the token rule keeps: it stops at the first failure."""
    total = 0.0
    for draft, chance in case.drafts():
        p, q = case.rows(draft)
        ratios = [min(1.0, float(p[i, x]) / float(q[i, x])) for i, x in enumerate(draft)]
        total += chance * sum(math.prod(ratios[: i + 1]) for i in range(case.length))
    return total


@pytest.mark.parametrize("name", CASES)
def test_strings_are_the_targets_and_no_fewer_drafts_are_kept_than_by_the_token_rule(name: str) -> None:
    case = CASES[name]
    strings, expected = outcome(case, BLOCK)
    assert distance(case, strings) < EXACT
    assert expected >= token_rule(case) - EXACT
    if case.length == 1:
        assert expected == pytest.approx(token_rule(case), abs=EXACT)  # one draft: the same rule


def test_random_drafts_of_several_tokens_are_kept_longer() -> None:
    gains = [
        outcome(case, BLOCK)[1] / token_rule(case) for name, case in CASES.items() if name.startswith("vocabulary")
    ]
    several = [gain for gain in gains if abs(gain - 1) > EXACT]
    assert len(several) >= 40
    assert min(several) > 1


def test_the_example_of_the_paper() -> None:
    """Two tokens, whatever the context: the target has 1/3 and 2/3, the draft 2/3 and 1/3 (Sun et al. 2024, section 2).

    Of two drafts the token rule keeps 10/9, block verification 11/9.
    """
    p, q = np.array([1, 2]) / 3, np.array([2, 1]) / 3
    case = Tables([np.broadcast_to(p, (2,) * k).astype(np.float32) for k in (1, 2, 3)],
                  [np.broadcast_to(q, (2,) * k).astype(np.float32) for k in (1, 2)])  # fmt: skip
    strings, expected = outcome(case, BLOCK)
    assert distance(case, strings) < EXACT
    assert token_rule(case) == pytest.approx(10 / 9, abs=EXACT)
    assert expected == pytest.approx(11 / 9, abs=EXACT)


@pytest.mark.parametrize("name", [name for name in CASES if "length 1" not in name])
def test_a_deterministic_draft_is_judged_as_by_the_token_rule(name: str) -> None:
    """The same chance of keeping k drafts, and the same token behind them."""
    case = CASES[name]
    for draft in itertools.product(range(case.vocabulary), repeat=case.length):
        p, _ = case.rows(draft)
        kept, following = BLOCK.judge(p, None, draft)
        passing = [float(p[i, x]) for i, x in enumerate(draft)]
        for k in range(case.length + 1):
            stops = 1 - passing[k] if k < case.length else 1
            assert kept[k] == pytest.approx(math.prod(passing[:k]) * stops, abs=EXACT)
            if k < case.length and kept[k] > EXACT:
                assert following[k] == pytest.approx(
                    np.where(np.arange(case.vocabulary) == draft[k], 0, p[k]) / stops, abs=1e-5
                )
        one_hot = np.eye(case.vocabulary, dtype=np.float32)[list(draft)]
        told, behind = BLOCK.judge(p, one_hot, draft)  # the same, said as a distribution
        assert told == pytest.approx(kept, abs=EXACT)
        assert behind[kept > EXACT] == pytest.approx(following[kept > EXACT], abs=1e-5)


# Planted wrong rules: each must be found by the very check that the right rule passes.


def _unclipped(p: mx.array, q: mx.array | None, drafts: mx.array) -> mx.array:
    assert q is not None
    ratios = [p[i, x].item() / q[i, x].item() for i, x in enumerate(drafts.tolist())]  # type: ignore[arg-type, index, union-attr]
    return mx.array([1.0, *np.cumprod(ratios)], mx.float32)


def _chances_of(
    weights: Callable[[mx.array, mx.array | None, mx.array], mx.array] = block_weights, *, doubt: bool = True
) -> Callable[[mx.array, mx.array | None, mx.array], mx.array]:
    """h from other weights, or as Z / (Z + 1)."""

    def chances(p: mx.array, q: mx.array | None, drafts: mx.array) -> mx.array:
        assert q is not None
        n, w = drafts.size, weights(p, q, drafts)
        left = mx.maximum(w[1:n, None] * p[1:n] - q[1:n], 0.0).sum(axis=-1)
        rest = mx.maximum(1 - w[1:n], 0.0) if doubt else mx.array(1.0)
        return mx.concatenate([mx.where(left + rest == 0, 1.0, left / (left + rest)), w[n:]])

    return chances


def _always(p: mx.array, q: mx.array | None, drafts: mx.array) -> mx.array:
    return mx.ones(drafts.shape)


def _all_of_p(p: mx.array, q: mx.array | None, draft: mx.array) -> mx.array:
    return p


def _by_argmax(p: mx.array, q: mx.array | None, draft: mx.array) -> mx.array:
    return (mx.arange(p.size) == mx.argmax(residual(p, q, draft))).astype(mx.float32)


def _weights_of_1(p: mx.array, q: mx.array | None, drafts: mx.array) -> mx.array:
    return mx.ones((drafts.size + 1,))


def _last_chance_of_1(p: mx.array, q: mx.array | None, drafts: mx.array) -> mx.array:
    return mx.concatenate([block_chances(p, q, drafts)[:-1], mx.ones((1,))])


WRONG = {
    "on rejection draw from p": Rule(left=_all_of_p),
    "residual by argmax": Rule(left=_by_argmax),
    "always accept": Rule(chances=_always),
    "residual of p - q, not w p - q": Rule(weights=_weights_of_1),
    "h without 1 - w": Rule(chances=_chances_of(doubt=False)),
    "w without the minimum": Rule(chances=_chances_of(_unclipped), weights=_unclipped),
    "h without the minimum in w, the residual with it": Rule(chances=_chances_of(_unclipped)),
    "stop at the first failure": Rule(first_failure=True),
    "the last draft always kept": Rule(chances=_last_chance_of_1),
}


def test_the_wrong_rules_are_made_of_right_parts() -> None:
    """The rewritten parts, with nothing exchanged in them, are the right rule."""
    case = CASES["vocabulary 3, length 3, 0"]
    assert distance(case, outcome(case, Rule(chances=_chances_of()))[0]) < EXACT


@pytest.mark.parametrize("name", WRONG)
def test_planted_wrong_rules_are_found(name: str) -> None:
    for seed in range(5):
        case = tables(seed)
        assert distance(case, outcome(case, WRONG[name])[0]) > 20 * EXACT


@pytest.mark.parametrize("drawn", ["greedy", "top 2"])
def test_drafts_drawn_from_something_else_than_q_are_found(drawn: str) -> None:
    for seed in range(5):
        case = tables(seed)
        other = replace(case, drawn=[_top(row, 1 if drawn == "greedy" else 2) for row in case.q])
        assert distance(other, outcome(other, BLOCK)[0]) > 100 * EXACT
        told = replace(other, q=other.drawn)
        assert distance(told, outcome(told, BLOCK)[0]) < EXACT


def test_numbers_of_one_round_used_again_in_the_next_would_be_found() -> None:
    """Why keys belong to rounds (`noise.round_keys`): else the second token is off by 3 %, here without any context.

    Two drafts, none kept. With the same noise and the same q the next round's draft is x_2 again, and its coin is known
    to have been at least min(w_1 p/q, 1) at x_2; so x_2 passes now with the rest of min(p/q, 1), and the residual of
    that round adds (p - q)+. With numbers of its own that round's token would be drawn from p.
    """
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.1, 0.6, 0.3])
    rows = mx.array(np.stack([p] * 3).astype(np.float32)), mx.array(np.stack([q] * 2).astype(np.float32))
    again, fresh = np.zeros(3), np.zeros(3)
    for x in range(3):
        drafts = mx.array([x, 0], mx.uint32)
        w, h = (np.array(f(*rows, drafts), np.float64) for f in (block_weights, block_chances))
        kept = np.minimum(w[1] * p, q)
        again += q[x] * (1 - h[0]) * (np.minimum(p, q) - kept + np.maximum(p - q, 0))
        fresh += q[x] * (1 - h[0]) * (1 - kept.sum()) * p
    assert again.sum() == pytest.approx(fresh.sum(), abs=1e-6)
    assert np.abs(again - fresh).sum() / 2 == pytest.approx(0.03, abs=1e-3)


# Numbers at the edges.


def _along(case: Tables, draft: tuple[int, ...]) -> tuple[mx.array, mx.array, mx.array]:
    p, q = case.rows(draft)
    return mx.array(p), mx.array(q), mx.array(draft, mx.uint32)


def test_a_coin_passes_below_its_chance_only() -> None:
    for seed in range(5):
        p, q, drafts = _along(tables(seed), (0, 2, 1))
        for given in (q, None):
            h = np.array(block_chances(p, given, drafts))
            assert ((h >= 0) & (h <= 1)).all()
            possible = (h > 0).tolist()
            below = np.nextafter(h, np.float32(0))
            assert any(possible)
            assert accept_block(p, given, drafts, mx.array(below)).tolist() == possible
            assert accept_block(p, given, drafts, mx.array(h)).tolist() == [False] * 3
            assert accept_block(p, given, drafts, mx.zeros((3,))).tolist() == possible


def test_a_coin_of_0_keeps_nothing_that_is_impossible_and_the_largest_keeps_what_is_certain() -> None:
    p = mx.array([[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.2, 0.3, 0.5]])
    q = mx.array([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]])
    zero, top = mx.zeros((2,)), mx.full((2,), JUST_UNDER_1)
    for given in (q, None):
        impossible_first, impossible_last = mx.array([2, 0], mx.uint32), mx.array([0, 1], mx.uint32)
        assert accept_block(p, given, impossible_first, zero).tolist() == [False, False]
        assert accept_block(p, given, impossible_last, zero).tolist() == [True, False]
    # p >= q at both drafts: kept whatever the coins. As a deterministic draft it is not.
    assert accept_block(p, q, mx.array([1, 2], mx.uint32), top).tolist()[-1] is True
    assert accept_block(p, None, mx.array([1, 2], mx.uint32), top).tolist() == [False, False]
    certain = mx.array([[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]])
    for given in (None, certain[:2]):
        assert accept_block(certain, given, mx.array([1, 0], mx.uint32), top).tolist() == [True, True]
        # Here too nothing is left at the first place: the second draft is not the only one that is possible.
        assert accept_block(certain, given, mx.array([0, 0], mx.uint32), zero).tolist() == [False, False]


def test_p_equal_to_q_keeps_every_draft_and_leaves_no_uniform_draw() -> None:
    p = mx.softmax(mx.random.normal((6, 40), key=mx.random.key(1)))
    drafts = mx.array([0, 3, 5, 9, 39, 20], mx.uint32)
    assert accept_block(p, p, drafts, mx.full((6,), JUST_UNDER_1)).all().item()
    assert block_weights(p, p, drafts).tolist() == [1.0] * 7
    assert mx.array_equal(residual(p[0], p[0], mx.array(3)), p[0])


def test_rows_that_are_not_finite_accept_nothing_and_are_never_a_uniform_draw() -> None:
    """The decoder finds such rows; here they must not pass for numbers, whatever the coin."""
    good, drafts, zero = mx.array([[0.2, 0.3, 0.5]] * 3), mx.array([1, 2, 0], mx.uint32), mx.zeros((3,))
    for bad in (math.nan, math.inf):
        for row in range(3):
            marks = (mx.arange(3) == row)[:, None]
            # softmax makes not-a-number of a row with either in it.
            broken = mx.softmax(mx.where(marks & (mx.arange(3) == 0), bad, mx.log(good)), axis=-1)
            assert np.isnan(np.array(broken)[row]).all()
            for q in (good, None):
                assert not any(accept_block(broken, q, drafts, zero).tolist()[row:])  # type: ignore[index]
                assert accept_rejection(broken, q, drafts, zero).tolist()[row] is False  # type: ignore[index]
            # A broken draft: nothing of it is accepted, and the token comes from the target alone.
            assert not any(accept_block(good, broken, drafts, zero).tolist()[row:])  # type: ignore[index]
            assert accept_rejection(good, broken, drafts, zero).tolist()[row] is False  # type: ignore[index]
            assert mx.array_equal(residual(good[row], broken[row], drafts[row]), good[row])


def test_inputs_are_unchanged_and_rows_behind_the_drafts_are_not_read() -> None:
    p, q, drafts = _along(tables(1), (0, 2, 1))
    coins = mx.array([0.2, 0.9, 0.4])
    before = p.tolist(), q.tolist(), drafts.tolist(), coins.tolist()
    for given in (q, None):
        first = accept_block(p, given, drafts, coins)
        for last in (math.nan, 0.0):
            rows = mx.concatenate([p[:3], mx.full((2, 3), last)])
            assert mx.array_equal(accept_block(rows, given, drafts, coins), first)
            assert mx.array_equal(block_weights(rows, given, drafts), block_weights(p, given, drafts))
    assert before == (p.tolist(), q.tolist(), drafts.tolist(), coins.tolist())


def test_a_large_vocabulary_and_a_long_draft_stay_within_rounding() -> None:
    """Against the same formulas in float64: 50,000 ids, 16 drafts."""
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 3, (16, 50_000))
    p = _softmax(logits)
    q = _softmax(logits + rng.normal(0, 0.3, logits.shape))
    draft = np.array([rng.choice(50_000, p=row / row.sum()) for row in q.astype(np.float64)])
    p64, q64 = (x.astype(np.float64) / x.astype(np.float64).sum(axis=-1, keepdims=True) for x in (p, q))
    w = [1.0]
    for i, x in enumerate(draft):
        w.append(min(w[-1] * p64[i, x] / q64[i, x], 1.0))
    left = np.array([np.maximum(w[i] * p64[i] - q64[i], 0).sum() for i in range(1, 16)])
    h = np.append(left / (left + 1 - np.array(w[1:16])), w[16])
    found = block_chances(mx.array(p), mx.array(q), mx.array(draft.astype(np.uint32)))
    assert np.array(found) == pytest.approx(h, abs=2e-5)
    assert np.array(block_weights(mx.array(p), mx.array(q), mx.array(draft.astype(np.uint32)))) == pytest.approx(
        w, abs=1e-5
    )
