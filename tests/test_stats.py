"""Metrics have one definition each: against numbers worked out by hand, and against the tokens of real runs."""

from __future__ import annotations

import json
import math

import mlx.core as mx
import pytest
from tiny import ScriptDrafter, ScriptModel, TableModel, random_table, tiny_llama

from localspec.drafters import ModelDrafter
from localspec.engine import Engine
from localspec.settings import Settings
from localspec.stats import DrafterStats, Stats
from localspec.tokens import Round, Source


def _round(index: int, drafter: Source | None, drafted: int, accepted: int, emitted: int) -> Round:
    return Round(index, drafter, tuple(range(drafted)), accepted, emitted, 0)


def test_counts_by_hand() -> None:
    """Five passes: 1 plain; n-gram 4 drafted, 4 accepted, 5 out; n-gram 2, 0, 1 out; draft 3, 2, 3 out; and a block of
    4 of which 2 were accepted before the end token, the second of them (2 out)."""
    stats = Stats(prompt_tokens=7, reused_tokens=3)
    for record in (
        _round(0, None, 0, 0, 1),
        _round(1, "ngram", 4, 4, 5),
        _round(2, "ngram", 2, 0, 1),
        _round(3, "draft", 3, 2, 3),
        _round(4, "ngram", 4, 2, 2),
    ):
        stats.book_round(record)
    assert (stats.target_passes, stats.emitted, stats.drafted, stats.accepted) == (5, 12, 13, 8)
    assert stats.tokens_per_pass == pytest.approx(12 / 5)
    assert stats.acceptance_rate == pytest.approx(8 / 13)
    total = stats.all_drafters
    assert total.rounds == 4
    assert total.mean_acceptance_length == pytest.approx(1 + 8 / 4)
    assert total.acceptance_by_position == pytest.approx([3 / 4, 3 / 4, 1 / 3, 1 / 2])
    ngram, draft = stats.by_drafter["ngram"], stats.by_drafter["draft"]
    assert (ngram.rounds, ngram.drafted, ngram.accepted) == (3, 10, 6)
    assert ngram.acceptance_by_position == pytest.approx([2 / 3, 2 / 3, 1 / 2, 1 / 2])
    assert (draft.rounds, draft.drafted, draft.accepted) == (1, 3, 2)
    assert draft.acceptance_by_position == [1, 1, 0]
    assert draft.mean_acceptance_length == 3


def test_times_by_hand() -> None:
    stats = Stats(ttft_s=0.5, prefill_s=0.25, total_s=2.5, draft_s=0.25, verify_s=1.5)
    stats.emitted = 9
    assert stats.tpot_s == pytest.approx(0.25)
    assert stats.decode_tps is None  # nothing was measured between passes
    stats.target_passes = 4
    assert stats.decode_tps == pytest.approx(4)
    assert stats.host_s == pytest.approx(0.5)


def test_nothing_drafted_is_not_a_division() -> None:
    stats = Stats()
    stats.book_round(_round(0, None, 0, 0, 1))
    assert stats.acceptance_rate is None
    assert stats.tpot_s is None
    assert stats.decode_tps is None
    assert stats.tokens_per_pass == 1
    assert Stats().tokens_per_pass is None
    assert DrafterStats().mean_acceptance_length is None
    assert DrafterStats().acceptance_by_position == []
    empty = DrafterStats()
    empty.book(0, 0)
    assert empty.rounds == 0
    assert json.loads(json.dumps(stats.as_dict()))["acceptance_rate"] is None


def test_as_dict_has_the_shared_names() -> None:
    names = set(Stats().as_dict())
    assert {
        "target_passes",
        "tokens_per_pass",
        "drafted",
        "accepted",
        "acceptance_rate",
        "mean_acceptance_length",
        "acceptance_by_position",
        "by_drafter",
        "ttft_s",
        "tpot_s",
        "decode_tps",
        "draft_s",
        "verify_s",
        "host_s",
        "total_s",
    } <= names


def test_a_run_worked_out_by_hand() -> None:
    """Script of 10 tokens, drafts of 3, one mistake at position 8: rounds 4, then 1 accepted + 1, then the rest."""
    script = [*range(30, 34), *range(10, 20), 60, 61, 62]
    engine = Engine(ScriptModel(script), drafters=[ScriptDrafter(script, wrong=[9])])
    generation = engine.generate(script[:4], max_tokens=10, draft_length=3)
    assert generation.ids == list(range(10, 20))
    summary = [(len(r.drafted), r.accepted, r.emitted, r.position) for r in generation.rounds]
    assert summary == [(3, 3, 4, 4), (3, 1, 2, 8), (3, 3, 4, 10)]
    assert [t.source for t in generation.tokens] == [
        *["draft"] * 3,
        "bonus",
        "draft",
        "resampled",
        *["draft"] * 3,
        "bonus",
    ]
    assert [t.draft_index for t in generation.tokens] == [0, 1, 2, None, 0, None, 0, 1, 2, None]
    assert [t.round for t in generation.tokens] == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert [t.position for t in generation.tokens] == list(range(4, 14))
    stats = generation.stats
    assert (stats.emitted, stats.target_passes, stats.drafted, stats.accepted) == (10, 3, 9, 7)
    assert stats.by_source == {"draft": 7, "bonus": 2, "resampled": 1}
    assert stats.all_drafters.acceptance_by_position == pytest.approx([1, 2 / 3, 2 / 3])
    assert stats.prompt_tokens == 4
    assert generation.rounds[1].drafted == (14, 16, 16)


@pytest.mark.parametrize("accept", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("length", [0, 1, 4, "auto"])
def test_emitted_is_the_sum_over_rounds_and_nothing_is_counted_twice(accept: str, length: int | str) -> None:
    drafters = ["ngram", ModelDrafter(tiny_llama(1, layers=1))]
    engine = Engine(tiny_llama(3, scale=1.0), drafters=drafters)
    for temperature in (0, 0.8):
        generation = engine.generate(
            [1, 2, 3, 1, 2], max_tokens=50, temperature=temperature, seed=3, accept=accept, draft_length=length
        )
        stats, rounds = generation.stats, generation.rounds
        assert stats.emitted == 50 == sum(r.emitted for r in rounds) == sum(stats.by_source.values())
        assert stats.target_passes == len(rounds)
        assert stats.drafted == sum(len(r.drafted) for r in rounds) == sum(d.drafted for d in stats.by_drafter.values())
        assert stats.accepted == sum(r.accepted for r in rounds)
        assert stats.accepted == sum(t.draft_index is not None for t in generation.tokens)
        assert stats.accepted <= stats.drafted
        assert [r.index for r in rounds] == list(range(len(rounds)))
        position = 5
        for record in rounds:
            assert record.position == position
            mine = [t for t in generation.tokens if t.round == record.index]
            assert len(mine) == record.emitted
            assert [t.id for t in mine[: record.accepted]] == list(record.drafted[: record.accepted])
            position += record.emitted
        assert 0 < stats.ttft_s <= stats.total_s
        assert stats.prefill_s + stats.draft_s + stats.verify_s <= stats.total_s * 1.01 + 1e-3


def test_tokens_carry_the_right_probabilities() -> None:
    """p, q and logprob of every token, against the tables that the models are made of."""
    target, draft = random_table(1, 6, 1.2), random_table(2, 6, 1.2)
    engine = Engine(TableModel(target), drafters=[ModelDrafter(TableModel(draft))])
    for accept in ("coupled", "rejection", "block"):
        generation = engine.generate([1, 2, 3], max_tokens=150, temperature=0.8, seed=4, accept=accept, draft_length=3)
        ids = [1, 2, 3, *generation.ids]
        sources = set()
        for token in generation.tokens:
            before = ids[token.position - 2], ids[token.position - 1]
            raw, heated = mx.softmax(target[before]), mx.softmax(target[before] / 0.8)
            assert token.logprob == pytest.approx(math.log(raw[token.id].item()), abs=1e-4)
            assert token.p == pytest.approx(heated[token.id].item(), rel=1e-4)
            sources.add(token.source)
            if token.source == "draft":
                assert token.q == pytest.approx(mx.softmax(draft[before] / 0.8)[token.id].item(), rel=1e-4)
            else:
                assert token.q is None
                assert token.draft_index is None
        assert sources >= {"draft", "resampled", "bonus"}
    greedy = Engine(TableModel(target), drafters=["ngram"]).generate([1, 2, 1, 2, 1], max_tokens=30, draft_length=3)
    assert {token.p for token in greedy.tokens} == {1.0}
    assert all(token.q == 1.0 and token.match_length for token in greedy.tokens if token.source == "ngram")
    assert all(token.match_length is None for token in greedy.tokens if token.source != "ngram")


def test_stats_are_live_and_right_while_it_runs() -> None:
    engine = Engine(tiny_llama(), drafters=["ngram"])
    generation = engine.stream([1, 2, 3, 1, 2], max_tokens=20, draft_length=2)
    for count, _ in enumerate(generation, 1):
        assert len(generation.tokens) == len(generation.ids) == count
        assert generation.stats.emitted >= count
        assert generation.stats.total_s > 0


def test_reused_tokens_are_counted() -> None:
    engine = Engine(tiny_llama())
    session = engine.new_session()
    engine.generation(session, [1, 2, 3, 4], Settings(max_tokens=5)).run()
    stats = engine.generation(session, [*session.ids, 9], Settings(max_tokens=5)).run().stats
    assert (stats.prompt_tokens, stats.reused_tokens) == (10, 8)
