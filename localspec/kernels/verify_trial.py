"""Self-test and race of the verify kernels. Knows their calls only as functions that should answer as the references.

Floats differ by rounding, and so may a token where two nearly tie. How much that can be: a score (logprob - top) / T is
right to u (|logprob| + |top|) / T with u = 2^-23, and both sides are; a kernel's Gumbel value and MLX's are within
2^-19; logarithms of sums are right to 2^-14 in a kernel, where a thread adds at most 700 numbers one by one, and to
2^-26 times their number in MLX, which adds in few lanes on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from localspec.acceptance import draw, residual
from localspec.kernels.kernel import Heat
from localspec.kernels.truncation import Cutoff, cutoff_reference
from localspec.kernels.verify_reference import (
    Coupled,
    DraftDistribution,
    Judged,
    coupled_reference,
    cut_distribution,
    dense_columns,
    rejection_reference,
)
from localspec.noise import Noise, Stream, round_keys
from localspec.sampling import Distribution

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
TEMPERATURES = (0.0, 0.7, 1e-6, 1e4)
_NOISE_ERROR = 2.0**-19
_LARGEST_KEY = 32.0
"""A score above -_LARGEST_KEY may win, others cannot: Gumbel values are between -3.2 and 22.9."""


@dataclass(frozen=True, slots=True)
class Case:
    """Rows to judge, and by what."""

    name: str
    logits: mx.array
    cutoff: Cutoff | None
    drafts: mx.array
    q: DraftDistribution
    temperature: float
    noise: Noise
    position: int


def sum_error(size: int) -> float:
    """By how much the logarithms of two sums over a row of `size` tokens may differ."""
    return 2.0**-14 + size * 2.0**-26


def cases() -> Iterator[Case]:
    """Every dtype and temperature, two sizes with a tail and a large one, masked, peaked, tied rows, each kind of q.

    MLX hands inputs of fewer than 8 numbers to a kernel in another way, so there are passes of 5 rows and of 10.
    """
    count = 0
    for dtype in DTYPES:
        for size, passes in ((33, 2), (1003, 1), (32_000, 1)):
            logits = mx.concatenate([rows_of(size, count + i) for i in range(passes)]).astype(dtype)
            for temperature in TEMPERATURES:
                count += 1
                drafts = mx.argmax(logits[:-1] + mx.random.normal(logits[:-1].shape, key=mx.random.key(count)), axis=-1)
                cutoff = None if count % 3 == 0 else cutoff_reference(logits, top_p=0.95, top_k=40 * (count % 2))
                name = f"{dtype}, {size} tokens, temperature {temperature:g}"
                q = _q(count, drafts.size, size)
                yield Case(name, logits, cutoff, drafts, q, temperature, Noise(2**40 + count), 1000 * count)


def rows_of(size: int, seed: int) -> mx.array:
    """Float32 [5, size]: two plain rows, one with most tokens ruled out, one peaked, one of ties."""
    normal = 3 * mx.random.normal((5, size), key=mx.random.key(seed))
    ids = mx.arange(size)
    masked = mx.where(ids % 17 == 3, normal[2], -math.inf)
    peaked = mx.where(ids == size // 2, 60.0, normal[3])
    return mx.stack([normal[0], normal[1], masked, peaked, mx.round(normal[4])])


def _q(kind: int, drafts: int, size: int) -> DraftDistribution:
    if kind % 3 == 0:
        return None
    width = size if kind % 3 == 1 else size // 3
    q = mx.softmax(3 * mx.random.normal((drafts, width), key=mx.random.key(kind)), axis=-1)
    return q if width == size else (q, mx.arange(width, dtype=mx.int32) * 3)


def coupled_fault(coupled: Callable[..., Coupled], *, greedy: bool) -> str | None:
    """One line about the first answer that is not the reference's up to rounding; None when there is none.

    greedy: at temperature 0, or at all others.
    """
    for case in cases():
        if (case.temperature == 0) != greedy:
            continue
        ours, theirs = (
            judge(
                case.logits,
                case.cutoff,
                temperature=case.temperature,
                noise=case.noise,
                position=case.position,
                drafts=case.drafts,
            )
            for judge in (coupled, coupled_reference)
        )
        found = coupled_difference(case, ours, theirs)
        if found is not None:
            return f"{case.name}: {found}"
    return None


def rejection_fault(rejection: Callable[..., Judged]) -> str | None:
    """As `coupled_fault`, at all temperatures."""
    for case in cases():
        ours, theirs = (
            judge(
                case.logits,
                case.cutoff,
                case.drafts,
                case.q,
                temperature=case.temperature,
                noise=case.noise,
                position=case.position,
            )
            for judge in (rejection, rejection_reference)
        )
        found = rejection_difference(case, ours, theirs)
        if found is not None:
            return f"{case.name}: {found}"
    return None


def coupled_difference(case: Case, ours: Coupled, theirs: Coupled) -> str | None:
    """What of a case the coupled kernel has answered wrongly, in a few words."""
    p = cut_distribution(case.logits, case.cutoff, case.temperature)
    rows, size = p.scores.shape
    error = _error(p, case.temperature)
    noise = 0.0 if p.greedy else case.noise.gumbel(range(case.position, case.position + rows), size)
    if not _may_win(ours.tokens, p.scores + noise, mx.broadcast_to(error, p.scores.shape)):
        return f"tokens {ours.tokens.tolist()}, not {theirs.tokens.tolist()}"
    kept: list[Any] = (ours.tokens[: case.drafts.size] == case.drafts).tolist()  # type: ignore[assignment]
    if ours.accepted.item() != [*kept, False].index(False):
        return f"{ours.accepted.item()} drafts accepted, of which match {kept}"
    same, error = ours.tokens == theirs.tokens, error[:, 0] + sum_error(size)
    return _floats(ours, theirs, ("normalizer", "logprob", "log_p", "gap"), error, same)


def rejection_difference(case: Case, ours: Judged, theirs: Judged) -> str | None:
    """What of a case the rejection kernel has answered wrongly, in a few words."""
    n = case.drafts.size
    rows = cut_distribution(case.logits, case.cutoff, case.temperature)
    p, error = rows.probabilities(), _error(rows, case.temperature)
    q = dense_columns(case.q, p.shape[-1])
    coins = case.noise.uniform(round_keys(case.position, n))
    uncertain = sum_error(p.shape[-1])
    at = case.drafts[:, None].astype(mx.int32)
    p_draft = mx.take_along_axis(p[:n], at, axis=-1)[:, 0]
    q_draft = mx.ones_like(p_draft) if q is None else mx.take_along_axis(q, at, axis=-1)[:, 0]
    passed: list[Any] = ours.passed.tolist()  # type: ignore[assignment]
    doubtful = mx.abs(coins * q_draft - p_draft) <= p_draft * mx.minimum(4 * error[:n, 0] + uncertain, 1.0)
    if not mx.all((ours.passed == theirs.passed) | doubtful).item():
        return f"drafts passed {passed}, not {theirs.passed.tolist()}"
    if ours.accepted.item() != [*passed, False].index(False):
        return f"{ours.accepted.item()} drafts accepted of {passed}"
    for i in range(n + 1):
        left = residual(p[i], None if q is None else q[i], case.drafts[i]) if i < n else p[i]
        noise = case.noise.gumbel([case.position + i], p.shape[-1], Stream.RESIDUAL)[0]
        # What is left of a probability is less certain, relatively, than the probability.
        slack = error[i] + mx.where(left > 0, p[i] / left, 0.0) * (2 * error[i] + uncertain)
        keys = mx.where(left > 0, mx.log(left) + noise, -math.inf)
        if not _may_win(ours.tokens[i : i + 1], keys[None], slack[None]):
            return f"token {ours.tokens[i].item()} in row {i}, not {draw(left, noise).item()}"
    same, error = ours.tokens == theirs.tokens, error[:, 0] + uncertain
    found = _floats(ours, theirs, ("normalizer", "logprob", "log_p"), error, same)
    return found or _floats(ours, theirs, ("draft_logprob", "draft_log_p"), error[:n], mx.array(True))


def _error(p: Distribution, temperature: float) -> mx.array:
    """By how much scores that may win, with their noise, can be off on either side, float32 [rows, 1]."""
    top = mx.abs(mx.max(p.logprobs, axis=-1, keepdims=True))
    if temperature == 0:
        return 2.0**-22 * (1 + top)
    return 2.0**-22 * (top / temperature + _LARGEST_KEY) + _NOISE_ERROR


def _may_win(tokens: mx.array, keys: mx.array, slack: mx.array) -> bool:
    """Whether each row's token has the largest key, were each key off by up to its slack."""
    if mx.any(tokens >= keys.shape[-1]).item():
        return False
    at = tokens[:, None].astype(mx.int32)
    own = mx.take_along_axis(keys, at, axis=-1) + mx.take_along_axis(slack, at, axis=-1)
    # Without that slack, equal keys are equal on both sides, and the lowest id is the one.
    return bool(mx.all((own >= mx.max(keys - slack, axis=-1, keepdims=True)) & (own > -math.inf)).item())


def _floats(
    ours: Coupled | Judged, theirs: Coupled | Judged, names: Sequence[str], error: mx.array, same: mx.array
) -> str | None:
    """The first of these fields that differs by more than rounding where the rows are of the `same` token."""
    for name in names:
        a, b = getattr(ours, name), getattr(theirs, name)
        most = 2 * error + 2.0**-20 * mx.abs(b)
        if not mx.all((a == b) | (mx.abs(a - b) <= most) | ~same).item():
            return f"{name} {a.tolist()}, not {b.tolist()}"
    return None


def coupled_heats(coupled: Callable[..., Coupled], *, greedy: bool) -> list[Heat]:
    """Plain decoding and a pass with four drafts, at the vocabulary of a Qwen model; with and without a filter, where
    there is one."""
    return [
        _coupled_heat(coupled, rows, temperature=0.0 if greedy else 0.7, filtered=filtered)
        for rows in (1, 5)
        for filtered in ((False,) if greedy else (False, True))
    ]


def _coupled_heat(coupled: Callable[..., Coupled], rows: int, *, temperature: float, filtered: bool) -> Heat:
    logits, cutoff = _rows_to_race(rows, filtered)
    drafts = mx.zeros(rows - 1, mx.uint32) if rows > 1 else None

    def work(judge: Callable[..., Coupled]) -> list[mx.array]:
        # New noise each time: rows that are remembered would make the reference too fast.
        found = judge(logits, cutoff, temperature=temperature, noise=Noise(1), position=1, drafts=drafts)
        return [found.tokens, found.log_p, found.logprob, found.normalizer]

    return Heat(_heat_name(rows, filtered), lambda: work(coupled), lambda: work(coupled_reference))


def rejection_heats(rejection: Callable[..., Judged]) -> list[Heat]:
    """A pass with four drafts that were certain, and with four that were drawn; with and without a filter."""
    return [_rejection_heat(rejection, drawn, filtered) for drawn in (False, True) for filtered in (False, True)]


def _rejection_heat(rejection: Callable[..., Judged], drawn: bool, filtered: bool) -> Heat:
    logits, cutoff = _rows_to_race(5, filtered)
    drafts = mx.zeros(4, mx.uint32)
    q = mx.softmax(mx.random.normal((4, logits.shape[1]), key=mx.random.key(9)), axis=-1) if drawn else None
    mx.eval(q)

    def work(judge: Callable[..., Judged]) -> list[mx.array]:
        found = judge(logits, cutoff, drafts, q, temperature=0.7, noise=Noise(1), position=1)
        return [found.passed, found.tokens, found.log_p, found.logprob, found.draft_log_p, found.normalizer]

    name = f"{_heat_name(5, filtered)}, {'drawn' if drawn else 'certain'} drafts"
    return Heat(name, lambda: work(rejection), lambda: work(rejection_reference))


def _rows_to_race(rows: int, filtered: bool) -> tuple[mx.array, Cutoff | None]:
    logits = (3 * mx.random.normal((rows, 151_936), key=mx.random.key(rows))).astype(mx.bfloat16)
    cutoff = cutoff_reference(logits, top_p=0.9) if filtered else None
    mx.eval(logits, *(() if cutoff is None else (cutoff.threshold, cutoff.last_tied, cutoff.normalizer)))
    return logits, cutoff


def _heat_name(rows: int, filtered: bool) -> str:
    return f"{rows} rows, {'top-p' if filtered else 'all tokens'}"
