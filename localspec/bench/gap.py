"""How far from the top two tokens really are at one place: what tells a near-tie in the last bits from a bug."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from localspec.settings import Settings

if TYPE_CHECKING:
    import mlx.core as mx

    from localspec.engine import Engine

TOLERANCES = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.25}
"""By the logits' format, how much passes of different sizes may move the difference of two logits. In float32 5e-5 was
measured; the other formats' steps near logits of 16 to 32 are 1/64 and 1/8, and errors of two steps are common."""


def tolerance_of(dtype: Any) -> float:
    """How much passes of different sizes may move the difference of two logits of this format."""
    return TOLERANCES.get(str(dtype).removeprefix("mlx.core."), TOLERANCES["bfloat16"])


def key_gap(engine: Engine, context: Sequence[int], settings: Settings, first: int, second: int) -> tuple[float, float]:
    """(gap, tolerance) of two tokens after `context`, from a fresh pass over it that neither of the two runs made.

    The gap is the distance to the largest key of the farther of the two. Keys are what plain and coupled decoding take
    the largest of: log-probabilities at temperature 0, and above it log-probabilities / temperature + noise. Within the
    tolerance either token may come out on top.
    """
    import mlx.core as mx

    keys, tolerance = _keys(engine, context, settings)
    gap = float(mx.max(keys).item()) - float(mx.min(keys[mx.array([first, second])]).item())  # type: ignore[arg-type]
    return (gap if math.isfinite(gap) else math.inf), tolerance


def top_two_gap(engine: Engine, context: Sequence[int], settings: Settings) -> float:
    """How far the two largest keys after `context` are apart, from a fresh pass over it."""
    import mlx.core as mx

    keys, _ = _keys(engine, context, settings)
    largest = sorted(float(key) for key in mx.topk(keys, min(2, keys.size)).tolist())  # type: ignore[union-attr, arg-type]
    gap = largest[-1] - largest[0]
    return gap if math.isfinite(gap) else math.inf


def _keys(engine: Engine, context: Sequence[int], settings: Settings) -> tuple[mx.array, float]:
    """What the next token is the argmax of, float32 [vocabulary], and how much the last bits can move it."""
    import mlx.core as mx

    from localspec.drafters.protocol import Draw
    from localspec.noise import Noise
    from localspec.penalties import of_shape, penalise
    from localspec.sampling import distribution
    from localspec.transaction import Transaction

    transaction = Transaction(engine.target)
    transaction.prefill(context[:-1])
    last, size = mx.array(list(context[-1:]), mx.uint32), engine.target.vocabulary_size
    draw = Draw(settings, Noise(settings.seed or 0), size, engine.xtc_exempt())
    logits = transaction.forward(last)
    adjusted = penalise(logits, settings, context[:-1], last, size)
    for processor in settings.logits_processors:
        changed = processor(mx.array(list(context), mx.uint32), adjusted)
        adjusted = of_shape(changed, logits.shape[-1], processor)
    row = distribution(adjusted, settings, draw.coins(len(context), 1), draw.xtc_exempt)
    keys = row.scores
    if not row.greedy:
        keys = keys + draw.noise.gumbel([len(context)], keys.shape[-1])
    tolerance = tolerance_of(logits.dtype)
    if settings.temperature > 0:
        tolerance /= settings.temperature
    return keys[0], tolerance
