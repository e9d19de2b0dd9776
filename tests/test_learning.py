"""What an engine learns from its answers, and what it may not: tiny random models, a folder of the test's own."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx
import pytest
from scripted_engine import Scripted, run
from tiny import ScriptDrafter, ScriptModel, chat_engine, tiny_llama, tiny_tokenizer
from tiny_checkpoint import write_tiny_checkpoint

import localspec
from localspec.commands import progress
from localspec.drafters.protocol import Draw, Proposal
from localspec.engine import Engine
from localspec.errors import LearningWarning, SettingsError
from localspec.generation import Generation
from localspec.learning import Learning
from localspec.ngrams import NgramFile, NgramStore, Shelf
from localspec.ngrams.store import ORDERS, contexts
from localspec.tokens import Level
from localspec.vocabulary import fingerprint

PROMPT = "the quick brown fox"
LENGTH = 60
LEVELS: tuple[Level, ...] = get_args(Level)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LOCALSPEC_NGRAMS", raising=False)
    return tmp_path / "home"


def engine(*, learn: bool | Learning = True, seed: int = 0, **keywords: Any) -> Engine:
    words = tiny_tokenizer()
    return Engine(tiny_llama(seed, vocabulary=len(words)), words, name="tiny", learn=learn, **keywords)


def generate(maker: Engine, prompt: str = PROMPT, **settings: Any) -> Generation:
    # A fixed length: costs, which auto goes by, say little of a model this small.
    return maker.generate(prompt, **{"max_tokens": LENGTH, "draft_length": 4, **settings})


def learned() -> NgramFile:
    """What the disk has of the tiny tokenizer's answers."""
    return Shelf().file("learned", fingerprint(tiny_tokenizer()))


def files(home: Path) -> list[str]:
    return sorted(str(path.relative_to(home)) for path in home.rglob("*"))


# -- what is drafted from ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 0.7, 1.3])
@pytest.mark.parametrize("prompt", [PROMPT, "def f(x):", "user"])
def test_the_same_ids_with_and_without_learning(temperature: float, prompt: str) -> None:
    settings = {"temperature": temperature, "seed": 5, "prompt": prompt}
    plain = generate(engine(learn=False), speculate=False, **settings)
    first, second = generate(engine(), **settings), generate(engine(), **settings)
    assert first.ids == plain.ids
    assert second.ids == plain.ids
    assert "learned" not in first.stats.by_level
    assert second.stats.by_level["learned"] > LENGTH // 3
    assert second.stats.target_passes < first.stats.target_passes


def test_levels_are_told_token_by_token() -> None:
    generate(engine())
    again = generate(engine())
    for token in again.tokens:
        assert (token.level is None) == (token.source != "ngram")
        if token.level == "learned":
            # As far as the counts look back, or as long as an earlier answer was right.
            assert token.match_length is not None
            assert token.match_length >= ORDERS[0]
    counts = [token.level for token in again.tokens if token.level is not None]
    assert again.stats.by_level == {level: counts.count(level) for level in counts}
    assert sum(again.stats.by_level.values()) == again.stats.by_source["ngram"]


class _Levelled(ScriptDrafter):
    """Says of each draft another level in turn, from the position on."""

    def propose(self, length: int, draw: Draw) -> Proposal | None:
        proposal = super().propose(length, draw)
        if proposal is None:
            return None
        start = len(self.context)
        return replace(proposal, levels=[LEVELS[(start + i) % 3] for i in range(len(proposal.tokens))])

    def fresh(self) -> _Levelled:
        return _Levelled(self.script, wrong=self.wrong, name=self.name)


def test_each_token_has_the_level_of_its_own_draft() -> None:
    script = [*range(30, 34), *range(10, 30)]
    drafter = _Levelled(script, wrong=[9], name="ngram")
    generation = Engine(ScriptModel(script), drafters=[drafter]).generate(script[:4], max_tokens=10, draft_length=3)
    assert [token.source for token in generation.tokens].count("ngram") == 7
    for token in generation.tokens:
        assert token.level == (LEVELS[token.position % 3] if token.source == "ngram" else None)
    assert generation.stats.by_level == {"context": 2, "learned": 2, "seed": 3}


def test_drafts_without_a_level_are_of_the_context_where_they_are_ngrams() -> None:
    script = [*range(30, 34), *range(10, 30)]
    for name, level in (("ngram", "context"), ("draft", None)):
        drafter = ScriptDrafter(script, name=name)
        generation = Engine(ScriptModel(script), drafters=[drafter]).generate(script[:4], max_tokens=4, draft_length=3)
        assert [token.level for token in generation.tokens] == [level] * 3 + [None]


def test_a_cut_proposal_keeps_the_levels_of_what_is_left() -> None:
    proposal = Proposal([1, 2, 3], "ngram", levels=["context", "seed", "learned"])
    assert proposal.cut(2).levels == ["context", "seed"]
    assert proposal.cut(3).levels == proposal.levels


def test_an_early_end_counts_the_levels_of_what_was_yielded() -> None:
    generate(engine())
    generation = engine().stream(PROMPT, max_tokens=LENGTH, draft_length=8)
    next(token for token in generation if token.level == "learned")
    generation.close()
    assert generation.stats.by_level["learned"] == 1


def test_a_text_the_user_taught_is_drafted_from() -> None:
    plain = generate(engine(learn=False))
    start = tiny_tokenizer().encode(PROMPT, add_special_tokens=False)
    Shelf().file("seed", fingerprint(tiny_tokenizer())).learn([([*start, *plain.ids], len(start))])
    taught = generate(engine())
    assert taught.ids == plain.ids
    assert taught.stats.by_level["seed"] > LENGTH // 3


@pytest.mark.parametrize("accept", ["rejection", "block"])
def test_under_other_rules_what_was_learned_changes_nothing(accept: str) -> None:
    settings = {"accept": accept, "temperature": 1.0, "seed": 3}
    without = generate(engine(learn=False), **settings)
    for _ in range(2):
        generate(engine(), temperature=1.0, seed=3)  # coupled: it learns, and drafts
    again = generate(engine(), **settings)
    assert again.ids == without.ids
    assert [round.drafted for round in again.rounds] == [round.drafted for round in without.rounds]
    assert set(again.stats.by_level) <= {"context"}


def test_a_later_conversation_drafts_from_an_earlier_one() -> None:
    words = tiny_tokenizer()
    answers = []
    for _ in range(2):
        chat = engine().conversation()
        answers.append(chat.send("Name a fox", max_tokens=LENGTH, draft_length=4).run())
    assert answers[0].ids == answers[1].ids
    assert answers[1].stats.by_level["learned"] > LENGTH // 3
    assert learned().info().tokens == sum(len(answer.ids) for answer in answers)
    question = words.encode("Name a fox", add_special_tokens=False)
    assert not learned().store.matches(question), "questions teach nothing"


def test_conversations_of_one_engine_share_what_is_learned() -> None:
    maker = engine()
    first = maker.conversation().send("Name a fox", max_tokens=LENGTH, draft_length=4).run()
    second = maker.conversation().send("Name a fox", max_tokens=LENGTH, draft_length=4).run()
    assert second.ids == first.ids
    assert second.stats.by_level["learned"] > LENGTH // 3


# -- what is learned ---------------------------------------------------------------------------------------------------


def counted(prompt: list[int], answer: list[int]) -> NgramStore:
    """A store that one answer taught."""
    keys, followers = contexts([*prompt[-6:], *answer], min(len(prompt), 6))
    store = NgramStore()
    store.merge(*_distinct(keys, followers), day=0)
    return store


def _distinct(keys: Any, followers: Any) -> tuple[Any, Any]:
    import numpy as np

    pairs = np.unique(np.stack([keys, followers.astype(np.uint64)]), axis=1)
    return pairs[0], pairs[1].astype(np.uint32)


def assert_learned(generation: Generation) -> None:
    found, expected = learned().store, counted(generation.prompt_ids, generation.ids)
    assert found.rows == expected.rows > 0
    assert (found.to_arrays().keys == expected.to_arrays().keys).all()
    assert learned().info().tokens == len(generation.ids)
    assert learned().info().labels == ("tiny",)


def test_an_answer_is_learned_with_the_end_of_its_prompt_as_context() -> None:
    generation = generate(engine())
    assert_learned(generation)
    assert learned().store.matches(generation.prompt_ids)[-1].token == generation.ids[0]
    assert not learned().store.matches(generation.prompt_ids[:-1])


def test_it_is_learned_after_its_last_token_was_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    delivered: list[int] = []
    states: list[list[int]] = []
    monkeypatch.setattr(Learning, "take", lambda self, prompt, answer: states.append(list(delivered)))
    for token in engine().stream(PROMPT, max_tokens=9):
        delivered.append(token.id)
    assert states == [delivered]
    assert len(delivered) == 9


def test_an_answer_under_a_grammar_is_learned() -> None:
    generation = generate(engine(), grammar=localspec.grammar.regex("[a-z]{20}"))
    assert generation.finish_reason == "stop"
    assert_learned(generation)


@pytest.mark.parametrize("end", [Generation.close, Generation.stop])
def test_what_was_yielded_before_a_stop_is_learned(end: Callable[[Generation], None]) -> None:
    generation = engine().stream(PROMPT, max_tokens=LENGTH, speculate=False)
    for _ in range(20):
        next(generation)
    end(generation)
    generation.run()
    assert generation.finish_reason is None
    assert 20 <= len(generation.ids) < LENGTH
    assert_learned(generation)


def test_an_abandoned_answer_is_learned() -> None:
    for count, _ in enumerate(engine().stream(PROMPT, max_tokens=LENGTH, speculate=False)):
        if count == 19:
            break
    del _
    assert learned().info().tokens == 20


class _Raise:
    """A logits processor that raises at the n-th token."""

    def __init__(self, error: BaseException, at: int) -> None:
        self.error, self.left = error, at

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.left -= 1
        if not self.left:
            raise self.error
        return logits


def test_ctrl_c_while_a_token_is_computed_keeps_and_learns_what_was_yielded() -> None:
    generation = engine().stream(
        PROMPT, max_tokens=LENGTH, speculate=False, logits_processors=[_Raise(KeyboardInterrupt(), 20)]
    )
    with pytest.raises(KeyboardInterrupt):
        generation.run()
    assert len(generation.ids) > 10
    assert_learned(generation)


def test_a_failed_answer_is_not_learned(home: Path) -> None:
    generation = engine().stream(
        PROMPT, max_tokens=LENGTH, speculate=False, logits_processors=[_Raise(ZeroDivisionError(), 20)]
    )
    with pytest.raises(ZeroDivisionError):
        generation.run()
    assert len(generation.ids) > 10
    assert files(home) == []


def test_an_answer_without_a_token_leaves_no_file(home: Path) -> None:
    generation = engine().stream(PROMPT, max_tokens=LENGTH)
    generation.stop()
    generation.run()
    assert generation.ids == []
    engine().stream(PROMPT).close()
    assert files(home) == []


def test_two_engines_at_once() -> None:
    one, other = engine(), engine(seed=1)
    generations = [e.stream(PROMPT, max_tokens=LENGTH, draft_length=4) for e in (one, other)]
    for tokens in zip(*generations, strict=True):
        assert len(tokens) == 2
    found = learned()
    assert (found.info().texts, found.info().tokens) == (2, 2 * LENGTH)
    for generation in generations:
        assert found.store.matches([*generation.prompt_ids, *generation.ids[:30]])[-1].order == ORDERS[-1]


# -- what is not -------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on it is a failure to as much as look for one."""

    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("a file was to be opened")

    monkeypatch.setattr(NgramFile, "__init__", refuse)


def test_nothing_is_read_or_written_unasked(home: Path, no_files: None) -> None:
    generate(engine(learn=False))
    chat_engine().conversation().send("Hi", max_tokens=9).run()
    assert files(home) == []


def test_what_was_learned_is_not_used_unasked() -> None:
    generate(engine())
    assert set(generate(engine(learn=False)).stats.by_level) <= {"context"}


@pytest.mark.parametrize("how", ["command", "variable"])
def test_turned_off(home: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    generate(engine())
    before = learned().info()
    if how == "command":
        Shelf().turn(False)
    else:
        monkeypatch.setenv("LOCALSPEC_NGRAMS", "off")
    with monkeypatch.context() as patch:
        patch.setattr(NgramFile, "__init__", lambda *a, **k: pytest.fail("a file was to be opened"))
        assert set(generate(engine()).stats.by_level) <= {"context"}
    assert learned().info() == before
    Shelf().turn(True)
    monkeypatch.setenv("LOCALSPEC_NGRAMS", "on")
    assert "learned" in generate(engine()).stats.by_level


def test_turned_off_while_an_engine_is_in_use() -> None:
    maker = engine()
    generate(maker)
    before = learned().info()
    Shelf().turn(False)
    generate(maker, prompt="another")
    assert learned().info() == before


def test_a_switch_that_is_neither_on_nor_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALSPEC_NGRAMS", "offf")
    with pytest.raises(SettingsError, match="LOCALSPEC_NGRAMS is on or off, not 'offf'"):
        engine()
    engine(learn=False)


def test_learning_needs_a_tokenizer() -> None:
    with pytest.raises(SettingsError, match="learn needs a tokenizer"):
        Engine(tiny_llama(), learn=True)
    Engine(tiny_llama())


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_disk_that_cannot_be_written_disturbs_no_answer(home: Path) -> None:
    plain = generate(engine(learn=False))
    home.mkdir()
    (home / "ngrams").write_text("in the way")
    said: list[str] = []
    maker = engine(learn=Learning(tiny_tokenizer(), say=said.append))
    for _ in range(3):
        generation = generate(maker)
        assert generation.ids == plain.ids
        assert generation.finish_reason == plain.finish_reason
    assert 1 <= len(said) == len(set(said)) <= 2, "once a file"
    assert not any("\n" in line for line in said)
    assert (home / "ngrams").read_text() == "in the way"


def test_a_full_disk_disturbs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **keywords: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("localspec.ngrams.file.atomic_write_bytes", full)
    plain = generate(engine(learn=False))
    said: list[str] = []
    maker = engine(learn=Learning(tiny_tokenizer(), say=said.append))
    assert [generate(maker).ids for _ in range(2)] == [plain.ids] * 2
    assert len(said) == 1
    assert "No space left" in said[0]


def test_a_damaged_file_disturbs_no_answer(home: Path) -> None:
    plain = generate(engine())
    (path,) = (home / "ngrams").glob("*.ngrams")
    path.write_bytes(path.read_bytes()[:-1])
    said: list[str] = []
    again = generate(engine(learn=Learning(tiny_tokenizer(), say=said.append)))
    assert again.ids == plain.ids
    assert "learned" not in again.stats.by_level
    assert len(said) == 1
    assert "learned" in generate(engine()).stats.by_level, "begun anew"


def test_a_fault_of_learning_is_one_line_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fail(self: NgramFile, lessons: object) -> bool:
        calls.append(lessons)
        raise ZeroDivisionError("of all\nthings")

    plain = generate(engine(learn=False))
    monkeypatch.setattr(NgramFile, "learn", fail)
    maker = engine()
    with pytest.warns(LearningWarning, match="learns nothing: ZeroDivisionError: of all things"):
        first = generate(maker)
    with warnings.catch_warnings(action="error"):
        second = generate(maker)
    assert first.ids == second.ids == plain.ids
    assert len(calls) == 1


def test_a_fault_that_cannot_be_told_disturbs_no_answer_either(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: NgramFile, lessons: object) -> bool:
        raise ZeroDivisionError

    plain = generate(engine(learn=False))
    monkeypatch.setattr(NgramFile, "learn", fail)
    maker = engine()
    with warnings.catch_warnings(action="error"):
        assert [generate(maker).ids for _ in range(2)] == [plain.ids] * 2


def test_of_sessions_that_fail_at_the_same_time_one_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    learning = Learning(tiny_tokenizer(), say=said.append)

    def fail(self: NgramFile, lessons: object) -> bool:
        if not entered:
            entered.append(True)
            learning.take([1, 2], [3, 4, 5])  # another session's, meanwhile
        raise ZeroDivisionError

    entered: list[bool] = []
    monkeypatch.setattr(NgramFile, "learn", fail)
    learning.take([1, 2], [3, 4, 5])
    assert said == ["this session learns nothing: ZeroDivisionError:"]


# -- loading, and the chat ---------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "tiny")


def test_load(checkpoint: Path, home: Path) -> None:
    localspec.load(checkpoint, dtype="float32").generate("abc", max_tokens=9)
    assert not (home / "ngrams").exists()
    localspec.load(checkpoint, dtype="float32", learn=True).generate("abc", max_tokens=9)
    (entry,) = Shelf().entries()
    assert (entry.level, entry.info.tokens, entry.info.labels) == ("learned", 9, ("tiny",))


def test_a_bad_switch_is_told_before_the_weights_are_loaded(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALSPEC_NGRAMS", "maybe")
    monkeypatch.setattr("localspec.loading.load_weights", lambda *arguments: pytest.fail("loaded"))
    with pytest.raises(SettingsError, match="on or off"):
        localspec.load(checkpoint, dtype="float32", learn=True)


@pytest.mark.parametrize(("extra", "expected"), [([], True), (["--private"], False)])
def test_the_chat_learns_unless_it_is_private(scripted: Scripted, extra: list[str], expected: bool) -> None:
    run("chat", "-p", "Hi", *extra)
    ((_, keywords),) = scripted.loads
    assert keywords["learn"] is expected


def test_the_chat_on_a_terminal_learns_unless_it_is_private(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles = []

    def run_chat(
        open_conversation: Callable[[], Any],
        *,
        title: str,
        settings: dict[str, Any],
        learns: bool,
        at_end: Callable[[], None],
    ) -> None:
        titles.append((title, learns))
        open_conversation()
        scripted.loads[-1][1]["notify"]("something is amiss")
        at_end()

    monkeypatch.setattr("localspec.tui.app.run_chat", run_chat)
    monkeypatch.setattr("localspec.commands.chat.fetch", lambda *names: None)
    monkeypatch.setattr("localspec.commands.chat.is_terminal", lambda stream: True)
    outcomes = [run("chat", "big"), run("chat", "big", "--private")]
    assert [keywords["learn"] for _, keywords in scripted.loads] == [True, False]
    assert titles == [("big", True), ("big · private", False)]
    assert [outcome.stderr for outcome in outcomes] == ["localspec: something is amiss\n"] * 2


def test_other_commands_do_not_learn(scripted: Scripted) -> None:
    progress.loading("some-model", draft="auto", mtp="auto", dtype="auto", kernels="auto")
    assert scripted.loads[0][1]["learn"] is False


def test_a_chat_from_end_to_end(checkpoint: Path, home: Path) -> None:
    arguments = ("chat", str(checkpoint), "-p", "Hi", "--dtype", "float32", "--blas", "off", "--max-tokens", "20")
    private = run(*arguments, "--private")
    assert private.exit_code == 0
    assert not (home / "ngrams").exists()
    open_ = run(*arguments)
    assert open_.stdout == private.stdout
    (entry,) = Shelf().entries()
    assert entry.info.tokens == 20
    again = run(*arguments, "--json", "--draft-length", "4")
    assert '"level": "learned"' in again.stdout
    again = run(*arguments, "--json", "--draft-length", "4", "--private")
    assert '"level": "learned"' not in again.stdout
    assert Shelf().entries()[0].info.tokens == 40
