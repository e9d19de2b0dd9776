"""Drafters follow the context token by token and propose what they say they propose."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import TableModel, chat_engine, random_table, tiny_llama, tiny_tokenizer

from localspec.drafters import ModelDrafter, NgramDrafter
from localspec.drafters.evidence import DOUBT, UNSEEN, Evidence, blend, features
from localspec.drafters.protocol import Draw, Proposal, common_prefix
from localspec.engine import Engine
from localspec.errors import IncompatibleDrafterError
from localspec.noise import Noise
from localspec.settings import Settings


def _draw(vocabulary: int = 64, **settings: Any) -> Draw:
    return Draw(Settings(**settings), Noise(1), vocabulary)


def _longest_suffix(context: Sequence[int]) -> int:
    """Length of the longest suffix that occurs earlier, by brute force."""
    best = 0
    for n in range(1, len(context)):
        suffix = list(context[-n:])
        if any(list(context[i : i + n]) == suffix for i in range(len(context) - n)):
            best = n
        else:
            break
    return best


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 10))
def test_ngram_proposes_what_followed_an_earlier_occurrence(context: list[int], length: int) -> None:
    drafter = NgramDrafter()
    drafter.commit(context)
    proposal = drafter.propose(length, _draw())
    longest = _longest_suffix(context)
    if longest == 0:
        assert proposal is None
        return
    assert proposal is not None
    assert proposal.match_length == longest
    assert len(proposal.tokens) == length
    pairs = set(itertools.pairwise(context))
    assert set(itertools.pairwise([context[-1], *proposal.tokens])) <= pairs


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 6), st.integers(1, 6))
def test_ngram_candidates_differ_and_begin_with_the_proposal(context: list[int], length: int, width: int) -> None:
    drafter = NgramDrafter()
    drafter.commit(context)
    proposal = drafter.propose(length, _draw())
    many = drafter.propose_many(length, width)
    if proposal is None:
        assert many == []
        return
    assert many[0] == proposal
    assert len(many) <= width
    assert all(len(one.tokens) == length for one in many)
    assert len({tuple(one.tokens) for one in many}) == len(many)
    pairs = set(itertools.pairwise(context))
    for one in many:
        assert set(itertools.pairwise([context[-1], *one.tokens])) <= pairs
        assert one.confidence is not None
        assert len(one.confidence) == length
        assert all(0 < chance < 1 for chance in one.confidence)
    # Of a place with several followers, each is the first token of some candidate when there is room for all.
    behind = {context[i + 1] for i in range(len(context) - 1) if context[i] == context[-1]}
    if proposal.match_length == 1 and length == 1:
        assert {one.tokens[0] for one in drafter.propose_many(1, 4)} == behind


def test_ngram_takes_the_latest_of_equal_matches_and_the_longest_of_all() -> None:
    drafter = NgramDrafter()
    drafter.commit([1, 2, 10, 1, 2, 20, 1, 2])
    proposal = drafter.propose(1, _draw())
    assert proposal is not None
    assert (proposal.tokens, proposal.match_length, proposal.source, proposal.q) == ([20], 2, "ngram", None)
    drafter = NgramDrafter()
    drafter.commit([7, 1, 2, 10, 8, 1, 2, 20, 7, 1, 2])
    proposal = drafter.propose(2, _draw())
    assert proposal is not None
    assert (proposal.tokens, proposal.match_length) == ([10, 8], 3)


def test_ngram_continues_a_repetition_beyond_its_end() -> None:
    drafter = NgramDrafter()
    drafter.commit([5, 6, 7, 5, 6, 7, 5])
    proposal = drafter.propose(8, _draw())
    assert proposal is not None
    assert proposal.tokens == [6, 7, 5, 6, 7, 5, 6, 7]


def _confidence(context: list[int], length: int = 1) -> list[float]:
    drafter = NgramDrafter()
    drafter.commit(context)
    proposal = drafter.propose(length, _draw())
    assert proposal is not None
    assert proposal.confidence is not None
    assert len(proposal.confidence) == len(proposal.tokens)
    assert all(0 < chance < 1 for chance in proposal.confidence)
    return proposal.confidence


def test_ngram_confidence_follows_the_evidence() -> None:
    once = _confidence([1, 2, 3, 1])[0]
    thrice = _confidence([1, 2, 3, 1, 2, 4, 1, 2, 5, 1])[0]
    split = _confidence([1, 9, 3, 1, 8, 4, 1, 2, 5, 1])[0]
    assert split < once < thrice
    # The word before decides where the word alone does not.
    assert _confidence([7, 1, 2, 8, 1, 3, 9, 1, 4, 7, 1])[0] > _confidence([6, 1, 2, 8, 1, 3, 9, 1, 4, 7, 1])[0]


def test_ngram_prefers_what_followed_more_often_to_what_followed_last() -> None:
    drafter = NgramDrafter()
    drafter.commit([1, 2, 3, 1, 2, 3, 1, 2, 4, 9, 1, 2])
    proposal = drafter.propose(1, _draw())
    assert proposal is not None
    assert proposal.tokens == [3]


def test_counts_are_blended_from_the_shortest_suffix_to_the_longest() -> None:
    assert blend([]) == UNSEEN
    once = (1 + DOUBT * UNSEEN) / (1 + DOUBT)
    assert blend([(1, 1)]) == pytest.approx(once)
    assert blend([(1, 2), (2, 3)]) == pytest.approx((2 + DOUBT * (1 + DOUBT * UNSEEN) / (2 + DOUBT)) / (3 + DOUBT))


def test_the_place_at_the_end_of_the_context_has_no_follower_yet() -> None:
    drafter = NgramDrafter()
    drafter.commit([1, 2, 3, 1])
    step = drafter._likeliest(*drafter._match())
    assert step is not None
    assert step.blended == pytest.approx((1 + DOUBT * UNSEEN) / (1 + DOUBT))
    assert step.seen == features(step.blended, 1, 1, True)


def test_what_followed_teaches_the_evidence() -> None:
    weights = []
    for text in ([1, 2] * 20, [token for i in range(20) for token in (1, 10 + i)]):
        drafter = NgramDrafter()
        drafter.commit(text)
        weights.append(drafter._evidence.weights[0])
    right, wrong = weights
    assert right > Evidence().weights[0] > wrong


def test_evidence_learns_how_copies_fare_in_this_text() -> None:
    seen = features(0.5, 2, 1, True)
    for hit in (False, True):
        evidence = Evidence()
        before = evidence.chance(seen)
        for _ in range(200):
            evidence.observe(seen, hit)
        assert evidence.chance(seen) > max(before, 0.8) if hit else evidence.chance(seen) < min(before, 0.2)
    assert Evidence().chance(seen) > Evidence().chance(features(0.5, 2, 1, False))
    assert Evidence().chance(features(0.5, 8, 1, True)) > Evidence().chance(seen)
    assert Evidence().chance(seen) > Evidence().chance(features(0.2, 2, 1, True))


def test_ngram_confidence_grows_along_a_copy() -> None:
    passage = list(range(10, 40))
    along = _confidence([*passage, 5, *passage[:2]], 20)
    assert along == sorted(along)
    assert along[-1] > 0.9
    assert along[0] < 0.8


def test_an_id_outside_of_the_target_ends_the_proposal() -> None:
    """Seen by the engine, for every drafter: what stands before such an id is still good."""

    class Beyond(NgramDrafter):
        def fresh(self) -> NgramDrafter:
            return Beyond()

        def propose(self, length: int, draw: Draw) -> Proposal | None:
            return Proposal([1, 2, draw.vocabulary_size, 3][:length], "ngram")

    model = tiny_llama()
    generation = Engine(model, drafters=[Beyond()]).generate([1, 2, 3], max_tokens=20, draft_length=4)
    assert generation.ids == Engine(model).generate([1, 2, 3], max_tokens=20, speculate=False).ids
    assert {record.drafted for record in generation.rounds} <= {(1, 2), (1,), ()}
    assert (1, 2) in {record.drafted for record in generation.rounds}


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["commit", "rewind", "follow", "reset"]),
            st.lists(st.integers(0, 2), max_size=6),
            st.integers(0, 30),
        ),
        max_size=12,
    )
)
def test_ngram_state_depends_on_its_context_only(steps: list[tuple[str, list[int], int]]) -> None:
    """However it was reached: token by token, in blocks, through rewinds; a fresh index proposes the same."""
    drafter = NgramDrafter()
    for step, tokens, length in steps:
        if step == "commit":
            drafter.commit(tokens)
        elif step == "rewind":
            drafter.rewind(length)
        elif step == "follow":
            drafter.follow(drafter.context[:length] + tokens)
        else:
            drafter.reset()
        again = drafter.fresh()
        for token in drafter.context:
            again.commit([token])
        assert again.context == drafter.context
        assert _content(again) == _content(drafter)
        assert again.propose(4, _draw()) == drafter.propose(4, _draw())


def test_ngram_work_per_token_does_not_grow_with_the_history() -> None:
    """Counted, not timed: the transitions looked up per proposal and token after 500 and after 20,000 tokens."""
    rng = random.Random(0)
    work = []
    for size in (500, 20_000):
        drafter = NgramDrafter()
        drafter.commit([rng.randrange(50) for _ in range(size)])
        automaton, looked = drafter._automaton, 0
        step = automaton.step

        def counting(state: int, token: int, step: Any = step) -> int:
            nonlocal looked
            looked += 1
            return step(state, token)

        automaton.step = counting  # type: ignore[method-assign]
        for _ in range(100):
            drafter.propose(4, _draw())
            drafter.commit([rng.randrange(50)])
        work.append(looked / 100)
    assert work[0] > 10
    assert work[1] < 2 * work[0]


def _content(drafter: Any) -> dict[str, Any]:
    """All that an n-gram drafter knows, but how to take it back."""
    known = {name: value for name, value in vars(drafter._automaton).items() if name != "_undo"}
    return known | {"weights": drafter._evidence.weights}


def test_ngram_ingests_the_whole_of_a_second_prompt() -> None:
    """A shorter prompt after a longer one: the index is that of the new prompt, nothing more and nothing less."""
    engine = chat_engine()
    session = engine.new_session()
    settings = Settings(max_tokens=3)
    engine.generation(session, [9, 8, 7, 6, 5, 4, 3, 9, 8, 7], settings).run()
    for prompt in ([1, 2, 1, 2], [9, 8, 3], [9, 8, 7, 6, 5]):
        engine.generation(session, prompt, settings).run()
        (drafter,) = session.drafters
        assert drafter.context == session.ids
        again = NgramDrafter()
        again.commit(session.ids)
        assert _content(again) == _content(drafter)


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


def test_proposals_are_cut_with_their_probabilities() -> None:
    proposal = Proposal([1, 2, 3], "draft", mx.eye(3), [0.1, 0.2, 0.3])
    cut = proposal.cut(2)
    assert (cut.tokens, cut.probabilities) == ([1, 2], [0.1, 0.2])
    assert cut.q is not None
    assert cut.q.shape == (2, 3)
    assert proposal.cut(3) is proposal
    assert proposal.cut(9) is proposal


# The draft model.


def _reference(table: mx.array, context: list[int], length: int, draw: Draw, temperature: float) -> list[int]:
    """What a draft that looks its logits up must propose, worked out step by step."""
    ids = list(context)
    for _ in range(length):
        logits = table[ids[-2] if len(ids) > 1 else 0, ids[-1]]
        if temperature:
            logits = logits / temperature + draw.noise.gumbel([len(ids)], draw.vocabulary_size)[0]
        ids.append(int(mx.argmax(logits).item()))
    return ids[len(context) :]


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_model_drafter_proposes_from_its_context_whatever_came_before(temperature: float) -> None:
    """Random commits after proposals, right and wrong ones, proposals never committed, rewinds and jumps."""
    table = random_table(5, 8)
    drafter = ModelDrafter(TableModel(table))
    draw = Draw(Settings(temperature=temperature), Noise(3), 8)
    rng = random.Random(2)
    drafter.follow([1, 2, 3])
    for _ in range(150):
        length = rng.randrange(1, 6)
        proposal = drafter.propose(length, draw)
        assert proposal is not None
        assert proposal.tokens == _reference(table, drafter.context, length, draw, temperature)
        held = len(drafter.context) + length - 1
        assert drafter._transaction.held == held == drafter._transaction.caches[0].offset
        kind = rng.randrange(6)
        kept = proposal.tokens[: rng.randrange(length + 1)]
        if kind <= 2:
            drafter.commit([*kept, rng.randrange(8)])
        elif kind == 3:
            pass  # proposed, and nothing came of it
        elif kind == 4:
            drafter.rewind(rng.randrange(1, len(drafter.context) + 1))
        else:
            drafter.follow([*drafter.context[: rng.randrange(1, len(drafter.context) + 1)], rng.randrange(8)])
    assert len(drafter.context) > 1


def test_model_drafter_reports_the_distribution_it_drew_from() -> None:
    """q and the drafts' probabilities after every filter; and under rejection its draws follow q.

    3,000 draws over 8 cells. Odds of a false alarm: 1e-6.
    """
    from odds import FALSE_ALARM, chi_square

    from localspec.sampling import distribution

    table = random_table(5, 8)
    settings = Settings(temperature=0.7, top_p=0.9, top_k=6, accept="rejection")
    expected = distribution(table[2, 3][None], settings).probabilities()[0]
    counts = np.zeros(8)
    drafter = ModelDrafter(TableModel(table))
    drafter.follow([1, 2, 3])
    for seed in range(3000):
        proposal = drafter.propose(1, Draw(settings, Noise(seed), 8))
        assert proposal is not None
        assert proposal.q is not None
        assert proposal.probabilities is not None
        if seed == 0:
            assert mx.allclose(proposal.q[0], expected, atol=1e-6)
        assert proposal.probabilities[0] == pytest.approx(expected[proposal.tokens[0]].item(), abs=1e-6)
        counts[proposal.tokens[0]] += 1
    assert chi_square(counts, np.array(expected)) > FALSE_ALARM
    assert chi_square(counts, np.array(mx.softmax(table[2, 3]))) < FALSE_ALARM  # what it would be without its settings


def test_model_drafter_pads_or_cuts_q_to_the_target() -> None:
    for rows in (5, 12):
        drafter = ModelDrafter(TableModel(random_table(5, rows)))
        drafter.follow([1, 2, 3])
        proposal = drafter.propose(3, Draw(Settings(temperature=1.5, accept="rejection"), Noise(1), 8))
        assert proposal is not None
        assert proposal.q is not None
        assert proposal.q.shape == (3, 8)
        assert mx.allclose(proposal.q.sum(axis=-1), mx.ones(3))
        assert max(proposal.tokens) < min(rows, 8)


def test_model_drafter_stays_inside_its_own_context_window() -> None:
    drafter = ModelDrafter(TableModel(random_table(5, 8)), context_length=10)
    drafter.follow([1, 2, 3])
    assert drafter.propose(7, _draw(8)) is not None
    drafter.commit([1])
    shorter = drafter.propose(7, _draw(8))
    assert shorter is not None
    assert len(shorter.tokens) == 6  # what is left of the window
    drafter.commit([1] * 6)
    assert drafter.longest() == 0
    assert drafter.propose(7, _draw(8)) is None
    assert ModelDrafter(TableModel(random_table(5, 8))).propose(3, _draw(8)) is None  # no context yet


def test_long_contexts_are_caught_up_in_steps() -> None:
    model = tiny_llama(2, layers=1)
    ids = [i * i % 64 for i in range(1300)]
    proposals = []
    for chunks in ([1300], [700, 1200, 1300], [5, 1299, 1300]):
        drafter = ModelDrafter(model)
        for end in chunks:
            drafter.follow(ids[:end])
            proposal = drafter.propose(4, _draw())
        assert proposal is not None
        proposals.append(proposal.tokens)
    assert proposals[0] == proposals[1] == proposals[2]


def test_sessions_have_drafters_of_their_own() -> None:
    engine = Engine(tiny_llama(), drafters=["ngram", ModelDrafter(tiny_llama(1))])
    a, b = engine.new_session(), engine.new_session()
    for mine, other, template in zip(a.drafters, b.drafters, engine.drafters, strict=True):
        assert mine is not other
        assert mine is not template
    engine.generation(a, [1, 2, 3], Settings(max_tokens=3)).run()
    assert all(drafter.context == [] for drafter in [*b.drafters, *engine.drafters])


def test_a_draft_with_another_vocabulary_is_refused() -> None:
    other = tiny_tokenizer(pieces=["<extra>"])
    same = ModelDrafter(tiny_llama(1, vocabulary=320), tiny_tokenizer())
    chat_engine(drafters=[same])
    chat_engine(drafters=[ModelDrafter(tiny_llama(1, vocabulary=320), other)])  # one more at the end: never proposed
    inner = other._tokenizer.get_vocab()
    backend = tiny_tokenizer()
    backend._tokenizer.get_vocab = lambda: {  # two ids exchanged
        token: {300: 301, 301: 300}.get(i, i) for token, i in inner.items() if token != "<extra>"
    }
    with pytest.raises(IncompatibleDrafterError, match="id 300"):
        chat_engine(drafters=[ModelDrafter(tiny_llama(1, vocabulary=320), backend)])
