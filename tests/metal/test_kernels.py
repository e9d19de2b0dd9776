"""Kernels of the usual kinds, emulated, against numpy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from .emulator import emulated
from .running import BARRIER, SCHEDULES, as_numpy, run

RNG = np.random.default_rng(1)
X = RNG.standard_normal(1000).astype(np.float32)
FLOATS = {mx.float32: 1e-6, mx.float16: 2e-3, mx.bfloat16: 1e-2}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_elementwise_in_every_float_type(dtype: mx.Dtype, schedule: str) -> None:
    x = mx.array(X).astype(dtype)
    source = "uint i = thread_position_in_grid.x; out[i] = T(metal::exp(static_cast<float>(x[i])) * 0.5f);"
    out = run(
        source,
        {"x": x},
        {"out": ((1000,), dtype)},
        (1000, 1, 1),
        (256, 1, 1),
        template=[("T", dtype)],
        schedule=schedule,
    )[0]
    assert out.dtype == dtype
    np.testing.assert_allclose(as_numpy(out), np.exp(as_numpy(x)) * 0.5, rtol=FLOATS[dtype])


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_conversions_round_to_nearest_even(dtype: mx.Dtype) -> None:
    special = np.array([1.00390625, 1.01171875, 1.0009765625, 65520, 3.4e38, np.inf, -np.inf, np.nan, -0.0], np.float32)
    x = np.concatenate([special, RNG.standard_normal(503).astype(np.float32)])
    source = "uint i = thread_position_in_grid.x; out[i] = static_cast<T>(x[i]);"
    out = run(source, {"x": mx.array(x)}, {"out": ((512,), dtype)}, (512, 1, 1), (64, 1, 1), template=[("T", dtype)])[0]
    np.testing.assert_array_equal(as_numpy(out), as_numpy(mx.array(x).astype(dtype)))


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
def test_inclusive_scan_of_a_threadgroup(check: bool) -> None:
    source = f"""
        threadgroup float totals[32];
        uint t = thread_index_in_threadgroup;
        uint lane = thread_index_in_simdgroup;
        uint simd = simdgroup_index_in_threadgroup;
        float sum = simd_prefix_inclusive_sum(x[t]);
        if (lane == 31) totals[simd] = sum;
        {BARRIER}
        float before = simd_prefix_exclusive_sum(lane < simdgroups_per_threadgroup ? totals[lane] : 0.0f);
        out[t] = sum + simd_shuffle(before, ushort(simd));
    """
    x = X[:512]
    out = run(source, {"x": mx.array(x)}, {"out": ((512,), mx.float32)}, (512, 1, 1), (512, 1, 1), check=check)[0]
    np.testing.assert_allclose(as_numpy(out), np.cumsum(x.astype(np.float64)), atol=2e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tiled_transpose_with_edges(schedule: str) -> None:
    source = f"""
        threadgroup float tile[8][9];
        uint3 p = thread_position_in_threadgroup;
        uint2 corner = threadgroup_position_in_grid.xy * 8u;
        uint column = corner.x + p.x, row = corner.y + p.y;
        if (row < uint(x_shape[0]) && column < uint(x_shape[1])) tile[p.y][p.x] = x[row * x_shape[1] + column];
        {BARRIER}
        uint to_row = corner.x + p.y, to_column = corner.y + p.x;
        if (to_row < uint(x_shape[1]) && to_column < uint(x_shape[0])) {{
            out[to_row * x_shape[0] + to_column] = tile[p.x][p.y];
        }}
    """
    x = X[: 21 * 13].reshape(21, 13)
    out = run(source, {"x": mx.array(x)}, {"out": ((13, 21), mx.float32)}, (16, 24, 1), (8, 8, 1), schedule=schedule)[0]
    np.testing.assert_array_equal(as_numpy(out), x.T)


def test_histogram_with_atomics_of_the_device() -> None:
    values = RNG.integers(0, 8, 777).astype(np.int32)
    source = "atomic_fetch_add_explicit(&out[x[thread_position_in_grid.x]], 1, memory_order_relaxed);"
    out = run(
        source, {"x": mx.array(values)}, {"out": ((8,), mx.int32)}, (777, 1, 1), (100, 1, 1), atomic=True, init_value=0
    )[0]
    np.testing.assert_array_equal(as_numpy(out), np.bincount(values, minlength=8))


def test_histogram_with_atomics_of_the_threadgroup() -> None:
    values = RNG.integers(0, 16, 256).astype(np.int32)
    source = f"""
        threadgroup atomic_uint counts[16];
        uint t = thread_index_in_threadgroup;
        if (t < 16) atomic_store_explicit(&counts[t], 0u, memory_order_relaxed);
        {BARRIER}
        atomic_fetch_add_explicit(&counts[x[t]], 1u, memory_order_relaxed);
        {BARRIER}
        if (t < 16) out[t] = atomic_load_explicit(&counts[t], memory_order_relaxed);
    """
    out = run(source, {"x": mx.array(values)}, {"out": ((16,), mx.uint32)}, (256, 1, 1), (256, 1, 1))[0]
    np.testing.assert_array_equal(as_numpy(out), np.bincount(values, minlength=16))


def test_other_atomics() -> None:
    source = """
        uint i = thread_position_in_grid.x;
        atomic_fetch_max_explicit(&out[0], x[i], memory_order_relaxed);
        atomic_fetch_min_explicit(&out[1], x[i], memory_order_relaxed);
        atomic_fetch_or_explicit(&out[2], 1 << (i % 7), memory_order_relaxed);
        atomic_fetch_sub_explicit(&out[3], 2, memory_order_relaxed);
        constexpr auto relaxed = memory_order_relaxed;
        int seen = atomic_load_explicit(&out[4], relaxed);
        while (!atomic_compare_exchange_weak_explicit(&out[4], &seen, seen + 3, relaxed, relaxed)) {
        }
    """
    values = RNG.integers(-50, 50, 100).astype(np.int32)
    out = run(
        source, {"x": mx.array(values)}, {"out": ((5,), mx.int32)}, (100, 1, 1), (32, 1, 1), atomic=True, init_value=0
    )[0]
    assert as_numpy(out).tolist() == [values.max(), values.min(), 127, -200, 300]


def test_vectors() -> None:
    source = """
        uint i = thread_position_in_grid.x;
        float4 a = ((const device float4*)x)[i];
        float4 b = float4(a.xy, 1.0f, 2.0f) + float4(0.5f);
        half4 h = half4(a);
        a.yz = b.wx;
        packed_float3 p = ((const device packed_float3*)x)[i];
        out[i * 4 + 0] = dot(a, b);
        out[i * 4 + 1] = float(h.w) + float3(p).z;
        out[i * 4 + 2] = max(a, b).x + as_type<float>(as_type<uint>(a.x));
        out[i * 4 + 3] = metal::exp(b).y;
    """
    x = X[:256]
    out = run(source, {"x": mx.array(x)}, {"out": ((64, 4), mx.float32)}, (64, 1, 1), (64, 1, 1))[0]
    a = x.reshape(64, 4).astype(np.float64)
    b = np.stack([a[:, 0], a[:, 1], np.ones(64), np.full(64, 2.0)], 1) + 0.5
    half = a[:, 3].astype(np.float16)
    a[:, 1], a[:, 2] = b[:, 3], b[:, 0]
    third = x[:192].reshape(64, 3)[:, 2]
    expected = [(a * b).sum(1), half + third, np.maximum(a[:, 0], b[:, 0]) + a[:, 0], np.exp(b[:, 1])]
    np.testing.assert_allclose(as_numpy(out), np.stack(expected, 1), rtol=1e-5, atol=1e-5)


def test_every_reduction_and_shuffle() -> None:
    source = """
        uint lane = thread_index_in_simdgroup;
        int v = x[lane];
        int results[] = {
            simd_sum(v), simd_min(v), simd_max(v), simd_and(v), simd_or(v), simd_xor(v), simd_product(v % 3 + 2),
            simd_prefix_inclusive_sum(v), simd_prefix_exclusive_sum(v), simd_broadcast(v, ushort(7)),
            simd_broadcast_first(v), simd_shuffle(v, ushort(31 - lane)), simd_shuffle_xor(v, ushort(5)),
            simd_shuffle_up(v, ushort(3)), simd_shuffle_down(v, ushort(3)), simd_shuffle_rotate_up(v, ushort(3)),
            simd_shuffle_rotate_down(v, ushort(3)), quad_sum(v), quad_max(v), quad_shuffle_xor(v, ushort(1)),
            quad_broadcast(v, ushort(2)), int(ulong(simd_ballot(v > 0))), simd_all(v > -100) ? 1 : 0,
            simd_any(v > 1000) ? 1 : 0, simd_is_first() ? 1 : 0,
        };
        for (int k = 0; k < 25; k++) out[k * 32 + lane] = results[k];
    """
    v = RNG.integers(-20, 20, 32).astype(np.int32)
    out = as_numpy(run(source, {"x": mx.array(v)}, {"out": ((25, 32), mx.int32)}, (32, 1, 1), (32, 1, 1))[0])
    lane = np.arange(32)
    quads = v.reshape(8, 4)
    ballot = np.array([sum(1 << int(k) for k in lane[v > 0])], np.uint32).view(np.int32)[0]
    all_same = [v.sum(), v.min(), v.max(), np.bitwise_and.reduce(v), np.bitwise_or.reduce(v), np.bitwise_xor.reduce(v)]
    product = np.prod(np.fmod(v, 3).astype(np.int64) + 2).astype(np.int32)
    expected = [np.full(32, value) for value in [*all_same, product]]
    expected += [np.cumsum(v), np.cumsum(v) - v, np.full(32, v[7]), np.full(32, v[0]), v[31 - lane], v[lane ^ 5]]
    expected += [
        v[np.where(lane < 3, lane, lane - 3)],
        v[np.where(lane > 28, lane, lane + 3)],
        np.roll(v, 3),
        np.roll(v, -3),
    ]
    expected += [np.repeat(quads.sum(1), 4), np.repeat(quads.max(1), 4), v[lane ^ 1], np.repeat(quads[:, 2], 4)]
    expected += [np.full(32, value) for value in (ballot, 1, 0)] + [(lane == 0).astype(int)]
    np.testing.assert_array_equal(out, np.stack(expected))


def test_the_order_of_reductions_can_be_chosen() -> None:
    source = "out[thread_index_in_simdgroup] = simd_sum(x[thread_index_in_simdgroup]);"
    x = np.exp(RNG.standard_normal(32) * 6).astype(np.float32)

    def total(reduction: str) -> float:
        out = run(
            source, {"x": mx.array(x)}, {"out": ((32,), mx.float32)}, (32, 1, 1), (32, 1, 1), reduction=reduction
        )[0]
        return float(out[0])

    in_line = np.float32(0)
    for value in x:
        in_line += value
    backward = np.float32(0)
    for value in x[::-1]:
        backward += value
    tree = x
    while len(tree) > 1:
        tree = tree[0::2] + tree[1::2]
    assert [total("forward"), total("backward"), total("tree")] == [float(in_line), float(backward), float(tree[0])]
    assert len({total("forward"), total("backward"), total("tree")}) > 1


def test_fast_functions_can_be_noisy() -> None:
    source = "uint i = thread_position_in_grid.x; out[i] = metal::fast::exp(x[i]) - metal::exp(x[i]);"
    call = (source, {"x": mx.array(X)}, {"out": ((1000,), mx.float32)}, (1000, 1, 1), (250, 1, 1))
    assert np.all(as_numpy(run(*call)[0]) == 0)
    off = np.abs(as_numpy(run(*call, noise=1e-4)[0])) / np.exp(X)
    assert 5e-5 < off.max() < 1.1e-4


def test_attributes_at_the_edge_of_a_grid() -> None:
    source = """
        uint3 p = thread_position_in_grid;
        uint at = ((p.z * threads_per_grid.y + p.y) * threads_per_grid.x + p.x) * 8;
        uint3 size = threads_per_threadgroup;
        out[at + 0] = size.x * 100 + size.y * 10 + size.z;
        out[at + 1] = dispatch_threads_per_threadgroup.x * 100 + dispatch_threads_per_threadgroup.y * 10;
        out[at + 2] = thread_index_in_threadgroup;
        uint3 group = threadgroup_position_in_grid;
        out[at + 3] = group.x * 100 + group.y * 10 + group.z;
        out[at + 4] = threadgroups_per_grid.x * 100 + threadgroups_per_grid.y * 10 + threadgroups_per_grid.z;
        out[at + 5] = simdgroups_per_threadgroup;
        out[at + 6] = simdgroup_index_in_threadgroup * 100 + thread_index_in_simdgroup;
        out[at + 7] = thread_position_in_threadgroup.x + threads_per_simdgroup;
    """
    out = as_numpy(run(source, {}, {"out": ((2, 5, 10, 8), mx.uint32)}, (10, 5, 2), (4, 3, 2))[0])
    assert out[0, 0, 0].tolist() == [432, 430, 0, 0, 321, 1, 0, 32]
    assert out[1, 4, 9].tolist() == [222, 430, (1 * 2 + 1) * 2 + 1, 210, 321, 1, 7, 33]


def test_threadgroups_are_cut_to_a_smaller_grid() -> None:
    out = run(
        "out[thread_position_in_grid.x] = threads_per_threadgroup.x;",
        {},
        {"out": ((5,), mx.int32)},
        (5, 1, 1),
        (256, 1, 1),
    )
    assert as_numpy(out[0]).tolist() == [5] * 5


@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
def test_strided_inputs(contiguous: bool) -> None:
    at = "elem_to_loc(i, x_shape, x_strides, x_ndim)"
    source = f"uint i = thread_position_in_grid.x; out[i] = x[{at}]; strides[i % 3] = x_strides[i % 3];"
    base = mx.array(X[:840].reshape(6, 10, 14))
    x = base[::2, 1:8, :].transpose(2, 0, 1)
    outputs = {"out": (x.shape, mx.float32), "strides": ((3,), mx.int64)}
    # Strides first come from one thread each: the others write the same, which is a race all the same.
    source = source.replace("strides[i % 3] = x_strides[i % 3];", "if (i < 3) strides[i] = x_strides[i];")
    out, strides = run(source, {"x": x}, outputs, (x.size, 1, 1), (32, 1, 1), contiguous=contiguous)
    np.testing.assert_array_equal(as_numpy(out), np.array(x))
    assert as_numpy(strides).tolist() == ([21, 7, 1] if contiguous else [1, 280, 14])


def test_scalars_small_inputs_and_every_integer_type() -> None:
    types = [mx.bool_, mx.int8, mx.int16, mx.int32, mx.int64, mx.uint8, mx.uint16, mx.uint32, mx.uint64]
    names = [f"x{k}" for k in range(len(types))]
    inputs = {name: mx.array([0, 1, 1, 0, 1], dtype) for name, dtype in zip(names, types, strict=True)}
    body = "".join(f"y{k}[i] = x{k}[i];\n" for k in range(len(types)))
    outputs = {f"y{k}": ((5,), dtype) for k, dtype in enumerate(types)} | {"sum": ((5,), mx.float32)}
    out = run(
        "uint i = thread_position_in_grid.x;\n" + body + "sum[i] = scale * float(count) + (flag ? 1.0f : 0.0f);",
        inputs | {"scale": 2.5, "count": 3, "flag": True},
        outputs,
        (5, 1, 1),
        (5, 1, 1),
    )
    assert [array.dtype for array in out[:-1]] == types
    assert all(array.tolist() == [0, 1, 1, 0, 1] for array in out[:-1])
    assert out[-1].tolist() == [8.5] * 5


def test_init_value_fills_what_is_not_written() -> None:
    source = "if (thread_position_in_grid.x == 1) out[1] = 5.0h;"
    out = run(source, {}, {"out": ((3,), mx.float16)}, (3, 1, 1), (3, 1, 1), init_value=-2)[0]
    assert out.tolist() == [-2, 5, -2]


def test_template_arguments_and_header() -> None:
    header = "template <typename T>\ninline T twice(T x) {\n  return x + x;\n}\nconstant int TABLE[3] = {5, 6, 7};\n"
    source = "uint i = thread_position_in_grid.x; out[i] = twice(T(TABLE[i])) * N + (NEGATE ? -1 : 1);"
    out = run(
        source, {}, {"out": ((3,), mx.int32)}, (3, 1, 1), (3, 1, 1),
        header=header, template=[("T", mx.int32), ("N", -2), ("NEGATE", True)],
    )[0]  # fmt: skip
    assert out.tolist() == [-21, -25, -29]


def test_denormals_are_flushed_as_on_the_gpu() -> None:
    source = "uint i = thread_position_in_grid.x; out[i] = x[i] * 0.5f;"
    x = mx.array([2e-38] * 8)
    assert run(source, {"x": x}, {"out": ((8,), mx.float32)}, (8, 1, 1), (8, 1, 1))[0].tolist() == [0.0] * 8
    assert np.float32(2e-38) * np.float32(0.5) != 0, "and the mode of this thread is as it was"


def test_counts_of_a_dispatch() -> None:
    source = f"""
        threadgroup float s[64];
        uint t = thread_index_in_threadgroup;
        s[t] = x[thread_position_in_grid.x];
        {BARRIER}
        float v = simd_sum(s[63 - t]);
        if (t == 0) out[threadgroup_position_in_grid.x] = T(v);
    """
    with emulated() as device:
        kernel = mx.fast.metal_kernel(name="counted", input_names=["x"], output_names=["out"], source=source)
        kernel(
            inputs=[mx.array(X[:256])], template=[("T", mx.bfloat16)], grid=(256, 1, 1), threadgroup=(64, 1, 1),
            output_shapes=[(4,)], output_dtypes=[mx.bfloat16],
        )  # fmt: skip
    (dispatch,) = device.dispatches
    assert (dispatch.kernel, dispatch.grid, dispatch.threadgroup) == ("counted", (256, 1, 1), (64, 1, 1))
    assert (dispatch.threadgroup_bytes, dispatch.barriers, dispatch.simd_operations) == (256, 4, 8)
    assert (dispatch.traffic["x"].read, dispatch.traffic["x"].written) == (1024, 0)
    assert (dispatch.traffic["out"].read, dispatch.traffic["out"].written) == (0, 8)
    assert dispatch.accesses == 256 * 3 + 4
