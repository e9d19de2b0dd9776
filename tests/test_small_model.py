"""The draft model: its window, its cache round by round, its drafts' way from the device into the target's pass."""

from __future__ import annotations

import gc
import math
import random
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cachekinds
import mlx.core as mx
import mlx.nn as nn
import pytest
from tiny import TableModel, chat_engine, random_table, tiny_llama

from localspec.controller import Controller
from localspec.drafters import ModelDrafter, Proposal, UnreadProposal
from localspec.drafters.protocol import Draw
from localspec.engine import Engine
from localspec.judge import Judge
from localspec.noise import Noise
from localspec.settings import Settings

PROMPT = [1, 2, 3]


def _draw(vocabulary: int = 8, **settings: Any) -> Draw:
    return Draw(Settings(**settings), Noise(1), vocabulary)


def _said(table: mx.array, context: Sequence[int], length: int) -> list[int]:
    """What a TableModel says greedily after the context."""
    ids = list(context)
    for _ in range(length):
        ids.append(int(mx.argmax(table[ids[-2], ids[-1]]).item()))
    return ids[len(context) :]


# Its cache, round by round


def _rounds(engine: Engine, tokens: int, length: int) -> tuple[ModelDrafter, int, int]:
    """Decode and check the draft's cache at each token; the drafter, and the drafts made and accepted."""
    session = engine.new_session()
    (drafter,) = session.drafters
    assert isinstance(drafter, ModelDrafter)
    generation = engine.generation(session, PROMPT, Settings(max_tokens=tokens, draft_length=length, exact="off"))
    for _ in generation:
        record = generation.rounds[-1]
        assert drafter.context == session.ids
        # The newest token is fed with the next proposal; after a proposal accepted whole so is its last draft, which
        # was never fed.
        whole = record.drafted != () and record.accepted == len(record.drafted) < record.emitted
        held = len(session.ids) - 1 - whole
        if record.drafted:
            assert drafter._transaction.held == drafter._transaction.length == held
            assert all(leaf.cache.offset == held for leaf in drafter._transaction._leaves)
    assert len(generation.ids) == tokens
    return drafter, generation.stats.drafted, generation.stats.accepted


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8])
def test_a_model_that_drafts_for_itself_is_right_to_the_end(length: int) -> None:
    model = tiny_llama()
    _, drafted, accepted = _rounds(Engine(model, drafters=[ModelDrafter(model)]), 50, length)
    assert drafted == accepted > 0


@pytest.mark.parametrize("length", [1, 4])
def test_the_cache_follows_rejections_too(length: int) -> None:
    _, drafted, accepted = _rounds(Engine(tiny_llama(), drafters=[ModelDrafter(tiny_llama(1))]), 50, length)
    assert accepted < drafted / 2


@pytest.mark.parametrize("off", [-1, 1])
def test_a_cache_cut_wrongly_is_noticed(off: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft cache that was trimmed by one too many starved the draft, and acceptance decayed over the reply."""
    from localspec.transaction import Transaction

    model, rewind = tiny_llama(), Transaction.rewind
    engine = Engine(model, drafters=[ModelDrafter(model)])
    engine.generate(PROMPT, max_tokens=2, exact="off")
    drafts = []

    def planted(transaction: Transaction, length: int) -> bool:
        wrong = transaction in drafts and 3 < length < transaction.held
        return rewind(transaction, length + off if wrong else length)

    class Followed(ModelDrafter):
        def fresh(self) -> ModelDrafter:
            return Followed(self.model)

        def _empty_caches(self) -> None:
            super()._empty_caches()
            drafts.append(self._transaction)

        def __init__(self, model: Any) -> None:
            super().__init__(model)
            drafts.append(self._transaction)

    monkeypatch.setattr(Transaction, "rewind", planted)
    other = Engine(tiny_llama(), drafters=[Followed(tiny_llama(1))])
    with pytest.raises((AssertionError, ValueError)):
        _rounds(other, 40, 4)


def test_it_is_freed_with_its_conversation() -> None:
    engine = chat_engine(drafters=["ngram", ModelDrafter(tiny_llama(7, vocabulary=317))])
    chat = engine.conversation()
    chat.send("hello", max_tokens=12, draft_length=3).run()
    drafter = chat._session.drafters[1]
    assert isinstance(drafter, ModelDrafter)
    assert drafter._transaction.held
    caches = [weakref.ref(cache) for cache in drafter._transaction.caches]
    del drafter, chat
    gc.collect()
    assert [cache() for cache in caches] == [None, None]
    assert engine.drafters[1].context == []


# Its window


class Watched(TableModel):
    """A TableModel that remembers the most positions it was ever asked for."""

    def __init__(self, table: mx.array) -> None:
        super().__init__(table)
        self.furthest = 0

    def __call__(self, inputs: mx.array, cache: Any) -> mx.array:
        logits = super().__call__(inputs, cache)
        self.furthest = max(self.furthest, cache[0].offset)
        return logits


def _read(drafter: ModelDrafter) -> list[int]:
    """The ids in its cache."""
    (cache,) = drafter._transaction.caches
    return [int(x) for x in cache.keys[0, 0, : cache.offset, 0].tolist()] if cache.offset else []


def _wander(drafter: ModelDrafter, table: mx.array, steps: int) -> int:
    """Random commits, rewinds and jumps; each proposal is what the table says. Returns the longest context met."""
    rng, longest, window = random.Random(4), 0, drafter.context_length or 0
    drafter.follow([1, 2, 3])
    for _ in range(steps):
        longest = max(longest, len(drafter.context))
        length = rng.randrange(1, 6)
        proposal = drafter.propose(length, _draw())
        assert proposal is not None
        assert len(proposal) == min(length, drafter.longest())
        assert proposal.tokens == _said(table, drafter.context, len(proposal))
        context, sink = drafter.context, min(4, window // 4)
        seen = _read(drafter)[: 1 - len(proposal) or None]
        assert seen in (context, context[:sink] + context[len(context) - len(seen) + sink :])
        kind = rng.randrange(16)
        if kind == 0:
            drafter.rewind(rng.randrange(2, len(drafter.context) + 1))
        elif kind == 1:
            at = rng.randrange(2, len(drafter.context) + 1)
            drafter.follow([*drafter.context[:at], *(rng.randrange(8) for _ in range(rng.randrange(30)))])
        elif kind > 2:
            drafter.commit([*proposal.tokens[: rng.randrange(length + 1)], rng.randrange(8)])
    return longest


@pytest.mark.parametrize("window", [10, 16, 33])
def test_it_goes_on_drafting_beyond_its_own_context(window: int) -> None:
    table = random_table(5, 8)
    model = Watched(table)
    drafter = ModelDrafter(model, context_length=window)
    assert _wander(drafter, table, 200) > 1.5 * window
    assert model.furthest <= window


def test_the_window_keeps_the_beginning_and_the_latest_half() -> None:
    drafter = ModelDrafter(TableModel(random_table(5, 64)), context_length=32)
    context = list(range(40))
    drafter.follow(context[:30])
    proposal = drafter.propose(3, _draw(64))
    assert proposal is not None
    assert _read(drafter) == [*context[:30], *proposal.tokens[:-1]]  # 32: the last draft is not fed
    drafter.follow(context)
    proposal = drafter.propose(3, _draw(64))
    assert proposal is not None
    assert _read(drafter) == [0, 1, 2, 3, *context[-12:], *proposal.tokens[:-1]]
    drafter.commit([50])
    again = drafter.propose(17, _draw(64))
    assert again is not None
    assert len(again) == 17 == drafter.longest()
    assert len(_read(drafter)) == 32
    assert _read(drafter)[:16] == [0, 1, 2, 3, *context[-11:], 50]


@pytest.mark.parametrize("window", [1, 2, 3])
def test_the_smallest_windows(window: int) -> None:
    model = Watched(random_table(5, 8))
    drafter = ModelDrafter(model, context_length=window)
    for end in range(1, 9):
        drafter.follow(list(range(end)))
        proposal = drafter.propose(4, _draw())
        assert proposal is not None
        assert 1 <= len(proposal) <= drafter.longest() <= window
    assert model.furthest <= window


@pytest.mark.parametrize("fault", ["reads one too early", "never begins anew", "keeps what it had read"])
def test_faults_of_the_window_are_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "reads one too early":
        read = ModelDrafter._read
        monkeypatch.setattr(
            ModelDrafter, "_read", lambda d, start: read(d, start)[:-1] if d._left_out else read(d, start)
        )
    elif fault == "never begins anew":
        monkeypatch.setattr(ModelDrafter, "_make_room", lambda *_: None)
    else:
        make_room = ModelDrafter._make_room

        def keeps(drafter: ModelDrafter, length: int) -> None:
            transaction = drafter._transaction
            make_room(drafter, length)
            drafter._transaction = transaction

        monkeypatch.setattr(ModelDrafter, "_make_room", keeps)
    with pytest.raises((AssertionError, ValueError)):
        test_it_goes_on_drafting_beyond_its_own_context(16)


def test_learned_positions_are_a_window_too() -> None:
    model = Watched(random_table(5, 8))
    model.wpe = nn.Embedding(12, 1)
    drafter = ModelDrafter(model)
    drafter.follow([1, 2, 3] * 9)
    proposal = drafter.propose(5, _draw())
    assert proposal is not None
    assert len(proposal) == 5
    assert model.furthest <= 12
    assert ModelDrafter(TableModel(random_table(5, 8))).propose(3, _draw()) is None  # no context yet


def test_a_windowed_draft_changes_no_ids_and_still_helps() -> None:
    table = random_table(6, 8)
    plain = Engine(TableModel(table)).generate(PROMPT, max_tokens=80, speculate=False)
    drafted = Engine(TableModel(table), drafters=[ModelDrafter(TableModel(table), context_length=12)]).generate(
        PROMPT, max_tokens=80, draft_length=3
    )
    assert drafted.ids == plain.ids
    assert drafted.stats.acceptance_rate == 1.0
    assert max(record.position for record in drafted.rounds if record.drafted) > 70
    llama = tiny_llama()
    plain = Engine(llama).generate(PROMPT, max_tokens=60, speculate=False)
    engine = Engine(llama, drafters=[ModelDrafter(tiny_llama(), context_length=20)])
    assert engine.generate(PROMPT, max_tokens=60, draft_length=3).ids == plain.ids


# From the device into the pass


def _argmaxes(arrays: Sequence[mx.array], file: Path) -> int:
    """How many choices of a token are still to be computed in the arrays' graph."""
    mx.export_to_dot(str(file), *arrays)  # type: ignore[arg-type]
    return file.read_text().count("ArgReduce")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_proposal_is_one_graph_that_the_pass_goes_on_from(
    temperature: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is computed before the pass has been built, when the device does not begin by itself."""
    engine = Engine(tiny_llama(), drafters=[ModelDrafter(tiny_llama(1))])
    settings: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_tokens": 12, "draft_length": 4}
    expected = engine.generate(PROMPT, **settings).ids
    found: list[int] = []
    decide = Judge.decide

    def counting(judge: Judge, logits: mx.array, fed: mx.array, history: Any, offered: Any) -> Any:
        found.append(_argmaxes([logits], tmp_path / "graph.dot"))
        return decide(judge, logits, fed, history, offered)

    monkeypatch.setattr(Controller, "times_apart", lambda *_: False)
    monkeypatch.setattr(Judge, "decide", counting)
    monkeypatch.setattr("localspec.drafters.small_model.mx.async_eval", lambda *_: None)
    assert engine.generate(PROMPT, **settings).ids == expected
    assert 4 in found
    assert set(found) <= {1, 2, 3, 4}
    monkeypatch.setattr(Controller, "times_apart", lambda *_: True)  # what would read it before
    found.clear()
    assert engine.generate(PROMPT, **settings).ids == expected
    assert set(found) == {0}


@pytest.mark.parametrize("accept", ["coupled", "rejection", "block"])
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.95, "top_k": 20},
        {"temperature": 0.8, "repetition_penalty": 1.2, "logit_bias": {5: 1.0}, "logprobs": 2},
        {"temperature": 0.0, "presence_penalty": 0.5},
    ],
    ids=["greedy", "filters", "penalties", "greedy with a penalty"],
)
def test_reading_drafts_late_changes_nothing(
    accept: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tiny_llama(scale=2.0), drafters=[ModelDrafter(tiny_llama(scale=1.9))])
    runs = []
    for apart in (True, False):
        monkeypatch.setattr(Controller, "times_apart", lambda *_, apart=apart: apart)
        runs.append(engine.generate(PROMPT, accept=accept, seed=5, max_tokens=40, draft_length=4, **settings))
    assert runs[0].tokens == runs[1].tokens
    assert runs[0].rounds == runs[1].rounds
    assert runs[0].stats.accepted


def test_an_unread_proposal_says_what_can_be_judged() -> None:
    ids = mx.array([4, 5, 6, 7], mx.uint32)
    assert UnreadProposal(ids, "draft").read(8) == Proposal([4, 5, 6, 7], "draft")
    assert UnreadProposal(ids, "draft").read(6).tokens == [4, 5]
    assert UnreadProposal(ids, "draft").after(3).tolist() == [3, 4, 5, 6, 7]
    assert Proposal([4, 5], "draft").after(3).tolist() == [3, 4, 5]
    for bad in (math.nan, math.inf):
        chances = mx.array([0.5, 0.25, bad, 0.5])
        read = UnreadProposal(ids, "draft", mx.ones((4, 8)), chances).read(8)
        assert (read.tokens, read.probabilities) == ([4, 5], [0.5, 0.25])
        assert read.q is not None
        assert read.q.shape == (2, 8)
    assert UnreadProposal(ids, "draft", None, mx.array([bad] * 4)).read(8).tokens == []


@pytest.mark.parametrize("accept", ["coupled", "rejection", "block"])
def test_drafts_of_a_broken_model_are_not_counted_as_drafts(accept: str) -> None:
    table = random_table(1, 6)
    broken = mx.full(table.shape, math.nan)
    settings: dict[str, Any] = {"temperature": 0.8, "seed": 1, "max_tokens": 12, "accept": accept}
    plain = Engine(TableModel(table)).generate(PROMPT, speculate=False, **settings)
    engine = Engine(TableModel(table), drafters=[ModelDrafter(TableModel(broken))])
    generation = engine.generate(PROMPT, draft_length=3, **settings)
    assert {token.source for token in generation.tokens} == {"plain"}
    assert all(record.drafter is None and record.drafted == () for record in generation.rounds)
    assert len(generation.ids) == 12
    if accept == "coupled":
        assert generation.ids == plain.ids


@pytest.mark.parametrize("where", ["drafting", "the pass"])
def test_after_a_failure_it_drafts_as_if_nothing_had_been(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    engine = Engine(model, drafters=[ModelDrafter(model)])
    expected = engine.generate(PROMPT, max_tokens=30, draft_length=4).ids
    session = engine.new_session()
    first = engine.generation(session, PROMPT, Settings(max_tokens=30, draft_length=4))
    for _ in range(7):
        next(first)
    (drafter,) = session.drafters
    assert isinstance(drafter, ModelDrafter)

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(*((drafter._transaction, "forward") if where == "drafting" else (Judge, "decide")), fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            first.run()
    assert session.ids == [*PROMPT, *first.ids]
    assert drafter.context == session.ids
    rest = engine.generation(session, session.ids, Settings(max_tokens=30 - len(first.ids), draft_length=4)).run()
    assert [*first.ids, *rest.ids] == expected
    assert rest.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("kind", ["plain", "gated delta, hybrid"])
def test_the_next_turn_may_come_from_another_thread(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rollback leaves to be computed belongs to the thread that built it."""
    engine = Engine(tiny_llama(3, vocabulary=96), drafters=[ModelDrafter(cachekinds.model(kind))])

    def turns() -> list[int]:
        session = engine.new_session()
        settings, ids = Settings(max_tokens=9, draft_length=4, exact="off"), [*PROMPT]
        for _ in range(2):
            with ThreadPoolExecutor(1) as fresh:
                fresh.submit(lambda: engine.generation(session, ids, settings).run()).result()  # noqa: B023
            ids = [*session.ids, 4, 8]
        return ids

    expected = Engine(engine.model).generate(PROMPT, max_tokens=9, speculate=False).ids
    assert turns()[3:12] == expected
    if kind != "plain":
        monkeypatch.setattr(ModelDrafter, "settle", lambda _: None)
        with pytest.raises(RuntimeError, match="current thread"):
            turns()


# What it costs


def _unread(length: int) -> UnreadProposal:
    return UnreadProposal(mx.arange(length).astype(mx.uint32), "draft")


def test_rounds_in_one_go_are_timed_apart_now_and_then() -> None:
    controller = Controller()
    assert controller.times_apart(Proposal([1, 2], "ngram"))
    apart = []
    for _ in range(40):
        apart.append(controller.times_apart(_unread(2)))
        controller.learn(_unread(2), 1, 0.2, 0.5, apart=apart[-1])
    assert [at for at, one in enumerate(apart) if one] == [0, 1, 2, 19, 36]
    assert controller.times_apart(_unread(3))  # a width that was never timed


def test_a_round_in_one_go_is_what_it_took_as_a_whole() -> None:
    controller = Controller()
    for _ in range(3):
        controller.learn(_unread(2), 2, 0.2, 0.5)
    assert controller.shares(_unread(2), 0.8) == pytest.approx((0.3, 0.5))
    assert controller.shares(_unread(2), 0.4) == pytest.approx((0.0, 0.4))
    for _ in range(20):
        controller.learn(_unread(2), 2, *controller.shares(_unread(2), 0.9), apart=False)
    assert controller.costs.of(3) == 0.5  # only what was timed apart says what a pass costs
    assert controller.costs.seen(3) == 3
    assert list(controller._draft_costs["draft"]) == pytest.approx([0.2] * 15)


def test_times_are_booked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting and the pass share out what the round took, timed apart or not; a clock of ours counts it."""
    clock: Callable[[], float] = iter(range(10**6)).__next__
    monkeypatch.setattr("localspec.decoder.time.perf_counter", clock)
    model = TableModel(random_table(1, 6))
    generation = Engine(model, drafters=[ModelDrafter(model)]).generate(PROMPT, max_tokens=120, draft_length=3)
    stats = generation.stats
    assert stats.draft_s > 0
    assert stats.verify_s > 0
    assert stats.prefill_s + stats.draft_s + stats.verify_s <= stats.total_s
