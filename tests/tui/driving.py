"""Drives the app without a terminal, and reads what it shows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from rich.style import Style
from scripted import ScriptedConversation
from textual.geometry import Region
from textual.pilot import Pilot
from textual.widget import Widget

from localspec.tui.app import ChatApp

PATIENCE_S = 120.0


def drive(
    test: Callable[[Pilot[None], ChatApp], Awaitable[None]],
    conversation: ScriptedConversation | Callable[[], ScriptedConversation],
    *,
    size: tuple[int, int] = (80, 24),
    settings: dict[str, Any] | None = None,
    loaded: bool = True,
) -> ChatApp:
    """Run a test in the app, the worker's end included; returns the app."""

    async def run() -> ChatApp:
        async with running(conversation, size=size, settings=settings) as (pilot, app):
            if loaded:
                await until(pilot, lambda: app.conversation is not None)
            await test(pilot, app)
        return app

    return asyncio.run(run())


@asynccontextmanager
async def running(
    conversation: ScriptedConversation | Callable[[], ScriptedConversation],
    *,
    size: tuple[int, int],
    settings: dict[str, Any] | None = None,
) -> AsyncIterator[tuple[Pilot[None], ChatApp]]:
    opener = (lambda: conversation) if isinstance(conversation, ScriptedConversation) else conversation
    app = ChatApp(opener, title="smollm2", settings=settings or {})
    async with app.run_test(size=size) as pilot:
        app.prompt.cursor_blink = False
        try:
            yield pilot, app
        finally:
            app.worker.quit()


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    """Wait for it; a test that waits in vain fails here."""
    for _ in range(int(PATIENCE_S / 0.02)):
        if condition():
            await pilot.pause()
            return
        await pilot.pause(0.02)
    raise AssertionError("what the test waits for did not happen")


async def say(pilot: Pilot[None], app: ChatApp, text: str) -> None:
    """Type and send."""
    app.prompt.text = text
    await pilot.press("enter")


async def answered(pilot: Pilot[None], app: ChatApp) -> None:
    await until(pilot, lambda: not app.busy)


def lines(widget: Widget) -> list[str]:
    """The widget's visible lines, without trailing space."""
    return ["".join(text for text, _ in line).rstrip() for line in segments(widget)]


def segments(widget: Widget) -> list[list[tuple[str, Style]]]:
    """What reaches the screen, filters applied."""
    strips = widget.render_lines(Region(0, 0, *widget.outer_size))
    return [[(s.text, s.style or Style()) for s in strip if not s.control] for strip in strips]


def blocks(app: ChatApp) -> list[tuple[str, str]]:
    """Kind and text of the transcript's blocks, without the greeting."""
    return [(block.kind, block.text) for block in app.transcript.blocks][1:]
