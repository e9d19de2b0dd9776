"""What the n-gram drafter costs, after a short and after a long history: `python -m localspec.bench.ngram_cost`.

The history is made of recorded streams, one after the other, with their ids shifted from one repetition to the next,
so that it goes on to bring new tokens, and with passages that repeat earlier ones.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import tracemalloc
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from localspec.bench.streams import read_recording
from localspec.drafters.ngram import NgramDrafter
from localspec.drafters.protocol import Draw
from localspec.errors import LocalspecError
from localspec.noise import Noise
from localspec.settings import Settings

SHORT, LONG = 1_000, 100_000
ROUNDS, DRAFTS, KEPT = 300, 8, 3
"""Proposals timed, the drafts that each is asked for, and the tokens committed after each."""
_COPIED = 40
_VOCABULARY = 49_152


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one history; the times are medians over rounds."""

    history: int
    commit_us: float
    """Per token, in rounds of a few tokens."""
    ingest_us: float
    """Per token of the history itself, appended in one call."""
    propose_us: float
    longest_propose_us: float
    bytes_per_token: float
    """Allocated by the drafter (tracemalloc), the ids themselves not counted."""


def history(length: int, seed: int = 0) -> list[int]:
    """Ids below 49,152, of which about a fifth repeat an earlier passage."""
    rng, streams = random.Random(seed), read_recording().streams
    ids: list[int] = []
    turn = 0
    while len(ids) < length:
        stream = streams[turn % len(streams)]
        shift = turn // len(streams) * 7_919
        ids.extend((token + shift) % _VOCABULARY for token in (*stream.prompt, *stream.answer))
        for _ in range(3):
            start = rng.randrange(len(ids) - _COPIED)
            ids.extend(ids[start : start + _COPIED])
        turn += 1
    return ids[:length]


def measure(length: int) -> Cost:
    """Times and memory of a drafter that holds `length` tokens, while rounds of drafts go on behind them."""
    ids = history(length + ROUNDS * KEPT)
    before, behind = ids[:length], ids[length:]
    draw = Draw(Settings(), Noise(0), _VOCABULARY)
    drafter = NgramDrafter()
    started = time.perf_counter()
    drafter.commit(before)
    ingested = time.perf_counter() - started
    commits, proposals = array("d"), array("d")
    for start in range(0, len(behind), KEPT):
        begun = time.perf_counter()
        drafter.propose(DRAFTS, draw)
        proposed = time.perf_counter()
        drafter.commit(behind[start : start + KEPT])
        commits.append((time.perf_counter() - proposed) / KEPT)
        proposals.append(proposed - begun)
    return Cost(
        length,
        median(commits) * 1e6,
        ingested / length * 1e6,
        median(proposals) * 1e6,
        max(proposals) * 1e6,
        allocated(before) / length,
    )


def allocated(ids: Sequence[int]) -> int:
    """Bytes that a drafter holds after `ids`."""
    tracemalloc.start()
    drafter = NgramDrafter()
    drafter.commit(ids)
    found = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return found if drafter.context else 0


def table(costs: Sequence[Cost]) -> str:
    """For a terminal, and for the docs; the last line is the last history's cost over the first's."""
    lines = [
        "| history | commit, us per token | ingest, us per token | propose, us | slowest | bytes per token |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for cost in costs:
        lines.append(
            f"| {cost.history} | {cost.commit_us:.1f} | {cost.ingest_us:.1f} | {cost.propose_us:.1f} | "
            f"{cost.longest_propose_us:.0f} | {cost.bytes_per_token:.0f} |"
        )
    first, last = costs[0], costs[-1]
    lines.append(
        f"| ratio | {last.commit_us / first.commit_us:.2f} | {last.ingest_us / first.ingest_us:.2f} | "
        f"{last.propose_us / first.propose_us:.2f} | | {last.bytes_per_token / first.bytes_per_token:.2f} |"
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m localspec.bench.ngram_cost", description=__doc__)
    parser.add_argument("--history", nargs="+", type=int, default=[SHORT, LONG], help=f"tokens ({SHORT} {LONG})")
    options = parser.parse_args(arguments)
    if min(options.history) < 1:
        parser.error("--history must be at least 1")
    try:
        costs = [measure(length) for length in options.history]
    except LocalspecError as error:
        print(f"localspec: {error}", file=sys.stderr)
        return 1
    print(table(costs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
