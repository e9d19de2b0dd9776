"""Verification of a pass in one Metal dispatch: tokens, acceptance and probabilities from logits, nothing in between.

`verify_reference.py` gives the same answers in MLX's operations and says what they mean. Whatever changes from call to
call is an input, so that nothing is compiled again.

How many leading drafts are kept depends on all rows, and a threadgroup cannot know of the others without memory that
was set before, which would take a dispatch of its own. So each row says at which draft it would stop, if it does, and
the smallest of these few numbers is one more small operation, for those who ask for it.
"""

from __future__ import annotations

import mlx.core as mx

from localspec.kernels import verify_trial
from localspec.kernels.kernel import Kernel
from localspec.kernels.launch import kernel, threads_for
from localspec.kernels.truncation import Cutoff
from localspec.kernels.verify_reference import Coupled, DraftDistribution, Judged
from localspec.noise import Noise

_CALL = ("thresholds", "last_tied", "normalizers", "drafts", "words", "inverse")
_FOUND = ("tokens", "log_p", "logprob", "normalizer", "stops")
_NEVER = 2**31 - 1
"""What a row says whose draft is kept."""


def coupled(
    logits: mx.array,
    cutoff: Cutoff | None,
    *,
    temperature: float,
    noise: Noise,
    position: int,
    drafts: mx.array | None = None,
) -> Coupled:
    """As `coupled_reference`, in one Metal dispatch; of `noise` only the seed is used."""
    rows, size = logits.shape
    count = 0 if drafts is None else drafts.size
    judge = kernel("verify_coupled", ("threefry", "rows", "scores"), ("logits", *_CALL), (*_FOUND, "gap"))
    tokens, log_p, logprob, normalizer, stops, gap = judge(
        inputs=[logits, *_call(cutoff, drafts, [*_words(noise, position), size, count], temperature)],
        template=[("CUTOFF", cutoff is not None)],
        **_shape(rows, size, [mx.uint32, mx.float32, mx.float32, mx.float32, mx.int32, mx.float32]),
    )
    return Coupled(tokens, log_p, logprob, normalizer, gap, mx.min(stops))


def rejection(
    logits: mx.array,
    cutoff: Cutoff | None,
    drafts: mx.array,
    q: DraftDistribution,
    *,
    temperature: float,
    noise: Noise,
    position: int,
) -> Judged:
    """As `rejection_reference`, in one Metal dispatch; of `noise` only the seed is used."""
    rows, size = logits.shape
    count = drafts.size
    kind, (values, ids) = 0 if q is None else 2 if isinstance(q, tuple) else 1, _columns(q)
    names = ("draft_log_p", "draft_logprob")
    judge = kernel(
        "verify_rejection",
        ("threefry", "rows", "scores", "drafts"),
        ("logits", *_CALL, "q", "q_ids"),
        (*_FOUND, *names),
    )
    words = [*_words(noise, position), size, count]
    tokens, log_p, logprob, normalizer, stops, draft_log_p, draft_logprob = judge(
        inputs=[logits, *_call(cutoff, drafts, words, temperature, values.shape[-1]), values, ids],
        template=[("CUTOFF", cutoff is not None), ("Q", kind)],
        **_shape(rows, size, [mx.uint32, mx.float32, mx.float32, mx.float32, mx.int32, mx.float32, mx.float32]),
    )
    return Judged(
        stops[:count] == _NEVER,
        mx.min(stops),
        tokens,
        log_p,
        logprob,
        draft_log_p[:count],
        draft_logprob[:count],
        normalizer,
    )


def _words(noise: Noise, position: int) -> list[int]:
    return [noise.seed & 0xFFFFFFFF, noise.seed >> 32, position]


def _call(
    cutoff: Cutoff | None, drafts: mx.array | None, words: list[int], temperature: float, width: int = 0
) -> list[mx.array]:
    """The inputs `_CALL`. What a call does not have is there as something small that is not read."""
    some = mx.zeros(1)
    limits = [some, some, some] if cutoff is None else [cutoff.threshold, cutoff.last_tied, cutoff.normalizer]
    ids = mx.zeros(1, mx.uint32) if drafts is None else drafts.astype(mx.uint32)
    # As `sampling.heat`: a temperature so small that its inverse overflows leaves the top token alone.
    inverse = min(1.0 / temperature, 3e38) if temperature > 0 else 1.0
    return [*limits, ids, mx.array([*words, int(temperature == 0), width], mx.uint32), mx.array(inverse, mx.float32)]


def _columns(q: DraftDistribution) -> tuple[mx.array, mx.array]:
    """Values of q and the ids of its columns, of which both, the second or none are read."""
    if isinstance(q, tuple):
        return q
    return mx.zeros((1, 1)) if q is None else q, mx.zeros(1, mx.int32)


def _shape(rows: int, size: int, dtypes: list[mx.Dtype]) -> dict[str, object]:
    """One threadgroup for each row; its threads depend on the vocabulary alone, and so do the row's results."""
    threads = threads_for((size + 1) // 2)
    return {
        "grid": (threads * rows, 1, 1),
        "threadgroup": (threads, 1, 1),
        "output_shapes": [(rows,)] * len(dtypes),
        "output_dtypes": dtypes,
    }


KERNEL = Kernel(
    name="verify",
    purpose="from logits to tokens and kept drafts in one dispatch",
    self_test=lambda: verify_trial.coupled_fault(coupled, greedy=False),
    heats=lambda: verify_trial.coupled_heats(coupled, greedy=False),
)
