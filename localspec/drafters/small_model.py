"""Drafts from a small model of the target's vocabulary, with a cache of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from localspec.drafters.protocol import Drafter, Draw, Proposal, common_prefix
from localspec.noise import Stream, round_keys
from localspec.penalties import penalise
from localspec.sampling import distribution
from localspec.target import Target
from localspec.tokens import Source
from localspec.transaction import PREFILL_STEP, Transaction


class ModelDrafter(Drafter):
    """A language model that runs ahead of the target.

    Under coupled acceptance it draws with the target's own noise, so that the two agree as often as their
    distributions allow; under the other rules it draws with noise of its own and hands over q as it was drawn from.

    It applies the settings' filters, logit bias and penalties, each draft seeing the drafts before it, and XTC with
    the target's coin; not the caller's logits processors, which are made for the target. q is what all that leaves.
    """

    name: Source = "draft"

    def __init__(self, model: Any, tokenizer: Any = None, *, context_length: int | None = None) -> None:
        """`model` is what mlx_lm.load returned; `tokenizer`, when given, is compared with the target's."""
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.context_length = context_length
        self._target = Target(model)
        self._drafted: list[int] = []
        self._empty_caches()

    def fresh(self) -> ModelDrafter:
        return ModelDrafter(self.model, self.tokenizer, context_length=self.context_length)

    def check(self, target: Any, tokenizer: Any) -> None:
        if self.tokenizer is not None and tokenizer is not None:
            from localspec.vocabulary import check_same_vocabulary

            check_same_vocabulary(tokenizer, self.tokenizer)

    def longest(self) -> int:
        """What is left of its own context window."""
        if not self.context or self.context_length is None:
            return 2**31 if self.context else 0
        return max(self.context_length - len(self.context), 0)

    def propose(self, length: int, draw: Draw) -> Proposal | None:
        length = min(length, self.longest())
        if not length:
            return None
        try:
            return self._propose(length, draw)
        except BaseException:
            # Whatever the pass left behind, the context is intact: the caches are built again from it.
            self._empty_caches()
            raise

    def _propose(self, length: int, draw: Draw) -> Proposal | None:
        settings, end = draw.settings, len(self.context)
        coupled = settings.accept == "coupled"
        stream = Stream.GUMBEL if coupled else Stream.DRAFT
        keys = range(end, end + length) if coupled else round_keys(end, length)
        vocabulary = min(self._target.vocabulary_size, draw.vocabulary_size)
        y, newest = mx.array(self._catch_up(), mx.uint32), mx.array(self.context[-1:], mx.uint32)
        tokens: list[mx.array] = []
        chances: list[mx.array] = []
        rows: list[mx.array] = []
        for i in range(length):
            allowed = None
            if draw.allowed is not None:
                allowed = draw.allowed(mx.concatenate(tokens).tolist() if tokens else [])  # type: ignore[arg-type]
                if allowed is None or not allowed[:vocabulary].any():
                    break
            logits = self._transaction.forward(y)[-1:, :vocabulary]
            fed = mx.concatenate([newest, *tokens])
            logits = penalise(logits, settings, self.context[:-1], fed, draw.vocabulary_size)
            if allowed is not None:
                logits = mx.where(mx.array(allowed[:vocabulary]), logits, -math.inf)
            drawn = distribution(logits, settings, draw.coins(end + i, 1), draw.xtc_exempt)
            noise = None
            if not drawn.greedy:
                noise = draw.noise.gumbel([keys[i]], draw.vocabulary_size, stream)[:, :vocabulary]
            y = drawn.choose(noise)
            tokens.append(y)
            chances.append(drawn.log_probability_of(y))
            if not coupled and not drawn.greedy:
                q = drawn.probabilities()
                rows.append(mx.pad(q, [(0, 0), (0, draw.vocabulary_size - vocabulary)]))
        if not tokens:
            return None
        # One evaluation for the whole proposal: no round trip to the host between its tokens, but under a grammar.
        ids, chance = mx.concatenate(tokens), mx.exp(mx.concatenate(chances))
        mx.eval(ids, chance, *rows)
        self._drafted = ids.tolist()  # type: ignore[assignment]
        chances_drawn: list[float] = chance.tolist()  # type: ignore[assignment]
        # A token is no guess any more, and q no distribution, where this model's logits are not finite.
        sound = next((i for i, one in enumerate(chances_drawn) if not math.isfinite(one)), length)
        proposal = Proposal(self._drafted, self.name, mx.concatenate(rows) if rows else None, chances_drawn)
        return proposal.cut(sound) if sound else None

    def commit(self, tokens: Sequence[int]) -> None:
        # The caches hold the old context and all drafts but the last, where they were proposed from it.
        start = len(self.context)
        self.context.extend(tokens)
        if self._transaction.held > start - 1:
            right = start + common_prefix(self._drafted[:-1], tokens)
            right = min(right, len(self.context) - 1, self._transaction.held)
            if self._transaction.rewind(right):
                self._transaction.commit(right)
            else:
                self._empty_caches()  # chunked attention drops entries from pass to pass, and may need them again
        self._drafted = []

    def rewind(self, length: int) -> None:
        self.context = self.context[:length]
        self._drafted = []
        if not self._transaction.rewind(min(self._transaction.held, max(length - 1, 0))):
            self._empty_caches()

    def reset(self) -> None:
        super().reset()
        self._empty_caches()

    def _catch_up(self) -> list[int]:
        """The tokens of the context that the next pass has to run."""
        # A proposal that was never committed (the round failed) leaves its rows behind: taken back here.
        if not self._transaction.rewind(min(self._transaction.held, len(self.context) - 1)):
            self._empty_caches()
        # The target may have more rows: an id that this model lacks is read as its id 0, MLX would read out of bounds.
        rows = self._target.vocabulary_size
        missing = [token if token < rows else 0 for token in self.context[self._transaction.held :]]
        if len(missing) > PREFILL_STEP:
            self._transaction.prefill(missing[:-1])
            missing = missing[-1:]
        return missing

    def _empty_caches(self) -> None:
        self._transaction = Transaction(self._target)
        self._drafted = []
