"""Text in the ids of one tokenizer: how some ids go on when more text follows.

The text of special tokens is only text here: whoever wants the special token asks for its id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localspec.detokenizer import DetokenizerFactory
from localspec.drafters.protocol import common_prefix

TAIL = 24
"""The latest ids that are spelt again with what follows: what stands before them hardly ever changes by it, and a
round costs the same in a long text."""
MARK = "\ufffd"
"""What `decode` shows for part of a character."""


class Spelling:
    """One tokenizer, a Hugging Face one or mlx-lm's wrapper around it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.texts = DetokenizerFactory(tokenizer)
        self.specials: dict[int, str] = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        """The special tokens by id; added tokens that are not special are text like any other."""
        added = tokenizer.added_tokens_decoder
        self.specials |= {id_: token.content for id_, token in added.items() if token.special}
        self.special_ids = {token: id_ for id_, token in self.specials.items()}
        """The same by what they are called."""
        begun = tokenizer.encode("a")
        self.start = begun[:1] if begun and begun[0] == tokenizer.bos_token_id else []
        """The start token, where the tokenizer begins a text with one; else empty."""
        self.size = max(tokenizer.get_vocab().values(), default=-1) + 1
        """No token has an id from here on; the model may have rows for some."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without a start token; no special token is read out of it."""
        ids = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return list(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids that are no special tokens."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def added_text(self, ids: Sequence[int], more: Sequence[int]) -> str:
        """The text that `more` adds behind `ids`; empty where it changes the text before."""
        before = self.decode(ids[-TAIL:])
        both = self.decode([*ids[-TAIL:], *more])
        return both[len(before) :] if both.startswith(before) else ""

    def continued(self, ids: Sequence[int], text: str) -> tuple[int, list[int]] | None:
        """How `ids`, none of them special, go on when `text` follows: (how many of the last are replaced, by what).

        None where the end of `ids` is not what the tokenizer makes of their own text: then the text cannot tell.
        """
        if not ids:
            return 0, self.encode(text)
        tail = list(ids[-TAIL:])
        before = self.decode(tail)
        alone, both = self.encode(before), self.encode(before + text)
        # Where the tail begins within a word, or after a space that `decode` drops, its first ids come out otherwise.
        # They only have to come out in the same way both times.
        right = common_prefix(alone[::-1], tail[::-1])
        same = common_prefix(alone, both)
        if not right or same < len(alone) - right:
            return None
        return len(alone) - same, both[same:]
