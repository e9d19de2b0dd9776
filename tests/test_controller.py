"""The controller chooses lengths from costs and acceptance; it never changes a token."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import ScriptDrafter, ScriptModel, tiny_llama

from localspec.controller import MOST, REPRODUCIBLE, Acceptance, Controller, Costs
from localspec.drafters import ModelDrafter, NgramDrafter, Proposal
from localspec.drafters.protocol import Draw, Offer
from localspec.engine import Engine
from localspec.target import Target


def _offer(length: int = 8, confidence: float = 0.55) -> Proposal:
    return Proposal([1] * length, "ngram", match_length=3, confidence=[confidence] * length)


def _taught(rate: float, *, row: float = 0.1, rounds: int = 400) -> Controller:
    """A controller that has seen passes of 1 to 13 rows cost 1 + row per further row, and drafts pass at `rate`."""
    controller = Controller()
    for rows in range(1, MOST + 2):
        for _ in range(4):
            controller.costs.observe(rows, 1 + row * (rows - 1))
    credit = 0.0
    for _ in range(rounds):
        accepted = 0
        for _ in range(8):
            credit += rate
            if credit < 1:
                break
            credit -= 1
            accepted += 1
        controller.acceptance.observe(_offer(), accepted)
    return controller


def test_no_acceptance_means_no_drafts() -> None:
    assert _taught(0.0).after(_offer(), "auto") is None


def test_full_acceptance_means_long_drafts() -> None:
    kept = _taught(1.0).after(_offer(12), "auto")
    assert kept is not None
    assert len(kept.tokens) == 12


@pytest.mark.parametrize(
    ("rate", "row", "best"),
    [
        (0.5, 0.05, 3),
        (0.7, 0.05, 6),
        (0.5, 0.1, 2),
        (0.7, 0.1, 4),
        (0.9, 0.1, 10),
        (0.5, 0.2, 1),
        (0.7, 0.5, 1),
        (0.5, 0.5, 0),
    ],
)
def test_best_lengths_are_the_known_ones(rate: float, row: float, best: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free drafts, each further row costing `row` of a step: the table in the literature, to one token."""
    controller = _taught(0.5, row=row, rounds=0)
    monkeypatch.setattr(controller.acceptance, "estimate", lambda *_: rate)
    assert abs(controller._best("ngram", 12)[0] - best) <= (best > 0)


def test_costly_passes_mean_no_drafts() -> None:
    """Where each row costs as much as a pass (a reference BLAS), even certain drafts gain nothing."""
    assert _taught(0.9, row=1.0)._best("ngram", 12)[0] == 0


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 40])
def test_no_length_beyond_the_limit(limit: int) -> None:
    controller = _taught(1.0)
    drafter = NgramDrafter()
    for fixed in (1, 2, 8, 32, "auto"):
        length = controller.before(drafter, limit, fixed)  # type: ignore[arg-type]
        assert 0 < length <= limit
        assert fixed == "auto" or length == min(limit, fixed)
    assert controller.before(drafter, 40, "auto") <= MOST


def test_wide_passes_are_tried_step_by_step() -> None:
    controller = Controller()
    drafter = NgramDrafter()
    seen = []
    for _ in range(6):
        length = controller.before(drafter, 100, "auto")
        seen.append(length)
        controller.costs.observe(length + 1, 1.0)
    assert seen[0] == 1
    assert seen == sorted(seen)
    assert seen[-1] == MOST
    for earlier, later in itertools.pairwise(seen):
        assert later <= 2 * (earlier + 1)


def test_fixed_lengths_are_not_cut() -> None:
    controller, proposal = _taught(0.0), _offer()
    assert controller.after(proposal, 8) is proposal


@given(st.dictionaries(st.integers(1, 16), st.floats(1e-4, 10), min_size=1), st.integers(1, 20))
def test_costs_interpolate_between_measured_points(points: dict[int, float], rows: int) -> None:
    costs = Costs()
    for width, seconds in points.items():
        costs.observe(width, seconds)
    value = costs.relative(rows)
    if 1 not in points:
        assert value == pytest.approx(1 + 0.1 * (rows - 1))
        return
    relative = {width: seconds / points[1] for width, seconds in points.items()}
    if rows in relative:
        assert value == pytest.approx(relative[rows])
    below = [width for width in relative if width < rows]
    above = [width for width in relative if width > rows]
    if below and above:
        low, high = relative[max(below)], relative[min(above)]
        if rows not in relative:
            share = (rows - max(below)) / (min(above) - max(below))
            assert value == pytest.approx(low + (high - low) * share)


def test_costs_follow_slowly_and_shrug_off_a_pause() -> None:
    costs = Costs()
    for _ in range(20):
        costs.observe(1, 1.0)
        costs.observe(4, 2.0)
    costs.observe(4, 500.0)
    assert costs.relative(4) < 2.5
    for _ in range(60):
        costs.observe(4, 3.0)
    assert costs.relative(4) == pytest.approx(3.0, rel=0.02)
    assert costs.known() == 4
    assert Costs().known() == 0
    assert Costs().of(1) is None
    costs.observe(1, 0.0)
    assert costs.of(1) == 1.0
    halted = Costs()
    for _ in range(3):
        halted.observe(1, 0.0)
        halted.observe(3, 1.0)
    assert halted.relative(2) == pytest.approx(1.1)


def test_acceptance_starts_at_what_the_drafter_predicts_and_moves_to_what_is_seen() -> None:
    for confidence in (0.05, 0.55, 0.97):
        assert Acceptance().estimate("ngram", 0, confidence) == pytest.approx(confidence)
        for rate in (0, 1):
            acceptance = Acceptance()
            for _ in range(200):
                acceptance.observe(_offer(4, confidence), 4 * rate)
            assert abs(acceptance.estimate("ngram", 0, confidence) - rate) < 0.15
            # The same prediction at another place is the same evidence, another prediction is not.
            assert acceptance.estimate("ngram", 9, confidence) == acceptance.estimate("ngram", 0, confidence)
            assert acceptance.estimate("ngram", 0, 0.75) == pytest.approx(0.75)


def test_without_a_prediction_acceptance_is_by_position() -> None:
    acceptance, proposal = Acceptance(), Proposal([1] * 6, "draft")
    first = [acceptance.estimate("draft", i) for i in range(6)]
    assert first == sorted(first)
    for _ in range(50):
        acceptance.observe(proposal, 1)
    after = [acceptance.estimate("draft", i) for i in range(6)]
    # The first passed, the second did not; a draft behind a rejected one was not tested and says nothing.
    assert after[0] > first[0]
    assert after[1] < first[1]
    assert after[2:] == first[2:]


@pytest.mark.parametrize("alone", [1.0, 1.02, 1.1])
def test_interrupting_plain_decoding_has_its_price(alone: float) -> None:
    """A draft that hardly pays is taken where the pass is alone anyway, and not what plain decoding is stopped for."""
    controller = _taught(0.11)
    for _ in range(5):
        controller.learn_plain(1.0)
        controller.learn_plain(alone, ahead=False)
    hardly = _offer(1, 0.14)
    assert controller.after(hardly, "auto") is not None
    assert (controller.after(hardly, "auto", peek=True) is not None) == (alone < 1.02)
    # What pays well is drafted at that price too.
    assert _taught(0.9).after(_offer(), "auto", peek=True) is not None


def test_a_free_draft_gives_way_to_a_drafter_that_is_worth_more() -> None:
    controller = _taught(0.5)
    costly = ModelDrafter(tiny_llama())
    for accepted in (2, 3) * 40:
        controller.learn(Proposal([1] * 4, "draft"), accepted, 0.02, 1.3)
    for _ in range(5):
        controller.learn_plain(1.0)
    rival = controller.worth(costly, 8)
    assert 1.5 < rival < 3.0
    poor, good = _offer(4, 0.45), _offer(8, 0.97)
    assert controller.after(poor, "auto") is not None
    assert controller.after(poor, "auto", rival=rival) is None
    assert controller.after(good, "auto", rival=rival) is not None
    assert controller.after(poor, 4, rival=rival) is poor  # fixed lengths ask no clock
    assert controller.worth(costly, 0) == 1.0
    assert Controller().worth(costly, 8) == 1.0  # before plain passes were measured


def test_what_was_declined_is_tried_again() -> None:
    controller = _taught(0.0)
    assert any(controller.after(_offer(), "auto") is not None for _ in range(2000))


def test_who_only_asks_does_not_shorten_the_wait_for_a_probe() -> None:
    """Neither a look at what a drafter is worth, nor a peek, nor a draft that gives way to a rival counts as one that
    was drafted; only then does the wait, which failed probes have made long, begin anew."""
    controller = _taught(0.0)
    for source in ("ngram", "draft"):
        controller._declined[source], controller._waits[source] = 5, 128
    costly = ModelDrafter(tiny_llama())
    for _ in range(5):
        controller.learn_plain(1.0)
    for _ in range(400):
        controller.acceptance.observe(Proposal([1] * 4, "draft"), 4)
    good = _offer(8, 0.97)
    before = dict(controller._declined), dict(controller._waits)
    assert controller.worth(costly, 8) > 1.5
    assert controller.worth(costly, 8, peek=True) > 1.5
    assert controller.before(costly, 8, "auto", peek=True) > 0
    assert controller.after(good, "auto", peek=True) is not None
    assert controller.after(good, "auto", rival=100.0) is None
    assert (controller._declined, controller._waits) == before
    assert controller.before(costly, 8, "auto") > 0
    assert controller.after(good, "auto") is not None
    assert set(controller._declined.values()) == {0}
    assert set(controller._waits.values()) == {32}


def test_a_draft_ends_where_the_drafter_stops_believing_in_it() -> None:
    controller = _taught(1.0, row=0.05, rounds=0)
    proposal = Proposal([1] * 8, "ngram", confidence=[0.9, 0.9, 0.9, 0.01, 0.9, 0.9, 0.9, 0.9])
    kept = controller.after(proposal, "auto")
    assert kept is not None
    assert kept.tokens == [1, 1, 1]
    assert kept.confidence == [0.9, 0.9, 0.9]


def test_the_controller_is_told_what_passes_and_drafts_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only passes and drafts move: 1 and a quarter per further row, and an eighth per draft."""
    now = 0.0
    forward, propose = Target.forward, ScriptDrafter.propose

    def timed_forward(target: Target, ids: mx.array, caches: list[Any]) -> mx.array:
        nonlocal now
        now += 0.75 + 0.25 * ids.size
        return forward(target, ids, caches)

    def timed_propose(drafter: ScriptDrafter, length: int, draw: Draw) -> Proposal | None:
        nonlocal now
        now += 0.125 * length
        return propose(drafter, length, draw)

    class Told(Controller):
        def learn(self, proposal: Offer, accepted: int, draft_s: float, verify_s: float, *, apart: bool = True) -> None:
            assert apart
            told.append((len(proposal), draft_s, verify_s))

        def learn_plain(self, seconds: float, *, ahead: bool = True) -> None:
            told.append((0, ahead, seconds))

    monkeypatch.setattr("localspec.decoder.time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(Target, "forward", timed_forward)
    monkeypatch.setattr(ScriptDrafter, "propose", timed_propose)
    script = [(i * i) % 64 for i in range(40)]
    engine = Engine(ScriptModel(script), drafters=[ScriptDrafter(script, wrong={9})])
    engine.controller = Told()
    told: list[tuple[int, float, float]] = []
    engine.generate(script[:3], max_tokens=12, draft_length=3, exact="off")
    # 4, 3 and 4 tokens; there is no room for drafts before the last.
    assert told == [*[(3, 0.375, 1.75)] * 3, (0, False, 1.0)]
    told.clear()
    engine.generate(script[:3], max_tokens=12, speculate=False, exact="off")
    # The first pass is not told: the second is launched within its time; nor is what was left of the last.
    assert told == [(0, True, 1.0)] * 10


class Capricious(Controller):
    """Lengths from 0 to 12 in an order that has nothing to do with anything."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def before(self, drafter: object, limit: int, fixed: object, *, peek: bool = False) -> int:
        self.calls += 1
        return min(limit, self.calls * 7 % 13)

    def after(self, proposal: Proposal, fixed: object, *, peek: bool = False, rival: float = 1.0) -> Proposal | None:
        length = self.calls * 5 % 11
        return proposal.cut(length) if length else None


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_the_controller_never_changes_ids(temperature: float) -> None:
    engine = Engine(tiny_llama(), drafters=["ngram", ModelDrafter(tiny_llama(1, layers=1)), ModelDrafter(tiny_llama())])
    plain = engine.generate([1, 2, 3, 1, 2], max_tokens=120, temperature=temperature, seed=5, speculate=False).ids
    engine.controller = Capricious()
    generation = engine.generate([1, 2, 3, 1, 2], max_tokens=120, temperature=temperature, seed=5)
    assert generation.ids == plain
    assert len({len(record.drafted) for record in generation.rounds}) > 5


@pytest.mark.parametrize("accept", ["rejection", "block"])
def test_rules_whose_ids_depend_on_lengths_use_a_fixed_one_that_no_clock_decides(accept: str) -> None:
    script = [(i * i) % 64 for i in range(60)]
    engine = Engine(ScriptModel(script), drafters=[ScriptDrafter(script)])
    generation = engine.generate(script[:3], max_tokens=30, accept=accept)
    assert {len(record.drafted) for record in generation.rounds[:-1]} == {REPRODUCIBLE}


def test_speculation_off_and_length_0_draft_nothing() -> None:
    engine = Engine(tiny_llama(), drafters=["ngram"])
    for settings in ({"speculate": False}, {"draft_length": 0}):
        generation = engine.generate([1, 2, 1, 2], max_tokens=20, **settings)
        assert generation.stats.drafted == 0
        assert set(generation.stats.by_source) == {"plain"}
        assert generation.stats.target_passes == 20
