"""A context in the ids of another tokenizer, kept up with as it grows."""

from __future__ import annotations

from collections.abc import Sequence

from localspec.drafters.spelling import TAIL, Spelling


class Translation:
    """Ids of `source` in, ids of `drafts` out, by way of the text.

    A special token is the other tokenizer's of the same name. Where that has none, what stood before is left out: it
    cannot be said what the token meant.
    """

    def __init__(self, source: Spelling, drafts: Spelling) -> None:
        self._source, self._drafts = source, drafts
        self.ids: list[int] = list(drafts.start)
        """The other tokenizer's ids of all whole characters so far."""
        self._run = len(self.ids)
        """Where in them the text since the last special token begins."""
        self._characters = source.texts.new()

    @property
    def pending(self) -> bool:
        """Whether the context ends within a character."""
        return self._characters.pending

    @property
    def run(self) -> list[int]:
        """The ids since the last special token; of many, the last ones."""
        return self.ids[max(self._run, len(self.ids) - TAIL) :]

    def read(self, tokens: Sequence[int]) -> int:
        """Take the next ids of the context; returns how many of `ids` stayed as they were."""
        kept, pieces = len(self.ids), []
        for token in tokens:
            special = self._source.specials.get(token)
            if special is None:
                pieces.append(self._characters.add(token))
                continue
            pieces.append(self._characters.finish())
            kept = min(kept, self._write("".join(pieces)), self._write_special(special))
            pieces = []
            self._characters = self._source.texts.new()
        return min(kept, self._write("".join(pieces)))

    def _write(self, text: str) -> int:
        if not text:
            return len(self.ids)
        # Where the two cannot be joined, the text begins a new word: a seam that no tokenizer would make, no more.
        replaced, new = self._drafts.continued(self.run, text) or (0, self._drafts.encode(text))
        kept = len(self.ids) - replaced
        self.ids[kept:] = new
        return kept

    def _write_special(self, name: str) -> int:
        id_, kept = self._drafts.special_ids.get(name), len(self.ids)
        if id_ is None:
            kept = len(self._drafts.start)
            del self.ids[kept:]
        elif not self.ids == self._drafts.start == [id_]:  # a text begins once
            self.ids.append(id_)
        self._run = len(self.ids)
        return kept
