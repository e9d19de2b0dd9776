"""The acceptance rules leave the target's distribution as it is: by exact integration, and through the whole engine.

Every check must also reject planted wrong rules (the table in the papers' errata of practice): a check that passes
everything proves nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from odds import FALSE_ALARM, chi_square
from tiny import TableModel, random_table

from localspec import decoder as decoder_module
from localspec.acceptance import accept_coupled, accept_rejection, draw, residual
from localspec.drafters import ModelDrafter
from localspec.drafters.protocol import Drafter, Draw, Proposal
from localspec.engine import Engine
from localspec.noise import Noise, Stream, bits, gumbel
from localspec.settings import Settings

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


# Through the whole engine: the joint distribution of strings of three tokens.

VOCABULARY = 5
SETTINGS: dict[str, Any] = {"temperature": 0.9, "top_p": 0.97}
RUNS, MUTANT_RUNS = 1500, 800


TARGET, DRAFT = random_table(1, VOCABULARY, 1.2), random_table(2, VOCABULARY, 1.2)


def _likely(*ids: int) -> int:
    return int(mx.argmax(TARGET[ids[-2], ids[-1]]).item())


# The n-gram drafter copies what followed 1, 2: the target's own favourites, so that drafts are often accepted.
PROMPT = [1, 2, _likely(1, 2), _likely(2, _likely(1, 2)), 1, 2]


def _strings(model: TableModel) -> np.ndarray:
    """Exact probabilities of all strings of 3 tokens after PROMPT, by enumeration."""
    from localspec.sampling import distribution

    flat = model.table.reshape(-1, VOCABULARY)
    p = np.array(distribution(flat, Settings(**SETTINGS)).probabilities(), np.float64)
    p = (p / p.sum(axis=-1, keepdims=True)).reshape((VOCABULARY,) * 3)
    out = np.zeros((VOCABULARY,) * 3)
    a, b = PROMPT[-2:]
    for x, y, z in itertools.product(range(VOCABULARY), repeat=3):
        out[x, y, z] = p[a, b, x] * p[b, x, y] * p[x, y, z]
    return out


class Misreporting(ModelDrafter):
    """A planted bug: the draft is drawn from its distribution, and a uniform q is handed over."""

    def fresh(self) -> Misreporting:
        return Misreporting(self.model)

    def propose(self, length: int, draw: Draw) -> Proposal | None:
        proposal = super().propose(length, draw)
        if proposal is None or proposal.q is None:
            return proposal
        q = mx.ones(proposal.q.shape)
        return Proposal(proposal.tokens, proposal.source, q / q.sum(axis=-1, keepdims=True), proposal.probabilities)


def _joint_p_value(drafters: list[Drafter | str], accept: str, runs: int = RUNS) -> tuple[float, float]:
    """(p-value of the engine's strings under the exact distribution, acceptance rate)."""
    engine = Engine(TableModel(TARGET), drafters=drafters)
    counts = np.zeros((VOCABULARY,) * 3)
    session = engine.new_session()
    drafted = accepted = 0
    for seed in range(runs):
        settings = Settings(max_tokens=3, seed=seed, accept=accept, draft_length=2, **SETTINGS)  # type: ignore[arg-type]
        generation = engine.generation(session, PROMPT, settings).run()
        counts[tuple(generation.ids)] += 1
        drafted, accepted = drafted + generation.stats.drafted, accepted + generation.stats.accepted
    return chi_square(counts, _strings(TableModel(TARGET))), accepted / drafted


def _ngram() -> list[Drafter | str]:
    return ["ngram"]


def _model() -> list[Drafter | str]:
    return [ModelDrafter(TableModel(DRAFT))]


@pytest.mark.parametrize("accept", ["coupled", "rejection"])
@pytest.mark.parametrize("drafters", [_ngram, _model])
def test_joint_distribution_of_three_tokens(drafters: Callable[[], list[Drafter | str]], accept: str) -> None:
    """1,500 runs over 125 strings. Odds of a false alarm: 1e-6 each."""
    p_value, rate = _joint_p_value(drafters(), accept)
    assert p_value > FALSE_ALARM
    assert 0.05 < rate < 0.95  # both branches were taken, often


def test_each_position_has_a_coin_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coin used in two rounds would tie them together, by less than the joint test can see."""
    used: list[list[float]] = []

    def watch(p: mx.array, q: mx.array | None, drafts: mx.array, coins: mx.array) -> mx.array:
        used.append(coins.tolist())  # type: ignore[arg-type]
        return accept_rejection(p, q, drafts, coins)

    monkeypatch.setattr(decoder_module, "accept_rejection", watch)
    engine = Engine(TableModel(TARGET), drafters=_model())
    settings: dict[str, Any] = {**SETTINGS, "max_tokens": 40, "draft_length": 3, "accept": "rejection", "seed": 9}
    rounds = [record for record in engine.generate(PROMPT, **settings).rounds if record.drafted]
    expected = [Noise(9).uniform(range(r.position, r.position + len(r.drafted))).tolist() for r in rounds]
    assert used == expected
    assert len(used) > 5


MUTANTS: dict[str, tuple[str, Any]] = {
    "always accept": ("accept_rejection", _always),
    "redraw from p": ("residual", _redraw_from_p),
    "residual by argmax": ("residual", _by_argmax),
    "p instead of p/q": ("accept_rejection", _target_only),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_joint_distribution_finds_planted_bugs(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, wrong = MUTANTS[mutant]
    monkeypatch.setattr(decoder_module, name, wrong)
    assert _joint_p_value(_model(), "rejection", MUTANT_RUNS)[0] < FALSE_ALARM


def test_joint_distribution_finds_a_misreported_q() -> None:
    """A draft surer of itself than it says. The same draft with its own q passes: only the report is wrong."""
    sure = TableModel(DRAFT * 2.5)
    assert _joint_p_value([Misreporting(sure)], "rejection", MUTANT_RUNS)[0] < FALSE_ALARM
    assert _joint_p_value([ModelDrafter(sure)], "rejection", MUTANT_RUNS)[0] > FALSE_ALARM


def test_joint_distribution_finds_drafts_emitted_under_coupling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coupled rule that lets every n-gram draft through."""

    class Lenient(decoder_module.Decoder):
        def _accept_coupled(self, rows: Any, drafts: list[int]) -> Any:
            accepted, tokens, log_ps, logprobs = super()._accept_coupled(rows, drafts)
            if accepted == 0:
                return 1, [drafts[0], tokens[0]], [log_ps[0]] * 2, [logprobs[0]] * 2
            return accepted, tokens, log_ps, logprobs

    monkeypatch.setattr("localspec.generation.Decoder", Lenient)
    assert _joint_p_value(_ngram(), "coupled", MUTANT_RUNS)[0] < FALSE_ALARM
