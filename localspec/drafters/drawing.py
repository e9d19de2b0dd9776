"""One proposal of a drafter with logits, drawn token by token, all of it one graph.

Knows nothing of what the logits come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from localspec.drafters.protocol import Draw, UnreadProposal
from localspec.noise import Stream, round_keys
from localspec.penalties import penalise
from localspec.sampling import Distribution, distribution
from localspec.tokens import Source


class Drawing:
    """What has been drawn behind a context.

    Under coupled acceptance it is drawn with the target's own noise, under the other rules with a drafter's. Filters,
    bias, penalties and XTC are the settings'; what a grammar forbids, or the columns lack, is never drawn.
    """

    def __init__(self, draw: Draw, context: list[int], length: int, columns: int, ids: mx.array | None = None) -> None:
        """context: its tokens, at least one. length: the most that will be drawn. columns: of the logits. ids: the
        target's id of each column, integer [columns]; None where they are the target's first ones."""
        self._draw, self._context, self._ids = draw, context, ids
        self._columns = min(columns, draw.vocabulary_size)
        settings, end = draw.settings, len(context)
        self._coupled, self._greedy = settings.accept == "coupled", settings.temperature == 0
        self._keys = range(end, end + length) if self._coupled else round_keys(end, length)
        by_id = settings.xtc_probability > 0 or draw.allowed is not None or settings.changes_logits
        self._own = ids is not None and not by_id
        """Whether columns are drawn, not ids: nothing that the settings ask for goes by ids."""
        self._mask: NDArray[np.bool_] | None = None
        """What the next token may be."""
        self._tokens: list[mx.array] = []
        self._chosen: list[mx.array] = []
        """The columns of the tokens, or the tokens, as they were drawn."""
        self._drawn: list[Distribution] = []

    def goes_on(self) -> bool:
        """Whether there is a next token: the grammar, where there is one, allows what a column stands for. Waits for
        the tokens before it only if there is one."""
        if self._draw.allowed is None:
            return True
        tokens: list[int] = mx.concatenate(self._tokens).tolist() if self._tokens else []  # type: ignore[assignment]
        if tokens and self._mask is not None and not self._mask[tokens[-1]]:
            return False  # no logit of what was allowed was a number: the token is none, and is cut off
        allowed = self._draw.allowed(tokens)
        if allowed is None:
            return False
        if self._ids is None:
            self._mask = allowed[: self._columns]
        else:
            reached = np.zeros_like(allowed)
            reached[np.array(self._ids)] = True
            self._mask = allowed & reached
        return bool(self._mask.any())

    @property
    def newest(self) -> mx.array:
        """The last token that was taken, uint32 [1]."""
        return self._tokens[-1]

    def take(self, logits: mx.array) -> mx.array:
        """The next token, uint32 [1], of the last row of logits [rows, columns]; lazy."""
        draw, settings, i = self._draw, self._draw.settings, len(self._tokens)
        if self._ids is None:
            if logits.shape != (1, self._columns):
                logits = logits[-1:, : self._columns]
        elif not self._own:
            logits = self._spread(logits, -math.inf)
        if settings.changes_logits:
            fed = mx.concatenate([mx.array(self._context[-1:], mx.uint32), *self._tokens])
            logits = penalise(logits, settings, self._context[:-1], fed, draw.vocabulary_size)
        if self._mask is not None:
            logits = mx.where(mx.array(self._mask), logits, -math.inf)
        if self._greedy:
            chosen = mx.argmax(logits, axis=-1)
        else:
            drawn = distribution(logits, settings, draw.coins(len(self._context) + i, 1), draw.xtc_exempt)
            stream = Stream.GUMBEL if self._coupled else Stream.DRAFT
            noise = draw.noise.gumbel([self._keys[i]], draw.vocabulary_size, stream)
            if self._ids is None:
                noise = noise[:, : self._columns]
            elif self._own:
                noise = noise[:, self._ids]
            chosen = drawn.choose(noise)
            self._drawn.append(drawn)
        token = self._ids[chosen].astype(mx.uint32) if self._ids is not None and self._own else chosen
        self._chosen.append(chosen)
        self._tokens.append(token)
        return token

    def begin(self, source: Source) -> UnreadProposal | None:
        """All that was drawn, begun, not waited for: the device drafts while the target's pass is being built. None
        where nothing was."""
        if not self._tokens:
            return None
        ids = mx.concatenate(self._tokens)
        chances = q = None
        if not self._greedy:
            rows = _together(self._drawn)
            chances = mx.exp(rows.log_probability_of(mx.concatenate(self._chosen) if self._own else ids))
            if not self._coupled:
                q = rows.probabilities()
                if self._ids is None:
                    q = mx.pad(q, [(0, 0), (0, self._draw.vocabulary_size - self._columns)])
                elif self._own:
                    q = self._spread(q, 0.0)
        mx.async_eval([array for array in (ids, chances, q) if array is not None])  # type: ignore[no-untyped-call]
        return UnreadProposal(ids, source, q, chances)

    def _spread(self, rows: mx.array, fill: float) -> mx.array:
        """[rows, columns] to [rows, the target's vocabulary], `fill` where there is no column."""
        full = mx.full((rows.shape[0], self._draw.vocabulary_size), fill, rows.dtype)
        full[:, self._ids] = rows
        return full


def _together(rows: Sequence[Distribution]) -> Distribution:
    """Distributions of one row each as one of all their rows."""
    return Distribution(
        mx.concatenate([row.logprobs for row in rows]),
        mx.concatenate([row.scores for row in rows]),
        mx.concatenate([row.normalizer for row in rows]),
        rows[0].greedy,
    )
