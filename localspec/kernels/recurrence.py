"""The gated delta rule's state after the first rows of a recorded pass, without the outputs of these rows.

S_t = S_{t-1} g_t + (v_t - S_{t-1} g_t k_t) beta_t k_t, row by row of S (Yang, Kautz, Hatamizadeh 2024, "Gated Delta
Networks"). When drafts are rejected, the recurrent layers' state is computed again from what the pass recorded
(`caches/recorder.py`); mlx-lm's kernel does that too, and computes and writes the outputs with it, which nobody reads.
The arithmetic is that of mlx-lm's kernel: the state is, bit for bit, what a pass of the kept rows alone leaves.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import mlx.core as mx

from localspec.kernels.kernel import Heat, Kernel
from localspec.kernels.launch import WIDTH, kernel
from localspec.wrappers import Place, Wrappers

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
_SIMDGROUPS = 4


def replay(state: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, kept: int) -> mx.array:
    """The state after the first `kept` of T recorded rows, 0 to T, by the Metal kernel. Lazy.

    state: [B, Hv, Dv, Dk], Dk a multiple of 32; k: [B, T, Hk, Dk], Hv a multiple of Hk; v: [B, T, Hv, Dv]; g: [B, T,
    Hv], or [B, T, Hv, Dk] for a gate per number; beta: [B, T, Hv]; each float32, float16 or bfloat16. Returns the
    new state, of the old one's shape and dtype. It is kept in float32 until the last row is done, and rounded then.
    """
    batch, value_heads, value_width, key_width = state.shape
    out: mx.array = kernel("gated_delta_replay", (), ("state_in", "k", "v", "g", "beta", "kept"), ("state_out",))(
        inputs=[state, k, v, g, beta, mx.array(kept, mx.int32)],
        template=[
            ("StateT", state.dtype),
            ("Dk", key_width),
            ("Dv", value_width),
            ("Hk", k.shape[2]),
            ("Hv", value_heads),
            ("GATES", key_width if g.ndim == 4 else 1),
        ],
        grid=(WIDTH, value_width, batch * value_heads),
        threadgroup=(WIDTH, _SIMDGROUPS, 1),
        output_shapes=[state.shape],
        output_dtypes=[state.dtype],
    )[0]
    return out


def reference(state: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, kept: int) -> mx.array:
    """The same by MLX's operations, which may add in another order."""
    new = state.astype(mx.float32)
    k, v, g, beta = (array.astype(mx.float32) for array in (k, v, g, beta))
    k = mx.repeat(k, state.shape[1] // k.shape[2], axis=2)
    for t in range(kept):
        key = k[:, t, :, None, :]
        new = new * (g[:, t, :, None, None] if g.ndim == 3 else g[:, t, :, None, :])
        delta = (v[:, t] - (new * key).sum(-1)) * beta[:, t, :, None]
        new = new + key * delta[..., None]
    return new.astype(state.dtype)


class _Replay(threading.local):
    active = False


_replay = _Replay()


@contextmanager
def replaying() -> Iterator[None]:
    """Have gated delta layers that mlx-lm would run in its own kernel advance their state by ours, in this thread."""
    try:
        _wrappers.enter()
        _replay.active = True
        yield
    finally:
        _replay.active = False
        _wrappers.leave()


def _wrapped(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    theirs: tuple[mx.array, mx.array] = _wrappers.original("gated_delta_kernel")(q, k, v, g, beta, state, mask)
    if not _replay.active or mask is not None or any(a.dtype not in DTYPES for a in (k, v, g, beta, state)):
        return theirs
    # Their outputs are lazy: computed if somebody should ask for them after all.
    return theirs[0], replay(state, k, v, g, beta, k.shape[1])


def _places() -> list[Place]:
    from mlx_lm.models import gated_delta

    # Models import `gated_delta_update` by name; that looks this one up in its own module whenever it is called.
    return [(gated_delta, "gated_delta_kernel", _wrapped)]


_wrappers = Wrappers(_places)


def self_test() -> str | None:
    """All dtypes, both kinds of gate, all numbers of kept rows: near the reference, and with mlx-lm's kernel's bits."""
    for dtype, gates, width in product(DTYPES, ("one gate", "a gate per number"), (64, 128)):
        found = difference(dtype, gates == "one gate", width)
        if found is not None:
            return f"replay: {found} ({str(dtype).removeprefix('mlx.core.')}, {gates}, width {width})"
    return None


def difference(dtype: mx.Dtype, scalar_gate: bool, width: int) -> str | None:
    """One line on the first difference between the kernel and what it should give, for rows and state of `dtype`."""
    rows = 4
    for state_dtype in {mx.float32, dtype}:
        q, k, v, g, beta, state = example(rows, 2, 4, 24, width, dtype, scalar_gate, state_dtype)
        for kept in range(rows + 1):
            new = replay(state, k, v, g, beta, kept)
            off = mx.abs(new.astype(mx.float32) - reference(state, k, v, g, beta, kept).astype(mx.float32))
            if not mx.all(off <= error_bound(state, v, kept)).item():  # NaN is no agreement
                return f"{kept} rows, off by {mx.max(off).item():.3g}"
            if kept and _theirs() is not None:
                theirs = _theirs()(*(a[:, :kept] for a in (q, k, v, g, beta)), state)[1]
                if not mx.array_equal(new, theirs).item():
                    return f"{kept} rows, other bits than mlx-lm's kernel"
    return None


def error_bound(state: mx.array, v: mx.array, kept: int) -> mx.array:
    """How far two results may be apart where |k| <= 1, 0 <= g, beta <= 1, whatever the order of their sums.

    In a row s of the state, a step takes s to (I - beta k k^T) g s + beta v k, which does not enlarge an error that is
    there, and adds at most (Dk + 8) u (|s| + |v|) with u = 2^-24. No |s| exceeds |s_0| + the sum of all |v|. Both
    results have that error, and are rounded to the state's dtype.
    """
    size = mx.max(mx.linalg.norm(state.astype(mx.float32), axis=-1)) + mx.sum(
        mx.max(mx.abs(v[:, :kept].astype(mx.float32)), axis=(0, 2, 3))
    )
    last = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}[state.dtype]
    return size * 2 * (kept * (state.shape[-1] + 8) * 2.0**-24 + last)


def example(
    rows: int,
    key_heads: int,
    value_heads: int,
    value_width: int,
    key_width: int,
    dtype: mx.Dtype,
    scalar_gate: bool = True,
    state_dtype: mx.Dtype = mx.float32,
) -> tuple[mx.array, ...]:
    """Random q, k, v, g, beta and state, as a layer has them: |k| < 1, gates between 0 and 1."""
    seeds = mx.random.split(mx.random.key(rows), 6)
    q = mx.random.normal((1, rows, key_heads, key_width), key=seeds[0])
    k = mx.random.normal(q.shape, key=seeds[1])
    k = 0.95 * k / mx.linalg.norm(k, axis=-1, keepdims=True)
    v = mx.random.normal((1, rows, value_heads, value_width), key=seeds[2])
    g = mx.random.uniform(0.5, 1.0, (*v.shape[:3], key_width)[: 3 if scalar_gate else 4], key=seeds[3])
    beta = mx.random.uniform(0.2, 1.0, v.shape[:3], key=seeds[4])
    state = mx.random.normal((1, value_heads, value_width, key_width), key=seeds[5])
    return (*(a.astype(dtype) for a in (q, k, v)), g, beta.astype(dtype), state.astype(state_dtype))


def _theirs() -> Any:
    """mlx-lm's function that runs its kernels; None where it could not build them."""
    from mlx_lm.models import gated_delta

    return gated_delta.gated_delta_kernel if gated_delta._gated_delta_kernel is not None else None


def heats() -> list[Heat]:
    """A layer of 32 heads of 128 x 128, 8 rows recorded, all kept."""
    q, k, v, g, beta, state = example(8, 16, 32, 128, 128, mx.bfloat16)
    mx.eval(q, k, v, g, beta, state)
    theirs = _theirs()
    return [
        Heat(
            "8 rows, 32 heads, 128 x 128",
            lambda: [replay(state, k, v, g, beta, 8)],
            lambda: [theirs(q, k, v, g, beta, state)[1]],
        )
    ]


KERNEL = Kernel(
    name="replay",
    purpose="the gated delta rule's state after the kept rows of a pass",
    self_test=self_test,
    heats=heats,
)
