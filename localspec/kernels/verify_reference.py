"""The verify kernels' answers in MLX's operations: what runs where there is no Metal, and the kernels' oracle.

Made of the functions that plain decoding and the acceptance rules are made of; nothing is computed in a second way.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import mlx.core as mx

from localspec.acceptance import accept_rejection, draw, residual
from localspec.kernels.truncation import Cutoff
from localspec.noise import Noise, Stream, round_keys
from localspec.sampling import Distribution, heat

DraftDistribution = mx.array | tuple[mx.array, mx.array] | None
"""q of n drafts: None where each was certain (one-hot); float32 [n, vocabulary]; or of a drafter that has only some of
the target's tokens, (float32 [n, W], int32 [W]): the ids of its W columns, ascending. All q are finite."""


class Coupled(NamedTuple):
    """What the coupled rule finds in each row of a pass."""

    tokens: mx.array
    """Uint32 [rows]: the token that plain decoding emits there."""
    log_p: mx.array
    """Float32 [rows]: its log-probability after filters and temperature; 0 at temperature 0."""
    logprob: mx.array
    """Float32 [rows]: the same before filters and temperature."""
    normalizer: mx.array
    """Log-sum-exp of the logits, float32 [rows]; not finite exactly when the row is unusable, its token is then any."""
    gap: mx.array
    """Float32 [rows]: by how much the token's score with its noise (at temperature 0 its log-probability) is above the
    next one's; inf where there is no other."""
    accepted: mx.array
    """Int32 []: how many leading drafts equal the tokens."""


class Judged(NamedTuple):
    """What the rejection rule finds in each row of a pass with n drafts."""

    passed: mx.array
    """Bool [n]: whether the draft passes its coin."""
    accepted: mx.array
    """Int32 []: how many leading drafts pass."""
    tokens: mx.array
    """Uint32 [n+1]: the token to emit if the text ends at this row: of the residual, in the last row of p itself."""
    log_p: mx.array
    """Float32 [n+1]: its log-probability under p, after filters and temperature."""
    logprob: mx.array
    """Float32 [n+1]: the same before filters and temperature."""
    draft_log_p: mx.array
    """Float32 [n]: as `log_p`, of the drafts."""
    draft_logprob: mx.array
    """Float32 [n]: as `logprob`, of the drafts."""
    normalizer: mx.array
    """Log-sum-exp of the logits, float32 [n+1]; not finite exactly when the row is unusable."""


def coupled_reference(
    logits: mx.array,
    cutoff: Cutoff | None,
    *,
    temperature: float,
    noise: Noise,
    position: int,
    drafts: mx.array | None = None,
) -> Coupled:
    """Judge drafts by the coupled rule (`acceptance.accept_coupled`), or choose tokens where there are none.

    logits: [rows, vocabulary], any float dtype; row i decides position + i. cutoff: None where nothing is filtered, not
    read at temperature 0. drafts: ids [n], fewer than rows; draft i is judged by row i.
    """
    rows, size = logits.shape
    p = cut_distribution(logits, cutoff, temperature)
    gumbel = None if p.greedy else noise.gumbel(range(position, position + rows), size)
    tokens = p.choose(gumbel)
    keys = p.scores if gumbel is None else p.scores + gumbel
    accepted = mx.array(0, mx.int32) if drafts is None else _leading(tokens[: drafts.size] == drafts)
    return Coupled(tokens, p.log_probability_of(tokens), p.logprob_of(tokens), p.normalizer, _gap(keys), accepted)


def rejection_reference(
    logits: mx.array,
    cutoff: Cutoff | None,
    drafts: mx.array,
    q: DraftDistribution,
    *,
    temperature: float,
    noise: Noise,
    position: int,
) -> Judged:
    """Judge drafts by the rejection rule (`acceptance.accept_rejection`).

    logits: [n+1, vocabulary], any float dtype; row i decides position + i. drafts: ids [n], at least one.
    cutoff: as in `coupled_reference`.
    """
    n, size = drafts.size, logits.shape[-1]
    rows = cut_distribution(logits, cutoff, temperature)
    p, dense = rows.probabilities(), dense_columns(q, size)
    passed = accept_rejection(p, dense, drafts, noise.uniform(round_keys(position, n)))
    tokens = []
    for i in range(n + 1):
        weights = residual(p[i], None if dense is None else dense[i], drafts[i]) if i < n else p[i]
        tokens.append(draw(weights, noise.gumbel([position + i], size, Stream.RESIDUAL)[0]))
    final = mx.stack(tokens).astype(mx.uint32)
    front = Distribution(rows.logprobs[:n], rows.scores[:n], rows.normalizer[:n], rows.greedy)
    return Judged(
        passed,
        _leading(passed),
        final,
        rows.log_probability_of(final),
        rows.logprob_of(final),
        front.log_probability_of(drafts),
        front.logprob_of(drafts),
        rows.normalizer,
    )


def cut_distribution(logits: mx.array, cutoff: Cutoff | None, temperature: float) -> Distribution:
    """As `sampling.distribution`, of rows for which it is known what the filters leave."""
    logits = logits.astype(mx.float32)
    normalizer = mx.logsumexp(logits, axis=-1) if cutoff is None else cutoff.normalizer
    logprobs = logits - normalizer[:, None]
    if temperature == 0:
        return Distribution(logprobs, logprobs, normalizer, greedy=True)
    kept = logprobs if cutoff is None else mx.where(cutoff.keeps(logprobs), logprobs, -math.inf)
    return Distribution(logprobs, heat(kept, temperature), normalizer, greedy=False)


def _leading(passed: mx.array) -> mx.array:
    """How many stand before the first False, int32 []."""
    return mx.cumprod(passed.astype(mx.int32)).sum().astype(mx.int32)


def _gap(keys: mx.array) -> mx.array:
    if keys.shape[-1] == 1:
        return mx.full(keys.shape[:1], math.inf)
    top = mx.topk(keys, 2, axis=-1)
    return mx.max(top, axis=-1) - mx.min(top, axis=-1)


def dense_columns(q: DraftDistribution, size: int) -> mx.array | None:
    """q of each draft over the target's tokens, float32 [n, size]; None where all drafts were certain."""
    if not isinstance(q, tuple):
        return q
    values, ids = q
    dense = mx.zeros((values.shape[0], size))
    dense[:, ids] = values
    return dense
