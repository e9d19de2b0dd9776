"""Fits the weights by which n-gram drafts are judged: `python -m localspec.bench.fit`.

Each recorded answer is read token by token; whatever could have been drafted at a place is one observation: what the
drafter looks at, and whether the token came. The week's answers are read with what the days before taught. Weights
are fitted by logistic regression on one half of the answers and judged on the other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from localspec.bench.memory import Memory
from localspec.bench.streams import HALVES, WEEK, Half, Recording, Stream, read_recording
from localspec.drafters.evidence import NAMES, WEIGHTS
from localspec.drafters.ngram import NgramDrafter
from localspec.errors import LocalspecError

PULL = 4.0
"""Strength of the pull to zero (ridge)."""
_STEPS = 30

Floats = NDArray[np.float64]


class Observations:
    """What the drafter saw, [n, features], and whether the token came, [n]."""

    def __init__(self) -> None:
        self._seen: list[Sequence[float]] = []
        self._came: list[bool] = []

    def read(self, stream: Stream, drafter: NgramDrafter) -> None:
        """All places of one answer but the first, which the prompt's own pass decides."""
        drafter.commit([*stream.prompt, *stream.answer[:1]])
        for token in stream.answer[1:]:
            for candidate, seen in drafter.candidates():
                self._seen.append((*seen, *[0.0] * (len(NAMES) - len(seen))))
                self._came.append(candidate == token)
            drafter.commit([token])

    @property
    def seen(self) -> Floats:
        return np.array(self._seen, np.float64).reshape(-1, len(NAMES))

    @property
    def came(self) -> Floats:
        return np.array(self._came, np.float64)

    def loss(self, weights: Sequence[float]) -> float:
        """Mean bits per observation."""
        total = self.seen @ np.array(weights)
        return float(np.mean(np.logaddexp(0, np.where(self.came > 0, -total, total))) / np.log(2))


def observe(recordings: Iterable[Recording]) -> dict[Half, Observations]:
    """By half of each recording. Days are read in their order, each with what those before it taught."""
    halves: dict[Half, Observations] = {half: Observations() for half in HALVES}
    for recording in recordings:
        of = {id(stream): half for half in HALVES for stream in recording.only(half).streams}
        memory = Memory()
        for day, streams in recording.by_day().items():
            for stream in streams:
                halves[of[id(stream)]].read(stream, memory.drafter() if day else NgramDrafter())
            for stream in streams:
                memory.teach(stream)
    return halves


def fit(seen: Floats, came: Floats, pull: float = PULL) -> Floats:
    """Weights with the least ridge logistic loss (Newton's method), [features]; a column of zeros stays at zero."""
    weights = np.zeros(seen.shape[1])
    for _ in range(_STEPS):
        chance = 1 / (1 + np.exp(-(seen @ weights)))
        slope = seen.T @ (chance - came) + pull * weights
        bend = (seen * (chance * (1 - chance))[:, None]).T @ seen + pull * np.eye(weights.size)
        weights -= np.linalg.solve(bend, slope)
    return weights


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the weights, and how they and those in use fare on either half."""
    parser = argparse.ArgumentParser(prog="python -m localspec.bench.fit", description=__doc__)
    parser.add_argument("--on", choices=("fit", "test", "all"), default="fit", help="the half to fit on (fit)")
    options = parser.parse_args(arguments)
    try:
        halves = observe([read_recording(), read_recording(name=WEEK)])
    except LocalspecError as error:
        print(f"localspec: {error}", file=sys.stderr)
        return 1
    parts = list(halves.values()) if options.on == "all" else [halves[options.on]]
    weights = fit(np.concatenate([p.seen for p in parts]), np.concatenate([p.came for p in parts])).round(2)
    print("| feature | in use | fitted |\n|---|---:|---:|")
    for name, old, new in zip(NAMES, WEIGHTS, weights, strict=True):
        print(f"| {name} | {old:.2f} | {new:.2f} |")
    print("\n| half | observations | came | bits, in use | bits, fitted |\n|---|---:|---:|---:|---:|")
    for name, half in halves.items():
        print(
            f"| {name} | {half.came.size} | {half.came.mean():.3f} | {half.loss(WEIGHTS):.4f} | "
            f"{half.loss(weights.tolist()):.4f} |"
        )
    print("\nMODEL = {")
    for name, weight in zip(NAMES, weights, strict=True):
        print(f'    "{name}": {float(weight)},')
    print("}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
