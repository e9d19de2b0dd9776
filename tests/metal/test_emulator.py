"""The emulator as a stand-in for `mx.fast.metal_kernel`, what it needs, and what happens when a kernel goes astray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from . import compiler, function
from .emulator import Kind, emulated
from .instrument import instrument
from .running import BARRIER, problems, run
from .translate import translation_unit

TESTS = Path(__file__).parents[1]
CALL: dict[str, Any] = {
    "inputs": [mx.ones((9,))],
    "grid": (9, 1, 1),
    "threadgroup": (9, 1, 1),
    "output_shapes": [(9,)],
    "output_dtypes": [mx.float32],
}
COPY = {"name": "copy", "input_names": ["x"], "output_names": ["out"]}
COPY["source"] = "uint i = thread_position_in_grid.x; out[i] = x[i];"  # type: ignore[assignment]


def test_it_is_there_inside_and_gone_outside() -> None:
    real = mx.fast.metal_kernel
    with emulated() as device:
        outputs = mx.fast.metal_kernel(**COPY)(**CALL)
        assert mx.fast.metal_kernel is not real
    assert mx.fast.metal_kernel is real
    assert outputs[0].tolist() == [1.0] * 9
    assert len(device.dispatches) == 1


def test_it_is_gone_after_an_error() -> None:
    real = mx.fast.metal_kernel
    with pytest.raises(KeyError), emulated():
        raise KeyError
    assert mx.fast.metal_kernel is real


WRONG_CALLS = {
    "too many inputs": {"inputs": [mx.ones((9,))] * 2},
    "no output shapes": {"output_shapes": []},
    "no output types": {"output_dtypes": []},
    "two numbers for a grid": {"grid": (9, 1)},
    "a type that is none": {"output_dtypes": ["float32"]},
    "a float as template argument": {"template": [("T", 1.5)]},
    "an unknown argument": {"shape": (9,)},
    "a string as input": {"inputs": ["x"]},
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_calls_raise_what_mlx_raises(name: str) -> None:
    call = CALL | WRONG_CALLS[name]
    with pytest.raises((ValueError, TypeError), match=r".+") as theirs:
        mx.fast.metal_kernel(**COPY)(**call)
    with emulated(), pytest.raises(theirs.type) as ours:
        mx.fast.metal_kernel(**COPY)(**call)
    assert str(ours.value).split("Invoked with")[0] == str(theirs.value).split("Invoked with")[0]


@pytest.mark.parametrize(
    "making", [{"output_names": []}, {"compile_options": {"math_mode": "loose"}}, {"input_names": "x"}, {"body": "x"}]
)
def test_wrong_kernels_raise_what_mlx_raises(making: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=r".+") as theirs:
        mx.fast.metal_kernel(**(COPY | making))
    with emulated(), pytest.raises(theirs.type):
        mx.fast.metal_kernel(**(COPY | making))


def test_no_more_than_1024_threads_and_31_buffers() -> None:
    with emulated(), pytest.raises(ValueError, match="1024"):
        mx.fast.metal_kernel(**COPY)(**(CALL | {"threadgroup": (2048, 1, 1)}))
    names = [f"x{k}" for k in range(31)]
    with emulated(), pytest.raises(ValueError, match="31"):
        mx.fast.metal_kernel(**(COPY | {"input_names": names}))(**(CALL | {"inputs": [mx.ones((9,))] * 31}))


def test_unknown_schedules_and_reductions() -> None:
    with pytest.raises(ValueError, match="schedule 'fair'"), emulated(schedule="fair"):
        pass
    with pytest.raises(ValueError, match="reduction 'pairs'"), emulated(reduction="pairs"):
        pass


def test_verbose_prints_the_function(capsys: pytest.CaptureFixture[str]) -> None:
    with emulated():
        mx.fast.metal_kernel(**COPY)(**CALL, verbose=True)
    assert "[[kernel]] void custom_kernel_copy_float_float(" in capsys.readouterr().out


def test_the_order_of_threads_is_the_schedule() -> None:
    source = """
        uint i = thread_position_in_grid.x;
        out[i] = atomic_fetch_add_explicit((device atomic_uint*)ticket, 1u, memory_order_relaxed);
    """

    def order(schedule: str, seed: int = 0) -> list[int]:
        outputs = {"out": ((256,), mx.uint32), "ticket": ((1,), mx.uint32)}
        return run(
            source, {}, outputs, (256, 1, 1), (128, 1, 1), schedule=schedule, seed=seed, check=False, init_value=0
        )[0].tolist()

    assert order("fifo") == list(range(256))
    assert order("lifo") == list(reversed(range(256)))
    for schedule in ("priority", "random"):
        assert order(schedule, 1) == order(schedule, 1)
        assert len({tuple(order(schedule, seed)) for seed in range(5)}) > 1
        assert sorted(order(schedule, 1)) == list(range(256))
    tickets = order("priority", 1)
    for first in range(0, 256, 32):
        of_simdgroup = tickets[first : first + 32]
        assert max(of_simdgroup) - min(of_simdgroup) == 31, "a simdgroup runs as long as it can"


def test_memory_that_nobody_wrote_is_nan_without_the_checker() -> None:
    source = "threadgroup float s[9]; out[thread_position_in_grid.x] = s[thread_position_in_grid.x];"
    source += "if (thread_position_in_grid.x > 3) half_written[thread_position_in_grid.x] = 1.0f;"
    outputs = {"out": ((9,), mx.float32), "half_written": ((9,), mx.float32)}
    out, half_written = run(source, {}, outputs, (9, 1, 1), (9, 1, 1), check=False)
    assert mx.isnan(out).tolist() == [True] * 9
    assert mx.isnan(half_written).tolist() == [True] * 4 + [False] * 5


# ---- kernels that go astray


def test_a_crash_is_reported_and_the_process_lives() -> None:
    def call(**options: Any) -> None:
        source = "if (thread_position_in_grid.x == 3) __builtin_trap();\nout[thread_position_in_grid.x] = 1.0f;"
        run(source, {}, {"out": ((9,), mx.float32)}, (9, 1, 1), (9, 1, 1), strict=False, **options)

    for check in (True, False):
        kinds, message = problems(call, check=check)
        assert kinds == {Kind.CRASH}
        assert "thread 3" in message


def test_an_access_to_unmapped_memory_without_the_checker() -> None:
    def call(**options: Any) -> None:
        source = "out[thread_position_in_grid.x] = *(const device float*)((ulong)x & 0xfff);"
        run(source, {"x": mx.ones((9,))}, {"out": ((9,), mx.float32)}, (9, 1, 1), (9, 1, 1), strict=False, **options)

    assert problems(call, check=False)[0] == {Kind.CRASH}
    assert problems(call)[0] == {Kind.OUT_OF_BOUNDS}


def test_a_kernel_that_does_not_end() -> None:
    def call(**options: Any) -> None:
        source = "while (x[0] < 2.0f || threads_per_grid.x > 0u) {\n  out[thread_position_in_grid.x] = x[0];\n}"
        run(source, {"x": mx.ones((9,))}, {"out": ((9,), mx.float32)}, (9, 1, 1), (9, 1, 1), strict=False, **options)

    assert problems(call, seconds=1, schedule="lifo")[0] == {Kind.ENDLESS}


def test_a_stack_that_overflows() -> None:
    def call(**options: Any) -> None:
        source = """
            volatile float big[40000];
            for (int k = 0; k < 40000; k++) big[k] = float(k);
            out[thread_position_in_grid.x] = big[thread_position_in_grid.x];
        """
        run(source, {}, {"out": ((9,), mx.float32)}, (9, 1, 1), (9, 1, 1), strict=False, **options)

    assert problems(call)[0] & {Kind.STACK_OVERFLOW, Kind.OUT_OF_BOUNDS, Kind.CRASH}


# ---- the compiler and its cache


def _python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(TESTS)} | variables
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


_RUN_ONE = """
import mlx.core as mx
from metal.running import run
print(run("out[0] = 1.0f + threads_per_simdgroup;", {}, {"out": ((1,), mx.float32)}, (1, 1, 1), (1, 1, 1))[0].item())
"""


def test_no_compiler_is_one_clear_line_and_no_skip(tmp_path: Path) -> None:
    hide = "import importlib.util as u\nf = u.find_spec\nu.find_spec = lambda n: None if n == 'ziglang' else f(n)\n"
    done = _python(hide + _RUN_ONE, METAL_CACHE=str(tmp_path / "none"), METAL_CXX="")
    assert done.returncode == 1
    assert "CompilerError: no C++ compiler for Metal kernels: pip install ziglang" in done.stderr.splitlines()[-1]
    done = _python(_RUN_ONE, METAL_CACHE=str(tmp_path / "none"), METAL_CXX="/nowhere/clang++")
    last = done.stderr.splitlines()[-1]
    assert "CompilerError: no C++ compiler for Metal kernels: /nowhere/clang++ cannot be run" in last


def test_two_processes_share_an_empty_cache(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(TESTS), "METAL_CACHE": str(tmp_path)}
    both = [
        subprocess.Popen([sys.executable, "-c", _RUN_ONE], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    assert [process.communicate()[0].strip() for process in both] == ["33.0", "33.0"]
    assert not list(tmp_path.glob("making-*")), "nothing half made is left"
    kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.so")}
    assert len(kept) == 2, "the runtime and the kernel"
    assert _python(_RUN_ONE, METAL_CACHE=str(tmp_path)).stdout.strip() == "33.0"
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.so")} == kept, "and nothing is made twice"


@pytest.mark.parametrize("target", ["aarch64-linux-gnu", "arm64-apple-macos13"])
@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
def test_kernels_compile_for_other_machines(target: str, check: bool, tmp_path: Path) -> None:
    body = f"threadgroup float s[64]; uint t = thread_index_in_threadgroup; s[t] = x[t]; {BARRIER} out[t] = half(s[t]);"
    made = function.build(
        **(COPY | {"source": body}),
        header="",
        atomic_outputs=False,
        inputs=[mx.ones((64,), mx.bfloat16)],
        output_dtypes=[mx.float16],
        template=(),
    )
    source, module, compiled = (tmp_path / f"kernel.{kind}" for kind in ("cpp", "ll", "o"))
    source.write_text(translation_unit(made))
    compiler.to_ir(source, module, check, ["-target", target])
    text = instrument(module.read_text())
    assert b'"variables": [["s", 4]]'.hex().upper() in text.replace("\\", "")
    assert text.count("call void @metal_write(") == (2 if check else 0)
    module.write_text(text)
    compiler.from_ir(module, compiled, ["-target", target])
    assert compiled.stat().st_size > 0


@pytest.mark.parametrize("target", ["aarch64-linux-gnu", "aarch64-macos", "x86_64-linux-gnu", "x86_64-macos"])
def test_the_runtime_compiles_for_other_machines(target: str, tmp_path: Path) -> None:
    compiler.compile_runtime(tmp_path / "runtime.o", ["-target", target])
    assert (tmp_path / "runtime.o").stat().st_size > 10_000
