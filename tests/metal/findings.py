"""What the checker finds, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from .instrument import HEADER, UNDEFINED, UNDEFINED_CODES, Site


class Kind(Enum):
    """In the order of `Kind` in runtime/runtime.h; what follows has no number there."""

    RACE_THREADGROUP = "race in threadgroup memory"
    RACE_DEVICE = "race in device memory"
    OUT_OF_BOUNDS = "out of bounds"
    UNINITIALISED_THREADGROUP = "read of uninitialised threadgroup memory"
    UNINITIALISED_OUTPUT = "read of an output before it is written"
    UNWRITTEN_OUTPUT = "output elements never written"
    WRITE_TO_INPUT = "write to an input"
    DIVERGENT_BARRIER = "threads wait at different barriers"
    DIVERGENT_SIMD = "divergent simdgroup operation"
    INACTIVE_LANE = "shuffle from an inactive lane"
    EXIT_BEFORE_BARRIER = "a thread exited before a barrier"
    MISALIGNED = "misaligned access"
    UNDEFINED = "undefined behaviour"
    CRASH = "crash"
    ENDLESS = "no end"
    STACK_OVERFLOW = "stack overflow"
    THREADGROUP_MEMORY = "too much threadgroup memory"
    REJECTED = "source that is not Metal, or more of it than is emulated"


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding: what kind, and where in words."""

    kind: Kind
    text: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.text}" if self.text else self.kind.value


class MetalError(Exception):
    """The emulator found something wrong with a kernel. `problems` says what; the message lists them."""

    def __init__(self, kernel: str, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"kernel {kernel}: " + "; ".join(map(str, problems)))

    @property
    def kinds(self) -> set[Kind]:
        """The kinds of the problems."""
        return {problem.kind for problem in self.problems}


@dataclass(frozen=True, slots=True)
class Finding:
    """A report of the runtime, its names and places looked up (see `Report` in runtime/runtime.h)."""

    kind: Kind
    space: str
    """The argument or the threadgroup variable; empty if neither."""
    granule: int
    """Bytes of an element of it; 0: unknown."""
    offset: int
    """In bytes."""
    detail: int
    threadgroup: int
    thread: int
    other_thread: int
    site: Site
    other_site: Site
    access: str
    other_access: str
    count: int


def _line(site: Site) -> str:
    if site.line == 0:
        return "an unknown line"
    if site.file == HEADER:
        return f"header line {site.line}" + (f" (called on line {site.caller})" if site.caller else "")
    return f"line {site.line}"


def _element(finding: Finding) -> str:
    """The element touched, as in `x[12]`; the byte where it is none."""
    index, rest = divmod(finding.offset, finding.granule) if finding.granule else (0, 1)
    return f"{finding.space}[{index}]" if rest == 0 else f"{finding.space} at byte {finding.offset}"


def _times(finding: Finding) -> str:
    return f", {finding.count} times" if finding.count > 1 else ""


def _race(finding: Finding) -> str:
    groups = " of another threadgroup" if finding.detail else ""
    return (
        f"{_element(finding)}: {finding.access} by thread {finding.thread}{groups} on {_line(finding.site)}, "
        f"{finding.other_access} by thread {finding.other_thread} on {_line(finding.other_site)}"
    )


def _out_of_bounds(finding: Finding) -> str:
    where = _line(finding.site)
    if finding.space:
        return f"{finding.access} of {_element(finding)} on {where} by thread {finding.thread}"
    if finding.detail == 2:
        return f"index of an array on {where} by thread {finding.thread}"
    return f"{finding.access} far from every buffer on {where} by thread {finding.thread}"


def _text(finding: Finding) -> str:
    where = _line(finding.site)
    by = f"on {where} by thread {finding.thread}"
    match finding.kind:
        case Kind.RACE_THREADGROUP | Kind.RACE_DEVICE:
            return _race(finding)
        case Kind.OUT_OF_BOUNDS:
            return _out_of_bounds(finding)
        case Kind.UNWRITTEN_OUTPUT:
            return f"{finding.detail} of {finding.space}, the first is {_element(finding)}"
        case Kind.UNINITIALISED_THREADGROUP | Kind.UNINITIALISED_OUTPUT | Kind.WRITE_TO_INPUT:
            return f"{_element(finding)} {by}"
        case Kind.DIVERGENT_BARRIER | Kind.DIVERGENT_SIMD:
            other = f"thread {finding.other_thread} on {_line(finding.other_site)}"
            return f"thread {finding.thread} on {where}, {other}"
        case Kind.EXIT_BEFORE_BARRIER:
            return f"thread {finding.thread}, the barrier is on {where}"
        case Kind.UNDEFINED:
            return f"{UNDEFINED[UNDEFINED_CODES[finding.detail]]} {by}"
        case Kind.MISALIGNED:
            return f"{finding.access} of what must start at a multiple of {finding.detail} bytes, {by}"
        case Kind.CRASH:
            return f"signal {finding.detail}, after {where}, in thread {finding.thread}"
        case _:
            return by


def problem(finding: Finding) -> Problem:
    """In words: which element, which lines, which threads (numbered in their threadgroup), how often."""
    return Problem(finding.kind, _text(finding) + _times(finding))
