"""Source that Apple's compiler is documented to refuse, which a gate must refuse too, and source that all accept."""

from __future__ import annotations

import mlx.core as mx
import pytest

from . import function, strict
from .emulator import Kind
from .lint import lint
from .running import problems, run

REFUSED = {
    "device pointer to a small input": ("const device float* p = small; out[0] = p[0];", ""),
    "pointer without an address space": ("const float* p = x; out[0] = p[0];", ""),
    "threadgroup pointer to device memory": ("threadgroup float* p = out; p[0] = 1.0f;", ""),
    "cast from constant to device": ("out[0] = ((const device float*)small)[0];", ""),
    "const dropped": ("device float* p = x; p[0] = 1.0f;", ""),
    "assignment to an input": ("x[0] = 1.0f; out[0] = 0.0f;", ""),
    "helper pointer without an address space": (
        "float a[2] = {1, 2}; out[0] = f(a);", "inline float f(float* p) { return p[0]; }\n"
    ),
    "device pointer for a thread parameter": (
        "out[0] = f(x);", "inline float f(const thread float* p) { return p[0]; }\n"
    ),
    "float to bfloat without a cast": ("bfloat b = x[0]; out[0] = b;", ""),
    "float to a bfloat template type": ("T b = x[0]; out[0] = static_cast<float>(b);", ""),
    "half to bfloat without a cast": ("half h = half(x[0]); bfloat b = h; out[0] = b;", ""),
    "double": ("double d = x[0]; out[0] = float(d);", ""),
    "std::": ("out[0] = std::max(x[0], x[1]);", ""),
    "max of int and uint": ("int a = 3; out[0] = max(a, thread_position_in_grid.x);", ""),
    "max of float and half": ("half a = 3; out[0] = max(x[0], a);", ""),
    "exp of an int": ("out[0] = metal::exp(3);", ""),
    "goto": ("again: out[0] = 0; if (x[0] > 1e9f) goto again;", ""),
    "lambda": ("auto f = [](float v) { return v; }; out[0] = f(x[0]);", ""),
    "new": ("device float* p = new float[3]; out[0] = p[0];", ""),
    "virtual function": ("A a; out[0] = a.f();", "struct A { virtual float f() { return 1; } };\n"),
    "exception": ("try { out[0] = 1; } catch (...) {}", ""),
    "function pointer": ("float (*f)(float) = g; out[0] = f(x[0]);", "inline float g(float v) { return v; }\n"),
    "static variable": ("static int n = 0; out[0] = n++;", ""),
    "global variable": ("out[0] = G;", "float G = 1;\n"),
    "threadgroup variable in a helper": (
        "out[0] = f(x[0]);", "inline float f(float v) { threadgroup float b[4]; b[0] = v; return b[0]; }\n"
    ),
    "threadgroup variable with a value": ("threadgroup float b[4] = {0, 0, 0, 0}; out[0] = b[0];", ""),
    "threadgroup array sized at run time": ("threadgroup float b[n]; b[0] = 1; out[0] = b[0];", ""),
    "printf": ('printf("x"); out[0] = 1;', ""),
    "if constexpr": ("if constexpr (sizeof(T) == 2) out[0] = 1; else out[0] = 2;", ""),
    "structured binding": ("struct P { float a, b; } p{1, 2}; auto [a, b] = p; out[0] = a + b;", ""),
    "recursion": ("out[0] = fib(5);", "inline int fib(int n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }\n"),
    "attribute misspelt": ("out[thread_pos_in_grid.x] = 0;", ""),
    "uninitialised variable": ("float s; if (x[0] > 0) s = 1; out[0] = s;", ""),
    "not ASCII": ("out[0] = 1; // é".replace("// ", "int é = 1; "), ""),
    "simdgroup_matrix": ("simdgroup_float8x8 m; simdgroup_load(m, x); out[0] = 1;", ""),
}  # fmt: skip

ACCEPTED = {
    "negative template argument": ("out[0] = N;", ""),
    "vector constructor, swizzle, dot": (
        "float4 a = float4(1, 2, x[0], 4); float4 b = a.wzyx; out[0] = dot(a, b) + float4(a.xy, b.zw).z;", ""
    ),
    "vector load through a cast": ("float4 a = *(const device float4*)x; out[0] = a.x;", ""),
    "as_type": ("out[0] = as_type<float>(as_type<uint>(x[0]) ^ 1u);", ""),
    "table of constants": ("out[0] = TABLE[2];", "constant float TABLE[3] = {1, 2, 3};\n"),
    "comparison of vectors": ("bool4 m = float4(1, 2, 3, 4) > float4(2); out[0] = m.z ? 1.0f : 0.0f;", ""),
    "threadgroup pointer variable": (
        "threadgroup float b[8]; threadgroup float* p = b + 4; p[0] = 1; out[0] = b[4];", ""
    ),
    "half literal": ("half h = 1.5h; out[0] = h;", ""),
    "threadgroup atomics": (
        "threadgroup atomic_uint c; atomic_store_explicit(&c, 0u, memory_order_relaxed);"
        "atomic_fetch_add_explicit(&c, 2u, memory_order_relaxed);"
        "out[0] = atomic_load_explicit(&c, memory_order_relaxed);",
        "",
    ),
    "struct in device memory": (
        "const device P* p = (const device P*)x; P q = p[0]; out[0] = q.a;", "struct P { float a; float b; };\n"
    ),
    "member function on a device object": (
        "const device P* p = (const device P*)x; out[0] = p->f();",
        "struct P { float a; float f() const device { return a; } };\n",
    ),
    "votes": ("out[0] = float(simd_all(true)) + float(ulong(simd_ballot(true)));", ""),
    "precise and fast": ("out[0] = metal::precise::exp(metal::fast::log(x[0]));", ""),
    "auto for an input of either space": ("auto p = small; out[0] = p[0];", ""),
    "helper for any address space": (
        "out[0] = first(x) + first(small);", "template <typename P>\ninline float first(P p) {\n  return p[0];\n}\n"
    ),
    "multiplication that looks like a pointer": ("int a = 2, b = 3; out[0] = a * b; int c = (a & b); out[1] = c;", ""),
    "static constants": ("out[0] = F;", "static constant constexpr float F = 2.0f;\n"),
}  # fmt: skip


def _refusals(body: str, header: str) -> list[str]:
    made = function.build(
        name="kernel",
        input_names=["x", "small", "n"],
        output_names=["out"],
        source=body,
        header=header,
        atomic_outputs=False,
        inputs=[mx.ones((64,)), mx.ones((3,)), mx.array(4, dtype=mx.int32)],
        output_dtypes=[mx.float32],
        template=[("T", mx.bfloat16), ("N", -1)],
    )
    return list(strict.refusals(made))


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    assert _refusals(*REFUSED[name])


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    assert _refusals(*ACCEPTED[name]) == []


def test_a_refusal_says_where() -> None:
    assert lint("inline int f() {\n  static int n;\n  return n;\n}\n", "\nfloat* p = x;") == [
        "header line 2: Metal has no static variables: static",
        "line 2: pointer without an address space: float* p =",
    ]
    (complaint,) = _refusals("\n\nthreadgroup float* p = out;\np[0] = 1.0f;", "")[:1]
    assert complaint.startswith("line 3: cannot initialize")


def test_every_dispatch_goes_through_the_gates() -> None:
    def call(**options: object) -> None:
        run("static int n; n = 1; out[0] = n;", {}, {"out": ((1,), mx.int32)}, (1, 1, 1), (1, 1, 1), **options)

    kinds, message = problems(call)
    assert kinds == {Kind.REJECTED}
    assert "line 1: Metal has no static variables" in message
    kinds, _ = problems(call, strict=False)
    assert Kind.REJECTED not in kinds
