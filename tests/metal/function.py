"""The Metal function that MLX makes of a custom kernel and one call of it, letter for letter.

The rules are those of MLX 0.32 (`write_signature` in mlx/backend/metal/custom_kernel.cpp): the order of the arguments,
which of them are `constant`, what is found in the source by substring, how template arguments go into the name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

Template = Sequence[tuple[str, bool | int | mx.Dtype]]

TYPES = {
    mx.bool_: "bool", mx.int8: "int8_t", mx.int16: "int16_t", mx.int32: "int32_t", mx.int64: "int64_t",
    mx.uint8: "uint8_t", mx.uint16: "uint16_t", mx.uint32: "uint32_t", mx.uint64: "uint64_t",
    mx.float16: "float16_t", mx.bfloat16: "bfloat16_t", mx.float32: "float", mx.complex64: "complex64_t",
}  # fmt: skip

# In this order, and only where the name stands somewhere in the source.
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

SMALL = 8
"""An input of fewer elements is in constant memory."""

Role = Literal["data", "shape", "strides", "ndim", "output"]


@dataclass(frozen=True, slots=True)
class Argument:
    """One buffer argument of the function."""

    name: str
    role: Role
    position: int
    """Of its input among the inputs, or of its output among the outputs."""
    type: str
    space: str
    """With its qualifiers, as in `const device`."""
    reference: bool

    @property
    def declaration(self) -> str:
        return f"{self.space} {self.type}{'&' if self.reference else '*'} {self.name}"


@dataclass(frozen=True, slots=True)
class Function:
    """The parts of the text, in their order."""

    name: str
    header: str
    signature: str
    """From `template` to the brace that opens the body."""
    body: str
    closing: str
    arguments: tuple[Argument, ...]
    attributes: tuple[str, ...]
    template: tuple[tuple[str, str], ...]
    """Each parameter as declared, as in `typename T`, and its argument."""

    @property
    def template_arguments(self) -> str:
        """As in `<float, 4>`; empty without template parameters."""
        return f"<{', '.join(value for _, value in self.template)}>" if self.template else ""

    @property
    def text(self) -> str:
        """As MLX hands it to Metal, its own preamble left out."""
        return self.header + self.signature + self.body + self.closing


def _template(template: Template) -> tuple[tuple[str, str], ...]:
    """Each parameter as declared, and its argument as given."""
    return tuple(
        (f"typename {name}", TYPES[value])
        if isinstance(value, mx.Dtype)
        else (f"{'bool' if isinstance(value, bool) else 'int'} {name}", str(int(value)))
        for name, value in template
    )


def _of_input(name: str, position: int, array: mx.array, source: str) -> list[Argument]:
    scalar = array.ndim == 0
    space = "const constant" if array.size < SMALL else "const device"
    arguments = [Argument(name, "data", position, TYPES[array.dtype], space, scalar)]
    if scalar:
        return arguments
    if f"{name}_shape" in source:
        arguments.append(Argument(f"{name}_shape", "shape", position, "int", "const constant", False))
    if f"{name}_strides" in source:
        arguments.append(Argument(f"{name}_strides", "strides", position, "int64_t", "const constant", False))
    if f"{name}_ndim" in source:
        arguments.append(Argument(f"{name}_ndim", "ndim", position, "int", "const constant", True))
    return arguments


def _in_name(array: mx.array) -> str:
    kind = "s" if array.ndim == 0 else "c" if array.size < SMALL else ""
    return f"_{TYPES[array.dtype]}{kind}"


def build(
    *,
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str,
    atomic_outputs: bool,
    inputs: Sequence[mx.array],
    output_dtypes: Sequence[mx.Dtype],
    template: Template,
) -> Function:
    """The function for a call with these inputs (shapes matter, values do not), outputs and template arguments."""
    given = _template(template)
    declared = f"template <{', '.join(parameter for parameter, _ in given)}>\n" if given else ""
    in_name = "_" + "".join(f"_{value.replace('-', '_')}" for _, value in given) if given else ""
    arguments: list[Argument] = []
    for position, (input_name, array) in enumerate(zip(input_names, inputs, strict=True)):
        arguments += _of_input(input_name, position, array, source)
    for position, (output_name, dtype) in enumerate(zip(output_names, output_dtypes, strict=True)):
        type_ = f"atomic<{TYPES[dtype]}>" if atomic_outputs else TYPES[dtype]
        arguments.append(Argument(output_name, "output", position, type_, "device", False))
    attributes = tuple(attribute for attribute in ATTRIBUTES if attribute in source)
    types = "".join(map(_in_name, inputs)) + "".join(f"_{TYPES[dtype]}" for dtype in output_dtypes)
    full_name = f"custom_kernel_{name}{in_name}{types}"
    parameters = [f"  {argument.declaration} [[buffer({at})]]" for at, argument in enumerate(arguments)]
    parameters += [f"  {ATTRIBUTES[attribute]} {attribute} [[{attribute}]]" for attribute in attributes]
    signature = f"{declared}[[kernel]] void {full_name}(\n" + ",\n".join(parameters) + ") {\n"
    closing = "\n}\n"
    if given:
        instance = f"{full_name}<{', '.join(value for _, value in given)}>"
        closing += f'\ntemplate [[host_name("{full_name}")]] [[kernel]] decltype({instance}) {instance};\n'
    return Function(full_name, header, signature, source, closing, tuple(arguments), attributes, given)
