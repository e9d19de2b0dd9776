"""Ctrl-C at every line: wherever in a turn the interrupt comes, the session knows what its caches hold, the model is as
it was, and the next turn is a cold run's.

Each line of the modules that change caches is interrupted where it is passed first, and once more in the middle of the
turn. A line is as fine as it goes: Python looks for signals at calls and jumps only.
"""

from __future__ import annotations

import functools
import linecache
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
import pytest
from architectures import VOCABULARY
from cachekinds import assert_caches, cold, engine, model, settings
from tiny import ScriptDrafter

import localspec
from localspec.attention import _attend_float
from localspec.bench.follower import Follower
from localspec.drafters import ModelDrafter
from localspec.drafters.protocol import common_prefix
from localspec.errors import LocalspecError
from localspec.exactness import Exactness
from localspec.generation import Generation
from localspec.rows import RowClass
from localspec.session import Session
from localspec.transaction import Transaction

FIRST, SECOND, THIRD = [5, 7, 9, 50, 3, 5, 7, 9], [8, 90, 17, 5, 7, 9], [33, 5, 7]
ANSWER = 9
WATCHED = {
    str(Path(localspec.__file__).parent / name)
    for name in (
        "attention.py",
        "caches/leaves.py",
        "caches/quantization.py",
        "caches/recorder.py",
        "caches/window.py",
        "decoder.py",
        "drafters/drawing.py",
        "drafters/small_model.py",
        "generation.py",
        "judge.py",
        "session.py",
        "transaction.py",
    )
}
Line = tuple[str, int]


class _Watch:
    """Counts the lines that are passed, and interrupts at the n-th passing of one of them."""

    def __init__(self, line: Line | None = None, number: int = 0) -> None:
        self.seen: Counter[Line] = Counter()
        self.line, self.number = line, number

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in WATCHED:
            return None
        if event == "line":
            line = (frame.f_code.co_filename, frame.f_lineno)
            self.seen[line] += 1
            if line == self.line and self.seen[line] == self.number:
                raise KeyboardInterrupt
        return self

    def during(self, work: Callable[[], Any]) -> None:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            work()
        finally:
            sys.settrace(before)


def drafters(kind: str) -> list[Any]:
    """A guess that is right at first and then wrong, and a draft model behind it."""
    prompt, answer = said(kind)
    wrong = [*prompt, *answer[:4], *((token + 1) % VOCABULARY for token in answer[4:6])]
    return [ScriptDrafter(wrong, vocabulary=VOCABULARY, free=True), Follower(3), ModelDrafter(model(kind))]


@functools.cache
def said(kind: str) -> tuple[list[int], list[int]]:
    first = cold(engine(kind), FIRST, seed=1, max_tokens=3)
    prompt = [*FIRST[:-1], *first, *SECOND]  # the last message is edited, so that caches go back first
    return prompt, cold(engine(kind), prompt, seed=2, max_tokens=ANSWER)


@functools.cache
def after(kind: str, kept: int) -> list[int]:
    prompt, answer = said(kind)
    return cold(engine(kind), [*prompt, *answer[:kept], *THIRD], seed=3, max_tokens=3)


def second_turn(kind: str, watch: _Watch, end: str) -> tuple[Session, Generation]:
    """A session and its second turn, interrupted or not."""
    used, (prompt, _) = engine(kind), said(kind)
    session = used.new_session()
    session.drafters = drafters(kind)
    used.generation(session, FIRST, settings(seed=1, max_tokens=3, draft_length=2)).run()
    length, kept = (0, 5) if end == "plain" else (3, {"closed": 7}.get(end, ANSWER))
    generation = used.generation(session, prompt, settings(seed=2, max_tokens=ANSWER, draft_length=length))

    def run() -> None:
        for _ in generation:
            if len(generation.tokens) == kept:
                generation.close()

    with suppress(KeyboardInterrupt):
        watch.during(run)
    generation.close()  # as whoever gives up does; it is over already, but for interrupts before it has begun to end
    return session, generation


def check(kind: str, session: Session, generation: Generation) -> None:
    """After an interrupt: raises AssertionError where anything is not as it should be."""
    prompt, answer = said(kind)
    ids, transaction = session.ids, session.transaction
    reported = prompt + generation.ids
    assert reported == [*prompt, *answer[: len(generation.ids)]]
    assert reported[: len(ids)] == ids or ids[: len(FIRST)] == FIRST  # the latter: nothing was done yet
    assert transaction.held == transaction.length
    assert transaction.held in (len(ids), max(len(ids) - 1, 0))
    assert_caches(transaction, ids, transaction.held)
    assert mx.fast.scaled_dot_product_attention is not _attend_float or _heals(kind)
    following, reused = [*reported, *THIRD], common_prefix(ids[: transaction.held], reported)
    used = engine(kind)
    third = used.generation(session, following, settings(seed=3, max_tokens=3, draft_length=2)).run()
    assert third.ids == after(kind, len(generation.ids))
    assert third.stats.reused_tokens == reused or (ids[: len(FIRST)] == FIRST and not third.stats.reused_tokens)
    assert_caches(session.transaction, session.ids, len(session.ids) - 1)
    assert not any("lent_by" in vars(type(module)) for _, module in used.model.named_modules())
    drafter = session.drafters[-1]
    if drafter._transaction.held:
        assert_caches(drafter._transaction, session.ids, drafter._transaction.held)


def _heals(kind: str) -> bool:
    cold(engine(kind), FIRST, seed=1, max_tokens=1)
    return mx.fast.scaled_dot_product_attention is not _attend_float


CASES = {
    "plain": ("plain", None),
    "windows, few sizes": ("window", RowClass((2, 4))),
    "hybrid": ("short convolution, hybrid", None),
    "hybrid, few sizes": ("short convolution, hybrid", RowClass((2, 4))),
    "replayed": ("odd, hybrid", None),
    "concatenate": ("concatenate", None),
    "to few bits": ("quantized later", None),
}


ENDS = ["whole", "closed", "plain"]


def interrupt(case: str, end: str, every: int, first: int, patch: pytest.MonkeyPatch) -> int:
    """Interrupt every so many lines; how many interrupts there were."""
    kind, sizes = CASES[case]
    if sizes is not None:
        patch.setattr(engine(kind)._exact, "of", lambda _: Exactness(sizes, "planted"))
    watch = _Watch()
    _, generation = second_turn(kind, watch, end)
    assert generation.ids == said(kind)[1][: len(generation.ids)]
    places = [(line, number) for line, count in watch.seen.items() for number in sorted({1, count // 2 + 1})]
    for line, number in places[first % every :: every]:
        session, generation = second_turn(kind, _Watch(line, number), end)
        try:
            check(kind, session, generation)
        except (AssertionError, LocalspecError, RuntimeError, ValueError, LookupError) as error:
            name = Path(line[0]).name
            source = linecache.getline(*line).strip()
            raise AssertionError(f"after an interrupt at {name}:{line[1]}, the {number}. time: {source}") from error
    return len(places[first % every :: every])


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("case", CASES)
def test_an_interrupt_at_any_line(case: str, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the lines, another one for each case."""
    assert interrupt(case, end, 48, 7 * list(CASES).index(case) + ENDS.index(end), monkeypatch) > 5


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("case", CASES)
def test_an_interrupt_at_every_line(case: str, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(case, end, 1, 0, monkeypatch)


@pytest.mark.parametrize(
    ("owner", "name", "case", "end"),
    [(Transaction, "abort", "hybrid", "whole"), (Session, "recover", "plain", "plain")],
)
def test_without_a_way_back_interrupts_are_noticed(
    owner: type, name: str, case: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(case, end, 60, 1, monkeypatch)
    monkeypatch.setattr(owner, name, lambda *_: None)
    with pytest.raises(AssertionError):
        interrupt(case, end, 9, 0, monkeypatch)
