"""Structured output: what comes out matches, and is what constrained plain decoding says, whatever was drafted."""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny import ScriptDrafter, ScriptModel, TableModel, chat_engine, random_table, tiny_llama, tiny_tokenizer

from localspec import grammar
from localspec.acceptance import residual
from localspec.drafters import Drafter, ModelDrafter
from localspec.drafters.protocol import Draw, Proposal
from localspec.engine import Engine
from localspec.errors import GrammarError, LocalspecError, NumericsError, SettingsError
from localspec.generation import Generation
from localspec.grammar import Grammar
from localspec.matcher import Matcher, Matchers
from localspec.settings import Settings
from localspec.transaction import Transaction

SIZE = 323
PIECES = ("name", '{"', '": ', '", "', "male", "fe")
"""Tokens of several characters, so that a forced text can be spelled in several ways."""
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "sex": {"enum": ["male", "female"]},
    },
    "required": ["name", "age", "sex"],
    "additionalProperties": False,
}
LISTS: dict[str, Any] = {
    "type": "array",
    "items": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"enum": ["fox", "for"]}, "maxItems": 2}]},
    "minItems": 1,
    "maxItems": 3,
}
PATTERN = r"(the quick|the lazy) (brown |red ){1,3}[a-f]{2,4}(fox|中文)\."
GRAMMARS: dict[str, Grammar] = {
    "person": grammar.json_schema(PERSON),
    "lists": grammar.json_schema(LISTS),
    "pattern": grammar.regex(PATTERN),
}
PROMPT = 'the quick brown fox {"name": "abcd", "age": 12, "sex": "male"} the lazy red fox. [true, ["fox"]] {"name": "'
NEVER = 10**6


def matches(name: str, text: str) -> bool:
    if name == "pattern":
        return re.fullmatch(PATTERN, text) is not None
    value = json.loads(text)
    if name == "person":
        return (
            list(value) == ["name", "age", "sex"]
            and isinstance(value["name"], str)
            and len(value["name"]) <= 4
            and type(value["age"]) is int
            and 0 <= value["age"] <= 99
            and value["sex"] in ("male", "female")
        )
    return 1 <= len(value) <= 3 and all(
        isinstance(item, bool) or (len(item) <= 2 and set(item) <= {"fox", "for"}) for item in value
    )


@functools.cache
def model(seed: int) -> Any:
    return tiny_llama(seed, vocabulary=SIZE)


DRAFTERS: dict[str, Callable[[], Sequence[Drafter | str]]] = {
    "none": list,
    "ngram": lambda: ["ngram"],
    "unrelated": lambda: [ModelDrafter(model(2))],
    "itself": lambda: [ModelDrafter(model(0))],
    "both": lambda: ["ngram", ModelDrafter(tiny_llama(1, vocabulary=300, layers=1))],
}


def engine_with(drafters: Sequence[Drafter | str], seed: int = 0) -> Engine:
    words = tiny_tokenizer(pieces=PIECES)
    assert len(words) == SIZE
    return Engine(model(seed), words, drafters=drafters)


@functools.cache
def plain(name: str, temperature: float, seed: int) -> Generation:
    """Constrained plain decoding."""
    return engine_with([]).generate(
        PROMPT, grammar=GRAMMARS[name], speculate=False, temperature=temperature, seed=seed, max_tokens=120
    )


def compare(drafters: Sequence[Drafter | str], length: Any, temperature: float, seeds: Sequence[int] = (3,)) -> None:
    """The ids are those of constrained plain decoding, and the text matches."""
    engine = engine_with(drafters)
    for name, seed in itertools.product(GRAMMARS, seeds):
        expected = plain(name, temperature, seed)
        generation = engine.generate(
            PROMPT, grammar=GRAMMARS[name], draft_length=length, temperature=temperature, seed=seed, max_tokens=120
        )
        assert expected.finish_reason == "stop"
        assert matches(name, expected.text)
        assert (generation.ids, generation.text) == (expected.ids, expected.text)
        assert generation.finish_reason == "stop"
        assert [t.p for t in generation.tokens] == pytest.approx([t.p for t in expected.tokens], abs=1e-4)
        assert [t.logprob for t in generation.tokens] == pytest.approx([t.logprob for t in expected.tokens], abs=1e-3)
        forced = generation.stats.by_drafter.get("grammar")
        if forced is not None:
            assert forced.accepted == forced.drafted > 0


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("length", [1, 4, 8, "auto"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_ids_are_those_of_constrained_plain_decoding(drafter: str, length: Any, temperature: float) -> None:
    compare(DRAFTERS[drafter](), length, temperature)


@pytest.mark.parametrize("seed", range(4))
def test_hot_random_models_still_match(seed: int) -> None:
    """At temperature 1.5 a random model alone hardly writes two characters that match."""
    engine = engine_with(["ngram", ModelDrafter(model(2))], seed)
    for name, one in GRAMMARS.items():
        for number in range(3):
            generation = engine.generate(
                PROMPT, grammar=one, temperature=1.5, seed=number, max_tokens=200, draft_length=4
            )
            assert generation.finish_reason == "stop"
            assert matches(name, generation.text), generation.text
            assert generation.ids[-1] in engine.end_ids
    free = engine.generate(PROMPT, temperature=1.5, seed=0, max_tokens=30)
    with pytest.raises(ValueError, match=r"Expecting|Extra|Invalid|Unterminated"):
        json.loads(free.text)


def test_rejection_acceptance_matches_too() -> None:
    engine = engine_with(["ngram", ModelDrafter(model(2))])
    for name, one in GRAMMARS.items():
        for seed in range(3):
            generation = engine.generate(PROMPT, grammar=one, accept="rejection", temperature=1.2, seed=seed)
            assert generation.finish_reason == "stop"
            assert matches(name, generation.text)
            assert generation.stats.by_drafter["grammar"].acceptance_rate == 1


# -- planted bugs: the comparison above finds each of them ------------------------------------------------------------


def _advanced_by_rejected_drafts(patch: pytest.MonkeyPatch) -> None:
    def back_to(self: Matcher, count: int) -> None:
        del self._ahead[count:], self._rows[count + 1 :]

    patch.setattr(Matcher, "_back_to", back_to)


def _bonus_row_unmasked(patch: pytest.MonkeyPatch) -> None:
    right = Matcher.rows

    def rows(self: Matcher, drafts: Sequence[int]) -> Any:
        masks = right(self, drafts)
        if drafts:
            masks[-1] = True
        return masks

    patch.setattr(Matcher, "rows", rows)


def _masks_one_row_late(patch: pytest.MonkeyPatch) -> None:
    right = Matcher.rows
    patch.setattr(Matcher, "rows", lambda self, drafts: np.roll(right(self, drafts), 1, axis=0))


def _first_mask_on_every_row(patch: pytest.MonkeyPatch) -> None:
    right = Matcher.rows
    patch.setattr(Matcher, "rows", lambda self, drafts: np.repeat(right(self, drafts)[:1], len(drafts) + 1, axis=0))


def _no_mask_at_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Matcher, "rows", lambda self, drafts: np.ones((len(drafts) + 1, self._size), np.bool_))
    patch.setattr(Matcher, "keep", lambda self, token: False)


PLANTS = [_bonus_row_unmasked, _masks_one_row_late, _first_mask_on_every_row, _no_mask_at_all]


@pytest.mark.parametrize(
    ("plant", "drafter"),
    [
        *itertools.product(PLANTS, ["none", "ngram", "unrelated"]),
        (_advanced_by_rejected_drafts, "ngram"),  # what the grammar forces is never rejected
        (_advanced_by_rejected_drafts, "unrelated"),
    ],
)
def test_planted_bugs_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in GRAMMARS:
        plain(name, 0.8, 3)
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError, GrammarError)):
        compare(DRAFTERS[drafter](), 4, 0.8)


# -- masks ------------------------------------------------------------------------------------------------------------


def fresh(engine: Engine, one: Grammar) -> Matcher:
    return Matchers(engine.tokenizer, engine.target.vocabulary_size).new(one, engine.end_ids)


def reference(engine: Engine, one: Grammar, tokens: Sequence[int]) -> np.ndarray:
    """What may follow `tokens`, from a matcher that has seen nothing else; end tokens where the text is complete."""
    import llguidance
    from llguidance.hf import from_tokenizer

    if not hasattr(engine, "words"):
        engine.words = from_tokenizer(engine.tokenizer._tokenizer)  # type: ignore[attr-defined]
    native = llguidance.LLMatcher(engine.words, one.compiled)  # type: ignore[attr-defined]
    assert native.consume_tokens(list(tokens))
    bits = np.unpackbits(np.frombuffer(native.compute_bitmask(), np.uint8), bitorder="little")
    allowed = bits[:SIZE].astype(bool)
    assert allowed[list(engine.end_ids)].all() == native.is_accepting()
    return allowed


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("free_layout", [False, True])
def test_the_place_moves_with_kept_tokens_only(name: str, free_layout: bool) -> None:
    """Random walks: look behind random legal drafts, keep some of them or another token, compare with a new matcher."""
    one = GRAMMARS[name]
    if free_layout and one.kind == "json_schema":
        one = grammar.json_schema(one.text, free_layout=True)
    engine, chance = engine_with([]), random.Random(7)
    kept_some, turned = 0, 0
    for _ in range(30 if name == "person" else 60):
        matcher, kept = fresh(engine, one), list[int]()
        while len(kept) < 40:
            drafts: list[int] = []
            for _ in range(chance.randint(0, 5)):
                row = matcher.allowed(drafts)
                assert row is not None
                drafts.append(int(chance.choice(np.flatnonzero(row))))
                if drafts[-1] in engine.end_ids:
                    break
            assert matcher.legal(drafts) == len(drafts)
            rows = matcher.rows(drafts)
            for i in range(len(drafts) + (not drafts or drafts[-1] not in engine.end_ids)):
                assert (rows[i] == reference(engine, one, [*kept, *drafts[:i]])).all()
            keep = drafts[: chance.randint(0, len(drafts))]
            if keep and keep[-1] in engine.end_ids:
                break
            last = int(chance.choice(np.flatnonzero(rows[len(keep)])))
            kept_some += bool(keep)
            turned += len(keep) < len(drafts) and last != drafts[len(keep)]
            for token in [*keep, last]:
                assert not matcher.keep(token)
            if last in engine.end_ids:
                break
            kept += [*keep, last]
    assert min(kept_some, turned) > 10


def test_no_illegal_draft_is_in_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[tuple[Transaction, list[int]]] = []
    right = Transaction.forward

    def forward(transaction: Transaction, ids: mx.array) -> mx.array:
        fed.append((transaction, ids.tolist()))  # type: ignore[arg-type]
        return right(transaction, ids)

    offered: list[tuple[int, list[int]]] = []

    class Spied(ScriptDrafter):
        def fresh(self) -> Spied:
            return Spied(self.script, wrong=self.wrong, vocabulary=self.vocabulary)

        def propose(self, length: int, draw: Draw) -> Proposal | None:
            proposal = super().propose(length, draw)
            if proposal is not None:
                offered.append((len(self.context), proposal.tokens))
            return proposal

    cuts = set()
    for name, apart in itertools.product(GRAMMARS, (2, 3, 4)):
        answer = plain(name, 0.8, 3)
        script = [*answer.prompt_ids, *answer.ids]
        start = len(answer.prompt_ids)
        engine = engine_with([Spied(script, wrong=range(start, len(script), apart), vocabulary=SIZE)])
        with monkeypatch.context() as patch:
            patch.setattr(Transaction, "forward", forward)
            generation = engine.generate(PROMPT, grammar=GRAMMARS[name], draft_length=6, temperature=0.8, seed=3)
        assert generation.ids == answer.ids
        passes = [ids for transaction, ids in fed if transaction is generation._session.transaction and len(ids) > 1]
        judged = [record for record in generation.rounds if record.drafted]
        assert [tuple(ids[1:]) for ids in passes] == [record.drafted for record in judged]
        for record in judged:
            before = script[start : record.position]
            for i, draft in enumerate(record.drafted):
                assert reference(engine, GRAMMARS[name], [*before, *record.drafted[:i]])[draft]
        for position, tokens in offered:
            count = 0
            while count < len(tokens):
                before = [*script[start:position], *tokens[:count]]
                if not reference(engine, GRAMMARS[name], before)[tokens[count]]:
                    cuts.add(min(count, 1))
                    break
                count += 1 if tokens[count] not in engine.end_ids else NEVER
        offered.clear()
    assert cuts == {0, 1}  # there was something to cut, in the beginning of a proposal and further on


def test_every_row_is_masked_behind_all_processors() -> None:
    """A processor that wants an illegal token on every row, the bonus row included, does not get it."""
    words = tiny_tokenizer(pieces=PIECES)
    for wanted in (0, 1, words.encode("~")[0]):

        def push(tokens: Any, logits: Any, wanted: int = wanted) -> Any:
            return logits + 100.0 * (mx.arange(logits.shape[-1]) == wanted)

        engine = engine_with(["ngram", ModelDrafter(model(2))])
        common: dict[str, Any] = {"logits_processors": push, "temperature": 0.8, "seed": 5}
        assert set(engine.generate(PROMPT, max_tokens=9, **common).ids) == {wanted}
        for name in ("lists", "pattern"):
            generation = engine.generate(PROMPT, grammar=GRAMMARS[name], draft_length=4, **common)
            assert matches(name, generation.text)
            assert {"bonus", "resampled"} <= set(generation.stats.by_source)


def test_logprob_is_the_models_own_and_p_is_not() -> None:
    engine = engine_with(["ngram"])
    generation = engine.generate(PROMPT, grammar=GRAMMARS["pattern"], draft_length=4, temperature=0.8, seed=2)
    ids = generation.prompt_ids + generation.ids
    logits = engine.model(mx.array(ids)[None])[0].astype(mx.float32)
    own = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    for token in generation.tokens:
        assert token.logprob == pytest.approx(own[token.position - 1, token.id].item(), abs=1e-3)
        allowed = reference(engine, GRAMMARS["pattern"], ids[len(generation.prompt_ids) : token.position])
        row = mx.where(mx.array(allowed), logits[token.position - 1], -math.inf)
        assert token.p == pytest.approx(mx.softmax(row / 0.8)[token.id].item(), abs=1e-3)
        if token.source == "grammar":
            assert (token.p, token.q) == (1.0, 1.0)
            assert token.logprob < -0.5
    assert generation.stats.by_source["grammar"] > 5


def test_what_the_grammar_forces_is_not_asked_of_a_drafter() -> None:
    asked: list[int] = []

    class Spied(ModelDrafter):
        def fresh(self) -> Spied:
            return Spied(self.model)

        def propose(self, length: int, draw: Draw) -> Proposal | None:
            asked.append(len(self.context))
            return super().propose(length, draw)

    engine = engine_with([Spied(model(2))])
    one = GRAMMARS["person"]
    generation = engine.generate(PROMPT, grammar=one, draft_length=4, temperature=0.8, seed=3)
    start = len(generation.prompt_ids)
    by_round = {record.position: record for record in generation.rounds}
    forced = 0
    for position, record in by_round.items():
        row = reference(engine, one, generation.ids[: position - start])
        only = row.sum() == 1 and not row[list(engine.end_ids)].any()
        forced += only
        assert only == (record.drafter == "grammar")
        assert only == (position not in asked) or record.emitted == 1  # the last place allowed has no room for drafts
    assert forced > 3
    longest = max(len(record.drafted) for record in by_round.values() if record.drafter == "grammar")
    assert longest == 4


def test_a_forced_text_costs_few_passes() -> None:
    engine = engine_with([])
    one = grammar.regex("the quick brown fox jumps over the lazy dog")
    generation = engine.generate("go", grammar=one, draft_length=16)
    plain_passes = engine.generate("go", grammar=one, speculate=False).stats.target_passes
    assert plain_passes == len(generation.ids)
    assert generation.stats.target_passes == math.ceil(len(generation.ids) / 17)
    assert set(generation.stats.by_source) == {"grammar", "bonus"}
    assert generation.stats.acceptance_rate == 1


# -- the rule with q --------------------------------------------------------------------------------------------------


def test_cutting_drafts_keeps_the_distribution_of_the_rejection_rule() -> None:
    """Every draft of an unconstrained q enumerated: the emitted token is distributed as p, to rounding."""
    engine = engine_with([])
    one = grammar.regex("[a-z]{2}|<[A-Z]>")
    matcher = fresh(engine, one)
    allowed = mx.array(matcher.rows([])[0])
    keys = mx.random.split(mx.random.key(1), 2)
    p = mx.softmax(mx.where(allowed, mx.random.normal((SIZE,), key=keys[0]), -math.inf))
    q = mx.softmax(mx.random.normal((SIZE,), key=keys[1]) + 2.0 * allowed)
    emitted, naive, chances = np.zeros(SIZE), np.zeros(SIZE), np.array(q).astype(float)
    for draft in range(SIZE):
        proposal = matcher.cut(Proposal([draft], "draft", q[None], [q[draft].item()]))
        if proposal is None:
            emitted += chances[draft] * np.array(p)
            naive += chances[draft] * np.array(p)
            continue
        assert proposal.q is not None
        assert proposal.probabilities is not None
        assert proposal.probabilities[0] == pytest.approx(proposal.q[0, draft].item())
        for result, against in ((emitted, proposal.q[0]), (naive, q)):
            passes = min(1.0, p[draft].item() / against[draft].item())
            result[draft] += chances[draft] * passes
            left = np.array(residual(p, against, mx.array(draft))).astype(float)
            result += chances[draft] * (1 - passes) * left / left.sum()
    assert abs(emitted - np.array(p)).sum() < 1e-5
    assert abs(naive - np.array(p)).sum() > 1e-2  # the same sum with q as it was


def test_a_model_drafts_what_is_allowed_and_says_from_which_q() -> None:
    engine = engine_with([])
    matcher = fresh(engine, GRAMMARS["pattern"])
    for token in engine.tokenizer.encode("the quick ", add_special_tokens=False):
        matcher.keep(token)
    drafter = ModelDrafter(model(2))
    drafter.commit([5, 6, 7])
    settings = Settings(temperature=1.2, accept="rejection")
    from localspec.noise import Noise

    proposal = drafter.propose(8, Draw(settings, Noise(3), SIZE, allowed=matcher.allowed))
    assert proposal is not None
    assert proposal.q is not None
    assert proposal.probabilities is not None
    assert matcher.legal(proposal.tokens) == len(proposal.tokens) == 8
    rows = matcher.rows(proposal.tokens)
    for i, draft in enumerate(proposal.tokens):
        assert not np.array(proposal.q[i])[~rows[i]].any()
        assert proposal.q[i].sum().item() == pytest.approx(1, abs=1e-5)
        assert proposal.q[i, draft].item() == pytest.approx(proposal.probabilities[i], rel=1e-4)
    free = drafter.propose(8, Draw(settings, Noise(3), SIZE))
    assert free is not None
    assert matcher.legal(free.tokens) < 8


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 4, "auto"])
@pytest.mark.parametrize(("wish", "text"), [(100.0, "aaa"), (-100.0, "aaaaa")])
def test_the_end_token_is_allowed_exactly_where_the_text_is_complete(length: Any, wish: float, text: str) -> None:
    def process(tokens: Any, logits: Any) -> Any:
        return logits + wish * (mx.arange(logits.shape[-1]) == 2)

    engine = engine_with(["ngram", ModelDrafter(model(0))])
    one = grammar.regex("a{3,5}")
    for temperature in (0, 1.0):
        generation = engine.generate(
            "aaaaaaaaa", grammar=one, logits_processors=process, draft_length=length, temperature=temperature, seed=1
        )
        assert (generation.text, generation.finish_reason) == (text, "stop")
        assert [token for token in generation.ids if token in engine.end_ids] == generation.ids[-1:]


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 8, "auto"])
@pytest.mark.parametrize("known", [False, True])
def test_without_an_end_token_a_text_ends_where_nothing_may_follow(length: Any, known: bool) -> None:
    """`known`: the library knows an end token that the engine does not."""
    words = tiny_tokenizer(pieces=PIECES)
    if not known:
        words._tokenizer.eos_token = None
    words.eos_token_ids = []
    for drafters in ([], ["ngram"], [ModelDrafter(model(0))], [ModelDrafter(model(2))]):
        engine = Engine(model(0), words, drafters=drafters)
        for pattern in (r"ab?c(de|fg)h", r"(a|b)", r"[xy]{2}z"):
            common: dict[str, Any] = {"grammar": grammar.regex(pattern), "temperature": 1.0, "seed": 4}
            generation = engine.generate("ab abc", draft_length=length, **common)
            assert re.fullmatch(pattern, generation.text)
            assert generation.finish_reason == "stop"
            assert generation.ids == engine.generate("ab abc", speculate=False, **common).ids
    open_end = engine.generate("ab", grammar=grammar.regex("a+"), max_tokens=7, draft_length=length)
    assert (set(open_end.text), open_end.finish_reason) == ({"a"}, "length")


@pytest.mark.parametrize("length", [0, 1, 3, 8])
def test_limit_and_stop_strings_end_a_constrained_text_as_any_other(length: int) -> None:
    engine = engine_with(["ngram", ModelDrafter(model(2))])
    whole = plain("person", 0.8, 3)
    common: dict[str, Any] = {"grammar": GRAMMARS["person"], "temperature": 0.8, "seed": 3, "draft_length": length}
    for limit in range(1, len(whole.ids), 4):
        cut = engine.generate(PROMPT, max_tokens=limit, **common)
        assert (cut.ids, cut.finish_reason) == (whole.ids[:limit], "length")
    for stop in ('"name', '", "a', "age", "sex", "male"):
        stopped = engine.generate(PROMPT, stop=stop, **common)
        assert (stopped.text, stopped.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")


def test_conversations_and_generations_that_were_left() -> None:
    engine = engine_with(["ngram", ModelDrafter(model(2))])
    chat = engine.conversation()
    for turn, name in enumerate(("person", "pattern", "person")):
        left = chat.send("one", grammar=GRAMMARS[name], temperature=0.8, seed=turn, draft_length=4)
        for _ in range(3):
            next(left)
        left.close()
        generation = chat.send("two", grammar=GRAMMARS[name], temperature=0.8, seed=turn, draft_length=4).run()
        assert matches(name, generation.text)
        alone = engine.generate(
            generation.prompt_ids, grammar=GRAMMARS[name], temperature=0.8, seed=turn, speculate=False
        )
        assert alone.ids == generation.ids
    assert len(chat.send("three", max_tokens=5).run().ids) > 0
    assert "{" in chat.messages[3]["content"]


def test_after_an_error_the_next_generation_starts_anew() -> None:
    engine = engine_with(["ngram"])
    session = engine.new_session()
    prompt = engine.encode(PROMPT)
    calls = itertools.count()

    def fail(tokens: Any, logits: Any) -> Any:
        if next(calls) == 12:
            raise RuntimeError("planted")
        return logits

    common: dict[str, Any] = {"grammar": GRAMMARS["person"], "temperature": 0.8, "seed": 3, "max_tokens": 120}
    with pytest.raises(RuntimeError, match="planted"):
        engine.generation(session, prompt, Settings(logits_processors=(fail,), **common)).run()
    assert engine.generation(session, prompt, Settings(**common)).run().ids == plain("person", 0.8, 3).ids


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: grammar.regex("("), "unclosed group"),
        (lambda: grammar.regex("(?=a)b"), "look-ahead"),
        (lambda: grammar.regex(r"\bx"), "lookarounds"),
        (lambda: grammar.regex(r"(a)\1"), "backreferences"),
        (lambda: grammar.regex(5), "is a text, not 5"),  # type: ignore[arg-type]
        (lambda: grammar.json_schema("{"), "not JSON"),
        (lambda: grammar.json_schema("[1]"), "is an object"),
        (lambda: grammar.json_schema({"type": "objekt"}), "objekt"),
        (lambda: grammar.json_schema({"not": {}}), '"not"'),
        (lambda: grammar.json_schema({"uniqueItems": True}), "uniqueItems"),
        (lambda: grammar.json_schema({"enum": []}), "empty"),
        (lambda: grammar.json_schema({"const": object()}), "serializable"),
        (lambda: grammar.json_schema({"const": math.nan}), "JSON compliant"),
        (lambda: grammar.json_schema({"regex": "a+"}), "localspec.grammar.regex"),
        (lambda: Settings.from_keywords(grammar="a+"), "localspec.grammar"),
        (lambda: Settings(grammar={"type": "object"}), "localspec.grammar"),  # type: ignore[arg-type]
        (lambda: Engine(model(0)).stream([1], grammar={}), "needs a tokenizer"),
    ],
)
def test_errors_are_one_line_before_anything_runs(make: Callable[[], Any], hint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make()
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(SettingsError, match="pip install llguidance"):
        grammar.regex("a")


def test_a_tokenizer_of_an_unknown_kind_is_refused() -> None:
    class Odd:
        eos_token_ids = (2,)
        bos_token = None

        def __len__(self) -> int:
            return SIZE

        def decode(self, ids: list[int], **_: Any) -> str:
            return "x" * len(ids)

    with pytest.raises(SettingsError, match="tokenizer"):
        Engine(model(0), Odd()).stream([1], grammar=GRAMMARS["pattern"])


def test_a_schema_may_be_given_as_it_is() -> None:
    assert Settings.from_keywords(grammar=PERSON).grammar == GRAMMARS["person"]
    assert Settings.from_keywords(grammar=GRAMMARS["pattern"]).grammar is GRAMMARS["pattern"]
    assert Settings.from_keywords(grammar=None).grammar is None
    assert grammar.json_schema(json.dumps(PERSON)) == GRAMMARS["person"]
    assert hash(GRAMMARS["person"]) != hash(GRAMMARS["pattern"])


def test_a_model_that_rules_out_all_that_is_allowed_is_an_error() -> None:
    def forbid(tokens: Any, logits: Any) -> Any:
        return mx.where(mx.arange(logits.shape[-1]) < 200, -math.inf, logits)

    for length in (0, 4):
        engine = engine_with(["ngram", ModelDrafter(model(2))])
        with pytest.raises(NumericsError, match="rules out each token that the grammar allows at position 2"):
            engine.generate([7, 8], grammar=grammar.regex("a[b-d]"), logits_processors=forbid, draft_length=length)
        with pytest.raises(NumericsError, match="not finite"):
            engine.generate(
                [7, 8], grammar=grammar.regex("a"), logits_processors=lambda _, x: x * math.nan, draft_length=length
            )


def _narrow(drafters: Sequence[Drafter | str]) -> Engine:
    """A model whose vocabulary ends before the small letters."""
    words = tiny_tokenizer()
    size = words.encode("Z")[0] + 1
    assert words.encode("a")[0] >= size
    return Engine(TableModel(random_table(3, size)), words, drafters=drafters)


def test_a_text_that_cannot_go_on_is_an_error_only_where_it_was_kept() -> None:
    words = tiny_tokenizer()
    ids = [words.encode(c)[0] for c in "AABC"]
    with pytest.raises(SettingsError, match="vocabulary"):
        _narrow([]).stream(ids, grammar=grammar.regex("a"))
    for length in (0, 4):
        engine = _narrow([ScriptDrafter([*ids, *ids], vocabulary=NEVER)])
        with pytest.raises(GrammarError, match="after 1 tokens"):
            engine.generate(ids, grammar=grammar.regex("AaB"), draft_length=length)
    # The draft leads to where nothing can follow; the model goes elsewhere.
    one = grammar.regex("(Aa|[B-D]E)F")
    outcomes = set()
    for seed in range(12):
        common: dict[str, Any] = {"grammar": one, "temperature": 1.0, "seed": seed}
        results = []
        for speculate in (False, True):
            engine = _narrow([ScriptDrafter([*ids, *ids], vocabulary=NEVER)])
            try:
                results.append(engine.generate(ids, speculate=speculate, draft_length=3, **common).text)
            except LocalspecError as error:
                results.append(str(error))
        assert results[0] == results[1]
        outcomes.add(results[0][:1])
    assert len(outcomes) > 1
    assert "n" in outcomes  # "nothing that the grammar allows ..."


def test_the_script_model_is_held_to_the_grammar() -> None:
    """A model that is sure of another text: what comes out matches, and is the same with and without drafts of it."""
    words = tiny_tokenizer(pieces=PIECES)
    start = words.encode("say it")
    script = [*start, *words.encode('{"name": "quick brown", "age": 3000, "sex": "none"} and more')]
    texts = set()
    for length in (0, 1, 4, 8, "auto"):
        drafter = ScriptDrafter(script, vocabulary=len(words))
        engine = Engine(ScriptModel(script, len(words)), words, drafters=[drafter])
        generation = engine.generate(start, grammar=PERSON, draft_length=length, max_tokens=80)
        texts.add(generation.text)
        assert matches("person", generation.text)
    assert len(texts) == 1


@pytest.mark.slow
def test_the_default_model_fills_in_a_schema() -> None:
    """SmolLM2: valid, the same ids with and without speculation, and the tokens per pass, printed."""
    import localspec
    from localspec.bench.gap import key_gap

    engine = localspec.load("smollm2")
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "occupation": {"type": "string", "maxLength": 60},
            "languages": {"type": "array", "items": {"enum": ["English", "French", "German"]}, "maxItems": 3},
        },
        "required": ["name", "age", "occupation", "languages"],
        "additionalProperties": False,
    }
    text = "Ann Smith is a 34 year old carpenter from Lyon who speaks French. Give her record as JSON."
    messages = [{"role": "user", "content": text}]
    for temperature in (0, 0.8):
        for free in (False, True):
            one = grammar.json_schema(schema, free_layout=free)
            common: dict[str, Any] = {"grammar": one, "temperature": temperature, "seed": 1, "max_tokens": 200}
            expected = engine.generate(messages, speculate=False, **common)
            generation = engine.generate(messages, draft_length=8, **common)
            stats = generation.stats
            print(
                f"\ntemperature {temperature}, {'free' if free else 'one-line'} layout: {stats.emitted} tokens, "
                f"{stats.tokens_per_pass:.2f} per pass, {stats.by_source}"
            )
            assert generation.finish_reason == "stop"
            value = json.loads(generation.text)
            assert list(value) == schema["required"]
            assert 0 <= value["age"] <= 150
            assert stats.by_drafter["grammar"].acceptance_rate == 1
            if generation.ids != expected.ids:  # only where passes of several sizes round differently, and near a tie
                at = next(i for i, (a, b) in enumerate(zip(expected.ids, generation.ids, strict=False)) if a != b)
                context = [*generation.prompt_ids, *expected.ids[:at]]
                gap, tolerance = key_gap(engine, context, generation.settings, expected.ids[at], generation.ids[at])
                assert gap <= tolerance


def test_the_engine_of_chats_takes_a_grammar_too() -> None:
    """`pieces` or none: nothing depends on tokens that the test made up."""
    engine = chat_engine(5, drafters=["ngram"])
    generation = engine.generate([{"role": "user", "content": "list"}], grammar=LISTS, temperature=1.5, seed=3)
    assert matches("lists", generation.text)


def test_the_bench_reports_what_was_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    from localspec.bench.structured import measure, table, tasks

    # What a clock says of passes as short as these is not to decide whether anything is drafted.
    monkeypatch.setattr("localspec.controller.Costs.relative", lambda *a, **k: 1.0)
    outcomes = measure(chat_engine(1), repeats=1, max_tokens=60, temperature=0.8)
    assert list(outcomes) == list(tasks())
    for outcome in outcomes.values():
        assert outcome.identical == 1
        assert 0 < outcome.passes <= outcome.tokens
        assert len(outcome.speedup) == len(outcome.price) == 1
    assert outcomes["record"].forced > 5
    assert table(outcomes, 1).count("1/1") == len(outcomes)
