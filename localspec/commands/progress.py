"""Fetching models with the progress on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localspec.commands.process import is_terminal, say

if TYPE_CHECKING:
    from localspec import Engine

_STEPS = 10


def fetch(*names: str, refresh: bool = False) -> list[Path]:
    """The models' directories, each fetched if it is not here."""
    from localspec import hub

    paths = []
    for name in names:
        with ExitStack() as stack:
            paths.append(hub.resolve(name, reporter(name, stack), refresh=refresh))
    return paths


def loading(
    name: str,
    *,
    draft: str,
    mtp: str,
    draft_through_text: bool = False,
    dtype: str,
    kernels: str,
    show: bool = True,
    learn: bool = False,
    note: Callable[[str], None] = say,
    on_choice: Callable[[str], None] | None = say,
) -> Engine:
    """The engine for the command line's options of these names, showing the progress of what has to be fetched.

    note: told in one line what does not work and is not needed. on_choice: told in one line what drafts.
    """
    import localspec
    from localspec.kernels.selection import Kernels

    with ExitStack() as stack:
        progress = reporter(name, stack) if show else None
        return localspec.load(
            name,
            draft=draft,
            mtp=mtp,
            draft_through_text=draft_through_text,
            dtype=None if dtype == "auto" else dtype,
            progress=progress,
            kernels=Kernels(kernels, notify=lambda line: note(f"localspec: {line}")),
            learn=learn,
            notify=lambda line: note(f"localspec: {line}"),
            on_choice=on_choice,
        )


def reporter(name: str, stack: ExitStack) -> Callable[[int, int], None]:
    """A `progress(done, total)` that shows itself at the first call, and closes with the stack."""
    return _bar(name, stack) if is_terminal(sys.stderr) else _lines(name)


def _lines(name: str) -> Callable[[int, int], None]:
    from localspec.memory import format_bytes

    shown = -1

    def report(done: int, total: int) -> None:
        nonlocal shown
        step = done * _STEPS // total if total > 0 else 0
        if step > shown:
            shown = step
            say(f"downloading {name}: {format_bytes(done)} of {format_bytes(total)}")

    return report


def _bar(name: str, stack: ExitStack) -> Callable[[int, int], None]:
    from localspec.memory import format_bytes

    bar: Any = None

    def report(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            label = f"downloading {name} ({format_bytes(total)})"
            bar = stack.enter_context(click.progressbar(length=total, label=label, file=sys.stderr))
        bar.length = total
        bar.update(max(0, done - bar.pos))

    return report
