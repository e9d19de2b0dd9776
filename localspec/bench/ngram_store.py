"""What learned n-grams cost, few and as many as a file holds: `python -m localspec.bench.ngram_store`.

The counts are of made-up texts, whose words are about as unevenly common as those of a language. The file is in a
temporary folder; reading it finds it in the system's memory, as it does soon after it was written.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np

from localspec.errors import LocalspecError
from localspec.ngrams.answers import DEEPEST, MOST_TOKENS, Answers, joined
from localspec.ngrams.file import MOST_BYTES, NgramFile
from localspec.ngrams.format import empty, encode, most_rows
from localspec.ngrams.store import LONGEST, NgramStore, contexts

FEW = 10_000
ANSWER, LOOKUPS, REPEATS = 256, 20_000, 5
"""Tokens of the answer that is learned, most contexts looked up, and how often each thing is timed."""
_VOCABULARY = 49_152
_PRINT = "0" * 64


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a store of so many rows; the times are medians."""

    rows: int
    known_us: float
    """To look up a context that is known in all its lengths,"""
    unknown_us: float
    """and one that is not known in any."""
    load_ms: float
    merge_ms: float
    """To count an answer,"""
    learn_ms: float
    """and to do so and save the file."""
    bytes_per_row: float
    """Of the file."""


def words(count: int, rng: np.random.Generator) -> list[int]:
    """Ids, the low ones the more common."""
    ids: list[int] = (rng.zipf(1.2, count) % _VOCABULARY).tolist()
    return ids


def measure(rows: int, folder: Path, seed: int = 0) -> Cost:
    """Times of a file of about `rows` rows, which `folder` gets."""
    rng = np.random.default_rng(seed)
    store, text = NgramStore(), words(max(rows // 100, 2 * LONGEST), rng)
    while store.rows < rows * 0.95:  # a text has up to four rows per token
        text = words(len(text), rng)
        store.merge(*contexts(text, 0), day=1)
    path = folder / f"{rows}.ngrams"
    path.write_bytes(encode(empty(_PRINT)._replace(columns=store.to_arrays())))
    loads, merges, learns = array("d"), array("d"), array("d")
    for _ in range(REPEATS):
        file, answer = NgramFile(path, _PRINT), words(ANSWER, rng)
        times = [time.perf_counter()]
        file.store  # noqa: B018 - read at first use
        times.append(time.perf_counter())
        NgramStore.from_arrays(store.to_arrays()).merge(*contexts(answer, 0), day=2)
        times.append(time.perf_counter())
        if not file.learn([(answer, 0)]):
            raise LocalspecError(f"{path} could not be written: set TMPDIR to a folder with room for it")
        times.append(time.perf_counter())
        for column, (started, ended) in zip((loads, merges, learns), pairwise(times), strict=True):
            column.append((ended - started) * 1e3)
    known = [text[end - LONGEST : end] for end in range(LONGEST, len(text))][:LOOKUPS]
    unknown = [[token + _VOCABULARY for token in context] for context in known]
    per_row = path.stat().st_size / file.store.rows
    lookups = (_median_us(file.store.matches, known), _median_us(file.store.matches, unknown))
    return Cost(store.rows, *lookups, median(loads), median(merges), median(learns), per_row)


def _median_us(look_up: Callable[[list[int]], object], wanted: Sequence[list[int]]) -> float:
    times = array("d")
    for _ in range(REPEATS):
        started = time.perf_counter()
        for context in wanted:
            look_up(context)
        times.append((time.perf_counter() - started) / len(wanted))
    return median(times) * 1e6


@dataclass(frozen=True, slots=True)
class WholeCost:
    """Of so many tokens of answers kept whole; the times are medians."""

    tokens: int
    sort_ms: float
    """When they are read, and when an answer is learned."""
    known_us: float
    """To find the longest match behind a token where all that is looked at stands in them,"""
    unknown_us: float
    """and where nothing does."""
    bytes_per_token: float
    """Of the file."""


def measure_whole(count: int, seed: int = 0) -> WholeCost:
    """Times of answers of ANSWER tokens, `count` tokens in all."""
    rng = np.random.default_rng(seed)
    texts = [words(ANSWER, rng) for _ in range(max(count // (ANSWER + 1), 1))]
    tokens, sorts = joined(np.empty(0, np.uint32), texts), array("d")
    for _ in range(REPEATS):
        started = time.perf_counter()
        answers = Answers(tokens)
        sorts.append((time.perf_counter() - started) * 1e3)
    known = [text[: end % DEEPEST + DEEPEST] for end, text in enumerate(texts)]
    unknown = [[token + _VOCABULARY for token in text] for text in known]
    known_us, unknown_us = _median_us(answers.longest, known), _median_us(answers.longest, unknown)
    return WholeCost(tokens.size, median(sorts), known_us, unknown_us, tokens.itemsize)


def table(costs: Sequence[Cost]) -> str:
    """For a terminal, and for the docs."""
    lines = [
        "| rows | look-up, us | if unknown, us | load, ms | count an answer, ms | and save it, ms | bytes per row |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for cost in costs:
        lines.append(
            f"| {cost.rows} | {cost.known_us:.1f} | {cost.unknown_us:.1f} | {cost.load_ms:.1f} | {cost.merge_ms:.1f} | "
            f"{cost.learn_ms:.1f} | {cost.bytes_per_row:.1f} |"
        )
    return "\n".join(lines)


def whole_table(costs: Sequence[WholeCost]) -> str:
    """The same for answers kept whole."""
    lines = [
        "| tokens kept whole | sort, ms | find, us | if unknown, us | bytes per token |",
        "|---:|---:|---:|---:|---:|",
    ]
    for cost in costs:
        lines.append(
            f"| {cost.tokens} | {cost.sort_ms:.1f} | {cost.known_us:.1f} | {cost.unknown_us:.1f} | "
            f"{cost.bytes_per_token:.1f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables."""
    full = most_rows(empty(_PRINT), MOST_BYTES)
    parser = argparse.ArgumentParser(prog="python -m localspec.bench.ngram_store", description=__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=[FEW, full], help=f"about so many ({FEW} {full})")
    options = parser.parse_args(arguments)
    if not 100 <= min(options.rows) <= max(options.rows) <= full:
        parser.error(f"--rows must be from 100 to {full}")
    try:
        with tempfile.TemporaryDirectory() as folder:
            costs = [measure(rows, Path(folder)) for rows in options.rows]
    except OSError as error:
        print(f"localspec: the file cannot be written: {error.strerror or error}", file=sys.stderr)
        return 1
    except LocalspecError as error:
        print(f"localspec: {error}", file=sys.stderr)
        return 1
    print(table(costs))
    print()
    print(whole_table([measure_whole(count) for count in (MOST_TOKENS // 64, MOST_TOKENS)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
