"""The hidden states of a target's passes, kept by position for the drafters that asked for them.

They are taken from the layers while a pass is built, so no second pass is needed, and hold on to arrays that the pass
computes anyway: nothing is evaluated for them, and no graph outlives its pass. The transaction that runs the passes
cuts them back together with the caches, so what is here always belongs to the tokens in the caches. Knows nothing of
drafters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from weakref import ref

import mlx.core as mx
import mlx.nn as nn

from localspec.errors import UnsupportedModelError
from localspec.lending import Wrapper, around, release
from localspec.trunk import trunk_of

Tap = int | Literal["before-norm", "after-norm"]
"""Which hidden state: a layer's output, by its index; what the model's last norm is given; what it makes of that."""

REMEMBERED = 4096
"""Newest tokens whose hidden states are kept, `hidden` values each for every tap, in the dtype that the model computes
in. Older ones are of use only to a drafter that has not read them yet."""


@dataclass(slots=True)
class _Rows:
    """A pass, or what is left of it."""

    start: int
    stop: int
    outputs: list[mx.array]
    """Per tap [1, at least stop - start, hidden]; rows behind the kept ones stay unread."""


class HiddenStates:
    """Rows of each tap for the positions that the caches hold, but for the oldest."""

    def __init__(self, model: nn.Module, taps: Sequence[Tap], remembered: int = REMEMBERED) -> None:
        """Raises UnsupportedModelError where the model has no such layer, or is built in a way that is not known."""
        self.taps = tuple(dict.fromkeys(taps))
        trunk = trunk_of(model)
        missing = [tap for tap in self.taps if isinstance(tap, int) and not 0 <= tap < len(trunk.layers)]
        if missing:
            raise UnsupportedModelError(
                f"layer {missing[0]} is to be tapped, and the model has layers 0 to {len(trunk.layers) - 1}"
            )
        self._norm = trunk.norm
        self._layers = {tap: trunk.layers[tap] for tap in self.taps if isinstance(tap, int)}
        self._remembered = remembered
        self._passes: list[_Rows] = []
        self._heard: dict[Tap, mx.array] = {}
        """What the pass that is being built gave so far."""
        self._taps_of = {id(layer): tap for tap, layer in self._layers.items()}
        self._classes: dict[type, type] = {}
        self._wrapper = _listener(ref(self))

    @contextmanager
    def listening(self, start: int, rows: int) -> Iterator[None]:
        """Keep what the pass that is built inside computes for its first `rows` tokens, which stand from `start` on.

        Nothing is kept of one that raises.
        """
        self._heard = {}
        with around(self._modules(), self._wrapper, self._classes):
            yield
        heard, self._heard = self._heard, {}
        silent = [tap for tap in self.taps if tap not in heard]
        if silent:
            raise UnsupportedModelError(f"the model does not call the part that is to be tapped ({silent[0]})")
        self.cut(start)
        self._passes.append(_Rows(start, start + rows, [heard[tap] for tap in self.taps]))
        oldest = start + rows - self._remembered
        while self._passes and self._passes[0].stop <= oldest:
            del self._passes[0]

    def hear(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        """Note a call of one of the parts that are tapped."""
        if module is self._norm:
            self._heard["before-norm"], self._heard["after-norm"] = args[0], out
        else:
            # Some layers give more than their output.
            self._heard[self._taps_of[id(module)]] = out[0] if isinstance(out, tuple) else out

    def cut(self, length: int) -> None:
        """Forget the positions from `length` on."""
        while self._passes and self._passes[-1].stop > length:
            if self._passes[-1].start >= length:
                self._passes.pop()
            else:
                self._passes[-1].stop = length

    def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Those of the positions from `start` to before `stop` whose hidden states are here, as ascending ranges
        (first, behind the last) with gaps between them."""
        found: list[tuple[int, int]] = []
        for one in self._reaching(start, stop):
            first, last = max(one.start, start), min(one.stop, stop)
            if found and found[-1][1] == first:
                found[-1] = (found[-1][0], last)
            else:
                found.append((first, last))
        return found

    def rows(self, taps: Sequence[Tap], start: int, stop: int) -> list[mx.array]:
        """Per tap [stop - start, hidden], lazy views, for positions of one span. Raises LookupError for others."""
        if self.spans(start, stop) != [(start, stop)]:
            raise LookupError(f"no hidden states for some of the positions {start} to {stop - 1}")
        cuts = [
            (one, max(start - one.start, 0), min(stop, one.stop) - one.start) for one in self._reaching(start, stop)
        ]
        places = [self.taps.index(tap) for tap in taps]
        return [mx.concatenate([one.outputs[place][0, a:b] for one, a, b in cuts]) for place in places]

    def arrays(self) -> list[mx.array]:
        """All that is kept."""
        return [output for one in self._passes for output in one.outputs]

    def release(self) -> None:
        """Give the model's parts back, where an interrupt kept that from being done."""
        self._heard = {}
        release(self._modules())

    def _modules(self) -> list[nn.Module]:
        return list(self._layers.values()) + ([self._norm] if len(self._layers) < len(self.taps) else [])

    def _reaching(self, start: int, stop: int) -> list[_Rows]:
        """The passes with positions from `start` to before `stop`. Sought from the end, where drafters read."""
        found = []
        for one in reversed(self._passes):
            if one.stop <= start:
                break
            if one.start < stop:
                found.append(one)
        return found[::-1]


def _listener(states: ref[HiddenStates]) -> Wrapper:
    """Weakly: classes that are lent refer to their wrapper, and go in a garbage collection, not when they are done."""

    def listen(module: nn.Module, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = call(*args, **kwargs)
        alive = states()
        if alive is not None:
            alive.hear(module, args, out)
        return out

    return listen
