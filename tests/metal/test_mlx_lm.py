"""Kernels that others wrote: those of mlx-lm, unmodified, against its own references. One of them has a race."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gated_delta
from mlx_lm.models.bitlinear_layers import make_bitlinear_kernel
from mlx_lm.tuner import losses

from .emulator import Kind, MetalError, emulated
from .running import SCHEDULES, as_numpy

RNG = np.random.default_rng(2)


def _normal(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(RNG.standard_normal(shape).astype(np.float32)).astype(dtype)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_gated_delta(dtype: mx.Dtype, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, steps, key_heads, heads, width = 1, 3, 1, 2, 64
    q, k = (_normal(batch, steps, key_heads, width, dtype=dtype) * 0.1 for _ in range(2))
    v = _normal(batch, steps, heads, width, dtype=dtype)
    g, beta = (
        mx.sigmoid(_normal(batch, steps, heads, dtype=dtype)),
        mx.sigmoid(_normal(batch, steps, heads, dtype=dtype)),
    )
    state = _normal(batch, heads, width, width)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    with emulated(schedule=schedule):
        kernel = gated_delta._make_gated_delta_kernel()
        y, new_state = kernel(
            inputs=[q, k, v, g, beta, state, steps],
            template=[
                ("InT", dtype),
                ("StT", mx.float32),
                ("Dk", width),
                ("Dv", width),
                ("Hk", key_heads),
                ("Hv", heads),
            ],
            grid=(32, width, batch * heads),
            threadgroup=(32, 4, 1),
            output_shapes=[(batch, steps, heads, width), state.shape],
            output_dtypes=[dtype, mx.float32],
        )
    expected, expected_state = gated_delta.gated_delta_ops(*(x.astype(mx.float32) for x in (q, k, v, g, beta)), state)
    tolerance = 2e-5 if dtype == mx.float32 else 1e-2
    np.testing.assert_allclose(as_numpy(y), as_numpy(expected), atol=tolerance)
    np.testing.assert_allclose(as_numpy(new_state), as_numpy(expected_state), atol=tolerance)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
def test_bitlinear(dtype: mx.Dtype) -> None:
    rows, wide, out_wide = 2, 256, 12
    x = _normal(rows, wide, dtype=dtype)
    packed = mx.array(RNG.integers(0, 256, (out_wide // 4, wide)).astype(np.uint8))
    with emulated():
        (out,) = make_bitlinear_kernel()(
            inputs=[x, packed, mx.array([0.5], dtype)],
            template=[("T", dtype), ("invert_weight_scales", False), ("in_features", wide), ("out_features", out_wide)],
            grid=(32, rows * out_wide // 4, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(rows, out_wide)],
            output_dtypes=[dtype],
        )
    weights = np.concatenate([(np.array(packed).astype(int) >> 2 * k & 3) - 1 for k in range(4)])
    np.testing.assert_allclose(as_numpy(out), as_numpy(x) @ weights.T * 0.5, atol=1e-4 if dtype == mx.float32 else 2e-2)


def _kl_forward(**options: Any) -> mx.array:
    q, p = _normal(2, 5000), _normal(2, 5000)
    with emulated(**options):
        (out,) = losses._make_kl_forward_kernel()(
            inputs=[q, p],
            template=[("T", mx.float32), ("V", 5000)],
            grid=(1024, 2, 1),
            threadgroup=(1024, 1, 1),
            output_shapes=[(2,)],
            output_dtypes=[mx.float32],
        )
    log_q, log_p = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (q, p))
    np.testing.assert_allclose(as_numpy(out), as_numpy((mx.exp(log_p) * (log_p - log_q)).sum(-1)), rtol=1e-4)
    return out


def test_the_race_in_kl_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its maxima are still being read when the sums are written to the same array."""
    monkeypatch.setattr(losses, "can_run_metal", lambda: True)
    with pytest.raises(MetalError) as found:
        _kl_forward()
    assert Kind.RACE_THREADGROUP in found.value.kinds
    assert "shared[" in str(found.value)
