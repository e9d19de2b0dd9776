"""The store of n-grams against a dictionary that does the same slowly."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.ngrams.store import HALF_LIFE, KEPT, MOST, ORDERS, Columns, Found, NgramStore, contexts

TEXTS = st.lists(
    st.tuples(st.lists(st.integers(0, 3), max_size=30), st.integers(0, 12), st.integers(0, 5)), min_size=1, max_size=8
)


class Model:
    """Counts by the context itself, not by its hash."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, ...], dict[int, tuple[int, int, int]]] = defaultdict(dict)
        """Context to follower to (hits, day, which sighting was the last)."""
        self.sightings = 0

    def learn(self, tokens: list[int], start: int, day: int) -> None:
        for i in range(start, len(tokens)):
            self.sightings += 1
            for order in ORDERS:
                if order <= i:
                    followers = self.rows[tuple(tokens[i - order : i])]
                    hits = followers.get(tokens[i], (0, 0, 0))[0]
                    followers[tokens[i]] = (hits + 1, day, self.sightings)

    def matches(self, context: list[int]) -> list[Found]:
        found = []
        for order in ORDERS:
            followers = self.rows.get(tuple(context[-order:])) if order <= len(context) else None
            if not followers:
                break
            token = max(followers, key=lambda one: followers[one])
            found.append(Found(order, token, followers[token][0], sum(hits for hits, _, _ in followers.values())))
        return found


def taught(*texts: list[int], day: int = 100) -> NgramStore:
    store = NgramStore()
    for text in texts:
        store.merge(*contexts(text, 0), day=day)
    return store


def check(columns: Columns) -> None:
    """What is promised of the columns, looked at row by row."""
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    assert len({(key, follower) for key, follower, *_ in rows}) == len(rows)
    for (key, _, hits, seen, day), after in zip_longest(rows, rows[1:]):
        assert 1 <= hits <= seen
        if after is not None:
            assert (key, -hits, -day) <= (after[0], -after[2], -after[4])
            assert key != after[0] or seen == after[3]


@settings(max_examples=200)
@given(TEXTS)
def test_it_says_what_a_dictionary_says(texts: list[tuple[list[int], int, int]]) -> None:
    store, model = NgramStore(), Model()
    for tokens, start, day in texts:
        store.merge(*contexts(tokens, start), day=day)
        model.learn(tokens, start, day)
        check(store.to_arrays())
    assert store.rows == sum(map(len, model.rows.values()))
    for tokens, _, _ in texts:
        for end in range(len(tokens) + 1):
            assert store.matches(tokens[:end]) == model.matches(tokens[:end])


def test_large_ids_are_hashed_alike_by_both_functions() -> None:
    rng = random.Random(1)
    text = [rng.choice([0, 1, 2**31, 2**32 - 1, rng.randrange(2**32)]) for _ in range(400)]
    store, model = taught(text), Model()
    model.learn(text, 0, 100)
    for end in range(len(text)):
        assert store.matches(text[:end]) == model.matches(text[:end])
    # Order counts, and so does every token.
    assert store.matches([5, 5, 5, 5, 5, 5]) == []
    one = taught([1, 2, 3])
    assert one.matches([1, 2]) == [Found(2, 3, 1, 1)]
    assert (
        one.matches([2, 1]) == one.matches([1, 1]) == one.matches([2, 2]) == one.matches([2]) == one.matches([]) == []
    )


def test_orders_do_not_share_keys_and_keys_are_spread_evenly() -> None:
    keys, followers = contexts([0] * 7, 6)
    assert followers.tolist() == [0] * 4
    assert sorted(key & 3 for key in keys.tolist()) == [0, 1, 2, 3]
    many, _ = contexts(list(range(5_000)), 0)
    assert np.unique(many).size == many.size
    filled = np.bincount((many >> np.uint64(58)).astype(np.int64), minlength=64)
    assert filled.min() > many.size / 64 * 0.6
    assert filled.max() < many.size / 64 * 1.5


def test_only_what_follows_the_start_is_counted() -> None:
    keys, followers = contexts([1, 2, 3, 4, 5], 3)
    assert followers.tolist() == [4, 5, 4, 5, 5]  # orders 2 and 3 know both, 4 only the last
    assert [contexts(tokens, start)[0].size for tokens, start in (([], 0), ([1], 0), ([1, 2], 0), ([1, 2, 3], 9))] == [
        0
    ] * 4
    assert keys.dtype == np.uint64
    assert followers.dtype == np.uint32


@pytest.mark.parametrize("token", [-1, 2**32, 2**70])
def test_what_is_no_token_id_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match="from 0 to 4294967295"):
        contexts([1, token], 0)


def test_nothing_and_arrays_of_different_lengths() -> None:
    store = NgramStore()
    store.merge(*contexts([], 0), day=1)
    assert (store.rows, store.matches([1, 2, 3])) == (0, [])
    with pytest.raises(ValueError, match="as many followers as keys"):
        store.merge(np.zeros(2, np.uint64), np.zeros(1, np.uint32), day=1)


def test_the_favourite_is_what_followed_most_then_last() -> None:
    store = taught([1, 2, 3], [1, 2, 4])
    assert store.matches([1, 2]) == [Found(2, 4, 1, 2)]
    store.merge(*contexts([1, 2, 3], 0), day=90)  # most, though the clock was set back
    assert store.matches([1, 2]) == [Found(2, 3, 2, 3)]
    store.merge(*contexts([1, 2, 4, 9, 1, 2, 5, 9, 1, 2, 5], 0), day=101)
    assert store.matches([1, 2]) == [Found(2, 5, 2, 6)]
    old = taught([1, 2, 3], day=5)
    old.merge(*contexts([1, 2, 4], 0), day=4)
    assert old.matches([1, 2]) == [Found(2, 3, 1, 2)]


def test_counts_saturate_in_proportion() -> None:
    keys, _ = contexts([1, 2, 3], 2)
    store = NgramStore()

    def count(follower: int, times: int) -> None:
        store.merge(np.repeat(keys, times), np.full(times, follower, np.uint32), day=1)

    count(3, 40_000)
    count(4, 20_000)
    count(5, 1)
    assert store.matches([1, 2]) == [Found(2, 3, 40_000, 60_001)]
    count(4, 10_000)
    assert store.matches([1, 2]) == [Found(2, 3, 20_000, 35_001)]
    assert store.rows == 3  # a single hit is not halved to nothing
    for _ in range(5):
        count(3, 300_000)
        check(store.to_arrays())
    found = store.matches([1, 2])[0]
    assert found.token == 3
    assert 0.9 < found.hits / found.seen <= 1
    store.merge(np.repeat(keys, 70_000), np.arange(70_000, dtype=np.uint32), day=1)
    check(store.to_arrays())
    assert store.matches([1, 2])[0].seen <= MOST


def test_days_end_where_their_column_does() -> None:
    store = NgramStore()
    store.merge(*contexts([1, 2, 3], 0), day=10**6)
    store.merge(*contexts([4, 5, 6], 0), day=-1)
    assert sorted(store.to_arrays().days.tolist()) == [0, MOST]


def kept_of(store: NgramStore, *texts: list[int]) -> list[int]:
    """To how many tokens each text's end is still known."""
    return [max((found.order for found in store.matches(text[:-1])), default=0) for text in texts]


def test_eviction_keeps_what_is_often_or_lately_used() -> None:
    rng = random.Random(2)

    def some(count: int) -> list[list[int]]:
        return [[rng.randrange(10**6) for _ in range(7)] for _ in range(count)]

    rare, often, late = some(40), some(40), some(40)
    store = NgramStore()
    for text in rare + often:
        store.merge(*contexts(text, 0), day=1_000)
    for text in often:
        store.merge(*contexts(text, 0), day=1_000)
    for text in late:
        store.merge(*contexts(text, 0), day=1_000 + HALF_LIFE + 1)
    store.shrink(store.rows)
    assert kept_of(store, *rare, *often, *late) == [6] * 120
    for text in some(5):
        store.merge(*contexts(text, 0), day=1_000 + HALF_LIFE + 1)
    rows = store.rows
    store.shrink(rows - 1)
    assert store.rows == int((rows - 1) * KEPT)
    assert kept_of(store, *often, *late) == [6] * 80
    assert set(kept_of(store, *rare)) == {2, 3}  # the longest contexts went first
    store.shrink(int(rows * 0.78))
    check(store.to_arrays())
    assert kept_of(store, *often, *late) == [6] * 80
    # A hit more is worth a half-life: what was used twice goes before what was used once a day later than that.
    store.shrink(int(rows * 0.55))
    assert kept_of(store, *late) == [6] * 40
    assert min(kept_of(store, *often)) < 6
    store.shrink(0)
    assert (store.rows, kept_of(store, *late)) == (0, [0] * 40)


@settings(max_examples=100)
@given(TEXTS, st.integers(0, 120))
def test_eviction_leaves_no_context_without_its_suffixes(texts: list[tuple[list[int], int, int]], bound: int) -> None:
    store, known = NgramStore(), set()
    for tokens, start, day in texts:
        store.merge(*contexts(tokens, start), day=day)
        known |= {tuple(tokens[i - 6 : i]) for i in range(max(6, start), len(tokens))}
    before, rows = store.to_arrays(), store.rows
    store.shrink(bound)
    after = store.to_arrays()
    check(after)
    assert store.rows == (rows if rows <= bound else int(bound * KEPT))
    old = {row[:2]: row for row in zip(*(c.tolist() for c in before), strict=True)}
    assert all(old[row[:2]] == row for row in zip(*(c.tolist() for c in after), strict=True))
    reached = sum(len(store.matches(list(context))) == 4 for context in known)
    assert reached == np.unique(after.keys[(after.keys & np.uint64(3)) == 3]).size


def test_an_evicted_follower_still_counts_as_seen() -> None:
    store = taught([1, 2, 3], [1, 2, 3], [1, 2, 4])
    store.shrink(1)
    assert store.rows == 0  # the share of one row is none
    store = taught(*[[1, 2, 3]] * 2, [1, 2, 4], *[[n, n, n] for n in range(10, 28)])
    columns = store.to_arrays()
    kept = (columns.followers != 4).nonzero()[0]
    store = NgramStore.from_arrays(Columns(*(column[kept] for column in columns)))
    assert store.matches([1, 2]) == [Found(2, 3, 2, 3)]
    store.merge(*contexts([1, 2, 4], 0), day=101)
    assert store.matches([1, 2]) == [Found(2, 3, 2, 4)]


def test_a_look_up_meanwhile_sees_a_whole_store() -> None:
    store = taught([1, 2, 3])
    before = store.to_arrays()
    copies = [column.copy() for column in before]
    other = NgramStore.from_arrays(before)
    store.merge(*contexts([1, 2, 4, 1, 2, 4], 0), day=101)
    assert store.matches([1, 2]) == [Found(2, 4, 2, 3)]
    assert other.matches([1, 2]) == [Found(2, 3, 1, 1)]
    assert all((column == copy).all() for column, copy in zip(before, copies, strict=True))


def test_many_rows_are_found_through_their_leading_bits() -> None:
    rng = random.Random(3)
    text = [rng.randrange(300) for _ in range(60_000)]
    store, model = taught(text[:30_000]), Model()
    store.merge(*contexts(text, 30_000), day=100)
    model.learn(text, 0, 100)
    assert store.rows == sum(map(len, model.rows.values()))
    for end in range(0, len(text), 37):
        assert store.matches(text[:end][-6:]) == model.matches(text[:end][-6:])
