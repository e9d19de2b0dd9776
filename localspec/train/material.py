"""A corpus, made ready for training: examples, draft ids, hidden states. Needs the extra `train`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localspec.bench.week import read_week
from localspec.bench.workloads import AGENT_LOGS, MORE, WORKLOADS, read_workloads
from localspec.errors import LocalspecError
from localspec.train.examples import Split
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


def prepare(engine: Engine, llama: TorchLlama, corpora: Sequence[Path], work: Path, taps: Sequence[int]) -> Material:
    """Read corpora and make their hidden states in the folder `work`, those that are not there yet.

    Raises LocalspecError when there is nothing to train on or to measure with, and for two corpora of one name.
    """
    if len({corpus.name for corpus in corpora}) < len(corpora):
        raise LocalspecError("two corpora have the same name: hidden states are kept by their folders' names")
    split = Split(read_prompts(), lambda text: engine.encode([_user(text)]), engine.tokenizer.decode, bench_texts())
    lessons: list[Lesson] = []
    for corpus in corpora:
        shards, states = Shards(corpus), States(work / corpus.name, taps)
        for number in shards.numbers():
            examples = split.examples(shards.read(number))
            states.make(llama, number, examples)
            opened = states.open(number, examples)
            lessons += [Lesson(example, found) for example, found in zip(examples, opened, strict=True)]
    learned = [lesson for lesson in lessons if not lesson.example.held_out]
    held_out = [lesson for lesson in lessons if lesson.example.held_out]
    if not learned or not held_out:
        raise LocalspecError(
            f"{len(learned)} answers to train on, {len(held_out)} to measure with: make a larger corpus"
        )
    return Material(learned, held_out)


def bench_texts() -> list[str]:
    """What `localspec bench` asks."""
    files = (WORKLOADS, AGENT_LOGS, MORE)
    prompts = [prompt for file in files for kind in read_workloads(file) for prompt in kind.prompts]
    return [prompt.text for prompt in [*prompts, *read_week()]]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
