"""Turns of one session: each goes on from what the one before left in the caches, and equals a cold run of its tokens.

For every kind of cache, for targets and drafters, after stops of every kind that fall inside an accepted block.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest
from cachekinds import (
    CUT,
    KINDS,
    NOT_CUT,
    VOCABULARY,
    assert_caches,
    assert_holds,
    cold,
    engine,
    leaf_types,
    letters,
    model,
    piece,
    settings,
)
from tiny import ScriptDrafter, chat_engine

from localspec.caches.leaves import CutLeaf, SnapshotLeaf
from localspec.caches.recorder import Recorder
from localspec.drafters import ModelDrafter
from localspec.drafters.protocol import Draw
from localspec.engine import Engine
from localspec.errors import CacheError
from localspec.exactness import Exact, Exactness
from localspec.generation import Generation
from localspec.noise import Noise
from localspec.rows import RowClass
from localspec.session import Session
from localspec.target import Target
from localspec.transaction import Transaction

PROMPT = [5, 7, 9, 50, 3, 11, 60, 3, 88]
LENGTH = 5
"""Drafts per round."""
ROUND = [3, 9]
"""Tokens of an answer after its first rounds: the draft for its third token is wrong, and for each ninth behind it."""
STOPS = ["end token", "stop string", "limit", "stop()", "close()", "processor", "target"]


class Boom(Exception):
    pass


@dataclass
class Plan:
    """An answer, and a place in its second round where it can be stopped."""

    seed: int
    answer: list[int]
    at: int

    @property
    def string(self) -> str:
        """Half of the token before that place, and that token's text."""
        return piece(self.answer[self.at - 1])[1] + piece(self.answer[self.at])


def plan(used: Engine, prompt: Sequence[int], first_seed: int, places: Sequence[int] = ()) -> Plan:
    """A plain answer that has a token for the first time at one of the places, usually inside its second round."""
    for seed in range(first_seed, first_seed + 10):
        answer = cold(used, prompt, seed=seed, max_tokens=18 if places else 12)
        for at in places or range(ROUND[0] + 1, ROUND[1] - 2):
            if answer[at] not in answer[:at]:
                return Plan(seed, answer, at)
    raise AssertionError("no such answer")


def oracle(prompt: Sequence[int], planned: Plan) -> ScriptDrafter:
    wrong = {len(prompt) + at for at in range(2, 40, 9)}
    return ScriptDrafter([*prompt, *planned.answer], wrong=wrong, vocabulary=VOCABULARY)


def _fail_at(calls: int) -> Any:
    count = itertools.count(1)

    def processor(_: mx.array, logits: mx.array) -> mx.array:
        if next(count) == calls:
            raise Boom
        return logits

    return processor


def _fail_in_layers(generation: Generation, patch: pytest.MonkeyPatch, rounds: int) -> None:
    """The pass after so many rounds fails when half of its caches have been written."""
    session = generation._session
    forward, planted = Target.forward, []

    def failing(target: Target, ids: mx.array, caches: list[Any]) -> mx.array:
        if len(generation.rounds) == rounds and not planted:
            planted.append(True)
            fail_in_writes(session.transaction, patch, len(session.transaction._leaves) // 2 + 1)
        return forward(target, ids, caches)

    patch.setattr(Target, "forward", failing)


def fail_in_writes(
    transaction: Transaction, patch: pytest.MonkeyPatch, at: int, error: type[BaseException] = Boom
) -> None:
    """The `at`-th write to its caches from now on fails, half of them before anything is written."""
    count = itertools.count(1)
    for kind in leaf_types(transaction):
        name = next(n for n in ("update_and_fetch", "__setitem__", "update_window") if hasattr(kind, n))
        write = getattr(kind, name)

        def failing(self: Any, *args: Any, write: Any = write) -> Any:
            number = next(count)
            if number == at and at % 2:
                raise error
            out = write(self, *args)
            if number == at:
                raise error
            return out

        patch.setattr(kind, name, failing)


def turn(
    used: Engine,
    session: Session,
    prompt: list[int],
    planned: Plan,
    stop: str,
    patch: pytest.MonkeyPatch,
    length: int = LENGTH,
) -> Generation:
    """One turn that ends so, in its second round or (where nothing of that round counts) in the third."""
    values: dict[str, Any] = {"seed": planned.seed, "max_tokens": 60, "draft_length": length}
    at, answer = planned.at, planned.answer
    if stop == "limit":
        values["max_tokens"] = at + 1
    elif stop == "stop string":
        values["stop"] = planned.string
    elif stop == "processor":
        values["logits_processors"] = [_fail_at(2 * length + 2 + 4)]  # the fourth row of the third round
    with patch.context() as inside:
        if stop == "end token":
            inside.setattr(used.tokenizer, "eos_token_ids", {answer[at]})
        generation = used.generation(session, prompt, settings(**values))
        if stop == "target":
            _fail_in_layers(generation, inside, 2)
        if stop in ("processor", "target"):
            with pytest.raises(Boom):
                generation.run()
        for _ in generation:
            if len(generation.tokens) == at + 1:
                if stop == "stop()":
                    generation.stop()
                elif stop == "close()":
                    generation.close()
    assert generation.ids == answer[: len(generation.ids)]
    assert generation.finish_reason == {"end token": "stop", "stop string": "stop", "limit": "length"}.get(stop)
    assert generation.failed == (stop in ("processor", "target"))
    if generation.finish_reason is not None or stop == "close()":
        assert len(generation.ids) == at + 1
    return generation


def _ended_inside_a_block(generation: Generation, planned: Plan, stop: str) -> None:
    """The stop was where it was meant to be: without that, nothing would be tested."""
    if stop in ("stop()", "processor", "target"):
        assert len(generation.ids) == ROUND[1]
    first, second = generation.rounds[:2]
    assert (first.accepted, first.emitted) == (2, 3)
    assert list(second.drafted) == planned.answer[ROUND[0] : ROUND[0] + len(second.drafted)]  # all of them right
    if stop in ("end token", "stop string", "close()"):
        assert generation.tokens[-1].draft_index == planned.at - ROUND[0]
        assert second.emitted == planned.at + 1 - ROUND[0] < LENGTH
    elif stop == "limit":
        assert second.accepted == len(second.drafted) == planned.at - ROUND[0] > 0


def turns(used: Engine, patch: pytest.MonkeyPatch, stops: Sequence[str], *, inside: bool = True) -> Session:
    """A session that is stopped in each of these ways; raises AssertionError where a turn is not a cold run's.

    `inside`: every stop is to fall inside a block of accepted drafts.
    """
    session = used.new_session()
    prompt, kept = PROMPT, 1
    for number, stop in enumerate(stops):
        planned = plan(used, prompt, 10 * number)
        session.drafters = [oracle(prompt, planned)]
        generation = turn(used, session, prompt, planned, stop, patch)
        if inside:
            _ended_inside_a_block(generation, planned, stop)
        assert generation.stats.reused_tokens == kept - 1
        assert_holds(session, prompt + generation.ids)
        kept = len(prompt) + len(generation.ids)
        prompt = [*prompt, *generation.ids, *[31 + number, 8, 2 * number + 1][: 1 + number % 3]]
    return session


def _rotated(kind: str) -> list[str]:
    """The ways to stop, beginning with another one for each kind."""
    first = list(KINDS).index(kind) * 3 % len(STOPS)
    return STOPS[first:] + STOPS[:first]


@pytest.mark.parametrize("kind", KINDS)
def test_turns_equal_cold_runs_and_reuse_all_that_was_kept(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = turns(engine(kind), monkeypatch, _rotated(kind), inside=kind != "quantized later")
    assert session.transaction.rollback == KINDS[kind].rollback
    assert set(KINDS[kind].caches) <= leaf_types(session.transaction)


FILLED = ["plain", "window", "chunked", "quantized", "mamba", "short convolution, hybrid", "list with state"]
DRAFTS = ["plain", "concatenate", "window", "chunked", "mamba", "gated delta, hybrid", "short convolution, hybrid"]
DRAFTS += ["recurrence and windows", "list with state", "odd"]


@pytest.mark.parametrize("kind", FILLED)
def test_turns_in_passes_of_few_sizes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with filler rows in most passes, which must leave no trace either."""
    used = engine(kind)
    monkeypatch.setattr(Exact, "of", lambda *_: Exactness(RowClass((4, 7)), "planted"))
    turns(used, monkeypatch, _rotated(kind)[::-1])


@pytest.mark.parametrize("start", range(len(PROMPT), len(PROMPT) + 40, 5))
def test_turns_that_go_over_to_few_bits_on_their_way(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a place inside a turn's prompt or answer, blocks end there."""
    options = {**KINDS["quantized later"].options, "kv_bits": 4, "quantized_kv_start": start}
    used = Engine(model("quantized later"), letters(), drafters=[], **options)
    if start % 2:
        monkeypatch.setattr(Exact, "of", lambda *_: Exactness(RowClass((4, 7)), "planted"))
    stops = STOPS[start % 7 :] + STOPS[: start % 7]
    session = turns(used, monkeypatch, stops[:5], inside=False)
    assert session.transaction._quantized_from == start


PLANTED = {
    "one row too many is kept": ("plain", "window", "chunked"),
    "one row too few is replayed": ("mamba", "gated delta, hybrid"),
    "state is not put back": ("rwkv", "list with state", "odd"),
    "a close takes nothing back": ("plain", "short convolution, hybrid", "odd, hybrid"),
}


def _plant(fault: str, patch: pytest.MonkeyPatch) -> None:
    if fault == "one row too many is kept":
        cut = CutLeaf.cut
        patch.setattr(CutLeaf, "cut", lambda leaf, rows: cut(leaf, max(rows - 1, 0)))
    elif fault == "one row too few is replayed":
        replay = Recorder.replay
        patch.setattr(Recorder, "replay", lambda self, recording, kept: replay(self, recording, max(kept - 1, 1)))
    elif fault == "state is not put back":
        patch.setattr(SnapshotLeaf, "restore", lambda *_: None)
    else:
        patch.setattr(Session, "truncate", lambda *_: None)


@pytest.mark.parametrize(("fault", "kind"), [(fault, kind) for fault, kinds in PLANTED.items() for kind in kinds])
def test_planted_faults_are_noticed(fault: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine(kind).generate(PROMPT, max_tokens=1, exact="off")  # what it measures first is not what is tested
    _plant(fault, monkeypatch)
    with pytest.raises((AssertionError, CacheError)):
        turns(engine(kind), monkeypatch, ["close()", "end token", "stop()"])


# Drafters


def following(session: Session) -> None:
    """The session's draft model holds a beginning of the session's tokens, and drafts as a fresh one would that
    follows them; raises AssertionError where not."""
    (drafter,) = session.drafters
    assert isinstance(drafter, ModelDrafter)
    assert drafter.context == session.ids
    held = drafter._transaction.held
    assert held <= len(session.ids) - 1
    if held:
        assert_caches(drafter._transaction, session.ids, held)
    other = drafter.fresh()
    other.follow(session.ids)
    draw = Draw(settings(), Noise(99), session.target.vocabulary_size)
    one, two = drafter.propose(4, draw), other.propose(4, draw)
    assert one is not None
    assert two is not None
    assert one.tokens == two.tokens
    assert one.probabilities == pytest.approx(two.probabilities, rel=1e-3)


def drafted_turns(kind: str, patch: pytest.MonkeyPatch, lengths: Sequence[int]) -> Session:
    """Turns with the target itself as its drafter, each with another draft length: all of its drafts are right."""
    used = engine(kind)
    session = used.new_session()
    session.drafters = [ModelDrafter(model(kind))]
    prompt = PROMPT
    middles = 0
    for number, (length, stop) in enumerate(zip(lengths, [*_rotated(kind), "end token"], strict=True)):
        places = [
            at for at in range(1, 14) if 0 < at % (length + 1) < length
        ]  # not the last draft, nor the token behind
        planned = plan(used, prompt, 10 * number, places or range(1, 14))
        generation = turn(used, session, prompt, planned, stop, patch, length)
        for record in generation.rounds:
            # What was stopped inside of is cut; no draft was wrong.
            assert record.accepted in (len(record.drafted), record.emitted)
            assert list(record.drafted) == planned.answer[record.position - len(prompt) :][: len(record.drafted)]
        assert generation.stats.drafted
        middles += 0 <= (generation.tokens[-1].draft_index or -1) < len(generation.rounds[-1].drafted) - 1
        assert_holds(session, prompt + generation.ids)
        following(session)
        prompt = [*session.ids, *[31 + number, 8, 2 * number + 1][: 1 + number % 3]]
    assert middles >= 2
    return session


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_draft_keeps_up_over_turns_whatever_its_caches(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Acceptance stays whole at every draft length, and its proposals are those of a drafter that begins afresh."""
    drafted_turns(kind, monkeypatch, [3, 8, 1, 5, 2, 7, 4, 6])


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_draft_that_is_mostly_wrong_follows_what_is_kept(kind: str) -> None:
    """Long drafts of which little is kept: many of its passes are taken back at once, in every round."""
    used = engine("mamba" if kind != "mamba" else "plain")
    session = Session(used.target, [ModelDrafter(model(kind))])
    prompt = PROMPT
    for number in range(2):
        expected = cold(used, prompt, seed=number, max_tokens=14)
        generation = used.generation(session, prompt, settings(seed=number, max_tokens=14, draft_length=8)).run()
        assert generation.ids == expected
        assert generation.stats.accepted < generation.stats.drafted
        following(session)
        prompt = [*session.ids, 31, 8]


@pytest.mark.parametrize(("fault", "kind"), [("off by one", "plain"), ("off by one", "lfm"), ("not put back", "mamba")])
def test_planted_faults_of_a_draft_are_noticed(fault: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = {"lfm": "short convolution, hybrid"}.get(kind, kind)
    engine(kind).generate(PROMPT, max_tokens=1, exact="off")
    rewind, restore = ModelDrafter.rewind, SnapshotLeaf.restore

    def off_by_one(drafter: ModelDrafter, length: int) -> None:
        rewind(drafter, length)
        drafter._transaction.held -= 1

    def for_targets_only(leaf: SnapshotLeaf, mark: Any) -> None:
        if leaf.cache in targets:
            restore(leaf, mark)

    targets: list[Any] = []
    fresh = Session._fresh_caches

    def noted(session: Session) -> None:
        fresh(session)
        targets.extend(session.transaction.caches)

    monkeypatch.setattr(Session, "_fresh_caches", noted)
    if fault == "off by one":
        monkeypatch.setattr(ModelDrafter, "rewind", off_by_one)
    else:
        monkeypatch.setattr(SnapshotLeaf, "restore", for_targets_only)
    with pytest.raises((AssertionError, CacheError)):
        drafted_turns(kind, monkeypatch, [3, 8, 1, 5, 2, 7, 4, 6])


# Edited messages


def edit(used: Engine, at: int, *, prompt: Sequence[int] = PROMPT) -> int:
    """Two turns, then the second's tokens changed from the `at`-th on, counted from the end where negative; how many
    tokens were reused. Raises AssertionError where that turn, or one more behind it, is not a cold run's."""
    session, values = used.new_session(), {"max_tokens": 12, "draft_length": LENGTH}
    ids: list[int] = []
    for seed, more in enumerate((prompt, [8, 90, 17, 4])):
        text = [*ids, *more]
        planned = Plan(seed, cold(used, text, seed=seed, max_tokens=12), 0)
        session.drafters = [ScriptDrafter([*text, *planned.answer], vocabulary=VOCABULARY)]
        generation = used.generation(session, text, settings(seed=seed, **values)).run()
        assert sum(record.emitted for record in generation.rounds[:2]) > 9
        ids = text + generation.ids
    at %= len(ids)
    changed = [*ids[:at], (ids[at] + 1) % VOCABULARY, 44, 2]
    generation = used.generation(session, changed, settings(seed=5, **values)).run()
    assert generation.ids == cold(used, changed, seed=5, max_tokens=12)
    assert_holds(session, changed + generation.ids)
    further = [*session.ids, 71]
    again = used.generation(session, further, settings(seed=6, **values)).run()
    assert again.ids == cold(used, further, seed=6, max_tokens=12)
    assert again.stats.reused_tokens == len(further) - 2
    assert generation.stats.reused_tokens in (0, at)
    return generation.stats.reused_tokens


FIRST_MESSAGE, ANSWER, LAST_ROUND = 6, -9, -3
"""Where a message is edited; recurrent state goes back no further than into the last round."""


@pytest.mark.parametrize("kind", CUT)
def test_an_edited_message_reuses_what_is_before_it_where_caches_can_be_cut(kind: str) -> None:
    used = engine(kind)
    assert bool(edit(used, FIRST_MESSAGE)) == (kind not in ("chunked", "quantized later"))
    assert bool(edit(used, ANSWER)) == (kind != "quantized later")
    assert edit(used, LAST_ROUND)


@pytest.mark.parametrize("kind", NOT_CUT)
def test_an_edited_message_is_computed_again_where_they_cannot(kind: str) -> None:
    used = engine(kind)
    assert not edit(used, FIRST_MESSAGE)
    assert not edit(used, ANSWER)
    assert edit(used, LAST_ROUND)


@pytest.mark.parametrize("kind", ["window", "recurrence and windows"])
def test_an_edit_far_behind_a_full_window_is_computed_again(kind: str) -> None:
    """Its other layers could be cut, but all must be, or none is."""
    long = [(7 * i + i // 9) % VOCABULARY for i in range(800)]
    assert not edit(engine(kind), 100, prompt=long)
    assert bool(edit(engine(kind), ANSWER, prompt=long)) == (kind == "window")


def test_chunks_are_cut_only_to_where_the_chunk_is_whole() -> None:
    """Wherever the edit falls within the chunks of attention, and however far back."""
    reused = [edit(engine("chunked"), at) for at in range(12, 37, 4)]
    assert 0 in reused
    assert any(reused)


def test_a_planted_fault_with_edits_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CutLeaf, "can_cut", lambda leaf, rows: True)
    with pytest.raises((AssertionError, CacheError)):
        edit(engine("chunked"), 20)


def test_an_edited_message_of_a_conversation_reuses_what_is_before_it() -> None:
    """The history is a list: turns are taken back from its end, and another message is sent."""
    chat = chat_engine(drafters=["ngram"]).conversation("be terse")
    for number in range(3):
        chat.send(f"message {number}", max_tokens=10, seed=number, temperature=1.0, exact="off").run()
        if number == 0:
            first = chat.context_used
    del chat.messages[2:]
    generation = chat.send("another message", max_tokens=8, draft_length=3, exact="off").run()
    fresh = chat.engine.generation(
        chat.engine.new_session(), generation.prompt_ids, settings(temperature=0.0, speculate=False, max_tokens=8)
    ).run()
    assert generation.ids == fresh.ids
    assert generation.stats.reused_tokens >= first
    assert len(chat.messages) == 4
    del chat.messages[:]
    generation = chat.send("message 0, changed", max_tokens=8, exact="off").run()
    assert generation.ids == chat.engine.generate(generation.prompt_ids, max_tokens=8, exact="off", speculate=False).ids
    assert 0 < generation.stats.reused_tokens < first
