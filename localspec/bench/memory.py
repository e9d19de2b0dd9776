"""What earlier answers of a recording taught, for replays of days in sequence. Nothing touches the disk."""

from __future__ import annotations

from localspec.bench.streams import Stream
from localspec.drafters.ngram import NgramDrafter
from localspec.ngrams.answers import Answers, joined
from localspec.ngrams.file import Text, sightings
from localspec.ngrams.lessons import lessons
from localspec.ngrams.store import NgramStore


class Memory:
    """The learned level of one tokenizer, as sessions leave it."""

    def __init__(self) -> None:
        self._store = NgramStore()

    def drafter(self) -> NgramDrafter:
        """A drafter that begins a text knowing what was taught by now, and what will be."""
        return NgramDrafter(levels=(("learned", lambda: self._store),))

    def teach(self, stream: Stream) -> None:
        """Learn an answer, as the engine does when it was given."""
        text = Text(tuple(lessons(stream.prompt, stream.answer)), None)
        for keys, followers in sightings(text):
            self._store.merge(keys, followers, day=stream.day)
        known = self._store.answers.tokens
        self._store.answers = Answers(joined(known, [tokens for tokens, _ in text.lessons]))
