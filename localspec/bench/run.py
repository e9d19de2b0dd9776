"""Measures plain against speculative decoding: the same prompts and seed, in pairs, one right after the other.

Which of the two comes first alternates from pair to pair, so that a machine that gets warmer or busier does not favour
one of them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from localspec.bench.gap import key_gap
from localspec.bench.machine import machine, versions, weights_format
from localspec.bench.pairs import Difference, Pair, Run, first_difference
from localspec.bench.report import Report
from localspec.bench.summary import Summary, summarize
from localspec.bench.workloads import Prompt, Workload, choose_workloads
from localspec.errors import LocalspecError, SettingsError
from localspec.settings import Acceptance, Exact, Settings

if TYPE_CHECKING:
    from localspec.engine import Engine

WARM_UP_TOKENS = 24
"""Tokens of the pass in each mode that comes first and is not counted: kernels, buffers, first cost estimates."""

Progress = Callable[[str], None]


def run_bench(
    engine: Engine,
    *,
    workloads: list[str] | None = None,
    repeats: int = 2,
    max_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    draft_length: int | Literal["auto"] = "auto",
    accept: Acceptance = "coupled",
    exact: Exact = "auto",
    on_progress: Progress | None = None,
) -> Report:
    """Decode every chosen prompt `repeats` times both ways and compare times and ids.

    workloads: kinds ("code-edit"), prompts ("code-edit/inventory") or "quick"; None is everything.
    on_progress: called with one line of text before the first pair and after each pair.

    Raises SettingsError for settings out of range, and LocalspecError where there is nothing to compare.
    """
    chosen = choose_workloads(workloads)
    settings = _settings(repeats, max_tokens, temperature, seed, draft_length, accept, exact)
    _check_engine(engine)
    prompts = [(prompt, encode(engine, prompt)) for workload in chosen for prompt in workload.prompts]
    report_progress = on_progress or (lambda line: None)
    before = machine()
    report_progress("warming up")
    _warm_up(engine, prompts[0][1], settings)
    pairs: list[Pair] = []
    total = repeats * len(prompts)
    for prompt, ids in prompts:
        for repeat in range(repeats):
            pair = _measure(engine, prompt, ids, repeat, settings, plain_first=len(pairs) % 2 == 0)
            pairs.append(pair)
            report_progress(_progress_line(pair, len(pairs), total))
    return Report(
        model={
            "name": engine.name,
            "dtype": weights_format(engine.model),
            "context_length": engine.context_length,
            "drafters": [drafter.name for drafter in engine.drafters],
        },
        settings={"workloads": _names(chosen), "repeats": repeats, **settings},
        versions=versions(),
        machine=before,
        pairs=pairs,
        kinds=_kinds(chosen, pairs),
        overall=summarize("overall", "overall", pairs),
        identity_expected=_identity_expected(settings),
        exactness=engine.exactness(Settings.from_keywords(**settings)),
    )


def encode(engine: Engine, prompt: Prompt) -> list[int]:
    """A prompt's ids: through the chat template where the model has one, else the text as it is."""
    if engine.tokenizer is None:
        raise SettingsError("the bench needs a tokenizer: its prompts are texts")
    return engine.encode(prompt.messages if engine.tokenizer.has_chat_template else prompt.text)


def _settings(
    repeats: int,
    max_tokens: int,
    temperature: float,
    seed: int,
    draft_length: int | Literal["auto"],
    accept: Acceptance,
    exact: Exact,
) -> dict[str, Any]:
    """What both runs of a pair share; raises SettingsError before anything runs."""
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise SettingsError(f"repeats must be an integer of at least 1, not {repeats!r}")
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 2:
        raise SettingsError(f"max_tokens must be an integer of at least 2 in a bench, not {max_tokens!r}")
    if draft_length == 0:
        raise SettingsError("draft_length 0 is plain decoding: there would be nothing to compare")
    shared: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "draft_length": draft_length,
        "accept": accept,
        "exact": exact,
    }
    Settings.from_keywords(**shared)
    return shared


def _check_engine(engine: Engine) -> None:
    if engine.tokenizer is None:
        raise SettingsError("the bench needs a tokenizer: its prompts are texts")
    if not engine.drafters:
        raise LocalspecError("nothing to compare: this engine has no drafters")


def _warm_up(engine: Engine, ids: list[int], settings: dict[str, Any]) -> None:
    short = {**settings, "max_tokens": min(settings["max_tokens"], WARM_UP_TOKENS)}
    for speculate in (False, True):
        _run(engine, ids, short, speculate=speculate)


def _measure(
    engine: Engine, prompt: Prompt, ids: list[int], repeat: int, settings: dict[str, Any], *, plain_first: bool
) -> Pair:
    runs = {speculate: _run(engine, ids, settings, speculate=speculate) for speculate in (not plain_first, plain_first)}
    difference = first_difference(runs[False].ids, runs[True].ids)
    if difference is not None:
        difference = _explain(engine, ids, runs[False].ids, settings, difference)
    order = "plain first" if plain_first else "speculative first"
    return Pair(prompt.kind, prompt.name, repeat, order, runs[False], runs[True], difference)


def _explain(
    engine: Engine, prompt: list[int], ids: Sequence[int], settings: dict[str, Any], difference: Difference
) -> Difference:
    """Add the gap between the two ids, where there are two and the same noise chose both."""
    first, second = difference.plain_id, difference.speculative_id
    if first is None or second is None or not _identity_expected(settings):
        return difference
    context = [*prompt, *ids[: difference.index]]
    gap, tolerance = key_gap(engine, context, Settings.from_keywords(**settings), first, second)
    return replace(difference, gap=gap, tolerance=tolerance)


def _identity_expected(settings: dict[str, Any]) -> bool:
    return bool(settings["accept"] == "coupled" or settings["temperature"] == 0)


def _run(engine: Engine, ids: list[int], settings: dict[str, Any], *, speculate: bool) -> Run:
    gc.collect()  # the previous run's caches, now rather than in the middle of this one
    started = time.perf_counter()
    result = engine.generate(ids, speculate=speculate, **settings)
    wall_s = time.perf_counter() - started
    return Run(tuple(result.ids), wall_s, result.stats)


def _kinds(chosen: list[Workload], pairs: list[Pair]) -> list[Summary]:
    return [
        summarize(workload.name, workload.title, [pair for pair in pairs if pair.kind == workload.name])
        for workload in chosen
    ]


def _names(chosen: list[Workload]) -> list[str]:
    return [f"{prompt.kind}/{prompt.name}" for workload in chosen for prompt in workload.prompts]


def _progress_line(pair: Pair, done: int, total: int) -> str:
    speedup = "n/a" if pair.speedup is None else f"{pair.speedup:.2f}x"
    ids = "same ids" if pair.identical else "OTHER IDS"
    return f"{done}/{total} {pair.kind}/{pair.prompt}: {speedup}, {len(pair.plain.ids)} tokens, {ids}"
