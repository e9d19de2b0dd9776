"""What Metal lacks and a C++ compiler takes without a word, found in the text of a kernel."""

from __future__ import annotations

import re

from .translate import HEADER, mark_threadgroup, without_comments

_RULES = [
    (r"\b(?:double|long\s+double)\b", "Metal has no double"),
    (r"\b\d+\.\d*(?:[eE][-+]?\d+)?[lL]\b", "Metal has no long double"),
    (r"\bstd\s*::", "Metal has no std::"),
    (r"\b(?:goto|new|delete|throw|try|catch|dynamic_cast|typeid|virtual|thread_local|noexcept|asm)\b", "not in Metal"),
    (r"\bstatic\b(?!\s+(?:constexpr|const|constant|inline|METAL_FUNC)\b)", "Metal has no static variables"),
    (r"\bstatic\s+const\s+(?!constant\b|device\b)\w", "a static constant needs the constant address space"),
    (r"\(\s*\*\s*\w+\s*\)\s*\(", "Metal has no function pointers"),
    (r"(?:[=(,]|\breturn)\s*\[\s*[&=\w,\s]*\]\s*\(", "lambdas need Metal 3.2 and newer compilers"),
    (r"\bsimdgroup_(?:matrix|float8x8|half8x8|bfloat8x8|load|store|multiply)\w*", "not emulated"),
    (r"\bprintf\s*\(", "Metal has no printf"),
    (r"[^\x00-\x7f]", "not ASCII"),
]
_TYPE = (
    r"(?:float|half|bfloat|bfloat16_t|float16_t|u?int|u?char|u?short|u?long|u?int(?:8|16|32|64)_t|size_t|bool|[TU]|"
    r"(?:float|half|u?int)[234])"
)
_POINTER = re.compile(rf"(?<![\w:<])((?:const\s+)?{_TYPE}(?:\s+const)?)\s*[*&]\s*\w+\s*[=,;)\[]")
_SPACE = re.compile(r"\b(?:device|constant|threadgroup|thread)\b")
_EXPRESSION = re.compile(r"\breturn\b|[-+*/%=<>]\s*$")
_FUNCTION = re.compile(r"\b(\w+)\s*\(([^(){};]*)\)\s*(?:const\s*)?\{")
_NOT_FUNCTIONS = {"if", "for", "while", "switch", "return"}


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _pointers(text: str) -> list[tuple[int, str]]:
    """Pointers and references that name no address space."""
    found = []
    for match in _POINTER.finditer(text):
        before = text[max(text.rfind(character, 0, match.start()) for character in ";{}(,") + 1 : match.start()]
        if not _SPACE.search(before) and not _EXPRESSION.search(before):
            found.append((match.start(), f"pointer without an address space: {match.group().strip()}"))
    return found


def _body(text: str, brace: int) -> str:
    depth = 0
    for at in range(brace, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[brace:at]
    return text[brace:]


def _recursion(text: str) -> list[tuple[int, str]]:
    found = []
    for match in _FUNCTION.finditer(text):
        name = match[1]
        if name not in _NOT_FUNCTIONS and re.search(rf"(?<![\w.>:]){name}\s*\(", _body(text, match.end() - 1)):
            found.append((match.start(), f"Metal has no recursion: {name}"))
    return found


def _globals(text: str) -> list[tuple[int, str]]:
    """Variables of a header that are not constant."""
    outside, depth = [], 0
    for character in text:
        depth += character == "{"
        outside.append(character if depth == 0 or character == "\n" else " ")
        depth -= character == "}"
    pattern = re.compile(rf"(?:^|[;}}])\s*((?:const\s+)?{_TYPE}\s+\w+(?:\[[^\]]*\])?\s*(?:=[^;]*)?);", re.MULTILINE)
    return [
        (match.start(1), f"a global variable needs the constant address space: {match[1].strip()}")
        for match in pattern.finditer("".join(outside))
    ]


def _of(text: str, is_header: bool) -> list[tuple[int, str]]:
    clean = without_comments(text)
    found = [
        (match.start(), f"{why}: {match.group().strip()}") for rule, why in _RULES for match in re.finditer(rule, clean)
    ]
    found += _pointers(clean)
    if is_header:
        found += _recursion(clean) + _globals(clean)
        marked = mark_threadgroup(clean)
        found += [
            (match.start(), "a threadgroup variable outside the kernel")
            for match in re.finditer("METAL_THREADGROUP_VARIABLE", marked)
        ]
    return [(_line(clean, min(at, len(clean))), what) for at, what in sorted(found)]


def lint(header: str, source: str) -> list[str]:
    """One line for each thing found, with its place as in `line 3` or `header line 3`."""
    found = [f"{HEADER} line {line}: {what}" for line, what in _of(header, is_header=True)]
    return found + [f"line {line}: {what}" for line, what in _of(source, is_header=False)]
