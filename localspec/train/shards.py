"""Answers on disk: one file per batch, and a note of the recipe beside them. Knows nothing of models."""

from __future__ import annotations

import io
import json
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localspec.errors import LocalspecError
from localspec.paths import atomic_write_bytes, atomic_write_text

_RECIPE = "recipe.json"
_NAME = re.compile(r"batch-(\d{5})\.npz")
_MODE = 0o644
# RuntimeError: flipped bits ask zipfile for a password, or for a method of compression that it lacks.
_DAMAGE = (OSError, ValueError, TypeError, LookupError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError)


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt and the model's answer to it, as ids."""

    kind: str
    """Where the prompt came from: "task", "own" or "second-turn"."""
    prompt: tuple[int, ...]
    """With the chat template around it, up to where the answer begins."""
    answer: tuple[int, ...]
    """With its end token, where it has one; one id at least."""
    temperature: float
    loop: int | None
    """Where endless repetition begins in the answer, its first piece left out; None where it does not end in any."""


class Shards:
    """A folder of numbered batches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, recipe: Mapping[str, object]) -> None:
        """Note the recipe. Raises LocalspecError when the folder has batches of another one."""
        place = self.folder / _RECIPE
        text = json.dumps(recipe, indent=1, sort_keys=True) + "\n"
        try:
            if place.read_text(encoding="utf-8") != text:
                raise LocalspecError(f"{self.folder} was made by another recipe ({place}): name another folder")
        except FileNotFoundError:
            atomic_write_text(place, text, _MODE)

    def numbers(self) -> list[int]:
        """Which batches are there, in order."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(file.name) for file in self.folder.iterdir())
        return sorted(int(name[1]) for name in found if name is not None)

    def write(self, number: int, samples: Sequence[Sample]) -> None:
        """Write a batch whole or not at all."""
        data = io.BytesIO()
        np.savez_compressed(
            data,
            kind=np.array([s.kind for s in samples], dtype="U16"),
            prompts=np.array([token for s in samples for token in s.prompt], dtype=np.uint32),
            prompt_lengths=np.array([len(s.prompt) for s in samples], dtype=np.int32),
            answers=np.array([token for s in samples for token in s.answer], dtype=np.uint32),
            answer_lengths=np.array([len(s.answer) for s in samples], dtype=np.int32),
            temperature=np.array([s.temperature for s in samples], dtype=np.float64),
            loop=np.array([-1 if s.loop is None else s.loop for s in samples], dtype=np.int32),
        )
        atomic_write_bytes(self.folder / f"batch-{number:05}.npz", data.getvalue(), _MODE)

    def read(self, number: int) -> list[Sample]:
        """The samples of a batch. Raises LocalspecError when it cannot be read."""
        place = self.folder / f"batch-{number:05}.npz"
        try:
            with np.load(place, allow_pickle=False) as data:
                found = {name: data[name] for name in data.files}
            prompts = _cut(found["prompts"], found["prompt_lengths"])
            answers = _cut(found["answers"], found["answer_lengths"])
            if not all(answers):
                raise ValueError("an answer of no ids")
            return [
                Sample(str(kind), prompt, answer, float(temperature), None if loop < 0 else int(loop))
                for kind, prompt, answer, temperature, loop in zip(
                    found["kind"], prompts, answers, found["temperature"], found["loop"], strict=True
                )
            ]
        except _DAMAGE as error:
            raise LocalspecError(f"{place} is not a batch of answers ({error}): remove it to make it anew") from error

    def samples(self) -> Iterator[Sample]:
        """All samples, batch by batch."""
        for number in self.numbers():
            yield from self.read(number)


def _cut(tokens: NDArray[np.uint32], lengths: NDArray[np.int32]) -> list[tuple[int, ...]]:
    """The pieces of such lengths that were written one after another."""
    if int(lengths.sum()) != len(tokens):
        raise ValueError(f"{len(tokens)} ids, where there should be {int(lengths.sum())}")
    ends = np.cumsum(lengths).tolist()
    return [tuple(tokens[end - length : end].tolist()) for end, length in zip(ends, lengths.tolist(), strict=True)]
