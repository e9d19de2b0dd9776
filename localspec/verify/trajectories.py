"""Decodes every prompt plainly and with each way of drafting, and yields what came out.

Both runs of a comparison reuse the same tokens of their caches: what is left to differ is speculation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Literal

from localspec.drafters.rehearsed import Rehearsed
from localspec.session import Session
from localspec.settings import Exact, Settings
from localspec.verify.comparison import Case, Comparison, Promise, compare, joined
from localspec.verify.prompts import Prompt, follow_up

if TYPE_CHECKING:
    from localspec.drafters.protocol import Drafter
    from localspec.engine import Engine
    from localspec.generation import Generation

Length = int | Literal["auto"]

TEMPERATURES = (0.0, 0.7, 1.2)
FORCED, TURNS = "forced rejections", "second turns"
_LENGTHS: tuple[Length, ...] = ("auto", 3, 8, 1, 12)
"""Draft lengths of the engine's drafters, one after the other; left to itself the engine would draft little in runs as
short as these."""
_LONGEST = 15
_SHORT = 1024
"""A prompt up to here is worth processing twice more for a second turn."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is decoded."""

    prompts: Sequence[Prompt]
    seeds: Sequence[int]
    tokens: int
    """Per answer."""
    exact: Exact = "auto"

    def draws(self, prompt: Prompt) -> list[tuple[float, int]]:
        """(temperature, seed) of each answer. Chance has no say at temperature 0, and long prompts cost much."""
        warm = [(t, seed) for t in TEMPERATURES[1:] for seed in self.seeds]
        return [(TEMPERATURES[0], self.seeds[0]), *(warm if prompt.window is None else warm[:1])]

    def turns(self, prompt: Prompt) -> list[tuple[float, int]]:
        """(temperature, seed) of the answers that a second turn follows."""
        if prompt.window is None:
            return [(t, self.seeds[0]) for t in TEMPERATURES] if prompt is self.prompts[0] else []
        return self.draws(prompt)[-1:] if prompt.window <= _SHORT else []

    def comparisons(self, engine: Engine) -> int:
        """How many there will be."""
        ways = len(_ways(engine)) + 1
        return sum(ways * len(self.draws(prompt)) + len(self.turns(prompt)) for prompt in self.prompts)


def trajectories(engine: Engine, plan: Plan, promise: Promise) -> Iterator[Comparison]:
    """Compare all that is planned, one after the other."""
    runs = count(1)
    for prompt in plan.prompts:
        # The runs on a long prompt share its caches: each goes back to where the prompt ends.
        shared = None if prompt.window is None else Session(engine.target, [])
        for number, (temperature, seed) in enumerate(plan.draws(prompt)):
            run = _Runs(engine, plan, promise, prompt, temperature, seed, shared)
            plain = run.plain()
            for way, drafters in _ways(engine):
                yield run.against(plain, way, drafters, _LENGTHS[number % len(_LENGTHS)])
            yield run.against(plain, FORCED, [Rehearsed(prompt.ids + plain.ids, seed=next(runs))], _LONGEST)
            if (temperature, seed) in plan.turns(prompt):
                yield run.second_turn(plain)


@dataclass(frozen=True, slots=True)
class _Runs:
    """All runs on one prompt at one temperature with one seed."""

    engine: Engine
    plan: Plan
    promise: Promise
    prompt: Prompt
    temperature: float
    seed: int
    shared: Session | None

    def plain(self) -> Generation:
        return self._begin(self._session([]), self.prompt.ids, None).run()

    def against(self, plain: Generation, way: str, drafters: list[Drafter], length: Length) -> Comparison:
        """One way of drafting, compared with the plain answer."""
        case = self._case(way, length)
        try:
            drafted = self._begin(self._session(drafters), self.prompt.ids, length).run()
        except Exception as error:  # noqa: BLE001 - whatever a run with drafts dies of is what was looked for
            return _failed(case, self.promise, error)
        return compare(self.engine, case, self.promise, plain, drafted)

    def second_turn(self, plain: Generation) -> Comparison:
        """An answer that is left in the middle of a block of kept drafts, and what a further turn says then, compared
        with the same two turns decoded plainly."""
        case = self._case(TURNS, _LONGEST)
        try:
            return self._second_turn(case, plain)
        except Exception as error:  # noqa: BLE001 - as above
            return _failed(case, self.promise, error)

    def _second_turn(self, case: Case, plain: Generation) -> Comparison:
        ids, target = self.prompt.ids, self.engine.target
        drafting, plainly = Session(target, [Rehearsed(ids + plain.ids, mistakes=False)]), Session(target, [])
        opening = self._begin(drafting, ids, 6)
        for token in opening:
            if token.draft_index == 1 and len(opening.tokens) > self.plan.tokens // 3:
                break
        opening.close()
        expected = self._begin(plainly, ids, None)
        for _ in zip(opening.tokens, expected, strict=False):
            pass
        expected.close()
        first = compare(self.engine, case, self.promise, expected, opening)
        if first.difference is not None:
            return first
        following = ids + opening.ids + follow_up(self.engine)
        expected = self._begin(plainly, following, None).run()
        drafting.drafters = [Rehearsed(following + expected.ids, seed=case.seed)]
        answer = self._begin(drafting, following, _LONGEST).run()
        promise = self.promise
        if expected.stats.reused_tokens != answer.stats.reused_tokens:
            # Passes of other sizes computed the prompt, which nobody promised to round alike.
            promise = replace(promise, line="up to near-ties: the two turns found different tokens in their caches")
        return joined(first, compare(self.engine, case, promise, expected, answer))

    def _begin(self, session: Session, ids: list[int], length: Length | None) -> Generation:
        """Start decoding; `length` None is plain decoding."""
        settings = Settings(
            max_tokens=self.plan.tokens,
            temperature=self.temperature,
            seed=self.seed,
            exact=self.plan.exact,
            speculate=length is not None,
            draft_length="auto" if length is None else length,
        )
        return self.engine.generation(session, ids, settings)

    def _session(self, drafters: list[Drafter]) -> Session:
        if self.shared is None:
            return Session(self.engine.target, drafters)
        self.shared.drafters = drafters
        return self.shared

    def _case(self, way: str, length: Length) -> Case:
        return Case(way, self.prompt.name, self.temperature, self.seed, length, self.prompt.window)


def _ways(engine: Engine) -> list[tuple[str, list[Drafter]]]:
    """Each drafter of the engine by itself, and all of them as the engine would ask them."""
    ways: list[tuple[str, list[Drafter]]] = [(drafter.name, [drafter.fresh()]) for drafter in engine.drafters]
    if len(ways) > 1:
        ways.append(("all drafters", [drafter.fresh() for drafter in engine.drafters]))
    return ways


def _failed(case: Case, promise: Promise, error: Exception) -> Comparison:
    return Comparison(case, promise, error=f"{type(error).__name__}: {' '.join(str(error).split())}")
