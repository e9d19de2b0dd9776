"""Ids, probabilities and log-probabilities do not depend on speculation, whatever the settings; and this can tell."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st
from tiny import TableModel, random_table, tiny_llama

from localspec import judge
from localspec.drafters import ModelDrafter
from localspec.drafters.protocol import Draw
from localspec.engine import Engine
from localspec.generation import Generation
from localspec.penalties import penalise
from localspec.sampling import ranked
from localspec.settings import Settings

VOCABULARY = 12
TOKENS = 14


@functools.cache
def _engines() -> dict[str, Engine]:
    """A sure table (drafts are often right), a doubtful one, a transformer; each kind of drafter among them."""
    sure, doubtful = TableModel(random_table(1, VOCABULARY, 4.0)), TableModel(random_table(2, VOCABULARY, 1.5))
    llama = tiny_llama(vocabulary=VOCABULARY, layers=1)
    return {
        "ngram": Engine(sure, drafters=["ngram"]),
        "itself": Engine(doubtful, drafters=[ModelDrafter(doubtful)]),
        "ngram, then another": Engine(doubtful, drafters=["ngram", ModelDrafter(sure)]),
        "a narrower one": Engine(llama, drafters=[ModelDrafter(tiny_llama(3, vocabulary=VOCABULARY - 3, layers=1))]),
    }


def _lifts_the_latest(tokens: mx.array, logits: mx.array) -> mx.array:
    """A processor that depends on the order of the history and on its length."""
    return logits + mx.where(mx.arange(logits.shape[-1]) == tokens[-1] // 2, 1.5, 0.0) * (1 + tokens.size % 2)


def _writes_in_place(tokens: mx.array, logits: mx.array) -> mx.array:
    logits[:, tokens[-2:]] = logits[:, tokens[-2:]] - 1
    return logits


KEYWORDS: dict[str, list[Any]] = {
    "temperature": [0, 1e-6, 0.4, 0.9, 1.5, 1e6],
    "top_p": [1.0, 0.9, 0.6],
    "top_k": [0, 1, 5, VOCABULARY, 10**6],
    "min_p": [0.0, 0.02, 0.2],
    "xtc_probability": [0.0, 0.5, 1.0],
    "xtc_threshold": [0.0, 0.05, 0.2, 0.5],
    "repetition_penalty": [None, 0, 0.7, 1.3, 2.5],
    "repetition_context_size": [0, 1, 3, 20],
    "presence_penalty": [None, -0.8, 1.5],
    "presence_context_size": [0, 1, 3, 20],
    "frequency_penalty": [None, -0.3, 0.6],
    "frequency_context_size": [0, 2, 20],
    "logit_bias": [{}, {3: 2.5}, {0: -math.inf, 5: -2.0, 11: 1.0}],
    "logits_processors": [(), (_lifts_the_latest,), (_writes_in_place, _lifts_the_latest)],
    "logprobs": [0, 1, 3, 100],
    "seed": [1, 2**63 + 5],
}
PROMPTS = [[7], [1, 2, 3] * 4, [5] * 9, [4, 4, 8, 1, 0, 11, 4, 4, 8]]


class Differs(AssertionError):
    """What a planted bug must lead to; nothing else is taken for its discovery."""


def _compare(
    kind: str, prompt: list[int], length: Any, keywords: dict[str, Any], fresh: Callable[[], None]
) -> Generation:
    """Plain against speculative, to the last bit; returns the speculative one. `fresh` is called before either."""
    engine = _engines()[kind]
    fresh()
    plain = engine.generate(prompt, max_tokens=TOKENS, speculate=False, **keywords)
    fresh()
    drafted = engine.generate(prompt, max_tokens=TOKENS, draft_length=length, **keywords)
    if drafted.ids != plain.ids:
        raise Differs(f"ids: {drafted.ids} for {plain.ids}")
    for ours, theirs in zip(drafted.tokens, plain.tokens, strict=True):
        if (ours.logprob, ours.p, ours.top_logprobs) != (theirs.logprob, theirs.p, theirs.top_logprobs):
            raise Differs(f"probabilities: {ours} for {theirs}")
        assert len(ours.top_logprobs) == min(keywords["logprobs"], VOCABULARY)
        values = [value for _, value in ours.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert all(ours.logprob == value for token, value in ours.top_logprobs if token == ours.id)
        if values:
            assert ours.logprob <= values[0]
    return drafted


@profile(max_examples=60)
@given(
    kind=st.sampled_from(sorted(_engines())),
    prompt=st.sampled_from(PROMPTS) | st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=25),
    length=st.integers(1, 8) | st.just("auto"),
    keywords=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in KEYWORDS.items()}),
)
def test_nothing_depends_on_speculation(kind: str, prompt: list[int], length: Any, keywords: dict[str, Any]) -> None:
    _compare(kind, prompt, length, keywords, lambda: None)


# The same comparison on a fixed sweep, which must pass as it is and fail for each planted bug.


def _sweep(fresh: Callable[[], None] = lambda: None) -> tuple[int, int]:
    """(drafted, accepted) over runs that each switch all of the penalties on, and XTC in half of them."""
    rng = random.Random(3)
    drafted = accepted = 0
    for index in range(24):
        keywords = {name: rng.choice(values) for name, values in KEYWORDS.items()}
        keywords |= {
            "temperature": rng.choice([0, 0.9]) if index % 2 else 0.9,
            "xtc_probability": 0.5 if index % 2 == 0 else 0.0,
            "xtc_threshold": 0.05,
            "top_k": 0,
            "top_p": 1.0,
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.6,
            "presence_penalty": 1.5,
            "logprobs": 3,
        }
        kind = sorted(_engines())[index % 4]
        generation = _compare(kind, rng.choice(PROMPTS), rng.choice([2, 4, 7]), keywords, fresh)
        drafted, accepted = drafted + generation.stats.drafted, accepted + generation.stats.accepted
    return drafted, accepted


def test_the_sweep_passes_and_has_rejections_and_acceptances() -> None:
    drafted, accepted = _sweep()
    assert accepted > 40
    assert drafted - accepted > 40


Penalise = Callable[..., mx.array]


def _without_the_drafts() -> Penalise:
    """Every row sees what the first one sees."""

    def wrong(logits: mx.array, settings: Settings, history: list[int], fed: mx.array, size: int) -> mx.array:
        rows = [penalise(logits[i : i + 1], settings, history, fed[:1], size) for i in range(logits.shape[0])]
        return mx.concatenate(rows)

    return wrong


def _one_token_twice() -> Penalise:
    """The token that the pass starts from is taken for part of the history, and counted again."""

    def wrong(logits: mx.array, settings: Settings, history: list[int], fed: mx.array, size: int) -> mx.array:
        again = [int(fed[0].item())] if logits.shape[0] > 1 else []
        return penalise(logits, settings, [*history, *again], fed, size)

    return wrong


def _shared_counters() -> Penalise:
    """Counts that every row adds to, rejected ones included."""
    counted: list[int] = []

    def wrong(logits: mx.array, settings: Settings, history: list[int], fed: mx.array, size: int) -> mx.array:
        if not counted:
            counted.extend(history)
        out = penalise(logits, settings, counted, fed, size)
        counted.extend(int(token) for token in fed.tolist())
        return out

    return wrong


def _bonus_row_late() -> Penalise:
    """The last row of a wider pass lacks the last draft."""

    def wrong(logits: mx.array, settings: Settings, history: list[int], fed: mx.array, size: int) -> mx.array:
        out = penalise(logits, settings, history, fed, size)
        if logits.shape[0] == 1:
            return out
        return mx.concatenate([out[:-1], penalise(logits[-1:], settings, history, fed[:-1], size)])

    return wrong


def _without_the_prompt() -> Penalise:
    """A wider pass knows its own tokens only."""

    def wrong(logits: mx.array, settings: Settings, history: list[int], fed: mx.array, size: int) -> mx.array:
        return penalise(logits, settings, history if logits.shape[0] == 1 else [], fed, size)

    return wrong


@pytest.mark.parametrize(
    "make", [_without_the_drafts, _one_token_twice, _shared_counters, _bonus_row_late, _without_the_prompt]
)
def test_a_wrong_history_is_found(make: Callable[[], Penalise], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Differs):
        _sweep(lambda: monkeypatch.setattr(judge, "penalise", make()))


def test_an_xtc_coin_from_a_generator_with_a_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    coins = Draw.coins

    def fresh() -> None:
        generator = random.Random(1)

        def toss(self: Draw, position: int, rows: int) -> mx.array | None:
            if coins(self, position, rows) is None:
                return None
            return mx.array([generator.random() for _ in range(rows)])

        monkeypatch.setattr(Draw, "coins", toss)

    with pytest.raises(Differs):
        _sweep(fresh)


def test_log_probabilities_of_a_neighbouring_row_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(top: tuple[mx.array, ...], rows: int) -> Any:
        return ranked(tuple(mx.roll(part, 1, axis=0) for part in top), rows)

    monkeypatch.setattr(judge, "ranked", shifted)
    with pytest.raises(Differs, match="probabilities"):
        _sweep()
