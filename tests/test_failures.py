"""An exception or a close at any point leaves caches that hold exactly the tokens reported as kept, and the next turn
is a cold run's: for every kind of cache, in each part of a round, in the prompt and in passes that run ahead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from cachekinds import KINDS, VOCABULARY, assert_caches, assert_holds, cold, engine, leaf_types, model, piece, settings
from tiny import ScriptDrafter

import localspec.judge
from localspec.caches.leaves import CutLeaf, SnapshotLeaf
from localspec.caches.quantization import KVQuantization
from localspec.caches.recorder import Recorder
from localspec.detokenizer import Detokenizer
from localspec.drafters import ModelDrafter
from localspec.errors import CacheError
from localspec.generation import Generation
from localspec.session import Session
from localspec.target import Target
from localspec.transaction import Transaction

FIRST, SECOND = [5, 7, 9, 50, 3, 11, 60, 3, 88, 41], [8, 90, 17, 4, 29]
"""What a user says, in ids."""
LENGTH = 4
ANSWER = 19
DRAFTED = 12
"""Tokens of the second answer that are drafted: all of a round of 4 right, one of the next, all of the third. Behind
them nothing is drafted, so that plain passes run ahead."""
MOMENTS = ("prompt", "first round", "after a whole block", "after a cut block", "plain", "running ahead")


class Boom(Exception):
    pass


@functools.cache
def said(kind: str) -> tuple[list[int], list[int]]:
    """The second turn's prompt, and its plain answer."""
    used = engine(kind)
    first = cold(used, FIRST, seed=1, max_tokens=6)
    prompt = [*FIRST, *first, *SECOND]
    return prompt, cold(used, prompt, seed=2, max_tokens=ANSWER)


@functools.cache
def after(kind: str, kept: int) -> list[int]:
    """What a cold run says in the third turn when so much of the second answer was kept."""
    prompt, answer = said(kind)
    return cold(engine(kind), [*prompt, *answer[:kept], 33], seed=3, max_tokens=4)


@dataclass
class Fuse:
    """Counts calls by the moment in which they come, and raises at a chosen one."""

    at: tuple[str, int] = ("", 0)
    error: type[BaseException] = Boom
    calls: dict[str, int] = field(default_factory=dict)
    generation: Generation | None = None
    blown: bool = False

    def burn(self, session: Session | None = None) -> None:
        if self.generation is None:
            return
        moment = self._moment(self.generation)
        self.calls[moment] = self.calls.get(moment, 0) + 1
        if (moment, self.calls[moment]) == self.at and not self.blown:
            self.blown = True
            raise self.error

    @staticmethod
    def _moment(generation: Generation) -> str:
        rounds = len(generation.rounds)
        if not rounds:
            return "first round" if generation.stats.prefill_s else "prompt"
        return {1: "after a whole block", 2: "after a cut block", 3: "plain", 4: "plain"}.get(rounds, "running ahead")


def _around(owner: Any, name: str, fuse: Fuse, patch: pytest.MonkeyPatch, *, after: bool = False) -> None:
    original = getattr(owner, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if not after:
            fuse.burn()
        out = original(*args, **kwargs)
        if after:
            fuse.burn()
        return out

    patch.setattr(owner, name, failing)


def _writes(session: Session, fuse: Fuse, patch: pytest.MonkeyPatch, *, after: bool) -> None:
    for kind in {*leaf_types(session.transaction), *KINDS[session.kind].caches}:  # type: ignore[attr-defined]
        for name in ("update_and_fetch", "__setitem__", "update_window"):
            if hasattr(kind, name):
                _around(kind, name, fuse, patch, after=after)


def _rollback(session: Session, fuse: Fuse, patch: pytest.MonkeyPatch, *, after: bool) -> None:
    _around(CutLeaf, "cut", fuse, patch, after=after)
    _around(SnapshotLeaf, "restore", fuse, patch, after=after)
    _around(Recorder, "replay", fuse, patch, after=after)


def _at(owner: Any, name: str) -> Callable[..., None]:
    return lambda session, fuse, patch, *, after: _around(owner, name, fuse, patch, after=after)


PLACES: dict[str, Callable[..., None]] = {
    "a layer's write": _writes,
    "target": _at(Target, "forward"),
    "sampler": _at(localspec.judge, "distribution"),
    "processor": lambda session, fuse, patch, *, after: None,
    "detokenizer": _at(Detokenizer, "add"),
    "commit": _at(Transaction, "commit"),
    "rollback": _rollback,
    "draft": _at(ScriptDrafter, "propose"),
    "drafter's commit": _at(ScriptDrafter, "commit"),
    "conversion": _at(KVQuantization, "convert"),
    "evaluation": _at(Transaction, "evaluate"),
}


def second_turn(
    kind: str, place: str, fuse: Fuse, patch: pytest.MonkeyPatch, **values: Any
) -> tuple[Session, Generation]:
    """A session behind its first turn, and its second turn with the fuse in that place."""
    used, (prompt, answer) = engine(kind), said(kind)
    session = used.new_session()
    session.kind = kind  # type: ignore[attr-defined]
    drafter = ScriptDrafter([*prompt, *answer[:DRAFTED]], wrong={len(prompt) + 6}, vocabulary=VOCABULARY, free=True)
    session.drafters = [drafter]
    used.generation(session, FIRST, settings(seed=1, max_tokens=6, draft_length=LENGTH)).run()
    assert [*session.ids, *SECOND] == prompt
    if place == "processor":
        values["logits_processors"] = [lambda _, logits: (fuse.burn(), logits)[1]]
    if place:
        owner = PLACES[place]
        owner(session, fuse, patch, after=bool(fuse.at[1] % 2))
    chosen = settings(seed=2, max_tokens=ANSWER, draft_length=LENGTH, **values)
    generation = used.generation(session, prompt, chosen)
    fuse.generation = generation
    return session, generation


def calls(kind: str, place: str) -> dict[str, int]:
    """How often that place is passed in each moment of a second turn that goes well."""
    with pytest.MonkeyPatch.context() as patch:
        fuse = Fuse()
        _, generation = second_turn(kind, place, fuse, patch)
        assert generation.run().ids == said(kind)[1]
    assert [record.emitted for record in generation.rounds[:3]] == [5, 2, 5] or kind == "quantized later"
    return fuse.calls


def assert_next_turn(kind: str, session: Session, kept: int) -> None:
    """The third turn is a cold run's, and reuses all that the session knows of."""
    prompt, answer = said(kind)
    held = session.transaction.held
    following = [*prompt, *answer[:kept], 33]
    session.drafters[0].script = [*following, *after(kind, kept)]  # type: ignore[attr-defined]
    third = engine(kind).generation(session, following, settings(seed=3, max_tokens=4, draft_length=LENGTH)).run()
    assert third.ids == after(kind, kept)
    assert third.stats.reused_tokens == held
    assert_holds(session, following + third.ids)


def fail(kind: str, place: str, moment: str, number: int, error: type[BaseException] = Boom) -> bool:
    """Fail there, and look at everything; whether the session had to start over."""
    prompt, answer = said(kind)
    with pytest.MonkeyPatch.context() as patch:
        session, generation = second_turn(kind, place, Fuse((moment, number), error), patch)
        with pytest.raises(error):
            generation.run()
    assert generation.failed
    assert generation.ids == answer[: len(generation.ids)]
    assert list(generation) == []
    if session.ids == prompt + generation.ids:
        assert_holds(session, session.ids)
        assert moment != "prompt" or place == "drafter's commit"
    else:
        # The prompt was not read to its end: what was of it is right, and all of it is in the caches.
        assert session.ids == prompt[: len(session.ids)]
        assert moment == "prompt" or (place == "evaluation" and not session.ids)
        assert_holds(session, session.ids, computed=len(session.ids))
    assert_next_turn(kind, session, len(generation.ids))
    return not session.ids


def _places(kinds: list[str], every: int = 1) -> Iterator[Any]:
    """Kind, place and which of the moments that are passed there: every n-th, beginning elsewhere for each of them."""
    for i, kind in enumerate(kinds):
        for j, place in enumerate(PLACES):
            if place != "conversion" or kind == "quantized later":
                yield pytest.param(kind, place, i + j, every, id=f"{kind}-{place}")


THOROUGH = ["gated delta, hybrid", "odd, hybrid", "quantized later"]
OTHERS = [kind for kind in KINDS if kind not in (*THOROUGH, "window not full", "quantized", "list", "mamba 2", "rwkv")]


@pytest.mark.parametrize(("kind", "place", "start", "every"), [*_places(THOROUGH), *_places(OTHERS, 5)])
def test_failures_leave_exactly_what_was_kept(kind: str, place: str, start: int, every: int) -> None:
    passed = calls(kind, place)
    moments = [moment for moment in MOMENTS if passed.get(moment)]
    chosen = moments[start % min(every, max(len(moments), 1)) :: every]
    assert chosen
    for number, moment in enumerate(chosen, start):
        fail(kind, place, moment, (passed[moment] + 1) // 2, KeyboardInterrupt if number % 2 else Boom)


def test_every_place_is_passed_in_every_moment_it_belongs_to() -> None:
    """Or the test above would test less than it says."""
    never = {
        "sampler": {"prompt"},
        "processor": {"prompt"},
        "detokenizer": {"prompt"},
        "commit": {"prompt"},
        "conversion": {*MOMENTS},
        "evaluation": {*MOMENTS} - {"prompt", "running ahead"},
        "draft": {"prompt"},
        "rollback": {*MOMENTS} - {"after a whole block"},
    }
    for place in PLACES:
        assert set(calls("gated delta, hybrid", place)) >= {*MOMENTS} - never.get(place, set()), place
    assert calls("quantized later", "conversion")


# Closes


HELD_BACK = (8, 17)
"""From these tokens of the answer on, the text could be the beginning of a stop string for four tokens."""


def close(kind: str, kept: int, *, held_back: bool) -> None:
    """The consumer closes after so many tokens; raises AssertionError where the session or its next turn is wrong."""
    prompt, answer = said(kind)
    stops = ["".join(map(piece, answer[end - 4 : end])) + "zz" for end in HELD_BACK]
    with pytest.MonkeyPatch.context() as patch:
        session, generation = second_turn(kind, "", Fuse(), patch, **({"stop": stops} if held_back else {}))
    for _ in range(kept):
        next(generation)
    emitted = sum(record.emitted for record in generation.rounds)
    generation.close()
    assert generation.ids == answer[:kept]
    assert emitted > kept or not held_back
    # Chunks drop their oldest entries between two rounds: the session may have to start over.
    holds = prompt + generation.ids if session.ids or kind != "chunked" or not held_back else []
    assert_holds(session, holds)
    assert all(drafter.context == session.ids for drafter in session.drafters)
    assert_next_turn(kind, session, kept)


@pytest.mark.parametrize("kind", KINDS)
def test_closes_leave_exactly_what_was_yielded(kind: str) -> None:
    """In blocks and between them, in plain passes and while one is ahead; with text held back, over several rounds."""
    for kept in (1, 6, 13, 16):
        close(kind, kept, held_back=False)
    for kept in (5, 6, 14):
        close(kind, kept, held_back=True)


# Draft models


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("kind", ["plain", "window", "mamba", "short convolution, hybrid", "odd"])
def test_a_draft_model_that_fails_in_a_layer(kind: str, error: type[BaseException]) -> None:
    """In its first proposal, in later ones, in any of its passes; its caches follow the tokens that were kept."""
    used, (prompt, answer) = engine(kind), said(kind)
    raised = 0
    for number in (1, 2, 9, 22, 40, 63):
        session = used.new_session()
        session.drafters = [ModelDrafter(model(kind))]
        used.generation(session, FIRST, settings(seed=1, max_tokens=6, draft_length=LENGTH)).run()
        left, blown = [None] * number, [False]

        def write(
            cache: Any, *args: Any, original: Any, session: Session = session, left: Any = left, blown: Any = blown
        ) -> Any:
            leaves = session.drafters[0]._transaction._leaves  # type: ignore[attr-defined]
            if any(leaf.cache is cache for leaf in leaves) and left and (left.pop(), not left)[1]:
                blown[0] = True
                raise error
            return original(cache, *args)

        with pytest.MonkeyPatch.context() as patch:
            for kinds in leaf_types(session.transaction):
                name = "update_and_fetch" if hasattr(kinds, "update_and_fetch") else "__setitem__"
                patch.setattr(kinds, name, functools.partialmethod(write, original=getattr(kinds, name)))
            generation = used.generation(session, prompt, settings(seed=2, max_tokens=ANSWER, draft_length=LENGTH))
            try:
                generation.run()
            except error:
                raised += 1
        assert blown == [generation.failed]
        assert generation.ids == answer[: len(generation.ids)]
        assert_holds(session, prompt + generation.ids)
        (drafter,) = session.drafters
        assert isinstance(drafter, ModelDrafter)
        assert drafter.context == session.ids
        assert_caches(drafter._transaction, session.ids, drafter._transaction.held)
        following = [*session.ids, 33]
        third = used.generation(session, following, settings(seed=3, max_tokens=4, draft_length=LENGTH)).run()
        assert third.ids == after(kind, len(generation.ids))
        assert third.stats.acceptance_rate == 1
        assert third.stats.reused_tokens == len(following) - 2
    assert raised >= 4


# Faults planted in the way back


PLANTED = {
    "abort does nothing": ("plain", "a layer's write"),
    "abort forgets recurrent state": ("gated delta, hybrid", "a layer's write"),
    "abort keeps one row": ("window", "target"),
    "the session counts what failed": ("mamba", "commit"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_faults_are_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, place = PLANTED[fault]
    passed = calls(kind, place)
    cut, abort = CutLeaf.cut, Transaction.abort
    if fault == "abort does nothing":
        monkeypatch.setattr(Transaction, "abort", lambda transaction: None)
    elif fault == "abort forgets recurrent state":
        monkeypatch.setattr(SnapshotLeaf, "restore", lambda leaf, mark: None)
    elif fault == "abort keeps one row":

        def one_row_less(transaction: Transaction) -> None:
            with pytest.MonkeyPatch.context() as inside:
                inside.setattr(CutLeaf, "cut", lambda leaf, rows: cut(leaf, max(rows - 1, 0)))
                abort(transaction)

        monkeypatch.setattr(Transaction, "abort", one_row_less)
    else:

        def counts(session: Session, length: int) -> None:
            session.transaction.abort()
            session.transaction.length += 1
            session.transaction.held += 1

        monkeypatch.setattr(Session, "recover", counts)

    def failures() -> None:
        for moment in MOMENTS[1:]:
            fail(kind, place, moment, (passed[moment] + 1) // 2)

    with pytest.raises((AssertionError, CacheError)):
        failures()


def test_a_close_that_takes_too_little_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    truncate = Session.truncate
    monkeypatch.setattr(Session, "truncate", lambda session, length: truncate(session, length + 1))
    with pytest.raises(AssertionError):
        close("short convolution, hybrid", 9, held_back=False)
