"""Drafters follow the context token by token and propose what they say they propose."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import TableModel, chat_engine, random_table, tiny_llama, tiny_tokenizer

from localspec.drafters import ModelDrafter, NgramDrafter
from localspec.drafters.protocol import Draw, Proposal, common_prefix
from localspec.engine import Engine
from localspec.errors import IncompatibleDrafterError
from localspec.noise import Noise
from localspec.settings import Settings


def _draw(vocabulary: int = 64, **settings: Any) -> Draw:
    return Draw(Settings(**settings), Noise(1), vocabulary)


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
