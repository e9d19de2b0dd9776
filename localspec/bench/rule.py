"""The controller against a fixed rule, on the bench's texts: `python -m localspec.bench.rule --help`.

The rule is the simplest that people use: wherever the last two or more tokens stood before, draft the seven that
followed most often (after prompt lookup; Saxena 2023). Each prompt is decoded by the rule and by localspec's own choice
of drafts, one right after the other, in alternating order; what is printed is the rule's decoding time over ours.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from localspec import blas
from localspec.errors import LocalspecError
from localspec.settings import Settings

if TYPE_CHECKING:
    from localspec.engine import Engine
    from localspec.generation import Generation

SHORTEST, LENGTH = 2, 7
"""The rule's shortest match and its drafts per round."""


def compare(own: Engine, rule: Engine, *, repeats: int, max_tokens: int, exact: str) -> dict[str, list[float]]:
    """Ratios (the rule's decoding time / ours) by kind of text. Prints a line per pair.

    Both are greedy. Pairs whose ids part at a near-tie are left out; LocalspecError is raised when nothing explains it.
    """
    from localspec.bench.gap import key_gap
    from localspec.bench.pairs import first_difference
    from localspec.bench.run import encode
    from localspec.bench.workloads import choose_workloads

    ratios: dict[str, list[float]] = {}
    number = 0
    for workload in choose_workloads(None):
        for prompt in workload.prompts:
            ids = encode(own, prompt)
            for _ in range(repeats):
                number += 1
                runs: dict[str, tuple[Generation, float]] = {}
                for name in ("own", "rule") if number % 2 else ("rule", "own"):
                    settings: dict[str, Any] = {"max_tokens": max_tokens, "exact": exact}
                    engine = own
                    if name == "rule":
                        engine, settings = rule, settings | {"draft_length": LENGTH}
                    started = time.perf_counter()
                    found = engine.generate(ids, **settings)
                    runs[name] = found, time.perf_counter() - started - found.stats.prefill_s
                (a, own_s), (b, rule_s) = runs["own"], runs["rule"]
                parted = first_difference(a.ids, b.ids)
                if parted is not None:
                    one, other = parted.plain_id, parted.speculative_id
                    gap = tolerance = float("inf")
                    if one is not None and other is not None:
                        context = ids + a.ids[: parted.index]
                        gap, tolerance = key_gap(own, context, Settings(temperature=0.0), one, other)
                    if one is None or other is None or gap > tolerance:
                        raise LocalspecError(f"{prompt.kind}/{prompt.name}: other ids, {gap:.2g} apart: this is a bug")
                    print(f"{prompt.kind}/{prompt.name}: left out, the ids part at a near-tie", flush=True)
                    continue
                ratios.setdefault(prompt.kind, []).append(rule_s / own_s)
                print(
                    f"{prompt.kind}/{prompt.name}: {rule_s / own_s:.2f}x; tokens per pass {_per_pass(a)} and "
                    f"{_per_pass(b)} by the rule",
                    flush=True,
                )
    return ratios


def _per_pass(generation: Generation) -> str:
    value = generation.stats.tokens_per_pass
    return "n/a" if value is None else f"{value:.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m localspec.bench.rule", description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2", help="a catalogue name, directory or hub id (smollm2)")
    parser.add_argument("--repeats", type=int, default=1, help="pairs per prompt (1)")
    parser.add_argument("--max-tokens", type=int, default=256, help="tokens per answer (256)")
    parser.add_argument("--exact", choices=["auto", "rows", "off"], default="off", help="for both (off)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16", "quantized"])
    arguments = parser.parse_args(argv)
    if arguments.repeats < 1 or arguments.max_tokens < 2:
        parser.error("--repeats must be at least 1, and --max-tokens at least 2")

    import localspec
    from localspec.bench.follower import Follower

    own = localspec.load(arguments.model, dtype=arguments.dtype, draft="none")
    rule = localspec.Engine(
        own.model,
        own.tokenizer,
        drafters=[Follower(SHORTEST)],
        name=own.name,
        context_length=own.context_length,
    )
    for engine in (own, rule):
        engine.generate("Once upon a time", max_tokens=24, exact=arguments.exact)  # buffers, first estimates
    print(f"{own.name}, {blas.status()}", flush=True)
    ratios = compare(own, rule, repeats=arguments.repeats, max_tokens=arguments.max_tokens, exact=arguments.exact)
    for kind, values in ratios.items():
        print(f"{kind:12} {median(values):.2f}x ({min(values):.2f}-{max(values):.2f}), {len(values)} pairs")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LocalspecError as error:
        sys.exit(f"localspec: {error}")
