"""How much of what a head drafts its target would say: `python -m localspec.train.evaluate HEAD WORK CORPUS...`.

On answers that were kept apart from training, token by token: the share of positions where the first draft is what the
answer goes on with, the first two are, and so on. Where the answer is greedy, that is what decoding at temperature 0
accepts; on sampled answers it is what a draft of the likeliest tokens gets by luck. Needs the extra `train`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localspec.errors import LocalspecError

if TYPE_CHECKING:
    from localspec.train.block import Head
    from localspec.train.lessons import Judge, Lesson

DEPTH = 4
"""Drafts in a row."""
_TOKENS = 8192
"""Of a pass, padding included."""


@dataclass(slots=True)
class Score:
    """Of some answers."""

    positions: list[int]
    """Where there was something to draft, per depth."""
    right: list[int]
    """Where that draft and those before it were right."""
    tokens: list[int]
    """Said in passes that drafted so many tokens, per depth, the pass's own token included."""
    passes: list[int]

    @classmethod
    def empty(cls, depth: int = DEPTH) -> Score:
        """Of nothing yet."""
        return cls([0] * depth, [0] * depth, [0] * depth, [0] * depth)

    def add(self, right: Sequence[Sequence[bool]], start: int, end: int) -> None:
        """An answer's: right[d][t] for the draft of token t + 2 + d from position t; the answer is [start, end)."""
        for d, row in enumerate(right):
            drafted = max(0, end - (start + 1 + d))
            self.positions[d] += drafted
            self.right[d] += sum(row[start - 1 : start - 1 + drafted])
        for d in range(len(right)):  # now decode with d + 1 drafts per pass
            token = start  # the last one that is known
            while token < end - 1:
                said = 1 + sum(row[token - 1] for row in right[: d + 1])
                self.tokens[d] += min(said, end - 1 - token)
                self.passes[d] += 1
                token += said

    @property
    def shares(self) -> list[float]:
        """Cumulative acceptance by depth."""
        return [right / max(1, positions) for right, positions in zip(self.right, self.positions, strict=True)]

    @property
    def per_pass(self) -> list[float]:
        """Tokens per pass with 1, 2, ... drafts each."""
        return [tokens / max(1, passes) for tokens, passes in zip(self.tokens, self.passes, strict=True)]

    def __str__(self) -> str:
        shares = " / ".join(f"{share:.3f}" for share in self.shares)
        return f"{shares}; tokens per pass " + " / ".join(f"{rate:.2f}" for rate in self.per_pass)


def score(
    head: Head, judge: Judge, lessons: Sequence[Lesson], group: Callable[[Lesson], str], depth: int = DEPTH
) -> dict[str, Score]:
    """Scores of lessons, by group."""
    from localspec.train.lessons import collate, epoch

    scores: dict[str, Score] = {}
    for chosen in epoch([len(lesson.example.tokens) for lesson in lessons], _TOKENS, "score"):
        right = [rows.tolist() for rows in judge.right(head, collate([lessons[n] for n in chosen]), depth)]
        for row, n in enumerate(chosen):
            example = lessons[n].example
            found = scores.setdefault(group(lessons[n]), Score.empty(depth))
            found.add([rows[row] for rows in right], example.start, len(example.tokens))
    return scores


def kind(lesson: Lesson) -> str:
    """The group of a lesson, for a report."""
    return f"{lesson.example.kind}, {'sampled' if lesson.example.temperature else 'greedy'}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line per kind of answer."""
    parser = argparse.ArgumentParser(prog="python -m localspec.train.evaluate", description=__doc__)
    parser.add_argument("head", type=Path, help="the head's file")
    parser.add_argument("work", type=Path, help="a folder for hidden states")
    parser.add_argument("corpora", type=Path, nargs="+", help="folders that localspec.train.corpus made")
    parser.add_argument("--model", default="smollm2", help="a catalogue name, a directory or a hub id (smollm2)")
    options = parser.parse_args(arguments)
    try:
        import localspec
        from localspec.train.block import head_of
        from localspec.train.head_file import read_head
        from localspec.train.lessons import Judge
        from localspec.train.material import prepare
        from localspec.train.torch_llama import TorchLlama

        shape, weights, draft_ids = read_head(options.head)
        engine = localspec.load(options.model, dtype="float32", drafters=[])
        llama = TorchLlama(engine.model)
        material = prepare(engine, llama, options.corpora, options.work, shape.taps)
        scores = score(head_of(shape, weights), Judge(llama, draft_ids), material.held_out, kind)
        for name in sorted(scores):
            print(f"{name}: {scores[name]}")
    except (LocalspecError, OSError) as error:
        print(f"localspec: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
