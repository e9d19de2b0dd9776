"""The whole screen as text, compared with files that a person can read and judge.

After a wanted change, `LOCALSPEC_UPDATE_LAYOUTS=1 pytest tests/tui/test_layout.py` writes them anew.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from driving import answered, drive, say
from scripted import ScriptedConversation, record
from textual.pilot import Pilot

from localspec.tui.app import ChatApp

LAYOUTS = Path(__file__).parent / "layouts"
ANSWER = record(
    "Here it is:\n\n```",
    ("python", "ngram"),
    ("\ndef bisect_right(a, x, ", "ngram"),
    ("low", "resampled"),
    ("=0, hi=None):\n", "ngram"),
    ('    """Return the index where to insert item x in list a, assuming a is sorted.', "ngram"),
    ('"""', "bonus"),
    ("\n    while low < hi:", "draft"),
    ("\n        ...", "mtp"),
    ("\n```", "bonus"),
)


@pytest.mark.parametrize("size", [(40, 12), (80, 24), (120, 40)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_layout(size: tuple[int, int]) -> None:
    screens: list[str] = []

    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, app, "Rename lo to low in this function and print it again.")
        await answered(pilot, app)
        app.prompt.text = "And hi to high?"
        await pilot.pause(0.3)
        strips = app.screen._compositor.render_strips()
        screens.append("\n".join(strip.text.rstrip() for strip in strips) + "\n")

    drive(test, ScriptedConversation([ANSWER]), size=size, settings={"temperature": 0.7})
    path = LAYOUTS / f"{size[0]}x{size[1]}.txt"
    if os.environ.get("LOCALSPEC_UPDATE_LAYOUTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(screens[0], "utf-8")
    assert screens[0] == path.read_text("utf-8")
