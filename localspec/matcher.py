"""Where one generation stands in its grammar, and which tokens may follow there.

The place moves with kept tokens only. Rows behind drafts are looked up by walking ahead along the drafts and going
back. Knows nothing of caches, drafters or acceptance rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from localspec.drafters.protocol import Proposal, common_prefix
from localspec.errors import GrammarError, SettingsError
from localspec.grammar import Grammar, llguidance, one_line
from localspec.sampling import Distribution, distribution
from localspec.settings import Settings

Row = NDArray[np.bool_]
"""Which ids are allowed at one place, [vocabulary]."""


class Matchers:
    """Makes a Matcher for each generation of one engine. The tokenizer is read once, when a grammar first needs it."""

    def __init__(self, tokenizer: Any, vocabulary_size: int) -> None:
        """`vocabulary_size`: columns of the model's logits."""
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._read: Any = None

    def new(self, grammar: Grammar, end_ids: frozenset[int]) -> Matcher:
        """A matcher at the beginning of a text that one of `end_ids` ends.

        Raises SettingsError where the tokenizer is missing, or of a kind whose tokens' texts are not known, and where
        none of its texts matches.
        """
        library = llguidance()
        if self._tokenizer is None:
            raise SettingsError("a grammar needs a tokenizer, and this engine has none")
        if self._read is None:
            self._read = self._read_tokenizer()
        native = library.LLMatcher(self._read, grammar.compiled, log_level=0)
        matcher = Matcher(native, self._vocabulary_size, end_ids, frozenset(self._read.eos_tokens))
        try:
            matcher.rows([])
            if matcher.allowed([]) is None:
                raise SettingsError("this grammar cannot be used: it matches the empty text alone")
        except GrammarError as error:
            raise SettingsError(f"this grammar cannot be used: {error}") from None
        return matcher

    def _read_tokenizer(self) -> Any:
        from llguidance.hf import from_tokenizer

        # mlx-lm's wrapper answers for the tokenizer in it, but is not one.
        inner = getattr(self._tokenizer, "__dict__", {}).get("_tokenizer")
        tokenizer: Any = inner if hasattr(inner, "backend_tokenizer") else self._tokenizer
        try:
            return from_tokenizer(tokenizer, n_vocab=max(self._vocabulary_size, len(tokenizer)))
        except ValueError as error:
            raise SettingsError(f"no grammar can be used with this tokenizer: {one_line(str(error))}") from None


class Matcher:
    """One generation's place in a grammar."""

    def __init__(
        self, native: Any, vocabulary_size: int, end_ids: frozenset[int], foreign_ends: frozenset[int] = frozenset()
    ) -> None:
        """`native`: an llguidance.LLMatcher at its beginning. `foreign_ends`: ids that it takes for the end of a text;
        only those in `end_ids` are allowed, and where the text is complete."""
        self._native = native
        self._size = vocabulary_size
        self._ends = np.array(sorted(i for i in end_ids if i < vocabulary_size), np.int64)
        self._end_ids = end_ids
        self._foreign = np.array(sorted(i for i in foreign_ends if i < vocabulary_size), np.int64)
        self._ahead: list[int] = []
        """Drafts that the native matcher has walked beyond the kept tokens."""
        self._rows: list[Row | None] = []
        """What is allowed behind the kept tokens, behind `_ahead[:1]`, and so on as far as was asked; None where the
        text is over."""
        self._kept = 0

    def rows(self, drafts: Sequence[int]) -> NDArray[np.bool_]:
        """What is allowed behind the kept tokens and behind each of the drafts, bool [len(drafts) + 1, vocabulary].

        Behind the end of a text that is everything: nothing there is ever kept. Raises GrammarError where a text that
        is not complete cannot go on, ValueError for drafts that are not allowed.
        """
        rows = [self.allowed(drafts[:i]) for i in range(len(drafts) + 1)]
        for i, row in enumerate(rows):
            if row is not None and not row.any():
                raise GrammarError(
                    f"nothing that the grammar allows after {self._kept + i} tokens of the text is in the model's "
                    "vocabulary"
                )
        return np.stack([np.ones(self._size, np.bool_) if row is None else row for row in rows])

    def allowed(self, drafts: Sequence[int]) -> Row | None:
        """What is allowed behind the drafts, bool [vocabulary]; None where the text is over."""
        return None if drafts and drafts[-1] in self._end_ids else self._row(drafts)

    def legal(self, drafts: Sequence[int]) -> int:
        """How many of the leading drafts are allowed, up to the end of the text.

        One from which the text cannot go on is not counted: it may be wrong, and is an error only once it is kept.
        """
        for i, token in enumerate(drafts):
            row = self.allowed(drafts[:i])
            if row is None or not row[token]:
                return i
            behind = self.allowed(drafts[: i + 1])
            if behind is not None and not behind.any():
                return i
        return len(drafts)

    def cut(self, proposal: Proposal) -> Proposal | None:
        """The proposal up to its first draft that is not allowed; None when nothing is left.

        q becomes the distribution of allowed drafts, since only those are judged: so the rule min(1, p/q) keeps the
        distribution of the text. Where a draft was cut, the token is drawn from p alone; where none was, the draft is
        one of q's among the allowed ones; the token is one of p's either way. (A drafter that asks `Draw.allowed` has
        such a q already.)
        """
        count = self.legal(proposal.tokens)
        if not count:
            return None
        proposal = proposal.cut(count)
        if proposal.q is None:
            return proposal
        q = mx.where(mx.array(self.rows(proposal.tokens)[:count]), proposal.q, 0.0)
        q = q / q.sum(axis=-1, keepdims=True)
        drawn = mx.take_along_axis(q, mx.array(proposal.tokens)[:, None], axis=-1)[:, 0]
        return replace(proposal, q=q, probabilities=drawn.tolist())  # type: ignore[arg-type]

    def forced(self, limit: int) -> list[int]:
        """The next tokens as far as each is the only one allowed; at most `limit`, and no end token."""
        tokens: list[int] = []
        while len(tokens) < limit:
            row = self._row(tokens)
            if row is None or np.count_nonzero(row) != 1:
                break
            only = int(row.argmax())
            if only in self._end_ids:
                break  # the pass has a row that says so
            tokens.append(only)
        return tokens

    def keep(self, token: int) -> bool:
        """Move on by a kept token. Returns whether the text is over without an end token, there being none."""
        if token in self._end_ids:
            return False
        row = self._row([])
        if row is None or not row[token]:
            raise ValueError(f"token {token} was kept, and is not allowed")
        if self._ahead and self._ahead[0] == token:
            # Walked already: what is known of the rows behind it stays true.
            del self._ahead[0], self._rows[0]
        else:
            self._back_to(0)
            self._rows.clear()
            self._consume(token)
        self._kept += 1
        return not len(self._ends) and self.allowed([]) is None

    def distribution(
        self,
        logits: mx.array,
        settings: Settings,
        drafts: Sequence[int],
        coins: mx.array | None = None,
        exempt: Sequence[int] = (),
    ) -> Distribution:
        """The distribution to sample from at each row of a pass over the newest token and `drafts`.

        logits: [len(drafts) + 1, vocabulary], any float dtype. What is not allowed gets -inf before temperature and
        filters, as from a logits processor behind all others; `logprobs` are the model's own all the same. The
        normalizer is not finite where the model's is not, and -inf where all that is allowed has a logit of -inf.
        """
        logits = logits.astype(mx.float32)
        mx.async_eval(logits)  # type: ignore[no-untyped-call]  # the pass runs while the rows are looked up
        rows = distribution(mx.where(mx.array(self.rows(drafts)), logits, -math.inf), settings, coins, exempt)
        own = mx.logsumexp(logits, axis=-1)
        usable = mx.where(mx.isfinite(own), rows.normalizer, own)
        return replace(rows, logprobs=logits - own[:, None], normalizer=usable)

    # `_rows` has a row for each of `_ahead`, from before it, and may have one more: that of the place itself.

    def _row(self, drafts: Sequence[int]) -> Row | None:
        shared = common_prefix(drafts, self._ahead)
        if shared < len(drafts):
            self._back_to(shared)
        for token in drafts[shared:]:
            row = self._here()
            if row is None or not row[token]:
                raise ValueError(f"draft {token} is not allowed")
            self._consume(token)
            self._ahead.append(token)
        return self._here() if len(drafts) == len(self._ahead) else self._rows[len(drafts)]

    def _here(self) -> Row | None:
        """The row of the place that the native matcher is at."""
        if len(self._rows) == len(self._ahead):
            self._rows.append(self._look())
        return self._rows[-1]

    def _back_to(self, count: int) -> None:
        """Go back to behind the first `count` tokens of `_ahead`."""
        steps = len(self._ahead) - count
        if steps and not self._native.rollback(steps):
            raise self._fault()
        del self._ahead[count:], self._rows[count + 1 :]

    def _consume(self, token: int) -> None:
        if not self._native.consume_token(token):
            raise self._fault()

    def _look(self) -> Row | None:
        bits = np.frombuffer(self._native.compute_bitmask(), np.uint8)
        if self._native.is_error():  # the bits then say that the text is over
            raise self._fault()
        row = np.unpackbits(bits, bitorder="little")[: self._size].view(np.bool_)
        complete = self._native.is_accepting()
        row[self._foreign] = False
        row[self._ends] = complete
        return None if complete and not row.any() else row

    def _fault(self) -> GrammarError:
        place = self._kept + len(self._ahead)
        reason = one_line(self._native.get_error())
        return GrammarError(f"the grammar cannot be followed after {place} tokens of the text: {reason}")
