"""What a corpus gives to train on, and what is kept apart to measure with.

Apart are whole tasks of prompts.toml, with every answer to any of their requests, and a share of the requests that the
model made up; a second turn goes where its first one is. Whatever shares a run of words with the bench's prompts is
left out. Knows token ids and the texts of prompts, nothing of models.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localspec.train.prompts import Prompts
from localspec.train.shards import Sample

RUN = 8
"""Words in a row that no prompt may have in common with the bench."""
_EVERY = 12
"""Of so many tasks one is kept apart, and of so many requests that the model made up."""
_SHORTEST = 16
"""Tokens of an answer that is of use."""


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and its answer, without the repetition it may end in."""

    kind: str
    """As in Sample."""
    tokens: tuple[int, ...]
    """Prompt and answer."""
    start: int
    """Tokens of the prompt."""
    temperature: float
    held_out: bool
    """Not to be trained on."""


class Split:
    """Decides what becomes of each sample."""

    def __init__(
        self,
        prompts: Prompts,
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
        kept_out: Iterable[str],
    ) -> None:
        """`encode` makes a prompt's ids of a request, `decode` a text of ids; `kept_out`: texts of the bench."""
        self._decode = decode
        self._kept_out = {run for text in kept_out for run in word_runs(text)}
        self._apart: dict[tuple[int, ...], bool] = {}
        """Of every first prompt that is known so far, whether it is kept apart."""
        for number, task in enumerate(prompts.tasks):
            for text in prompts.of(task):
                self._apart[tuple(encode(text))] = number % _EVERY == _EVERY // 2
        self._seen: set[tuple[int, ...]] = set()

    def examples(self, samples: Iterable[Sample]) -> list[Example]:
        """Those that are of use, each once. Second turns come after their first turns, as they do in a corpus."""
        chosen = []
        for sample in samples:
            apart = self._is_apart(sample.prompt)
            tokens = sample.prompt + sample.answer[: sample.loop]
            if len(tokens) - len(sample.prompt) < _SHORTEST or tokens in self._seen:
                continue
            if self._kept_out & word_runs(self._decode(sample.prompt)):
                continue
            self._seen.add(tokens)
            chosen.append(Example(sample.kind, tokens, len(sample.prompt), sample.temperature, apart))
        return chosen

    def _is_apart(self, prompt: tuple[int, ...]) -> bool:
        for end in range(len(prompt), 0, -1):
            if prompt[:end] in self._apart:
                return self._apart[prompt[:end]]
        digest = hashlib.sha256(np.asarray(prompt, dtype=np.uint32).tobytes()).digest()
        self._apart[prompt] = digest[0] % _EVERY == 0
        return self._apart[prompt]


def word_runs(text: str) -> set[tuple[str, ...]]:
    """All runs of RUN words in a text."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}


def frequent(examples: Iterable[Example], size: int, vocabulary: int) -> NDArray[np.int32]:
    """The `size` ids that answers have most often, ascending; low ids first among those that are equally frequent."""
    counts = np.zeros(vocabulary, dtype=np.int64)
    for example in examples:
        np.add.at(counts, np.asarray(example.tokens[example.start :]), 1)
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def coverage(examples: Iterable[Example], ids: NDArray[np.int32]) -> float:
    """The share of the answers' tokens that `ids` hold."""
    counts = Counter(token for example in examples for token in example.tokens[example.start :])
    return sum(counts[int(token)] for token in ids) / max(1, sum(counts.values()))
