"""How far ids with speculation equal ids without it, for one engine: which row class to decode in, and what to say.

`docs/exactness.md` explains. Nothing is kept beyond the engine's life.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx

from localspec.probe import WIDE, affordable, probe, screen
from localspec.rows import RowClass, RowClasses
from localspec.settings import Settings
from localspec.target import Target
from localspec.transaction import Transaction

_MEANT, _MEANT_IN_16_BITS = 1e-3, 0.02
"""Share of the logits' range by which rows of a pass may differ from the same rows alone: many times what rounding
does (1e-6, and 1e-3 in 16 bits)."""


@dataclass(frozen=True, slots=True)
class Exactness:
    """How one generation is decoded."""

    row_class: RowClass | None
    """The sizes that passes may have; None leaves them free."""
    line: str
    """What that promises, in one line for people."""
    speculates: bool = True
    """False for a model in which rows of one pass mean something else than the same tokens one by one."""


class Exact:
    """Measures the target when it first has to, in the thread that decodes, and sticks to what it found."""

    def __init__(self, target: Target, context_length: int | None) -> None:
        self._target = target
        self._context_length = context_length
        self._causal: bool | None = None
        self._probed: RowClasses | None = None
        self._screened: RowClasses | None = None
        self._auto: Exactness | None = None

    def classes(self) -> RowClasses:
        """All classes of pass sizes, by the full probe."""
        if self._probed is None:
            self._probed = probe(self._target, context_length=self._context_length)
        return self._probed

    def of(self, settings: Settings) -> Exactness:
        """How a generation with these settings is decoded."""
        chosen = None
        if settings.exact != "off":
            chosen = self._rows() if settings.exact == "rows" else self._automatic()
        # Rows that were found to agree bit for bit mean the same, too.
        if (chosen is None or chosen.row_class is None) and settings.speculate and not self._rows_mean_the_same():
            return Exactness(None, "bit for bit: nothing is drafted, this model mixes up the rows of a pass", False)
        if chosen is None:
            return Exactness(None, _but_distribution(settings, "up to near-ties: exact is off"))
        return Exactness(chosen.row_class, _but_distribution(settings, chosen.line))

    def _rows_mean_the_same(self) -> bool:
        """Whether a pass of two rows is, but for rounding, two passes of one: not so where attention is not causal."""
        if self._causal is None:
            context, rows = _ids(range(1, 9), self._target), _ids((3, 5, 2, 7), self._target)
            transaction = Transaction(self._target)
            transaction.prefill(context)
            together = transaction.forward(mx.array(rows, mx.uint32))
            transaction.commit(len(context))
            alone = mx.concatenate([transaction.forward(mx.array([row], mx.uint32)) for row in rows])
            # Far below the top nothing is decided, and there may be ids that the model rules out with -inf.
            floor = mx.max(together) - 50.0
            shown, lone = (mx.maximum(x, floor).astype(mx.float32) for x in (together, alone))
            off, spread = mx.max(mx.abs(shown - lone)), mx.max(shown) - mx.min(shown)
            share = _MEANT if together.dtype == mx.float32 else _MEANT_IN_16_BITS
            # Logits that are not finite are reported where they decide a token.
            self._causal = not bool((off > share * spread).item())
        return self._causal

    def _rows(self) -> Exactness:
        classes = self.classes()
        best = classes.best()
        if best is None:
            return Exactness(RowClass((1,)), "bit for bit: passes of one row only, so nothing is drafted")
        return Exactness(best, _promise(classes, best))

    def _automatic(self) -> Exactness:
        # Decided once: a second look could fall on the other side of the limit, and change the ids of a seed.
        if self._auto is None:
            classes = self._probed
            if classes is None:
                classes = self._screened = screen(self._target, context_length=self._context_length)
            best = None if classes is None else classes.best()
            if classes is not None and best is not None and affordable(classes):
                self._auto = Exactness(best, _promise(classes, best))
            else:
                price = "" if classes is None or best is None else f", at {_times(classes.relative(best))}"
                self._auto = Exactness(
                    None,
                    'up to near-ties: passes of different sizes round differently here; exact="rows" decodes bit for '
                    f"bit{price or ', slower'}",
                )
        return self._auto


def _promise(classes: RowClasses, best: RowClass) -> str:
    tried = " and ".join(map(str, classes.lengths))
    # Attention that the model computes itself may round otherwise at any other length.
    promise = "bit for bit" if classes.attention_by_row else f"bit for bit with {tried} tokens of context, where tried"
    if classes.alike and best.largest >= WIDE:
        return f"{promise}: every pass size in use rounds alike here"
    if classes.alike:
        return f"{promise}: passes of up to {best.largest} rows round alike here, and wider ones are not used"
    return f"{promise}: passes of {best.describe()} only; plain decoding costs {_times(classes.relative(best))}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x"


def _but_distribution(settings: Settings, line: str) -> str:
    if settings.accept == "coupled" or settings.temperature == 0:
        return line
    return f"the distribution, not the ids: {settings.accept} acceptance"


def _ids(numbers: Iterable[int], target: Target) -> list[int]:
    return [number % target.vocabulary_size for number in numbers]
