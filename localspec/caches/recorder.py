"""Takes down what recurrent layers compute row by row in a pass, so that their state for fewer rows can be had again
without another pass of the target.

A recurrent layer is projections, which act on each row alone, and a recurrence (or short convolution) over rows, which
is cheap. While a pass is recorded, the projections' outputs are kept. To rebuild the state after the first n rows, the
layer is called again from the state before the pass, on n rows, with each projection answering from what it gave the
first time: no weight is read, and the recurrence sees the same bits. That holds for every layer of mlx-lm that is
handed an ArraysCache; no layer's code is known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from localspec.lending import around, release


@dataclass(slots=True)
class _Call:
    """One call of a recurrent layer."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[mx.array] = field(default_factory=list)
    """What its projections gave, in the order in which they were asked."""
    nested: bool = False
    """Whether a layer inside of it was handed the cache as well: then that one is the recurrent layer."""


@dataclass(slots=True)
class Recording:
    """The recurrent layers' calls of one pass."""

    rows: int
    calls: list[_Call] = field(default_factory=list)
    complete: bool = False
    """Whether the calls account for all recurrent state, and for nothing else. They do not where a layer is handed a
    list of caches, recurrent and other ones."""


class Recorder:
    """Records and replays the recurrent layers of one model. Between passes the model is as it was.

    Only an interrupt at the very end of a recording or a replay can leave it otherwise: see `release`.
    """

    def __init__(self, model: nn.Module, caches: Sequence[Any]) -> None:
        """`caches`: the recurrent ones; a module that is handed one of them is taken for a recurrent layer."""
        self._caches = {id(cache): cache for cache in caches}
        self._modules = [module for _, module in model.named_modules()]
        self._layers: list[nn.Module] | None = None
        self.release()

    def release(self) -> None:
        """Give all modules their own classes back, where an interrupt kept that from being done."""
        release(self._modules)

    @contextmanager
    def recording(self, rows: int) -> Iterator[Recording]:
        """Record the pass of `rows` rows that runs inside."""
        recording = Recording(rows)
        stack: list[_Call] = []

        def around_layer(module: nn.Module, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not any(id(value) in self._caches for value in (*args, *kwargs.values())):
                return call(*args, **kwargs)
            if stack:
                stack[-1].nested = True
            stack.append(_Call(module, args, kwargs))
            try:
                return call(*args, **kwargs)
            finally:
                done = stack.pop()
                if not done.nested:
                    recording.calls.append(done)
                elif stack:
                    stack[-1].nested = True

        def around_projection(module: nn.Module, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            out = call(*args, **kwargs)
            if stack:
                stack[-1].outputs.append(out)
            return out

        with around(self._candidates(), around_layer), around(self._projections(), around_projection):
            yield recording
        values = [value for call in recording.calls for value in (*call.args, *call.kwargs.values())]
        handed = {id(value) for value in values} & self._caches.keys()
        others = any(hasattr(value, "update_and_fetch") for value in values)
        recording.complete = len(handed) == len(self._caches) and not others
        if self._layers is None:
            self._layers = list({id(call.layer): call.layer for call in recording.calls}.values())

    def replay(self, recording: Recording, kept: int) -> None:
        """Advance the caches, which hold the state before the recorded pass, by its first `kept` rows. Lazy."""

        def first_rows(value: Any) -> Any:
            rowwise = isinstance(value, mx.array) and value.ndim >= 2 and value.shape[1] == recording.rows
            return value[:, :kept] if rowwise else value

        for call in recording.calls:
            answers = iter(call.outputs)

            def answer(module: nn.Module, original: Any, args: Any, kwargs: Any, answers: Any = answers) -> Any:
                return first_rows(next(answers))

            with around(self._projections(), answer):
                call.layer(*map(first_rows, call.args), **{k: first_rows(v) for k, v in call.kwargs.items()})

    def _candidates(self) -> list[nn.Module]:
        # Which modules are recurrent shows in the first pass; only they are watched from then on.
        return [m for m in self._modules if not _is_projection(m)] if self._layers is None else self._layers

    def _projections(self) -> list[nn.Module]:
        if self._layers is None:
            return [module for module in self._modules if _is_projection(module)]
        inner = {id(m): m for layer in self._layers for _, m in layer.named_modules() if _is_projection(m)}
        return list(inner.values())


def _is_projection(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.QuantizedLinear)
