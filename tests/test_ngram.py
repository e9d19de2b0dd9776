"""N-gram drafts: what is proposed, what is said of it, and that the state is the text's alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import exp, log
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import chat_engine

from localspec.drafters import NgramDrafter
from localspec.drafters.alignment import LONG, Alignment, new_rate, odds
from localspec.drafters.continuations import _RECENT, Continuations
from localspec.drafters.evidence import DOUBT, NAMES, UNSEEN, WEIGHTS
from localspec.drafters.ngram import LEAST
from localspec.drafters.protocol import Draw
from localspec.ngrams import store
from localspec.ngrams.answers import Answers, joined
from localspec.ngrams.store import NgramStore, contexts
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
    assert 1 <= len(proposal.tokens) <= length
    assert proposal.levels == ["context"] * len(proposal.tokens)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 6), st.integers(1, 6))
def test_ngram_candidates_differ_and_begin_with_the_proposal(context: list[int], length: int, width: int) -> None:
    drafter = NgramDrafter()
    drafter.commit(context)
    proposal = drafter.propose(length, _draw())
    many = drafter.propose_many(length, width, _draw())
    if proposal is None:
        assert many == []
        return
    assert many[0] == proposal
    assert len(many) <= width
    assert all(1 <= len(one.tokens) <= length for one in many)
    assert len({tuple(one.tokens) for one in many}) == len(many)
    for one in many:
        assert one.confidence is not None
        assert one.levels is not None
        assert len(one.confidence) == len(one.levels) == len(one.tokens)
        assert all(0 < chance < 1 for chance in one.confidence)
    # Of a place with several followers, each is the first token of some candidate when there is room for all.
    behind = {context[i + 1] for i in range(len(context) - 1) if context[i] == context[-1]}
    if proposal.match_length == 1 and length == 1:
        assert {one.tokens[0] for one in drafter.propose_many(1, 5, _draw())} >= behind


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
    drafter.commit([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2])
    proposal = drafter.propose(1, _draw())
    assert proposal is not None
    assert proposal.tokens == [3]


def _weighed(seen: Sequence[float]) -> float:
    """The chance of a token by what is known of it, in the order of NAMES."""
    return 1 / (1 + exp(-sum(weight * value for weight, value in zip(WEIGHTS, seen, strict=False))))


def _weighed_by_name(seen: dict[str, float]) -> float:
    return _weighed([seen.get(name, 0.0) for name in NAMES])


def _blend(counts: Sequence[tuple[int, int]]) -> float:
    chance = UNSEEN
    for hits, seen in counts:
        chance = (hits + DOUBT * chance) / (seen + DOUBT)
    return chance


def _known(context: Sequence[int]) -> dict[int, dict[str, float]]:
    """By token that might come next, what is said of it, by name and without zeros."""
    drafter = NgramDrafter()
    drafter.commit(context)
    found = drafter.candidates()
    assert len(dict(found)) == len(found)
    return {token: {name: value for name, value in zip(NAMES, seen, strict=False) if value} for token, seen in found}


def _last(tokens: Sequence[int], token: int) -> int:
    return max(i for i, one in enumerate(tokens) if one == token)


def _followers(context: Sequence[int], suffix: Sequence[int]) -> list[int]:
    n = len(suffix)
    return [context[i + n] for i in range(len(context) - n) if list(context[i : i + n]) == list(suffix)]


@given(st.lists(st.integers(0, 3), min_size=2, max_size=30))
def test_what_is_said_of_a_token_is_counted_in_the_context(context: list[int]) -> None:
    """Against brute force over the text, for the longest suffixes that differ in their places."""
    suffixes: list[tuple[int, list[int]]] = []
    for n in range(_longest_suffix(context), 0, -1):
        followers = _followers(context, context[-n:])
        # A shorter suffix that stands nowhere else follows from the longer one.
        if len(suffixes) < 2 and (not suffixes or len(followers) > len(suffixes[-1][1])):
            suffixes.append((n, followers))
    for token, seen in _known(context).items():
        counts = [(of.count(token), len(of)) for _, of in reversed(suffixes)]
        if not any(hits for hits, _ in counts):
            assert "context: found" not in seen  # it stands at the place copied from
            continue
        chance = _blend(counts)
        agreed = len(set(suffixes[0][1])) == 1
        # The longest suffix that this token followed is one of those asked.
        length = next(n for n, of in suffixes if token in of)
        here = "place: it says so" in seen
        assert seen["context: log odds of the blend"] == pytest.approx(log(chance / (1 - chance)))
        assert seen.get("context: log of its places", 0) == pytest.approx(log(len(suffixes[0][1])))
        assert seen.get("context: all places agree", 0) == agreed
        assert ("place: it says so, and the context knows it too" in seen) == here
        by_length = seen.get("context: log of its length, where the place does not say so", 0)
        assert by_length == pytest.approx(0 if here else log(length))
        favourites = [max(of, key=lambda t: (of.count(t), _last(of, t))) for _, of in suffixes]
        assert ("context: the shorter suffix's favourite too" in seen) == (favourites[1:] == [token])


@given(st.lists(st.integers(0, 3), min_size=2, max_size=40))
def test_chances_are_those_of_what_is_known(context: list[int]) -> None:
    """The drafter weighs as it goes; this is what it must come to."""
    known = NgramStore()
    known.merge(*contexts([1, 2, 3, 0, 1, 2, 2, 1, 0, 3, 3, 1], 0), day=1)
    known.answers = Answers(joined(np.empty(0, np.uint32), [[1, 2, 3, 0, 1, 2, 2, 1], [0, 3, 3, 1, 1, 2, 3, 3]]))
    for levels in ((), (("learned", lambda: known),)):
        following = Continuations(levels)
        for token in context:
            following.append(token)
        found = following.candidates()
        assert [step[:2] for step in following.steps(following.now())] == [one[:2] for one in found]
        for of, _, seen in found:
            assert of == pytest.approx(_weighed(seen))


def test_the_place_at_the_end_of_the_context_has_no_follower_yet() -> None:
    chance = (1 + DOUBT * UNSEEN) / (1 + DOUBT)
    assert _known([1, 2, 3, 1]) == {
        2: {
            "one": 1,
            "context: found": 1,
            "context: log odds of the blend": pytest.approx(log(chance / (1 - chance))),
            "context: all places agree": 1,
        }
    }


@pytest.mark.parametrize("changed", [[99], [], [99, 98, 97]], ids=["replaced", "left out", "put in"])
def test_a_copy_goes_on_behind_a_change(changed: list[int]) -> None:
    """As in an edit: the suffix match begins anew, the place in the source does not."""
    source = list(range(10, 40))
    at = 8 if len(changed) == 3 else 9
    text = [*source, 5, *source[:8], *changed, source[at]]
    known = _known(text)
    assert source[at + 1] in known
    if changed:
        assert known[source[at + 1]]["place: it says so"] == 1
        assert _confidence(text)[0] > _confidence([*source, 5, source[at]])[0]


def test_the_place_is_where_a_long_match_stood_last_and_is_given_up_when_it_keeps_being_wrong() -> None:
    text = [*range(10, 20), 5, *range(10, 20)]
    following = Continuations()
    for token in text:
        following.append(token)
    assert following._alignment.place == 10
    assert following._alignment.run >= 3
    for token in range(50, 70):
        following.append(token)
    assert following._alignment.place == -1
    # A match that is not longer than the copy so far does not move it.
    assert Alignment(4, 0.9, 6).moved(matched=5, match=8).place == 4
    assert Alignment(4, 0.9, 4).moved(matched=5, match=8).place == 8


def test_the_odds_of_a_place_grow_with_its_rate() -> None:
    found = [odds(rate / 100) for rate in range(101)]
    assert found == sorted(found)
    assert found[50] == pytest.approx(0)
    assert found[100] == pytest.approx(log(0.997 / 0.003))
    assert found[0] == pytest.approx(-found[100])


def test_a_draft_judges_the_place_as_the_text_will_once_it_went_that_way() -> None:
    passage = list(range(10, 40))
    drafter = NgramDrafter()
    drafter.commit([*passage, 5, *passage[:2]])
    at = drafter._next.now()
    assert at[2] == -1
    for token in passage[2:9]:
        ((_, found, _, at),) = drafter._next.steps(at)
        assert found == token
        drafter.commit([token])
        assert at[2:4] == pytest.approx(drafter._next.now()[2:4])


NOTHING = {"one": 1.0}
CONTEXT = NOTHING | {"context: found": 1.0}
PLACE = {"place: it says so": 1.0, "place: log odds of its rate, where it alone says so": odds(new_rate(LONG))}
ANSWER = {
    "earlier answer: it says so": 1.0,
    "earlier answer: log odds of its rate, where it says so": odds(new_rate(2 * LONG)),
}


@pytest.mark.parametrize(
    ("known", "more"),
    [
        (NOTHING, {"context: found": 1.0}),
        (CONTEXT, {"context: log odds of the blend": 1.0}),
        (CONTEXT, {"context: log of its places": 1.0}),
        (CONTEXT, {"context: all places agree": 1.0}),
        (CONTEXT, {"context: log of its length, where the place does not say so": 1.0}),
        (CONTEXT, PLACE | {"place: it says so, and the context knows it too": 1.0}),
        (NOTHING | PLACE, {"place: log odds of its rate, where it alone says so": 4.0}),
        (NOTHING, ANSWER),
        (CONTEXT, ANSWER),
        (NOTHING | ANSWER, {"earlier answer: log odds of its rate, where it says so": 4.0}),
        (NOTHING, {"store: found": 1.0}),
        (NOTHING, {"store: found": 1.0, "store: log odds of the blend": 1.0}),
        (NOTHING, {"store: found": 1.0, "store: all agree": 1.0}),
    ],
)
def test_what_speaks_for_a_token_raises_its_chance(known: dict[str, float], more: dict[str, float]) -> None:
    assert {*known, *more} <= {*NAMES}
    assert _weighed_by_name(known | more) > _weighed_by_name(known)


def test_what_speaks_for_another_token_lowers_a_chance() -> None:
    against = [name for name in NAMES if "otherwise" in name]
    assert len(against) == 3
    for name in against:
        assert _weighed_by_name(CONTEXT | {name: 1.0}) < _weighed_by_name(CONTEXT)
    # What two suffixes say, one of which is the end of the other, was counted twice.
    assert _weighed_by_name(CONTEXT | {"context: the shorter suffix's favourite too": 1.0}) < _weighed_by_name(CONTEXT)


def test_what_is_known_at_the_end_is_known_anew_once_the_text_goes_on() -> None:
    """A proposal and the token that comes share their work; neither may see the other's end."""
    drafter = NgramDrafter()
    for text in ([1, 2, 3, 1], [2, 4, 1, 2]):
        drafter.commit(text)
        again = NgramDrafter()
        again.commit(drafter.context)
        assert drafter.propose(4, _draw()) == again.propose(4, _draw()) == drafter.propose(4, _draw())
        assert drafter.candidates() == again.candidates()
    drafter.rewind(5)
    again = NgramDrafter()
    again.commit(drafter.context)
    assert drafter.candidates() == again.candidates()


def test_ngram_confidence_grows_along_a_copy() -> None:
    passage = list(range(10, 40))
    along = _confidence([*passage, 5, *passage[:2]], 20)
    assert along == sorted(along)
    assert along[-1] > 1.5 * along[0]


def test_a_proposal_ends_where_its_whole_path_is_unlikely() -> None:
    rng = random.Random(3)
    drafter = NgramDrafter()
    ended = 0
    for _ in range(200):
        drafter.commit([rng.randrange(12)])
        proposal = drafter.propose(16, _draw())
        if proposal is not None:
            assert proposal.confidence is not None
            path = 1.0
            for chance in proposal.confidence:
                path *= chance
            assert path >= LEAST
            ended += len(proposal.tokens) < 16
    assert ended > 100


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
        automaton, looked = drafter._next._automaton, 0
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


# -- earlier answers --------------------------------------------------------------------------------------------------

ANSWERED = list(range(100, 160))


class _Kept:
    """A level that has answers, and their counts."""

    def __init__(self, *texts: Sequence[int]) -> None:
        self.store = NgramStore()
        for text in texts:
            self.store.merge(*contexts(text, 0), day=1)
        self.texts = texts
        self.keep(*texts)

    def keep(self, *texts: Sequence[int]) -> None:
        self.store.answers = Answers(joined(np.empty(0, np.uint32), texts))

    def drafter(self) -> NgramDrafter:
        return NgramDrafter((("learned", lambda: self.store),))


def _drafted(drafter: NgramDrafter, length: int = 8) -> list[int]:
    proposal = drafter.propose(length, _draw(1_000))
    return proposal.tokens if proposal else []


def test_an_earlier_answer_is_followed_to_its_end() -> None:
    drafter = _Kept(ANSWERED, list(range(200, 240))).drafter()
    drafter.commit([1, 2, *ANSWERED[:8]])
    proposal = drafter.propose(4, _draw(1_000))
    assert proposal is not None
    assert proposal.tokens == ANSWERED[8:12]
    assert proposal.levels == ["learned"] * 4
    assert proposal.match_length == 8
    assert proposal.confidence == sorted(proposal.confidence or [])
    drafter.commit(ANSWERED[8:-2])
    assert _drafted(drafter) == ANSWERED[-2:]  # and not into the next
    drafter.commit(ANSWERED[-2:])
    assert _drafted(drafter) == []
    drafter.commit([3])
    assert _drafted(drafter) == []


@pytest.mark.parametrize("changed", [[99], [99, 98, 97]], ids=["replaced", "put in"])
def test_an_earlier_answer_is_followed_across_a_change(changed: list[int]) -> None:
    drafter = _Kept(ANSWERED).drafter()
    drafter.commit([*ANSWERED[:20], *changed, ANSWERED[21 if len(changed) == 1 else 20]])
    first = 22 if len(changed) == 1 else 21
    assert _drafted(drafter, 1) == ANSWERED[first : first + 1]


def test_the_longest_match_in_earlier_answers_counts_and_of_equals_the_latest() -> None:
    deep, late = [7, *ANSWERED[:9], 71, 72], [6, *ANSWERED[:9], 61, 62]
    drafter = _Kept(deep, late, [5, *ANSWERED[:9], 51, 52]).drafter()
    drafter.commit([7, *ANSWERED[:9]])
    assert _drafted(drafter, 2) == [71, 72]
    drafter = _Kept(deep, late).drafter()
    drafter.commit(ANSWERED[:9])
    assert _drafted(drafter, 2) == [61, 62]


def test_the_answers_whole_say_what_the_counts_are_too_short_for() -> None:
    """Of two answers that part behind the same six tokens, the one that this text began like."""
    same = list(range(300, 306))
    one, other = [*ANSWERED[:6], *same, 71, 72], [*ANSWERED[20:26], *same, 61, 62]
    for texts in ([one, other], [one, other, other]):
        drafter = _Kept(*texts).drafter()
        drafter.commit([*ANSWERED[:6], *same])
        assert _drafted(drafter, 2) == [71, 72]


def test_an_answer_learned_meanwhile_moves_no_place() -> None:
    kept = _Kept(ANSWERED)
    drafter = kept.drafter()
    drafter.commit(ANSWERED[:8])
    kept.keep(list(range(400, 430)), *kept.texts)  # as if the file had been replaced: indices are others
    assert _drafted(drafter, 4) == ANSWERED[8:12]
    drafter.commit(ANSWERED[8:10])
    assert _drafted(drafter, 4) == ANSWERED[10:14]
    drafter.rewind(8)
    assert _drafted(drafter, 4) == ANSWERED[8:12]
    kept.keep()
    drafter.commit(ANSWERED[8:10])
    assert drafter._next._repeated == Alignment()


@given(
    steps=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 2), max_size=6), st.integers(0, 30)), max_size=10)
)
def test_with_earlier_answers_too_the_state_depends_on_the_context_only(
    steps: list[tuple[bool, list[int], int]],
) -> None:
    kept = _Kept([0, 1, 2, 0, 0, 1, 1, 2], [2, 2, 1, 0], [1, 1, 0, 2, 1, 0])
    drafter = kept.drafter()
    for commits, tokens, length in steps:
        if commits:
            drafter.commit(tokens)
        else:
            drafter.rewind(length)
        again = kept.drafter()
        for token in drafter.context:
            again.commit([token])
        assert _content(again) == _content(drafter)
        assert again.propose(4, _draw()) == drafter.propose(4, _draw())


def test_a_draft_judges_the_earlier_answer_as_the_text_will_once_it_went_that_way() -> None:
    drafter = _Kept(ANSWERED).drafter()
    drafter.commit(ANSWERED[:8])
    at = drafter._next.now()
    for token in ANSWERED[8:16]:
        ((_, found, _, at),) = drafter._next.steps(at)
        assert found == token
        drafter.commit([token])
        now = drafter._next.now()[4]
        assert at[4] is not None
        assert now is not None
        assert at[4][0] == now[0]
        assert at[4][1:] == pytest.approx(now[1:])


def test_a_place_and_an_earlier_answer_that_say_the_same_count_once() -> None:
    drafter = _Kept(ANSWERED).drafter()
    drafter.commit([*ANSWERED[:20], 5, *ANSWERED[:10]])
    ((token, seen),) = drafter.candidates()
    known = dict(zip(NAMES, seen, strict=True))
    assert token == ANSWERED[10]
    assert known["place: it says so"] == known["earlier answer: it says so"] == 1
    assert known["place: log odds of its rate, where it alone says so"] == 0
    assert drafter._next.steps(drafter._next.now())[0][0] == pytest.approx(_weighed(seen))


def test_under_other_rules_earlier_answers_are_not_followed() -> None:
    drafter = _Kept(ANSWERED).drafter()
    drafter.commit(ANSWERED[:8])
    assert drafter.propose(4, _draw(1_000, accept="rejection", temperature=1.0)) is None


def _content(drafter: Any) -> dict[str, Any]:
    """All that an n-gram drafter knows, but how to take it back."""
    following = drafter._next
    known = {name: value for name, value in vars(following._automaton).items() if name != "_undo"}
    places = following._alignment, following._repeated, following._answers
    return known | {"at": places, "text": following.text}


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


def test_a_text_whose_deep_states_lost_count_is_judged_all_the_same() -> None:
    """Only the longest suffixes of a deep chain are counted, so a state may have fewer places than one behind it."""
    c, s, t = list(range(100, 140)), 1, 2
    text: list[int] = []
    for k in range(1, 41):
        text += [1000 + k, *reversed(c[:k]), s, 2000 + k]
    for j in range(40):
        text += [3000 + j, *reversed(c), s, t]
    following = Continuations()
    for token in text:
        following.append(token)
    automaton = following._automaton
    lost = 0
    for n in range(1, len(c) + 2):
        state = 0
        for token in [*reversed(c), s][-n:]:
            state = automaton.step(state, token)
        lost += automaton.count[automaton.step(state, t)] > automaton.count[state]
        # Asked for t, which the place says.
        found = {token: chance for chance, token, *_ in following.steps((state, n, text.index(t), 0.5, None))}
        assert 0 < found[t] < 1
    assert lost > 0  # else this text shows nothing


def test_the_number_that_is_the_stores() -> None:
    """Said again where drafts are made, since the stores load numpy and files."""
    assert _RECENT == store.LONGEST
