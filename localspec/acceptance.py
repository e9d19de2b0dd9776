"""Which drafts the target keeps, and which token follows them: pure functions of arrays.

Nothing here knows of models, caches or random state; every random number is an argument. `docs/acceptance.md` derives
the rules and says what each of them keeps, `docs/round.md` where they stand in a round.

Rows that are not finite are the caller's to find: no rule accepts a draft by one, but none can raise either.
"""

from __future__ import annotations

import math

import mlx.core as mx


def accept_coupled(tokens: list[int], drafts: list[int]) -> int:
    """How many leading drafts equal the tokens that plain decoding emits at their rows.

    `tokens`: n+1 ids, argmax(log p + g) at each row, with the noise g of the row's position; `drafts`: n ids. With k
    accepted, `tokens[:k+1]` are the tokens to emit: they are plain decoding's whatever the drafts were, since g does
    not depend on them (Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant Speculative
    Decoding", 2024). Row k+1 and later were computed behind a wrong draft and are not read.
    """
    for k, draft in enumerate(drafts):
        if tokens[k] != draft:
            return k
    return len(drafts)


def accept_rejection(p: mx.array, q: mx.array | None, drafts: mx.array, coins: mx.array) -> mx.array:
    """Which drafts pass `u < min(1, p(x)/q(x))`, bool [n] (Leviathan et al. 2023, algorithm 1; Chen et al. 2023).

    p: target probabilities, float32 [n, vocabulary] (or more rows; the rest is not read). q: the distribution that each
    draft was drawn from, float32 [n, vocabulary]; None for deterministic drafts (one-hot q). drafts: ids [n]. coins:
    uniforms in [0, 1), float32 [n]. The drafts before the first False are the accepted ones.

    Written u * q < p, strictly: no division by zero, and a coin of exactly 0 does not accept a token of probability 0.
    """
    p_draft, q_draft = _at_drafts(p, q, drafts)
    return coins * q_draft < p_draft


def block_weights(p: mx.array, q: mx.array | None, drafts: mx.array) -> mx.array:
    """w_0 = 1, w_i = min(w_{i-1} p(x_i)/q(x_i), 1), float32 [n+1] (Sun et al. 2024, "Block Verification", algorithm 2).

    w_i is the chance that block verification keeps at least the first i drafts, given that they were drawn. p, q,
    drafts: as in `accept_rejection`. A ratio 0/0, which no drafter draws, counts as 0.
    """
    p_draft, q_draft = _at_drafts(p, q, drafts)
    ratios = mx.where(p_draft > 0, p_draft / q_draft, p_draft)  # p 0, or not a number: as it is
    weights = [mx.array(1.0)]
    for i in range(drafts.shape[0]):
        weights.append(mx.minimum(weights[-1] * ratios[i], 1.0))
    return mx.stack(weights)


def block_chances(p: mx.array, q: mx.array | None, drafts: mx.array) -> mx.array:
    """h_i = Z_i / (Z_i + 1 - w_i) for i < n, with Z_i = sum_x (w_i p_{i+1}(x) - q_{i+1}(x))+; h_n = w_n.

    float32 [n], entry i-1 is h_i: the chance that the coin of draft i passes (Sun et al. 2024, algorithm 2). p, q,
    drafts: as in `accept_rejection`. A one-hot q has Z_i = w_i (1 - p_{i+1}(x_{i+1})).
    """
    n = drafts.shape[0]
    weights = block_weights(p, q, drafts)
    inner = weights[1:n]
    if q is None:
        p_draft, _ = _at_drafts(p, q, drafts)
        left = inner * mx.maximum(1.0 - p_draft[1:], 0.0)
    else:
        left = mx.maximum(inner[:, None] * p[1:n] - q[1:n], 0.0).sum(axis=-1)
    doubt = left + (1.0 - inner)
    # Nothing left and no doubt: p equals q at the next place, so that draft is kept too, and h_i has no say.
    return mx.concatenate([mx.where(doubt == 0, 1.0, left / doubt), weights[n:]])


def accept_block(p: mx.array, q: mx.array | None, drafts: mx.array, coins: mx.array) -> mx.array:
    """Which drafts pass `u_i < h_i`, bool [n]: the drafts up to the *last* True are accepted (Sun et al. 2024).

    p, q, drafts, coins: as in `accept_rejection`; h: `block_chances`. Strictly less: a coin of exactly 0 does not
    accept what has no chance. With k < n accepted, the next token is drawn from `residual(w_k p, q, draft k+1)`, w_k
    of `block_weights`; with all of them, from p. The coins and drafts behind the last True have been judged by, so no
    later round may use them again.
    """
    return coins < block_chances(p, q, drafts)


def residual(p: mx.array, q: mx.array | None, draft: mx.array) -> mx.array:
    """The distribution after a rejection, unnormalised: (p - q)+, float32 [vocabulary].

    p, q: float32 [vocabulary], p times w_k in the block rule; q None for a deterministic draft, whose probability is
    then taken out of p. `draft`: the rejected id, an integer array []. When nothing is left (p equals q: rejected only
    through rounding; or q is not a number), p itself.
    """
    left = mx.where(mx.arange(p.shape[-1]) == draft, 0.0, p) if q is None else mx.maximum(p - q, 0.0)
    return mx.where(left.sum() > 0, left, p)


def draw(weights: mx.array, noise: mx.array) -> mx.array:
    """One id drawn in proportion to `weights` [..., vocabulary] by the Gumbel-max rule, `noise` of the same shape."""
    return mx.argmax(mx.where(weights > 0, mx.log(weights) + noise, -math.inf), axis=-1)


def _at_drafts(p: mx.array, q: mx.array | None, drafts: mx.array) -> tuple[mx.array, mx.array]:
    """p and q of each draft, float32 [n]."""
    ids = drafts[:, None].astype(mx.int32)
    p_draft = mx.take_along_axis(p[: ids.shape[0]], ids, axis=-1)[:, 0]
    return p_draft, mx.ones_like(p_draft) if q is None else mx.take_along_axis(q, ids, axis=-1)[:, 0]
