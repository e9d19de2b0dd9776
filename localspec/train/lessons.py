"""Batches of texts with their hidden states, and how a head is judged on them. Needs the extra `train`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from localspec.train.block import Head
from localspec.train.examples import Example
from localspec.train.states import as_floats
from localspec.train.torch_llama import TorchLlama

_ROWS = 256
"""Positions whose logits are held at a time."""
_POOL = 32
"""Batches between which texts are sorted by length, so that little of a batch is padding."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """One example and the hidden states of its tokens."""

    example: Example
    states: NDArray[np.uint16]
    """bfloat16's bits, [tokens, taps, hidden size]."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Lessons of about the same length, padded at the end."""

    ids: Tensor
    """[batch, tokens]."""
    taps: Tensor
    """[batch, tokens, taps, hidden size], float32."""
    starts: Tensor
    """[batch]: tokens of each prompt."""
    lengths: Tensor
    """[batch]."""

    def counts(self, depth: int) -> Tensor:
        """Which rows of Head.drafts's result `depth` draft a token of an answer, from a position that drafting can
        begin at: [batch, tokens - 2 - depth]."""
        t = torch.arange(self.ids.shape[1] - 2 - depth)
        return (t >= self.starts[:, None] - 1) & (t + 2 + depth < self.lengths[:, None])


def collate(lessons: Sequence[Lesson]) -> Batch:
    """A batch of lessons."""
    lengths = [len(lesson.example.tokens) for lesson in lessons]
    ids = torch.zeros((len(lessons), max(lengths)), dtype=torch.long)
    taps = torch.zeros((len(lessons), max(lengths), *lessons[0].states.shape[1:]))
    for row, lesson in enumerate(lessons):
        ids[row, : lengths[row]] = torch.tensor(lesson.example.tokens)
        taps[row, : lengths[row]] = as_floats(lesson.states)
    return Batch(ids, taps, torch.tensor([lesson.example.start for lesson in lessons]), torch.tensor(lengths))


def epoch(lengths: Sequence[int], tokens: int, seed: str) -> list[list[int]]:
    """The numbers of all texts of such lengths, in batches of about `tokens` tokens, padding included, in an order that
    depends on the seed only."""
    shuffle = random.Random(seed)
    order = list(range(len(lengths)))
    shuffle.shuffle(order)
    mean = sum(lengths) / max(1, len(lengths))
    pool = max(1, int(_POOL * tokens / max(1.0, mean)))
    batches: list[list[int]] = []
    for begin in range(0, len(order), pool):
        batch: list[int] = []
        for text in sorted(order[begin : begin + pool], key=lambda n: lengths[n]):
            if batch and lengths[text] * (len(batch) + 1) > tokens:
                batches.append(batch)
                batch = []
            batch.append(text)
        batches.append(batch)
    shuffle.shuffle(batches)
    return batches


class Judge:
    """Compares what a head says with what its target says, over the draft ids."""

    def __init__(self, llama: TorchLlama, draft_ids: NDArray[np.int32]) -> None:
        self._llama = llama
        self.draft_ids = torch.from_numpy(draft_ids.astype(np.int64))
        self._rows = llama.embed(self.draft_ids).bfloat16()
        """[draft ids, hidden size]."""

    def loss(self, head: Head, batch: Batch, weights: Sequence[float]) -> Tensor:
        """Cross-entropy of each depth's drafts with the target's distribution, the mean over positions, weighted."""
        with torch.no_grad():
            wanted = torch.zeros(batch.ids.shape, dtype=torch.bool)
            for depth in range(len(weights)):
                wanted[:, 1 + depth : -1] |= batch.counts(depth)
            places = torch.cumsum(wanted.flatten(), 0).view(wanted.shape) - 1
            hidden = self._llama.normed(batch.taps[:, :, -1][wanted]).bfloat16()
            target = F.linear(hidden, self._rows).softmax(dim=-1)
        total = torch.zeros(())
        for depth, (said, weight) in enumerate(zip(self._drafts(head, batch, len(weights)), weights, strict=True)):
            counts = batch.counts(depth)
            rows = places[:, 1 + depth : -1][counts]
            chosen: Tensor = _CrossEntropy.apply(said[counts], target, rows, self._rows)
            total = total + chosen * (weight / max(1, len(rows)))
        return total

    def right(self, head: Head, batch: Batch, depth: int) -> list[Tensor]:
        """Per depth, where the likeliest draft and all before it are what the text goes on with: [batch, tokens], at
        the position where drafting begins; False where nothing is drafted."""
        found: list[Tensor] = []
        with torch.inference_mode():
            alive = torch.ones(batch.ids.shape, dtype=torch.bool)
            for d, said in enumerate(self._drafts(head, batch, depth)):
                counts = batch.counts(d)
                parts = [F.linear(rows.bfloat16(), self._rows).argmax(dim=-1) for rows in said[counts].split(_ROWS)]
                right = torch.zeros(batch.ids.shape, dtype=torch.bool)
                right[:, : counts.shape[1]][counts] = self.draft_ids[torch.cat(parts)] == batch.ids[:, 2 + d :][counts]
                alive = alive & right
                found.append(alive)
        return found

    def _drafts(self, head: Head, batch: Batch, depth: int) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return head.drafts(batch.taps, self._llama.embed(batch.ids), depth)


class _CrossEntropy(torch.autograd.Function):
    """Sum over positions of the cross-entropy between softmax(hidden @ rows.T) and a target's distribution.

    Logits of so many ids are costlier to hold than to compute: the gradient is made along with them, a few positions at
    a time. `rows` does not learn.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, target: Tensor, places: Tensor, rows: Tensor) -> Tensor:
        """hidden: [positions, hidden size]; target: [some, ids], of which `places` [positions] are meant."""
        total = torch.zeros(())
        gradient = torch.empty(hidden.shape)
        across = rows.T.contiguous()
        for begin in range(0, len(hidden), _ROWS):
            part = slice(begin, begin + _ROWS)
            logits = F.linear(hidden[part].bfloat16(), rows).float()
            wanted = target[places[part]].float()
            total += torch.logsumexp(logits, dim=-1).sum() - (wanted * logits).sum()
            gradient[part] = F.linear((logits.softmax(dim=-1) - wanted).bfloat16(), across)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer, None, None, None


def batches(lessons: Sequence[Lesson], tokens: int, seed: int, skip: int = 0) -> Iterator[Batch]:
    """Batches without end, epoch after epoch, always the same for a seed; the first `skip` are left out."""
    lengths = [len(lesson.example.tokens) for lesson in lessons]
    chosen = chain.from_iterable(epoch(lengths, tokens, f"{seed} {number}") for number in count())
    for texts in islice(chosen, skip, None):
        yield collate([lessons[n] for n in texts])
