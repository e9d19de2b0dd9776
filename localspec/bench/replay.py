"""Replays recorded answers through drafting rules, without a model: `python -m localspec.bench.replay`.

A rule sees the prompt and the answer so far and proposes up to a number of tokens; those that the recorded answer has
too are accepted, and the answer's next token comes with them. That is what a greedy target would do, so tokens per
pass are what the rule would reach with the model that was recorded. The first token of an answer comes from the
prompt's own pass and is not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from localspec.bench.replays import BASELINES, Rule
from localspec.bench.replays.own import LEAST, Localspec
from localspec.bench.streams import HALVES, Stream, read_recording
from localspec.errors import LocalspecError

MOST = 8
"""Drafts per round."""
SWEEP = (0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.1, 0.12, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
"""Bounds that the curve is drawn from."""
BINS = 10
ALL = "all kinds"


@dataclass(slots=True)
class Tally:
    """Counts of rounds."""

    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0

    def book(self, drafted: int, accepted: int) -> None:
        """One round."""
        self.tokens += accepted + 1
        self.passes += 1
        self.drafted += drafted
        self.accepted += accepted

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.tokens + other.tokens,
            self.passes + other.passes,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
        )

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def drafted_per_token(self) -> float:
        return self.drafted / self.tokens if self.tokens else 0.0

    @property
    def wasted_per_token(self) -> float:
        """Rows of target passes that nothing came of, per token."""
        return (self.drafted - self.accepted) / self.tokens if self.tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "tokens": self.tokens,
            "tokens_per_pass": self.tokens_per_pass,
            "drafted_per_token": self.drafted_per_token,
            "wasted_per_token": self.wasted_per_token,
        }


@dataclass(slots=True)
class Reliability:
    """Predicted against observed acceptance of the drafts that were tested, in bins of equal width."""

    seen: list[int] = field(default_factory=lambda: [0] * BINS)
    predicted: list[float] = field(default_factory=lambda: [0.0] * BINS)
    accepted: list[int] = field(default_factory=lambda: [0] * BINS)

    def book(self, confidence: Sequence[float], accepted: int) -> None:
        """One round. A draft behind a rejected one was not tested."""
        for i, chance in enumerate(confidence[: accepted + 1]):
            index = min(int(chance * BINS), BINS - 1)
            self.seen[index] += 1
            self.predicted[index] += chance
            self.accepted[index] += i < accepted

    @property
    def error(self) -> float:
        """Mean distance of predicted and observed over the bins, weighted by their drafts."""
        gaps = (abs(a - b) for a, b in zip(self.predicted, self.accepted, strict=True))
        return sum(gaps) / max(sum(self.seen), 1)

    def lines(self) -> list[str]:
        """A table."""
        found = ["| predicted | drafts tested | mean predicted | observed |", "|---|---:|---:|---:|"]
        for i, seen in enumerate(self.seen):
            if seen:
                found.append(
                    f"| {i / BINS:.1f} to {(i + 1) / BINS:.1f} | {seen} | {self.predicted[i] / seen:.3f} | "
                    f"{self.accepted[i] / seen:.3f} |"
                )
        return [*found, f"mean distance: {self.error:.3f}"]


def replay(
    stream: Stream, rule: Rule, most: int = MOST, watch: Callable[[Rule, list[int], int], None] | None = None
) -> Tally:
    """One answer through one rule that has seen nothing yet; `watch` is told of each round."""
    tally, answer = Tally(), list(stream.answer)
    rule.commit([*stream.prompt, *answer[:1]])
    start = 1
    while start < len(answer):
        limit = min(most, len(answer) - start - 1)
        drafts = rule.propose(limit) if limit else []
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == answer[start + accepted]:
            accepted += 1
        if watch is not None:
            watch(rule, drafts, accepted)
        tally.book(len(drafts), accepted)
        rule.commit(answer[start : start + accepted + 1])
        start += accepted + 1
    return tally


def replay_all(streams: Iterable[Stream], make: Callable[[], Rule], most: int = MOST) -> dict[str, Tally]:
    """Tallies by kind of text, and over all kinds; each answer has a rule of its own."""
    kinds: dict[str, Tally] = {}
    for stream in streams:
        kinds[stream.kind] = kinds.get(stream.kind, Tally()) + replay(stream, make(), most)
    total = Tally()
    for tally in kinds.values():
        total = total + tally
    return kinds | {ALL: total}


def reliability(streams: Iterable[Stream], most: int = MOST) -> Reliability:
    """Of our drafter, with nothing cut off for its low confidence."""
    found = Reliability()

    def watch(rule: Rule, drafts: list[int], accepted: int) -> None:
        if isinstance(rule, Localspec):
            found.book(rule.confidence, accepted)

    for stream in streams:
        replay(stream, Localspec(0.0), most, watch)
    return found


def at_waste(curve: Sequence[Tally], wasted: float) -> float:
    """Tokens per pass where the curve wastes so many rows per token; between its points on straight lines.

    Below the least waste of the curve: mixed with plain rounds. A point that wastes more and gains nothing is left out.
    """
    front: list[tuple[float, float]] = []
    for x, y in sorted((tally.wasted_per_token, tally.tokens_per_pass) for tally in curve):
        if not front or y > front[-1][1]:
            front.append((x, y))
    if wasted <= front[0][0]:
        return front[0][1] if wasted == front[0][0] else 1 + (front[0][1] - 1) * wasted / front[0][0]
    for (x0, y0), (x1, y1) in pairwise(front):
        if wasted <= x1:
            return y0 + (y1 - y0) * (wasted - x0) / (x1 - x0)
    return front[-1][1]


def rule_lines(found: Mapping[str, Mapping[str, Tally]]) -> list[str]:
    """Kinds down, rules across: tokens per pass, drafted and wasted per token."""
    names = list(found)
    lines = ["| kind | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for kind in found[names[0]]:
        cells = (
            f"{tally.tokens_per_pass:.2f} / {tally.drafted_per_token:.2f} / {tally.wasted_per_token:.2f}"
            for tally in (found[name][kind] for name in names)
        )
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return lines


def against(tally: Tally, curve: Sequence[Tally]) -> str:
    """A rule's tokens per pass, and ours where it wastes as many rows."""
    theirs, ours = tally.tokens_per_pass, at_waste(curve, tally.wasted_per_token)
    return f"{theirs:.2f}, {ours:.2f}{' (less)' if ours < theirs else ''}"


def equal_lines(found: Mapping[str, Mapping[str, Tally]], curve: Sequence[Mapping[str, Tally]]) -> list[str]:
    """Per kind the baselines, each against our curve at the rows that it wastes itself."""
    names = [rule.name for rule in BASELINES]
    lines = ["| kind | " + " | ".join(f"{name}, ours" for name in names) + " |", "|---" * (len(names) + 1) + "|"]
    for kind in curve[0]:
        cells = (against(found[name][kind], [point[kind] for point in curve]) for name in names)
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, then one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m localspec.bench.replay", description=__doc__)
    parser.add_argument("--streams", type=Path, help="the folder of another recording (the package's own)")
    parser.add_argument("--most", type=int, default=MOST, help=f"drafts per round ({MOST})")
    parser.add_argument("--half", choices=[*HALVES, "all"], default="all", help="of the answers of each kind (all)")
    options = parser.parse_args(arguments)
    if options.most < 1:
        parser.error("--most must be at least 1")
    try:
        recording = read_recording(options.streams)
    except LocalspecError as error:
        print(f"localspec: {error}", file=sys.stderr)
        return 1
    streams = (recording if options.half == "all" else recording.only(options.half)).streams
    rules: tuple[type[Rule], ...] = (*BASELINES, Localspec)
    found = {rule.name: replay_all(streams, rule, options.most) for rule in rules}
    curve = [replay_all(streams, lambda least=least: Localspec(least), options.most) for least in SWEEP]  # type: ignore[misc]
    print(f"{recording.model}, {recording.how}: {len(streams)} answers, at most {options.most} drafts a round\n")
    print("tokens per pass / drafted per token / wasted per token:\n")
    print("\n".join(rule_lines(found)))
    print(f"\nour curve over all kinds, by the least worth ({LEAST} is the default):\n")
    print("| least | tokens per pass | wasted per token |\n|---:|---:|---:|")
    for least, point in zip(SWEEP, curve, strict=True):
        print(f"| {least:.2f} | {point[ALL].tokens_per_pass:.3f} | {point[ALL].wasted_per_token:.3f} |")
    print("\ntokens per pass of a baseline, and ours with as many rows wasted:\n")
    print("\n".join(equal_lines(found, curve)))
    print("\nconfidence:\n")
    print("\n".join(reliability(streams, options.most).lines()))
    tallies = {name: {kind: tally.as_dict() for kind, tally in kinds.items()} for name, kinds in found.items()}
    print(json.dumps({"model": recording.model, "most": options.most, "rules": tallies}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
