"""Hidden states of a corpus on disk: made once, read in every epoch.

One file per batch of a corpus: numbers of 16 bits that are bfloat16's, [tokens, taps, hidden size], the examples one
behind another. Needs the extra `train`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localspec.train.examples import Example
from localspec.train.torch_llama import TorchLlama

_TOKENS = 2048
"""Of a pass, padding included."""


class States:
    """A folder of hidden states behind the layers `taps`."""

    def __init__(self, folder: Path, taps: Sequence[int]) -> None:
        self.folder = folder / ("taps-" + "-".join(map(str, taps)))
        self.taps = tuple(taps)

    def make(self, llama: TorchLlama, number: int, examples: Sequence[Example]) -> None:
        """Those of a corpus's batch, unless they are there."""
        path = self._path(number)
        if path.exists():
            return
        started = time.perf_counter()
        ends = np.cumsum([len(example.tokens) for example in examples], dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        states = np.zeros((total, len(self.taps), llama.hidden_size), dtype=np.uint16)
        order = sorted(range(len(examples)), key=lambda row: len(examples[row].tokens))
        while order:
            width = len(examples[order[-1]].tokens)
            rows, order = order[-max(1, _TOKENS // width) :], order[: -max(1, _TOKENS // width)]
            ids = torch.zeros((len(rows), width), dtype=torch.long)
            for place, row in enumerate(rows):
                ids[place, : len(examples[row].tokens)] = torch.tensor(examples[row].tokens)
            found = llama.taps(ids, self.taps).view(torch.uint16).numpy()
            for place, row in enumerate(rows):
                length = len(examples[row].tokens)
                states[ends[row] - length : ends[row]] = found[place, :length]
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".partial")
        with temporary.open("wb") as file:
            np.save(file, states)
        temporary.replace(path)
        rate = total / (time.perf_counter() - started)
        print(f"hidden states of batch {number}: {total} tokens, {rate:.0f} tokens/s", flush=True)

    def open(self, number: int, examples: Sequence[Example]) -> list[NDArray[np.uint16]]:
        """Views [tokens, taps, hidden size] of a file that `make` made of these examples, one per example."""
        states = np.load(self._path(number), mmap_mode="r")
        if not examples:
            return []
        return list(np.split(states, np.cumsum([len(example.tokens) for example in examples])[:-1]))

    def _path(self, number: int) -> Path:
        return self.folder / f"states-{number:05}.npy"


def as_floats(states: NDArray[np.uint16]) -> Tensor:
    """float32 of bfloat16 bits."""
    return torch.from_numpy(np.array(states)).view(torch.bfloat16).float()
