"""Rules that keep something between sessions: what each makes of earlier ones."""

from __future__ import annotations

from abc import ABC, abstractmethod

from localspec.bench.memory import Memory
from localspec.bench.replays.llama_cpp import STATIC, LlamaCpp, count, counts
from localspec.bench.replays.own import LEAST, Localspec
from localspec.bench.replays.rule import Rule
from localspec.bench.replays.suffix import SuffixDecoding, Tree
from localspec.bench.streams import Stream


class Sessions(ABC):
    """One user's sessions in sequence."""

    name: str

    @abstractmethod
    def begin(self) -> Rule:
        """A rule for a new text, which knows what was taught."""

    @abstractmethod
    def teach(self, stream: Stream) -> None:
        """Keep what this rule keeps of a prompt and its answer."""


class LlamaCppSessions(Sessions):
    """The dynamic level takes prompts and answers; the static one, if any, is a corpus's."""

    name = "llama.cpp, dynamic"

    def __init__(self, corpus: list[Stream] | None = None) -> None:
        self._earlier = counts()
        self._corpus = counts()
        if corpus:
            self.name = "llama.cpp, dynamic and static"
        for stream in corpus or ():
            count(self._corpus, stream.answer, 0, (STATIC,))

    def begin(self) -> Rule:
        return LlamaCpp(self._earlier, self._corpus)

    def teach(self, stream: Stream) -> None:
        count(self._earlier, (*stream.prompt, *stream.answer), 0)


class SuffixSessions(Sessions):
    """A tree over all earlier answers."""

    name = "suffix decoding, earlier answers"

    def __init__(self) -> None:
        self._tree = Tree()

    def begin(self) -> Rule:
        return SuffixDecoding(self._tree)

    def teach(self, stream: Stream) -> None:
        self._tree.add(stream.answer, 0)


class OwnSessions(Sessions):
    """Our learned level."""

    name = "localspec, learned"

    def __init__(self, least: float = LEAST) -> None:
        self.least = least
        self._memory = Memory()

    def begin(self) -> Rule:
        return Localspec(self.least, self._memory.drafter())

    def teach(self, stream: Stream) -> None:
        self._memory.teach(stream)
