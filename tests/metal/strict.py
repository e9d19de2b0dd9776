"""Passes of the compiler that run nothing: does the source keep to the rules by which Metal's front end judges it?

Three gates, each with its own blind spots: C++14 with real address spaces, C++ for OpenCL (the open language nearest to
Metal's), and `lint.py`. What passes all three can still be refused by Apple's compiler.
"""

from __future__ import annotations

import re
import tempfile
from functools import cache
from pathlib import Path

from . import compiler
from .function import Function
from .lint import lint
from .translate import HEADER, SOURCE, declarations, without_entry

_BFLOAT = re.compile(r"implicit conversion.*to '[^']*(?:bfloat|__bf16)")
_NEWER = re.compile(r"C\+\+1[47] extension|c\+\+1[47]-extensions|is a C\+\+17")
# C++ has no member functions on objects in an address space, constructors among them; C++ for OpenCL judges these.
_BLIND = re.compile(r"no matching constructor for init|'this' argument to member|function type may not be qualified")
_PLACE = re.compile(r"^(\w+):(\d+):\d+: (?:fatal )?(?:error|warning): (.*?)(?: \[-W[^\]]*\])?$")

_COMMON = ["-nostdinc", "-DMETAL_VERSION=320", "-Wno-everything", "-Wimplicit-float-conversion"]
_STRICT = [
    "-x", "c++", "-std=c++14", "-isystem", str(compiler.SHIM), "-DMETAL_STRICT", *_COMMON,
    "-Wconditional-uninitialized", "-Wuninitialized", "-Wmissing-variable-declarations", "-Wc++17-extensions",
    "-Wno-unknown-attributes", "-Xclang", "-cl-single-precision-constant", "-fno-exceptions", "-fno-rtti",
]  # fmt: skip
_OPENCL = [
    "-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc", "-isystem", str(compiler.HERE / "shim_opencl"), *_COMMON,
    "-target", "x86_64-linux-gnu", "-Xclang",
    "-cl-ext=-all,+cl_khr_fp16,+__opencl_c_generic_address_space,+__opencl_c_program_scope_global_variables",
]  # fmt: skip


def _in_words(complaint: str) -> str | None:
    """Our complaint for one of the compiler's; None if it is no reason to refuse the kernel."""
    if _BLIND.search(complaint):
        return None
    reason = ": error: " in complaint or _BFLOAT.search(complaint) or _NEWER.search(complaint)
    reason = reason or "uninitialized" in complaint or "no previous extern declaration" in complaint
    if not reason:
        return None
    place = _PLACE.match(complaint)
    if place is None or place[1] not in (SOURCE, HEADER):
        return complaint
    return f"{'header ' if place[1] == HEADER else ''}line {place[2]}: {place[3]}"


def _refused(text: str, options: list[str], suffix: str) -> list[str]:
    found: list[str] = []

    def make(out: Path) -> None:
        with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
            source = Path(scratch) / f"kernel{suffix}"
            source.write_text(text, encoding="utf-8")
            found.extend(compiler.complaints(source, options))
        out.write_text("\n".join(found), encoding="utf-8")

    kept = compiler.cached(f"strict-{compiler.digest(text, *options)}.txt", make)
    lines = kept.read_text(encoding="utf-8").splitlines()
    return list(dict.fromkeys(words for line in lines if (words := _in_words(line))))


def address_spaces(function: Function) -> list[str]:
    """Complaints of C++14 with address spaces as types; a float becomes a bfloat only by a cast."""
    return _refused(without_entry(function), _STRICT, ".cpp")


def opencl(function: Function) -> list[str]:
    """Complaints of C++ for OpenCL, where a pointer stays in its address space even under a cast."""
    return _refused(declarations(function), _OPENCL, ".clcpp")


@cache
def refusals(function: Function) -> tuple[str, ...]:
    """What the three gates have against a kernel, each line with its place."""
    found = lint(function.header, function.body)
    found += address_spaces(function)
    found += opencl(function)
    return tuple(found)
