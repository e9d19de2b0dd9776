"""Puts into a compiled kernel, in the compiler's intermediate language (LLVM IR, as text), what the checker needs.

Each call of the checker gets the number of its place in the kernel, looked up through the functions it was inlined
from; threadgroup variables get a redzone; tables of them and of the constants are added. The IR is the one form of a
program where all of this is one pass over lines, the same for every processor and object format.
"""

from __future__ import annotations

import json
import re
from dataclasses import astuple, dataclass, field

from .translate import HEADER, SOURCE

REDZONE = 256

_METADATA = re.compile(r"^!(\d+) = (?:distinct )?!(DI\w+)\((.*)\)$", re.MULTILINE)
_FIELD = re.compile(r'(\w+): ("[^"]*"|[^,]+)')
_CALL = re.compile(
    r"^(\s*)((?:%[\w.]+ = )?(?:tail |musttail |notail )?call )(.*?)@(__tsan_|__ubsan_handle_|metal_)(\w+)\((.*)\)(.*)$"
)
_PLACE = re.compile(r"!dbg !(\d+)")
_GLOBAL = re.compile(r"^(@\S+) = (.*?)\b(global|constant) (.*)$", re.MULTILINE)
_SECTION = re.compile(r'section "(?:__DATA,)?tgmem"')
_ALIGNMENT = re.compile(r"\b(?:load|store) .*, align (\d+)")
_ACCESS = re.compile(r"(?:unaligned_)?(read_write|read|write)(\d+)$")

UNDEFINED = {
    "shift_out_of_bounds": "shift by more than the width of the type",
    "divrem_overflow": "division by zero or overflow",
    "float_cast_overflow": "float out of the range of the integer type",
    "add_overflow": "signed overflow in an addition",
    "sub_overflow": "signed overflow in a subtraction",
    "mul_overflow": "signed overflow in a multiplication",
    "negate_overflow": "signed overflow in a negation",
}
UNDEFINED_CODES = list(UNDEFINED)


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the kernel. `line` counts from the first line of `file`, which is "source" or "header"; 0: unknown."""

    file: str
    line: int
    caller: int = 0
    """For a line of the header: the line of the source that it was inlined into, 0 when it was not."""


@dataclass(slots=True)
class Instrumented:
    text: str
    sites: list[Site] = field(default_factory=lambda: [Site(SOURCE, 0)])
    variables: list[tuple[str, int]] = field(default_factory=list)
    """The threadgroup variables, in the order of their table: name, and bytes of an element."""


class _Places:
    """The debug metadata of a module: which line a call belongs to."""

    def __init__(self, module: str) -> None:
        self._nodes = {number: dict(_FIELD.findall(fields)) for number, _, fields in _METADATA.findall(module)}

    def _file(self, number: str) -> str:
        node = self._nodes.get(number, {})
        while "filename" not in node:
            parent = node.get("file") or node.get("scope")
            if parent is None:
                return ""
            node = self._nodes.get(parent.lstrip("!"), {})
        return node["filename"].strip('"')

    def site(self, number: str) -> Site:
        at: str | None = number
        found: Site | None = None
        while at is not None:
            node = self._nodes.get(at, {})
            file, line = self._file(node.get("scope", "").lstrip("!")), int(node.get("line", "0"))
            if file == SOURCE and found is None:
                return Site(SOURCE, line)
            if file == SOURCE and found is not None:
                return Site(HEADER, found.line, line)
            if file == HEADER and found is None:
                found = Site(HEADER, line)
            at = node["inlinedAt"].lstrip("!") if "inlinedAt" in node else None
        return found or Site(SOURCE, 0)


def _checked_call(family: str, name: str, arguments: str, site: int, access_line: str) -> str | None:
    """The call in place of a sanitizer's; None: the line goes. `access_line`: the one after it, with the access."""
    if family == "metal_":
        return f"{name}({arguments.rpartition(',')[0]}, i32 {site})"
    if family == "__tsan_":
        if access := _ACCESS.match(name):
            aligned = _ALIGNMENT.search(access_line)
            return f"{access[1]}({arguments}, i32 {access[2]}, i32 {aligned[1] if aligned else 1}, i32 {site})"
        if name in ("memcpy", "memmove", "memset"):
            return f"{name}({arguments}, i32 {site})"
        return None
    if name.startswith("out_of_bounds"):
        return f"bad_index(i32 {site})"
    code = UNDEFINED_CODES.index(name.removesuffix("_abort"))
    return f"undefined(i32 {code}, i32 {site})"


_HOOKS_WITH_SITE = {"simd", "threadgroup_barrier", "simdgroup_barrier", "atomic"}
_DECLARATIONS = """
declare void @metal_read(ptr, i32, i32, i32)
declare void @metal_write(ptr, i32, i32, i32)
declare void @metal_read_write(ptr, i32, i32, i32)
declare ptr @metal_memcpy(ptr, ptr, i64, i32)
declare ptr @metal_memmove(ptr, ptr, i64, i32)
declare ptr @metal_memset(ptr, i32, i64, i32)
declare void @metal_undefined(i32, i32)
declare void @metal_bad_index(i32)
"""


def _split_type(rest: str) -> tuple[str, str]:
    """A global's type and what follows it, from the text after `global`."""
    depth = 0
    for at, character in enumerate(rest):
        depth += character in "[{<("
        depth -= character in "]}>)"
        if depth == 0 and character in " ,":
            return rest[:at], rest[at:].lstrip()
    return rest, ""


def _table(name: str, entries: list[tuple[str, str]]) -> str:
    size = "i64 ptrtoint (ptr getelementptr ({}, ptr null, i64 1) to i64)"
    rows = [f"{{ ptr, i64 }} {{ ptr {symbol}, {size.format(type_)} }}" for symbol, type_ in entries]
    count = len(rows)
    value = "[" + ", ".join(rows) + "]" if rows else "zeroinitializer"
    return f"@{name} = global [{count} x {{ ptr, i64 }}] {value}\n@{name}_count = global i32 {count}\n"


def _readable(symbol: str) -> str:
    """`_ZZ…E5s_max` is the variable `s_max` of a function."""
    if mangled := re.search(r"E(\d+)(\w+)$", symbol):
        length = int(mangled[1])
        return mangled[2][:length]
    return symbol.lstrip("@")


def _element_bytes(type_: str) -> int:
    """Of `[8 x float]` and the like; 0 where it is not a matter of one scalar type."""
    scalar = type_.rstrip("]>").split(" x ")[-1]
    return {"float": 4, "i32": 4, "half": 2, "bfloat": 2, "i16": 2, "i64": 8, "i8": 1}.get(scalar, 0)


def _globals(module: str, out: Instrumented) -> str:
    variables: list[tuple[str, str]] = []
    constants: list[tuple[str, str]] = []

    def visit(found: re.Match[str]) -> str:
        symbol, qualifiers, kind, rest = found.groups()
        type_, after = _split_type(rest)
        if _SECTION.search(after):
            variables.append((symbol, type_))
            out.variables.append((_readable(symbol), _element_bytes(type_)))
            after = after[after.index(", section") :]
            return f"{symbol} = {qualifiers}global {{ {type_}, [{REDZONE} x i8] }} zeroinitializer{after}"
        if kind == "constant" and "external" not in qualifiers and not symbol.startswith("@llvm."):
            constants.append((symbol, type_))
        return found.group()

    module = _GLOBAL.sub(visit, module)
    return module + "\n" + _table("metal_variables", variables) + _table("metal_constants", constants)


def _description(out: Instrumented) -> str:
    """What the emulator has to know of the kernel, kept in the kernel: one file in the cache."""
    written = json.dumps({"sites": [astuple(site) for site in out.sites], "variables": out.variables}).encode() + b"\0"
    escaped = "".join(f"\\{byte:02X}" for byte in written)
    return f'@metal_description = constant [{len(written)} x i8] c"{escaped}"\n'


def instrument(module: str) -> str:
    """`module`: LLVM IR, compiled from `translate.translation_unit`, with or without the sanitizers' calls."""
    out = Instrumented("")
    places = _Places(module)
    lines = []
    all_lines = module.split("\n")
    for line, next_line in zip(all_lines, [*all_lines[1:], ""], strict=True):
        call = _CALL.match(line)
        if call is None or (call[4] == "metal_" and call[5] not in _HOOKS_WITH_SITE):
            lines.append(line)
            continue
        indent, start, type_, family, name, arguments, rest = call.groups()
        place = _PLACE.search(rest)
        out.sites.append(places.site(place[1]) if place else Site(SOURCE, 0))
        replaced = _checked_call(family, name, arguments, len(out.sites) - 1, next_line)
        if replaced is not None:
            lines.append(f"{indent}{start}{type_}@metal_{replaced}{rest}")
    out.text = _globals("\n".join(lines), out) + _DECLARATIONS + _description(out)
    return out.text
