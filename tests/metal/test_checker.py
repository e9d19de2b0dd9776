"""The checker against planted faults, each of which it must name, and correct kernels, which it must let pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from .emulator import Kind
from .running import BARRIER, SCHEDULES, as_numpy, problems, run

THREADS = 128
ROWS, WIDTH = 3, 1000
X = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)

# Log-sum-exp of each row: strided passes, two simdgroup reductions, two arrays of threadgroup memory, a tail.
LSE = """
    constexpr int SIMDS = THREADS / 32;
    threadgroup float most[SIMDS];
    threadgroup float sums[SIMDS];
    uint row = threadgroup_position_in_grid.x;
    uint t = thread_index_in_threadgroup;
    uint lane = thread_index_in_simdgroup;
    uint simd = simdgroup_index_in_threadgroup;
    auto values = x + row * WIDTH;
    float high = -INFINITY;
    for (int i = t; i < WIDTH; i += THREADS) {
        high = max(high, values[i]);
    }
    high = simd_max(high);
    if (lane == 0) {
        most[simd] = high;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    high = simd_max(lane < SIMDS ? most[lane] : -INFINITY);
    float sum = 0.0f;
    for (int i = t; i < WIDTH; i += THREADS) {
        sum += metal::exp(values[i] - high);
    }
    sum = simd_sum(sum);
    if (lane == 0) {
        sums[simd] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum = simd_sum(lane < SIMDS ? sums[lane] : 0.0f);
    if (t == 0) {
        out[row] = high + metal::log(sum);
    }
"""


def lse(source: str, **options: Any) -> list[mx.array]:
    return run(
        source,
        {"x": mx.array(X)},
        {"out": ((ROWS,), mx.float32)},
        (ROWS * THREADS, 1, 1),
        (THREADS, 1, 1),
        template=[("THREADS", THREADS), ("WIDTH", WIDTH)],
        **options,
    )


def edit(old: str, new: str, which: int = 0) -> str:
    """LSE with the given occurrence of `old` replaced."""
    parts = LSE.split(old)
    assert len(parts) > which + 1, old
    return old.join(parts[: which + 1]) + new + old.join(parts[which + 1 :])


@dataclass(frozen=True)
class Fault:
    """A kernel with something wrong, marked HERE on the line that the checker must name."""

    source: str
    kinds: set[Kind]
    call: Any = lse
    also: set[Kind] = field(default_factory=set)
    """What else may be reported."""

    @property
    def line(self) -> str | None:
        lines = [number for number, line in enumerate(self.source.split("\n"), 1) if "HERE" in line]
        return f"line {lines[0]}" if lines else None


INPUT = mx.arange(256).astype(mx.float32)


def small(
    body: str,
    kinds: set[Kind],
    *,
    grid: int = 64,
    threads: int = 64,
    count: int = 64,
    dtype: mx.Dtype = mx.float32,
    x: mx.array = INPUT,
    **call: Any,
) -> Fault:
    """A fault in a few lines, with `i`, `t` and `lane` at hand."""
    source = (
        "uint i = thread_position_in_grid.x; uint t = thread_index_in_threadgroup; "
        "uint lane = thread_index_in_simdgroup;\n" + body
    )
    outputs = {"out": ((count,), dtype)}
    return Fault(source, kinds, partial(_small, x, outputs, (grid, 1, 1), (threads, 1, 1), call))


def _small(x: Any, outputs: Any, grid: Any, threads: Any, call: dict[str, Any], source: str, **options: Any) -> Any:
    return run(source, {"x": x}, outputs, grid, threads, **call, **options)


RACE, DEVICE_RACE, BOUNDS = Kind.RACE_THREADGROUP, Kind.RACE_DEVICE, Kind.OUT_OF_BOUNDS
FAULTS = {
    # the barrier
    "first barrier missing": Fault(edit(BARRIER, "", 0), {RACE}),
    "second barrier missing": Fault(edit(BARRIER, "", 1), {RACE}),
    "barrier with mem_none": Fault(edit(BARRIER, "threadgroup_barrier(mem_flags::mem_none);"), {RACE}),
    "barrier with mem_device": Fault(edit(BARRIER, "threadgroup_barrier(mem_flags::mem_device);"), {RACE}),
    "simdgroup_barrier in its place": Fault(edit(BARRIER, "simdgroup_barrier(mem_flags::mem_threadgroup);"), {RACE}),
    "array used again without a barrier": Fault(
        LSE.replace("sums[simd]", "most[simd]").replace("sums[lane]", "most[lane]"), {RACE}
    ),
    "barrier in one lane's branch": Fault(
        edit("most[simd] = high;\n    }\n    " + BARRIER, f"most[simd] = high;\n    {BARRIER} // HERE\n    }}"),
        {Kind.DIVERGENT_SIMD},
        also={RACE, Kind.DIVERGENT_BARRIER, Kind.EXIT_BEFORE_BARRIER},
    ),
    "barriers of two branches": small(
        f"threadgroup float s[64]; s[t] = x[i];\nif (t < 32) {{\n {BARRIER} // HERE\n}} else {{\n"
        f" {BARRIER}\n}}\nout[i] = s[63 - t];",
        {Kind.DIVERGENT_BARRIER},
    ),
    "return before the barrier": Fault(
        edit(BARRIER, "if (t >= 100) return;\n" + BARRIER + " // HERE"), {Kind.EXIT_BEFORE_BARRIER}
    ),
    "return before a simdgroup_barrier": small(
        "out[i] = x[i];\nif (t == 3) return;\n"
        "simdgroup_barrier(mem_flags::mem_threadgroup); // HERE",
        {Kind.EXIT_BEFORE_BARRIER},
    ),
    # threadgroup memory
    "between simdgroups, simdgroup_barrier only": small(
        "threadgroup float s[64];\ns[t] = x[i];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\n"
        "out[i] = s[(t + 32) % 64]; // HERE",
        {RACE},
    ),
    "in a simdgroup, no barrier": small(
        "threadgroup float s[64];\ns[t] = x[i];\nout[i] = s[t ^ 1]; // HERE", {RACE}
    ),
    "all threads write one element": small(
        f"threadgroup float s[1];\ns[0] = x[i]; // HERE\n{BARRIER}\nout[i] = s[0];", {RACE}
    ),
    "plain increments": small(
        f"threadgroup uint n[1];\nif (t == 0) n[0] = 0;\n{BARRIER}\nn[0] += 1; // HERE\n{BARRIER}\n"
        f"out[i] = n[0];",
        {RACE},
    ),
    "atomic and plain": small(
        f"threadgroup atomic_uint n;\nif (t == 0) atomic_store_explicit(&n, 0u, memory_order_relaxed);\n{BARRIER}\n"
        "atomic_fetch_add_explicit(&n, 1u, memory_order_relaxed);\n"
        "out[i] = *(threadgroup uint*)&n; // HERE",
        {RACE},
    ),
    "never written": small("threadgroup float s[64];\nout[i] = s[t]; // HERE", {Kind.UNINITIALISED_THREADGROUP}),
    "written by half of the threads": small(
        f"threadgroup float s[64];\nif (t < 32) s[t] = x[i];\n{BARRIER}\nout[i] = s[t]; // HERE",
        {Kind.UNINITIALISED_THREADGROUP},
    ),
    "left from the threadgroup before": small(
        f"threadgroup float s[64];\nif (i < 64) s[t] = x[i];\n{BARRIER}\nout[i] = s[t]; // HERE",
        {Kind.UNINITIALISED_THREADGROUP}, grid=128, count=128,
    ),
    "40 KiB": small(
        f"threadgroup float s[10240];\ns[t] = x[i];\n{BARRIER}\nout[i] = s[63 - t];", {Kind.THREADGROUP_MEMORY}
    ),
    "guard of an array off by one": Fault(
        edit("lane < SIMDS ? most[lane]", "lane <= SIMDS ? most[lane] /* HERE */"), {BOUNDS}
    ),
    "past an array through a pointer": small(
        "threadgroup float s[64];\nthreadgroup float* p = s;\np[t + 1] = x[i]; // HERE\nout[i] = x[i];", {BOUNDS}
    ),
    # device memory
    "tail guard missing": Fault(
        LSE.replace("i < WIDTH;", "i < WIDTH + 96;", 1).replace("values[i]);", "values[i]); // HERE", 1),
        {BOUNDS},
    ),
    "read past the end by one": small("out[i] = x[i + 193]; // HERE", {BOUNDS}),
    "read before the start": small("out[i] = x[int(i) - 1]; // HERE", {BOUNDS}),
    "write past the end by one": small("out[i] = 0.0f;\nout[i + 1] = x[i]; // HERE", {BOUNDS, DEVICE_RACE}),
    "read past a small input": small("out[i] = x[t]; // HERE", {BOUNDS}, x=mx.array([1.0, 2.0, 3.0])),
    "far from everything": small("out[i] = x[i + 100000000]; // HERE", {BOUNDS}),
    "constant index past a local array": small(
        "float a[4] = {1, 2, 3, 4};\nint k = 4;\nout[i] = a[k] + x[i]; // HERE", {BOUNDS}
    ),
    "neighbours write one element": small("out[i / 2] = x[i]; // HERE", {DEVICE_RACE}, count=32),
    "threadgroups write one element": small("out[t] = x[i]; // HERE", {DEVICE_RACE}, grid=128, count=64),
    "output read after a threadgroup barrier without mem_device": small(
        f"out[i] = x[i];\n{BARRIER}\nfloat v = out[63 - t]; // HERE\n"
        "threadgroup_barrier(mem_flags::mem_device);\nout[i] = v;",
        {DEVICE_RACE},
    ),
    "plain sum into an atomic output": small(
        "if (i == 0) atomic_fetch_add_explicit(&out[0], 1, memory_order_relaxed);\n"
        "else *(device int*)&out[0] = 3; // HERE",
        {DEVICE_RACE}, dtype=mx.int32, count=1, atomic=True, init_value=0,
    ),
    "output not written": Fault(edit("if (t == 0)", "if (t == 0 && row != 1)"), {Kind.UNWRITTEN_OUTPUT}),
    "last element not written": small("if (i < 63) out[i] = x[i];", {Kind.UNWRITTEN_OUTPUT}),
    "output read before it is written": small("out[i] += x[i]; // HERE", {Kind.UNINITIALISED_OUTPUT}),
    "atomic on an output without init_value": small(
        "atomic_fetch_add_explicit(&out[0], 1, memory_order_relaxed); // HERE",
        {Kind.UNINITIALISED_OUTPUT}, dtype=mx.int32, count=1, atomic=True,
    ),
    "write to an input": small("((device float*)x)[i] = 0.0f; // HERE\nout[i] = 0.0f;", {Kind.WRITE_TO_INPUT}),
    "misaligned vector load": small(
        "out[i] = (*(const device float4*)(x + 4 * (i / 16) + 1)).x; // HERE", {Kind.MISALIGNED}
    ),
    "vector load from an offset slice": small(
        "out[i] = (*(const device float4*)(x + 4 * (i / 16))).x; // HERE", {Kind.MISALIGNED}, x=INPUT[1:]
    ),
    # simdgroups
    "simd_sum in a branch": small(
        "float v = x[i];\nif (lane < 20) {\n  v = simd_sum(v); // HERE\n}\nv = simd_max(v);\n"
        "out[i] = v;",
        {Kind.DIVERGENT_SIMD},
    ),
    "simd_sum in both branches": small(
        "float v = x[i];\nif (lane < 20) {\n  v = simd_sum(v); // HERE\n} else {\n"
        "  v = simd_sum(2.0f * v);\n}\nout[i] = v;",
        {Kind.DIVERGENT_SIMD},
    ),
    "simd_sum in loops of different lengths": small(
        "float v = x[i];\nfor (uint k = 0; k <= lane / 16; k++) v += simd_sum(v); // HERE\n"
        "v += simd_max(v);\nout[i] = v;",
        {Kind.DIVERGENT_SIMD},
    ),
    "shuffle from lane 32": small("out[i] = simd_shuffle(x[i], ushort(32)); // HERE", {Kind.INACTIVE_LANE}),
    "shuffle from a lane that is not there": small(
        "out[i] = simd_shuffle_down(x[i], ushort(16)); // HERE", {Kind.INACTIVE_LANE}, grid=20, count=20
    ),
    "shuffle from a lane that returned": small(
        "out[i] = x[i];\nif (lane == 31) return;\n"
        "out[i] = simd_shuffle_xor(x[i], ushort(1)); // HERE",
        {Kind.INACTIVE_LANE},
    ),
    # arithmetic, control
    "shift by 32": small("out[i] = float(1u << (t + 1)) * x[i]; // HERE", {Kind.UNDEFINED}, grid=32, count=32),
    "division by zero": small("out[i] = float(7 / int(t)); // HERE", {Kind.UNDEFINED, Kind.CRASH}),
    "signed overflow": small("out[i] = float(2147483647 + int(t)); // HERE", {Kind.UNDEFINED}),
    "float out of the range of an int": small("out[i] = float(int(x[i] * 1e9f)); // HERE", {Kind.UNDEFINED}),
}  # fmt: skip
OTHER_KINDS = {Kind.UNINITIALISED_THREADGROUP, Kind.UNWRITTEN_OUTPUT}
"""What may come with a fault: a race or a stop leaves things unwritten, as the schedule has it."""


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_planted_faults_are_found_and_named(name: str, schedule: str) -> None:
    fault = FAULTS[name]
    kinds, message = problems(partial(fault.call, fault.source), schedule=schedule, seed=7, strict=False)
    assert fault.kinds & kinds, f"{name}: {message or 'nothing found'}"
    assert kinds <= fault.kinds | fault.also | OTHER_KINDS, message
    if fault.line is not None:
        assert fault.line in message.replace(",", " ").replace(";", " "), message


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reduction", ["tree", "forward", "backward"])
def test_the_kernel_that_the_faults_were_planted_in_is_right(schedule: str, reduction: str) -> None:
    out = lse(LSE, schedule=schedule, reduction=reduction, seed=3)[0]
    np.testing.assert_allclose(as_numpy(out), np.log(np.exp(X.astype(np.float64)).sum(1)), rtol=1e-6)


def test_the_message_says_what_and_where() -> None:
    fault = FAULTS["read past the end by one"]
    _, message = problems(partial(fault.call, fault.source), strict=False)
    assert message == "kernel kernel: out of bounds: read of x[256] on line 2 by thread 63"


def test_a_place_in_the_header_comes_with_its_caller() -> None:
    header = "inline float at(const device float* p, uint i) {\n  return p[i];\n}\n"
    fault = small("out[i] =\n  at(x, i + 193);", {BOUNDS})
    _, message = problems(partial(fault.call, fault.source), strict=False, header=header)
    assert "header line 2 (called on line 3)" in message


CORRECT = {
    "a race that is none: simdgroup_barrier in a simdgroup": small(
        "threadgroup float s[64];\ns[t] = x[i];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\n"
        "out[i] = s[t ^ 1];",
        set(),
    ),
    "both flags": small(
        "threadgroup float s[64];\ns[t] = x[i];\nout[i] = 0.0f;\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);\nout[63 - i] += s[t];",
        set(),
    ),
    "an array used again behind a barrier": small(
        f"threadgroup float s[64];\nfloat v = x[i];\nfor (int k = 0; k < 3; k++) {{\n s[t] = v;\n"
        f" {BARRIER}\n v += s[t ^ 33];\n {BARRIER}\n}}\nout[i] = v;",
        set(),
    ),
    "atomics of all threads": small(
        f"threadgroup atomic_uint n;\nif (t == 0) atomic_store_explicit(&n, 0u, memory_order_relaxed);\n{BARRIER}\n"
        f"atomic_fetch_add_explicit(&n, 1u, memory_order_relaxed);\n{BARRIER}\n"
        "out[i] = atomic_load_explicit(&n, memory_order_relaxed);",
        set(),
    ),
    "a table of constants": small(
        "out[i] = TABLE[t % 3] * x[i];", set(), header="constant float TABLE[3] = {1, 2, 3};\n"
    ),
    "one thread returns at the end": small("out[i] = x[i];\nif (t == 3) return;\nout[i] += 1.0f;", set()),
    "lanes beyond the grid return before simd_sum": small(
        "if (i >= 50) return;\nout[i] = simd_sum(x[i]);", set(), count=50
    ),
    "bytes of one word by several threads": small(
        "((device uchar*)out)[i] = uchar(i);", set(), count=16, dtype=mx.uint32
    ),
    "bytes of threadgroup words": small(
        f"threadgroup uint s[16];\n((threadgroup uchar*)s)[t] = uchar(t);\n{BARRIER}\nout[i] = float(s[t / 4]);", set()
    ),
    "reads of one element by all": small("out[i] = x[0] + x[255];", set()),
    "an aligned vector load and store": small(
        "if (t < 16) ((device float4*)out)[t] = ((const device float4*)x)[t] + 1.0f;", set()
    ),
    "vector load from an aligned slice": small("out[i] = (*(const device float4*)x).x;", set(), x=INPUT[4:]),
    "shuffles at the ends": small(
        "out[i] = simd_shuffle_up(x[i], ushort(1)) + simd_shuffle_down(x[i], ushort(1));", set()
    ),
    "32 KiB": small(f"threadgroup float s[8192];\ns[t] = x[i];\n{BARRIER}\nout[i] = s[63 - t];", set()),
    "a helper called from two branches that a simdgroup takes whole": small(
        "float v = x[i];\nif (t < 32) { v = twice(v); } else { v = 3.0f * twice(v); }\nout[i] = v;",
        set(), header="inline float twice(float v) { return 2.0f * simd_sum(v); }\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CORRECT)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_correct_kernels_are_not_reported(name: str, schedule: str) -> None:
    CORRECT[name].call(CORRECT[name].source, schedule=schedule, seed=5)
