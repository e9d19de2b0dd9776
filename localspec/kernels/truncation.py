"""What top-p, min-p and top-k leave of each row, as a threshold instead of a filtered copy of the row.

The Metal kernel finds thresholds without sorting (`metal/truncation.metal` says how), the reference with the filters of
`sampling.py`. Both mean what those filters mean one after the other: a token must pass all of them, of tokens tied with
the last one of top-p all stay, of those tied with the last one of top-k the lowest ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx

from localspec.sampling import keep_min_p, keep_top_k, keep_top_p


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
