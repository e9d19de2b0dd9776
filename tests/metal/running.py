"""For the tests: one call of a kernel written in a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .emulator import Kind, MetalError, emulated

SCHEDULES = ("fifo", "lifo", "priority", "random")
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def run(
    source: str,
    inputs: dict[str, Any],
    outputs: dict[str, tuple[Sequence[int], mx.Dtype]],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    *,
    header: str = "",
    template: Sequence[tuple[str, bool | int | mx.Dtype]] = (),
    atomic: bool = False,
    contiguous: bool = True,
    init_value: float | None = None,
    **options: Any,
) -> list[mx.array]:
    """Makes the kernel and calls it once under `emulated(**options)`."""
    with emulated(**options):
        kernel = mx.fast.metal_kernel(
            name="kernel",
            input_names=list(inputs),
            output_names=list(outputs),
            source=source,
            header=header,
            ensure_row_contiguous=contiguous,
            atomic_outputs=atomic,
        )
        return kernel(
            inputs=list(inputs.values()),
            template=list(template),
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=[tuple(shape) for shape, _ in outputs.values()],
            output_dtypes=[dtype for _, dtype in outputs.values()],
            init_value=init_value,
        )


def as_numpy(array: mx.array) -> np.ndarray:
    """Float64 for floats, so that comparisons do not round; as they are otherwise."""
    floats = array.dtype in (mx.float16, mx.bfloat16, mx.float32)
    return np.array(array.astype(mx.float32) if floats else array).astype(np.float64 if floats else None)


def problems(call: Any, **options: Any) -> tuple[set[Kind], str]:
    """The kinds of problem that `call(**options)` raises, and the message; nothing when it raises none."""
    try:
        call(**options)
    except MetalError as error:
        return error.kinds, str(error)
    return set(), ""
