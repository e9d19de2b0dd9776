"""From logits to the distribution that plain decoding samples from, with mlx-lm's meaning and order of the filters.

top-p, then min-p, then XTC, then top-k act on log-probabilities; the temperature acts after them
(`mlx_lm.sample_utils`). Knows nothing of drafts, nor of what changes logits before (`penalties.py`). Everything is
float32, whatever the model computes in, and every row is treated by itself. `docs/sampling.md` has the whole order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from localspec.settings import Settings

_OFF = -math.inf


@dataclass(frozen=True, slots=True)
class Distribution:
    """The target's distribution at each row of a pass."""

    logprobs: mx.array
    """Log-probabilities before temperature and filters, float32 [rows, vocabulary]."""
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
        """Log-probability of one token per row, before temperature and filters, float32 [rows]."""
        return _pick(self.logprobs, tokens)

    def top(self, count: int) -> tuple[mx.array, mx.array]:
        """The `count` likeliest tokens of each row before temperature and filters, of equal ones the lowest ids.

        (ids int32 [rows, n] in ascending order, their log-probabilities float32 [rows, n]); n is `count`, or the
        vocabulary's size where that is less. One selection over all rows, no sort of the vocabulary.
        """
        rows, size = self.logprobs.shape
        ids = mx.broadcast_to(mx.arange(size, dtype=mx.int32)[None], (rows, size))
        if count < size:
            kept = mx.where(_among_top_k(self.logprobs, count), ids, size)
            ids = mx.sort(mx.partition(kept, count - 1, axis=-1)[:, :count], axis=-1)
            # Only a row that is not a number lacks some: it is never reported, but must not be read out of bounds.
            ids = mx.minimum(ids, size - 1)
        return ids, mx.take_along_axis(self.logprobs, ids, axis=-1)


def distribution(
    logits: mx.array, settings: Settings, coins: mx.array | None = None, exempt: Sequence[int] = ()
) -> Distribution:
    """The distribution to sample from at each row of `logits` [rows, vocabulary], any float dtype.

    coins: uniforms, float32 [rows], one per row's position; only XTC needs them. exempt: ids that XTC never drops.
    Raises ValueError when the settings have XTC act and there are no coins.
    """
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
    if settings.xtc_probability > 0:
        if coins is None:
            raise ValueError("XTC needs a coin for each row")
        scores = exclude_top_choices(scores, settings.xtc_threshold, coins <= settings.xtc_probability, exempt)
    if 0 < settings.top_k < logits.shape[-1]:
        scores = keep_top_k(scores, settings.top_k)
    return Distribution(logprobs, heat(scores, settings.temperature), normalizer, greedy=False)


def ranked(top: tuple[mx.array, ...], rows: int) -> list[tuple[tuple[int, float], ...]]:
    """What `Distribution.top` gave for the first `rows` rows, as (id, log-probability) pairs: the likeliest first, of
    equal ones the lowest id. Empty ones where `top` is empty."""
    if not top:
        return [()] * rows
    ids, values = (_rows(part[:rows]) for part in top)
    return [
        tuple(sorted(zip(*row, strict=True), key=lambda pair: (-pair[1], pair[0])))
        for row in zip(ids, values, strict=True)
    ]


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
    return mx.where(_among_top_k(logprobs, k), logprobs, _OFF)


def exclude_top_choices(logprobs: mx.array, threshold: float, act: mx.array, exempt: Sequence[int] = ()) -> mx.array:
    """XTC ("exclude top choices"): -inf for all tokens above `threshold` but the least probable of them.

    logprobs: float32 [rows, vocabulary]; probabilities are those normalised anew, without what earlier filters took.
    act: bool [rows], where to do it at all. Tokens tied with the least probable one stay, and so do `exempt` ids. As in
    mlx-lm, but for the coin: it tosses one for all rows, from the global random state.
    """
    probabilities = mx.softmax(logprobs, axis=-1)
    least = mx.min(mx.where(probabilities > threshold, probabilities, math.inf), axis=-1, keepdims=True)
    excluded = (probabilities > least) & act[:, None]
    known = [token for token in exempt if token < logprobs.shape[-1]]
    if known:
        excluded[:, mx.array(known)] = False
    return mx.where(excluded, _OFF, logprobs)


def _among_top_k(logprobs: mx.array, k: int) -> mx.array:
    """Whether a token is one of the k largest of its row, bool [rows, vocabulary]; of tied ones the lowest ids are."""
    threshold = mx.min(mx.topk(logprobs, k, axis=-1), axis=-1, keepdims=True)
    larger = logprobs > threshold
    tied = logprobs == threshold
    room = k - larger.sum(axis=-1, keepdims=True)
    return larger | (tied & (mx.cumsum(tied.astype(mx.int32), axis=-1) <= room))


def heat(logprobs: mx.array, temperature: float) -> mx.array:
    """Scores to sample from at a temperature above 0, float32 [rows, vocabulary]: 0 for the largest of a row."""
    # The largest score is moved to 0 first: multiplied by 1e6 (temperature 1e-6) the rest still has its differences.
    shifted = logprobs - mx.max(logprobs, axis=-1, keepdims=True)
    # A temperature so small that its inverse overflows: the top token alone is left, not 0 * inf.
    inverse = min(1.0 / temperature, 3e38)
    return mx.where(shifted == _OFF, _OFF, mx.maximum(shifted * inverse, -3e38))


def _pick(rows: mx.array, tokens: mx.array) -> mx.array:
    return mx.take_along_axis(rows, tokens[:, None].astype(mx.int32), axis=-1)[:, 0]


def _rows(values: mx.array) -> list[list[Any]]:
    return values.tolist()  # type: ignore[return-value]
