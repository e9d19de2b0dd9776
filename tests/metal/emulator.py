"""Replaces `mx.fast.metal_kernel`, so that kernels and the code that calls them run as they are, on the CPU.

    with emulated(schedule="lifo") as device:
        outputs = whatever_calls_a_metal_kernel()
    print(device.dispatches[-1].barriers)

A kernel runs when it is called: nothing is lazy, and a call inside mx.compile or a gradient is not supported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from . import function, machine, strict
from .findings import Kind, MetalError, Problem, problem
from .machine import INITIALISED_OUTPUT, INPUT, OUTPUT, REDUCTIONS, SCHEDULES, Memory, Plan, Traffic
from .translate import translation_unit

__all__ = ["Device", "Dispatch", "Kind", "MetalError", "Problem", "emulated"]

MOST_BUFFERS = 31
_NO_METAL = "No Metal back-end"

_NUMPY = {mx.bool_: np.uint8, mx.float16: np.uint16, mx.bfloat16: np.uint16}
"""Types that go to and from numpy as others of the same size."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Counts of one dispatch. Those of accesses, bytes and atomics are zero without the checker."""

    kernel: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    threadgroup_bytes: int
    barriers: int
    simd_operations: int
    accesses: int
    atomics: int
    traffic: dict[str, Traffic]
    """By argument: bytes read and written by all threads, an element that is read twice counted twice."""


@dataclass(slots=True)
class Device:
    """The emulated device: how it runs kernels, and what it ran."""

    plan: Plan
    strict: bool = True
    dispatches: list[Dispatch] = field(default_factory=list)


@contextmanager
def emulated(
    schedule: str = "fifo",
    check: bool = True,
    reduction: str = "tree",
    seed: int = 0,
    *,
    noise: float = 0.0,
    strict: bool = True,
    seconds: int = 60,
) -> Iterator[Device]:
    """Inside, `mx.fast.metal_kernel` makes kernels that run here.

    - schedule: the order in which threads and threadgroups run: "fifo", "lifo", "priority" (random priorities of the
      simdgroups) or "random".
    - check: look for races and the other kinds of `findings.Kind`. Without it a wild write can harm the process.
    - reduction: the order of simd_sum and its like: "tree", "forward" or "backward".
    - seed: of the random schedules and of the noise.
    - noise: the largest relative error that the results of `fast::` functions get.
    - strict: hold the source against stricter compilers first (`strict.py`).
    - seconds: of CPU time until a kernel counts as endless.

    A problem raises `MetalError` at the end of the dispatch. Raises `ValueError` for an unknown schedule or reduction.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule {schedule!r} is none of {', '.join(SCHEDULES)}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction {reduction!r} is none of {', '.join(REDUCTIONS)}")
    device = Device(Plan(schedule, reduction, seed, noise, seconds, check), strict)
    real = mx.fast.metal_kernel

    def metal_kernel(*args: Any, **kwargs: Any) -> EmulatedKernel:
        return EmulatedKernel(device, real(*args, **kwargs), *args, **kwargs)

    mx.fast.metal_kernel = metal_kernel
    try:
        yield device
    finally:
        mx.fast.metal_kernel = real


def _as_array(value: Any) -> mx.array:
    return value if isinstance(value, mx.array) else mx.array(value)


def _in_numpy(array: mx.array) -> np.ndarray:
    """The array's own memory, layout and all."""
    same_size = {mx.bool_: mx.uint8, mx.float16: mx.uint16, mx.bfloat16: mx.uint16}.get(array.dtype)
    seen = array if same_size is None else array.view(same_size)
    mx.eval(seen)
    return np.array(seen, copy=False)


def _alignment_of_new() -> int:
    """Where MLX's CPU allocator puts the start of an array, modulo 16: on a GPU a buffer's start is aligned."""
    return int(_in_numpy(mx.arange(64)).ctypes.data % 16)


def _from_bytes(data: np.ndarray, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    numpy_type = _NUMPY.get(dtype) or np.dtype(str(dtype).removeprefix("mlx.core."))
    array = mx.array(data.copy().view(numpy_type).reshape(shape))
    if dtype == mx.bool_:
        return array.astype(mx.bool_)
    return array.view(dtype) if dtype in _NUMPY else array


@dataclass(frozen=True, slots=True)
class _Input:
    """An input as a kernel sees it."""

    data: np.ndarray
    """Bytes of the smallest stretch of memory that has all elements."""
    first: int
    """Byte in it of the element with index 0."""
    offset: int
    """Of its address, past a multiple of 16."""
    strides: list[int]
    """In elements."""


def _input(array: mx.array, contiguous: bool) -> _Input:
    seen = _in_numpy(array)
    offset = (seen.ctypes.data - _alignment_of_new()) % 16
    if contiguous and not seen.flags.c_contiguous:
        seen, offset = np.ascontiguousarray(seen), 0
    steps = [(extent - 1) * stride for extent, stride in zip(seen.shape, seen.strides, strict=True)]
    before = -sum(step for step in steps if step < 0)
    span = before + sum(step for step in steps if step > 0) + seen.itemsize if seen.size else 0
    start = np.lib.stride_tricks.as_strided(seen, (1,), (seen.itemsize,)) if seen.size else seen
    pointer = start.ctypes.data - before
    data = np.frombuffer((np.ctypeslib.ctypes.c_uint8 * span).from_address(pointer), np.uint8).copy()
    return _Input(data, before, (offset - before) % 16, [stride // seen.itemsize for stride in seen.strides])


class EmulatedKernel:
    """What the replaced `mx.fast.metal_kernel` returns: takes the calls that MLX's own takes."""

    def __init__(
        self,
        device: Device,
        real: Any,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: object = None,
    ) -> None:
        self._device, self._real = device, real
        self._name, self._source, self._header = name, source, header
        self._input_names, self._output_names = list(input_names), list(output_names)
        self._contiguous, self._atomic = ensure_row_contiguous, atomic_outputs

    def __call__(self, **call: Any) -> list[mx.array]:
        """See MLX's documentation; raises what MLX raises for a call that it does not take."""
        self._ask_mlx(call)
        return self._run(**call)

    def _ask_mlx(self, call: dict[str, Any]) -> None:
        """MLX looks at all arguments before it sees that there is no Metal here."""
        try:
            self._real(**(call | {"verbose": False}))
        except RuntimeError as error:
            if _NO_METAL not in str(error):
                raise

    def function(
        self, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype], template: function.Template
    ) -> function.Function:
        """The Metal function of a call."""
        return function.build(
            name=self._name,
            input_names=self._input_names,
            output_names=self._output_names,
            source=self._source,
            header=self._header,
            atomic_outputs=self._atomic,
            inputs=inputs,
            output_dtypes=output_dtypes,
            template=template,
        )

    def _run(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: function.Template | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: object = None,
    ) -> list[mx.array]:
        arrays = [_as_array(value) for value in inputs]
        made = self.function(arrays, output_dtypes, template or ())
        if verbose:
            print(f"Generated source code for `{self._name}`:\n```\n{made.text}\n```")
        if math.prod(threadgroup) > machine.MOST_THREADS:
            raise ValueError(f"threadgroup {threadgroup} has more than {machine.MOST_THREADS} threads")
        if len(made.arguments) > MOST_BUFFERS:
            raise ValueError(f"{len(made.arguments)} buffer arguments, Metal takes {MOST_BUFFERS}")
        if self._device.strict and (refused := strict.refusals(made)):
            raise MetalError(self._name, [Problem(Kind.REJECTED, text) for text in refused])
        library = machine.load(translation_unit(made), self._device.plan.check)
        laid_out = [_input(array, self._contiguous) for array in arrays]
        group = tuple(min(size, of) for size, of in zip(threadgroup, grid, strict=True))

        def memories(bytewise: bool) -> list[Memory]:
            return [
                _output_memory(argument, output_shapes, output_dtypes, init_value, bytewise)
                if argument.role == "output"
                else _input_memory(argument, arrays[argument.position], laid_out[argument.position])
                for argument in made.arguments
            ]

        used = memories(bytewise=False)
        outcome = machine.run(library, used, grid, group, self._device.plan)
        if outcome.subword:  # elements were written in parts: only a shadow of bytes can tell who wrote what
            used = memories(bytewise=True)
            outcome = machine.run(library, used, grid, group, self._device.plan)
        self._device.dispatches.append(
            Dispatch(
                kernel=self._name,
                grid=tuple(grid),
                threadgroup=group,
                threadgroup_bytes=library.threadgroup_bytes,
                barriers=outcome.barriers,
                simd_operations=outcome.simd_operations,
                accesses=outcome.accesses,
                atomics=outcome.atomics,
                traffic=outcome.traffic,
            )
        )
        problems = [problem(finding) for finding in outcome.findings]
        if library.threadgroup_bytes > machine.MOST_THREADGROUP_BYTES:
            text = f"{library.threadgroup_bytes} bytes, the limit is {machine.MOST_THREADGROUP_BYTES}"
            problems.append(Problem(Kind.THREADGROUP_MEMORY, text))
        if problems:
            raise MetalError(self._name, problems)
        outputs = [memory for memory, argument in zip(used, made.arguments, strict=True) if argument.role == "output"]
        return [
            _from_bytes(memory.bytes, shape, dtype)
            for memory, shape, dtype in zip(outputs, output_shapes, output_dtypes, strict=True)
        ]


def _input_memory(argument: function.Argument, array: mx.array, laid_out: _Input) -> Memory:
    if argument.role == "data":
        memory = Memory(argument.name, laid_out.data.size, INPUT, array.itemsize, laid_out.offset)
        memory.bytes[:] = laid_out.data
        memory.first = laid_out.first
        return memory
    values = {"shape": list(array.shape), "strides": laid_out.strides, "ndim": [array.ndim]}[argument.role]
    data = np.array(values, np.int64 if argument.role == "strides" else np.int32)
    memory = Memory(argument.name, data.nbytes, INPUT, data.itemsize)
    memory.bytes[:] = data.view(np.uint8)
    return memory


def _output_memory(
    argument: function.Argument,
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[mx.Dtype],
    init_value: float | None,
    bytewise: bool,
) -> Memory:
    dtype, count = dtypes[argument.position], math.prod(shapes[argument.position])
    role = OUTPUT if init_value is None else INITIALISED_OUTPUT
    memory = Memory(argument.name, count * dtype.size, role, 1 if bytewise else dtype.size)
    if init_value is not None:
        memory.bytes[:] = np.ascontiguousarray(_in_numpy(mx.full((count,), init_value, dtype=dtype))).view(np.uint8)
    return memory
