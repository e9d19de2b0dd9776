"""Thresholds of top-p, min-p and top-k: right against float64 and the filters themselves, on emulated Metal."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_rows import KINDS, REDUCTIONS, SCHEDULES, float64, log_sum, logits_of, near, planted, sum_bound
from metal.emulator import MetalError, emulated

from localspec.kernels import traffic_verify, truncation
from localspec.kernels.launch import threads_for
from localspec.kernels.truncation import Cutoff, cutoff, cutoff_reference
from localspec.sampling import distribution
from localspec.settings import Settings

MASS_ERROR = 2.0**-15
FILTERS = (
    {"top_p": 0.9},
    {"top_p": 0.2, "min_p": 0.05},
    {"top_k": 3},
    {"top_p": 0.8, "min_p": 0.01, "top_k": 40},
    {"min_p": 0.1},
    {"top_p": 0.999, "top_k": 1},
    {},
)


def kept(logits: mx.array, found: Cutoff) -> np.ndarray:
    """Which tokens stay and have a chance, bool [rows, vocabulary]."""
    logprobs = logits.astype(mx.float32) - found.normalizer[:, None]
    return np.array(found.keeps(logprobs) & (logprobs > -math.inf))


def survivors(logprobs: np.ndarray, margin: float, *, top_p: float = 1, min_p: float = 0, top_k: int = 0) -> np.ndarray:
    """What stays of one row of float32 log-probabilities, with `margin` more mass than top-p asks for."""
    values = logprobs.astype(np.float64)
    order = np.lexsort((np.arange(len(values)), -values))
    stays = values > -np.inf
    mass = np.exp(values)
    if 0 < top_p < 1:
        sorted_mass = np.concatenate([[0.0], np.cumsum(mass[order])])
        first = np.searchsorted(-values[order], -values, side="left")  # how many are strictly larger
        stays &= (sorted_mass[first] < np.float64(np.float32(top_p)) * mass.sum() + margin) | (first == 0)
    if min_p > 0:
        stays &= logprobs >= logprobs.max() + np.float32(math.log(min_p))
    if 0 < top_k < len(values):
        stays[[i for i in order if stays[i]][top_k:]] = False
    return stays


def check(logits: mx.array, filters: dict[str, float]) -> Cutoff:
    found = cutoff(logits, **filters)
    size = logits.shape[-1]
    normalizer = log_sum(float64(logits))
    near(found.normalizer, normalizer, 2.0**-23 * np.abs(normalizer) + sum_bound(size, threads_for(size)), "normalizer")
    logprobs = np.array(logits.astype(mx.float32) - found.normalizer[:, None])
    stays = kept(logits, found)
    for i in range(len(stays)):
        least, most = (survivors(logprobs[i], margin, **filters) for margin in (-MASS_ERROR, MASS_ERROR))
        assert not (least & ~stays[i]).any(), f"{stays[i].sum()} stay of {filters}, not {least.sum()}"
        assert not (stays[i] & ~most).any(), f"{stays[i].sum()} stay of {filters}, not {most.sum()}"
        assert stays[i].any()
    return found


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 7, 8, 1003])
def test_small_vocabularies(dtype: mx.Dtype, size: int) -> None:
    with emulated():
        for i, kind in enumerate(KINDS):
            for j in (0, 3):
                filters = FILTERS[(i + j + size) % len(FILTERS)]
                check(logits_of(kind, 1 if size == 1 else 2, size, dtype, seed=i), filters)


@pytest.mark.parametrize(
    ("dtype", "rows", "size", "kind", "filters"),
    [
        (mx.bfloat16, 3, 32_000, "normal", {"top_p": 0.95, "top_k": 64}),
        (mx.float16, 1, 32_000, "masked", {"top_p": 0.9}),
        (mx.float32, 1, 32_000, "tied", {"top_k": 500}),
        (mx.bfloat16, 1, 151_936, "normal", {"top_p": 0.9}),
        (mx.float16, 1, 262_144, "peaked", {"top_k": 2, "min_p": 1e-20}),
    ],
)
def test_large_vocabularies(dtype: mx.Dtype, rows: int, size: int, kind: str, filters: dict[str, float]) -> None:
    with emulated():
        check(logits_of(kind, rows, size, dtype), filters)


def test_every_schedule_and_order_of_sums_gives_the_same_bits() -> None:
    logits = logits_of("tied", 2, 1003, mx.bfloat16)
    answers = set()
    for i, schedule in enumerate(SCHEDULES):
        with emulated(schedule=schedule, reduction=REDUCTIONS[i % 3], seed=i):
            found = check(logits, {"top_p": 0.7, "top_k": 30})
            answers.add(str([a.tolist() for a in (found.threshold, found.last_tied, found.normalizer)]))
    assert len(answers) == 1


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = logits_of("normal", 9, 77, mx.float16)
    with emulated():
        whole = cutoff(logits, top_p=0.6, top_k=9)
        for rows in range(1, 10):
            some = cutoff(logits[9 - rows :], top_p=0.6, top_k=9)  # an odd vocabulary: slices that start anywhere
            for a, b in zip(
                (some.threshold, some.last_tied, some.normalizer),
                (whole.threshold, whole.last_tied, whole.normalizer),
                strict=True,
            ):
                assert a.tolist() == b[9 - rows :].tolist()


def test_top_p_is_strict() -> None:
    """A token with exactly the asked mass above it goes: 1 - 1e-9 is 1 in float32, and so is the mass of the first."""
    logits = mx.array([[0.0, -30.0, -31.0, -31.0]])
    with emulated():
        assert kept(logits, cutoff(logits, top_p=1 - 1e-9)).tolist() == [[True, False, False, False]]
    assert kept(logits, cutoff_reference(logits, top_p=1 - 1e-9)).tolist() == [[True, False, False, False]]


def test_top_k_among_what_top_p_ties() -> None:
    """Top-p keeps four tied tokens where half of them would do; top-k then leaves the lowest ids of them."""
    logits = mx.array([[-9.0, 1.0, 1.0, -9.0, 1.0, 1.0, -9.0, -9.0]])
    with emulated():
        assert np.flatnonzero(kept(logits, cutoff(logits, top_p=0.5))).tolist() == [1, 2, 4, 5]
        assert np.flatnonzero(kept(logits, cutoff(logits, top_p=0.5, top_k=3))).tolist() == [1, 2, 4]
        assert np.flatnonzero(kept(logits, cutoff(logits, top_p=0.1, top_k=5))).tolist() == [1, 2, 4, 5]


@given(
    levels=st.lists(
        st.lists(st.sampled_from([-math.inf, -9, -2, -1, 0, 0.25, 3]), min_size=12, max_size=12), max_size=3
    ),
    top_p=st.sampled_from([0.0, 0.05, 0.31, 0.77, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.011, 0.3, 1.0]),
    top_k=st.integers(0, 13),
)
@settings(max_examples=60)
def test_many_ties_as_the_filters_have_them(levels: list[list[float]], top_p: float, min_p: float, top_k: int) -> None:
    """The same tokens as `sampling.distribution` leaves. No sum of these levels' masses is near these shares."""
    rows = [*levels, [float(i % 4) for i in range(12)]]
    logits = mx.array([[*row[:-1], row[-1] if max(row[:-1]) > -math.inf else 1.0] for row in rows])
    scores = distribution(logits, Settings(temperature=1.0, top_p=top_p, min_p=min_p, top_k=top_k)).scores
    expected = np.array(scores) > -np.inf
    with emulated():
        assert kept(logits, cutoff(logits, top_p=top_p, min_p=min_p, top_k=top_k)).tolist() == expected.tolist()
    found = cutoff_reference(logits, top_p=top_p, min_p=min_p, top_k=top_k)
    assert kept(logits, found).tolist() == expected.tolist()


def test_rows_that_are_no_use() -> None:
    """They say so, end, and leave the others alone."""
    logits = logits_of("normal", 5, 40, mx.float32)
    logits[0, 3], logits[1, 0], logits[3] = math.nan, math.inf, -math.inf
    with emulated():
        found = cutoff(logits, top_p=0.5, min_p=0.1, top_k=3)
        alone = cutoff(logits[2:3], top_p=0.5, min_p=0.1, top_k=3)
    assert np.isfinite(np.array(found.normalizer)).tolist() == [False, False, True, False, True]
    assert found.threshold[2].item() == alone.threshold.item()


def test_self_test_agrees() -> None:
    with emulated(check=False):
        assert truncation.KERNEL.self_test() is None


def test_traffic_is_counted_right() -> None:
    """The bytes of logits that the emulator sees read."""
    logits = logits_of("normal", 3, 1003, mx.float32)
    with emulated() as device:
        check(logits, {"top_p": 0.9})
    assert device.dispatches[-1].traffic["logits"].read == traffic_verify.top_p(3, 1003, 4).kernel_bytes


MUTANTS = [
    ("descent", "threadgroup_barrier(mem_flags::mem_threadgroup);", "", "a barrier before the bins are read"),
    (
        "descent",
        "}\n        threadgroup_barrier(mem_flags::mem_threadgroup);\n        float above",
        "}\n        float above",
        "and after",
    ),
    ("descent", "mem_flags::mem_threadgroup", "mem_flags::mem_device", "the barrier's flag"),
    ("descent", "above < target", "above <= target", "top-p is strict"),
    ("descent", "? ~bits :", "? bits :", "the order of negative numbers"),
    ("descent", "size - 1 - id :", "id :", "the lowest ids stay"),
    ("descent", "bins[group * 16 + crew.lane % 16]", "bins[group * 16 + crew.lane]", "where the bins are"),
    ("descent", "id < size; id", "id <= size; id", "the row's end"),
    ("truncation", "static_cast<float>(top_k)", "static_cast<float>(top_k + 1)", "k"),
    ("truncation", "float room = k - edge.above", "float room = k - edge.above + 1.0f", "how many tied ones stay"),
    ("truncation", "value >= threshold", "value > threshold", "ties of both filters"),
    ("truncation", "threshold = metal::max(threshold, unordered", "threshold = metal::min(threshold, unordered", "all"),
    ("truncation", "last_tied[row] = last;", "", "an output"),
    ("truncation", "threadgroup float bins[512]", "threadgroup float bins[10240]", "threadgroup memory"),
]


@pytest.mark.parametrize(("name", "old", "new", "what"), MUTANTS, ids=[m[3] for m in MUTANTS])
def test_planted_faults_are_found(monkeypatch: pytest.MonkeyPatch, name: str, old: str, new: str, what: str) -> None:
    with planted(monkeypatch, name, old, new), pytest.raises((MetalError, AssertionError)):
        everything()


def everything() -> None:
    """What finds the faults, in a second."""
    test_top_p_is_strict()
    test_top_k_among_what_top_p_ties()
    with emulated():
        for kind in ("normal", "tied"):
            for filters in FILTERS[:4]:
                check(logits_of(kind, 3, 333, mx.float32), filters)


def test_nothing_is_found_where_no_fault_is_planted() -> None:
    everything()
