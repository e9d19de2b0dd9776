"""Builds Metal kernels for calls: once for each way of building them, so that tests may bring an emulator."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

from localspec.kernels.kernel import source

WIDTH = 32
"""Threads of a simdgroup."""
MOST_THREADS = 384
"""Threads of a threadgroup. A GPU may take 1024; how many it takes of one kernel depends on the registers that its
compiler gives each, and MLX refuses a call with more. No Apple GPU is known to take fewer than these."""


def kernel(
    body: str, headers: tuple[str, ...], inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> Callable[..., Any]:
    """What `mx.fast.metal_kernel` makes of the Metal files `body` and `headers`; looked up anew at each call."""
    return built(mx.fast.metal_kernel, body, headers, inputs, outputs)


@cache
def built(
    build: Callable[..., Any], body: str, headers: tuple[str, ...], inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> Callable[..., Any]:
    """The same, made by `build`. `cache_clear` forgets all of them."""
    made: Callable[..., Any] = build(
        name=f"localspec_{body}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=source(body),
        header="\n".join(source(name) for name in headers),
    )
    return made


def threads_for(items: int) -> int:
    """Threads of a threadgroup that has this many pieces of work: whole simdgroups, at most `MOST_THREADS`."""
    return min(max(-(-items // WIDTH), 1) * WIDTH, MOST_THREADS)
