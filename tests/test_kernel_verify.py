"""The verify kernels on emulated Metal: right against float64, alike in any company, planted faults found."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kernel_rows import (
    KINDS,
    REDUCTIONS,
    SCHEDULES,
    Exact,
    U,
    check_coupled,
    check_judged,
    float64,
    gumbel64,
    logits_of,
    planted,
    sum_bound,
)
from metal.emulator import MetalError, emulated
from odds import FALSE_ALARM, chi_square

from localspec.kernels import traffic_verify, verify, verify_greedy, verify_rejection
from localspec.kernels.kernel import source
from localspec.kernels.launch import MOST_THREADS, threads_for
from localspec.kernels.traffic import Entry
from localspec.kernels.truncation import Cutoff, cutoff_reference
from localspec.kernels.verify import coupled, rejection
from localspec.kernels.verify_reference import Coupled, Judged, coupled_reference, rejection_reference
from localspec.noise import Noise, Stream, bits

SEED = 2**40 + 12345
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def answers(found: Coupled | Judged) -> list[Any]:
    return [getattr(found, name).tolist() for name in type(found).__slots__]


def judge_coupled(
    logits: mx.array, cutoff: Cutoff | None = None, *, temperature: float = 0.8, position: int = 70
) -> Coupled:
    """What the kernel finds, checked against float64; every second draft is the likeliest token."""
    rows, size = logits.shape
    exact = Exact.of(logits, cutoff, temperature)
    drafts = np.where(np.arange(rows - 1) % 2 == 0, exact.scores[:-1].argmax(axis=-1), 0)
    found = coupled(
        logits,
        cutoff,
        temperature=temperature,
        noise=Noise(SEED),
        position=position,
        drafts=mx.array(drafts) if rows > 1 else None,
    )
    noise = gumbel64(SEED, Stream.GUMBEL, range(position, position + rows), size) if temperature else 0.0
    check_coupled(found, exact, noise, drafts.tolist(), sum_bound(size, threads_for(-(-size // 2))))
    return found


def q_of(kind: int, drafts: np.ndarray, size: int) -> Any:
    """One-hot, dense, or of the drafts and every third token. Each draft has half of the mass, at the least."""
    if kind == 0:
        return None
    ids = np.arange(size) if kind == 1 else np.unique(np.concatenate([drafts % size, np.arange(0, size, 3)]))
    random = np.random.default_rng([kind, len(drafts), size])
    weights = np.exp(3 * random.standard_normal((len(drafts), len(ids))))
    q = (weights / weights.sum(axis=-1, keepdims=True) + (ids == drafts[:, None])) / 2
    values = mx.array(q.astype(np.float32))
    return values if kind == 1 else (values, mx.array(ids.astype(np.int32)))


def judge_rejection(
    logits: mx.array, kind: int, cutoff: Cutoff | None = None, *, temperature: float = 0.8, position: int = 70
) -> Judged:
    """What the kernel finds, checked against float64; drafts are likely tokens and those of id 0 in turn."""
    rows, size = logits.shape
    exact = Exact.of(logits, cutoff, temperature)
    drafts = np.where(np.arange(rows - 1) % 2 == 0, exact.scores[:-1].argmax(axis=-1), 0)
    q = q_of(kind, drafts, size)
    found = rejection(
        logits, cutoff, mx.array(drafts), q, temperature=temperature, noise=Noise(SEED), position=position
    )
    dense = q
    if kind == 2:
        dense = np.zeros((rows - 1, size))
        dense[:, np.array(q[1])] = np.array(q[0])
    elif kind == 1:
        dense = float64(q)
    check_judged(found, exact, drafts, dense, SEED, position, sum_bound(size, threads_for(-(-size // 2))))
    return found


WORDS = """
    uint pair = thread_position_in_grid.x;
    uint2 found = random_words(uint2(call[0], call[1]), call[2], call[3], pair);
    words[2 * pair] = found.x;
    words[2 * pair + 1] = found.y;
    values[2 * pair] = gumbel_of(found.x);
    values[2 * pair + 1] = gumbel_of(found.y);
    given[2 * pair] = gumbel_of(asked[2 * pair]);
    given[2 * pair + 1] = gumbel_of(asked[2 * pair + 1]);
"""


@pytest.mark.parametrize(
    ("seed", "stream", "position"),
    [(0, Stream.GUMBEL, 0), (2**64 - 1, Stream.COIN, 2**32 - 1), (SEED, Stream.RESIDUAL, 4711)],
)
def test_noise_is_that_of_the_reference(seed: int, stream: Stream, position: int) -> None:
    """The words bit for bit; Gumbel values to 4 * 2^-24 of E, which they are the logarithm of, and a last rounding."""
    edges = [0, 1, 2, 3, 255, 2**16, 2**23, 2**24 - 1, 2**24, 2**31 - 129, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1]
    edges += [int(2**32 * (1 - math.exp(-1))) + i for i in range(-3, 3)]  # where E is 1
    random = np.random.default_rng(1).integers(0, 2**32, 2000 - len(edges))
    asked = np.concatenate([edges, random >> np.arange(len(random)) % 32]).astype(np.uint32)
    with emulated():
        words, values, given = mx.fast.metal_kernel(
            name="words",
            input_names=["call", "asked"],
            output_names=["words", "values", "given"],
            source=WORDS,
            header=source("threefry"),
        )(
            inputs=[mx.array([seed & 0xFFFFFFFF, seed >> 32, int(stream), position], mx.uint32), mx.array(asked)],
            grid=(1000, 1, 1),
            threadgroup=(64, 1, 1),
            output_shapes=[(2000,)] * 3,
            output_dtypes=[mx.uint32, mx.float32, mx.float32],
        )
    assert words.tolist() == bits(seed, stream, [position], 2000)[0].tolist()
    v = np.minimum((asked.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - U))
    for exact, found in (
        (gumbel64(seed, stream, [position], 2000)[0], values),
        (-np.log(-np.log1p(-v.astype(np.float64))), given),
    ):
        assert (np.abs(float64(found) - exact) <= 4 * U + 2 * U * np.abs(exact)).all()
        assert exact.max() < 23  # what pruning takes for the largest


CASES = [
    # rows, size, kind of rows, temperature, filters: each with each dtype
    (1, 1, "normal", 0.7),
    (2, 7, "tied", 0.0),
    (1, 7, "peaked", 1e4),
    (3, 8, "masked", 1e-6),
    (4, 1003, "normal", 0.7),
    (5, 1003, "tied", 1.0),
    (6, 1003, "peaked", 1e-6),
    (7, 1003, "masked", 1e4),
    (8, 1003, "single", 0.7),
    (9, 1003, "normal", 0.0),
    (2, 1003, "normal", 1e-40),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("filtered", [False, True])
def test_coupled(dtype: mx.Dtype, filtered: bool) -> None:
    with emulated():
        for i, (rows, size, kind, temperature) in enumerate(CASES):
            logits = logits_of(kind, rows, size, dtype, seed=i)
            judge_coupled(
                logits, cutoff_reference(logits, top_p=0.9, top_k=50) if filtered else None, temperature=temperature
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind_of_q", [0, 1, 2])
def test_rejection(dtype: mx.Dtype, kind_of_q: int) -> None:
    with emulated():
        for i, (rows, size, kind, temperature) in enumerate(CASES):
            if rows > 1:
                logits = logits_of(kind, rows, size, dtype, seed=i)
                limits = (
                    None if (kind_of_q + DTYPES.index(dtype)) % 2 else cutoff_reference(logits, top_p=0.9, min_p=0.01)
                )
                judge_rejection(logits, kind_of_q, limits, temperature=temperature)


@pytest.mark.parametrize(
    ("dtype", "rows", "size", "temperature"),
    [
        (mx.bfloat16, 5, 32_000, 0.7),
        (mx.float32, 2, 32_000, 0.0),
        (mx.bfloat16, 2, 151_936, 1.0),
        (mx.float16, 2, 262_144, 1.3),
    ],
)
def test_large_vocabularies(dtype: mx.Dtype, rows: int, size: int, temperature: float) -> None:
    logits = logits_of("normal", rows, size, dtype)
    with emulated():
        judge_coupled(logits, temperature=temperature)
        judge_coupled(logits, cutoff_reference(logits, top_k=1000), temperature=temperature)
        judge_rejection(logits, size % 3, temperature=temperature)


def test_the_references_answer_the_same() -> None:
    """Same tokens and drafts kept as by MLX's operations, for rows whose logits are whole, ties included."""
    for dtype, kind, temperature in product(DTYPES, KINDS, (0.0, 1.0)):
        logits = logits_of(kind, 4, 333, dtype, seed=5)
        limits = cutoff_reference(logits, top_p=0.9, top_k=60)
        drafts = mx.argmax(logits[:-1], axis=-1)
        how: dict[str, Any] = {"temperature": temperature, "noise": Noise(SEED), "position": 9}
        with emulated():
            ours = coupled(logits, limits, drafts=drafts, **how)
            judged = rejection(logits, limits, drafts, None, **how)
        theirs = coupled_reference(logits, limits, drafts=drafts, **how)
        expected = rejection_reference(logits, limits, drafts, None, **how)
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.accepted.item() == theirs.accepted.item()
        assert judged.tokens.tolist() == expected.tokens.tolist()
        assert judged.passed.tolist() == expected.passed.tolist()
        assert judged.accepted.item() == expected.accepted.item()


def test_ties_go_to_the_lowest_id() -> None:
    logits = mx.array([[0.0] * 40 + [2.0] * 60 + [1.0] * 3] * 2)
    with emulated():
        found = coupled(logits, None, temperature=0, noise=Noise(1), position=0, drafts=mx.array([40]))
        judged = rejection(logits, None, mx.array([41]), None, temperature=0, noise=Noise(1), position=0)
    assert found.tokens.tolist() == [40, 40]
    assert found.gap.tolist() == [0.0, 0.0]
    assert found.accepted.item() == 1
    assert (judged.tokens.tolist(), judged.accepted.item()) == ([40, 40], 0)


def test_every_schedule_and_order_of_sums_gives_the_same_bits() -> None:
    logits = logits_of("normal", 3, 1003, mx.bfloat16)
    limits = cutoff_reference(logits, top_p=0.95)
    found = set()
    for i, schedule in enumerate(SCHEDULES):
        with emulated(schedule=schedule, reduction=REDUCTIONS[i % 3], seed=i):
            found.add(str([answers(judge_coupled(logits, limits)), answers(judge_rejection(logits, 1, limits))]))
    assert len(found) == 1


def test_a_row_does_not_depend_on_the_others() -> None:
    """Bit for bit, whatever stands before it and behind: slices of an odd vocabulary start anywhere in memory."""
    logits = logits_of("normal", 9, 1003, mx.float16)
    drafts = mx.argmax(logits, axis=-1)
    names = ("tokens", "log_p", "logprob", "normalizer")
    with emulated():
        how: dict[str, Any] = {"temperature": 0.9, "noise": Noise(SEED)}
        whole = coupled(logits, None, position=100, drafts=drafts[:8], **how)
        judged = rejection(logits, None, drafts[:8], None, position=100, **how)
        for rows in (1, 2, 4, 7, 8):
            first = 9 - rows
            some = coupled(logits[first:], None, position=100 + first, **how)
            for name in (*names, "gap"):
                assert getattr(some, name).tolist() == getattr(whole, name)[first:].tolist(), name
            if rows > 1:
                front = rejection(logits[:rows], None, drafts[: rows - 1], None, position=100, **how)
                for name in names:
                    assert getattr(front, name)[:-1].tolist() == getattr(judged, name)[: rows - 1].tolist(), name
                assert front.passed.tolist() == judged.passed[: rows - 1].tolist()


def test_rows_that_are_no_use() -> None:
    """They say so, their token is in range, they keep no draft, and they leave the other rows alone."""
    logits = logits_of("normal", 6, 37, mx.float32)
    logits[0, 36], logits[1, 0], logits[3], logits[5] = math.nan, math.inf, -math.inf, math.nan
    usable = [False, False, True, False, True, False]
    drafts = mx.zeros(5, mx.uint32)
    for temperature in (0.0, 0.7):
        how: dict[str, Any] = {"temperature": temperature, "noise": Noise(SEED), "position": 5}
        with emulated():
            found = coupled(logits, None, drafts=drafts, **how)
            alone = coupled(logits[2:3], None, **{**how, "position": 7})
            judged = rejection(logits, None, drafts, q_of(1, np.zeros(5, int), 37), **how)
        for one in (found, judged):
            assert np.isfinite(np.array(one.normalizer)).tolist() == usable
            assert max(one.tokens.tolist()) < 37
        assert found.tokens[2].item() == alone.tokens.item()
        assert temperature == 0 or not any(np.array(judged.passed)[[0, 1, 3]])


def test_what_cannot_win_is_left_out_without_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise for every token gives the same bits as noise for those only that the largest value could lift."""

    def everything() -> list[Any]:
        found: list[Any] = []
        for kind, temperature in product(("normal", "peaked", "masked"), (0.1, 0.7, 1e4)):
            logits = logits_of(kind, 2, 6001, mx.float32)
            found += answers(judge_coupled(logits, temperature=temperature))
            found += answers(judge_rejection(logits, 1, temperature=temperature))
        return found

    with emulated():
        pruned = everything()
        with planted(monkeypatch, "threefry", "LARGEST_GUMBEL = 23.0f", "LARGEST_GUMBEL = 1e30f"):
            assert str(everything()) == str(pruned)


def test_the_gap_is_to_the_second_however_far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind by more than noise can lift it, and looked at by the winner's simdgroup after the winner."""
    second = 4 * MOST_THREADS  # two ids a thread at a time
    row = mx.full(6001, -200.0)
    row[0], row[second] = 0.0, -40.0
    how: dict[str, Any] = {"temperature": 1.0, "noise": Noise(1), "position": 5}
    expected = coupled_reference(row[None], None, **how).gap.item()

    def gap() -> Any:
        with emulated():
            return coupled(row[None], None, **how).gap.item()

    assert gap() == pytest.approx(expected, abs=1e-3)
    with planted(monkeypatch, "verify_coupled", "simd_max(best.second)", "simd_max(best.key)"):
        assert gap() > expected + 100


def test_a_draft_that_neither_had_is_not_accepted() -> None:
    """q and p both 0: 0 < 0 is false, whatever the coin."""
    logits = mx.array([[-math.inf, 1.0, 2.0, 0.0]] * 2)
    with emulated():
        q = mx.array([[0.0, 0.5, 0.5, 0.0]])
        found = rejection(logits, None, mx.array([0]), q, temperature=1.0, noise=Noise(3), position=1)
    assert found.passed.tolist() == [False]


def test_ids_outside_the_vocabulary_are_not_accepted() -> None:
    logits = logits_of("normal", 2, 9, mx.float32)
    how: dict[str, Any] = {"temperature": 1.0, "noise": Noise(3), "position": 1}
    with emulated():
        assert coupled(logits, None, drafts=mx.array([9]), **how).accepted.item() == 0
        for kind in (0, 1, 2):
            assert rejection(logits, None, mx.array([9]), q_of(kind, np.array([9]), 9), **how).accepted.item() == 0


def emitted(reduced: bool) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that come out of rows that all have the same p and q, counted, and p."""
    random = np.random.default_rng(8)
    logits = mx.array(random.standard_normal(7).astype(np.float32))
    p = np.array(mx.softmax(logits)).astype(np.float64)
    ids = np.array([0, 2, 3, 6]) if reduced else np.arange(7)
    q = random.dirichlet(np.ones(len(ids))).astype(np.float32)
    counts = np.zeros(7)
    for call in range(100):
        drafts = random.choice(ids, 63, p=q.astype(np.float64) / q.astype(np.float64).sum())
        spread = mx.broadcast_to(mx.array(q)[None], (63, len(ids)))
        found = rejection(
            mx.broadcast_to(logits[None], (64, 7)),
            None,
            mx.array(drafts),
            (spread, mx.array(ids.astype(np.int32))) if reduced else spread,
            temperature=1.0,
            noise=Noise(SEED),
            position=64 * call,
        )
        passed, tokens = np.array(found.passed), np.array(found.tokens)
        counts += np.bincount([*np.where(passed, drafts, tokens[:-1]), tokens[-1]], minlength=7)
    return counts, p


@pytest.mark.parametrize("reduced", [False, True])
def test_what_comes_out_has_the_targets_distribution(reduced: bool) -> None:
    """6,400 rows, each emitting its draft if that passes, else its own token. Odds of a false alarm: 2 at 1e-6."""
    with emulated(check=False):
        counts, p = emitted(reduced)
    assert chi_square(counts, p) > FALSE_ALARM


def test_self_test_agrees() -> None:
    with emulated(check=False):
        for kernel in (verify.KERNEL, verify_greedy.KERNEL, verify_rejection.KERNEL):
            assert kernel.self_test() is None


def test_both_sides_of_a_heat_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer tokens than a race has; the numbers of rows are those that decoding has."""
    right = mx.random.normal
    monkeypatch.setattr(mx.random, "normal", lambda shape, key: right((*shape[:-1], min(shape[-1], 2000)), key=key))
    heats = [one for kernel in (verify.KERNEL, verify_greedy.KERNEL, verify_rejection.KERNEL) for one in kernel.heats()]
    assert len({heat.name for heat in heats}) == 4 + 4  # greedy ones are called as the others without filter
    with emulated(check=False):
        for heat in heats:
            for ours, theirs in zip(heat.ours(), heat.theirs(), strict=True):
                assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-4).item(), heat.name


@pytest.mark.parametrize(
    ("name", "count", "times"), [("coupled", traffic_verify.coupled, 2), ("rejection", traffic_verify.rejection, 3)]
)
def test_traffic_is_counted_right(name: str, count: Callable[[int, int, int], Entry], times: int) -> None:
    """The bytes of logits that the emulator sees read, but for single tokens looked up again."""
    logits = logits_of("normal", 3, 1003, mx.float32)
    with emulated() as device:
        if name == "coupled":
            judge_coupled(logits)
        else:
            judge_rejection(logits, 0)
    read = device.dispatches[-1].traffic["logits"].read
    assert times * logits.nbytes <= read <= times * logits.nbytes + 3 * 4 * 4
    assert count(3, 1003, 4).kernel_bytes in (times * logits.nbytes, times * logits.nbytes + 2 * 1003 * 4)


CHECKER, VALUES = MetalError, AssertionError
LOADED = "    float total = 0.0f;"
MUTANTS = [
    ("rows", "threadgroup_barrier(mem_flags::mem_threadgroup);", "", CHECKER, "a missing barrier"),
    (
        "rows",
        "    threadgroup_barrier(mem_flags::mem_threadgroup);\n    return value;",
        "    return value;",
        CHECKER,
        "reuse",
    ),
    ("scores", "mem_flags::mem_threadgroup", "mem_flags::mem_device", CHECKER, "a barrier's flag"),
    ("scores", "threadgroup_barrier(", "simdgroup_barrier(", CHECKER, "a barrier of the simdgroup only"),
    ("verify_coupled", "id + 1 < size ?", "id + 1 <= size ?", CHECKER, "a guard off by one"),
    ("verify_coupled", "threadgroup float shared[32]", "threadgroup float shared[10240]", CHECKER, "40 KiB"),
    ("verify_coupled", "gap[row] = best.key - best.second;", "", CHECKER, "an output that is not written"),
    (
        "verify_coupled",
        LOADED,
        "float4 four = *(const device float4*)x; float total = (four.x + four.y + four.z + four.w) * 0.0f;",
        CHECKER,
        "a load",
    ),
    ("verify_coupled", "crew.index == 0", "crew.lane == 0", CHECKER, "all simdgroups write"),
    ("verify_coupled", "drafts[row] == token", "drafts[row + 1] == token", CHECKER, "the next row's draft"),
    ("verify_coupled", "position = words[2] + row", "position = words[2]", VALUES, "noise of another position"),
    ("verify_coupled", "noise.y", "noise.x", VALUES, "a neighbour's noise"),
    ("verify_coupled", "(words[0], words[1])", "(words[0], 0u)", VALUES, "half of the seed"),
    ("verify_rejection", "seed, RESIDUAL_STREAM", "seed, GUMBEL_STREAM", VALUES, "noise of another stream"),
    ("verify_rejection", "words[2] * ROUND_LENGTH + row", "words[2] + row", VALUES, "coins of another round"),
    ("verify_rejection", "&& own != (Q == 0 ? draft : NOBODY)", "", VALUES, "one-hot residual: drawn from p"),
    ("verify_rejection", "p - (Q != 0 && judges", "p - (Q == 7 && judges", VALUES, "residual drawn from p"),
    ("verify_rejection", "(Q != 0 && judges ?", "(Q != 0 ?", CHECKER, "a bonus token from a residual"),
    ("verify_rejection", "q_draft < p_draft", "q_draft <= p_draft", VALUES, "a coin that may equal p"),
    ("verify_rejection", "best = whole;", "", VALUES, "nothing left of p"),
    ("drafts", "(ids[middle]) < id", "(ids[middle]) <= id", VALUES, "a search that misses"),
    ("scores", "a.id < b.id", "a.id > b.id", VALUES, "a tie to the highest id"),
    ("scores", "first ? b.key : a.key", "-INFINITY", VALUES, "the second best forgotten"),
    ("scores", "int(id) <= scale.last_tied", "int(id) < scale.last_tied", VALUES, "the last tied token"),
    ("rows", "exp(logit - largest)", "exp(logit)", VALUES, "an unshifted sum"),
    ("rows", "ushort(16)", "ushort(8)", VALUES, "a shuffle"),
    ("threefry", "LARGEST_GUMBEL = 23.0f", "LARGEST_GUMBEL = 2.0f", VALUES, "too little noise expected"),
    ("threefry", "series * z + 1.0f / 3.0f", "series * z", VALUES, "a term of a series"),
]


def everything() -> None:
    """What finds the faults, in a second or two."""
    normal, tied = logits_of("normal", 3, 1003, mx.float32), logits_of("tied", 3, 1003, mx.float32)
    with emulated():
        judge_coupled(normal, cutoff_reference(normal, top_k=40))
        judge_coupled(tied, cutoff_reference(tied, top_k=40))
        judge_coupled(logits_of("normal", 2, 6001, mx.float32), temperature=1e4)
        for kind in (0, 1, 2):
            judge_rejection(normal, kind)
            judge_rejection(logits_of("peaked", 7, 1003, mx.float32), kind, temperature=8.0)  # p of the peak: 0.6
        judge_rejection(logits_of("single", 3, 1003, mx.float32), 0)
    test_ties_go_to_the_lowest_id()
    test_a_draft_that_neither_had_is_not_accepted()


def test_nothing_is_found_where_no_fault_is_planted() -> None:
    everything()


@pytest.mark.parametrize(("name", "old", "new", "by", "what"), MUTANTS, ids=[m[-1] for m in MUTANTS])
def test_planted_faults_are_found(
    monkeypatch: pytest.MonkeyPatch, name: str, old: str, new: str, by: type[Exception], what: str
) -> None:
    with planted(monkeypatch, name, old, new), pytest.raises(by):
        everything()
