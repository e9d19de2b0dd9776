"""What the settings add to logits or take from them before anything is sampled: logit bias and the three penalties.

Meaning and order are those of mlx-lm's `make_logits_processors`: bias, repetition, presence, frequency. The rows of a
pass are treated at once, each with the history that it would have had in plain decoding: the tokens before the pass and
those fed up to the row itself. There is no state, so a rejected row leaves no trace. Knows nothing of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from localspec.errors import SettingsError
from localspec.settings import Settings


def penalise(
    logits: mx.array, settings: Settings, history: Sequence[int], fed: mx.array, vocabulary_size: int
) -> mx.array:
    """`logits` [rows, vocabulary] with bias and penalties, float32; the very same array where the settings have none.

    history: ids before the pass. fed: the last tokens, integer [n] with n >= rows, which may not have been computed
    yet; row i has seen all of them but the last rows - 1 - i. vocabulary_size: every id in both is below it.
    """
    repetition, presence, frequency = _penalties(settings)
    if not settings.logit_bias and not (repetition or presence or frequency):
        return logits
    rows, width = logits.shape
    logits = logits.astype(mx.float32)
    if width < vocabulary_size:
        # Ids without a logit (a smaller draft, a narrow head) get one for a while: MLX writes out of bounds in silence.
        logits = mx.pad(logits, [(0, 0), (0, vocabulary_size - width)])
    if settings.logit_bias:
        logits = logits + _bias_row(settings, logits.shape[-1])
    if not (repetition or presence or frequency):
        return logits[:, :width]
    tokens = _latest(settings, history, fed)
    if repetition:
        ids, _ = seen(tokens, rows, settings.repetition_context_size)
        old = mx.take_along_axis(logits, ids, axis=-1)
        logits = mx.put_along_axis(logits, ids, mx.where(old < 0, old * repetition, old / repetition), axis=-1)
    if presence:
        ids, _ = seen(tokens, rows, settings.presence_context_size)
        logits = mx.put_along_axis(logits, ids, mx.take_along_axis(logits, ids, axis=-1) - presence, axis=-1)
    if frequency:
        ids, real = seen(tokens, rows, settings.frequency_context_size)
        # One subtraction per occurrence, as mlx-lm does it: a product would round differently.
        logits = logits.at[mx.arange(rows)[:, None], ids].subtract(mx.where(real, frequency, 0.0))
    return logits[:, :width]


def seen(tokens: mx.array, rows: int, size: int) -> tuple[mx.array, mx.array]:
    """The last `size` tokens that each row has seen, all of them for 0: (ids int32 [rows, n], bool [rows, n]).

    tokens: integer [count], of which row i has seen all but the last rows - 1 - i. Where a row has seen fewer, its
    first entries repeat its first token and are False in the second array.
    """
    count = tokens.shape[0]
    width = min(size, count) if size else count
    ends = mx.arange(count - rows + 1, count + 1)[:, None]
    places = ends - width + mx.arange(width)[None, :]
    return tokens[mx.maximum(places, 0)].astype(mx.int32), places >= 0


def of_shape(logits: mx.array, width: int, processor: object) -> mx.array:
    """`logits` as a caller's processor returned them. Raises SettingsError unless their shape is [1, width]: those of
    another one would be sampled from as if they were right."""
    shape = getattr(logits, "shape", None)
    if shape != (1, width):
        name = getattr(processor, "__name__", type(processor).__name__)
        found = type(logits).__name__ if shape is None else f"shape {list(shape)}"
        raise SettingsError(f"logits processor {name} must return logits of shape [1, {width}], not {found}")
    return logits


def _penalties(settings: Settings) -> tuple[float, float, float]:
    """Repetition, presence and frequency penalty, 0.0 where one is off."""
    return settings.repetition_penalty or 0.0, settings.presence_penalty or 0.0, settings.frequency_penalty or 0.0


def _latest(settings: Settings, history: Sequence[int], fed: mx.array) -> mx.array:
    """The tokens that any row's penalties look at, uint32: no more of the history than the longest window needs."""
    sizes = (settings.repetition_context_size, settings.presence_context_size, settings.frequency_context_size)
    active = [size for size, penalty in zip(sizes, _penalties(settings), strict=True) if penalty]
    # The first row itself feeds at least one token of its window.
    first = 0 if 0 in active else max(len(history) + 1 - max(active), 0)
    return mx.concatenate([mx.array(list(history[first:]), mx.uint32), fed.astype(mx.uint32)])


def _bias_row(settings: Settings, size: int) -> mx.array:
    """The bias of every id, float32 [size]."""
    known = {token: bias for token, bias in settings.logit_bias.items() if token < size}
    row = mx.zeros((size,))
    if known:
        row[mx.array(list(known))] = mx.array(list(known.values()), mx.float32)
    return row
