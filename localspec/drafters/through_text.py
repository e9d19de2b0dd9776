"""Drafts from a model with another tokenizer, by way of the text.

The context's text is spelt in the draft's ids, the draft continues it, and what it says is spelt in the target's ids.
That is slower than a draft with the target's own vocabulary, and tokens that do not survive the way there and back are
not drafted. What is emitted does not depend on it: these are guesses like any others.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from localspec.drafters.protocol import NO_BOUND, Drafter, Draw, Proposal, common_prefix
from localspec.drafters.small_model import ModelDrafter
from localspec.drafters.spelling import MARK, TAIL, Spelling
from localspec.drafters.translation import Translation
from localspec.errors import IncompatibleDrafterError
from localspec.settings import Settings
from localspec.tokens import Source
from localspec.vocabulary import fingerprint

_GREEDY = Settings(temperature=0)


class TextDrafter(Drafter):
    """A language model with a vocabulary of its own that runs ahead of the target.

    It drafts greedily at every temperature: noise and filters belong to the target's ids, and so do penalties. Its
    drafts are a function of the context, so that their q is one-hot.
    """

    name: Source = "text"

    def __init__(self, model: Any, tokenizer: Any, target_tokenizer: Any, *, context_length: int | None = None) -> None:
        """`model`, `tokenizer`: the draft's, what mlx_lm.load returned. `context_length`: the draft's, in its ids.

        Raises IncompatibleDrafterError where one of the two has no tokenizer.
        """
        super().__init__()
        if tokenizer is None or target_tokenizer is None:
            raise IncompatibleDrafterError("drafting through text needs the tokenizers of both models: pass them")
        self.target_tokenizer = target_tokenizer
        self._inner = ModelDrafter(model, context_length=context_length)
        self._source, self._drafts = Spelling(target_tokenizer), Spelling(tokenizer)
        self._torn = False
        """Whether the draft's context may not be what `_translation` says: only ever after an interrupt."""
        self._start_over()

    def fresh(self) -> TextDrafter:
        twin = copy.copy(self)  # reading a tokenizer anew would take its time
        twin.context, twin._inner = [], self._inner.fresh()
        twin._start_over()
        return twin

    def check(self, target: Any, tokenizer: Any) -> None:
        if tokenizer is self.target_tokenizer:
            return
        if tokenizer is None or fingerprint(tokenizer) != fingerprint(self.target_tokenizer):
            raise IncompatibleDrafterError("this drafter was given another tokenizer than the target's: pass that one")

    def longest(self) -> int:
        return NO_BOUND if self.context else 0

    def commit(self, tokens: Sequence[int]) -> None:
        self.context.extend(tokens)  # translated when a proposal is asked for

    def rewind(self, length: int) -> None:
        self.context = self.context[:length]
        self._start_over()

    def reset(self) -> None:
        super().reset()
        self._inner.reset()
        self._start_over()

    def propose(self, length: int, draw: Draw) -> Proposal | None:
        self._read_on()
        if not self._translation.ids or self._translation.pending:
            return None
        # One more than asked for: the last token of a text may go on, and is not drafted.
        inner = replace(draw, settings=_GREEDY, vocabulary_size=self._drafts.size, xtc_exempt=(), allowed=None)
        said = self._inner.propose(length + 1, inner)
        tokens = [] if said is None else self._in_target_ids(said.tokens)[:length]
        return Proposal(tokens, self.name) if tokens else None

    def _in_target_ids(self, said: Sequence[int]) -> list[int]:
        """What of the draft's words can be drafted."""
        names = self._drafts.specials
        end = next((i for i, token in enumerate(said) if token in names), len(said))
        text, broken, _ = self._drafts.added_text(self._translation.run, said[:end]).partition(MARK)
        joined = self._source.continued(self._run(), text)
        if joined is None or joined[0]:
            return []  # with this behind it, the context's last token would have been another one
        tokens = joined[1]
        if broken or end == len(said):
            return tokens[:-1]
        special = self._source.special_ids.get(names[said[end]])
        return tokens if special is None else [*tokens, special]

    def _run(self) -> list[int]:
        """The context's ids since the last special token; of many, the last ones."""
        recent = self.context[-TAIL:]
        start = next((i + 1 for i in reversed(range(len(recent))) if recent[i] in self._source.specials), 0)
        return recent[start:]

    def settle(self) -> None:
        self._read_on()  # else what is out would be thrown away with the caches it is in
        self._inner.settle()

    def _read_on(self) -> None:
        """Translate what was committed since the last time, and let the draft model know."""
        new = self.context[self._read :]
        if not new:
            return
        self._torn = True
        kept = self._translation.read(new)
        ids = self._translation.ids
        if not self._read:
            kept = common_prefix(self._inner.context, ids)
        if kept < len(self._inner.context):
            self._inner.rewind(kept)
        self._inner.commit(ids[kept:])
        self._read += len(new)
        self._torn = False

    def _start_over(self) -> None:
        """Translate the context from its beginning, the next time; what the draft model has read of it, it keeps."""
        if self._torn:
            self._inner.reset()  # an interrupt came between its context and ours
        self._translation, self._read, self._torn = Translation(self._source, self._drafts), 0, False
