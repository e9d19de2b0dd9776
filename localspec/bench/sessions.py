"""What earlier sessions are worth to later ones: `python -m localspec.bench.sessions [MODEL]`.

A user's days over the same notes, program and task list (week.toml), one conversation per question. Each question is
decoded plainly, with n-grams of its own context only, and with those of the days before too, one right after the
other in turning order; what each day teaches is on disk when the next one begins.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localspec.bench.machine import machine, versions, weights_format
from localspec.bench.summary import Spread
from localspec.errors import LocalspecError

if TYPE_CHECKING:
    from localspec.engine import Engine
    from localspec.generation import Generation

DAYS = 3
PLAIN, CONTEXT, LEARNED = WAYS = ("plain", "context", "learned")


@dataclass(slots=True)
class Day:
    """All questions of one day, over all repeats."""

    tokens: int = 0
    passes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WAYS, 0))
    learned_tokens: int = 0
    """Accepted drafts that earlier sessions knew, and the longest matches of the context did not."""
    questions: int = 0
    identical: int = 0
    context_speedup: list[float] = field(default_factory=list)
    """Plain time / time with the context's n-grams, of each repeat's whole day."""
    learned_speedup: list[float] = field(default_factory=list)
    """Plain time / time with those of earlier days too."""

    def book(self, found: dict[str, Generation]) -> None:
        """One question, decoded in each way."""
        plain = found[PLAIN]
        self.questions += 1
        self.tokens += plain.stats.emitted
        self.identical += all(generation.ids == plain.ids for generation in found.values())
        self.learned_tokens += found[LEARNED].stats.by_level.get("learned", 0)
        for way, generation in found.items():
            self.passes[way] += generation.stats.target_passes


def measure(engine: Engine, *, days: int, repeats: int, max_tokens: int) -> dict[int, Day]:
    """Decode the days `repeats` times, each time with nothing learned before the first; greedy."""
    from localspec.bench.run import encode
    from localspec.bench.week import read_week

    questions = [(prompt.day, encode(engine, prompt)) for prompt in read_week() if prompt.day <= days]
    outcome: dict[int, Day] = {day: Day() for day, _ in questions}
    turn = 0
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="localspec-") as folder:
            for day in outcome:
                engines = {PLAIN: engine, CONTEXT: engine, LEARNED: _learning(engine, Path(folder))}
                seconds = dict.fromkeys(WAYS, 0.0)
                for prompt in (prompt for of, prompt in questions if of == day):
                    found = {}
                    for way in _turned(WAYS, turn):
                        found[way] = engines[way].generate(prompt, max_tokens=max_tokens, speculate=way != PLAIN)
                        seconds[way] += found[way].stats.total_s - found[way].stats.prefill_s
                    outcome[day].book(found)
                    turn += 1
                outcome[day].context_speedup.append(seconds[PLAIN] / seconds[CONTEXT])
                outcome[day].learned_speedup.append(seconds[PLAIN] / seconds[LEARNED])
                print(f"day {day}: {turn} questions so far", file=sys.stderr, flush=True)
    return outcome


def _learning(engine: Engine, folder: Path) -> Engine:
    """A new engine of the same model, as a new session has it: it knows what is on disk."""
    from localspec.engine import Engine
    from localspec.learning import Learning
    from localspec.ngrams import Shelf

    learning = Learning(engine.tokenizer, label=engine.name, shelf=Shelf(folder))
    other = Engine(
        engine.model,
        engine.tokenizer,
        name=engine.name,
        context_length=engine.context_length,
        kernels=engine.kernels,
        learn=learning,
    )
    # What passes cost is the machine's, whoever measured it: else the ways would differ in more than their n-grams.
    other.controller.costs = engine.controller.costs
    return other


def _turned(ways: Sequence[str], turn: int) -> Iterable[str]:
    start = turn % len(ways)
    return (*ways[start:], *ways[:start])


def _figure(values: Sequence[float]) -> str:
    spread = Spread.of(values)
    return "n/a" if spread is None else f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})"


def table(outcome: dict[int, Day]) -> str:
    """For a terminal, and for a page."""
    lines = [
        "| day | questions | tokens per pass, context | with earlier days | drafts of theirs accepted "
        "| speed-up, context | with earlier days | earlier days add | ids |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for number, day in outcome.items():
        added = [b / a for a, b in zip(day.context_speedup, day.learned_speedup, strict=True)]
        lines.append(
            f"| {number} | {day.questions} | {day.tokens / day.passes[CONTEXT]:.2f} "
            f"| {day.tokens / day.passes[LEARNED]:.2f} | {day.learned_tokens} | {_figure(day.context_speedup)} "
            f"| {_figure(day.learned_speedup)} | {_figure(added)} | {day.identical}/{day.questions} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, then one line of JSON. Exit status 1 when ids differ."""
    parser = argparse.ArgumentParser(prog="python -m localspec.bench.sessions", description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2", help="a catalogue name, a directory or a hub id")
    parser.add_argument("--days", type=int, default=DAYS, help=f"of the week's six ({DAYS})")
    parser.add_argument("--repeats", type=int, default=1, help="times that the days are lived through (1)")
    parser.add_argument("--tokens", type=int, default=256, help="most tokens per answer (256)")
    parser.add_argument("--blas", choices=("auto", "off"), default="auto")
    options = parser.parse_args(arguments)
    if min(options.days, options.repeats, options.tokens - 1) < 1:
        parser.error("--days and --repeats must be at least 1, --tokens at least 2")
    try:
        if arguments is None:  # started as a program: it may start itself over with a faster BLAS
            from localspec.blas import preload

            preload(sys.orig_argv, options.blas)
        import localspec

        engine = localspec.load(options.model)
        before = machine()
        engine.generate("A first answer, which is not counted.", max_tokens=16)
        outcome = measure(engine, days=options.days, repeats=options.repeats, max_tokens=options.tokens)
    except LocalspecError as error:
        print(f"localspec: {error}", file=sys.stderr)
        return 1
    print(table(outcome))
    model: dict[str, Any] = {"name": engine.name, "dtype": weights_format(engine.model)}
    days = {number: asdict(day) for number, day in outcome.items()}
    print(json.dumps({"model": model, "machine": before, "versions": versions(), "days": days}))
    return 0 if all(day.identical == day.questions for day in outcome.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
