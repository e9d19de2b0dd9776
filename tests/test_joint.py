"""The joint distribution of what comes out of the engine: drafters, samplers and acceptance rules, all with all.

Target and drafts are tables of logits, so the exact probability of every string of three tokens is known. The wrong
rules that are planted here must be found by the very check that the right ones pass, with as many runs.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from odds import FALSE_ALARM, chi_square
from tiny import TableModel, random_table

from localspec import decoder as decoder_module
from localspec import judge as judge_module
from localspec import noise as noise_module
from localspec.acceptance import accept_block, accept_rejection, block_weights, residual
from localspec.drafters import ModelDrafter, drawing
from localspec.drafters.protocol import Drafter, Draw, Proposal
from localspec.engine import Engine
from localspec.errors import NumericsError
from localspec.noise import Noise, Stream
from localspec.sampling import distribution
from localspec.settings import Settings

VOCABULARY = 4
RUNS = 800
SAMPLERS: dict[str, dict[str, Any]] = {
    "as it is": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 3},
}
# Of 64 pairs of tables, one in which the planted wrong rules are far from the right ones: 800 runs find them all.
TARGET, DRAFT = random_table(7, VOCABULARY, 1.2), random_table(15, VOCABULARY, 1.8)


def _likely(*ids: int) -> int:
    return int(mx.argmax(TARGET[ids[-2], ids[-1]]).item())


# The n-gram drafter copies what followed 1, 2: the target's own favourites, so that drafts are often accepted.
PROMPT = [1, 2, _likely(1, 2), _likely(2, _likely(1, 2)), 1, 2]
UNUSABLE = (2, _likely(1, 2))
"""The context whose logits are broken where some are: the likeliest one behind the prompt and one token."""


@pytest.fixture(autouse=True)
def _quick_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's Philox in place of Threefry, under the same keys: on a CPU it makes a row in a fraction of the time.

    That Threefry's numbers are random, and their keys independent, is test_noise.py's concern.
    """

    def bits(seed: int, stream: Stream, positions: Sequence[int], size: int) -> mx.array:
        keys = [[seed, int(stream) << 32 | position] for position in positions]
        rows = [np.random.Generator(np.random.Philox(key=key)).integers(0, 2**32, size, np.uint32) for key in keys]
        return mx.array(np.stack(rows))

    monkeypatch.setattr(noise_module, "bits", bits)


class OwnSettings(ModelDrafter):
    """Samples with settings of its own, whatever the target's are."""

    def __init__(self, model: Any, **settings: Any) -> None:
        super().__init__(model)
        self.settings = settings

    def fresh(self) -> OwnSettings:
        return OwnSettings(self.model, **self.settings)

    def propose(self, length: int, draw: Draw) -> Proposal | None:
        own = Settings(accept=draw.settings.accept, **self.settings)
        return super().propose(length, replace(draw, settings=own))


class Misreporting(ModelDrafter):
    """A planted bug: the draft is drawn from its distribution, and a uniform q is handed over."""

    def fresh(self) -> Misreporting:
        return Misreporting(self.model)

    def propose(self, length: int, draw: Draw) -> Proposal | None:
        proposal = super().propose(length, draw)
        assert proposal is not None
        assert proposal.q is not None
        return replace(proposal, q=mx.full(proposal.q.shape, 1 / VOCABULARY))


def _broken(table: mx.array, value: float) -> mx.array:
    """A table whose logits at UNUSABLE hold a NaN, or an infinity, or are -inf throughout (all tokens masked)."""
    row = mx.full((VOCABULARY,), value) if value == -math.inf else table[UNUSABLE].at[1].add(value)
    rows = np.array(table)
    rows[UNUSABLE] = np.array(row)
    return mx.array(rows)


DRAFTERS: dict[str, Callable[[], list[Drafter | str]]] = {
    "n-gram": lambda: ["ngram"],
    "model": lambda: [ModelDrafter(TableModel(DRAFT))],
    "model without filters": lambda: [OwnSettings(TableModel(DRAFT), temperature=1.0)],
    "model with its own filters": lambda: [OwnSettings(TableModel(DRAFT), temperature=0.7, top_k=2)],
    "model of fewer ids": lambda: [ModelDrafter(TableModel(random_table(3, 3, 1.2)))],
    "model of more ids": lambda: [ModelDrafter(TableModel(random_table(4, 6, 1.2)))],
    "model in bfloat16": lambda: [ModelDrafter(TableModel(DRAFT.astype(mx.bfloat16)))],
    "model with a broken row": lambda: [ModelDrafter(TableModel(_broken(DRAFT, math.nan)))],
    "n-gram, then model": lambda: ["ngram", ModelDrafter(TableModel(DRAFT))],
}


@functools.cache
def _strings(sampler: str) -> np.ndarray:
    """Exact probabilities of all strings of 3 tokens after PROMPT, by enumeration."""
    flat = TARGET.reshape(-1, VOCABULARY)
    p = np.array(distribution(flat, Settings(**SAMPLERS[sampler])).probabilities(), np.float64)
    p = (p / p.sum(axis=-1, keepdims=True)).reshape((VOCABULARY,) * 3)
    out = np.zeros((VOCABULARY,) * 3)
    a, b = PROMPT[-2:]
    for x, y, z in itertools.product(range(VOCABULARY), repeat=3):
        out[x, y, z] = p[a, b, x] * p[b, x, y] * p[x, y, z]
    return out


def _run(drafters: list[Drafter | str], accept: str, sampler: str, runs: int = RUNS) -> tuple[list[list[int]], float]:
    """(the engine's strings, seed by seed; accepted / drafted)."""
    engine = Engine(TableModel(TARGET), drafters=drafters)
    session = engine.new_session()
    strings: list[list[int]] = []
    drafted = accepted = 0
    for seed in range(runs):
        settings = Settings(max_tokens=3, seed=seed, accept=accept, draft_length=2, **SAMPLERS[sampler])  # type: ignore[arg-type]
        generation = engine.generation(session, PROMPT, settings).run()
        strings.append(generation.ids)
        drafted, accepted = drafted + generation.stats.drafted, accepted + generation.stats.accepted
        assert all(token.q is None or 0 < token.q <= 1 for token in generation.tokens)
    return strings, accepted / drafted if drafted else math.nan


def _p_value(strings: list[list[int]], sampler: str) -> float:
    counts = np.zeros((VOCABULARY,) * 3)
    for string in strings:
        counts[tuple(string)] += 1
    return chi_square(counts, _strings(sampler))


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("accept", ["rejection", "block"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_joint_distribution_of_three_tokens(drafter: str, accept: str, sampler: str) -> None:
    """500 runs over 64 strings. Odds of a false alarm: 1e-6 each, so 4e-5 for all 36."""
    strings, rate = _run(DRAFTERS[drafter](), accept, sampler)
    assert _p_value(strings, sampler) > FALSE_ALARM
    assert 0.05 < rate < 0.95  # drafts were accepted, and rejected, often


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_coupled_strings_are_plain_decodings_whose_joint_distribution_is_right(sampler: str) -> None:
    """1,000 plain runs over 64 strings, odds of a false alarm 1e-6; with drafts not one of 100 strings is another."""
    plain, _ = _run([], "coupled", sampler, 2 * RUNS)
    assert _p_value(plain, sampler) > FALSE_ALARM
    for drafter, make in DRAFTERS.items():
        strings, rate = _run(make(), "coupled", sampler, 100)
        assert strings == plain[:100], drafter
        assert 0.05 < rate < 0.95, drafter


def _always(p: mx.array, q: mx.array | None, drafts: mx.array, coins: mx.array) -> mx.array:
    return mx.ones(coins.shape, mx.bool_)


def _target_only(p: mx.array, q: mx.array | None, drafts: mx.array, coins: mx.array) -> mx.array:
    return accept_rejection(p, None, drafts, coins)


def _redraw_from_p(p: mx.array, q: mx.array | None, draft: mx.array) -> mx.array:
    return p


def _by_argmax(p: mx.array, q: mx.array | None, draft: mx.array) -> mx.array:
    return (mx.arange(p.size) == mx.argmax(residual(p, q, draft))).astype(mx.float32)


def _first_failure(p: mx.array, q: mx.array | None, drafts: mx.array, coins: mx.array) -> mx.array:
    return mx.cumprod(accept_block(p, q, drafts, coins).astype(mx.int32)).astype(mx.bool_)


MUTANTS: dict[tuple[str, str], tuple[str, Any]] = {
    ("rejection", "always accept"): ("accept_rejection", _always),
    ("rejection", "redraw from p"): ("residual", _redraw_from_p),
    ("rejection", "residual by argmax"): ("residual", _by_argmax),
    ("rejection", "p instead of p/q"): ("accept_rejection", _target_only),
    ("block", "always accept"): ("accept_block", _always),
    ("block", "redraw from p"): ("residual", _redraw_from_p),
    ("block", "residual by argmax"): ("residual", _by_argmax),
    ("block", "stop at the first failure"): ("accept_block", _first_failure),
}


@pytest.mark.parametrize(("accept", "mutant"), MUTANTS)
def test_planted_wrong_rules_are_found(accept: str, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, wrong = MUTANTS[accept, mutant]
    monkeypatch.setattr(judge_module, name, wrong)
    strings, _ = _run(DRAFTERS["model"](), accept, "as it is")
    assert _p_value(strings, "as it is") < FALSE_ALARM


def test_the_residual_of_the_block_rule_has_p_at_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it strings of three tokens come out almost as they should: too nearly for counting."""
    judged: list[tuple[mx.array, int]] = []
    shares: list[float] = []

    def accept(p: mx.array, q: mx.array | None, drafts: mx.array, coins: mx.array) -> mx.array:
        passed = accept_block(p, q, drafts, coins)
        kept = max((i + 1 for i, one in enumerate(passed.tolist()) if one), default=0)  # type: ignore[arg-type]
        if kept < drafts.size:
            judged.append((block_weights(p, q, drafts)[kept] * p[kept], kept))
        return passed

    def left(p: mx.array, q: mx.array | None, draft: mx.array) -> mx.array:
        assert mx.allclose(p, judged[len(shares)][0], atol=1e-6)
        shares.append(p.sum().item())  # type: ignore[arg-type]
        return residual(p, q, draft)

    monkeypatch.setattr(judge_module, "accept_block", accept)
    monkeypatch.setattr(judge_module, "residual", left)
    engine = Engine(TableModel(TARGET), drafters=DRAFTERS["model"]())
    engine.generate(PROMPT, max_tokens=400, draft_length=4, accept="block", seed=2, temperature=1.0)
    assert len(judged) == len(shares)
    assert sum(share < 0.9 for share in shares) > 5  # so the weight mattered


@pytest.mark.parametrize("accept", ["rejection", "block"])
def test_a_misreported_q_is_found(accept: str) -> None:
    """A draft surer of itself than it says. The same draft with its own q passes: only the report is wrong."""
    sure = TableModel(DRAFT * 2.5)
    assert _p_value(_run([Misreporting(sure)], accept, "as it is")[0], "as it is") < FALSE_ALARM
    assert _p_value(_run([ModelDrafter(sure)], accept, "as it is")[0], "as it is") > FALSE_ALARM


def test_drafts_emitted_under_coupling_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coupled rule that lets every n-gram draft through."""

    class Lenient(judge_module.Judge):
        def _accept_coupled(self, rows: Any, drafts: Any, first: int) -> Any:
            verdict = super()._accept_coupled(rows, drafts, first)
            if verdict.accepted > 0:
                return verdict
            tokens = [drafts.tokens[0], verdict.tokens[0]]
            return replace(verdict, accepted=1, tokens=tokens, log_ps=verdict.log_ps * 2, logprobs=verdict.logprobs * 2)

    monkeypatch.setattr("localspec.decoder.Judge", Lenient)
    assert _p_value(_run(DRAFTERS["n-gram"](), "coupled", "as it is")[0], "as it is") < FALSE_ALARM


@pytest.mark.parametrize("accept", ["rejection", "block"])
def test_no_random_number_serves_two_rounds(accept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block rule looks at coins and drafts behind those that it keeps: used again, they would tie rounds together.

    By less than strings of three tokens can show, so the keys are looked at.
    """
    used: list[tuple[Stream, int]] = []

    class Watched(Noise):
        def uniform(self, positions: Sequence[int], stream: Stream = Stream.COIN) -> mx.array:
            used.extend((stream, position) for position in positions)
            return super().uniform(positions, stream)

        def gumbel(self, positions: Sequence[int], size: int, stream: Stream = Stream.GUMBEL) -> mx.array:
            used.extend((stream, position) for position in positions)
            return super().gumbel(positions, size, stream)

    def run() -> None:
        engine = Engine(TableModel(TARGET), drafters=DRAFTERS["model"]())
        stats = engine.generate(
            PROMPT, max_tokens=60, draft_length=3, accept=accept, seed=9, **SAMPLERS["as it is"]
        ).stats
        assert stats.accepted < stats.drafted

    monkeypatch.setattr(decoder_module, "Noise", Watched)
    run()
    assert {stream for stream, _ in used} == {Stream.COIN, Stream.DRAFT, Stream.RESIDUAL} | (
        {Stream.GUMBEL} if (Stream.GUMBEL, len(PROMPT) + 59) in used else set()
    )
    assert len(used) > 100
    assert len(set(used)) == len(used)
    used.clear()
    for module in (judge_module, drawing):  # keyed by position instead
        monkeypatch.setattr(module, "round_keys", lambda first, count: range(first, first + count))
    run()
    assert len(set(used)) < len(used)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "all masked"])
@pytest.mark.parametrize("accept", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("drafter", ["n-gram", "model"])
def test_broken_logits_end_the_text_where_plain_decoding_would_meet_them(
    drafter: str, accept: str, value: float
) -> None:
    """As often, and with the right position: a row behind a draft that is not kept decides nothing.

    200 runs over the strings that do not come by the broken row, and the two positions at which others end. Odds of a
    false alarm: 1e-6 each, so 2e-5 for all 18.
    """
    engine = Engine(TableModel(_broken(TARGET, value)), drafters=DRAFTERS[drafter]())
    p = _strings("as it is").copy()
    ends = np.zeros(2)
    for x, y in itertools.product(range(VOCABULARY), repeat=2):
        for place, context in enumerate([(PROMPT[-1], x), (x, y)]):
            if context == UNUSABLE:
                ends[place] += p[x, y].sum()
                p[x, y] = 0
                break
    counts, ended = np.zeros(p.shape), np.zeros(2)
    for seed in range(200):
        settings: dict[str, Any] = {
            "max_tokens": 3,
            "seed": seed,
            "accept": accept,
            "draft_length": 2,
            "temperature": 1.0,
        }
        try:
            counts[tuple(engine.generate(PROMPT, **settings).ids)] += 1
        except NumericsError as error:
            found = re.search(r"position (\d+) are not finite", str(error))
            assert found is not None
            ended[int(found[1]) - len(PROMPT) - 1] += 1
    assert ended[0] > 30
    assert chi_square(np.append(counts.ravel(), ended), np.append(p.ravel(), ends)) > FALSE_ALARM


@pytest.mark.parametrize("accept", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("drafter", ["n-gram", "model", "model of fewer ids", "model in bfloat16"])
def test_temperatures_at_the_ends(drafter: str, accept: str) -> None:
    """At 1e-6 the text is the greedy one; at 1e6 every id is as likely, and a draft of all ids is nearly always kept.

    800 tokens over 4 ids; odds of a false alarm: 1e-6 each, 1.2e-5 for all 12.
    """
    engine = Engine(TableModel(TARGET), drafters=DRAFTERS[drafter]())
    greedy = engine.generate(PROMPT, max_tokens=60, speculate=False).ids
    settings: dict[str, Any] = {"accept": accept, "draft_length": 3, "seed": 3}
    assert engine.generate(PROMPT, max_tokens=60, temperature=1e-6, **settings).ids == greedy
    hot = engine.generate(PROMPT, max_tokens=800, temperature=1e6, **settings)
    assert chi_square(np.bincount(hot.ids, minlength=VOCABULARY), [1 / VOCABULARY] * VOCABULARY) > FALSE_ALARM
    assert all(token.p == pytest.approx(1 / VOCABULARY, rel=1e-4) for token in hot.tokens)
    assert hot.stats.acceptance_rate is not None
    if drafter in ("model", "model in bfloat16"):
        assert hot.stats.acceptance_rate > 0.99
