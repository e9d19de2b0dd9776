"""Products of a few rows with quantized weights, each row summed in one order however many rows stand beside it.

MLX takes other kernels for one row than for several, and on M1 and M2 reads the weights again for every row. This one
reads them once for 1 to 8 rows, and a row's bits do not depend on the number of rows: all these sizes are one class
(`docs/exactness.md`). Weights are as `mx.quantize` makes them in mode "affine": 4 or 8 bits, groups of 32, 64 or 128.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import mlx.core as mx

from localspec.kernels.kernel import LEAST, Heat, Kernel
from localspec.kernels.launch import WIDTH, kernel
from localspec.wrappers import Wrappers

MOST = 8
"""Rows of one call."""
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
PAIRS = (*((dtype, dtype) for dtype in DTYPES), (mx.float32, mx.float16), (mx.float32, mx.bfloat16))
"""Dtypes of rows and scales that occur in models; the self-test is of these, and so is the hook."""
BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)
_LEAST_ALONE = 0.98
"""What a single row may lose in the race: plain decoding pays that for rounding as in company, and it may not cost more
than 2 % (`docs/exactness.md`)."""
_COLUMNS, _SIMDGROUPS, _VALUES = 4, 2, 8
"""Columns of a simdgroup (as in the Metal source), simdgroups of a threadgroup, values that a lane takes at a time."""

_quantized_matmul: Callable[..., mx.array] = mx.quantized_matmul


def matmul(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, *, bits: int) -> mx.array:
    """`x` times the transpose of quantized weights, by the Metal kernel. Lazy.

    x: [rows, K], 1 to 8 rows, float32, float16 or bfloat16; w: uint32 [N, K * bits / 32]; scales, biases: [N, K /
    group size], each of one of the dtypes that `x` may have. Returns [rows, N] of the dtype that
    `mx.quantized_matmul` gives: the one that x, scales and biases promote to. Sums are taken in float32.
    """
    rows, columns, dtype = x.shape[0], w.shape[0], _promoted(x, scales, biases)
    out: mx.array = kernel("few_rows", (), ("x", "w", "scales", "biases"), ("y",))(
        inputs=[x, w, scales, biases],
        template=[("OutT", dtype), ("ROWS", rows), ("BITS", bits)],
        grid=(WIDTH, -(-columns // _COLUMNS), 1),
        threadgroup=(WIDTH, _SIMDGROUPS, 1),
        output_shapes=[(rows, columns)],
        output_dtypes=[dtype],
    )[0]
    return out


def reference(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, *, bits: int) -> mx.array:
    """The same by MLX's operations, row by row in float32: a row's bits do not depend on the number of rows either.

    Its order of summation is MLX's: results differ from the kernel's by no more than `error_bound`.
    """
    group_size = x.shape[1] // scales.shape[1]
    dtype = _promoted(x, scales, biases)
    x, scales, biases = (array.astype(mx.float32) for array in (x, scales, biases))
    rows = [
        _quantized_matmul(x[i : i + 1], w, scales=scales, biases=biases, group_size=group_size, bits=bits)
        for i in range(x.shape[0])
    ]
    return mx.concatenate(rows).astype(dtype)


def error_bound(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, *, bits: int) -> mx.array:
    """How far the kernel may be from the exact product before its result is rounded to its dtype: float32 [rows, N].

    With u = 2^-24, each number x q s and x b of the sum goes through at most 8 roundings in its lane's stretch, two for
    every stretch of the lane, and 5 in the sum over lanes; so the error is at most (8 + 2 stretches + 5) u
    sum(|x| (q |s| + |b|)), but for terms in u^2, for which one more rounding is counted. Numbers below 2^-126
    may be flushed to zero wherever they come up: x, s, b, up to two sums for each x, of which one is multiplied by s
    and one by b, and up to three behind that.
    """
    stretches = -(-x.shape[1] // (WIDTH * _VALUES))
    roundings = _VALUES + 2 * stretches + 5 + 1
    x, scales, biases = (mx.abs(array.astype(mx.float32)) for array in (x, scales, biases))
    amplified = 2.0 ** (bits + 1) * mx.max(scales) + 2 * mx.max(biases) + 2.0**bits * mx.max(x) + 3
    size = reference(x, w, scales, biases, bits=bits)
    return roundings * 2.0**-24 * size + x.shape[1] * (amplified * 2.0**-126)


class _Pass(threading.local):
    """The pass that this thread is building."""

    rows = 0


_pass = _Pass()


@contextmanager
def few_rows(rows: int) -> Iterator[None]:
    """Have products of all `rows` rows of the pass that is built inside, 1 to 8, go through the kernel.

    Those of `mx.quantized_matmul` in this thread that the kernel is for; all others, and those of passes of more rows,
    are MLX's.
    """
    if not 1 <= rows <= MOST:
        yield
        return
    try:
        _wrappers.enter()
        _pass.rows = rows
        yield
    finally:
        _pass.rows = 0
        _wrappers.leave()


def _wrapped(
    x: mx.array,
    w: mx.array,
    /,
    scales: mx.array,
    biases: mx.array | None = None,
    transpose: bool = True,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    *,
    stream: Any = None,
) -> mx.array:
    width, per_group = bits or 4, group_size or 64
    plain = mode == "affine" and transpose and stream is None and _all_rows(x)
    if biases is None or not plain or not _suits(x, w, scales, biases, width, per_group):
        options = {"transpose": transpose, "group_size": group_size, "bits": bits, "mode": mode, "stream": stream}
        product: mx.array = _wrappers.original("quantized_matmul")(x, w, scales, biases, **options)
        return product
    return matmul(x.reshape(-1, x.shape[-1]), w, scales, biases, bits=width).reshape(*x.shape[:-1], w.shape[0])


def _all_rows(x: mx.array) -> bool:
    """Whether these are the rows of the pass, neither fewer nor, say, several heads of each: those would be other
    numbers of rows in passes of other sizes, some of them too many."""
    return x.ndim > 1 and x.shape[-2] == _pass.rows > 0 and x.size == _pass.rows * x.shape[-1]


def _suits(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, bits: int, group_size: int) -> bool:
    """Whether the kernel is for these; what does not fit together is left to MLX to complain about."""
    depth = x.shape[-1]
    return (
        bits in BITS
        and group_size in GROUP_SIZES
        and w.ndim == 2
        and w.dtype == mx.uint32
        and depth % group_size == 0
        and w.shape[1] * 32 == depth * bits
        and scales.shape == biases.shape == (w.shape[0], depth // group_size)
        and scales.dtype == biases.dtype
        and (x.dtype, scales.dtype) in PAIRS
    )


_wrappers = Wrappers(lambda: [(mx, "quantized_matmul", _wrapped)])


def _promoted(x: mx.array, scales: mx.array, biases: mx.array) -> mx.Dtype:
    return mx.result_type(x, scales, biases)


def self_test() -> str | None:
    """Every pair of dtypes, width and group size: near the reference, and 2 to 8 rows bit for bit as each alone."""
    for (dtype, scaled), bits, group_size in product(PAIRS, BITS, GROUP_SIZES):
        found = difference(dtype, scaled, bits, group_size)
        if found is not None:
            return found
    return None


def difference(
    dtype: mx.Dtype, scaled: mx.Dtype, bits: int, group_size: int, sizes: Sequence[int] = range(2, MOST + 1)
) -> str | None:
    """One line on the first difference between the kernel and what it should give, for passes of these sizes."""
    names = [str(one).removeprefix("mlx.core.") for one in (dtype, scaled)]
    case = f"{bits} bits in groups of {group_size}, {' times '.join(names)}"
    # More than one stretch per lane, the last one not in all lanes; a column more than fills its simdgroups.
    x, w, scales, biases = example(MOST, 384, 2 * _COLUMNS + 1, scaled, bits, group_size, mirrored=True)
    x = x.astype(dtype)
    alone = mx.concatenate([matmul(x[i : i + 1], w, scales, biases, bits=bits) for i in range(MOST)])
    expected = reference(x, w, scales, biases, bits=bits)
    # MLX may add in any order, and both results are rounded.
    ours = error_bound(x, w, scales, biases, bits=bits)
    bound = ours * (2 + x.shape[1] / _VALUES) + 2 * _unit(dtype) * mx.abs(expected.astype(mx.float32))
    off = mx.abs(alone.astype(mx.float32) - expected.astype(mx.float32))
    if not mx.all(off <= bound).item():  # NaN is no agreement
        return f"few rows: off by {mx.max(off).item():.3g} ({case})"
    for rows in sizes:
        together = matmul(x[:rows], w, scales, biases, bits=bits)
        if not mx.array_equal(together, alone[:rows]).item():
            return f"few rows: {rows} rows differ from one ({case})"
    return None


def example(
    rows: int, depth: int, columns: int, dtype: mx.Dtype, bits: int, group_size: int, *, mirrored: bool = False
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Random x, w, scales, biases of such a product.

    mirrored: the weights read the same from both ends, and every other row changes its sign; its products are zero but
    for rounding, so that another order of summation shows in all of them, in 16 bits too.
    """
    first, second = mx.random.split(mx.random.key(depth + group_size))
    x = mx.random.normal((rows, depth), key=first).astype(dtype)
    weights = (mx.random.normal((columns, depth), key=second) + 0.25).astype(dtype)
    if mirrored:
        odd = (mx.arange(rows) % 2 == 1)[:, None]
        x, weights = mx.where(odd, x - x[:, ::-1], x), weights + weights[:, ::-1]
    return (x, *mx.quantize(weights, group_size=group_size, bits=bits))


def _unit(dtype: mx.Dtype) -> float:
    """Half the distance from 1 to the next number."""
    return {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}[dtype]


def heats() -> list[Heat]:
    """Groups of 64, bfloat16: a square layer of 4 and of 8 bits, and a wide one, of a model of 8 billion weights."""
    made = []
    for columns, bits, passes in ((4096, 4, (1, 2, 4, 8)), (14336, 4, (1, 2, 4, 8)), (4096, 8, (1, 4))):
        layers = _layers(4096, columns, bits)
        made += [_heat(rows, layers, bits) for rows in passes]
    return made


def _layers(depth: int, columns: int, bits: int) -> list[tuple[mx.array, mx.array, mx.array]]:
    """Weights of several layers, more than caches hold: decoding reads each of them once per pass."""
    count = -(-100_000_000 // (columns * depth * bits // 8))
    layers = []
    for seed in range(count):
        w = mx.random.randint(0, 2**31 - 1, (columns, depth * bits // 32), mx.uint32, key=mx.random.key(seed))
        scales = mx.full((columns, depth // 64), 0.01, mx.bfloat16)
        layers.append((w, scales, mx.full(scales.shape, -0.08, mx.bfloat16)))
    mx.eval(layers)
    return layers


def _heat(rows: int, layers: list[tuple[mx.array, mx.array, mx.array]], bits: int) -> Heat:
    columns, words = layers[0][0].shape
    depth = words * 32 // bits
    x = mx.random.normal((rows, depth), key=mx.random.key(0)).astype(mx.bfloat16)
    mx.eval(x)
    return Heat(
        f"{rows} row{'s' if rows > 1 else ''}, {depth} x {columns}, {bits} bits",
        lambda: [matmul(x, *layer, bits=bits) for layer in layers],
        lambda: [_quantized_matmul(x, *layer, group_size=64, bits=bits) for layer in layers],
        least=_LEAST_ALONE if rows == 1 else LEAST,
    )


KERNEL = Kernel(
    name="few-rows",
    purpose="products of 1 to 8 rows with quantized weights, alike bit for bit",
    self_test=self_test,
    heats=heats,
)
