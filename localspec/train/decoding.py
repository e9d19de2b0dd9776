"""Plain decoding of many prompts at once, each sampled in its own way.

Knows nothing about texts. For making data, not for answering people: the batch rounds otherwise than single decoding,
so that ids may part from an engine's at near-ties.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from localspec.train.repetition import repeats

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PREFILL = 64
"""Columns of a prompt per pass."""
_LOOK = 16
"""Tokens between two looks for repetition."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one answer's tokens are chosen; temperature 0 takes the likeliest."""

    temperature: float
    top_p: float
    seed: tuple[int, ...]

    def chooser(self) -> Callable[[NDArray[np.float32]], int]:
        """A function from logits [vocabulary] to an id, with random numbers of its own."""
        if self.temperature == 0:
            return lambda logits: int(logits.argmax())
        draws = np.random.default_rng(self.seed)
        return lambda logits: draw(logits, self.temperature, self.top_p, draws.random())


def draw(logits: NDArray[np.float32], temperature: float, top_p: float, chance: float) -> int:
    """The id at `chance` (0 to 1) of the distribution of logits [vocabulary], cut to the likeliest that reach top_p."""
    weights = np.exp((logits - logits.max()) / temperature)
    total = float(weights.sum(dtype=np.float64))
    # Sorting the whole vocabulary would take longer than the model does; what is left out here is beyond top_p anyway.
    few = np.flatnonzero(weights >= 1e-4) if top_p < 1 else np.arange(len(weights))
    if float(weights[few].sum(dtype=np.float64)) < top_p * total:
        few = np.arange(len(weights))
    order = few[np.argsort(-weights[few], kind="stable")]
    sums = np.cumsum(weights[order], dtype=np.float64)
    kept = 1 + int(np.searchsorted(sums, top_p * total)) if top_p < 1 else len(order)
    kept = min(kept, len(order))
    return int(order[min(int(np.searchsorted(sums[:kept], chance * sums[kept - 1], side="right")), kept - 1)])


class Batch(Protocol):
    """Texts in the middle of decoding, one to a row; all of each prompt but its last token is in the caches."""

    def step(self, last: Sequence[int]) -> NDArray[np.float32]:
        """Logits [rows, vocabulary] after one more token per row."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone, in this order."""
        ...


@runtime_checkable
class BatchModel(Protocol):
    """A model that has batches of its own; any other one is run by MLX."""

    def batch(self, prompts: Sequence[Sequence[int]], most: int) -> Batch:
        """A batch that begins with these prompts, none of them empty, and takes `most` steps at most."""
        ...


def decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    *,
    end_ids: Collection[int],
    most: int,
) -> list[list[int]]:
    """Answers to prompts (none of them empty), in their order, of up to `most` tokens.

    An answer ends with an end token, at `most`, or when it has fallen into repetition.
    """
    choosers = [sampling.chooser() for sampling in samplings]
    answers: list[list[int]] = [[] for _ in prompts]
    batch: Batch = model.batch(prompts, most) if isinstance(model, BatchModel) else _MlxBatch(model, prompts)
    rows = list(range(len(prompts)))  # which prompt stands in which row of the batch
    last = [prompt[-1] for prompt in prompts]
    running = [True] * len(prompts)
    while any(running):
        logits = batch.step(last)
        for row, prompt in enumerate(rows):
            if not running[row]:
                continue
            answer = answers[prompt]
            answer.append(choosers[prompt](logits[row]))
            last[row] = answer[-1]
            looks = len(answer) % _LOOK == 0
            running[row] = not (answer[-1] in end_ids or len(answer) >= most or (looks and repeats(answer) is not None))
        stopped = running.count(False)
        if stopped < len(rows) and stopped >= max(1, len(rows) // 8):  # taking rows out copies all the others
            keep = [row for row, runs in enumerate(running) if runs]
            batch.keep(keep)
            rows, last, running = [rows[k] for k in keep], [last[k] for k in keep], [True] * len(keep)
    return answers


class _MlxBatch:
    """A batch of an MLX model."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        self._model = model
        self._cache = _prefill(model, prompts)

    def step(self, last: Sequence[int]) -> NDArray[np.float32]:
        return np.array(self._model(mx.array(list(last))[:, None], cache=self._cache)[:, -1].astype(mx.float32))

    def keep(self, rows: Sequence[int]) -> None:
        for layer in self._cache:
            layer.filter(mx.array(list(rows)))


def _prefill(model: Any, prompts: Sequence[Sequence[int]]) -> list[Any]:
    """Caches of a batch that hold all of each prompt but its last token. What all begin with is computed once."""
    shared = 0
    for column in zip(*(prompt[:-1] for prompt in prompts), strict=False):
        if len(set(column)) > 1:
            break
        shared += 1
    single = make_prompt_cache(model)
    if shared:
        model(mx.array([list(prompts[0][:shared])]), cache=single)
        mx.eval([layer.state for layer in single])
    cache = [type(layer).merge([layer] * len(prompts)) for layer in single]
    lengths = [len(prompt) - 1 - shared for prompt in prompts]
    longest = max(lengths)
    if longest == 0:
        return cache
    padding = [longest - length for length in lengths]
    table = mx.array([[*prompt[shared:-1], *[0] * pad] for prompt, pad in zip(prompts, padding, strict=True)])
    for layer in cache:
        layer.prepare(lengths=lengths, right_padding=padding)
    for part in range(math.ceil(longest / _PREFILL)):
        model(table[:, part * _PREFILL : (part + 1) * _PREFILL], cache=cache)
        mx.eval([layer.state for layer in cache])
    for layer in cache:
        layer.finalize()
    mx.eval([layer.state for layer in cache])
    return cache
