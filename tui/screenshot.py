"""`python -m localspec.tui.screenshot OUT.svg RECORDING`: the app with a recorded answer, as a picture.

RECORDING is what `localspec chat --json` printed. The app runs without a terminal; no model is loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from pathlib import Path

from localspec.errors import LocalspecError
from localspec.tui.app import ChatApp
from localspec.tui.replay import Recording, ReplayConversation
from localspec.tui.themes import DARK, LIGHT

COLUMNS, LINES = 110, 32
_FONTS = "ui-monospace, 'SF Mono', Menlo, 'DejaVu Sans Mono', monospace"
_TEXT = re.compile(r'x="([\d.]+)"( y="[\d.]+") textLength="([\d.]+)"([^>]*)>([^<]*)</text>')


async def picture(recording: Recording, *, title: str, prompt: str, theme: str, size: tuple[int, int]) -> str:
    """The SVG of the chat after the recorded answer."""
    app = ChatApp(lambda: ReplayConversation(recording, title), title=title, settings={})
    async with app.run_test(size=size) as pilot:
        app.theme = theme
        app.prompt.cursor_blink = False
        app.prompt.text = prompt
        await pilot.press("enter")
        while app.busy or not app.transcript.tokens:
            await pilot.pause(0.05)
        await pilot.pause()
        return portable(app.export_screenshot(title="localspec chat"))


def portable(svg: str) -> str:
    """The same picture for every viewer: no fonts from the network, no text that begins or ends with a space."""
    svg = re.sub(r"@font-face\s*\{[^}]*\}\s*", "", svg)
    svg = re.sub(r"font-family: (?:Fira Code|FiraCode)[^;]*;", f"font-family: {_FONTS};", svg)
    return _TEXT.sub(_trim, svg)


def _trim(match: re.Match[str]) -> str:
    x, y, length, rest, text = float(match[1]), match[2], float(match[3]), match[4], match[5]
    space = "&#160;"
    # One entity is one character, whatever it stands for.
    cell = length / max(len(re.sub(r"&[^;]+;", " ", text)), 1)
    while text.startswith(space):
        text, x, length = text.removeprefix(space), x + cell, length - cell
    while text.endswith(space):
        text, length = text.removesuffix(space), length - cell
    return f'x="{x:.1f}"{y} textLength="{length:.1f}"{rest}>{text}</text>' if text else f'x="{x:.1f}"{y}{rest}></text>'


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m localspec.tui.screenshot", description="A picture of the chat with a recorded answer."
    )
    parser.add_argument("out", type=Path, help="the SVG to write")
    parser.add_argument("recording", type=Path, help="JSON lines from `localspec chat --json`")
    parser.add_argument("--prompt", help="the user's message, where the recording has none")
    parser.add_argument("--title", default="smollm2 + n-gram", help="what the title line says")
    parser.add_argument("--light", action="store_true", help="the light theme")
    parser.add_argument("--size", default=f"{COLUMNS}x{LINES}", help="columns x lines (default %(default)s)")
    options = parser.parse_args(arguments)
    size = re.fullmatch(r"(\d+)x(\d+)", options.size)
    if size is None:
        parser.error("--size is COLUMNSxLINES, as in 110x32")
    try:
        recording = Recording.read(options.recording)
        prompt = options.prompt or recording.prompt
        if not prompt:
            raise LocalspecError("the recording has no prompt; give one with --prompt")
        theme = (LIGHT if options.light else DARK).name
        svg = asyncio.run(
            picture(recording, title=options.title, prompt=prompt, theme=theme, size=(int(size[1]), int(size[2])))
        )
        options.out.write_text(svg, "utf-8")
    except (LocalspecError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
