"""Kinds of fault that users of other runtimes met, in rollback, stops and counts: each as a test of its own.

What is tested elsewhere in all its breadth is here once more by name, in its smallest form.
"""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
import pytest
from cachekinds import assert_holds, cold, engine, model, settings
from mlx_lm.models.cache import KVCache, RotatingKVCache
from tiny import ScriptDrafter, ScriptModel, script_engine, tiny_gemma, tiny_llama, tiny_tokenizer

from localspec.caches.leaves import SnapshotLeaf
from localspec.caches.window import WindowCache
from localspec.drafters import ModelDrafter
from localspec.engine import Engine
from localspec.errors import CacheError
from localspec.generation import Generation
from localspec.session import Session
from localspec.settings import Settings
from localspec.target import Target

HYBRID, PROMPT = "gated delta, hybrid", [5, 7, 9, 50, 3, 11, 60, 3]
BRACKETS = [40, 41, 7, 42, 8, 43, 40, 41, 7, 42, 9, 43, 40, 41, 7, 42]
"""Structured text, as a tool call is: the same frame again and again."""


def _unrelated() -> ModelDrafter:
    return ModelDrafter(tiny_llama(1, vocabulary=96, layers=1))


def _drafted(kind: str, prompt: list[int], count: int, **values: Any) -> Generation:
    used = engine(kind)
    session = Session(used.target, [_unrelated()])
    return used.generation(session, prompt, settings(max_tokens=count, seed=1, **values)).run()


# Rollback and identity


def test_rejected_drafts_leave_recurrent_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hybrid target with an unrelated draft said less than it should: rejected tokens stayed in the state."""
    for temperature in (0.0, 0.8):
        expected = cold(engine(HYBRID), PROMPT, max_tokens=30, seed=1, temperature=temperature)
        generation = _drafted(HYBRID, PROMPT, 30, draft_length=5, temperature=temperature)
        assert generation.ids == expected
        assert generation.stats.accepted < generation.stats.drafted // 2
    monkeypatch.setattr(SnapshotLeaf, "restore", lambda leaf, mark: None)
    assert _drafted(HYBRID, PROMPT, 30, draft_length=5).ids != expected


def test_structured_text_with_ngrams_on_a_hybrid_is_the_same_every_time() -> None:
    """Structured answers came out malformed where prose was right, and differently after each restart."""
    expected = cold(engine(HYBRID), BRACKETS, max_tokens=30, temperature=0)
    for length in (1, 4, 8, "auto"):
        used = Engine(model(HYBRID), drafters=["ngram"])
        generation = used.generate(BRACKETS, max_tokens=30, draft_length=length, exact="off")
        assert generation.ids == expected
        assert generation.stats.drafted or length == "auto"


def test_windows_stay_exact_behind_their_edge() -> None:
    """A sliding window could be taken back only until it was full; from then on, drafts changed the text."""
    tiny = tiny_gemma(window=16)
    used = Engine(tiny, drafters=[ModelDrafter(tiny_llama(1, layers=1))])
    plain = used.generate([1, 2, 3, 4, 5, 6, 7, 8], max_tokens=40, speculate=False, exact="off")
    generation = used.generate([1, 2, 3, 4, 5, 6, 7, 8], max_tokens=40, draft_length=4, exact="off")
    assert generation.ids == plain.ids
    assert generation.stats.accepted < generation.stats.drafted
    # mlx-lm's own window, in its place, would be wrong or refuse: it is not taken for one that can be cut.
    used.target.new_caches = lambda: [RotatingKVCache(16), KVCache()]
    assert (
        used.generation(used.new_session(), [1, 2, 3], Settings(max_tokens=1)).run()._session.transaction.rollback
        == "replay"
    )


@pytest.mark.parametrize("kind", [KVCache, WindowCache])
def test_a_cut_that_takes_less_than_asked_is_an_error(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looked at how many tokens a cache had really given back."""
    used = Engine(tiny_gemma(window=16), drafters=[ModelDrafter(tiny_llama(1, layers=1))])
    used.generate(PROMPT, max_tokens=1, exact="off")
    monkeypatch.setattr(kind, "trim", lambda cache, rows: 0)
    with pytest.raises(CacheError, match=f"{kind.__name__}.*gave back 0 of"):
        used.generate(PROMPT, max_tokens=20, draft_length=4, exact="off")


@pytest.mark.parametrize("failing", range(1, 6))
@pytest.mark.parametrize("kind", ["plain", "window", HYBRID])
def test_a_round_that_fails_counts_nothing_of_the_round_before(
    kind: str, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of accepted drafts outlived their round: after a failure, caches were too short or too long."""
    used, limit = engine(kind), 11
    answer = cold(used, PROMPT, max_tokens=limit, seed=1)
    session = used.new_session()
    # The first round is accepted whole; near the limit drafts get shorter.
    session.drafters = [ScriptDrafter([*PROMPT, *answer], wrong={len(PROMPT) + 7}, vocabulary=96)]
    used.generation(session, PROMPT, settings(max_tokens=1, seed=1)).run()
    forward, calls = Target.forward, itertools.count(1)

    def fails(target: Target, ids: mx.array, caches: list[Any]) -> mx.array:
        out = forward(target, ids, caches)
        if next(calls) == failing:
            raise ZeroDivisionError
        return out

    prompt = [*PROMPT, answer[0]]
    generation = used.generation(session, prompt, settings(max_tokens=limit - 1, seed=1, draft_length=4))
    with monkeypatch.context() as patch:
        patch.setattr(Target, "forward", fails)
        if failing <= 3:
            with pytest.raises(ZeroDivisionError):
                generation.run()
        else:
            generation.run()
    assert generation.ids == answer[1 : 1 + len(generation.ids)]
    assert_holds(session, prompt + generation.ids)


def test_layers_that_can_be_cut_are_not_where_others_cannot() -> None:
    """A cache was handed out for the prefix that its first layer had, though another layer had more of it or less."""
    used = engine("window")
    session = used.new_session()
    long = [(5 * i + i // 7) % 96 for i in range(700)]
    used.generation(session, long, settings(max_tokens=80, seed=1, speculate=False)).run()
    used.generation(session, [*session.ids, 4], settings(max_tokens=80, seed=1, speculate=False)).run()
    before = [(cache.offset, type(cache)) for cache in session.transaction.caches]
    assert {kind for _, kind in before} == {KVCache, WindowCache}
    assert not session.transaction.rewind(300)  # far behind the windows; the plain layers could
    assert [(cache.offset, type(cache)) for cache in session.transaction.caches] == before
    other = [*long[:300], 1, 2, 3]
    for prompt in (other, [*other, 9]):  # once computed, it is the right entry, and stays so
        generation = used.generation(session, prompt, settings(max_tokens=6, seed=2)).run()
        assert generation.ids == cold(used, prompt, max_tokens=6, seed=2)
    assert generation.stats.reused_tokens >= len(other) - 1


@pytest.mark.parametrize("kind", ["plain", "window", HYBRID, "odd"])
def test_nothing_behind_an_end_token_stays_in_the_cache(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted tokens behind the end stayed in the cache; a hybrid then lost the whole answer in the next turn."""
    used = engine(kind)
    answer = cold(used, PROMPT, max_tokens=12, seed=1)
    session = used.new_session()
    session.drafters = [ScriptDrafter([*PROMPT, *answer], vocabulary=96)]
    end = next(i for i in range(2, 5) if answer[i] not in answer[:i])
    with monkeypatch.context() as patch:
        patch.setattr(used.tokenizer, "eos_token_ids", {answer[end]})
        generation = used.generation(session, PROMPT, settings(max_tokens=12, seed=1, draft_length=8)).run()
    assert (generation.ids, generation.finish_reason) == (answer[: end + 1], "stop")
    assert generation.stats.target_passes == 1
    assert_holds(session, PROMPT + generation.ids)
    again = used.generation(session, [*session.ids, 8, 9], settings(max_tokens=3)).run()
    assert again.stats.reused_tokens == len(PROMPT) + end


@pytest.mark.parametrize("kept", range(1, 8))
def test_one_rule_for_what_a_close_leaves_in_the_cache(kept: int) -> None:
    """The newest token was in the cache after some closes and not after others, with speculation other than without."""
    used = engine("plain")
    for speculate, length in ((False, 0), (True, 4), (True, 1)):
        session = Session(used.target, [ModelDrafter(model("plain"))])
        chosen = settings(max_tokens=20, seed=1, speculate=speculate, draft_length=length)
        generation = used.generation(session, PROMPT, chosen)
        for _ in range(kept):
            next(generation)
        generation.close()
        assert [cache.offset for cache in session.transaction.caches] == [len(PROMPT) + kept - 1] * 3
        (drafter,) = session.drafters
        assert isinstance(drafter, ModelDrafter)
        assert drafter._transaction.held <= len(PROMPT) + kept - 1


@pytest.mark.parametrize("length", range(1, 9))
def test_a_model_that_drafts_for_itself_is_always_right(length: int) -> None:
    """The draft's cache was cut by one too many each round, and acceptance decayed over the answer."""
    used = engine("plain")
    session = Session(used.target, [ModelDrafter(model("plain"))])
    generation = used.generation(session, PROMPT, settings(max_tokens=60, seed=1, draft_length=length))
    (drafter,) = session.drafters
    assert isinstance(drafter, ModelDrafter)
    for _ in generation:
        if not generation.finish_reason:
            # All but the last draft of the round were run by the draft model itself: nothing is run twice.
            assert drafter._transaction.held == drafter._transaction.caches[0].offset == len(session.ids) - 2
    assert generation.stats.accepted == generation.stats.drafted >= 30
    assert all(rate == 1 for rate in generation.stats.all_drafters.acceptance_by_position)


# Stops and limits


@pytest.mark.parametrize("kind", ["plain", "recurrence and windows"])
def test_an_end_token_anywhere_in_an_accepted_block_ends_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last token of a block was compared with the end token."""
    used = engine(kind)
    answer = cold(used, PROMPT, max_tokens=12, seed=3)
    places = [i for i in range(9) if answer[i] not in answer[:i]]
    assert len(places) >= 5
    for place in places:
        session = used.new_session()
        session.drafters = [ScriptDrafter([*PROMPT, *answer], vocabulary=96)]
        with monkeypatch.context() as patch:
            patch.setattr(used.tokenizer, "eos_token_ids", {answer[place]})
            generation = used.generation(session, PROMPT, settings(max_tokens=12, seed=3, draft_length=8)).run()
        assert (generation.ids, generation.finish_reason) == (answer[: place + 1], "stop")
        assert_holds(session, PROMPT + generation.ids)


def test_the_earliest_of_end_and_limit_wins() -> None:
    """A limit behind the end token, but in the same block, was reported instead of it, with stray tokens."""
    words = tiny_tokenizer()
    script = [50, 10, 11, 2, 20, 21, 22, 23]
    used = Engine(ScriptModel(script, len(words)), words, drafters=[ScriptDrafter(script, vocabulary=len(words))])
    for limit, reason, count in ((2, "length", 2), (3, "stop", 3), (5, "stop", 3)):
        session = used.new_session()
        generation = used.generation(session, [50], Settings(max_tokens=limit, draft_length=6)).run()
        assert (generation.finish_reason, len(generation.ids)) == (reason, count)
        assert [cache.offset for cache in session.transaction.caches] == [count, count]


@pytest.mark.parametrize("length", [0, 3, 8])
def test_a_stop_string_over_several_tokens_is_found_and_does_not_leak(length: int) -> None:
    """A stop in no single token was missed, or its first half was shown; what stood behind it stayed in the cache."""
    used, prompt, _ = script_engine("alpha beta gamma delta")
    session = used.new_session()
    generation = used.generation(session, prompt, Settings(stop=("beta gamma",), draft_length=length)).run()
    assert (generation.text, generation.finish_reason) == ("alpha ", "stop")
    assert [cache.offset for cache in session.transaction.caches] == [len(session.ids) - 1] * 2
    assert session.ids == prompt + generation.ids


# Counts


@pytest.mark.parametrize("end", ["end token", "close"])
def test_tokens_behind_the_end_are_not_counted(end: str) -> None:
    """Drafts accepted behind the end were counted as if they had been delivered."""
    words = tiny_tokenizer()
    script = [50, 10, 11, 2 if end == "end token" else 12, 20, 21, 22, 23, 24, 25]
    used = Engine(ScriptModel(script, len(words)), words, drafters=[ScriptDrafter(script, vocabulary=len(words))])
    generation = used.stream([50], max_tokens=8, draft_length=5)
    for _ in range(3):
        next(generation)
    generation.close()
    stats = generation.stats
    assert len(generation.ids) == stats.emitted == sum(record.emitted for record in generation.rounds) == 3
    assert (stats.target_passes, stats.drafted, stats.accepted, stats.tokens_per_pass) == (1, 5, 3, 3.0)
    assert stats.by_source == {"draft": 3}


def test_rates_are_of_drafts_that_were_tested() -> None:
    """A rate was taken of drafts that no pass had seen, or exceeded one; without drafts there is none."""
    used, prompt, _ = script_engine("the quick brown fox jumps over the lazy dog")
    for length in (1, 4, 8):
        generation = used.generate(prompt, draft_length=length, max_tokens=13)
        stats = generation.stats
        assert stats.drafted == sum(len(record.drafted) for record in generation.rounds)
        assert stats.accepted <= stats.drafted
        assert len(generation.ids) <= 13
        assert stats.emitted == stats.accepted + sum(token.source != "draft" for token in generation.tokens)
        assert all(rate <= 1 for rate in stats.all_drafters.acceptance_by_position)
    assert used.generate(prompt, speculate=False).stats.acceptance_rate is None
