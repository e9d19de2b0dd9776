"""Drafts of a model with another tokenizer: what survives the way through the text, and that no id depends on it."""

from __future__ import annotations

import functools
import itertools
import json
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import cachekinds
import pytest
from checkpoints import byte_tokens, save_model
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tiny import CORPUS, IM_END, IM_START, ScriptModel, chat_engine, tiny_llama, tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from localspec import load
from localspec.drafters import ModelDrafter, TextDrafter
from localspec.drafters.protocol import Draw, Proposal, common_prefix
from localspec.drafters.spelling import MARK, TAIL, Spelling
from localspec.drafters.translation import Translation
from localspec.engine import Engine
from localspec.errors import IncompatibleDrafterError, SettingsError
from localspec.noise import Noise
from localspec.settings import Settings

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    " leading  spaces,\tand tabs\n\n    def f(x):\n        return x\n",
    "中文和日本語 😀 👩‍👩‍👧 naïve café e\u0301",
    "<|im_end|> in words, <|other|> too; <0x0A> \\n",
    "the the quickthe quick, dog dogs dogged don't doesn't it?",
]


def _wrapped(backend: Tokenizer, **names: Any) -> TokenizerWrapper:
    return TokenizerWrapper(
        PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **names)
    )


@functools.cache
def bytewise(specials: tuple[str, ...] = (IM_START, IM_END)) -> TokenizerWrapper:
    """A token per byte; other ids than `tiny_tokenizer`'s."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return _wrapped(backend)


@functools.cache
def spaced() -> TokenizerWrapper:
    """Like Llama 2's: words begin with a mark, a text with one too, unknown characters are spelt in byte tokens, and
    encoding adds the start token."""
    learned = Tokenizer(models.BPE())
    learned.normalizer = normalizers.Replace(" ", "▁")
    learned.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["▁"], show_progress=False)
    learned.train_from_iterator([text for text in CORPUS if text.isascii()], trainer)
    model = json.loads(learned.to_str())["model"]
    names = ["<unk>", "<s>", *[f"<0x{i:02X}>" for i in range(256)], *model["vocab"]]
    backend = Tokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=[tuple(merge) for merge in model["merges"]],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names[:2]])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _wrapped(backend, bos_token="<s>", unk_token="<unk>")


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))


def _chunks(ids: Sequence[int], seed: int) -> list[list[int]]:
    rng, out, ids = random.Random(seed), [], list(ids)
    while ids:
        size = rng.randrange(1, 6)
        out.append(ids[:size])
        ids = ids[size:]
    return out


texts = st.lists(st.sampled_from([*TEXTS, " ", "\n", "a", "é", "😀", "the", " fox", "!"]), max_size=8).map("".join)


class TestTranslation:
    @given(texts, st.integers(0, 3))
    def test_is_the_texts_own_spelling_however_it_arrives(self, text: str, seed: int) -> None:
        """Byte-level, both ways: nothing is lost, and nothing is spelt otherwise than in one go."""
        for one, other in ((tiny_tokenizer(), bytewise()), (bytewise(), tiny_tokenizer())):
            translation = Translation(Spelling(one), Spelling(other))
            for chunk in _chunks(_encode(one, text), seed):
                before = list(translation.ids)
                kept = translation.read(chunk)
                assert translation.ids[:kept] == before[:kept]
            assert not translation.pending
            assert translation.ids == _encode(other, text)

    @given(texts, st.integers(0, 3))
    def test_says_the_same_where_texts_begin_with_a_space_of_their_own(self, text: str, seed: int) -> None:
        for one, other in ((tiny_tokenizer(), spaced()), (spaced(), tiny_tokenizer())):
            translation = Translation(Spelling(one), Spelling(other))
            for chunk in _chunks(_encode(one, text), seed):
                translation.read(chunk)
            said = other.decode(translation.ids[len(Spelling(other).start) :])
            whole = one.decode(_encode(one, text))
            assert whole.startswith(said) if translation.pending else said == whole

    def test_an_unfinished_character_waits(self) -> None:
        translation = Translation(Spelling(bytewise()), Spelling(tiny_tokenizer()))
        ids = _encode(bytewise(), "a😀b")
        translation.read(ids[:3])
        assert translation.pending
        assert translation.ids == _encode(tiny_tokenizer(), "a")
        translation.read(ids[3:5])
        assert not translation.pending
        assert translation.ids == _encode(tiny_tokenizer(), "a😀")

    def test_special_tokens_are_those_of_the_same_name(self) -> None:
        words, other = tiny_tokenizer(), bytewise()
        start, end = 1, 2
        translation = Translation(Spelling(words), Spelling(other))
        translation.read([start, *_encode(words, "user\nhi"), end, *_encode(words, "\n"), start])
        names = other.get_vocab()
        assert translation.ids == [
            names[IM_START],
            *_encode(other, "user\nhi"),
            names[IM_END],
            *_encode(other, "\n"),
            names[IM_START],
        ]
        assert translation.run == []

    def test_what_stood_before_an_unknown_special_token_is_left_out(self) -> None:
        words, other = tiny_tokenizer(), bytewise((IM_END,))
        translation = Translation(Spelling(words), Spelling(other))
        translation.read([1, *_encode(words, "user\nhi"), 2, *_encode(words, "more")])
        assert translation.ids == [*_encode(other, "user\nhi"), other.get_vocab()[IM_END], *_encode(other, "more")]
        assert translation.read([1]) == 0
        assert translation.ids == []
        translation.read(_encode(words, "assistant"))
        assert translation.ids == _encode(other, "assistant")

    def test_the_names_of_special_tokens_are_words_in_a_text(self) -> None:
        words, other = tiny_tokenizer(), bytewise()
        translation = Translation(Spelling(words), Spelling(other))
        translation.read(_encode(words, "say <|im_end|> now"))
        assert other.get_vocab()[IM_END] not in translation.ids
        assert other.decode(translation.ids) == "say <|im_end|> now"

    def test_a_start_token_is_there_once(self) -> None:
        other = spaced()
        start = other.get_vocab()["<s>"]
        same = Spelling(bytewise(("<s>",)))
        translation = Translation(same, Spelling(other))
        assert translation.ids == [start]
        translation.read([bytewise(("<s>",)).get_vocab()["<s>"], *_encode(bytewise(("<s>",)), "a")])
        assert translation.ids.count(start) == 1

    def test_costs_the_same_behind_a_long_text(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lengths: list[int] = []
        translation = Translation(Spelling(tiny_tokenizer()), Spelling(bytewise()))
        translation.read(_encode(tiny_tokenizer(), TEXTS[0] * 300))
        encode = Spelling.encode
        monkeypatch.setattr(Spelling, "encode", lambda self, text: lengths.append(len(text)) or encode(self, text))
        for token in _encode(tiny_tokenizer(), TEXTS[0] * 20):
            translation.read([token])
        assert max(lengths) <= TAIL * 4


def _draw(**settings: Any) -> Draw:
    return Draw(Settings(**settings), Noise(1), 400)


class Knowing(ModelDrafter):
    """Says how a text goes on, from wherever the context is in it, and then its end token."""

    def __init__(self, text: str, tokenizer: TokenizerWrapper) -> None:
        super().__init__(ScriptModel([], len(tokenizer)))
        self.text, self.words = text, tokenizer

    def fresh(self) -> Knowing:
        return Knowing(self.text, self.words)

    def propose(self, length: int, draw: Draw) -> Proposal | None:
        start = len(Spelling(self.words).start)
        said = self.words.decode(self.context[start:])
        assert self.text.startswith(said)
        ids = self.context[start:]
        whole = _encode(self.words, self.text)
        if whole[: len(ids)] == ids:
            following = whole[len(ids) :]
        else:  # in bytes, which any text can go on with
            following = [self.words.get_vocab()[f"<0x{byte:02X}>"] for byte in self.text[len(said) :].encode()]
        end = self.words.get_vocab().get(IM_END)
        return Proposal([*following, *([] if end is None else [end])][:length], "draft")


class _Interrupt:
    """Ctrl-C at the n-th line that runs in the modules of these drafters, loops counted once."""

    FILES = ("through_text.py", "translation.py", "small_model.py")

    def __init__(self, number: int) -> None:
        self.left = number
        self._seen: set[tuple[str, int]] = set()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self.FILES):
            return None
        line = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and line not in self._seen and self.left > 0:
            self._seen.add(line)
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
        return self


def _scripted(text: str, draft: TokenizerWrapper, target: TokenizerWrapper) -> TextDrafter:
    """A draft that says `text`, whatever of it was said, and then its end token."""
    drafter = TextDrafter(ScriptModel([], len(draft)), draft, target)
    drafter._inner = Knowing(text, draft)
    return drafter


class TestProposals:
    @pytest.mark.parametrize("text", TEXTS)
    @pytest.mark.parametrize("draft", [bytewise, spaced])
    def test_a_draft_that_knows_the_answer_is_believed(self, draft: Any, text: str) -> None:
        """Followed token by token: all that is proposed is what comes, and there is something nearly always."""
        words = tiny_tokenizer()
        drafter = _scripted("user" + text, draft(), words)
        prompt, answer = _encode(words, "user"), _encode(words, "user" + text)
        assert answer[: len(prompt)] == prompt
        answer = answer[len(prompt) :]
        drafter.follow(prompt)
        drafted = right = rounds = 0
        for place, token in enumerate(answer):
            proposal = drafter.propose(6, _draw())
            drafter.commit([token])
            if proposal is None:
                continue
            assert (proposal.source, proposal.q) == ("text", None)
            rest = [*answer[place:], words.get_vocab()[IM_END]]
            said = words.decode(proposal.tokens).rstrip(MARK)
            assert words.decode(rest).startswith(said), "another text"
            rounds, drafted = rounds + 1, drafted + len(proposal.tokens)
            right += common_prefix(proposal.tokens, rest)
        assert rounds >= len(answer) / 3
        assert right >= 0.8 * drafted  # a word that goes on may be spelt otherwise

    def test_the_last_token_is_not_proposed_as_it_may_go_on(self) -> None:
        words = tiny_tokenizer()
        drafter = _scripted("the quick brown", bytewise(), words)
        drafter.follow(_encode(words, "the"))
        assert _encode(words, "the quick")[-1] != _encode(words, "the qui")[-1]
        proposal = drafter.propose(3, _draw())  # four bytes: " qui"
        expected = _encode(words, "the qui")[1:-1]
        assert (proposal.tokens if proposal else []) == expected

    def test_nothing_is_proposed_that_would_change_how_the_context_is_spelt(self) -> None:
        words = tiny_tokenizer()
        assert len(_encode(words, "user")) == 1
        drafter = _scripted("user and user", bytewise(), words)
        drafter.follow(_encode(words, "us"))
        assert drafter.propose(6, _draw()) is None
        drafter.follow(_encode(words, "user"))
        assert drafter.propose(6, _draw()) is not None

    def test_the_end_token_is_proposed_by_name(self) -> None:
        words = tiny_tokenizer()
        drafter = _scripted("the dog", bytewise(), words)
        drafter.follow(_encode(words, "the dog"))
        proposal = drafter.propose(3, _draw())
        assert proposal is not None
        assert proposal.tokens == [words.get_vocab()[IM_END]]

    def test_the_name_of_a_special_token_in_words_is_no_special_token(self) -> None:
        words = tiny_tokenizer()
        drafter = _scripted("a <|im_end|> b", bytewise(), words)
        drafter.follow(_encode(words, "a <|im"))
        proposal = drafter.propose(7, _draw())
        special = words.get_vocab()[IM_END]
        assert special not in (proposal.tokens if proposal else [])
        assert special in words.encode("a <|im_end|> b", add_special_tokens=False)  # as text is read elsewhere

    def test_nothing_is_proposed_within_a_character(self) -> None:
        other = tiny_tokenizer()
        drafter = _scripted("a😀b", other, bytewise())
        ids = _encode(bytewise(), "a😀b")
        drafter.follow(ids[:2])
        assert drafter.propose(4, _draw()) is None
        drafter.commit(ids[2:5])
        assert drafter.propose(6, _draw()) is not None

    def test_half_a_character_is_not_proposed(self) -> None:
        words = tiny_tokenizer()
        drafter = _scripted("ab 😀😀😀", bytewise(), words)
        drafter.follow(_encode(words, "ab"))
        for length in range(1, 9):
            proposal = drafter.propose(length, _draw())
            tokens = proposal.tokens if proposal else []
            assert tokens == _encode(words, "ab 😀😀😀")[len(_encode(words, "ab")) :][: len(tokens)]

    def test_drafts_do_not_depend_on_noise_or_settings(self) -> None:
        """So that a one-hot q is the truth, under every rule of acceptance."""
        drafter = TextDrafter(tiny_llama(3, vocabulary=len(bytewise())), bytewise(), tiny_tokenizer())
        drafter.follow(_encode(tiny_tokenizer(), TEXTS[0]))
        proposals = []
        for seed, settings in enumerate([{}, {"temperature": 1.5}, {"temperature": 1.0, "accept": "rejection"}]):
            proposals.append(drafter.propose(8, Draw(Settings(**settings), Noise(seed), 400)))  # type: ignore[arg-type]
        assert proposals[0] is not None
        assert proposals[0] == proposals[1] == proposals[2]

    def test_what_is_proposed_does_not_depend_on_how_the_context_came(self) -> None:
        words = tiny_tokenizer()
        ids = _encode(words, "".join(TEXTS))
        model = tiny_llama(3, vocabulary=len(bytewise()))
        rng = random.Random(4)
        used = TextDrafter(model, bytewise(), words)
        for _ in range(25):
            used.follow(ids[: rng.randrange(1, len(ids))])
            proposal = used.propose(rng.randrange(1, 7), _draw())
            if rng.random() < 0.3 and proposal is not None:
                used.commit(proposal.tokens)
            if rng.random() < 0.2:
                used.rewind(rng.randrange(len(used.context)))
            if rng.random() < 0.1:
                used.reset()
        used.follow(ids)
        fresh = used.fresh()
        fresh.follow(ids)
        one, other = used.propose(6, _draw()), fresh.propose(6, _draw())
        assert one is not None
        assert one == other
        assert used._inner.context == fresh._inner.context

    def test_an_interrupt_at_any_line_is_made_good(self) -> None:
        """What the session does after one, `rewind` to what is kept, leaves it as if nothing had been."""
        words, model = tiny_tokenizer(), tiny_llama(3, vocabulary=len(bytewise()))
        ids = _encode(words, TEXTS[0] * 2)
        other = TextDrafter(model, bytewise(), words)
        other.follow(ids[:24])
        end = 24
        while (expected := other.propose(4, _draw())) is None:  # it says bytes at random, few of them a text
            other.commit([ids[end]])
            end += 1
        for number in itertools.count(1):
            drafter = other.fresh()
            drafter.follow(ids[:20])
            drafter.propose(3, _draw())
            drafter.commit(ids[20:end])
            before = sys.gettrace()
            sys.settrace(interrupt := _Interrupt(number))
            try:
                drafter.propose(3, _draw())
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
            if interrupt.left > 0:
                assert number > 60
                return
            drafter.rewind(end)
            assert drafter.propose(4, _draw()) == expected, number
            assert drafter._inner.context == other._inner.context
            assert drafter._inner._transaction.held == other._inner._transaction.held


@pytest.mark.parametrize("temperature", [0, 0.9])
@pytest.mark.parametrize("draft", [bytewise, spaced])
def test_ids_are_those_of_plain_decoding(draft: Any, temperature: float) -> None:
    """Two turns of a chat; the draft is a random model, and a target that says what the draft does."""
    plain = chat_engine(scale=1.0)
    other = draft()
    drafter = TextDrafter(tiny_llama(5, vocabulary=len(other), scale=1.0), other, plain.tokenizer)
    engine = Engine(plain.model, plain.tokenizer, drafters=["ngram", drafter])
    for length in (1, 4):
        chats = [engine.conversation(system="be brief") for engine in (plain, engine)]
        for turn in ("the quick", "中文 😀"):
            settings: dict[str, Any] = {"max_tokens": 24, "temperature": temperature, "seed": 3}
            first = chats[0].send(turn, speculate=False, **settings).run().ids
            generation = chats[1].send(turn, draft_length=length, **settings).run()
            assert generation.ids == first


@pytest.mark.parametrize("accept", ["coupled", "rejection", "block"])
def test_right_drafts_are_accepted_and_shown_as_such(accept: str) -> None:
    from tiny import script_engine

    text = "the quick brown fox jumps over the lazy dog, doesn't it?\n"
    engine, start, answer = script_engine(text, drafters=[])
    drafter = _scripted("say it" + text, bytewise(), engine.tokenizer)
    engine = Engine(engine.model, engine.tokenizer, drafters=[drafter])
    generation = engine.generate(start, max_tokens=60, draft_length=8, accept=accept)
    assert generation.ids == answer
    assert generation.stats.by_source["text"] > len(answer) / 3
    assert generation.stats.acceptance_rate is not None
    assert generation.stats.acceptance_rate > 0.8


@pytest.mark.parametrize("kind", ["plain", "mamba", "recurrence and windows"])
def test_the_next_turn_may_come_from_another_thread(kind: str) -> None:
    """What a draft left to the device belongs to the thread that began it."""
    words = tiny_tokenizer()
    drafter = TextDrafter(cachekinds.model(kind), cachekinds.letters(), words)
    engine = Engine(tiny_llama(vocabulary=len(words), scale=1.0), words, drafters=[drafter])
    prompt = words.encode("the quick brown fox jumps over", add_special_tokens=False)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for tokens in (8, 9, 10):
            session = engine.new_session()
            settings = Settings.from_keywords(max_tokens=tokens, draft_length=3, temperature=0.9, seed=tokens)
            ids = one.submit(lambda: engine.generation(session, prompt, settings).run().ids).result()  # noqa: B023
            longer = [*prompt, *ids, *prompt[:3]]
            turn = other.submit(lambda: engine.generation(session, longer, settings).run().ids).result()  # noqa: B023
            cold = engine.generate(longer, max_tokens=tokens, temperature=0.9, seed=tokens, speculate=False)
            assert turn == cold.ids


class TestRefusals:
    def test_another_vocabulary_is_refused_unless_it_is_allowed(self, tmp_path: Path) -> None:
        tokens = byte_tokens()
        tokens[0], tokens[1] = tokens[1], tokens[0]
        save_model(tmp_path / "target", num_hidden_layers=6)
        save_model(tmp_path / "draft", tokens=tokens, seed=2)
        with pytest.raises(IncompatibleDrafterError) as caught:
            load(tmp_path / "target", draft=tmp_path / "draft", dtype="float32")
        assert str(caught.value).count("--draft-through-text") == 1
        engine = load(tmp_path / "target", draft=tmp_path / "draft", draft_through_text=True, dtype="float32")
        assert [drafter.name for drafter in engine.drafters] == ["ngram", "text"]
        plain = engine.generate("abcabc", max_tokens=20, speculate=False).ids
        assert engine.generate("abcabc", max_tokens=20, draft_length=3).ids == plain

    def test_one_vocabulary_needs_no_text(self, tmp_path: Path) -> None:
        save_model(tmp_path / "target", num_hidden_layers=6)
        save_model(tmp_path / "draft", seed=2)
        engine = load(tmp_path / "target", draft=tmp_path / "draft", draft_through_text=True, dtype="float32")
        assert [drafter.name for drafter in engine.drafters] == ["ngram", "draft"]

    @pytest.mark.parametrize("draft", [None, "layers"])
    def test_without_a_draft_model(self, draft: str | None, tmp_path: Path) -> None:
        save_model(tmp_path / "target", num_hidden_layers=6)
        with pytest.raises(SettingsError, match="name one"):
            load(tmp_path / "target", draft=draft, draft_through_text=True, dtype="float32")

    def test_without_tokenizers(self) -> None:
        with pytest.raises(IncompatibleDrafterError, match="tokenizers of both"):
            TextDrafter(tiny_llama(), None, tiny_tokenizer())
        drafter = TextDrafter(tiny_llama(vocabulary=len(bytewise())), bytewise(), tiny_tokenizer())
        with pytest.raises(IncompatibleDrafterError, match="another tokenizer"):
            Engine(tiny_llama(), drafters=[drafter])
        with pytest.raises(IncompatibleDrafterError, match="another tokenizer"):
            Engine(tiny_llama(vocabulary=400), tiny_tokenizer(pieces=["<more>"]), drafters=[drafter])
        Engine(tiny_llama(vocabulary=400), tiny_tokenizer(), drafters=[drafter])


def _inner(test: Any) -> Any:
    """A property test as a plain function."""
    return test.hypothesis.inner_test


FAULTS: dict[str, tuple[str, Any, Any]] = {
    "nothing is replaced": (
        "continued",
        lambda was: lambda self, ids, text: (0, (was(self, ids, text) or (0, []))[1]),
        lambda: [
            _inner(TestTranslation.test_is_the_texts_own_spelling_however_it_arrives)(None, TEXTS[4] * 3, seed)
            for seed in range(4)
        ],
    ),
    "special tokens are read out of the text": (
        "encode",
        lambda was: lambda self, text: list(self._tokenizer.encode(text, add_special_tokens=False)),
        lambda: TestTranslation().test_the_names_of_special_tokens_are_words_in_a_text(),
    ),
    "drafts are read without what stands before them": (
        "added_text",
        lambda was: lambda self, ids, more: self.decode(more),
        lambda: TestProposals().test_a_draft_that_knows_the_answer_is_believed(spaced, TEXTS[0]),
    ),
    "what cannot be joined is joined": (
        "continued",
        lambda was: lambda self, ids, text: (0, self.encode(text)),
        lambda: TestProposals().test_nothing_is_proposed_that_would_change_how_the_context_is_spelt(),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, wrong, test = FAULTS[fault]
    test()
    monkeypatch.setattr(Spelling, name, wrong(getattr(Spelling, name)))
    with pytest.raises(AssertionError):
        test()
