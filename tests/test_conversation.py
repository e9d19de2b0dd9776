"""Chat turns share one cache, and an interrupted turn neither breaks the history nor the next turn."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import TEMPLATE, ScriptDrafter, ScriptModel, chat_engine, tiny_llama, tiny_tokenizer

from localspec.conversation import Conversation
from localspec.drafters import ModelDrafter
from localspec.engine import Engine
from localspec.errors import PromptTooLongError, SettingsError
from localspec.generation import Generation
from localspec.settings import Settings

ALTERNATING = (
    "{% set ns = namespace(last='assistant') %}"
    "{% for message in messages %}{% if message['role'] == ns.last %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% set ns.last = message['role'] %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _speaker(answers: list[str], *, wrong: tuple[int, ...] = (), **tokenizer: Any) -> Engine:
    """An engine that gives these answers, one per turn, to the messages "m0", "m1" and so on."""
    words = tiny_tokenizer(**tokenizer)
    script: list[int] = []
    for turn, answer in enumerate(answers):
        lead = ("\n" if turn else "") + f"<|im_start|>user\nm{turn}<|im_end|>\n<|im_start|>assistant\n"
        script += words.encode(lead, add_special_tokens=False)
        script += [*words.encode(answer, add_special_tokens=False), words.eos_token_id]
    script += [9] * 30
    drafter = ScriptDrafter(script, wrong=wrong, vocabulary=len(words))
    return Engine(ScriptModel(script, len(words)), words, drafters=[drafter], name="speaker")


def _cold(chat: Conversation, generation: Generation) -> list[int]:
    """The same prompt in a fresh session, plainly."""
    engine = chat.engine
    settings = {"max_tokens": generation.settings.max_tokens, "seed": generation.seed, "speculate": False}
    settings |= {"temperature": generation.settings.temperature, "stop": generation.settings.stop}
    return engine.generation(engine.new_session(), generation.prompt_ids, Settings.from_keywords(**settings)).run().ids


def _rendered(chat: Conversation, generation: Generation) -> str:
    return str(chat.engine.tokenizer.decode(generation.prompt_ids, skip_special_tokens=False))


@pytest.mark.parametrize("length", [0, 1, 3, 8, "auto"])
def test_second_turn_reuses_the_first(length: Any) -> None:
    """After an end token all of the first turn is reused: prompt, answer and the end token's place."""
    engine = _speaker(["the quick brown fox", "jumps over 中文 😀", "the lazy dog"])
    chat = engine.conversation()
    used = 0
    for turn, answer in enumerate(["the quick brown fox", "jumps over 中文 😀", "the lazy dog"]):
        generation = chat.send(f"m{turn}", draft_length=length).run()
        assert generation.text == answer
        assert generation.finish_reason == "stop"
        assert generation.ids == _cold(chat, generation)
        assert generation.stats.reused_tokens == max(used - 1, 0)  # the newest token is computed with the new ones
        used = chat.context_used
        assert used == len(generation.prompt_ids) + len(generation.ids)
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 3
    assert [m["content"] for m in chat.messages[1::2]] == ["the quick brown fox", "jumps over 中文 😀", "the lazy dog"]
    assert [m["content"] for m in chat.messages[::2]] == ["m0", "m1", "m2"]


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("drafter", ["ngram", "model", "both"])
def test_turns_after_a_limit_equal_cold_runs(drafter: str, temperature: float) -> None:
    model = ModelDrafter(tiny_llama(7, vocabulary=317, layers=1))
    drafters: list[Any] = {"ngram": ["ngram"], "model": [model], "both": ["ngram", model]}[drafter]
    engine = chat_engine(drafters=drafters)
    chat = engine.conversation("be terse")
    for turn in range(5):
        generation = chat.send(f"hello {turn}", max_tokens=9 + turn, temperature=temperature, seed=turn, draft_length=3)
        generation.run()
        assert generation.ids == _cold(chat, generation)
        assert _rendered(chat, generation) == engine.render(
            [{"role": "system", "content": "be terse"}, *chat.messages[:-1]]
        )
        if turn:
            assert generation.stats.reused_tokens > 20
            assert generation.stats.reused_tokens < generation.stats.prompt_tokens


@pytest.mark.parametrize("length", [0, 1, 4, "auto"])
@pytest.mark.parametrize("stop_after", [0, 1, 2, 3, 5, 8])
def test_a_turn_stopped_by_hand_is_kept_and_the_next_one_is_right(stop_after: int, length: Any) -> None:
    """Interrupted before any token, at the first, at later ones; the template insists on alternating roles."""
    engine = chat_engine(template=ALTERNATING, drafters=["ngram", ModelDrafter(tiny_llama(7, vocabulary=317))])
    chat = engine.conversation()
    first = chat.send("hello there", max_tokens=20, draft_length=length)
    for _ in range(stop_after):
        next(first)
    first.close()
    assert first.finish_reason is None
    if stop_after:
        assert chat.messages == [
            {"role": "user", "content": "hello there"},
            {"role": "assistant", "content": first.text},
        ]
        assert chat.context_used == len(first.prompt_ids) + stop_after
    second = chat.send("and now?", max_tokens=12, draft_length=length).run()
    assert second.ids == _cold(chat, second)
    assert _rendered(chat, second) == engine.render(chat.messages[:-1])
    if stop_after:
        assert second.stats.reused_tokens >= len(first.prompt_ids) - 1
    assert [m["role"] for m in chat.messages] in (["user", "assistant"] * 2, ["user", "assistant"])


def test_interrupted_while_the_prompt_is_processed() -> None:
    engine = chat_engine(template=ALTERNATING)
    chat = engine.conversation()

    def interrupt(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chat.send("hello", on_prefill=interrupt).run()
    assert chat.messages == []  # nothing was answered
    assert chat.context_used == 0
    generation = chat.send("hello", max_tokens=5).run()
    assert generation.ids == _cold(chat, generation)


def test_a_failure_in_the_middle_keeps_what_was_shown() -> None:
    engine = chat_engine(template=ALTERNATING)
    chat = engine.conversation()
    calls = []

    def fail(tokens: Any, logits: Any) -> Any:
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return logits

    generation = chat.send("hello", max_tokens=20, logits_processors=[fail], draft_length=0)
    with pytest.raises(KeyboardInterrupt):
        generation.run()
    assert 0 < len(generation.ids) < 6
    assert chat.messages[1] == {"role": "assistant", "content": generation.text}
    second = chat.send("again", max_tokens=6).run()
    assert second.ids == _cold(chat, second)
    assert second.stats.reused_tokens > 0  # the pass had not failed: what it computed is right
    assert len(chat.messages) == 4


def test_abandoning_the_loop_keeps_the_partial_answer() -> None:
    chat = chat_engine().conversation()
    for count, _ in enumerate(chat.send("hello", max_tokens=20), 1):
        if count == 4:
            break
    assert len(chat.messages) == 2
    second = chat.send("go on", max_tokens=5).run()
    assert second.ids == _cold(chat, second)


def test_sending_while_an_answer_is_unfinished_ends_that_answer() -> None:
    """The old generation is still referred to, so nothing else closes it."""
    engine = chat_engine(template=ALTERNATING)
    chat = engine.conversation()
    first = chat.send("hello", max_tokens=20, draft_length=4)
    next(first)
    next(first)
    second = chat.send("go on", max_tokens=8, draft_length=4)
    assert chat.messages == [{"role": "user", "content": "hello"}, {"role": "assistant", "content": first.text}]
    assert len(next(second).text) >= 0
    assert list(first) == []
    second.run()
    assert second.ids == _cold(chat, second)
    assert len(chat.messages) == 4
    third = chat.send("never started")
    chat.reset()
    assert chat.messages == []
    assert list(third) == []


def test_limits_of_0_and_1() -> None:
    chat = chat_engine(template=ALTERNATING).conversation()
    assert chat.send("one", max_tokens=0).run().finish_reason == "length"
    assert chat.messages[-1] == {"role": "assistant", "content": ""}
    generation = chat.send("two", max_tokens=1).run()
    assert generation.ids == _cold(chat, generation)
    generation = chat.send("three", max_tokens=3).run()
    assert generation.ids == _cold(chat, generation)
    assert len(chat.messages) == 6


def test_a_stop_string_is_not_part_of_the_history() -> None:
    engine = _speaker(["the quick brown fox", "unused"])
    chat = engine.conversation()
    first = chat.send("m0", stop="brown").run()
    assert chat.messages[-1]["content"] == first.text == "the quick "
    second = chat.send("m1", max_tokens=4).run()
    assert second.ids == _cold(chat, second)
    assert second.stats.reused_tokens >= len(first.prompt_ids) - 1


@pytest.mark.parametrize("text", ["", " ", "\n\t "])
def test_empty_messages_are_refused(text: str) -> None:
    chat = chat_engine().conversation()
    with pytest.raises(SettingsError, match="empty"):
        chat.send(text)
    assert chat.messages == []


def test_bad_settings_and_full_contexts_leave_the_history_alone() -> None:
    chat = chat_engine(context_length=80).conversation()
    chat.send("hi", max_tokens=5).run()
    before = list(chat.messages)
    with pytest.raises(SettingsError, match="temperature"):
        chat.send("x", temperature=-1)
    with pytest.raises(SettingsError, match="max_tokens"):
        chat.send("x", maxtokens=3)  # the nearest name is suggested
    with pytest.raises(PromptTooLongError, match="the conversation is full"):
        chat.send("long " * 60)
    assert chat.messages == before
    generation = chat.send("ok", max_tokens=None).run()
    assert generation.finish_reason in ("stop", "length")
    assert chat.context_used <= 80
    chat.reset()
    assert (chat.messages, chat.context_used) == ([], 0)
    assert chat.send("hi", max_tokens=3).run().stats.reused_tokens == 0


def test_a_template_that_refuses_says_so_in_one_line() -> None:
    engine = chat_engine(template=ALTERNATING)
    with pytest.raises(SettingsError, match=r"tiny's chat template refuses.*alternate") as caught:
        engine.generate([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    assert "\n" not in str(caught.value)
    with pytest.raises(SettingsError, match="no chat template"):
        chat_engine(template=None).conversation().send("hello")
    with pytest.raises(SettingsError, match="unknown role"):
        chat_engine(template=TEMPLATE).generate([{"role": "wizard", "content": "a"}])


def test_conversations_do_not_see_each_other() -> None:
    engine = chat_engine(drafters=["ngram", ModelDrafter(tiny_llama(7, vocabulary=317))])
    a, b = engine.conversation(), engine.conversation("you are another")
    for turn in range(3):
        pair = [a.send(f"to a {turn}", max_tokens=12, draft_length=2), b.send(f"b {turn}", max_tokens=15)]
        for _ in range(15):
            for generation in pair:
                next(generation, None)
        for chat, generation in zip((a, b), pair, strict=True):
            generation.run()
            assert generation.ids == _cold(chat, generation)
    assert [m["content"] for m in a.messages[::2]] == ["to a 0", "to a 1", "to a 2"]


def _starts(engine: Engine, prompt: Any) -> int:
    start = engine.tokenizer.bos_token_id
    ids = engine.encode(prompt)
    count = 0
    while count < len(ids) and ids[count] == start:
        count += 1
    return count


@pytest.mark.parametrize("adds_start", [False, True])
def test_exactly_one_start_token(adds_start: bool) -> None:
    """The template has it and the tokenizer adds it or not; a raw prompt with it pasted in, and without."""
    engine = chat_engine(adds_start=adds_start)
    assert _starts(engine, [{"role": "user", "content": "hi"}]) == 1
    assert _starts(engine, "<|im_start|>user") == 1
    assert _starts(engine, "hello") == int(adds_start)
    chat = engine.conversation()
    for turn in range(3):
        ids = chat.send(f"turn {turn}", max_tokens=4).run().prompt_ids
        assert ids[0] == 1
        assert ids[1] != 1


def test_a_rendered_chat_is_encoded_with_its_special_tokens() -> None:
    chat = _speaker(["the fox", "the dog"]).conversation()
    chat.send("m0").run()
    ids = chat.send("m1").run().prompt_ids
    assert ids.count(1) == 4
    assert ids.count(2) == 3
