"""Products of a few rows: right against float64, alike bit for bit in any company, planted faults found, and in use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from kernels import Using
from metal.emulator import MetalError, emulated
from tiny import ScriptDrafter, tiny_llama

from localspec.engine import Engine
from localspec.kernels import kernel, launch, matmul, traffic_matmul
from localspec.kernels.matmul import few_rows, reference
from localspec.probe import probe
from localspec.rows import RowClass, RowClasses
from localspec.target import Target
from localspec.transaction import Transaction

Operands = tuple[mx.array, mx.array, mx.array, mx.array]

UNIT = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}
LEAST = {mx.float32: 2.0**-126, mx.float16: 2.0**-24, mx.bfloat16: 2.0**-126}
"""The smallest number that a result may be rounded to: below, all of it may be lost."""
SCHEDULES = ("fifo", "lifo", "priority", "random")


@pytest.fixture(autouse=True)
def _built_anew() -> Iterator[None]:
    yield
    launch.built.cache_clear()


def float64(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def unpacked(w: mx.array, bits: int) -> np.ndarray:
    """The weights' integers, [N, K]: the lowest bits of a word are the first."""
    raw = np.ascontiguousarray(np.array(w)).view(np.uint8)
    return raw if bits == 8 else np.stack([raw & 15, raw >> 4], axis=-1).reshape(raw.shape[0], -1)


def exact(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and how far from it the kernel may be: `matmul.error_bound`, and one rounding more."""
    rows, integers = float64(x), unpacked(w, bits).astype(np.float64)
    scale, bias = (np.repeat(float64(a), x.shape[1] // scales.shape[1], axis=1) for a in (scales, biases))
    value = rows @ (integers * scale + bias).T
    size = np.abs(rows) @ (integers * np.abs(scale) + np.abs(bias)).T
    roundings = 8 + 2 * -(-x.shape[1] // 256) + 5 + 1
    dtype = mx.result_type(x, scales, biases)
    largest = [np.abs(array).max() for array in (scale, bias, rows)]
    amplified = 2.0 ** (bits + 1) * largest[0] + 2 * largest[1] + 2.0**bits * largest[2] + 3
    bound = roundings * 2.0**-24 * size + x.shape[1] * amplified * 2.0**-126
    return value, bound + UNIT[dtype] * (np.abs(value) + bound) + LEAST[dtype]


def check(
    operands: Operands, bits: int, sizes: Sequence[int], schedules: Sequence[str] = ("fifo",), **how: Any
) -> None:
    """Passes of these sizes, under the schedules in turn: near float64, and each row as it is in a pass of its own."""
    x, *weights = operands
    value, bound = exact(x, *weights, bits)
    turn = cycle(schedules)

    def run(rows: mx.array) -> mx.array:
        with emulated(schedule=next(turn), **how):
            out = matmul.matmul(rows, *weights, bits=bits)
            mx.eval(out)
        return out

    alone = mx.concatenate([run(x[i : i + 1]) for i in range(max(sizes))])
    assert alone.dtype == mx.result_type(x, *weights[1:])
    off = np.abs(float64(alone) - value[: max(sizes)])
    assert (off <= bound[: max(sizes)]).all(), f"off by {np.max(off / bound[: max(sizes)])} bounds"
    for rows in sizes:
        assert mx.array_equal(run(x[:rows]), alone[:rows]).item(), f"{rows} rows differ from one"


# The kernel


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", matmul.DTYPES, ids=lambda dtype: str(dtype).removeprefix("mlx.core."))
def test_all_kinds_are_right_and_alike_in_any_company(dtype: mx.Dtype, bits: int) -> None:
    for group_size in matmul.GROUP_SIZES:
        operands = matmul.example(8, 384, 5, dtype, bits, group_size, mirrored=True)
        check(operands, bits, range(1, 9), SCHEDULES)


@pytest.mark.parametrize("bits", [4, 8])
def test_all_shapes(bits: int) -> None:
    """One group and a few, lanes without work, columns that do not fill a simdgroup or a threadgroup."""
    for group_size, groups in ((32, 1), (64, 1), (128, 1), (32, 9), (128, 5)):
        for columns in (1, 2, 3, 4, 7, 8, 9):
            operands = matmul.example(3, groups * group_size, columns, mx.float32, bits, group_size)
            check(operands, bits, (1, 3), SCHEDULES)


def test_inputs_that_start_anywhere_and_inputs_in_another_order() -> None:
    x, w, scales, biases = matmul.example(3, 96, 6, mx.float16, 4, 32)
    shifted = mx.concatenate([mx.zeros(1, mx.float16), x.reshape(-1)])[1:].reshape(x.shape)
    check((shifted, w[1:], scales[1:], biases[1:]), 4, (1, 3))
    turned = mx.contiguous(x.T).T
    check((turned, w[::-1], scales[::-1], mx.repeat(biases[::2], 2, axis=0)), 4, (1, 3))


def test_scales_and_rows_of_different_dtypes() -> None:
    """MLX gives what both promote to, and so does the kernel."""
    for dtype, scaled in ((mx.bfloat16, mx.float32), (mx.float32, mx.float16), (mx.float16, mx.bfloat16)):
        x, w, scales, biases = matmul.example(2, 64, 5, mx.float32, 4, 32)
        operands = x.astype(dtype), w, scales.astype(scaled), biases.astype(scaled)
        check(operands, 4, (1, 2))
        assert mx.quantized_matmul(*operands, group_size=32, bits=4).dtype == mx.float32


def test_extreme_scales_and_zeros() -> None:
    x, w, scales, biases = matmul.example(2, 128, 5, mx.float32, 4, 64)
    ones = mx.ones_like(scales)
    for factor in (1e-44, 1e-36, 1e-20, 1e20, 1e34):
        check((x, w, scales * factor, biases * factor), 4, (2,))
    check((x * 1e-30, w, scales * 1e30, biases * -1e30), 4, (2,))
    check((x, w, ones * 0, ones * 0), 4, (2,))
    check((x * 0, w, scales, biases), 4, (2,))
    check((x, mx.zeros_like(w), scales, biases), 4, (2,))
    check((x, mx.full(w.shape, 0xFFFFFFFF, mx.uint32), -scales, biases), 4, (2,))
    for dtype, factors in ((mx.float16, (6e-8, 6e-5, 3e3)), (mx.bfloat16, (1e-39, 1e-30, 1e33))):
        for factor in factors:
            small = x * min(1.0, 1e-3 / factor)
            check((small.astype(dtype), w, (ones * factor).astype(dtype), (biases * factor).astype(dtype)), 4, (2,))


def test_sizes_of_real_layers() -> None:
    for depth, columns, bits, group_size in ((4096, 36, 4, 64), (576, 130, 4, 32), (11008, 9, 8, 128)):
        check(matmul.example(8, depth, columns, mx.bfloat16, bits, group_size), bits, (2, 8), check=False)


def test_the_reference_is_right_and_alike_in_any_company() -> None:
    for dtype, bits, group_size in product(matmul.DTYPES, matmul.BITS, matmul.GROUP_SIZES):
        x, *weights = matmul.example(8, 384, 9, dtype, bits, group_size)
        out = reference(x, *weights, bits=bits)
        value, bound = exact(x, *weights, bits)
        assert out.dtype == dtype
        assert (np.abs(float64(out) - value) <= bound * (1 + 384 / 8)).all()
        for rows in range(1, 9):
            assert mx.array_equal(reference(x[:rows], *weights, bits=bits), out[:rows]).item()


def test_the_self_test_agrees() -> None:
    """All kinds of numbers; of passes, the widest: a device runs them all."""
    with emulated(check=False):
        for pair, bits, group_size in product(matmul.PAIRS, matmul.BITS, matmul.GROUP_SIZES):
            assert matmul.difference(*pair, bits, group_size, sizes=(8,)) is None


def test_both_sides_of_a_heat_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []

    def small(depth: int, columns: int, bits: int) -> list[Any]:
        asked.append((depth, columns, bits))
        return [matmul.example(1, 128, 12, mx.bfloat16, bits, 64)[1:]] * 2

    monkeypatch.setattr(matmul, "_layers", small)
    heats = matmul.heats()
    assert asked == [(4096, 4096, 4), (4096, 14336, 4), (4096, 4096, 8)]
    names = [heat.name.split(",")[0] for heat in heats]
    assert names == ["1 row", "2 rows", "4 rows", "8 rows"] * 2 + ["1 row", "4 rows"]
    with emulated(check=False):
        for heat in (heats[0], heats[1], heats[-1]):
            for ours, theirs in zip(heat.ours(), heat.theirs(), strict=True):
                assert mx.allclose(ours, theirs, rtol=0.05, atol=0.5).item()


def test_traffic_is_what_is_counted() -> None:
    x, w, scales, biases = matmul.example(3, 512, 8, mx.bfloat16, 4, 64)
    with emulated() as device:
        y = matmul.matmul(x, w, scales, biases, bits=4)
        mx.eval(y)
    moved = device.dispatches[-1].traffic
    counted = traffic_matmul.few_rows(3, 512, 8)
    assert moved["w"].read == w.nbytes  # once, for all rows
    assert moved["y"].written == y.nbytes
    assert moved["x"].read + moved["scales"].read + moved["biases"].read == traffic_matmul.cached(3, 512, 8)
    assert counted.minimum_bytes == counted.kernel_bytes == sum(array.nbytes for array in (x, w, scales, biases, y))


# Planted faults

FAULTS: dict[str, tuple[str, str]] = {
    "nibbles in the wrong order": ("(word >> (j * BITS))", "(word >> (32 - BITS - j * BITS))"),
    "a mask of five bits": ("(1u << BITS) - 1u", "(1u << (BITS + 1)) - 1u"),
    "words in the wrong order": ("packed[i]", "packed[WORDS - 1 - i]"),
    "bias dropped": ("fma(bias[c], total, fma(scale[c], dot, sums[c][r]))", "fma(scale[c], dot, sums[c][r])"),
    "bias of every value": ("fma(bias[c], total,", "fma(bias[c], 8.0f * total,"),
    "group off by one": ("size_t(k >> group_bits)", "size_t((k + VALUES) >> group_bits)"),
    "groups of half the size": ("ctz(depth / n_groups)", "ctz(depth / n_groups) - 1"),
    "columns read beyond the last": ("min(first + c, n_columns - 1)", "first + c"),
    "columns written beyond the last": (" && first + c < n_columns", ""),
    "every row reads the first": ("x + size_t(r) * size_t(depth)", "x + size_t(0)"),
    "rows share a sum": ("fma(scale[c], dot, sums[c][r]))", "fma(scale[c], dot, sums[c][r / 2]))"),
    "a sum that starts with anything": ("sums[c][r] = 0.0f;", ""),
    "the last stretch left out": ("k < depth;", "k + 32 * VALUES <= depth;"),
    "a stretch too many": ("k < depth;", "k <= depth;"),
    "shuffle distance wrong": ("ushort distance = 1;", "ushort distance = 2;"),
    "half of a shuffle": ("distance < 32;", "distance < 16;"),
    "order within a stretch by the number of rows": (
        "dot = fma(weights[c][i], values[i], dot);",
        "{ int j = ROWS > 2 ? VALUES - 1 - i : i; dot = fma(weights[c][j], values[j], dot); }",
    ),
    "order of the lanes by the number of rows": (
        "simd_shuffle_xor(sum, distance)",
        "simd_shuffle_xor(sum, ROWS > 2 ? 16 / distance : distance)",
    ),
    "two sums of stretches for many rows": (
        "fma(bias[c], total, fma(scale[c], dot, sums[c][r]))",
        "ROWS > 2 ? sums[c][r] + fma(bias[c], total, scale[c] * dot) : "
        "fma(bias[c], total, fma(scale[c], dot, sums[c][r]))",
    ),
    "a row not written": ("lane == 0 &&", "lane == 0 && r != 1 &&"),
    "rows and columns of the result exchanged": (
        "size_t(r) * size_t(n_columns) + size_t(first + c)",
        "size_t(first + c) * ROWS + size_t(r)",
    ),
}


def planted(monkeypatch: pytest.MonkeyPatch, module: Any, old: str, new: str) -> None:
    """Have the module's kernel built from its source with one change."""
    text = kernel.source("few_rows" if module is matmul else "gated_delta_replay")
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the source"
    monkeypatch.setattr(launch, "source", lambda name: text.replace(old, new))
    launch.built.cache_clear()


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, matmul, *FAULTS[fault])
    operands = matmul.example(3, 320, 6, mx.float32, 8, 32)
    with pytest.raises((AssertionError, MetalError)):
        check(operands, 8, (3,))


def test_the_self_test_finds_planted_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a device would, where nothing checks memory: what shows in the results alone."""
    for fault, says in (
        ("group off by one", "off by"),
        ("shuffle distance wrong", "off by"),
        ("every row reads the first", "differ from one"),
        ("order of the lanes by the number of rows", "differ from one"),
    ):
        with monkeypatch.context() as patch, emulated(check=False):
            planted(patch, matmul, *FAULTS[fault])
            assert says in (matmul.difference(mx.bfloat16, mx.bfloat16, 4, 64, sizes=(8,)) or "")


# The hook


class Calls:
    """Stands for the kernel and notes what it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        monkeypatch.setattr(matmul, "matmul", self)

    def __call__(self, x: mx.array, *weights: mx.array, bits: int) -> mx.array:
        self.rows.append(x.shape[0])
        return reference(x, *weights, bits=bits)


def test_the_hook_takes_the_rows_of_the_pass_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    before, calls = mx.quantized_matmul, Calls(monkeypatch)
    x, *weights = matmul.example(8, 128, 9, mx.float32, 4, 64)
    many = [mx.stack([a] * 2) for a in weights]
    fp4 = mx.quantize(mx.ones((9, 128)), group_size=32, bits=4, mode="mxfp4")
    six = mx.quantize(mx.ones((9, 128)), group_size=64, bits=6)

    def others() -> list[mx.array]:
        return [
            mx.quantized_matmul(x[:4], *weights),  # not all rows of the pass
            mx.quantized_matmul(x[None], *weights),  # more than those
            mx.quantized_matmul(mx.stack([x[:3]] * 2), *weights),  # several heads of each
            mx.quantized_matmul(mx.stack([x[:3]] * 2), *many),  # weights for each
            mx.quantized_matmul(x[:3], fp4[0], scales=fp4[1], group_size=32, bits=4, mode="mxfp4"),
            mx.quantized_matmul(x[:3], *six, group_size=64, bits=6),
            mx.quantized_matmul(x[:3, :9], *weights, transpose=False),
            mx.quantized_matmul(x[:3], *weights, stream=mx.cpu),
            mx.gather_qmm(x[:3], *many, rhs_indices=mx.array([1])),
        ]

    expected = others()
    with few_rows(3):
        assert all(map(mx.array_equal, others(), expected))
        assert not calls.rows
        for rows in (x[:3], x[None, :3], x[None, None, :3]):
            out = mx.quantized_matmul(
                rows, weights[0], scales=weights[1], biases=weights[2], transpose=True, group_size=64, bits=4
            )
            assert out.shape == (*rows.shape[:-1], 9)
            assert mx.allclose(out, before(rows, *weights), atol=1e-4)
        assert calls.rows == [3] * 3
        with pytest.raises(ValueError, match="quantized_matmul"):
            mx.quantized_matmul(x[:3, :64], *weights)
    assert mx.quantized_matmul is before
    for size in (0, 9):
        with few_rows(size):
            assert mx.quantized_matmul is before


def test_the_hook_is_gone_after_errors_and_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    before, calls = mx.quantized_matmul, Calls(monkeypatch)
    operands = matmul.example(2, 64, 4, mx.float32, 4, 32)
    for error in (ValueError("a model's"), KeyboardInterrupt()):
        with pytest.raises(type(error)), few_rows(2):  # noqa: PT012
            mx.quantized_matmul(*operands, group_size=32)
            raise error
        assert mx.quantized_matmul is before
    # An interrupt that keeps it from being removed, and the thread's next pass.
    matmul._wrappers.enter()
    mx.quantized_matmul(*operands, group_size=32)
    assert calls.rows == [2, 2]
    with few_rows(2):
        mx.quantized_matmul(*operands, group_size=32)
    assert calls.rows == [2, 2, 2]
    assert mx.quantized_matmul is before


def test_each_thread_has_its_own_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    before, calls = mx.quantized_matmul, Calls(monkeypatch)
    x, *weights = matmul.example(8, 64, 4, mx.float32, 4, 32)
    inside, outside = threading.Event(), threading.Event()

    def other() -> None:
        with few_rows(5):
            inside.set()
            assert outside.wait(30)
            mx.quantized_matmul(x[:5], *weights, group_size=32)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(30)
    mx.quantized_matmul(x[:5], *weights, group_size=32)  # no pass of this thread
    with few_rows(2):
        mx.quantized_matmul(x[:2], *weights, group_size=32)
        mx.quantized_matmul(x[:5], *weights, group_size=32)
    assert mx.quantized_matmul is not before
    assert calls.rows == [2]
    outside.set()
    thread.join()
    assert calls.rows == [2, 5]
    assert mx.quantized_matmul is before


# In use


def quantized(dtype: mx.Dtype, bits: int) -> Any:
    model = tiny_llama(scale=2.0)
    model.set_dtype(dtype)
    nn.quantize(model, group_size=32, bits=bits)
    mx.eval(model.parameters())
    return model


def rounding_by_rows(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Stands for MLX on Metal: other bits for one row than for several."""

    def call(x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        return original(x, *args, **kwargs) * (1 + x.shape[-2] * 2.0**-20)

    return call


def test_passes_of_1_to_8_rows_are_found_to_be_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localspec.probe._USELESS", float("inf"))
    monkeypatch.setattr(mx, "quantized_matmul", rounding_by_rows(mx.quantized_matmul))
    model = quantized(mx.float32, 4)
    without = probe(Target(model), most=9, context_length=50)
    assert [one.sizes for one in without.classes] == [(n,) for n in range(1, 10)]
    with emulated(check=False):
        found = probe(Target(model, few_rows=True), most=9, context_length=50)
    assert [one.sizes for one in found.classes] == [tuple(range(1, 9)), (9,)]


@pytest.mark.parametrize(("dtype", "bits"), [(mx.float32, 4), (mx.float16, 8)], ids=["float32, 4", "float16, 8"])
def test_ids_with_the_emulated_kernel_are_those_of_the_reference(
    dtype: mx.Dtype, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with speculation those without, bit for bit, log-probabilities included."""
    model, prompt = quantized(dtype, bits), [3, 1, 4, 1, 5, 9, 2, 6]
    # What the probe finds; by its costs it would choose to avoid an emulated kernel.
    found = RowClasses((RowClass(tuple(range(1, 9))),), (), 1.0, (12,), True, 1, 0.1)

    def run(script: list[int], **settings: Any) -> Any:
        drafter = ScriptDrafter(script, wrong={12, 13, 19})
        engine = Engine(model, drafters=[drafter], kernels=Using("few-rows"))
        engine._exact._probed = found
        return engine.generate(prompt, max_tokens=16, seed=3, temperature=0.7, exact="rows", logprobs=1, **settings)

    with emulated(check=False):
        plain = run([], speculate=False)
        drafted = run(prompt + plain.ids, draft_length=5)
    calls = Calls(monkeypatch)
    assert drafted.ids == plain.ids
    assert [token.logprob for token in drafted.tokens] == [token.logprob for token in plain.tokens]
    assert 0 < drafted.stats.accepted < drafted.stats.drafted
    assert run([], speculate=False).ids == plain.ids
    assert set(calls.rows) == {1}
    assert run(prompt + plain.ids, draft_length=5).ids == plain.ids
    assert max(calls.rows) == 6


def test_single_rows_are_left_to_mlx_where_no_class_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, model = Calls(monkeypatch), quantized(mx.float32, 4)
    Engine(model, drafters=[]).generate([1, 2, 3], max_tokens=3, exact="rows")
    assert not calls.rows  # off unless somebody switches it on
    transaction = Transaction(Target(model, few_rows=True))
    transaction.prefill([1, 2, 3])
    transaction.forward(mx.array([4]))
    assert not calls.rows
    transaction.forward(mx.array([4, 5]))
    assert set(calls.rows) == {2}
    transaction.row_class = RowClass((1, 2, 3))
    transaction.forward(mx.array([6]))
    assert set(calls.rows) == {1, 2}
