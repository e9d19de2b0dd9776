"""What earlier sessions are worth to later ones: `python -m localspec.bench.sessions [MODEL]`.

A user's days over the same notes, program and task list (week.toml), which change a little from day to day; one
conversation per question. Each question is decoded plainly, and with n-grams of its own context and of the days before;
what each day teaches is on disk when the next one begins. By default the first day's questions are asked every day, so
that days can be compared with each other. With `--week` each day has its own, some of them asked before: then each is
also decoded with its own context's n-grams only, to see what the earlier days add.
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
    passes: dict[str, int] = field(default_factory=dict)
    learned_tokens: int = 0
    """Accepted drafts that earlier sessions knew, and the longest matches of the context did not."""
    questions: int = 0
    identical: int = 0
    speedup: dict[str, list[float]] = field(default_factory=dict)
    """By way: plain time / its time, of each repeat's whole day."""

    def book(self, found: dict[str, Generation]) -> None:
        """One question, decoded in each way."""
        plain = found[PLAIN]
        self.questions += 1
        self.tokens += plain.stats.emitted
        self.identical += all(generation.ids == plain.ids for generation in found.values())
        self.learned_tokens += found[LEARNED].stats.by_level.get("learned", 0)
        for way, generation in found.items():
            self.passes[way] = self.passes.get(way, 0) + generation.stats.target_passes


def measure(engine: Engine, *, days: int, repeats: int, max_tokens: int, week: bool) -> dict[int, Day]:
    """Decode the days `repeats` times, each time with nothing learned before the first; greedy."""
    from localspec.bench.run import encode
    from localspec.bench.week import read_week

    prompts = [prompt for prompt in read_week(standing=not week) if prompt.day <= days]
    questions = [(prompt.day, encode(engine, prompt)) for prompt in prompts]
    ways = WAYS if week else (PLAIN, LEARNED)
    outcome: dict[int, Day] = {day: Day() for day, _ in questions}
    turn = 0
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="localspec-") as folder:
            for day in outcome:
                engines = {PLAIN: engine, CONTEXT: engine, LEARNED: _learning(engine, Path(folder))}
                seconds = dict.fromkeys(ways, 0.0)
                for prompt in (prompt for of, prompt in questions if of == day):
                    found = {}
                    for way in _turned(ways, turn):
                        found[way] = engines[way].generate(prompt, max_tokens=max_tokens, speculate=way != PLAIN)
                        seconds[way] += found[way].stats.total_s - found[way].stats.prefill_s
                    outcome[day].book(found)
                    turn += 1
                for way in ways[1:]:
                    outcome[day].speedup.setdefault(way, []).append(seconds[PLAIN] / seconds[way])
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
    ways = list(next(iter(outcome.values())).speedup)
    head = "".join(f"| tokens per pass, {way} | speed-up, {way} " for way in ways)
    lines = [
        f"| day | questions {head}| drafts of earlier days accepted | ids |",
        "|---" * (4 + 2 * len(ways)) + "|",
    ]
    for number, day in outcome.items():
        cells = "".join(f"| {day.tokens / day.passes[way]:.2f} | {_figure(day.speedup[way])} " for way in ways)
        lines.append(f"| {number} | {day.questions} {cells}| {day.learned_tokens} | {day.identical}/{day.questions} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, then one line of JSON. Exit status 1 when ids differ."""
    parser = argparse.ArgumentParser(prog="python -m localspec.bench.sessions", description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2", help="a catalogue name, a directory or a hub id")
    parser.add_argument("--days", type=int, default=DAYS, help=f"of the week's six ({DAYS})")
    parser.add_argument("--repeats", type=int, default=1, help="times that the days are lived through (1)")
    parser.add_argument("--tokens", type=int, default=256, help="most tokens per answer (256)")
    parser.add_argument("--week", action="store_true", help="each day's own questions")
    parser.add_argument("--blas", choices=("auto", "off"), default="auto")
    options = parser.parse_args(arguments)
    if min(options.days, options.repeats, options.tokens - 1) < 1:
        parser.error("--days and --repeats must be at least 1, --tokens at least 2")
    try:
        if arguments is None:  # started as a program: it may start itself over with a faster BLAS
            from localspec.blas import preload

            preload(sys.orig_argv, options.blas)
        import localspec

        engine = localspec.load(options.model, draft="none")
        before = machine()
        engine.generate("A first answer, which is not counted.", max_tokens=16)
        outcome = measure(
            engine, days=options.days, repeats=options.repeats, max_tokens=options.tokens, week=options.week
        )
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
