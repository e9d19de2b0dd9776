"""From logits to the distribution that plain decoding samples from, with mlx-lm's meaning and order of the filters.

top-p, then min-p, then top-k act on log-probabilities; the temperature acts after them (`mlx_lm.sample_utils`). Knows
nothing of drafts. Everything is float32, whatever the model computes in, and every row is treated by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx

from localspec.settings import Settings

_OFF = -math.inf


@dataclass(frozen=True, slots=True)
class Distribution:
    """The target's distribution at each row of a pass."""

    logprobs: mx.array
    """The model's log-probabilities before temperature and filters, float32 [rows, vocabulary]."""
    scores: mx.array
    """Unnormalised log-probabilities to sample from, float32 [rows, vocabulary]; -inf where filtered out."""
    normalizer: mx.array
    """Log-sum-exp of the raw logits, float32 [rows]; not finite exactly when the row is unusable."""
    greedy: bool
    """Whether temperature 0 makes the distribution one-hot at the largest score."""

    def choose(self, noise: mx.array | None) -> mx.array:
        """The token of each row, uint32 [rows]: argmax(scores + noise), ties to the lowest id.

        `noise`: Gumbel, float32 [rows, vocabulary] (the Gumbel-max draw); not read at temperature 0.
        """
        keys = self.scores if self.greedy or noise is None else self.scores + noise
        return mx.argmax(keys, axis=-1)

    def log_probability_of(self, tokens: mx.array) -> mx.array:
        """Log-probability of one token per row under the sampling distribution, float32 [rows]."""
        picked = _pick(self.scores, tokens)
        if self.greedy:
            return mx.where(tokens == mx.argmax(self.scores, axis=-1), 0.0, _OFF)
        return picked - mx.logsumexp(self.scores, axis=-1)

    def probabilities(self) -> mx.array:
        """The sampling distribution itself, float32 [rows, vocabulary]."""
        if self.greedy:
            top = mx.argmax(self.scores, axis=-1, keepdims=True)
            return (mx.arange(self.scores.shape[-1])[None, :] == top).astype(mx.float32)
        return mx.softmax(self.scores, axis=-1, precise=True)

    def logprob_of(self, tokens: mx.array) -> mx.array:
        """The model's log-probability of one token per row, before temperature and filters, float32 [rows]."""
        return _pick(self.logprobs, tokens)


def distribution(logits: mx.array, settings: Settings) -> Distribution:
    """The distribution to sample from at each row of `logits` [rows, vocabulary], any float dtype."""
    logits = logits.astype(mx.float32)
    normalizer = mx.logsumexp(logits, axis=-1)
    logprobs = logits - normalizer[:, None]
    if settings.temperature == 0:
        return Distribution(logprobs, logprobs, normalizer, greedy=True)
    scores = logprobs
    if 0 < settings.top_p < 1:
        scores = keep_top_p(scores, settings.top_p)
    if settings.min_p > 0:
        scores = keep_min_p(scores, settings.min_p)
    if 0 < settings.top_k < logits.shape[-1]:
        scores = keep_top_k(scores, settings.top_k)
    return Distribution(logprobs, _heat(scores, settings.temperature), normalizer, greedy=False)


def keep_top_p(logprobs: mx.array, top_p: float) -> mx.array:
    """Nucleus filter (Holtzman et al. 2020): -inf outside the smallest set of top tokens with mass `top_p`.

    `logprobs` float32 [rows, vocabulary]. Tokens tied with the last one of the set stay, as in mlx-lm.
    """
    ordered = mx.sort(logprobs, axis=-1)
    mass = mx.exp(ordered)
    above = mx.cumsum(mass, axis=-1, reverse=True, inclusive=False)
    total = above[:, :1] + mass[:, :1]
    dropped = (above >= top_p * total).sum(axis=-1, keepdims=True)
    dropped = mx.minimum(dropped, logprobs.shape[-1] - 1)
    threshold = mx.take_along_axis(ordered, dropped, axis=-1)
    return mx.where(logprobs < threshold, _OFF, logprobs)


def keep_min_p(logprobs: mx.array, min_p: float) -> mx.array:
    """-inf where a token has less than `min_p` times the largest probability; float32 [rows, vocabulary]."""
    return mx.where(logprobs < mx.max(logprobs, axis=-1, keepdims=True) + math.log(min_p), _OFF, logprobs)


def keep_top_k(logprobs: mx.array, k: int) -> mx.array:
    """-inf outside the k largest, float32 [rows, vocabulary]; of tokens tied at the edge the lowest ids stay.

    mlx-lm keeps k as well, but leaves open which of the tied ones.
    """
    threshold = mx.min(mx.topk(logprobs, k, axis=-1), axis=-1, keepdims=True)
    larger = logprobs > threshold
    tied = logprobs == threshold
    room = k - larger.sum(axis=-1, keepdims=True)
    keep = larger | (tied & (mx.cumsum(tied.astype(mx.int32), axis=-1) <= room))
    return mx.where(keep, logprobs, _OFF)


def _heat(logprobs: mx.array, temperature: float) -> mx.array:
    # The largest score is moved to 0 first: multiplied by 1e6 (temperature 1e-6) the rest still has its differences.
    shifted = logprobs - mx.max(logprobs, axis=-1, keepdims=True)
    # A temperature so small that its inverse overflows: the top token alone is left, not 0 * inf.
    inverse = min(1.0 / temperature, 3e38)
    return mx.where(shifted == _OFF, _OFF, mx.maximum(shifted * inverse, -3e38))


def _pick(rows: mx.array, tokens: mx.array) -> mx.array:
    return mx.take_along_axis(rows, tokens[:, None].astype(mx.int32), axis=-1)[:, 0]
