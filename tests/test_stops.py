"""The earliest of end token, stop string and limit wins, and nothing after it is in text, ids, counts or caches."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import VOCABULARY, ScriptDrafter, ScriptModel, chat_engine, script_engine, tiny_llama, tiny_tokenizer

from localspec.drafters import ModelDrafter
from localspec.engine import Engine
from localspec.errors import PromptTooLongError, SettingsError
from localspec.generation import Generation
from localspec.settings import Settings

TEXT = "the quick brown fox jumps over the lazy dog, 中文和日本語 😀 end"
LENGTHS = [0, 1, 2, 3, 4, 5, 6, 7, 8, "auto"]


def _decode(engine: Engine, ids: list[int]) -> str:
    return str(engine.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _whole(generation: Generation) -> None:
    """What must hold of every generation that has come to its end."""
    assert generation.finish_reason in ("stop", "length")
    assert generation.stats.emitted == len(generation.ids) == sum(record.emitted for record in generation.rounds)
    assert sum(generation.stats.by_source.values()) == len(generation.ids)
    assert generation.stats.target_passes == len(generation.rounds)
    session = generation._session
    assert session.ids == generation.prompt_ids + generation.ids
    assert all(cache.offset == len(session.ids) - 1 for cache in session.transaction.caches)
    for index, token in enumerate(generation.tokens):
        assert token.position == len(generation.prompt_ids) + index
    for record in generation.rounds:
        assert record.accepted <= len(record.drafted)
        assert record.accepted <= record.emitted <= len(record.drafted) + 1


@pytest.mark.parametrize("length", LENGTHS)
def test_end_token_at_every_place_of_a_block(length: Any) -> None:
    """Drafts are right everywhere, also behind the end: with every answer length the end falls on every draft index."""
    places = set()
    for count in range(1, 12):
        script = [10, 11, 12, *range(20, 20 + count), 2, 30, 31, 32, 33, 34, 35, 36, 37, 38]
        words = tiny_tokenizer()
        engine = Engine(ScriptModel(script, len(words)), words, drafters=[ScriptDrafter(script, vocabulary=len(words))])
        generation = engine.generate(script[:3], draft_length=length, max_tokens=40)
        assert generation.ids == script[3 : 4 + count]
        assert generation.finish_reason == "stop"
        assert generation.text == _decode(engine, generation.ids[:-1])
        assert generation.tokens[-1].text == ""
        _whole(generation)
        places.add(generation.tokens[-1].draft_index)
    if length not in (0, "auto"):
        assert set(range(length)) <= places


def test_declaring_a_greedy_token_the_end_stops_there() -> None:
    """Run greedily, then make one of the tokens the end token: whatever the length, the run ends at its first place."""
    free = chat_engine(drafters=["ngram", ModelDrafter(tiny_llama(vocabulary=317))])
    prompt = [5, 6, 7, 5, 6]
    whole = free.generate(prompt, max_tokens=30).ids
    for index in range(0, 30, 3):
        free.tokenizer.eos_token_ids = {whole[index]}
        for length in (0, 1, 3, 8, "auto"):
            generation = free.generate(prompt, max_tokens=30, draft_length=length)
            assert generation.ids == whole[: whole.index(whole[index]) + 1]
            assert generation.finish_reason == "stop"
            _whole(generation)


@pytest.mark.parametrize("length", LENGTHS)
def test_limit_and_end_in_one_block(length: Any) -> None:
    """[10, 11, END, 20, 21, 22]: whatever comes first in emission order."""
    words = tiny_tokenizer()
    script = [50, 10, 11, 2, 20, 21, 22, 23, 24, 25, 26]
    engine = Engine(ScriptModel(script, len(words)), words, drafters=[ScriptDrafter(script, vocabulary=len(words))])
    for limit, reason, count in ((1, "length", 1), (2, "length", 2), (3, "stop", 3), (4, "stop", 3), (5, "stop", 3)):
        generation = engine.generate([50], max_tokens=limit, draft_length=length)
        assert (generation.finish_reason, generation.ids) == (reason, script[1 : 1 + count])
        _whole(generation)


@pytest.mark.parametrize("length", [0, 1, 4, 8, "auto"])
@pytest.mark.parametrize("limit", [0, 1, 2, 3, 4, 5, 8, 9, 10, 31])
def test_max_tokens_is_exact(limit: int, length: Any) -> None:
    for engine in (Engine(tiny_llama()), Engine(tiny_llama(), drafters=[ModelDrafter(tiny_llama())])):
        generation = engine.generate([1, 2, 3, 1, 2], max_tokens=limit, draft_length=length)
        assert len(generation.ids) == limit
        assert generation.finish_reason == "length"
        assert all(len(record.drafted) < limit for record in generation.rounds)  # no draft past the limit
        if limit:
            _whole(generation)


def test_max_tokens_0_runs_nothing() -> None:
    engine = chat_engine()
    generation = engine.stream([1, 2, 3], max_tokens=0)
    assert list(generation) == []
    assert (generation.finish_reason, generation.text, generation.rounds) == ("length", "", [])
    assert generation.stats.as_dict()["tokens_per_pass"] is None


@pytest.mark.parametrize("length", [0, 1, 4, 8, "auto"])
def test_without_a_limit_the_context_ends_it(length: Any) -> None:
    for kind in (["ngram"], [ModelDrafter(tiny_llama(), context_length=20)]):
        engine = Engine(tiny_llama(), drafters=kind, context_length=24)
        for limit, expected in ((None, 19), (19, 19), (100, 19), (18, 18)):
            generation = engine.generate([1, 2, 3, 1, 2], max_tokens=limit, draft_length=length)
            assert len(generation.ids) == expected
            assert generation.finish_reason == "length"
            _whole(generation)
        assert len(engine.generate([1] * 23, max_tokens=None, draft_length=length).ids) == 1
        for count in (24, 25):
            with pytest.raises(PromptTooLongError, match="24"):
                engine.generate([1] * count)


def test_without_any_limit_the_end_token_ends_it() -> None:
    engine, prompt, answer = script_engine("a" * 700)
    generation = engine.generate(prompt, max_tokens=None, draft_length=8)
    assert (generation.ids, generation.finish_reason, generation.text) == (answer, "stop", "a" * 700)


STOPS = ["brown", " fox jumps", "n f", "quick", "q", "dog,", "中", "日本", "😀", " e", "the", "t", "end", " 😀 e"]


@pytest.mark.parametrize("length", LENGTHS)
def test_stop_strings_wherever_they_fall(length: Any) -> None:
    """Inside a token, over several, at the very start, in the middle of a character's bytes' tokens."""
    engine, prompt, _ = script_engine(TEXT)
    for stop in STOPS:
        generation = engine.generate(prompt, stop=[stop], draft_length=length)
        assert generation.text == TEXT[: TEXT.index(stop)], stop
        assert generation.finish_reason == "stop"
        assert stop in _decode(engine, generation.ids)
        assert stop not in _decode(engine, generation.ids[:-1])  # not one token more than it takes
        _whole(generation)


def test_the_earliest_of_several_stops_wins() -> None:
    engine, prompt, _ = script_engine(TEXT)
    for stops, cut in (
        (["jumps", "fox"], "fox"),
        (["fox jumps over", "jumps"], "fox jumps over"),
        (["nowhere", "lazy"], "lazy"),
        (["ox", "fox"], "fox"),
        (["quick brown cow", "brown"], "brown"),
    ):
        for length in (0, 3, 8):
            generation = engine.generate(prompt, stop=stops, draft_length=length)
            assert generation.text == TEXT[: TEXT.index(cut)]
            assert generation.finish_reason == "stop"


@pytest.mark.parametrize("length", [0, 1, 4, 8])
def test_text_held_back_for_a_stop_is_released_in_the_end(length: int) -> None:
    engine, prompt, answer = script_engine(TEXT)
    for stop in ("end of it", "😀 ends", "dog, but", "zzz"):
        generation = engine.generate(prompt, stop=[stop], draft_length=length)
        assert (generation.text, generation.finish_reason, generation.ids) == (TEXT, "stop", answer)
        for limit in range(1, len(answer)):
            cut = engine.generate(prompt, stop=[stop], draft_length=length, max_tokens=limit)
            assert cut.text == _decode(engine, answer[:limit])
            assert cut.finish_reason == "length"
            _whole(cut)


@pytest.mark.parametrize("length", [0, 4])
def test_a_stop_on_the_last_allowed_token_is_a_stop(length: int) -> None:
    engine, prompt, _ = script_engine(TEXT)
    full = engine.generate(prompt, stop="jumps", draft_length=length)
    count = len(full.ids)
    for limit, reason in ((count - 1, "length"), (count, "stop"), (count + 1, "stop")):
        generation = engine.generate(prompt, stop="jumps", draft_length=length, max_tokens=limit)
        assert generation.finish_reason == reason
        assert len(generation.ids) == min(limit, count)
        assert generation.text == (full.text if reason == "stop" else _decode(engine, generation.ids))


@pytest.mark.parametrize("length", [0, 1, 5, "auto"])
@pytest.mark.parametrize("temperature", [0, 1.3])
def test_text_is_the_decoded_ids(length: Any, temperature: float) -> None:
    """Random ids of a byte-level vocabulary: mostly unfinished characters and broken bytes."""
    engine = chat_engine(drafters=["ngram", ModelDrafter(tiny_llama(4, vocabulary=317))])
    for seed in range(6):
        settings: dict[str, Any] = {"max_tokens": 25 + 3 * seed, "temperature": temperature, "seed": seed}
        generation = engine.generate([3 + seed, 4, 5], draft_length=length, **settings)
        ids = generation.ids
        shown = ids[:-1] if ids[-1] in engine.end_ids else ids
        assert generation.text == "".join(token.text for token in generation.tokens) == _decode(engine, shown)
        assert generation.ids == engine.generate([3 + seed, 4, 5], speculate=False, **settings).ids


def test_streamed_text_grows_and_is_never_taken_back() -> None:
    engine, prompt, answer = script_engine(TEXT)
    generation = engine.stream(prompt, draft_length=5, stop="nowhere")
    shown = ""
    for token in generation:
        assert TEXT.startswith(shown)
        shown += token.text
        assert generation.text == shown
        assert generation.tokens[-1] is token
        assert (generation.finish_reason is not None) == (len(generation.tokens) == len(answer))
    assert shown == TEXT


def test_ids_without_a_tokenizer_have_no_text_and_no_end() -> None:
    engine = Engine(tiny_llama())
    generation = engine.generate([1, 2, 3], max_tokens=9)
    assert (generation.text, len(generation.ids), generation.finish_reason) == ("", 9, "length")
    with pytest.raises(SettingsError, match="tokenizer"):
        engine.generate([1, 2, 3], stop="x")
    with pytest.raises(SettingsError, match="list of ids"):
        engine.generate("hello")


def test_prompts_that_cannot_be_run_are_refused_in_one_line() -> None:
    engine = chat_engine()
    for prompt in ([], [len(engine.tokenizer)], [-1], [2**40], [1, "a"], [{"role": "user"}], [None], [True]):
        with pytest.raises(SettingsError) as caught:
            engine.generate(prompt)
        assert "\n" not in str(caught.value)
    generation = engine.generate([VOCABULARY], max_tokens=1)
    assert len(generation.ids) == 1


def test_closing_while_text_is_held_back_keeps_what_was_yielded() -> None:
    """Tokens that wait for a stop string to be ruled out are decided, but not yielded: a close drops them."""
    engine, prompt, answer = script_engine(TEXT)
    for kept in range(1, 12):
        session = engine.new_session()
        generation = engine.generation(session, prompt, Settings(stop=("the quick brown cow",), draft_length=3))
        for _ in range(kept):
            next(generation)
        generation.close()
        assert generation.ids == answer[:kept]
        assert session.ids == prompt + answer[:kept]
        assert all(cache.offset == len(session.ids) - 1 for cache in session.transaction.caches)
