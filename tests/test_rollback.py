"""Between rounds, after a close and after a failure, every cache holds exactly what it should, and the next turn knows.

The check has two sides: the caches' own offsets against the ids, and the next turn's ids against a cold run's.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from tiny import TableModel, chat_engine, random_table, tiny_gemma, tiny_llama

from localspec.drafters import ModelDrafter
from localspec.drafters.protocol import Drafter
from localspec.engine import Engine
from localspec.errors import CacheError
from localspec.generation import Generation
from localspec.session import Session
from localspec.settings import Settings
from localspec.transaction import Transaction

PROMPT = [1, 2, 3, 4, 1, 2, 3]
MORE = [9, 1, 2]


KINDS: dict[str, Callable[[], list[Drafter | str]]] = {
    "plain": list,
    "ngram": lambda: ["ngram"],
    "model": lambda: [ModelDrafter(tiny_llama(1, layers=1))],
    "itself": lambda: [ModelDrafter(tiny_llama(0))],
    "both": lambda: ["ngram", ModelDrafter(tiny_llama(1, layers=1))],
}


def _consistent(session: Session, ids: list[int]) -> None:
    """The session's invariant: caches hold `ids` but the newest, drafters follow all of them."""
    assert session.ids == ids
    expected = max(len(ids) - 1, 0)
    assert session.transaction.length == session.transaction.held == expected
    for cache in session.transaction.caches:
        assert cache.offset == expected
    for drafter in session.drafters:
        assert drafter.context == ids
        if isinstance(drafter, ModelDrafter):
            held = drafter._transaction.held
            assert held == drafter._transaction.length
            assert held <= expected
            assert all(cache.offset == held for cache in drafter._transaction.caches)


def _holds_a_beginning_of(session: Session, ids: list[int]) -> None:
    """After a failure: the session knows what its caches hold, and that is right as far as it goes."""
    assert session.ids == ids[: len(session.ids)]
    held = session.transaction.held
    assert session.transaction.length == held <= len(session.ids)
    assert all(cache.offset == held for cache in session.transaction.caches)


def _next_turn_is_cold(engine: Engine, session: Session, ids: list[int], **settings: Any) -> Generation:
    """Go on from `ids` in the used session, and compare with a fresh one."""
    chosen = Settings.from_keywords(**{"max_tokens": 12, "draft_length": 3, **settings})
    warm = engine.generation(session, [*ids, *MORE], chosen).run()
    cold = engine.generation(engine.new_session(), [*ids, *MORE], chosen).run()
    assert warm.ids == cold.ids
    assert cold.stats.reused_tokens == 0
    _consistent(session, [*ids, *MORE, *warm.ids])
    return warm


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_close_at_every_token(kind: str, temperature: float) -> None:
    engine = Engine(tiny_llama(), drafters=KINDS[kind]())
    whole = engine.generate(PROMPT, max_tokens=11, temperature=temperature, seed=2, speculate=False).ids
    for length in (1, 2, 4, 8):
        for kept in range(1, 12):
            session = engine.new_session()
            settings = Settings(max_tokens=11, temperature=temperature, seed=2, draft_length=length)
            generation = engine.generation(session, PROMPT, settings)
            for _ in range(kept):
                next(generation)
            generation.close()
            assert generation.ids == whole[:kept]
            assert generation.finish_reason == ("length" if kept == 11 else None)
            assert list(generation) == []
            _consistent(session, PROMPT + whole[:kept])
            if kept % 3 == 0:
                warm = _next_turn_is_cold(engine, session, PROMPT + whole[:kept], temperature=temperature, seed=3)
                assert warm.stats.reused_tokens == len(PROMPT) + kept - 1


@pytest.mark.parametrize("kind", ["itself", "both", "plain"])
def test_abandoned_loops_are_closed_at_once(kind: str) -> None:
    """Without waiting for the garbage collector, which may run in any thread."""
    engine = Engine(tiny_llama(), drafters=KINDS[kind]())
    session = engine.new_session()
    settings = Settings(max_tokens=20, draft_length=4)
    gc.disable()
    try:
        ids: list[int] = []
        for token in engine.generation(session, PROMPT, settings):
            ids.append(token.id)
            if len(ids) == 7:  # in the middle of a block, where whole blocks are accepted
                break
        _consistent(session, PROMPT + ids)

        def consume() -> None:
            for token in engine.generation(session, PROMPT, settings):
                assert token.id == ids[0]
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError) as caught:
            consume()
        caught.value.__traceback__ = None
        del caught
        _consistent(session, PROMPT + ids[:1])
    finally:
        gc.enable()


def test_an_earlier_prompt_is_cut_back_to_the_common_beginning() -> None:
    engine = Engine(tiny_llama(), drafters=KINDS["both"]())
    session = engine.new_session()
    engine.generation(session, PROMPT, Settings(max_tokens=10, draft_length=4)).run()
    for prompt, reused in (
        ([1, 2, 3, 4, 9, 9, 9], 4),
        ([1, 2], 1),
        ([7, 7, 7], 0),
        ([7], 0),
        ([7], 0),
        ([7, 7, 7, 8], 1),
    ):
        warm = engine.generation(session, prompt, Settings(max_tokens=9, draft_length=4)).run()
        assert warm.ids == engine.generate(prompt, max_tokens=9, speculate=False).ids
        assert warm.stats.reused_tokens == reused
        assert warm.stats.prompt_tokens == len(prompt)
        _consistent(session, prompt + warm.ids)


class Boom(Exception):
    pass


class Fuse:
    """Raises when called for the n-th time."""

    def __init__(self, at: int, error: type[BaseException] = Boom) -> None:
        self.left, self.error = at, error

    def burn(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


def _place_in_model(model: Any, fuse: Fuse, monkeypatch: pytest.MonkeyPatch, *, after: bool = False) -> None:
    """The model's n-th call fails, before or after it has written to the caches."""
    forward = type(model).__call__

    class Failing(type(model)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if not after:
                fuse.burn()
            out = forward(self, *args, **kwargs)
            if after:
                fuse.burn()
            return out

    monkeypatch.setattr(model, "__class__", Failing)


def _plant(fault: str, fuse: Fuse, engine: Engine, draft: Any, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Put the fuse into one place; returns settings that go with it."""
    if fault.startswith("target"):
        _place_in_model(engine.model, fuse, patch, after=fault.endswith("after"))
    elif fault.startswith("draft"):
        _place_in_model(draft, fuse, patch, after=fault.endswith("after"))
    elif fault == "processor":
        return {"logits_processors": [lambda _, logits: (fuse.burn(), logits)[1]]}
    elif fault == "detokenizer":
        patch.setattr("localspec.detokenizer.Detokenizer.add", lambda *_: (fuse.burn(), "")[1])
    else:
        commit = Transaction.commit

        def fail(*args: Any) -> None:
            fuse.burn()
            commit(*args)

        patch.setattr(Transaction, "commit", fail)
    return {}


FAULTS = ["target before", "target after", "draft before", "draft after", "processor", "detokenizer", "commit"]


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("fault", FAULTS)
def test_failures_leave_what_was_kept_and_the_next_turn_is_right(
    fault: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure in each place, at each of its first calls; what was yielded is kept, in the caches too."""
    raised = 0
    settings: dict[str, Any] = {"max_tokens": 14, "draft_length": 4, "temperature": 0.8, "seed": 1}
    for at in (1, 2, 3, 5, 8):
        draft = tiny_llama(1, layers=1, vocabulary=317)
        engine = chat_engine(drafters=["ngram", ModelDrafter(draft)])
        expected = engine.generate(PROMPT, **settings).ids
        session = engine.new_session()
        ended: list[Generation] = []
        with monkeypatch.context() as patch:
            extra = _plant(fault, Fuse(at, error), engine, draft, patch)
            chosen = Settings.from_keywords(**settings, **extra)
            generation = engine.generation(session, PROMPT, chosen, on_end=ended.append)
            try:
                generation.run()
            except error:
                raised += 1
                assert generation.failed
                assert generation.finish_reason is None
                _holds_a_beginning_of(session, PROMPT + generation.ids)
        assert ended == [generation]
        assert generation.ids == expected[: len(generation.ids)]
        assert list(generation) == []
        again = engine.generation(session, PROMPT, Settings.from_keywords(**settings)).run()
        assert again.ids == expected
        _consistent(session, PROMPT + expected)
    assert raised >= 2


def test_a_failing_progress_report_stops_the_prompt_and_keeps_what_was_read() -> None:
    """How a prompt is cancelled while it is processed: several passes in, and the next turn goes on from there."""
    engine = Engine(tiny_llama(), drafters=KINDS["both"]())
    session = engine.new_session()
    prompt = [i % 61 for i in range(1400)]
    seen: list[tuple[int, int]] = []

    def report(done: int, of: int) -> None:
        seen.append((done, of))
        if done > 600:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generation(session, prompt, Settings(max_tokens=4), on_prefill=report).run()
    assert seen == [(1, 1400), (513, 1400), (1025, 1400)]  # the last token is the first pass's, not the prefill's
    assert session.ids == prompt[:1024]
    warm = engine.generation(session, prompt, Settings(max_tokens=4)).run()
    assert warm.ids == engine.generate(prompt, max_tokens=4, speculate=False).ids
    assert warm.stats.reused_tokens == 1024


@pytest.mark.parametrize("length", range(1, 9))
@pytest.mark.parametrize("draft", ["unrelated", "itself", "close"])
def test_draft_cache_length_each_round(draft: str, length: int) -> None:
    """The draft has run its context but for the newest, and of its proposal what was kept but for the last one.

    So all accepted: one row behind the target's cache, the last proposal's; else exactly as many rows as the target's.
    """
    table = random_table(1, 6)
    near = table + random_table(7, 6, 0.7)
    model, other = (
        TableModel(table),
        TableModel({"unrelated": random_table(3, 6), "itself": table, "close": near}[draft]),
    )
    engine = Engine(model, drafters=[ModelDrafter(other)])
    session = engine.new_session()
    (drafter,) = session.drafters
    assert isinstance(drafter, ModelDrafter)
    counts: dict[bool, int] = {True: 0, False: 0}
    generation = engine.generation(
        session, [1, 2, 3], Settings(max_tokens=60, draft_length=length, temperature=0.8, seed=5)
    )
    for _ in generation:
        record = generation.rounds[-1]
        if record.drafter is None or generation.finish_reason is not None:
            continue
        whole = record.accepted == len(record.drafted)
        counts[whole] += 1
        # The draft's cache holds what was in the context before the round, less its newest, and the right drafts.
        expected = len(session.ids) - 2 if whole else len(session.ids) - 1
        assert drafter._transaction.held == expected
        assert drafter._transaction.caches[0].offset == expected
        assert session.transaction.caches[0].offset == len(session.ids) - 1
        rows = drafter._transaction.caches[0].keys[0, 0, :expected, 0].tolist()
        assert rows == session.ids[:expected]
    assert counts[draft != "unrelated"] or draft == "close"
    if draft == "close" and length < 4:
        assert all(counts.values())


@pytest.mark.parametrize("kind", ["ngram", "both"])
def test_target_cache_entries_are_the_kept_tokens(kind: str) -> None:
    """Not only as many, but those: a model whose cache entries are the ids themselves."""
    drafters: list[Drafter | str] = ["ngram"]
    if kind == "both":
        drafters.append(ModelDrafter(TableModel(random_table(3, 6))))
    engine = Engine(TableModel(random_table(1, 6)), drafters=drafters)
    session = engine.new_session()
    for seed in range(4):
        prompt = (session.ids or [1, 2, 1, 2]) + [seed]
        for _ in engine.generation(
            session, prompt, Settings(max_tokens=25, draft_length=4, temperature=0.9, seed=seed)
        ):
            (cache,) = session.transaction.caches
            assert cache.keys[0, 0, : cache.offset, 0].tolist()[: len(session.ids) - 1] == session.ids[:-1]


def test_a_row_in_flight_is_taken_back() -> None:
    """Plain decoding runs one pass ahead: a close must take that row out of the caches, also for the next thread."""
    engine = Engine(tiny_llama(), drafters=[])
    session = engine.new_session()
    generation = engine.generation(session, PROMPT, Settings(max_tokens=50))
    for _ in range(5):
        next(generation)
    assert session.transaction.held == session.transaction.length + 1  # there really is one in flight
    ids = generation.ids
    generation.close()
    _consistent(session, PROMPT + ids)
    _next_turn_is_cold(engine, session, PROMPT + ids)


def test_a_cache_that_does_not_follow_is_an_error_that_names_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm.models.cache import KVCache

    engine = Engine(tiny_llama(), drafters=KINDS["model"]())
    trim = KVCache.trim
    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "trim", lambda cache, n: trim(cache, n - 1))
        with pytest.raises(CacheError, match=r"layer 0 \(KVCache\)"):
            engine.generate(PROMPT, max_tokens=30, draft_length=4)
    session = engine.new_session()
    engine.generation(session, PROMPT, Settings(max_tokens=4)).run()
    session.transaction.caches[1].offset += 1  # found out before it is relied on: computed again
    again = engine.generation(session, [*PROMPT, 5], Settings(max_tokens=4)).run()
    assert again.ids == engine.generate([*PROMPT, 5], max_tokens=4, speculate=False).ids
    assert again.stats.reused_tokens == 0


# Sliding windows: cut like any cache, before and after they are full.


def _mlx_lm(model: Any, prompt: list[int], count: int) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]


def test_windows_speculate_across_their_edge() -> None:
    model = tiny_gemma(window=16)
    engine = Engine(model, drafters=["ngram", ModelDrafter(tiny_llama(1, layers=1))], name="gemma")
    for prompt in ([5], PROMPT, list(range(15)), list(range(16)), list(range(40))):
        plain = engine.generate(prompt, max_tokens=50, speculate=False)
        assert plain.ids == _mlx_lm(model, prompt, 50)
        for length in (1, 4, 8):
            generation = engine.generate(prompt, max_tokens=50, draft_length=length)
            assert generation.ids == plain.ids
            assert generation.stats.drafted > 0


def test_windows_survive_closes_and_further_turns() -> None:
    model = tiny_gemma(window=16)
    engine = Engine(model)
    for kept in (1, 2, 5, 17, 30):
        session = engine.new_session()
        generation = engine.generation(session, PROMPT, Settings(max_tokens=30, draft_length=4))
        for _ in range(kept):
            next(generation)
        generation.close()
        ids = PROMPT + generation.ids
        assert session.ids == ids
        warm = engine.generation(session, [*ids, *MORE], Settings(max_tokens=20)).run()
        assert warm.ids == _mlx_lm(model, [*ids, *MORE], 20)
        assert warm.stats.reused_tokens >= len(ids) - 1
        # Back to the first prompt: from the cache while it still reaches, else computed again; right either way.
        other = engine.generation(session, [*PROMPT, 50], Settings(max_tokens=20)).run()
        assert other.ids == _mlx_lm(model, [*PROMPT, 50], 20)


def test_a_model_with_windows_drafts() -> None:
    target = tiny_llama()
    engine = Engine(target, drafters=[ModelDrafter(tiny_gemma(window=16))])
    plain = engine.generate(PROMPT, max_tokens=40, speculate=False).ids
    generation = engine.generate(PROMPT, max_tokens=40, draft_length=4)
    assert generation.ids == plain
    assert generation.stats.drafted > 40


# Several contexts, several threads.


def test_two_contexts_on_one_engine_do_not_disturb_each_other() -> None:
    engine = Engine(tiny_llama(), drafters=KINDS["both"]())
    settings = Settings(max_tokens=40, temperature=0.9, seed=3, draft_length=3)
    prompts = [PROMPT, [9, 8, 7, 9, 8]]
    alone = [engine.generation(engine.new_session(), prompt, settings).run().ids for prompt in prompts]
    sessions = [engine.new_session() for _ in prompts]
    pair = [engine.generation(s, p, settings) for s, p in zip(sessions, prompts, strict=True)]
    for turn in range(40):  # in turns of changing lengths
        for generation in pair:
            for _ in range(1 + turn % 3):
                next(generation, None)
    assert [generation.ids for generation in pair] == alone
    for session, prompt, ids in zip(sessions, prompts, alone, strict=True):
        _consistent(session, prompt + ids)


def _in_thread(work: Callable[[], Any]) -> Any:
    out: list[Any] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            out.append(work())
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return out[0]


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma])
def test_turns_in_other_threads_than_the_one_that_loaded(make: Callable[[], Any]) -> None:
    """Streams belong to threads: a model evaluated in one, a first turn in a second, a next one in a third."""
    model = make()
    drafters: list[Drafter | str] = ["ngram"]
    if make is tiny_llama:
        drafters.append(ModelDrafter(tiny_llama(1, layers=1)))
    engine = Engine(model, drafters=drafters)
    session = engine.new_session()
    settings = Settings(max_tokens=10, temperature=0.7, seed=1, draft_length=3)
    expected = engine.generate(PROMPT, max_tokens=10, temperature=0.7, seed=1, speculate=False).ids

    def first() -> list[int]:
        generation = engine.generation(session, PROMPT, settings)
        ids = [next(generation).id for _ in range(5)]
        generation.close()
        return ids

    ids = _in_thread(first)
    assert ids == expected[:5]
    prompt = [*PROMPT, *ids, *MORE]
    cold = engine.generation(engine.new_session(), prompt, settings).run().ids
    warm = _in_thread(lambda: engine.generation(session, prompt, settings).run())
    assert warm.ids == cold
    assert warm.stats.reused_tokens >= len(PROMPT) + 4
    again = engine.generation(session, [*prompt, *warm.ids, 5], settings).run().ids
    assert again == engine.generate([*prompt, *warm.ids, 5], max_tokens=10, temperature=0.7, seed=1).ids


def test_a_model_loaded_lazily_generates_where_it_is_first_used() -> None:
    def work() -> list[int]:
        from mlx_lm.models import llama

        args = tiny_llama().args
        lazy = llama.Model(args)  # parameters not evaluated
        lazy.update(tiny_llama().parameters())
        return Engine(lazy).generate(PROMPT, max_tokens=5).ids

    assert _in_thread(work) == Engine(tiny_llama()).generate(PROMPT, max_tokens=5).ids


def test_a_new_generation_ends_an_unfinished_one_of_its_session() -> None:
    """Held, not closed: without that the old one would go on writing into the caches of the new one."""
    engine = Engine(tiny_llama(), drafters=KINDS["both"]())
    session = engine.new_session()
    settings = Settings(max_tokens=12, draft_length=3)
    old = engine.generation(session, PROMPT, settings)
    kept = [next(old).id for _ in range(4)]
    new = engine.generation(session, [*PROMPT, *kept, 9], settings)
    first = next(new).id
    assert list(old) == []
    ids = [first, *(token.id for token in new)]
    assert ids == engine.generate([*PROMPT, *kept, 9], max_tokens=12, speculate=False).ids
    assert old.ids == kept
    old.close()
    _consistent(session, [*PROMPT, *kept, 9, *ids])
