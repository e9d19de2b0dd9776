"""The text of a Metal function as C++ that clang compiles against the shim.

The source stays as it is but for three things: comments go, float literals get their `f` (Metal has no double), and a
declaration of a threadgroup variable becomes that of a static one in a section of its own.
"""

from __future__ import annotations

import re

from .function import ATTRIBUTES, Argument, Function

SOURCE, HEADER, ENTRY = "source", "header", "entry"
"""What the compiler believes are files: the kernel's body, its header, and our call of it."""

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_FLOAT = re.compile(r"(?<![\w.])((?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+)(?![\w.])")
_THREADGROUP = re.compile(r"((?:^|[;{}\n])\s*)threadgroup\s+([^;{}]*?(?:\{[^;}]*\})?);")
_ATTRIBUTE = re.compile(r"\[\[.*?\]\] ?")
_BRACKETS = re.compile(r"\[[^\]]*\]")

_VALUES = {
    "dispatch_simdgroups_per_threadgroup": "here->dispatch_simdgroups",
    "dispatch_quadgroups_per_threadgroup": "here->dispatch_simdgroups * 8",
    "dispatch_threads_per_threadgroup": "here->dispatch_threads_per_threadgroup",
    "grid_origin": "here->grid_origin",
    "grid_size": "here->threads_per_grid",
    "quadgroup_index_in_threadgroup": "here->index / 4",
    "quadgroups_per_threadgroup": "here->simdgroups * 8",
    "simdgroup_index_in_threadgroup": "here->simdgroup",
    "simdgroups_per_threadgroup": "here->simdgroups",
    "thread_execution_width": "32u",
    "thread_index_in_quadgroup": "here->lane % 4",
    "thread_index_in_simdgroup": "here->lane",
    "thread_index_in_threadgroup": "here->index",
    "thread_position_in_grid": "here->position_in_grid",
    "thread_position_in_threadgroup": "here->position_in_threadgroup",
    "threadgroup_position_in_grid": "here->threadgroup_position",
    "threadgroups_per_grid": "here->threadgroups_per_grid",
    "threads_per_grid": "here->threads_per_grid",
    "threads_per_simdgroup": "32u",
    "threads_per_threadgroup": "here->threads_per_threadgroup",
}


def without_comments(text: str) -> str:
    """Blanks in their place: lines keep their numbers."""
    return _COMMENT.sub(lambda comment: re.sub(r"[^\n]", " ", comment.group()), text)


def mark_threadgroup(text: str) -> str:
    """`threadgroup float x[8];` declares a variable, which C++ must be told; `threadgroup float* p = x;` does not."""

    def mark(found: re.Match[str]) -> str:
        before, declaration = found.groups()
        if re.search(r"[*&(]", _BRACKETS.sub("", declaration.split("=")[0])):
            return found.group()
        return f"{before}METAL_THREADGROUP_VARIABLE {declaration};"

    previous = None
    while previous != text:  # neighbours share the character between them
        previous, text = text, _THREADGROUP.sub(mark, text)
    return text


def float_literals(text: str) -> str:
    """1.0 is a float in Metal; the compiler's option to that effect does not reach into templates."""
    return _FLOAT.sub(r"\1f", text)


def _cplusplus(text: str) -> str:
    return float_literals(mark_threadgroup(without_comments(text)))


def _pass_argument(argument: Argument, position: int) -> str:
    pointer = f"({argument.space} {argument.type}*)buffer[{position}]"
    return f"*{pointer}" if argument.reference else pointer


def _pass_attribute(attribute: str) -> str:
    value = _VALUES[attribute]
    if ATTRIBUTES[attribute] == "uint":
        return value
    return f"(metal::uint3){{{value}[0], {value}[1], {value}[2]}}"


def translation_unit(function: Function) -> str:
    """C++ with `metal_entry(buffers, thread)`, which runs one thread of the kernel."""
    passed = [_pass_argument(argument, position) for position, argument in enumerate(function.arguments)]
    passed += [_pass_attribute(attribute) for attribute in function.attributes]
    signature = without_comments(function.signature)
    return (
        "#include <mlx.h>\n"
        f'#line 1 "{HEADER}"\n{_cplusplus(function.header)}\n'
        f'#line 1 "{ENTRY}"\n{signature}'
        f'#line 1 "{SOURCE}"\n{_cplusplus(function.body)}\n'
        f'#line 100 "{ENTRY}"\n}}\n'
        'extern "C" METAL_UNCHECKED __attribute__((noinline, visibility("default")))\n'
        "void metal_entry(void** buffer, const MetalThread* here) {\n"
        f"  {function.name}{function.template_arguments}({', '.join(passed)});\n"
        "}\n"
    )


def without_entry(function: Function) -> str:
    """The same with MLX's own instantiation in place of a call: types are checked, nothing can run."""
    return (
        "#include <mlx.h>\n"
        f'#line 1 "{HEADER}"\n{_cplusplus(function.header)}\n'
        f'#line 1 "{ENTRY}"\n{function.signature}'
        f'#line 1 "{SOURCE}"\n{_cplusplus(function.body)}\n'
        f'#line 100 "{ENTRY}"\n{_ATTRIBUTE.sub("", function.closing)}'
    )


def _opencl_parameter(argument: Argument) -> tuple[str, str]:
    """A parameter that a kernel of C++ for OpenCL may have, and the declaration in its body that it may need."""
    given = f"{argument.name}_given"
    if argument.reference:
        return (
            f"const {argument.type.replace('bool', 'uchar')} {given}",
            f"const {argument.type} {argument.name} = {given};",
        )
    if atomic := re.fullmatch(r"atomic<(\w+)>", argument.type):
        pointer = f"{argument.space} {argument.type}*"
        return f"{argument.space} {atomic[1]}* {given}", f"{pointer} {argument.name} = ({pointer}){given};"
    return argument.declaration, ""


def declarations(function: Function) -> str:
    """The function as a kernel of C++ for OpenCL, where none is a template and none takes a reference."""
    parameters, locals_ = [], []
    for argument in function.arguments:
        parameter, local = _opencl_parameter(argument)
        parameters.append(parameter)
        locals_.append(local)
    parameters += [f"{ATTRIBUTES[attribute]} {attribute}" for attribute in function.attributes]
    return (
        "#include <mlx.h>\n"
        f'#line 1 "{HEADER}"\n{_cplusplus(function.header)}\n'
        f'#line 1 "{ENTRY}"\n{_template_as_names(function)}'
        f"__kernel void {function.name}({', '.join(parameters)}) {{\n{''.join(locals_)}\n"
        f'#line 1 "{SOURCE}"\n{_cplusplus(function.body)}\n'
        f'#line 100 "{ENTRY}"\n}}\n'
    )


def _template_as_names(function: Function) -> str:
    names = []
    for parameter, value in function.template:
        kind, name = parameter.split()
        names.append(
            f"typedef {value} {name};" if kind == "typename" else f"static constexpr constant {kind} {name} = {value};"
        )
    return "".join(f"{name}\n" for name in names)
