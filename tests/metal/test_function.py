"""The text of the function, held against what MLX itself prints."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from . import function

BIG, SMALL, SCALAR = mx.zeros((4, 5)), mx.zeros((7,), mx.int32), mx.array(2.5)
INDEX = "uint i = thread_position_in_grid.x;\n"
CASES: dict[str, dict[str, Any]] = {
    "one input": {"source": INDEX + "out0[i] = in0[i];"},
    "small and 0-d inputs": {"source": INDEX + "out0[i] = in0[i] + in1[0] + in2;", "inputs": [BIG, SMALL, SCALAR]},
    "exactly eight elements": {"source": INDEX + "out0[i] = in0[i];", "inputs": [mx.zeros((2, 4))]},
    "shape, strides and ndim": {"source": INDEX + "out0[i] = in0[elem_to_loc(i, in0_shape, in0_strides, in0_ndim)];"},
    "strides only": {"source": INDEX + "out0[i] = in0[i * in0_strides[0]];"},
    "shape of a scalar is no argument": {"source": INDEX + "out0[i] = in0; // in0_shape", "inputs": [SCALAR]},
    "a name that begins another": {
        "source": INDEX + "out0[i] = in1[in1_shape[0]];",
        "inputs": [BIG, BIG],
        "input_names": ["in", "in1"],
    },
    "found in a comment": {"source": INDEX + "out0[i] = 0; // threads_per_simdgroup, in0_ndim"},
    "every attribute": {"source": "".join(f"// {attribute}\n" for attribute in function.ATTRIBUTES) + "out0[0] = 0;"},
    "grid_size in a longer word": {"source": "int my_grid_size_here = 1; out0[0] = my_grid_size_here;"},
    "templates": {
        "source": INDEX + "out0[i] = T(N) + (B ? 1 : 0);",
        "template": [("T", mx.bfloat16), ("N", 12), ("B", True)],
    },
    "negative and false template arguments": {"source": "out0[0] = N;", "template": [("N", -3), ("B", False)]},
    "several template types": {
        "source": "out0[0] = 0;",
        "template": [("A", mx.uint8), ("B", mx.float16), ("C", mx.int64), ("D", mx.bool_), ("E", mx.float32)],
    },
    "atomic outputs": {
        "source": "atomic_fetch_add_explicit(&out0[0], 1, memory_order_relaxed);",
        "atomic": True,
        "dtypes": [mx.int32, mx.uint32],
    },
    "a header": {"source": "out0[0] = f(1);", "header": "inline float f(float x) { return x; }\n"},
    "a header without a last newline": {"source": "out0[0] = f(1);", "header": "inline float f(float x) { return x; }"},
    "types of inputs": {
        "source": "out0[0] = 0;",
        "inputs": [
            mx.zeros((9,), dtype)
            for dtype in (mx.bool_, mx.int8, mx.int16, mx.int32, mx.int64, mx.uint8, mx.uint16, mx.uint32, mx.uint64)
        ],
    },
    "types of outputs": {
        "source": "out0[0] = 0;",
        "dtypes": [mx.float16, mx.bfloat16, mx.float32, mx.bool_, mx.uint64],
    },
    "no inputs": {"source": INDEX + "out0[i] = i;", "inputs": []},
    "lines before and after": {"source": "\n\n    out0[0] = 0;\n  "},
}


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_mlx_own(name: str, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    case = CASES[name]
    inputs, dtypes = case.get("inputs", [BIG]), case.get("dtypes", [mx.float32])
    names = {
        "name": "some_name",
        "input_names": case.get("input_names", [f"in{i}" for i in range(len(inputs))]),
        "output_names": [f"out{i}" for i in range(len(dtypes))],
        "source": case["source"],
        "header": case.get("header", ""),
        "atomic_outputs": case.get("atomic", False),
    }
    call = {"output_shapes": [(3,)] * len(dtypes), "output_dtypes": dtypes, "template": case.get("template", [])}
    kernel = mx.fast.metal_kernel(**names)
    mx.export_function(
        str(tmp_path / "traced.mlxfn"),
        lambda *arrays: kernel(inputs=list(arrays), grid=(3, 1, 1), threadgroup=(3, 1, 1), verbose=True, **call),
        *inputs,
    )
    ctypes.CDLL(None).fflush(None)
    printed = capfd.readouterr().out
    theirs = printed.split("```\n", 1)[1].rsplit("\n```", 1)[0]
    ours = function.build(**names, inputs=inputs, output_dtypes=dtypes, template=call["template"]).text
    assert ours == theirs
