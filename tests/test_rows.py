"""Row classes: what the probe finds on models whose rounding is planted, and what decoding in one class guarantees."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from planted import VOCABULARY, WINDOW, Planted, Shift, Situation, by_size
from tiny import ScriptDrafter, tiny_gemma, tiny_llama

import localspec.exactness
import localspec.probe
from localspec.attention import by_row, calls
from localspec.caches.window import WindowCache
from localspec.engine import Engine
from localspec.errors import SettingsError
from localspec.probe import probe, screen
from localspec.rows import RowClass, RowClasses
from localspec.settings import Settings
from localspec.shapes import Shapes
from localspec.target import Target
from localspec.transaction import Transaction

KINDS = [("plain",), ("window",), ("recurrent",), ("plain", "window", "recurrent")]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]


def sizes_of(found: RowClasses) -> list[tuple[int, ...]]:
    return [one.sizes for one in found.classes]


def found_on(model: Any, most: int = 9) -> RowClasses:
    return probe(Target(model), most=most)


@pytest.fixture(autouse=True)
def _sizes_are_tried_whatever_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(localspec.probe, "_USELESS", float("inf"))


# The probe


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_the_probe_finds_planted_classes(kinds: tuple[str, ...]) -> None:
    found = found_on(Planted(kinds, shift=by_size([1], [2, 3], [4, 5, 8])))
    assert sizes_of(found) == [(1,), (2, 3), (4, 5, 8), (6, 7, 9)]
    assert not found.unfit
    assert found.tried == tuple(range(1, 10))
    assert all(len(one.seconds) == len(one.sizes) and min(one.seconds) > 0 for one in found.classes)


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_without_errors_all_sizes_are_one_class(kinds: tuple[str, ...]) -> None:
    found = found_on(Planted(kinds))
    assert found.alike
    assert sizes_of(found) == [tuple(range(1, 10))]
    screened = screen(Target(Planted(kinds)))
    assert screened is not None
    assert screened.alike


def _at(sizes: set[int], errors: Callable[[Situation], list[float]]) -> Shift:
    return lambda s: errors(s) if s.rows in sizes else [0.0] * s.rows


def _filler_behind(s: Situation) -> list[float]:
    ids = s.inputs[0].tolist()
    return [0.01 * (ids[-1] == ids[-2])] * s.rows


def test_a_size_whose_rows_depend_on_their_place_or_on_fillers_is_in_no_class() -> None:
    planted: dict[str, tuple[Shift, int]] = {
        "one place": (_at({5}, lambda s: [0, 0, 0, 0.01, 0]), 5),
        "the last place": (_at({4}, lambda s: [0, 0, 0, 0.01]), 4),
        "the first place": (_at({7}, lambda s: [0.01, 0, 0, 0, 0, 0, 0]), 7),
        "places in turn": (_at({8}, lambda s: [0.01 * (i % 4) for i in range(8)]), 8),
        "fillers": (_at({6}, _filler_behind), 6),
        "fillers, two rows": (_at({2}, _filler_behind), 2),
    }
    for name, (shift, size) in planted.items():
        found = found_on(Planted(shift=shift), most=8)
        assert found.unfit == (size,), name
        assert sizes_of(found) == [tuple(n for n in range(1, 9) if n != size)], name


def test_what_only_the_caches_show_counts() -> None:
    """Keys, and recurrent state after some number of kept rows, whose error shows in no logits of the same pass."""
    stored = by_size([1, 2, 3])
    found = found_on(Planted(("plain",), stored_shift=lambda s: [1e-14 * e for e in stored(s)]), most=5)
    assert sizes_of(found) == [(1, 2, 3, 4, 5)]  # too small to change a bit: the control
    # The newest key of all is read by its own row, so that logits show it too; a key at offset 0 weight does not exist.
    found = found_on(Planted(("plain",), stored_shift=stored), most=5)
    assert sizes_of(found) == [(1, 2, 3), (4, 5)]
    # Three rows kept at once leave another state than three kept one by one: sizes of three and more may do that.
    found = found_on(Planted(("recurrent",), state_shift=lambda rows: 0.01 * (rows == 3)), most=5)
    assert sizes_of(found) == [(1, 2)]
    assert found.unfit == (3, 4, 5)


def test_errors_at_long_contexts_only_are_found() -> None:
    for kinds in (("plain",), ("plain", "window", "recurrent")):
        found = found_on(Planted(kinds, shift=lambda s: [0.01 * (s.start > 1000 and s.rows >= 4)] * s.rows), most=6)
        assert sizes_of(found) == [(1, 2, 3), (4, 5, 6)]
        assert max(found.lengths) > 1000
    sliding = Planted(("window", "plain"), shift=lambda s: [0.01 * (s.start > 2 * WINDOW and s.rows == 3)] * s.rows)
    assert (3,) in sizes_of(found_on(sliding))


def test_the_probe_stays_within_the_context() -> None:
    for length in (40, 64, 200):
        model = Planted(positions=length)
        assert probe(Target(model), most=4, context_length=length).alike


def test_where_kept_rows_run_again_the_class_holds_all_smaller_sizes() -> None:
    assert sizes_of(found_on(Planted(("odd",), shift=by_size([1, 2, 3, 6])), most=6)) == [(1, 2, 3)]
    found = found_on(Planted(("odd",), shift=by_size([1], [2, 3, 4, 5, 6])), most=6)
    assert sizes_of(found) == [(1,)]
    assert found.best() is None


@pytest.mark.parametrize(
    ("blind", "shift"),
    [
        ("steady", lambda s: [0.01 * (i == 4) for i in range(s.rows)]),  # the same in every size that has the place
        ("long", lambda s: [0.01 * (s.start > 1000 and s.rows >= 4)] * s.rows),
        ("caches", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_blinder_probe_would_miss_them(blind: str, shift: Shift | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each comparison taken away lets a planted error through: none of them is idle."""
    model = Planted(("recurrent",), state_shift=lambda r: 0.01 * (r == 3)) if shift is None else Planted(shift=shift)
    assert not found_on(model, most=6).alike
    with monkeypatch.context() as patch:
        if blind == "steady":
            patch.setattr(localspec.probe._Rows, "steady", property(lambda self: True, lambda self, value: None))
        elif blind == "long":
            patch.setattr(localspec.probe, "LONG", localspec.probe.SHORT)
        else:
            patch.setattr(localspec.probe, "SnapshotLeaf", ())
        assert found_on(model, most=6).alike


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_screening_finds_differences_in_few_passes(kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(localspec.probe, "_PROMISING", 0.0)  # these passes are too short for the clock
    monkeypatch.setattr(localspec.probe, "_LONG_S", math.inf)
    planted: dict[str, Shift] = {
        "two rows": by_size([n for n in range(1, 600) if n != 2]),
        "many rows": by_size([n for n in range(1, 600) if not 8 < n < 20]),
        "some rows": by_size([n for n in range(1, 600) if not 3 <= n <= 6]),
        "one place": lambda s: [0.01 * (s.rows < 20 and i == localspec.probe.WIDE - 2) for i in range(s.rows)],
        "long contexts": lambda s: [0.01 * (s.start > 1000 and s.rows > 1)] * s.rows,
    }
    if "recurrent" in kinds:
        planted.pop("long contexts")  # recurrent state has no length
    # Where only some sizes differ, the others will do.
    fit = {"many rows": [*range(1, 9)], "some rows": [1, 2, 7, 8, 9, 13], "one place": [*range(1, 10)]}
    for name, shift in planted.items():
        model = Planted(kinds, shift=shift)
        screened = screen(Target(model))
        if name in fit:
            assert screened is not None, name
            assert sizes_of(screened) == [tuple(fit[name])], name
            assert sorted([*fit[name], *screened.unfit]) == [*range(1, 10), 13], name
        else:
            assert screened is None, name
        assert sum(rows < 20 for _, rows in model.seen) <= (32 if name in fit else 22)
    kept = Planted(("recurrent",), state_shift=lambda rows: 0.01 * (rows == 3))
    assert screen(Target(kept)) is None


# The choice


def classes(*members: dict[int, float], one: float = 1.0, unfit: tuple[int, ...] = ()) -> RowClasses:
    made = tuple(RowClass(tuple(member), tuple(member.values())) for member in members)
    return RowClasses(made, unfit, one, (12, 1100), True, 10, 0.1)


def test_widths() -> None:
    one = RowClass((3, 4, 8), (1.0, 1.05, 3.0))
    assert [one.width(n) for n in range(1, 9)] == [3, 3, 3, 4, 8, 8, 8, 8]
    assert (one.plain, one.largest) == (3, 8)
    with pytest.raises(ValueError, match="9 rows"):
        one.width(9)
    four_is_faster = RowClass((1, 2, 4), (1.0, 1.1, 0.7))
    assert [four_is_faster.width(n) for n in (1, 2, 3, 4)] == [4, 4, 4, 4]
    assert [RowClass((2, 5)).width(n) for n in (1, 2, 3)] == [2, 2, 5]
    assert one.up_to(4) == RowClass((3, 4), (1.0, 1.05))
    assert RowClass((3, 4, 5, 8, 9)).describe() == "3 to 5, 8 or 9 rows"
    assert RowClass((1,)).describe() == "one row"


def test_the_class_with_the_cheapest_plain_decoding_is_chosen() -> None:
    found = classes({1: 1.0}, {2: 1.2, 3: 1.5}, {4: 1.3, 8: 1.4}, unfit=(5,))
    best = found.best()
    assert best is not None
    assert best.sizes == (2, 3)  # one row alone leaves no room for drafts
    assert found.relative(best) == pytest.approx(1.2)
    tied = classes({1: 1.0}, {2: 1.2, 3: 1.5}, {4: 1.21, 8: 1.4}).best()
    assert tied is not None
    assert tied.sizes == (4, 8)
    assert classes({1: 1.0}).best() is None
    assert classes({1: 1.0}).as_dict()["best"] is None
    assert found.as_dict()["classes"][1] == {"sizes": [2, 3], "seconds": [1.2, 1.5], "plain": 2}


def line(found: RowClasses | None, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[str, RowClass | None]:
    monkeypatch.setattr(localspec.exactness, "screen", lambda *a, **k: found)
    monkeypatch.setattr(localspec.exactness, "probe", lambda *a, **k: found)
    exact = localspec.exactness.Exact(Target(Planted()), None).of(Settings(**settings))
    return exact.line, exact.row_class


def test_what_is_said_and_done(monkeypatch: pytest.MonkeyPatch) -> None:
    alike = classes(dict.fromkeys(range(1, 14), 1.0))
    narrow = classes({1: 1.0, 2: 1.0, 3: 1.0})
    dear = classes({1: 1.0}, {5: 1.4, 6: 1.5})
    cheap = classes({1: 1.0}, {2: 1.03, 3: 1.2})
    assert line(alike, monkeypatch) == ("bit for bit: every pass size in use rounds alike here", alike.classes[0])
    words = "bit for bit: passes of up to 3 rows round alike here, and wider ones are not used"
    assert line(narrow, monkeypatch) == (words, narrow.classes[0])
    assert line(None, monkeypatch)[1] is None
    said, chosen = line(dear, monkeypatch)
    assert said.startswith("up to near-ties: ")
    assert "1.40x" in said
    assert chosen is None
    said, chosen = line(dear, monkeypatch, exact="rows")
    assert said == "bit for bit: passes of 5 or 6 rows only; plain decoding costs 1.40x"
    assert chosen == dear.classes[1]
    assert line(cheap, monkeypatch)[1] == cheap.classes[1]
    assert line(alike, monkeypatch, exact="off") == ("up to near-ties: exact is off", None)
    assert line(classes({1: 1.0}), monkeypatch, exact="rows")[1] == RowClass((1,))
    assert line(classes({1: 1.0}), monkeypatch)[1] is None
    for accept in ("rejection", "block"):
        said, _ = line(alike, monkeypatch, accept=accept, temperature=1.0)
        assert said == f"the distribution, not the ids: {accept} acceptance"
        assert line(alike, monkeypatch, accept=accept, temperature=0.0)[0].startswith("bit for bit")
    own = RowClasses(alike.classes, (), 1.0, (12, 1100), False, 10, 0.1)
    assert line(own, monkeypatch)[0].startswith(
        "bit for bit with 12 and 1100 tokens of context, where tried: every pass"
    )
    with pytest.raises(SettingsError, match="exact must be one of auto, rows, off"):
        Settings(exact="always")  # type: ignore[arg-type]


def test_auto_decides_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another measurement could fall on the other side of the limit, and a seed's ids would change."""
    engine = Engine(Planted(), drafters=[])
    monkeypatch.setattr(localspec.exactness, "screen", lambda *a, **k: None)
    before = engine.exactness(Settings())
    monkeypatch.setattr(localspec.exactness, "probe", lambda *a, **k: classes({1: 1.0}, {2: 1.0}))
    assert engine.row_classes().best() is not None
    assert engine.exactness(Settings()) == before


# Decoding in one class


def engine_in(found: RowClasses, model: Any, **options: Any) -> Engine:
    engine = Engine(model, **options)
    engine._exact._probed = found
    engine._exact._causal = True  # planted errors are far larger than rounding's
    return engine


PLANTED = by_size([1], [2, 3], [4, 5, 6, 7])
IN_USE = [
    classes({1: 1.0}, {4: 1.3, 5: 1.3, 6: 1.4, 7: 1.5}),
    classes({1: 1.0}, {2: 1.1, 3: 1.2}),
    classes({1: 1.0}, {5: 1.3}),  # a fixed width for every pass
]


def runs(engine: Engine, prompt: list[int] = PROMPT, **settings: Any) -> tuple[Any, list[Any]]:
    """A plain generation, and speculative ones of several lengths."""
    settings = {"max_tokens": 40, "seed": 5, **settings}
    plain = engine.generate(prompt, speculate=False, **settings)
    assert len(plain.ids) == settings["max_tokens"]
    script = prompt + plain.ids
    several = []
    for length in (1, 2, 3, 6, "auto"):
        session = engine.new_session()
        for drafter in session.drafters:
            if isinstance(drafter, ScriptDrafter):
                drafter.script = script
        several.append(engine.generation(session, prompt, Settings(draft_length=length, **settings)).run())
    return plain, several


def oracle() -> ScriptDrafter:
    """Right about most tokens, wrong at every seventh."""
    return ScriptDrafter([], wrong=range(len(PROMPT), 400, 7), vocabulary=VOCABULARY)


def outcome(generation: Any) -> list[tuple[int, float]]:
    return [(token.id, token.logprob) for token in generation.tokens]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_rows_gives_the_same_bits_with_speculation_where_off_does_not(
    kinds: tuple[str, ...], temperature: float
) -> None:
    differs = 0
    for found in IN_USE:
        for drafters in ([oracle()], ["ngram"]):
            model = Planted(kinds, shift=PLANTED)
            engine = engine_in(found, model, drafters=drafters)
            plain, several = runs(engine, exact="rows", temperature=temperature)
            best = found.best()
            assert best is not None
            for generation in several:
                assert outcome(generation) == outcome(plain)
                assert generation.exactness is not None
                assert generation.exactness.startswith("bit for bit: passes of ")
                assert generation.stats.target_passes == len(generation.rounds)
                assert generation.stats.drafted == sum(len(r.drafted) for r in generation.rounds)
                assert all(len(r.drafted) < best.largest for r in generation.rounds)
            decoding = {rows for start, rows in model.seen if start >= len(PROMPT) - 1}
            assert decoding <= set(best.sizes)
            free, other = runs(engine, exact="off", temperature=temperature)
            differs += sum(generation.ids != free.ids for generation in other)
    assert differs >= 5


def test_plain_passes_are_filled_up_too_and_run_ahead() -> None:
    for kinds in KINDS:
        model = Planted(kinds, shift=PLANTED)
        engine = engine_in(IN_USE[0], model, drafters=[])
        generation = engine.generate(PROMPT, max_tokens=12, exact="rows")
        passes = [(start, rows) for start, rows in model.seen if rows != len(PROMPT) - 1]
        assert [rows for _, rows in passes] == [4] * len(passes)
        if kinds != ("recurrent",):
            # Each pass starts where the last one's real row ended: its fillers are gone.
            starts = [start for start, _ in passes]
            assert starts == list(range(len(PROMPT) - 1, len(PROMPT) - 1 + len(passes)))
        assert {r.emitted for r in generation.rounds} == {1}
        assert generation.stats.drafted == 0


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_ends_inside_filled_passes_and_the_turns_after_them(kinds: tuple[str, ...]) -> None:
    """Cut at every length, or closed by the consumer: caches hold what was kept, and the next turn is the same."""
    engine = engine_in(IN_USE[0], Planted(kinds, shift=PLANTED), drafters=[oracle()])
    whole = engine.generate(PROMPT, speculate=False, exact="rows", max_tokens=30)
    for length in range(1, 10):
        ends = []
        for speculate in (False, True):
            for close in (False, True):
                session = engine.new_session()
                session.drafters[0].script = PROMPT + whole.ids
                settings = Settings(
                    exact="rows", speculate=speculate, max_tokens=30 if close else length, draft_length=4
                )
                generation = engine.generation(session, PROMPT, settings)
                for _ in range(length):
                    next(generation)
                generation.close()
                assert generation.ids == whole.ids[:length]
                assert session.ids == PROMPT + whole.ids[:length]
                assert session.transaction.held in (len(session.ids), len(session.ids) - 1)
                follow = [*session.ids, 7, 7, 2]
                again = engine.generation(
                    session, follow, Settings(exact="rows", speculate=speculate, max_tokens=8)
                ).run()
                ends.append(outcome(again))
        assert all(end == ends[0] for end in ends), length


@pytest.mark.parametrize("accept", ["coupled", "rejection", "block"])
def test_processors_see_no_fillers(accept: str) -> None:
    seen: list[list[int]] = []

    def watch(tokens: mx.array, logits: mx.array) -> mx.array:
        assert logits.shape == (1, VOCABULARY)
        seen.append(tokens.tolist())
        return logits

    engine = engine_in(IN_USE[0], Planted(shift=PLANTED), drafters=["ngram"])
    generation = engine.generate(
        PROMPT,
        max_tokens=20,
        exact="rows",
        temperature=0.9,
        seed=2,
        accept=accept,
        draft_length=3,
        logits_processors=[watch],
    )
    text = PROMPT + generation.ids
    wanted = [
        text[: record.position] + list(record.drafted[:i])
        for record in generation.rounds
        for i in range(len(record.drafted) + 1)
    ]
    # A pass that ran ahead behind the end is looked at and thrown away.
    assert [entry for entry in seen if len(entry) <= len(text) - 1 or entry in wanted][: len(wanted)] == wanted


@pytest.mark.parametrize("start", range(len(PROMPT), len(PROMPT) + 9))
def test_conversion_to_few_bits_happens_in_the_same_place(start: int) -> None:
    """Fillers may stand beyond the place where caches are converted; real rows end there."""
    model = Planted(("plain", "recurrent"), shift=PLANTED)
    engine = engine_in(
        IN_USE[0], model, drafters=[oracle()], kv_bits=4, kv_group_size=32, quantized_kv_start=start
    )  # fmt: skip
    plain, several = runs(engine, exact="rows", max_tokens=24)
    for generation in several:
        assert outcome(generation) == outcome(plain)
        assert generation._session.transaction._quantized_from == start
    unconverted = engine_in(IN_USE[0], model, drafters=[]).generate(PROMPT, max_tokens=24, exact="rows")
    assert outcome(unconverted) != outcome(plain)


def test_a_table_of_positions_is_not_read_beyond_its_end() -> None:
    """The model asserts it. Filler rows need positions as well, so that the last few tokens cannot be had."""
    length = len(PROMPT) + 20
    for found, fewer in ((IN_USE[0], 3), (IN_USE[1], 1), (classes({1: 1.0, 2: 1.0, 3: 1.0}), 0)):
        model = Planted(("plain",), shift=None if not fewer else PLANTED, positions=length)
        engine = engine_in(found, model, drafters=[oracle()], context_length=length)
        plain = engine.generate(PROMPT, speculate=False, exact="rows", max_tokens=None)
        assert plain.finish_reason == "length"
        assert len(plain.ids) == 20 - fewer
        for n in (1, 2, 6):
            session = engine.new_session()
            session.drafters[0].script = PROMPT + plain.ids
            settings = Settings(exact="rows", max_tokens=None, draft_length=n)
            assert outcome(engine.generation(session, PROMPT, settings).run()) == outcome(plain)


def test_costs_are_booked_under_the_size_that_a_pass_had() -> None:
    engine = engine_in(IN_USE[0], Planted(shift=PLANTED), drafters=["ngram"])
    engine.generate(PROMPT, max_tokens=40, exact="rows")
    assert set(engine.controller.costs._recent) <= {4, 5, 6, 7}


def test_no_class_with_room_for_drafts_means_no_drafts() -> None:
    engine = engine_in(classes({1: 1.0}), Planted(shift=by_size(*[[n] for n in range(1, 9)])), drafters=["ngram"])
    plain, several = runs(engine, exact="rows")
    for generation in several:
        assert outcome(generation) == outcome(plain)
        assert generation.stats.drafted == 0
        assert generation.exactness == "bit for bit: passes of one row only, so nothing is drafted"


def _widths(patch: pytest.MonkeyPatch, width: Callable[[RowClass, int], int]) -> None:
    def sizes(self: Transaction) -> Any:
        one = self.row_class
        return one and SimpleNamespace(width=lambda rows: width(one, rows), largest=one.largest)

    patch.setattr(Transaction, "_sizes", sizes)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "fillers stay": lambda patch: patch.setattr(
        Transaction, "_drop_fillers", lambda self: setattr(self, "_fillers", 0)
    ),
    "sizes as they come": lambda patch: _widths(patch, lambda one, rows: rows),
    "plain passes of one row": lambda patch: _widths(patch, lambda one, rows: rows if rows == 1 else one.width(rows)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_planted_fault_in_padding_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_in(IN_USE[0], Planted(("plain", "window"), shift=PLANTED), drafters=[oracle()])
    right = outcome(engine.generate(PROMPT, speculate=False, exact="rows", max_tokens=40, seed=5))
    MUTANTS[mutant](monkeypatch)
    plain, several = runs(engine, exact="rows")
    assert any(outcome(generation) != right for generation in (plain, *several))
    if mutant != "fillers stay":
        assert any(outcome(generation) != outcome(plain) for generation in several)


# Attention by row


def noisy_attention(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Rounds otherwise for every number of rows and of keys, as libraries do."""

    def attend(queries: mx.array, keys: mx.array, values: mx.array, **options: Any) -> mx.array:
        rows, held = queries.shape[2], keys.shape[2]
        pattern = mx.sin(mx.arange(queries.shape[-1]))
        return original(queries, keys, values, **options) + 0.1 * ((rows * 7 + held * 3) % 5) * pattern

    return attend


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma], ids=["llama", "gemma past its window"])
@pytest.mark.parametrize("fault", [None, "attention", "shapes", "windows"])
def test_attention_that_rounds_by_sizes_and_lengths_is_no_matter(
    build: Callable[[], Any], fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", noisy_attention(mx.fast.scaled_dot_product_attention))
    if fault == "attention":
        monkeypatch.setattr("localspec.transaction.by_row", lambda rows, shapes: by_row(1))
    if fault == "shapes":
        monkeypatch.setattr("localspec.shapes._test", lambda *a: True)
    if fault == "windows":
        monkeypatch.setattr("localspec.caches.window.note_window", lambda *a: None)
    engine = engine_in(classes({1: 1.0, 2: 1.0, 4: 1.1, 8: 1.2}), build(), drafters=[oracle()])
    plain, several = runs(engine, exact="rows", temperature=0.8)
    same = all(outcome(generation) == outcome(plain) for generation in several)
    assert same == (fault is None or (fault == "windows" and build is tiny_llama))
    free, other = runs(engine, exact="off", temperature=0.8)
    assert any(outcome(generation) != outcome(free) for generation in other)


def _call(rows: int, held: int) -> list[mx.array]:
    """Queries, keys and values of random numbers."""
    queries, keys, values = (mx.random.normal((1, n, held, 8), key=mx.random.key(held + n)) for n in (4, 2, 2))
    return [queries[:, :, held - rows :], keys, values]


@pytest.mark.parametrize(
    ("wrong", "parts"),
    [
        (set(), [(4, 9)]),
        ({(4, 9)}, [(2, 7), (2, 9)]),  # 6 and 7 keys on one side of a multiple of 8; 8 and 9 on the other
        ({(4, 9), (2, 7)}, [(1, 6), (3, 9)]),
        ({(4, 9), (2, 9)}, [(2, 7), (1, 8), (1, 9)]),
        ({(4, 9), (2, 7), (3, 9), (2, 9)}, [(1, 6), (1, 7), (1, 8), (1, 9)]),
    ],
)
def test_rows_share_a_call_where_its_shape_rounds_as_theirs_alone(
    wrong: set[tuple[int, int]], parts: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`wrong`: (rows, keys) of calls in which one row is one bit off; they are found out once and never made again."""
    original, calls = mx.fast.scaled_dot_product_attention, []

    def odd(queries: mx.array, keys: mx.array, values: mx.array, **options: Any) -> mx.array:
        shape = queries.shape[2], keys.shape[2]
        calls.append(shape)
        out = original(queries, keys, values, **options)
        return out + 1e-6 * (mx.arange(shape[0]) == 1)[:, None] if shape in wrong else out

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", odd)
    shapes, rows = Shapes(), _call(4, 9)
    for _ in range(3):
        calls.clear()
        with by_row(4, shapes):
            got = mx.fast.scaled_dot_product_attention(*rows, scale=0.3, mask="causal")
    assert calls == parts
    with by_row(4):
        alone = mx.fast.scaled_dot_product_attention(*rows, scale=0.3, mask="causal")
    assert mx.array_equal(got, alone)


def test_shapes_that_never_agree_are_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr("localspec.shapes._test", lambda attend, q, k, v: bool(tried.append(k.shape[2])))
    shapes = Shapes()
    for held in range(8, 160, 8):
        rows = _call(3, held)
        assert not shapes.alike(mx.fast.scaled_dot_product_attention, *rows)
    assert tried == [8, 16, 24, 32, 64, 72, 80, 88, 128, 136, 144, 152]  # again at other lengths


def _summed_by_length(queries: mx.array, keys: mx.array, values: mx.array, **options: Any) -> mx.array:
    """Attention in the numbers' own format whose sums over keys are taken in another order for several rows."""
    shared = queries.shape[1] // keys.shape[1]
    keys, values = mx.repeat(keys, shared, axis=1), mx.repeat(values, shared, axis=1)
    scores = (queries.astype(mx.float32) * options["scale"]) @ mx.swapaxes(keys.astype(mx.float32), -1, -2)
    if options["mask"] is not None:
        rows, held = scores.shape[-2:]
        seen = mx.arange(held)[None] <= mx.arange(rows)[:, None] + held - rows
        scores = mx.where(seen, scores, -math.inf)
    weights, v = mx.softmax(scores, axis=-1), values.astype(mx.float32)
    if queries.shape[2] == 1:
        return (weights @ v).astype(values.dtype)
    half = keys.shape[2] // 2
    return (weights[..., :half] @ v[..., :half, :] + weights[..., half:] @ v[..., half:, :]).astype(values.dtype)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_no_shape_is_taken_for_alike_whose_sums_go_in_another_order(dtype: mx.Dtype) -> None:
    """16 bits hide such an order in most results, so that a test could not tell: no calls are shared there."""
    shapes = Shapes()
    for held in range(40, 60):
        rows = [part.astype(dtype) for part in _call(3, held)]
        assert not shapes.alike(_summed_by_length, *rows)


def test_each_row_gets_its_own_keys() -> None:
    q, k, v = (mx.random.normal((1, heads, 9, 8), key=mx.random.key(heads)) for heads in (4, 2, 2))
    calls: list[tuple[int, int, Any]] = []
    original = mx.fast.scaled_dot_product_attention

    def spy(queries: mx.array, keys: mx.array, values: mx.array, **options: Any) -> mx.array:
        calls.append((queries.shape[2], keys.shape[2], options.get("mask")))
        return original(queries, keys, values, **options)

    mx.fast.scaled_dot_product_attention = spy  # type: ignore[assignment]
    try:
        with by_row(3):
            got = mx.fast.scaled_dot_product_attention(q[:, :, 6:], k, v, scale=0.3, mask="causal")
            mx.fast.scaled_dot_product_attention(q[:, :, 6:], k, v, scale=0.3, mask=None)  # rows that see each other
            mx.fast.scaled_dot_product_attention(q[:, :, 5:], k, v, scale=0.3, mask="causal")  # not this pass's rows
            other = threading.Thread(
                target=lambda: mx.fast.scaled_dot_product_attention(q[:, :, 6:], k, v, scale=0.3, mask="causal")
            )
            other.start()
            other.join()
        assert mx.fast.scaled_dot_product_attention is spy
    finally:
        mx.fast.scaled_dot_product_attention = original
    assert [call[:2] for call in calls] == [(1, 7), (1, 8), (1, 9), (3, 9), (4, 9), (3, 9)]
    assert [call[2] for call in calls[:3]] == [None] * 3
    wanted = original(q[:, :, 6:], k, v, scale=0.3, mask="causal")
    np.testing.assert_allclose(np.array(got), np.array(wanted), rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="boom"), by_row(2):
        raise RuntimeError("boom")
    assert mx.fast.scaled_dot_product_attention is original


def test_scores_that_the_model_computed_itself_are_told_apart() -> None:
    """Given as a mask of numbers, they were computed for all rows and keys at once, whatever is done afterwards."""
    q, k = (mx.random.normal((1, 2, n, 8), key=mx.random.key(n)) for n in (3, 9))
    for mask, counted in ((mx.zeros((1, 2, 3, 9)), 0), (mx.ones((3, 9), dtype=mx.bool_), 1)):
        with by_row(3):
            mx.fast.scaled_dot_product_attention(q, k, k, scale=0.3, mask=mask)
            assert calls() == counted


def test_window_rows_get_what_they_would_get_alone() -> None:
    keys = mx.random.normal((1, 2, 60, 8), key=mx.random.key(1))
    queries = mx.random.normal((1, 2, 60, 8), key=mx.random.key(2))
    attend = mx.fast.scaled_dot_product_attention
    for window, rows in ((8, 3), (8, 5), (8, 9), (20, 4)):
        single, several = WindowCache(window), WindowCache(window)
        alone, together, start = [], [], 0
        while start + rows <= 60:
            with by_row(rows):
                mask = several.make_mask(rows)
                part = keys[..., start : start + rows, :]
                k, v = several.update_and_fetch(part, part)
                together.append(
                    mx.fast.scaled_dot_product_attention(
                        queries[:, :, start : start + rows], k, v, scale=1.0, mask=mask
                    )
                )
            for i in range(start, start + rows):
                mask = single.make_mask(1)
                k, v = single.update_and_fetch(keys[..., i : i + 1, :], keys[..., i : i + 1, :])
                alone.append(attend(queries[:, :, i : i + 1], k, v, scale=1.0, mask=mask))
            start += rows
        assert mx.array_equal(mx.concatenate(alone, axis=2), mx.concatenate(together, axis=2))
