"""Rows of logits for the tests of kernels, and float64 answers with the errors that float32 may have beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from localspec.kernels import launch
from localspec.kernels.truncation import Cutoff
from localspec.noise import Stream, bits, round_keys

U = 2.0**-24
"""Relative error of one rounding to float32."""
SCHEDULES = ("fifo", "lifo", "priority", "random")
REDUCTIONS = ("tree", "forward", "backward")
KINDS = ("normal", "masked", "peaked", "tied", "single")


def logits_of(kind: str, rows: int, size: int, dtype: mx.Dtype, seed: int = 0) -> mx.array:
    """Logits [rows, size] of one kind; each row has a finite one."""
    random = np.random.default_rng([seed, rows, size])
    x = 3 * random.standard_normal((rows, size))
    at = random.integers(0, size, rows)
    if kind == "masked":
        x[random.random((rows, size)) < 0.9] = -np.inf
        x[np.arange(rows), at] = 1.0
    elif kind == "peaked":
        x[np.arange(rows), at] = 60.0
    elif kind == "tied":
        x = np.round(x)
    elif kind == "single":
        x[:] = -np.inf
        x[np.arange(rows), at] = -2.5
    return mx.array(x.astype(np.float32)).astype(dtype)


def float64(values: mx.array) -> np.ndarray:
    return np.array(values.astype(mx.float32)).astype(np.float64)


def log_sum(x: np.ndarray) -> np.ndarray:
    """Log-sum-exp of each row."""
    top = x.max(axis=-1)
    return top + np.log(np.exp(x - top[:, None]).sum(axis=-1))


def sum_bound(size: int, threads: int) -> float:
    """Relative error of a sum of `size` exponentials: each thread's own, rescaled at new maxima, then two trees."""
    return (3 * -(-size // threads) + 24) * U


def gumbel64(seed: int, stream: Stream, positions: Sequence[int], size: int) -> np.ndarray:
    """Exact Gumbel values of the uniforms, which are float32 by definition."""
    words = np.array(bits(seed, stream, positions, size))
    v = np.minimum((words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - 2.0**-24))
    return -np.log(-np.log1p(-v.astype(np.float64)))


@dataclass(frozen=True)
class Exact:
    """Rows in float64, of what a cutoff leaves."""

    scores: np.ndarray
    log_p: np.ndarray
    logprobs: np.ndarray
    normalizer: np.ndarray
    error: np.ndarray
    """[rows, 1]: how far float32 scores with their noise can be off, where they may win at all."""

    @classmethod
    def of(cls, logits: mx.array, cutoff: Cutoff | None, temperature: float) -> Exact:
        x = float64(logits)
        normalizer = log_sum(x) if cutoff is None else float64(cutoff.normalizer)
        logprobs = x - normalizer[:, None]
        top = np.abs(logprobs.max(axis=-1, keepdims=True))
        if temperature == 0:
            return cls(logprobs, np.zeros_like(x), logprobs, normalizer, 2.0**-23 * (top + 1))
        kept = x > -np.inf
        if cutoff is not None:
            kept &= np.array(cutoff.keeps(logits.astype(mx.float32) - cutoff.normalizer[:, None]))
        inverse = float(np.float32(min(1 / temperature, 3e38)))
        shifted = np.where(kept, x - x.max(axis=-1, keepdims=True), -np.inf)
        scores = np.where(kept, np.maximum(shifted * inverse, -3e38), -np.inf)
        # Two subtractions that round by the log-probabilities' size, a product, the noise, and one addition.
        error = 2.0**-23 * (top * inverse + 32) + 2.0**-20
        return cls(scores, scores - log_sum(scores)[:, None], logprobs, normalizer, error)


def check_coupled(found: object, exact: Exact, noise: np.ndarray | float, drafts: list[int], bound: float) -> None:
    """What `coupled` found is right up to rounding. `bound`: relative error of sums."""
    tokens = np.array(found.tokens)
    rows, size = exact.scores.shape
    assert (tokens < size).all(), f"tokens {tokens} of {size}"
    keys = exact.scores + noise
    at = np.arange(rows)
    own, error = keys[at, tokens], exact.error[:, 0]
    best = keys.max(axis=-1)
    assert (own + 2 * error >= best).all(), f"tokens {tokens}, not {keys.argmax(axis=-1)}"
    check_floats(found, exact, tokens, bound)
    others = keys.copy()
    others[at, tokens] = -np.inf
    gap = own - others.max(axis=-1)
    near(found.gap, gap, 2 * error + 4 * U * np.abs(gap), "gap")
    accepted = next((i for i, draft in enumerate(drafts) if tokens[i] != draft), len(drafts))
    assert found.accepted.item() == accepted, "accepted"


def check_floats(found: object, exact: Exact, tokens: np.ndarray, bound: float) -> None:
    at, error = np.arange(len(tokens)), exact.error[:, 0]
    rounding = 2 * U * np.abs(exact.normalizer) + bound
    near(found.normalizer, exact.normalizer, rounding, "normalizer")
    near(found.logprob, exact.logprobs[at, tokens], rounding + 2 * U * np.abs(exact.logprobs[at, tokens]), "logprob")
    log_p = exact.log_p[at, tokens]
    near(found.log_p, log_p, 2 * error + bound + 4 * U * np.abs(log_p), "log_p")


def near(found: mx.array, expected: np.ndarray, error: np.ndarray | float, name: str) -> None:
    values = float64(found)
    with np.errstate(invalid="ignore"):
        wrong = ~((values == expected) | (np.abs(values - expected) <= error))
    assert not wrong.any(), f"{name} {values}, not {expected}"


def check_judged(
    found: object, exact: Exact, drafts: np.ndarray, q: np.ndarray | None, seed: int, position: int, bound: float
) -> None:
    """What `rejection` found is right up to rounding. q: float64 [n, vocabulary], None for one-hot ones."""
    rows, size = exact.scores.shape
    n, greedy = rows - 1, not exact.log_p.any()
    one_hot = np.arange(size) == exact.scores.argmax(axis=-1)[:, None]
    p = one_hot.astype(np.float64) if greedy else np.exp(exact.log_p)
    doubt = np.minimum(2 * exact.error + bound, 1.0)
    words = np.array(bits(seed, Stream.COIN, round_keys(position, n), 1))[:, 0]
    coins = np.minimum((words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - U))
    at = np.arange(n)
    p_draft, q_draft = p[at, drafts], np.ones(n) if q is None else q[at, drafts]
    passed = np.array(found.passed)
    unclear = np.abs(coins * q_draft - p_draft) < 2 * p_draft * doubt[:n, 0]
    assert ((passed == (coins * q_draft < p_draft)) | unclear).all(), f"passed {passed}"
    assert found.accepted.item() == [*passed.tolist(), False].index(False), "accepted"
    tokens = np.array(found.tokens)
    assert (tokens < size).all(), f"tokens {tokens} of {size}"
    for i in range(rows):
        taken = 0.0 if i == n else p[i] * (np.arange(size) == drafts[i]) if q is None else q[i]
        left = np.maximum(p[i] - taken, 0)
        left = left if left.sum() > 0 else p[i]
        noise = gumbel64(seed, Stream.RESIDUAL, [position + i], size)[0]
        # A difference is as uncertain as what it is a difference of; and what is below float32 may be nothing.
        slack = p[i] * doubt[i]
        if q is None or i == n:
            slack = left * doubt[i]
        with np.errstate(divide="ignore"):
            most = np.log(left + slack) + noise + exact.error[i]
            least = np.where(p[i] > 1e-37, np.log(np.maximum(left - slack, 0)) + noise - exact.error[i], -np.inf)
        assert most[tokens[i]] >= least.max(), f"token {tokens[i]} in row {i}, not {least.argmax()}"
        assert most[tokens[i]] > -np.inf, f"token {tokens[i]} in row {i} has no chance"
    if not greedy:
        check_floats(found, exact, tokens, bound)
        near(found.draft_log_p, exact.log_p[at, drafts], 2 * exact.error[:n, 0] + bound + U * size_of(exact), "q")
    near(found.draft_logprob, exact.logprobs[at, drafts], bound + 2 * U * size_of(exact), "draft_logprob")


def size_of(exact: Exact) -> float:
    """Of the largest finite log-probability."""
    finite = np.abs(np.concatenate([exact.logprobs.ravel(), exact.log_p.ravel()]))
    return float(4 * finite[np.isfinite(finite)].max())


@contextmanager
def planted(monkeypatch: pytest.MonkeyPatch, name: str, old: str, new: str) -> Iterator[None]:
    """Inside, the Metal file `name` has `new` where `old` stands first."""
    real: Callable[[str], str] = launch.source
    assert old in real(name), f"{name} has no {old!r}"
    with monkeypatch.context() as patch:
        patch.setattr(
            launch, "source", lambda asked: real(asked).replace(old, new, 1) if asked == name else real(asked)
        )
        launch.built.cache_clear()
        yield
    launch.built.cache_clear()
