"""Drafts from an MTP head: a block that reads the target's hidden states and predicts one token further.

Pair t of a head is the target's hidden state of token t and the embedding of token t + 1. The head's cache holds the
pairs of the context, and no others: what a proposal appends on the head's own outputs is dropped with it, so there is
nothing to roll back when drafts are rejected, and each pair is a function of the tokens up to t + 1 alone. Whatever
happens to a conversation, the entries that its tokens share with the former ones stay right.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from localspec.drafters.drawing import Drawing
from localspec.drafters.protocol import NO_BOUND, Drafter, Draw, UnreadProposal, common_prefix
from localspec.drafters.trial import Trial
from localspec.hidden import HiddenStates
from localspec.models.mtp.head import Head
from localspec.settings import Settings
from localspec.tokens import Source
from localspec.transaction import Transaction

CHUNK = 512
"""Most pairs per pass of the head while it reads a prompt."""


class MTPDrafter(Drafter):
    """A head that runs ahead of the target, on the target's hidden states and then on its own.

    Draws, filters, bias, penalties and XTC are as in ModelDrafter. Where the head has a draft vocabulary of its own,
    filters act on that; q is 0 outside of it. It cannot draft behind tokens whose hidden states are not remembered;
    the pairs of such tokens are left out of its cache.
    """

    name: Source = "mtp"

    def __init__(self, head: Head, *, trial: Trial | None = None) -> None:
        """`head` comes from `localspec.models.mtp.load_head`, for the very model that is the target. `trial` decides
        whether it is any good; the copies of a drafter share one."""
        super().__init__()
        self.head = head
        self.taps = head.taps
        self.trial = Trial(self.name) if trial is None else trial
        self._heeds_trial = True
        self._transaction: Transaction | None = None
        self._proposed: UnreadProposal | None = None
        self._counts = False
        """Whether the proposal that is out says something of the head."""
        self._empty_cache()

    def fresh(self) -> MTPDrafter:
        return MTPDrafter(self.head, trial=self.trial)

    def check(self, target: Any, tokenizer: Any) -> None:
        """Raise IncompatibleDrafterError unless the head was loaded for this model."""
        from localspec.errors import IncompatibleDrafterError
        from localspec.trunk import trunk_of

        if trunk_of(target).embedding is not self.head.trunk.embedding:
            raise IncompatibleDrafterError(
                "the MTP head was loaded for another model: load it with load_head(source, model)"
            )

    def watch(self, transaction: Transaction) -> None:
        self._transaction = transaction

    def takes_part(self, settings: Settings) -> bool:
        """False for good once it proved to be useless; but not where ids depend on drafts: there a seed must mean the
        same before and after that."""
        self._heeds_trial = settings.accept == "coupled"
        return not self._switched_off()

    def _switched_off(self) -> bool:
        return self._heeds_trial and self.trial.failed

    def longest(self) -> int:
        """0 while the hidden state that it would draft from is not known, and where it is switched off."""
        newest = len(self.context) - 2
        if self._switched_off() or self._transaction is None or newest < 0:
            return 0
        return NO_BOUND if self._hidden().spans(newest, newest + 1) else 0

    def propose(self, length: int, draw: Draw) -> UnreadProposal | None:
        if not self.longest():
            return None
        try:
            return self._propose(length, draw)
        except BaseException:
            # Whatever was left behind, the context and the hidden states are intact: the cache is built again.
            self._empty_cache()
            raise

    def _propose(self, length: int, draw: Draw) -> UnreadProposal | None:
        end = len(self.context)
        outputs = self._catch_up()
        logits = self.head.logits(outputs)
        drawing = Drawing(draw, self.context, length, logits.shape[-1], self.head.draft_ids)
        for i in range(length):
            if not drawing.goes_on():
                break
            if i:
                outputs = self.head.run(self.head.onward(outputs), drawing.newest, self._cache, end - 2 + i)
                logits = self.head.logits(outputs)
            drawing.take(logits)
        # What the head said on its own outputs is not the context's: it goes, whatever becomes of the drafts.
        self._cut(len(self._pairs))
        proposal = drawing.begin(self.name)
        if proposal is None:
            mx.eval(self._cache.arrays())
            return None
        self._proposed = proposal
        self._counts = not draw.settings.logits_processors and draw.allowed is None
        return proposal

    def commit(self, tokens: Sequence[int]) -> None:
        if self._proposed is not None and self._counts:
            drafted = self._proposed.tokens
            self.trial.book(min(len(drafted), len(tokens)), common_prefix(drafted, tokens))
        self._proposed = None
        self.context.extend(tokens)

    def rewind(self, length: int) -> None:
        self.context = self.context[:length]
        if self._proposed is not None:
            # It was not committed: its round failed, and so may have what was computed for it.
            self._empty_cache()
        self._cut(bisect_left(self._pairs, len(self.context) - 1))

    def reset(self) -> None:
        super().reset()
        self._empty_cache()

    def _catch_up(self) -> mx.array:
        """Run the pairs of the context that are not in the cache; the output of the newest, [1, width], lazy."""
        assert self._transaction is not None
        newest, known = len(self.context) - 2, self._hidden()
        if self.head.borrows:
            self._cache = self.head.borrow(self._transaction.caches)
            hidden = self.head.join(known.rows(self.taps, newest, newest + 1))
            return self.head.run(hidden, mx.array(self.context[-1:], mx.uint32), self._cache, newest)
        self._cut(bisect_left(self._pairs, newest))  # the newest runs again: nobody kept what it gave
        start = self._pairs[-1] + 1 if self._pairs else 0
        outputs: mx.array | None = None
        for first, behind in known.spans(start, newest + 1):
            for a in range(first, behind, CHUNK):
                b = min(a + CHUNK, behind)
                if outputs is not None:
                    # A prompt goes chunk by chunk; of all but the newest pair only keys and values are computed.
                    mx.eval(self._cache.arrays())
                hidden = self.head.join(known.rows(self.taps, a, b))
                outputs = self.head.run(hidden, mx.array(self.context[a + 1 : b + 1], mx.uint32), self._cache, a)[-1:]
                self._pairs.extend(range(a, b))
        assert outputs is not None
        return outputs

    def _hidden(self) -> HiddenStates:
        hidden = None if self._transaction is None else self._transaction.hidden
        assert hidden is not None  # a session with a drafter that has taps keeps them
        return hidden

    def _cut(self, entries: int) -> None:
        del self._pairs[entries:]
        self._cache.cut(entries)

    def _empty_cache(self) -> None:
        self._cache = self.head.new_cache()
        self._pairs: list[int] = []
        """The pair of each entry of the cache, ascending."""
        self._proposed = None
