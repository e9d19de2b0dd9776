"""Which drafts the target keeps, and which token follows them: pure functions of arrays.

Nothing here knows of models, caches or random state; every random number is an argument. `docs/round.md` says where
the rules stand in a round.
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
    ids = drafts[:, None].astype(mx.int32)
    p_draft = mx.take_along_axis(p[: ids.shape[0]], ids, axis=-1)[:, 0]
    q_draft = 1.0 if q is None else mx.take_along_axis(q, ids, axis=-1)[:, 0]
    return coins * q_draft < p_draft


def residual(p: mx.array, q: mx.array | None, draft: mx.array) -> mx.array:
    """The distribution after a rejection, unnormalised: (p - q)+, float32 [vocabulary].

    p, q: float32 [vocabulary]; q None for a deterministic draft, whose probability is then taken out of p. `draft`: the
    rejected id, an integer array []. When nothing is left (p equals q: rejected only through rounding), p itself.
    """
    left = mx.where(mx.arange(p.shape[-1]) == draft, 0.0, p) if q is None else mx.maximum(p - q, 0.0)
    return mx.where(left.sum() > 0, left, p)


def draw(weights: mx.array, noise: mx.array) -> mx.array:
    """One id drawn in proportion to `weights` [..., vocabulary] by the Gumbel-max rule, `noise` of the same shape."""
    return mx.argmax(mx.where(weights > 0, mx.log(weights) + noise, -math.inf), axis=-1)
