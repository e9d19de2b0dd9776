"""Requests to put to a model: written ones, ones that it makes up itself, and second turns.

A chat model that is given nothing but the beginning of a user's message writes such a message (Magpie, Xu et al. 2024):
what it makes up is what it was trained to answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from localspec.errors import LocalspecError
from localspec.train.decoding import BatchModel, Sampling, decode
from localspec.train.prompts import read_prompts
from localspec.train.shards import Sample

if TYPE_CHECKING:
    from localspec.engine import Engine

TASK, OWN, SECOND_TURN = "task", "own", "second-turn"
CYCLE = (TASK, OWN) * 4 + (SECOND_TURN,)
"""The kinds of batches, one after another; then again."""
WRITTEN = (TASK,) * 3 + (SECOND_TURN,)
"""The same without requests that the model makes up, which take as long as two answers."""

_LONGEST_REQUEST = 60
"""Tokens of a request that the model makes up."""
_LONGEST_TURN = 256
"""Tokens of a first turn, answer included, that gets a second."""
_LONGEST_TASK = 448
"""Tokens of a written prompt, with the chat template around it."""
_TRIES = 6
"""How often a whole batch of requests is made up, at most, to have one of acceptable ones."""
_MARK = "MESSAGE-GOES-HERE"
_OPENING = re.compile(
    r"(add|analyze|answer|arrange|calculate|can|classify|combine|compare|complete|compose|"
    r"compute|convert|could|create|define|describe|design|determine|develop|discuss|do|edit|"
    r"estimate|evaluate|explain|extract|find|fix|generate|give|help|how|identify|imagine|"
    r"implement|improve|is|list|make|name|outline|plan|please|prepare|propose|provide|"
    r"recommend|rephrase|rewrite|show|solve|sort|suggest|summarize|tell|translate|turn|use|"
    r"what|when|where|which|who|why|write)\b",
    re.IGNORECASE,
)
_WISHES = ("i need", "i'd like", "i would like", "i want", "i'm looking for", "help me", "please", "i'm trying to")


class Requests:
    """The prompts of each batch, as ids, the same ones for the same seed and batch size."""

    def __init__(
        self,
        engine: Engine,
        seed: int,
        size: int,
        earlier: Callable[[int], Sequence[Sample]],
        model: BatchModel | None = None,
        cycle: Sequence[str] = CYCLE,
    ) -> None:
        """`size`: prompts in a batch. `earlier`: the samples of a batch before this one, for second turns.

        `model` decodes in place of the engine's own, where there is one. `cycle`: CYCLE or WRITTEN.
        """
        self._cycle = cycle
        self._engine = engine
        self._model = engine.model if model is None else model
        self._seed = seed
        self._size = size
        self._earlier = earlier

    def kind(self, number: int) -> str:
        """Of the batch of that number."""
        return self._cycle[number % len(self._cycle)]

    def batch(self, number: int) -> list[list[int]]:
        """The prompts of a batch; fewer than its size, or none, where the model made up too little."""
        kind = self.kind(number)
        if kind == TASK:
            return self._tasks(number)
        return self._own(number) if kind == OWN else self._second_turns(number)

    def _tasks(self, number: int) -> list[list[int]]:
        # Those of a cycle are dealt out by length, so that little of a batch is padding.
        cycle, place = divmod(number, len(self._cycle))
        batches = self._cycle.count(TASK)
        first = cycle * batches * self._size
        texts = islice(read_prompts().shuffled(self._seed), first, first + batches * self._size)
        prompts = [self._encode(text) for text in texts]
        prompts = sorted((prompt for prompt in prompts if len(prompt) <= _LONGEST_TASK), key=len)
        begin = self._cycle[:place].count(TASK) * self._size
        return prompts[begin : begin + self._size]

    def _own(self, number: int) -> list[list[int]]:
        tokenizer, ends = self._engine.tokenizer, self._engine.end_ids
        opening = self._engine.tokenize(self._around([{"role": "user", "content": _MARK}])[0])
        texts: dict[str, None] = {}  # a set that keeps its order
        for attempt in range(_TRIES):
            samplings = [Sampling(1.0, 0.95, (self._seed, number, attempt, row)) for row in range(self._size)]
            made_up = decode(self._model, [opening] * self._size, samplings, end_ids=ends, most=_LONGEST_REQUEST)
            finished = (tokenizer.decode(ids[:-1]).strip() for ids in made_up if ids[-1] in ends)
            texts.update(dict.fromkeys(text for text in finished if is_request(text, tokenizer.all_special_tokens)))
            if len(texts) >= self._size:
                break
        return [self._encode(text) for text in list(texts)[: self._size]]

    def _second_turns(self, number: int) -> list[list[int]]:
        choice = random.Random(f"{self._seed} {number}")
        ends = self._engine.end_ids
        first_turns = [
            [*sample.prompt, *sample.answer[:-1]]
            for before in range(number - len(self._cycle) + 1, number)
            for sample in self._earlier(before)
            if sample.answer[-1] in ends
            and sample.loop is None
            and len(sample.prompt) + len(sample.answer) <= _LONGEST_TURN
        ]
        follow_ups = read_prompts().follow_ups
        chosen = choice.sample(first_turns, min(self._size, len(first_turns)))
        tails = {text: self._tail(text) for text in follow_ups}
        return [[*turn, *tails[choice.choice(follow_ups)]] for turn in chosen]

    def _encode(self, text: str) -> list[int]:
        return self._engine.encode([{"role": "user", "content": text}])

    def _tail(self, follow_up: str) -> list[int]:
        """What comes behind an answer's text: its end, the follow-up, the beginning of the next answer."""
        turns = [("user", "Hello"), ("assistant", _MARK), ("user", follow_up)]
        return self._engine.tokenize(self._around([{"role": role, "content": text} for role, text in turns])[1])

    def _around(self, messages: list[dict[str, str]]) -> tuple[str, str]:
        before, mark, behind = self._engine.render(messages).partition(_MARK)
        if not mark:
            raise LocalspecError(f"{self._engine.name}'s chat template leaves messages out: choose another model")
        return before, behind


def is_request(text: str, control: Iterable[str] = ()) -> bool:
    """Whether a message asks for something, in English prose, without any of the `control` tokens."""
    if len(text.split()) < 4 or len(text) > 400 or any(token in text for token in control):
        return False
    if sum(character.isascii() and (character.isprintable() or character == "\n") for character in text) < len(text):
        return False
    return text.endswith("?") or _OPENING.match(text) is not None or any(wish in text.lower() for wish in _WISHES)
