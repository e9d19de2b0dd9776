"""What a grammar costs and what it saves: `python -m localspec.bench.structured [MODEL]`.

Each task is decoded in turn plainly without its grammar, plainly with it, and with speculation: the first two give the
price of masks and of not running ahead, the last two what forced and guessed tokens save.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from localspec import grammar
from localspec.bench.machine import machine, versions, weights_format
from localspec.bench.summary import Spread
from localspec.errors import LocalspecError
from localspec.grammar import Grammar

if TYPE_CHECKING:
    from localspec.engine import Engine
    from localspec.generation import Generation

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "occupation": {"type": "string", "maxLength": 60},
        "languages": {"type": "array", "items": {"enum": ["English", "French", "German", "Spanish"]}, "maxItems": 3},
    },
    "required": ["name", "age", "occupation", "languages"],
    "additionalProperties": False,
}
_CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "country": {"type": "string", "maxLength": 30},
        "population": {"type": "integer", "minimum": 1000, "maximum": 50_000_000},
    },
    "required": ["city", "country", "population"],
    "additionalProperties": False,
}
_ANN = "Ann Smith is a 34 year old carpenter from Lyon who speaks French and English. Give her record as JSON."


def tasks() -> dict[str, tuple[str, Grammar]]:
    """Per name a question and what the answer must match."""
    return {
        "record": (_ANN, grammar.json_schema(_PERSON)),
        "record, free layout": (_ANN, grammar.json_schema(_PERSON, free_layout=True)),
        "list of records": (
            "List four large cities with country and population, as JSON.",
            grammar.json_schema({"type": "array", "items": _CITY, "minItems": 3, "maxItems": 5}),
        ),
        "date": (
            "On which day did the second world war end in Europe? Answer with a date such as 2001-12-31.",
            grammar.regex(r"\d{4}-\d{2}-\d{2}"),
        ),
    }


@dataclass(slots=True)
class Outcome:
    """One task over all repeats."""

    tokens: int = 0
    forced: int = 0
    """Tokens of source `grammar`."""
    passes: int = 0
    """With speculation; plain decoding has one per token."""
    identical: int = 0
    price: list[float | None] = field(default_factory=list)
    """Time per token, plain with grammar / plain without."""
    speedup: list[float | None] = field(default_factory=list)
    """Time, plain with grammar / speculative with grammar."""

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        names = ("tokens", "forced", "passes", "identical", "price", "speedup")
        return {name: getattr(self, name) for name in names}


def measure(engine: Engine, *, repeats: int, max_tokens: int, temperature: float = 0.0) -> dict[str, Outcome]:
    """Decode every task `repeats` times in each way, after a run of each that is not counted."""
    outcomes = {}
    for name, (question, form) in tasks().items():
        prompt = engine.encode([{"role": "user", "content": question}])
        common = {"max_tokens": max_tokens, "temperature": temperature, "seed": 1}
        outcome = outcomes[name] = Outcome()
        for repeat in range(repeats + 1):
            free = engine.generate(prompt, speculate=False, **common)
            plain = engine.generate(prompt, speculate=False, grammar=form, **common)
            fast = engine.generate(prompt, grammar=form, **common)
            if repeat == 0:
                continue
            stats = fast.stats
            outcome.tokens, outcome.passes = stats.emitted, stats.target_passes
            outcome.forced = stats.by_source.get("grammar", 0)
            outcome.identical += fast.ids == plain.ids
            outcome.price.append(_ratio(plain.stats.tpot_s, free.stats.tpot_s))
            outcome.speedup.append(_ratio(_decoding(plain), _decoding(fast)))
    return outcomes


def _decoding(generation: Generation) -> float:
    return generation.stats.total_s - generation.stats.prefill_s


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def _figure(values: Sequence[float | None]) -> str:
    spread = Spread.of(values)
    return "n/a" if spread is None else f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})"


def table(outcomes: dict[str, Outcome], repeats: int) -> str:
    """For a terminal, and for a page."""
    lines = [
        "| answer | tokens | forced | per pass | speed-up | price of the grammar | ids |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, outcome in outcomes.items():
        lines.append(
            f"| {name} | {outcome.tokens} | {outcome.forced} | {outcome.tokens / outcome.passes:.2f} "
            f"| {_figure(outcome.speedup)} | {_figure(outcome.price)} | {outcome.identical}/{repeats} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, then one line of JSON. Exit status 1 when ids differ."""
    parser = argparse.ArgumentParser(prog="python -m localspec.bench.structured", description=measure.__doc__)
    parser.add_argument("model", nargs="?", default="smollm2", help="a catalogue name, a directory or a hub id")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200, help="most tokens per answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--blas", choices=("auto", "off"), default="auto")
    options = parser.parse_args(arguments)
    try:
        if arguments is None:  # started as a program: it may start itself over with a faster BLAS
            from localspec.blas import preload

            preload(sys.orig_argv, options.blas)
        import localspec

        engine = localspec.load(options.model, draft="none")
        before = machine()
        outcomes = measure(engine, repeats=options.repeats, max_tokens=options.tokens, temperature=options.temperature)
    except LocalspecError as error:
        print(f"localspec: {error}", file=sys.stderr)
        return 1
    print(table(outcomes, options.repeats))
    model = {"name": engine.name, "dtype": weights_format(engine.model)}
    record = {name: outcome.as_dict() for name, outcome in outcomes.items()}
    print(json.dumps({"model": model, "machine": before, "versions": versions(), "tasks": record}))
    return 0 if all(outcome.identical == options.repeats for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
