"""Runs a compiled kernel once: memory laid out as on the device, the dispatch described, the reports read."""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from . import compiler
from .findings import Finding, Kind
from .instrument import REDZONE, Site, instrument

MOST_THREADS = 1024
MOST_THREADGROUP_BYTES = 32768
_STACK = 128 << 10
_GUARD = 64 << 10
_MOST_REPORTS = 64
_CELL = 64
_RECENT = 4096  # bytes of each guard that are filled with ones: NaN as a float

SCHEDULES = ("fifo", "lifo", "priority", "random")
REDUCTIONS = ("tree", "forward", "backward")
INPUT, OUTPUT, INITIALISED_OUTPUT = range(3)

_KINDS = list(Kind)
_ONE_AT_A_TIME = threading.Lock()


class _Variable(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_uint64))


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("role", ctypes.c_uint32),
        ("granule", ctypes.c_uint32),
        ("shadow", ctypes.c_void_p),
        ("bytes_read", ctypes.c_uint64),
        ("bytes_written", ctypes.c_uint64),
    )


class _Report(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("space", ctypes.c_uint32),
        ("offset", ctypes.c_int64),
        *((name, ctypes.c_uint32) for name in ("detail", "threadgroup", "thread", "other_thread")),
        ("site", ctypes.c_int32),
        ("other_site", ctypes.c_int32),
        *((name, ctypes.c_uint32) for name in ("access", "other_access", "count")),
    )


class _Dispatch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        *((name, ctypes.c_uint32) for name in ("schedule", "order", "check", "buffers")),
        ("seed", ctypes.c_uint64),
        ("noise", ctypes.c_float),
        ("seconds", ctypes.c_uint32),
        ("most_reports", ctypes.c_uint32),
        ("buffer", ctypes.POINTER(_Buffer)),
        ("report", ctypes.POINTER(_Report)),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("stacks", ctypes.c_void_p),
        ("variable", ctypes.c_void_p),
        ("constant", ctypes.c_void_p),
        *((name, ctypes.c_uint32) for name in ("variables", "constants", "reports")),
        ("threadgroup_shadow", ctypes.c_void_p),
        ("entry", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("switches", "simd_operations", "barriers", "accesses", "atomics")),
        ("subword", ctypes.c_uint32),
        ("failed", ctypes.c_uint32),
    )


@cache
def _runtime() -> ctypes.CDLL:
    """The runtime, where the kernels that are loaded after it find it."""
    if maths := ctypes.util.find_library("m"):
        ctypes.CDLL(maths, mode=ctypes.RTLD_GLOBAL)
    loaded = ctypes.CDLL(str(compiler.runtime()), mode=ctypes.RTLD_GLOBAL)
    ours = [*map(ctypes.sizeof, (_Dispatch, _Buffer, _Report)), _CELL, _STACK, _GUARD, REDZONE]
    theirs = list((ctypes.c_uint32 * len(ours)).in_dll(loaded, "metal_layout"))
    if ours != theirs:
        raise RuntimeError(f"machine.py and runtime/runtime.h differ: {ours} and {theirs}")
    return loaded


@cache
def _stacks() -> tuple[mmap.mmap, int]:
    memory = mmap.mmap(-1, _STACK * MOST_THREADS)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Library:
    """A kernel, compiled and loaded."""

    def __init__(self, path: Path) -> None:
        _runtime()
        loaded = ctypes.CDLL(str(path))
        described = json.loads(ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(loaded, "metal_description"))))
        self.sites = [Site(*site) for site in described["sites"]]
        self.variable_names: list[str] = [name for name, _ in described["variables"]]
        self.variable_granules: list[int] = [granule for _, granule in described["variables"]]
        self.entry = ctypes.cast(loaded.metal_entry, ctypes.c_void_p)
        self.variables = self._table(loaded, "metal_variables")
        self.constants = self._table(loaded, "metal_constants")
        self._loaded = loaded

    @staticmethod
    def _table(loaded: ctypes.CDLL, name: str) -> ctypes.Array[_Variable]:
        count = ctypes.c_int32.in_dll(loaded, f"{name}_count").value
        return (_Variable * count).in_dll(loaded, name)

    @property
    def threadgroup_bytes(self) -> int:
        """Threadgroup memory of the kernel; every variable starts at a multiple of 16."""
        return sum(-(-variable.size // 16) * 16 for variable in self.variables)


@cache
def load(text: str, check: bool) -> Library:
    """The kernel with this C++ (`translate.translation_unit`), from the cache or compiled now."""

    def make(out: Path) -> None:
        source, module, compiled = (out.with_suffix(suffix) for suffix in (".cpp", ".ll", ".o"))
        source.write_text(text, encoding="utf-8")
        compiler.to_ir(source, module, check)
        module.write_text(instrument(module.read_text(encoding="utf-8")), encoding="utf-8")
        compiler.from_ir(module, compiled)
        compiler.shared_library([compiled], out)

    return Library(compiler.cached(f"kernel-{compiler.digest(text, str(check))}.so", make))


class Memory:
    """One buffer, in the middle of guard zones."""

    def __init__(self, name: str, size: int, role: int, granule: int, offset: int = 0) -> None:
        """`size`, `granule` and `offset` in bytes; the address is `offset` past a multiple of 256."""
        self.name, self.size, self.role, self.granule = name, size, role, granule
        self._store = np.zeros(size + 2 * _GUARD + 512, np.uint8)
        start = _GUARD + -(self._store.ctypes.data + _GUARD) % 256 + offset
        self._store[start - _RECENT : start + size + _RECENT] = 0xFF
        self.bytes = self._store[start : start + size]
        self.first = 0
        """Byte that the kernel's pointer points at: not 0 where a stride is negative."""
        self.shadow = np.zeros(0, np.uint8)

    def describe(self, check: bool) -> _Buffer:
        """To the runtime, with a fresh shadow if it is an output."""
        address = None
        if check and self.role != INPUT:
            self.shadow = np.zeros(-(-self.size // self.granule) * _CELL, np.uint8)
            address = self.shadow.ctypes.data
        return _Buffer(self.bytes.ctypes.data, self.size, self.role, self.granule, address, 0, 0)


@dataclass(frozen=True, slots=True)
class Plan:
    """How the threads of a dispatch are run."""

    schedule: str = "fifo"
    reduction: str = "tree"
    seed: int = 0
    noise: float = 0.0
    seconds: int = 60
    check: bool = True


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that the threads of a dispatch read and wrote of one argument, repeats counted. Checked runs only."""

    read: int
    written: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened in a dispatch."""

    findings: list[Finding]
    traffic: dict[str, Traffic]
    simd_operations: int
    barriers: int
    accesses: int
    atomics: int
    subword: bool
    failed: bool


def _finding(report: _Report, library: Library, memories: Sequence[Memory]) -> Finding:
    kind = _KINDS[report.kind]
    in_threadgroup = kind in (Kind.RACE_THREADGROUP, Kind.UNINITIALISED_THREADGROUP)
    in_threadgroup |= kind is Kind.OUT_OF_BOUNDS and report.detail == 1
    space, granule = "", 1
    if in_threadgroup:
        space, granule = library.variable_names[report.space], library.variable_granules[report.space]
    elif report.space < len(memories):
        space, granule = memories[report.space].name, memories[report.space].granule
    return Finding(
        kind=kind,
        space=space,
        granule=granule,
        offset=report.offset,
        detail=report.detail,
        threadgroup=report.threadgroup,
        thread=report.thread,
        other_thread=report.other_thread,
        site=library.sites[report.site],
        other_site=library.sites[report.other_site],
        access="write" if report.access else "read",
        other_access="write" if report.other_access else "read",
        count=report.count,
    )


def run(
    library: Library, memories: Sequence[Memory], grid: Sequence[int], threadgroup: Sequence[int], plan: Plan
) -> Outcome:
    """Runs every thread of the grid; `memories` are the arguments in their order."""
    buffers = (_Buffer * len(memories))(*(memory.describe(plan.check) for memory in memories))
    reports = (_Report * _MOST_REPORTS)()
    arguments = (ctypes.c_void_p * len(memories))(*(memory.bytes.ctypes.data + memory.first for memory in memories))
    shadow = np.zeros(sum(variable.size for variable in library.variables) * _CELL if plan.check else 0, np.uint8)
    groups = int(np.prod([-(-size // of) for size, of in zip(grid, threadgroup, strict=True)]))
    order = (ctypes.c_uint32 * groups)()
    _, stacks = _stacks()
    dispatch = _Dispatch(
        grid=tuple(grid),
        threadgroup=tuple(threadgroup),
        schedule=SCHEDULES.index(plan.schedule),
        order=REDUCTIONS.index(plan.reduction),
        check=plan.check,
        buffers=len(memories),
        seed=plan.seed,
        noise=plan.noise,
        seconds=plan.seconds,
        most_reports=_MOST_REPORTS,
        buffer=buffers,
        report=reports,
        arguments=arguments,
        stacks=stacks,
        variable=ctypes.addressof(library.variables),
        constant=ctypes.addressof(library.constants),
        variables=len(library.variables),
        constants=len(library.constants),
        threadgroup_shadow=shadow.ctypes.data,
        entry=library.entry,
    )
    with _ONE_AT_A_TIME:
        _runtime().metal_dispatch(ctypes.byref(dispatch), order)
    return Outcome(
        findings=[_finding(report, library, memories) for report in reports[: dispatch.reports]],
        traffic={
            memory.name: Traffic(buffer.bytes_read, buffer.bytes_written)
            for memory, buffer in zip(memories, buffers, strict=True)
        },
        simd_operations=dispatch.simd_operations,
        barriers=dispatch.barriers,
        accesses=dispatch.accesses,
        atomics=dispatch.atomics,
        subword=bool(dispatch.subword),
        failed=bool(dispatch.failed),
    )
