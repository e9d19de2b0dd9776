"""A corpus, made ready for training: examples, draft ids, hidden states. Needs the extra `train`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localspec.bench.week import read_week
from localspec.bench.workloads import AGENT_LOGS, MORE, WORKLOADS, read_workloads
from localspec.errors import LocalspecError
from localspec.train.examples import Example, Split
from localspec.train.lessons import Lesson
from localspec.train.prompts import read_prompts
from localspec.train.shards import Shards
from localspec.train.states import States

if TYPE_CHECKING:
    from localspec.engine import Engine
    from localspec.train.torch_llama import TorchLlama


@dataclass(frozen=True, slots=True)
class Material:
    """What a corpus comes to."""

    learned: list[Lesson]
    """To train on."""
    held_out: list[Lesson]
    """To measure with."""


def prepare(engine: Engine, llama: TorchLlama, corpus: Path, states: Path, taps: Sequence[int]) -> Material:
    """Read a corpus and make its hidden states in the folder `states`, those that are not there yet.

    Raises LocalspecError when the corpus has nothing to train on, or nothing to measure with.
    """
    by_batch = read_examples(engine, corpus)
    folder = States(states, taps)
    lessons: list[Lesson] = []
    for number, examples in by_batch.items():
        folder.make(llama, number, examples)
        opened = folder.open(number, examples)
        lessons += [Lesson(example, found) for example, found in zip(examples, opened, strict=True)]
    learned = [lesson for lesson in lessons if not lesson.example.held_out]
    held_out = [lesson for lesson in lessons if lesson.example.held_out]
    if not learned or not held_out:
        raise LocalspecError(f"{corpus} has {len(learned)} answers to train on, {len(held_out)} to measure with")
    return Material(learned, held_out)


def read_examples(engine: Engine, corpus: Path) -> dict[int, list[Example]]:
    """The examples of each batch of a corpus."""
    bench = [
        prompt.text
        for name in (WORKLOADS, AGENT_LOGS, MORE)
        for kind in read_workloads(name)
        for prompt in kind.prompts
    ]
    bench += [prompt.text for prompt in read_week()]

    def encode(text: str) -> list[int]:
        return engine.encode([{"role": "user", "content": text}])

    split = Split(read_prompts(), encode, engine.tokenizer.decode, bench)
    shards = Shards(corpus)
    return {number: split.examples(shards.read(number)) for number in shards.numbers()}
