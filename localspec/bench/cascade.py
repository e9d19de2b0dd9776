"""What each drafter is worth, alone and together: `python -m localspec.bench.cascade [MODEL]`.

Each prompt is decoded plainly and in every way in turn (n-grams, each drafter with weights, all of these as a cascade,
some of the model's own layers), one right after the other in a rotating order, so that a machine that gets busier
favours none of them. The ways share the model and what is known of its passes' costs; how much each drafts is the
controller's choice.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from localspec.bench.machine import machine, versions, weights_format
from localspec.bench.pairs import Pair, Run, first_difference
from localspec.bench.run import WARM_UP_TOKENS, encode
from localspec.bench.summary import Summary, summarize
from localspec.bench.workloads import choose_workloads
from localspec.errors import IncompatibleDrafterError, LocalspecError

if TYPE_CHECKING:
    from localspec.bench.workloads import Workload
    from localspec.drafters import Drafter
    from localspec.engine import Engine

PLAIN, CASCADE = "plain", "cascade"


def ways_of(engine: Engine) -> dict[str, list[Drafter | str]]:
    """The drafters of each way, for a model that was loaded with a drafter with weights behind its n-grams.

    Raises LocalspecError where it has none.
    """
    from localspec.drafters import LayerSkipDrafter

    weighted = [drafter for drafter in engine.drafters if not drafter.free]
    if not weighted:
        raise LocalspecError(f"{engine.name} has no drafter but n-grams: name an MTP head (--mtp) or a draft (--draft)")
    ways: dict[str, list[Drafter | str]] = {"ngram": ["ngram"]}
    ways.update({drafter.name: [drafter] for drafter in weighted})
    ways[CASCADE] = ["ngram", *weighted]
    with suppress(IncompatibleDrafterError):  # a model that cannot be cut has no such way
        if LayerSkipDrafter.name not in ways:  # --draft layers:N is that way
            ways[LayerSkipDrafter.name] = [LayerSkipDrafter(engine.model)]
    return ways


def measure(
    engine: Engine,
    ways: dict[str, list[Drafter | str]],
    workloads: Sequence[Workload],
    *,
    repeats: int,
    max_tokens: int,
    on_progress: Callable[[str], None] = lambda line: None,
) -> dict[str, list[Pair]]:
    """Per way, its pairs with the plain runs of the same round; greedy."""
    from localspec.engine import Engine

    engines = {PLAIN: engine}
    for way, drafters in ways.items():
        engines[way] = Engine(
            engine.model,
            engine.tokenizer,
            drafters=drafters,
            name=engine.name,
            context_length=engine.context_length,
            kernels=engine.kernels,
        )
        engines[way].controller.costs = engine.controller.costs
    prompts = [(prompt, encode(engine, prompt)) for workload in workloads for prompt in workload.prompts]
    for way in engines:
        _run(engines[way], prompts[0][1], WARM_UP_TOKENS, speculate=way != PLAIN)
    pairs: dict[str, list[Pair]] = {way: [] for way in ways}
    turn, names = 0, list(engines)
    for repeat in range(repeats):
        for prompt, ids in prompts:
            start = turn % len(names)
            order = [*names[start:], *names[:start]]
            runs = {way: _run(engines[way], ids, max_tokens, speculate=way != PLAIN) for way in order}
            for way in ways:
                difference = first_difference(runs[PLAIN].ids, runs[way].ids)
                pairs[way].append(
                    Pair(prompt.kind, prompt.name, repeat, ", ".join(order), runs[PLAIN], runs[way], difference)
                )
            turn += 1
            shown = ", ".join(f"{way} {pairs[way][-1].speedup or 0:.2f}x" for way in ways)
            on_progress(f"{turn}/{repeats * len(prompts)} {prompt.kind}/{prompt.name}: {shown}")
    return pairs


def _run(engine: Engine, ids: list[int], max_tokens: int, *, speculate: bool) -> Run:
    gc.collect()
    started = time.perf_counter()
    result = engine.generate(ids, max_tokens=max_tokens, speculate=speculate)
    return Run(tuple(result.ids), time.perf_counter() - started, result.stats)


def table(summaries: dict[str, list[Summary]]) -> str:
    """Per kind of text, a row for each way; for a terminal, and for a page."""
    lines = [
        "| text | drafts by | acceptance by position | drafted per pass | tokens per pass | speed-up (range) | ids |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for title, rows in summaries.items():
        for row in rows:
            positions = " / ".join(f"{rate:.2f}" for rate in row.acceptance_by_position[:4]) or "n/a"
            speed = row.speedup
            speedup = "n/a" if speed is None else f"{speed.median:.2f} ({speed.low:.2f}-{speed.high:.2f})"
            passes = f"{_drafted_per_pass(row):.2f} | {row.tokens_per_pass or 0:.2f}"
            ids = f"{row.identical}/{row.pairs}"
            lines.append(f"| {title} | {row.title} | {positions} | {passes} | {speedup} | {ids} |")
    return "\n".join(lines)


def _drafted_per_pass(row: Summary) -> float:
    """Mean draft length of the passes that had drafts."""
    drafted = sum(drafter["drafted"] for drafter in row.by_drafter.values())
    rounds = sum(drafter["rounds"] for drafter in row.by_drafter.values())
    return drafted / rounds if rounds else 0.0


def summaries_of(workloads: Sequence[Workload], pairs: dict[str, list[Pair]]) -> dict[str, list[Summary]]:
    """By the kinds' titles: a summary of each way."""
    return {
        workload.title: [
            summarize(workload.name, way, [pair for pair in found if pair.kind == workload.name])
            for way, found in pairs.items()
        ]
        for workload in workloads
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, then one line of JSON. Exit status 1 when ids differ."""
    parser = argparse.ArgumentParser(prog="python -m localspec.bench.cascade", description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2", help="a catalogue name, a directory or a hub id")
    parser.add_argument("--workload", action="append", help="only this kind, or prompt (open-chat/sky); repeatable")
    parser.add_argument("--repeats", type=int, default=1, help="times each prompt is decoded in each way (1)")
    parser.add_argument("--tokens", type=int, default=200, help="most tokens per answer (200)")
    parser.add_argument("--mtp", default="auto", help="a file or folder with an MTP head (auto)")
    parser.add_argument("--draft", default="auto", help="a draft model in place of a head (auto)")
    parser.add_argument("--blas", choices=("auto", "off"), default="auto")
    options = parser.parse_args(arguments)
    if min(options.repeats, options.tokens - 1) < 1:
        parser.error("--repeats must be at least 1, --tokens at least 2")
    try:
        if arguments is None:  # started as a program: it may start itself over with a faster BLAS
            from localspec.blas import preload

            preload(sys.orig_argv, options.blas)
        import localspec

        workloads = choose_workloads(options.workload)
        engine = localspec.load(options.model, draft=options.draft, mtp=options.mtp)
        before, ways = machine(), ways_of(engine)
        pairs = measure(
            engine,
            ways,
            workloads,
            repeats=options.repeats,
            max_tokens=options.tokens,
            on_progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except LocalspecError as error:
        print(f"localspec: {error}", file=sys.stderr)
        return 1
    summaries = summaries_of(workloads, pairs)
    print(table(summaries))
    model: dict[str, Any] = {"name": engine.name, "dtype": weights_format(engine.model)}
    kinds = {title: {row.title: row.as_dict() for row in rows} for title, rows in summaries.items()}
    print(json.dumps({"model": model, "machine": before, "versions": versions(), "kinds": kinds}))
    return 0 if all(pair.difference is None for found in pairs.values() for pair in found) else 1


if __name__ == "__main__":
    sys.exit(main())
