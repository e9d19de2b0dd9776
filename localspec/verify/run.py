"""Verifies one engine on this machine: decodes with and without drafts, counts what the acceptance rules draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from localspec.bench.machine import machine, versions, weights_format
from localspec.errors import LocalspecError, SettingsError
from localspec.settings import MAX_SEED, Exact, Settings
from localspec.verify.report import Report

if TYPE_CHECKING:
    from localspec.engine import Engine
    from localspec.verify.prompts import Prompt

TOKENS, QUICK_TOKENS = 48, 16
FEWEST = 8
"""Tokens per answer, below which hardly a pass has room for drafts."""
_ROWS = 48
"""Rows of logits that the distributions are taken from."""

Progress = Callable[[str], None]


def run_verify(
    engine: Engine,
    *,
    tokens: int | None = None,
    quick: bool = False,
    seed: int = 0,
    exact: Exact = "auto",
    on_progress: Progress | None = None,
) -> Report:
    """Try to find a token that speculation changes, and report what was tried.

    tokens: per answer; None is 48, or 16 when `quick`, which also takes fewer prompts, seeds and draws.
    on_progress: called with one line of text now and then.

    At Ctrl-C the report has what was found by then, and says so. Raises SettingsError for settings out of range.
    """
    from localspec.controller import Controller

    tokens = (QUICK_TOKENS if quick else TOKENS) if tokens is None else tokens
    _check(engine, tokens, seed, exact)
    report = Report(
        model={
            "name": engine.name,
            "dtype": weights_format(engine.model),
            "context_length": engine.context_length,
            "drafters": [drafter.name for drafter in engine.drafters],
        },
        settings={"tokens": tokens, "quick": quick, "seed": seed, "exact": exact},
        versions=versions(),
        machine=machine(),
    )
    # What is learned here from drafts that are known beforehand is not to guide anyone's later drafts.
    kept, engine.controller = engine.controller, Controller()
    try:
        _fill(report, engine, on_progress or (lambda line: None))
    except KeyboardInterrupt:
        report.interrupted = True
    finally:
        engine.controller = kept
    return report


def _fill(report: Report, engine: Engine, progress: Progress) -> None:
    from localspec.bench.gap import tolerance_of
    from localspec.verify.comparison import Promise
    from localspec.verify.distributions import checks
    from localspec.verify.prompts import QUICK_WINDOW_LIMIT, WINDOW_LIMIT, prompts, windows
    from localspec.verify.trajectories import Plan, trajectories

    tokens, seed = report.settings["tokens"], report.settings["seed"]
    quick, exact = report.settings["quick"], report.settings["exact"]
    report.windows = windows(engine, tokens, QUICK_WINDOW_LIMIT if quick else WINDOW_LIMIT)
    chosen = prompts(engine, tokens, quick=quick, passed=report.windows.passed)
    plan = Plan(chosen, [seed] if quick else [seed, (seed + 1) % (MAX_SEED + 1)], tokens, exact)
    progress("measuring how passes of different sizes round here")
    # Asked for before the classes are: what a chat would find out and decode by.
    line = engine.exactness(Settings(exact=exact))
    logits, dtype = _logits(engine, chosen)
    report.promise = promise = Promise(line, tolerance_of(dtype))
    report.row_classes = engine.row_classes()
    total = plan.comparisons(engine)
    for found in trajectories(engine, plan, promise):
        report.comparisons.append(found)
        progress(f"{len(report.comparisons)}/{total} {found.case.title}: {_word(found.outcome)}")
    planned = checks(logits, seed=seed, quick=quick)
    report.planned_checks = len(planned)
    for check in planned:
        report.checks.append(check())
        progress(f"distributions: {report.checks[-1].rule}, {report.checks[-1].name}")
    report.complete = True


def _logits(engine: Engine, chosen: list[Prompt]) -> tuple[Any, Any]:
    """Logits of the target at the first tokens of a prompt, float32 [rows, vocabulary], and the format they had."""
    import mlx.core as mx
    import numpy as np

    from localspec.transaction import Transaction

    ids = max((prompt.ids for prompt in chosen), key=len)[:_ROWS]
    logits = Transaction(engine.target).forward(mx.array(ids, mx.uint32))
    return np.array(logits.astype(mx.float32)), logits.dtype


def _check(engine: Engine, tokens: int, seed: int, exact: Exact) -> None:
    Settings(seed=seed, exact=exact)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < FEWEST:
        raise SettingsError(f"tokens must be an integer of at least {FEWEST}, not {tokens!r}")
    if engine.tokenizer is None and engine.target.vocabulary_size < FEWEST:
        raise LocalspecError(f"{engine.name} has {engine.target.vocabulary_size} tokens: there is nothing to draft")


def _word(outcome: str) -> str:
    return {"identical": "identical", "near-tie": "parts at a near-tie", "bug": "NOT IDENTICAL"}[outcome]
