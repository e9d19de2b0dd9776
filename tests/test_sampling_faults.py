"""Faults of sampling, stopping and streaming that users of other programs met, and their neighbours."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st
from tiny import TableModel, chat_engine, random_table, script_engine, tiny_llama

from localspec.drafters import ModelDrafter
from localspec.engine import Engine
from localspec.errors import NumericsError, SettingsError
from localspec.generation import Generation
from localspec.settings import Settings

PROMPT = [1, 2, 3, 1, 2]
DRAFTERS: list[Callable[[], list[Any]]] = [list, lambda: ["ngram"], lambda: [ModelDrafter(tiny_llama())]]
MODES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.0, "seed": 1, "accept": "rejection"},
]


# Logits from which nothing can be drawn: an error that names the place, and nothing wrong before it or after it.


def _spoil(value: Callable[[mx.array], mx.array], at: int) -> Callable[[mx.array, mx.array], mx.array]:
    return lambda tokens, logits: value(logits) if tokens.size == at else logits


SPOILED: dict[str, Callable[[mx.array], mx.array]] = {
    "one not a number": lambda x: mx.where(mx.arange(x.shape[-1]) == 9, math.nan, x),
    "one plus infinity": lambda x: mx.where(mx.arange(x.shape[-1]) == 9, math.inf, x),
    "all masked": lambda x: mx.full(x.shape, -math.inf),
}


@pytest.mark.parametrize("kind", SPOILED)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_spoiled_row_is_an_error_at_its_place(kind: str, mode: dict[str, Any]) -> None:
    at = len(PROMPT) + 5
    for make in DRAFTERS:
        engine = Engine(tiny_llama(), drafters=make())
        for length in (1, 4):
            session = engine.new_session()
            asked: dict[str, Any] = {"max_tokens": 12, "draft_length": length, "logprobs": 4, **mode}
            spoiled = Settings.from_keywords(logits_processors=_spoil(SPOILED[kind], at), **asked)
            generation = engine.generation(session, PROMPT, spoiled)
            with pytest.raises(NumericsError, match=f"position {at} .*processors"):
                generation.run()
            clean = engine.generation(session, PROMPT, Settings(**asked)).run()  # the session is whole
            assert generation.ids == clean.ids[: len(generation.ids)]
            assert len(generation.ids) <= 5
            assert clean.ids == engine.generate(PROMPT, **asked).ids


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_bias_that_forbids_every_token_is_an_error_and_one_that_leaves_a_token_is_not(mode: dict[str, Any]) -> None:
    engine = Engine(tiny_llama(), drafters=[ModelDrafter(tiny_llama())])
    with pytest.raises(NumericsError, match=r"position 5 .*bias"):
        engine.generate(PROMPT, max_tokens=5, draft_length=2, logit_bias=dict.fromkeys(range(64), -math.inf), **mode)
    single = {token: -math.inf for token in range(64) if token != 17}
    generation = engine.generate(PROMPT, max_tokens=5, draft_length=2, logit_bias=single, logprobs=2, **mode)
    assert generation.ids == [17] * 5
    assert all(token.top_logprobs[0] == (17, 0.0) for token in generation.tokens)
    assert all(token.top_logprobs[1] == (0, -math.inf) for token in generation.tokens)


@pytest.mark.parametrize(
    "value", [{"repetition_penalty": 1e-40}, {"frequency_penalty": -3e38}, {"presence_penalty": -3e38}]
)
def test_penalties_that_overflow_are_no_wrong_token(value: dict[str, Any]) -> None:
    """Either the numbers hold, and the ids are the same with and without drafts, or it is an error."""
    engine = Engine(tiny_llama(), drafters=[ModelDrafter(tiny_llama())])
    ends = []
    for speculate in (False, True):
        try:
            ends.append(engine.generate([7] * 30, max_tokens=6, speculate=speculate, draft_length=2, **value).ids)
        except NumericsError:
            ends.append([])
    assert ends[0] == ends[1]
    assert ends[0] == [] or set(ends[0]) == {7}  # encouraged without measure


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize(
    "mode", [*MODES[:2], {"temperature": 1e-6, "seed": 3}, {"temperature": 1e6, "seed": 3}], ids=str
)
def test_half_precision_logits_with_many_exact_ties(dtype: Any, mode: dict[str, Any]) -> None:
    """Logits rounded to a few values: the lowest id of a tie wins, with and without drafts."""
    table = mx.round(random_table(4, 8, 1.5)).astype(dtype)
    ties = mx.sort(table.astype(mx.float32), axis=-1)
    assert (ties[..., -1] == ties[..., -2]).sum().item() > 15
    engine = Engine(TableModel(table), drafters=["ngram", ModelDrafter(TableModel(random_table(4, 8, 1.5)))])
    for extra in ({}, {"repetition_penalty": 1.2, "logit_bias": {3: 0.25}}):
        settings = {"max_tokens": 40, "logprobs": 8, **mode, **extra}
        plain = engine.generate([1, 2, 1, 2], speculate=False, **settings)
        for length in (2, 5):
            drafted = engine.generate([1, 2, 1, 2], draft_length=length, **settings)
            assert [(t.id, t.logprob, t.top_logprobs) for t in drafted.tokens] == [
                (t.id, t.logprob, t.top_logprobs) for t in plain.tokens
            ]
        for token in plain.tokens:
            assert list(token.top_logprobs) == sorted(token.top_logprobs, key=lambda pair: (-pair[1], pair[0]))
            if mode["temperature"] == 0:
                assert token.id == token.top_logprobs[0][0]


# Logits processors of the caller.


def test_processors_that_return_another_shape_are_refused() -> None:
    """Logits of another shape can be sampled from without an error, and mean nothing."""

    def flat(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits[0]

    def narrow(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits[:, :-1]

    def doubled(tokens: mx.array, logits: mx.array) -> mx.array:
        return mx.concatenate([logits, logits])

    def forgetful(tokens: mx.array, logits: mx.array) -> None:
        pass

    engine = Engine(tiny_llama(), drafters=["ngram"])
    for wrong, found in ((flat, r"shape \[64\]"), (narrow, r"\[1, 63\]"), (doubled, r"\[2, 64\]"), (forgetful, "None")):
        for length in (0, 3):
            with pytest.raises(SettingsError, match=rf"{wrong.__name__} must return .*\[1, 64\], not .*{found}"):
                engine.generate(PROMPT, max_tokens=6, draft_length=length, logits_processors=[wrong])


def test_a_processor_that_writes_into_its_logits_reaches_its_own_row_only() -> None:
    """Rows of one pass are views of one array in other programs: a write to the first would be seen by the last."""
    seen: list[list[float]] = []

    def watch(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(logits[0].tolist())  # type: ignore[arg-type]
        logits[:, :] = logits + 100.0 * mx.arange(64)[None, :]
        return logits

    model = tiny_llama()
    engine = Engine(model, drafters=[ModelDrafter(model)])
    generation = engine.generate(PROMPT, max_tokens=8, draft_length=3, logits_processors=[watch])
    assert generation.ids == [63] * 8  # each row was lifted once, by as much
    assert max(max(row) for row in seen) < 100


def test_settings_given_as_a_mapping_are_copied() -> None:
    bias = {3: 1.0}
    settings = Settings.from_keywords(logit_bias=bias)
    bias[3] = math.nan
    assert settings.logit_bias == {3: 1.0}
    assert Settings.from_keywords(logit_bias=None).logit_bias == {}
    assert hash(settings) == hash(Settings(logit_bias={3: 1.0}))


def test_a_bias_for_an_id_that_the_model_lacks_is_refused_before_anything_runs() -> None:
    engine = Engine(tiny_llama())
    for ask in (engine.stream, engine.generate):
        with pytest.raises(SettingsError, match=r"logit_bias: token id 64 is outside .*0 to 63"):
            ask(PROMPT, logit_bias={63: 1.0, 64: 1.0})
    assert len(engine.generate(PROMPT, logit_bias={63: 1.0}, max_tokens=2).ids) == 2


# Log-probabilities.


def test_top_logprobs_are_the_models_own_by_a_fresh_pass() -> None:
    """For tokens of every source, against the table that the model is made of."""
    target = random_table(1, 6, 1.2)
    kinds: list[list[Any]] = [["ngram"], [ModelDrafter(TableModel(random_table(2, 6, 1.2)))]]
    asked: dict[str, Any] = {"max_tokens": 90, "temperature": 0.8, "top_k": 3, "seed": 4, "logprobs": 4}
    for accept in ("coupled", "rejection"):
        sources = set()
        for drafters in kinds:
            engine = Engine(TableModel(target), drafters=drafters)
            generation = engine.generate([1, 2, 3], accept=accept, draft_length=3, **asked)
            ids = [1, 2, 3, *generation.ids]
            for token in generation.tokens:
                logits = target[ids[token.position - 2], ids[token.position - 1]]
                expected: Any = (logits - mx.logsumexp(logits)).tolist()
                best = sorted(range(6), key=lambda i: (-expected[i], i))[:4]
                assert [i for i, _ in token.top_logprobs] == best
                assert [v for _, v in token.top_logprobs] == pytest.approx([expected[i] for i in best], abs=1e-5)
                assert token.logprob == pytest.approx(expected[token.id], abs=1e-5)
                sources.add(token.source)
        assert sources >= {"plain", "ngram", "draft", "resampled", "bonus"}


def test_logprobs_are_not_computed_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    from localspec.sampling import Distribution

    top = Distribution.top

    def watched(self: Distribution, count: int) -> tuple[mx.array, mx.array]:
        calls.append(count)
        return top(self, count)

    monkeypatch.setattr(Distribution, "top", watched)
    engine = Engine(tiny_llama(), drafters=["ngram"])
    assert all(token.top_logprobs == () for token in engine.generate(PROMPT, max_tokens=8).tokens)
    assert calls == []
    generation = engine.generate(PROMPT, max_tokens=8, logprobs=2, draft_length=3)
    assert calls == [2] * generation.stats.target_passes  # once a pass, however many rows it has


# Seeds.


def test_another_answer_without_a_seed_and_the_same_with_the_reported_one_in_any_thread() -> None:
    """A chat that starts a thread per answer: random state that belongs to a thread begins anew in each.

    Odds of a false alarm: 20 tokens alike by chance, far below 1e-9; one fresh seed twice, 1e-9.
    """
    engine = chat_engine()
    chat = engine.conversation()
    asked: dict[str, Any] = {"max_tokens": 20, "temperature": 1.2, "xtc_probability": 0.5, "repetition_penalty": 1.1}
    found: list[Generation] = []

    def answer(seed: int | None) -> None:
        chat.reset()
        found.append(chat.send("hello", seed=seed, **asked).run())

    def in_a_thread(seed: int | None) -> Generation:
        thread = threading.Thread(target=answer, args=(seed,))
        thread.start()
        thread.join()
        return found[-1]

    first, second = in_a_thread(None), in_a_thread(None)
    assert first.ids != second.ids
    assert first.seed != second.seed
    for generation in (first, second):
        assert in_a_thread(generation.seed).ids == generation.ids
        assert generation.settings.seed == generation.seed


def test_drafting_does_not_shift_the_targets_draws_even_where_it_draws_itself() -> None:
    """Drafts of every kind between two tokens: the second's noise is its position's all the same."""
    model = TableModel(mx.zeros((6, 6, 6)))  # every id is as likely as any: noise alone decides
    engine = Engine(model, drafters=[ModelDrafter(TableModel(random_table(2, 6)))])
    asked: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seed": 9}
    plain = engine.generate([1, 2], speculate=False, **asked).ids
    assert len(set(plain)) > 3
    for length in (1, 3, 8):
        assert engine.generate([1, 2], draft_length=length, **asked).ids == plain


# Stops and limits.

TEXT = "one 😀 fish, two 👩‍👩‍👧 fish\nUser: red 中文 fish 😀😀 beta gamma, blue fish"


def _slices() -> st.SearchStrategy[str]:
    """Stops that occur, wherever they begin and end, inside of an emoji's several characters too."""
    starts = st.integers(0, len(TEXT) - 1)
    return st.builds(lambda start, count: TEXT[start : start + count], starts, st.integers(1, 12))


@profile(max_examples=120)
@given(
    stops=st.lists(_slices() | st.sampled_from(["nowhere", "fish!", "😀 fishes", "\nUsers", "beta gamut"]), max_size=4),
    limit=st.none() | st.integers(0, 60),
    length=st.integers(0, 8),
    logprobs=st.sampled_from([0, 2]),
)
def test_text_ids_log_probabilities_counts_and_caches_agree_at_the_cut(
    stops: list[str], limit: int | None, length: int, logprobs: int
) -> None:
    engine, prompt, answer = _scripted()
    session = engine.new_session()
    asked: dict[str, Any] = {"stop": stops, "max_tokens": limit, "logprobs": logprobs}
    settings = Settings.from_keywords(draft_length=length, **asked)
    generation = engine.generation(session, prompt, settings).run()
    places = [TEXT.index(stop) for stop in stops if stop in TEXT]
    cut = min(places, default=len(TEXT))
    shown = [i for i in generation.ids if i not in engine.end_ids]
    decoded = engine.tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert generation.ids == answer[: len(generation.ids)]
    if generation.finish_reason == "stop":
        assert generation.text == TEXT[:cut]
        assert any(stop in decoded for stop in stops) if places else generation.ids == answer
    else:
        assert len(generation.ids) == limit
        assert generation.text == decoded[: len(generation.text)]
        assert not any(stop in generation.text for stop in stops)
    assert generation.text == "".join(token.text for token in generation.tokens)
    assert all(len(token.top_logprobs) == logprobs for token in generation.tokens)
    assert generation.stats.emitted == len(generation.tokens) == sum(record.emitted for record in generation.rounds)
    if generation.tokens:
        assert session.ids == prompt + generation.ids
        assert all(cache.offset == len(session.ids) - 1 for cache in session.transaction.caches)
    plain = engine.generate(prompt, speculate=False, **asked)
    assert [(t.id, t.text, t.logprob, t.top_logprobs) for t in generation.tokens] == [
        (t.id, t.text, t.logprob, t.top_logprobs) for t in plain.tokens
    ]
    assert (generation.finish_reason, generation.text) == (plain.finish_reason, plain.text)


_MADE: list[tuple[Engine, list[int], list[int]]] = []


def _scripted() -> tuple[Engine, list[int], list[int]]:
    if not _MADE:
        _MADE.append(script_engine(TEXT))
    return _MADE[0]


@pytest.mark.parametrize("length", [1, 2, 4, 8])
def test_limits_around_the_draft_length(length: int) -> None:
    """0, 1, k, k + 1 and k + 2 tokens with k drafts, and none: exactly as many, and no row that was not needed."""
    engine, prompt, answer = _scripted()
    for limit in (0, 1, length, length + 1, length + 2, None):
        generation = engine.generate(prompt, max_tokens=limit, draft_length=length, logprobs=1)
        assert len(generation.ids) == (len(answer) if limit is None else limit)
        assert all(len(record.drafted) + 1 <= (limit or 2**31) for record in generation.rounds)
        if limit is not None and limit > 0:
            assert generation.stats.target_passes == -(-limit // (length + 1))
