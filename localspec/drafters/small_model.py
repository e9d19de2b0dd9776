"""Drafts from a small model of the target's vocabulary, with a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from localspec.drafters.drawing import Drawing
from localspec.drafters.protocol import NO_BOUND, Drafter, Draw, UnreadProposal, common_prefix
from localspec.target import Target
from localspec.tokens import Source
from localspec.transaction import Transaction

_ONE_PASS = 64
"""Tokens to catch up with from which on the logits of all but the last are not computed, for a pass more."""
_SINK = 4
"""First tokens of a context that stay in the window when the middle is left out: models that never saw a text without
its beginning attend to these whatever they say (Xiao et al. 2023, "Efficient Streaming Language Models with Attention
Sinks")."""


class ModelDrafter(Drafter):
    """A language model that runs ahead of the target.

    Under coupled acceptance it draws with the target's own noise, so that the two agree as often as their
    distributions allow; under the other rules it draws with noise of its own and hands over q as it was drawn from.

    It applies the settings' filters, logit bias and penalties, each draft seeing the drafts before it, and XTC with
    the target's coin; not the caller's logits processors, which are made for the target. q is what all that leaves.

    A proposal is one graph: each token is fed to the next pass on the device, and the ids go on to the target's pass
    from there. Where the context outgrows this model's window, the model reads its first tokens and its latest ones.
    """

    name: Source = "draft"

    def __init__(self, model: Any, tokenizer: Any = None, *, context_length: int | None = None) -> None:
        """`model` is what mlx_lm.load returned; `tokenizer`, when given, is compared with the target's.

        context_length: the most tokens that the model can attend to; None means as many as it has positions for.
        """
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.context_length = context_length
        self._target = Target(model)
        windows = [window for window in (context_length, self._target.positions) if window is not None]
        self._window = min(windows, default=None)
        self._left_out = 0
        """Tokens of the context that are not in the window: those behind its first `_sink()`."""
        self._transaction = Transaction(self._target)
        self._proposed: UnreadProposal | None = None
        """What was proposed from the context as it is."""

    def fresh(self) -> ModelDrafter:
        return ModelDrafter(self.model, self.tokenizer, context_length=self.context_length)

    def check(self, target: Any, tokenizer: Any) -> None:
        if self.tokenizer is not None and tokenizer is not None:
            from localspec.vocabulary import check_same_vocabulary

            check_same_vocabulary(tokenizer, self.tokenizer)

    def longest(self) -> int:
        """As many tokens as its window has room for behind the latest ones of the context."""
        if not self.context or self._window is None:
            return NO_BOUND if self.context else 0
        return self._window - min(len(self.context), _half(self._window)) + 1

    def propose(self, length: int, draw: Draw) -> UnreadProposal | None:
        length = min(length, self.longest())
        if not length:
            return None
        try:
            return self._propose(length, draw)
        except BaseException:
            # Whatever the pass left behind, the context is intact: the caches are built again from it.
            self._empty_caches()
            raise

    def _propose(self, length: int, draw: Draw) -> UnreadProposal | None:
        self._make_room(length)
        y = mx.array(self._catch_up(), mx.uint32)
        drawing = Drawing(draw, self.context, length, self._target.vocabulary_size)
        for _ in range(length):
            if not drawing.goes_on():
                break
            y = drawing.take(self._transaction.forward(y))
        proposal = drawing.begin(self.name)
        if proposal is not None:
            self._proposed = proposal
        return proposal

    def commit(self, tokens: Sequence[int]) -> None:
        # The caches hold the old context and all drafts but the last, where they were proposed from it.
        start = len(self.context) - self._left_out
        self.context.extend(tokens)
        if self._transaction.held > start - 1:
            drafted = [] if self._proposed is None else self._proposed.tokens
            right = start + common_prefix(drafted[:-1], tokens)
            right = min(right, start + len(tokens) - 1, self._transaction.held)
            if self._transaction.rewind(right):
                self._transaction.commit(right)
            else:
                self._empty_caches()  # chunked attention drops entries from pass to pass, and may need them again
        self._proposed = None

    def rewind(self, length: int) -> None:
        self.context = self.context[:length]
        # A proposal that was not committed belongs to a round that failed, and so may what the caches hold of it.
        unsure = self._proposed is not None
        outside = self._left_out > 0 and length <= self._left_out + self._sink()
        kept = min(self._transaction.held, max(length - self._left_out - 1, 0))
        if unsure or outside or not self._transaction.rewind(kept):
            self._left_out = 0
            self._empty_caches()

    def reset(self) -> None:
        super().reset()
        self._left_out = 0
        self._empty_caches()

    def settle(self) -> None:
        if self._proposed is None:
            self._transaction.evaluate()
        else:  # its round failed, and computing it may fail again
            self._empty_caches()

    def _make_room(self, length: int) -> None:
        """Have the window begin anew at the latest half of the context where `length` drafts would not fit behind it.

        Half: what is read again is then drafted from for half a window.
        """
        if self._window is None:
            return
        half, read = _half(self._window), len(self.context) - self._left_out
        short = self._left_out > 0 and read < half // 2  # the context went back; there is more to read before it
        if short or read + length - 1 > self._window:
            self._left_out = max(len(self.context) - half, 0)
            self._empty_caches()

    def _sink(self) -> int:
        """Tokens of the beginning that are kept in a window whose middle is left out."""
        return 0 if self._window is None else min(_SINK, _half(self._window) // 2)

    def _read(self, start: int) -> list[int]:
        """The context as this model reads it, from the `start`-th token of that on."""
        if not self._left_out:
            return self.context[start:]
        sink = self._sink()
        return self.context[start:sink] + self.context[max(start, sink) + self._left_out :]

    def _catch_up(self) -> list[int]:
        """The tokens of the context that the next pass has to run."""
        # A proposal that was never committed (the round failed) leaves its rows behind: taken back here.
        last = len(self.context) - self._left_out - 1
        if not self._transaction.rewind(min(self._transaction.held, last)):
            self._empty_caches()
        # The target may have more rows: an id that this model lacks is read as its id 0, MLX would read out of bounds.
        rows = self._target.vocabulary_size
        missing = [token if token < rows else 0 for token in self._read(self._transaction.held)]
        if len(missing) > _ONE_PASS:
            self._transaction.prefill(missing[:-1])
            missing = missing[-1:]
        return missing

    def _empty_caches(self) -> None:
        self._transaction = Transaction(self._target)
        self._proposed = None


def _half(window: int) -> int:
    return max(window // 2, 1)
