"""What top-p, min-p and top-k leave of each row, as a threshold instead of a filtered copy of the row.

The Metal kernel finds thresholds without sorting (`metal/truncation.metal` says how), the reference with the filters of
`sampling.py`. Both mean what those filters mean one after the other: a token must pass all of them, of tokens tied with
the last one of top-p all stay, of those tied with the last one of top-k the lowest ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from localspec.kernels.kernel import Heat, Kernel
from localspec.kernels.launch import kernel, threads_for
from localspec.sampling import keep_min_p, keep_top_k, keep_top_p

_OUTPUTS = ("thresholds", "last_tied", "normalizers")


@dataclass(frozen=True, slots=True)
class Cutoff:
    """What truncation leaves of each row: tokens above the threshold, and those at it up to an id.

    Of a row that is not usable (`normalizer` not finite) the rest means nothing.
    """

    threshold: mx.array
    """Float32 [rows], a log-probability before temperature; -inf where all tokens stay."""
    last_tied: mx.array
    """Int32 [rows]: of the tokens exactly at the threshold, those with larger ids go; vocabulary - 1 where none do."""
    normalizer: mx.array
    """Log-sum-exp of the logits, float32 [rows]. What compares log-probabilities with the threshold takes them from
    this one: at the edge of the set a last bit decides."""

    def keeps(self, logprobs: mx.array) -> mx.array:
        """Which tokens stay, bool [rows, vocabulary]; `logprobs`: logits less `normalizer`, float32 of that shape."""
        threshold = self.threshold[:, None]
        ids = mx.arange(logprobs.shape[-1], dtype=mx.int32)[None, :]
        return (logprobs > threshold) | ((logprobs == threshold) & (ids <= self.last_tied[:, None]))


def cutoff(logits: mx.array, *, top_p: float = 1.0, min_p: float = 0.0, top_k: int = 0) -> Cutoff:
    """As `cutoff_reference`, in one Metal dispatch. The thresholds may be smaller than the reference's where no token
    lies between; the same tokens stay, but for those whose place in the set hangs on the rounding of a sum."""
    rows, size = logits.shape
    threads = threads_for(size)
    shares = [top_p if 0 < top_p < 1 else 0.0, math.log(min_p) if min_p > 0 else -math.inf]
    words = [size, top_k if 0 < top_k < size else 0]
    find = kernel("truncation", ("rows", "descent"), ("logits", "words", "shares"), _OUTPUTS)
    threshold, last_tied, normalizer = find(
        inputs=[logits, mx.array(words, mx.uint32), mx.array(shares, mx.float32)],
        grid=(threads * rows, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows,)] * 3,
        output_dtypes=[mx.float32, mx.int32, mx.float32],
    )
    return Cutoff(threshold, last_tied, normalizer)


def cutoff_reference(logits: mx.array, *, top_p: float = 1.0, min_p: float = 0.0, top_k: int = 0) -> Cutoff:
    """The cutoff of each row of `logits` [rows, vocabulary], any float dtype, in MLX's operations.

    top_p, min_p, top_k: as in `Settings`, values that are off included. The threshold is the smallest log-probability
    that stays.
    """
    rows, size = logits.shape
    logits = logits.astype(mx.float32)
    normalizer = mx.logsumexp(logits, axis=-1)
    kept = logits - normalizer[:, None]
    if 0 < top_p < 1:
        kept = keep_top_p(kept, top_p)
    if min_p > 0:
        kept = keep_min_p(kept, min_p)
    if 0 < top_k < size:
        kept = keep_top_k(kept, top_k)
    stays = kept > -math.inf
    threshold = mx.min(mx.where(stays, kept, math.inf), axis=-1, keepdims=True)
    ids = mx.broadcast_to(mx.arange(size, dtype=mx.int32)[None, :], (rows, size))
    last = mx.max(mx.where(kept == threshold, ids, 0), axis=-1)
    return Cutoff(threshold[:, 0], last, normalizer)


_FILTERS: tuple[dict[str, float], ...] = (
    {"top_p": 0.9},
    {"top_p": 0.3, "top_k": 50},
    {"min_p": 0.05},
    {"top_k": 1},
    {"top_k": 20},
    {"top_p": 0.99, "min_p": 0.001, "top_k": 7},
)


def self_test() -> str | None:
    """Every dtype, sizes with a tail, masked, peaked and tied rows: the same tokens stay as with the reference.

    Logits are whole 64ths, so that equal log-probabilities are so on both sides. Where the sets differ, the mass of the
    smaller one must be top-p up to the rounding of sums.
    """
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        for size in (33, 1003, 32_000):
            normal = 3 * mx.random.normal((4, size), key=mx.random.key(size))
            masked = mx.where(mx.arange(size) % 17 == 3, normal[1], -math.inf)
            peaked = mx.where(mx.arange(size) == size // 2, 60.0, normal[2])
            logits = mx.round(64 * mx.stack([normal[0], masked, peaked])) / 64
            logits = mx.concatenate([logits, mx.round(normal[3:])]).astype(dtype)
            for filters in _FILTERS:
                found = _difference(logits, filters)
                if found is not None:
                    return f"{dtype}, {size} tokens, {filters}: {found}"
    return None


def _difference(logits: mx.array, filters: dict[str, float]) -> str | None:
    ours, theirs = cutoff(logits, **filters), cutoff_reference(logits, **filters)  # type: ignore[arg-type]
    logprobs = logits.astype(mx.float32) - theirs.normalizer[:, None]
    # As in `verify_trial`: MLX adds a row up in few lanes on a CPU.
    rounding = 2.0**-14 + logits.shape[-1] * 2.0**-26
    if not mx.all(mx.abs(ours.normalizer - theirs.normalizer) <= rounding).item():
        return f"log-sum-exp {ours.normalizer.tolist()}, not {theirs.normalizer.tolist()}"
    possible = logprobs > -math.inf
    here = ours.keeps(logits.astype(mx.float32) - ours.normalizer[:, None]) & possible
    there = theirs.keeps(logprobs) & possible
    mass = mx.where(here & there, mx.exp(logprobs), 0.0).sum(axis=-1)
    doubtful = mx.abs(mass - filters.get("top_p", math.inf)) <= rounding
    if not mx.all(mx.all(here == there, axis=-1) | doubtful).item():
        return f"{here.sum(axis=-1).tolist()} tokens stay, not {there.sum(axis=-1).tolist()}"
    return None


def heats() -> list[Heat]:
    """For plain decoding and for a pass with four drafts, at the vocabulary of a Qwen model."""
    filters: tuple[dict[str, float], ...] = ({"top_p": 0.9}, {"top_k": 40})
    return [_heat(rows, one) for rows in (1, 5) for one in filters]


def _heat(rows: int, filters: dict[str, float]) -> Heat:
    logits = (3 * mx.random.normal((rows, 151_936), key=mx.random.key(rows))).astype(mx.bfloat16)
    mx.eval(logits)

    def work(find: Callable[..., Cutoff]) -> list[mx.array]:
        found = find(logits, **filters)
        return [found.threshold, found.last_tied, found.normalizer]

    name = f"{' '.join(filters)}, {rows} rows"
    return Heat(name, lambda: work(cutoff), lambda: work(cutoff_reference))


KERNEL = Kernel(
    name="truncation",
    purpose="top-p and top-k without sorting, for the verify kernels",
    self_test=self_test,
    heats=heats,
)
