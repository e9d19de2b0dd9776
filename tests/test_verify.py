"""Verification finds nothing where nothing is wrong, and every planted bug.

Odds of a false alarm: the seeds are fixed; when they were chosen, 1e-6 per run that counts distributions.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from architectures import build
from planted import Planted, by_size
from tiny import chat_engine, tiny_gemma, tiny_llama

from localspec import acceptance, decoder, judge
from localspec.bench import gap
from localspec.bench.pairs import Difference
from localspec.caches.leaves import CutLeaf
from localspec.caches.recorder import Recorder
from localspec.drafters import ModelDrafter
from localspec.drafters.protocol import Draw
from localspec.drafters.rehearsed import Rehearsed
from localspec.engine import Engine
from localspec.errors import CacheError, LocalspecError, SettingsError
from localspec.noise import Noise
from localspec.rows import RowClass, RowClasses
from localspec.session import Session
from localspec.settings import Settings
from localspec.verify import distributions
from localspec.verify.comparison import Case, Comparison, Promise, joined
from localspec.verify.distributions import Check, checks
from localspec.verify.odds import chi_square
from localspec.verify.prompts import WINDOW_LIMIT, prompts, windows
from localspec.verify.report import FALSE_ALARM, Report
from localspec.verify.run import run_verify
from localspec.verify.trajectories import FORCED, TURNS

BITS, TIES = "bit for bit: for a test", "up to near-ties: for a test"


@pytest.fixture
def no_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trajectories only."""
    monkeypatch.setattr(distributions, "checks", lambda logits, **settings: [])


def llama() -> Engine:
    return Engine(tiny_llama(), drafters=["ngram", ModelDrafter(tiny_llama(5))], name="tiny")


def gemma() -> Engine:
    return Engine(tiny_gemma(), name="tiny")


def hybrid() -> Engine:
    return Engine(build("qwen3_next"), name="tiny")


def wrong(report: Report) -> set[str]:
    """The ways of drafting that went wrong."""
    return {found.case.way for found in report.comparisons if found.outcome == "bug"}


# Where nothing is wrong


@pytest.mark.parametrize("make", [llama, gemma, hybrid])
def test_nothing_differs(make: Callable[[], Engine], no_draws: None) -> None:
    engine = make()
    controller = engine.controller
    report = run_verify(engine, quick=True, tokens=24)
    assert (report.verdict, report.exit_status, report.bugs, report.near_ties) == ("identical", 0, 0, 0)
    assert report.complete
    assert engine.controller is controller
    assert report.promise is not None
    assert report.promise.bits
    ways = {found.case.way for found in report.comparisons}
    assert ways == ({"ngram", "draft", "all drafters"} if make is llama else {"ngram"}) | {FORCED, TURNS}
    forced = [found for found in report.comparisons if found.case.way == FORCED]
    assert {n for found in forced for n in found.kept} >= set(range(4))
    assert all(found.tokens == 24 and found.accepted for found in forced)
    assert {found.case.temperature for found in forced} == {0.0, 0.7, 1.2}
    assert all(24 < found.tokens <= 48 for found in report.comparisons if found.case.way == TURNS)
    assert {found.case.window for found in report.comparisons} == ({None, 16} if make is gemma else {None})
    screen = report.screen()
    assert len(screen.splitlines()) <= 24
    assert all(len(line) <= 80 for line in screen.splitlines())
    assert ("16 tokens, filled while decoding" if make is gemma else "none in this model") in screen
    assert f"IDENTICAL: speculation changed none of {report.tokens:,} tokens" in screen


def test_a_whole_run_counts_and_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributions, "DRAWS", 8000)
    monkeypatch.setattr(distributions, "STRINGS", 300)
    told: list[str] = []
    report = run_verify(chat_engine(), quick=True, tokens=8, on_progress=told.append)
    assert report.exit_status == 0
    document = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert document["verdict"] == "identical"
    assert document["every_bit_promised"]
    assert document["row_classes"]["classes"]
    assert document["trajectories"]["tokens"] == report.tokens
    assert len(document["trajectories"]["comparisons"]) == document["trajectories"]["runs"]
    assert document["trajectories"]["comparisons"][0]["prompt"].startswith("open-chat/")
    assert document["distributions"]["failed"] == []
    assert len(document["distributions"]["checks"]) == report.planned_checks == 13
    assert "coupled right, rejection right, block right" in " ".join(report.screen().split())
    assert len(report.screen().splitlines()) <= 24
    total = document["trajectories"]["runs"]
    assert told[1].startswith(f"1/{total} ngram, open-chat/")
    assert told[total].startswith(f"{total}/{total} ")


def test_whatever_a_drafted_run_dies_of_is_a_finding(no_draws: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Rehearsed, length: int, draw: Draw) -> None:
        raise IndexError("beyond")

    monkeypatch.setattr(Rehearsed, "propose", fail)
    report = run_verify(Engine(tiny_llama(), drafters=[]), quick=True, tokens=8)
    assert report.exit_status == 1
    assert "IndexError: beyond" in " ".join(report.screen().split())


def test_a_fault_of_the_first_turn_is_not_excused_by_the_second() -> None:
    case = Case(TURNS, "prompt", 0.0, 0, 6, None)
    bits, ties = Promise("bit for bit: so", 1e-3), Promise("up to near-ties: so", 1e-3)
    first = Comparison(case, bits, tokens=8, other_bits=2, farthest=1e-6)
    second = Comparison(case, ties, tokens=8)
    assert (first.outcome, second.outcome) == ("bug", "identical")
    assert joined(first, second).outcome == "bug"
    assert joined(replace(first, other_bits=0, farthest=0.0), second).outcome == "identical"


def test_where_nothing_is_drafted_the_screen_says_so(no_draws: None) -> None:
    engine = chat_engine()
    engine._exact._causal = False
    report = run_verify(engine, quick=True, tokens=8, exact="off")
    assert report.exit_status == 0
    assert "nothing: this model is decoded without drafts" in report.screen()


# Planted bugs that trajectories find


def _keep_a_rejected_row(patch: pytest.MonkeyPatch) -> None:
    cut = CutLeaf.cut

    def wrong_cut(self: CutLeaf, rows: int) -> None:
        cut(self, rows)
        cache = self.cache
        end = getattr(cache, "_idx", cache.offset)
        if rows and end:  # the row behind the cut takes the place of the last kept one
            for part in (cache.keys, cache.values):
                part[..., end - 1, :] = part[..., end, :]

    patch.setattr(CutLeaf, "cut", wrong_cut)


def _cut_too_little(patch: pytest.MonkeyPatch) -> None:
    cut = CutLeaf.cut

    def wrong_cut(self: CutLeaf, rows: int) -> None:
        if rows > 3:
            raise CacheError(f"{self.name} gave back {rows - 1} of {rows} tokens")
        cut(self, rows)

    patch.setattr(CutLeaf, "cut", wrong_cut)


def _no_replay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Recorder, "replay", lambda *a, **k: None)


def _accept_the_first_draft(patch: pytest.MonkeyPatch) -> None:
    right = acceptance.accept_coupled
    patch.setattr(judge, "accept_coupled", lambda tokens, drafts: max(1, right(tokens, drafts)))


def _noise_by_row(patch: pytest.MonkeyPatch) -> None:
    gumbel = Noise.gumbel

    def wrong_gumbel(self: Noise, positions: Sequence[int], size: int, *stream: Any) -> mx.array:
        return gumbel(self, [positions[0]] * len(positions), size, *stream)

    patch.setattr(Noise, "gumbel", wrong_gumbel)


def _second_turn_over_a_wrong_row(patch: pytest.MonkeyPatch) -> None:
    truncate = Session.truncate

    def wrong_truncate(self: Session, length: int) -> None:
        cut = length < len(self.ids)
        truncate(self, length)
        for cache in self.transaction.caches if cut else ():
            cache.keys[..., cache.offset - 1, :] = 0.0

    patch.setattr(Session, "truncate", wrong_truncate)


def _stop_early(patch: pytest.MonkeyPatch) -> None:
    def room(self: decoder.Decoder) -> int:
        return self._limit - self.emitted - bool(self._drafters)

    patch.setattr(decoder.Decoder, "_room", room)
    emit = decoder.Decoder._emit

    def wrong_emit(self: decoder.Decoder, chosen: Any, proposal: Any, *a: Any, **k: Any) -> Any:
        yield from emit(self, chosen, proposal, *a, **k)
        if proposal is not None and self.emitted > 12:
            self.finish_reason = "length"

    patch.setattr(decoder.Decoder, "_emit", wrong_emit)


@pytest.mark.parametrize(
    ("plant", "make", "ways"),
    [
        (_keep_a_rejected_row, llama, {FORCED, "ngram"}),
        (_keep_a_rejected_row, gemma, {FORCED, "ngram"}),
        (_keep_a_rejected_row, hybrid, {FORCED}),
        (_cut_too_little, llama, {FORCED}),
        (_no_replay, hybrid, {FORCED}),
        (_accept_the_first_draft, llama, {FORCED, "ngram"}),
        (_noise_by_row, llama, {FORCED}),
        (_second_turn_over_a_wrong_row, llama, {TURNS}),
        (_stop_early, llama, {FORCED}),
    ],
)
def test_planted_bugs_are_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    make: Callable[[], Engine],
    ways: set[str],
    monkeypatch: pytest.MonkeyPatch,
    no_draws: None,
) -> None:
    engine = make()
    engine.row_classes()  # the probe rolls back as well
    engine.exactness(Settings())
    plant(monkeypatch)
    report = run_verify(engine, quick=True)
    assert (report.verdict, report.exit_status) == ("bug", 1)
    assert wrong(report) >= ways
    if plant is _second_turn_over_a_wrong_row:
        assert wrong(report) == {TURNS}
    if plant is _noise_by_row:
        assert all(found.case.temperature for found in report.comparisons if found.outcome == "bug")
    if plant is _cut_too_little:
        assert "failed: CacheError: the cache of layer 0" in " ".join(report.screen().split())
    screen = report.screen()
    assert "NOT IDENTICAL: this is a bug in localspec" in screen
    assert all(len(line) <= 80 for line in screen.splitlines())
    json.dumps(report.as_dict(), allow_nan=False)


# Near-ties, bits and bugs


def planted(error: float, *, alike: bool = False, stored: bool = False) -> Engine:
    """A model whose passes of several rows are off by so much, and an engine that believes what it is told of it."""
    shift = by_size([1], error=error)
    model = Planted(**{"stored_shift" if stored else "shift": shift})
    engine = Engine(model, name="planted")
    one = RowClass(tuple(range(1, 17)), (1.0,) * 16)
    apart = RowClass((1,), (1.0,)), RowClass(tuple(range(2, 17)), (1.2,) * 15)
    engine._exact._probed = RowClasses((one,) if alike else apart, (), 1.0, (12,), True, 10, 0.1)
    engine._exact._causal = True
    return engine


def test_where_rows_round_differently_a_near_tie_is_no_bug(monkeypatch: pytest.MonkeyPatch, no_draws: None) -> None:
    report = run_verify(planted(0.3), quick=True, tokens=32)
    assert report.exit_status == 1
    parted = [found for found in report.comparisons if found.difference is not None]
    assert parted
    for found in parted:
        assert found.difference is not None
        assert found.difference.gap is not None
        assert found.position is not None
        assert found.top_two is not None
        assert found.top_two <= found.difference.gap
        assert f"token {found.difference.index} (position {found.position}) is id" in found.sentence()
    # The same with a bound that allows for as much.
    monkeypatch.setitem(gap.TOLERANCES, "float32", 50.0)
    report = run_verify(planted(0.3), quick=True, tokens=32)
    assert (report.verdict, report.exit_status) == ("near-ties", 0)
    assert report.near_ties == len(parted)
    assert "1 | 2 to 16; T(1)=1000 T(2)=1200" in report.screen()
    assert "a near-tie" in report.screen()
    # And where every bit is promised, nothing is allowed for.
    report = run_verify(planted(0.3, alike=True), quick=True, tokens=32)
    assert report.exit_status == 1
    assert wrong(report) == {found.case.way for found in report.comparisons if found.other_bits or found.difference}


@pytest.mark.parametrize("stored", [False, True])
def test_other_bits_are_a_bug_where_bits_are_promised(stored: bool, no_draws: None) -> None:
    report = run_verify(planted(1e-6, alike=True, stored=stored), quick=True)
    assert all(found.difference is None for found in report.comparisons)
    assert report.exit_status == 1
    assert "log-probabilities have other bits" in report.screen()
    report = run_verify(planted(1e-6, stored=stored), quick=True)
    assert (report.verdict, report.exit_status) == ("identical", 0)
    assert "differ in " in report.screen()


def _comparison(line: str, **found: Any) -> Comparison:
    return Comparison(Case("ngram", "p", 0.0, 0, 3), Promise(line, 1e-3), tokens=5, **found)


@pytest.mark.parametrize(
    ("found", "with_ties", "with_bits"),
    [
        ({}, "identical", "identical"),
        ({"difference": Difference(4, 1, 2, 1e-4, 1e-3)}, "near-tie", "bug"),
        ({"difference": Difference(4, 1, 2, 1e-2, 1e-3)}, "bug", "bug"),
        ({"difference": Difference(4, 1, None)}, "bug", "bug"),
        ({"other_bits": 1, "farthest": 1e-5}, "identical", "bug"),
        ({"other_bits": 1, "farthest": 0.1}, "bug", "bug"),
        ({"other_bits": 1, "farthest": float("inf")}, "bug", "bug"),
        ({"difference": Difference(4, 1, 2, 1e-4, 1e-3), "other_bits": 1, "farthest": 0.1}, "bug", "bug"),
        ({"error": "CacheError: no"}, "bug", "bug"),
    ],
)
def test_what_is_a_bug(found: dict[str, Any], with_ties: str, with_bits: str) -> None:
    for line, outcome in ((TIES, with_ties), (BITS, with_bits)):
        comparison = _comparison(line, **found)
        assert comparison.outcome == outcome
        json.dumps(comparison.as_dict(), allow_nan=False)
        if outcome != "identical":
            assert ("a bug" in comparison.sentence() or "failed" in comparison.sentence()) == (outcome == "bug")


def test_which_lines_promise_every_bit() -> None:
    assert Promise(Engine(tiny_llama()).exactness(Settings()), 1e-3).bits
    assert not Promise(Engine(tiny_llama()).exactness(Settings(exact="off")), 1e-3).bits
    # Attention that the model computes itself: a promise for the lengths that were tried.
    classes = RowClasses((RowClass((1, 2), (1.0, 1.0)),), (), 1.0, (12, 1100), False, 10, 0.1)
    engine = Engine(tiny_llama())
    engine._exact._probed = classes
    assert engine.exactness(Settings(exact="rows")).startswith("bit for bit")
    assert not Promise(engine.exactness(Settings(exact="rows")), 1e-3).bits


# Distributions


def _logits() -> np.ndarray:
    return np.array(mx.random.normal((48, 64), key=mx.random.key(2)) * 2.0)


def _failed(chosen: slice) -> set[tuple[str, str]]:
    found = checks(_logits(), seed=0, quick=True)
    done = [check() for check in found[chosen]]
    return {(check.rule, check.name) for check in done if check.p_value < FALSE_ALARM / len(found)}


COUNTED, ROUNDS = slice(0, 7), slice(7, 13)
Rule = Callable[..., Any]


def _target_only(p: mx.array, q: mx.array | None, drafts: mx.array, coins: mx.array) -> mx.array:
    return RIGHT["accept_rejection"](p, None, drafts, coins)


def _at_least(p: mx.array, q: mx.array | None, drafts: mx.array, coins: mx.array) -> mx.array:
    ids = drafts[:, None].astype(mx.int32)
    p_draft = mx.take_along_axis(p, ids, axis=-1)[:, 0]
    return coins * (1.0 if q is None else mx.take_along_axis(q, ids, axis=-1)[:, 0]) <= p_draft


def _uniform_when_empty(p: mx.array, q: mx.array | None, draft: mx.array) -> mx.array:
    left = RIGHT["residual"](p, q, draft) if q is None else mx.maximum(p - q, 0.0)
    return mx.where(left.sum() > 0, left, mx.ones(p.shape))


RIGHT: dict[str, Rule] = {name: getattr(acceptance, name) for name in ("accept_rejection", "residual", "draw")}
MUTANTS: list[tuple[str, Rule, str]] = [
    ("accept_coupled", lambda tokens, drafts: 1, "coupled"),
    ("accept_rejection", lambda p, q, drafts, coins: mx.ones(coins.shape, mx.bool_), "rejection"),
    ("accept_rejection", _target_only, "rejection"),
    ("accept_rejection", _at_least, "rejection"),
    ("residual", lambda p, q, draft: p, "rejection"),
    ("residual", _uniform_when_empty, "rejection"),
    ("draw", lambda weights, noise: mx.argmax(weights, axis=-1), "rejection"),
]


def test_right_rules_pass() -> None:
    assert not _failed(slice(None))


@pytest.mark.parametrize(("name", "mutant", "rule"), MUTANTS)
def test_wrong_rules_are_found(name: str, mutant: Rule, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, name, mutant)
    failed = _failed(COUNTED)
    assert {r for r, _ in failed} == {rule}
    if mutant in (_at_least, _uniform_when_empty):
        assert failed == {("rejection", "coins at both ends")}


def test_wrong_rounds_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the rules by themselves cannot show: a decoder that puts them together wrongly."""
    monkeypatch.setattr(judge, "residual", lambda p, q, draft: p)
    monkeypatch.setattr(judge, "accept_coupled", lambda tokens, drafts: len(drafts))
    monkeypatch.setattr(judge, "accept_block", lambda p, q, drafts, coins: mx.ones(coins.shape, mx.bool_))
    failed = _failed(ROUNDS)
    assert {rule for rule, _ in failed} == {"coupled", "rejection", "block"}


def test_a_failed_check_fails_the_run() -> None:
    report = Report({"name": "m", "dtype": "float32"}, {}, {}, {"backend": "cpu", "blas": "none"})
    report.planned_checks = 10
    report.checks = [Check("coupled", "a", 100, 2e-7), Check("rejection", "b", 100, 0.5)]
    assert report.exit_status == 0
    report.checks.append(Check("rejection", "c", 100, 5e-8))
    assert (report.verdict, report.exit_status) == ("bug", 1)
    assert "coupled right, rejection WRONG: c" in " ".join(report.screen().split())


def test_one_lucky_draw_is_not_impossible() -> None:
    """Cells that expect little are counted with others until they expect enough together."""
    assert chi_square([9990, 10, 1], [0.999, 0.000999, 1e-6]) > 0.01
    assert chi_square([100, 1], [1.0, 1e-9]) == 1.0
    assert chi_square([100, 1], [1.0, 0.0]) == 0.0
    with pytest.raises(ValueError, match="one probability per count"):
        chi_square([1, 2], [1.0])


# What is tried


class Windowed:
    """The parts of an engine that choosing prompts looks at."""

    def __init__(self, sizes: Sequence[int], context_length: int | None = None) -> None:
        from types import SimpleNamespace

        caches = [SimpleNamespace(max_size=size) for size in sizes]
        self.target = SimpleNamespace(new_caches=lambda: caches, positions=None, vocabulary_size=100)
        self.tokenizer, self.context_length, self.name = None, context_length, "windowed"


@pytest.mark.parametrize(
    ("sizes", "context", "passed", "left_out"),
    [
        ([], None, [], []),
        ([512, 512], None, [512], []),
        ([512, 1024, 4096], None, [512, 4096], []),
        ([512, 8192], None, [512], [8192]),
        ([8192], None, [], [8192]),
        ([512, 4096], 4096, [512], [4096]),
    ],
)
def test_which_windows_are_filled(
    sizes: list[int], context: int | None, passed: list[int], left_out: list[int]
) -> None:
    engine: Any = Windowed(sizes, context)
    found = windows(engine, 32, WINDOW_LIMIT)
    assert (found.passed, found.left_out) == (passed, left_out)
    chosen = prompts(engine, 32, quick=False, passed=found.passed)
    lengths = {prompt.window: len(prompt.ids) for prompt in chosen if prompt.window}
    assert lengths == {size: size - 16 for size in passed}


def test_a_window_that_is_too_long_is_said_not_to_be_passed(monkeypatch: pytest.MonkeyPatch, no_draws: None) -> None:
    monkeypatch.setattr("localspec.verify.prompts.QUICK_WINDOW_LIMIT", 12)
    report = run_verify(gemma(), quick=True, tokens=8)
    assert "16 NOT PASSED, longer than the 12 tokens tried" in report.screen()


def test_bad_settings_and_too_little_context() -> None:
    engine = Engine(tiny_llama(), context_length=100)
    with pytest.raises(LocalspecError, match="too short"):
        run_verify(engine, tokens=40)
    for bad in ({"tokens": 7}, {"tokens": True}, {"seed": -1}, {"exact": "rosw"}):
        with pytest.raises(SettingsError):
            run_verify(engine, **bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("lines", [0, 1, 6])
def test_interrupted_it_reports_what_it_has(lines: int, no_draws: None) -> None:
    told: list[str] = []

    def interrupt(line: str) -> None:
        told.append(line)
        if len(told) > lines:
            raise KeyboardInterrupt

    report = run_verify(gemma(), quick=True, on_progress=interrupt)
    assert (report.verdict, report.exit_status, report.complete) == ("interrupted", 130, False)
    assert len(report.comparisons) == lines
    assert "INTERRUPTED: nothing wrong in what was tried" in report.screen()
    json.dumps(report.as_dict(), allow_nan=False)


# The drafter of known texts


def test_rehearsed_drafts_fail_anywhere() -> None:
    script = list(range(2, 60))
    draw = Draw(Settings(), Noise(0), 64)
    drafter = Rehearsed(script)
    drafter.commit(script[:5])
    lengths, firsts = set(), set()
    for _ in range(400):
        proposal = drafter.propose(6, draw)
        tokens = [] if proposal is None else proposal.tokens
        lengths.add(len(tokens))
        firsts.add(next((i for i, t in enumerate(tokens) if t != script[5 + i]), len(tokens)))
    assert lengths == firsts == set(range(7))
    sure = Rehearsed(script, mistakes=False).fresh()
    sure.commit(script[:5])
    proposal = sure.propose(6, draw)
    assert proposal is not None
    assert proposal.tokens == script[5:11]


def test_importing_it_loads_no_mlx() -> None:
    code = "import sys, localspec.verify.run; print('mlx' in sys.modules, 'numpy' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]
