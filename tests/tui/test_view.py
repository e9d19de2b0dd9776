"""What reaches the screen: text as it is, each source in its own look, at every size."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import combinations
from typing import get_args

import pytest
from driving import answered, blocks, drive, lines, say, segments, until
from rich.style import Style
from scripted import ScriptedConversation, ScriptedEngine, record
from textual.pilot import Pilot

from localspec.tokens import Source
from localspec.tui.app import ChatApp
from localspec.tui.provenance import PROVENANCE, REMEMBERED
from localspec.tui.themes import DARK, LIGHT

SOURCES: tuple[Source, ...] = get_args(Source)
EACH = record(*((f"word_{source} ", source) for source in SOURCES))
BRACKETS = ["[/", "a[i] = [x for x in y]", "[/bold]", "[0] hi", "[bold]b[/bold]", r"\[/]", "[link=x]", "{$primary}"]


def attributes(style: Style) -> tuple[bool, bool, bool, bool]:
    return bool(style.bold), bool(style.italic), bool(style.underline), bool(style.reverse)


def style_of(app: ChatApp, text: str) -> Style:
    for line in segments(app.transcript):
        for segment, style in line:
            if text in segment:
                return style
    raise AssertionError(f"{text!r} is not on the screen")


@pytest.mark.parametrize("theme", [DARK.name, LIGHT.name, "nord", "textual-light"])
def test_every_source_has_its_colour_attribute_and_legend(theme: str) -> None:
    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        app.theme = theme
        await say(pilot, app, "Hi")
        await answered(pilot, app)
        styles = {source: style_of(app, f"word_{source}") for source in SOURCES}
        for one, other in combinations(SOURCES, 2):
            assert attributes(styles[one]) != attributes(styles[other])
            assert styles[one].color != styles[other].color
        legend = dict(segments(app.legend)[0])
        for source in SOURCES:
            entry = legend[PROVENANCE[source].label]
            assert (entry.color, attributes(entry)) == (styles[source].color, attributes(styles[source]))

    drive(test, ScriptedConversation([EACH]))


REMEMBERED_TOKENS = [
    replace(token, level=level)
    for token, level in zip(
        record(("word_seen ", "ngram"), ("word_learned ", "ngram"), ("word_seed ", "ngram"), "word_end"),
        ("context", "learned", "seed", None),
        strict=True,
    )
]


def test_what_is_guessed_from_outside_the_chat_has_the_colour_of_ngrams_and_a_look_of_its_own() -> None:
    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, app, "Hi")
        await answered(pilot, app)
        seen, learned, seed = (style_of(app, f"word_{name}") for name in ("seen", "learned", "seed"))
        others = {attributes(style_of(app, f"word_{source}")) for source in SOURCES}
        assert attributes(learned) == attributes(seed)
        assert attributes(learned) not in others
        assert seen.color == learned.color == seed.color
        legend = dict(segments(app.legend)[0])
        assert attributes(legend[REMEMBERED.label]) == attributes(learned)
        await say(pilot, app, "/help")
        assert any(REMEMBERED.meaning in line for line in lines(app.transcript))

    drive(test, ScriptedConversation([[*EACH, *REMEMBERED_TOKENS]]), size=(140, 60))


def test_the_legend_explains_what_is_learned_where_something_is() -> None:
    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, app, "Hi")
        await answered(pilot, app)
        assert REMEMBERED.label not in dict(segments(app.legend)[0])
        await say(pilot, app, "Hi")
        await answered(pilot, app)
        assert REMEMBERED.label in dict(segments(app.legend)[0])

    drive(test, ScriptedConversation([EACH, REMEMBERED_TOKENS]))


def test_without_colours_the_attributes_tell_the_sources_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, app, "Hi")
        await answered(pilot, app)
        for line in segments(app.transcript):
            for _, style in line:
                for colour in (style.color, style.bgcolor):
                    if colour is not None and colour.triplet is not None:
                        assert len(set(colour.triplet)) == 1, "a grey"
        shown = {attributes(style_of(app, f"word_{source}")) for source in SOURCES}
        assert len(shown) == len(SOURCES)

    drive(test, ScriptedConversation([EACH]))


def test_segments_lead_to_their_tokens() -> None:
    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, app, "Hi")
        await answered(pilot, app)
        for index, token in enumerate(EACH):
            assert style_of(app, token.text.strip()).meta["token"] == index
            assert app.transcript.tokens[index] is token

    drive(test, ScriptedConversation([EACH]))


@pytest.mark.parametrize("text", BRACKETS)
def test_brackets_are_shown_as_they_are(text: str) -> None:
    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, app, text)
        await answered(pilot, app)
        shown = lines(app.transcript)
        assert f"❯ {text}" in shown
        assert f"  {text}" in shown
        await say(pilot, app, f"/seed {text}")
        assert app.is_running

    engine = ScriptedEngine(name=text)
    drive(test, ScriptedConversation([record(*text)], engine=engine))


def test_escape_sequences_reach_nobody() -> None:
    evil = "a\x1b[31mb\x1b]0;title\x07c\x9b2Jd\re\x00"

    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, app, evil)
        await answered(pilot, app)
        everything = "".join(text for line in segments(app.transcript) for text, _ in line)
        assert everything.isprintable()
        assert ("answer", "a[31mb]0;titlec2Jde") in blocks(app)

    drive(test, ScriptedConversation([record(*evil)]))


def test_wide_characters_and_tabs_keep_to_the_view() -> None:
    text = "中文字符测试" * 8 + "\n\tindented\n" + "🙂" * 40 + " done"

    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, app, "Hi")
        await answered(pilot, app)
        shown = lines(app.transcript)
        assert "      indented" in shown
        assert "".join(shown).replace(" ", "").count("🙂") == 40
        width = app.transcript.size.width
        for y in range(app.transcript.size.height):
            assert app.transcript.render_line(y).cell_length == width

    drive(test, ScriptedConversation([record(*text)]), size=(40, 30))


def test_a_resize_while_tokens_stream_wraps_again_and_loses_nothing() -> None:
    words = [f"word{i} " for i in range(60)]
    gate = threading.Semaphore(30)

    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, app, "Hi")
        await until(pilot, lambda: len(app.transcript.tokens) == 30)
        await pilot.resize_terminal(30, 20)
        await pilot.pause()
        rows = lines(app.transcript)
        assert all(len(row) <= 30 for row in rows)
        assert rows[-2] == "  word27 word28 word29 ▍"
        gate.release(100)
        await answered(pilot, app)
        await pilot.resize_terminal(120, 40)
        await pilot.pause()
        assert "".join(" ".join(lines(app.transcript)).split()) == "".join(
            ["Thelookofeachtokenshowswhereitcamefrom;/helpexplains.", "❯Hi", *(word.strip() for word in words)]
        )

    drive(test, ScriptedConversation([record(*words)], gate=gate), size=(80, 24))


def test_the_view_follows_the_end_until_the_user_scrolls_up() -> None:
    gate = threading.Semaphore(40)
    rows = record(*(f"line {i}\n" for i in range(80)))

    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        view = app.transcript
        await say(pilot, app, "Hi")
        await until(pilot, lambda: len(view.tokens) == 40)
        assert view.scroll_offset.y == view.max_scroll_y > 0
        assert view.vertical_scrollbar.position == view.scroll_offset.y
        await pilot.press("pageup")
        await pilot.pause()
        reading = view.scroll_offset.y
        top = lines(view)[1]
        gate.release(20)
        await until(pilot, lambda: len(view.tokens) == 60)
        assert view.scroll_offset.y == reading < view.max_scroll_y
        await pilot.resize_terminal(60, 24)
        await pilot.pause()
        assert lines(view)[1] == top
        await pilot.press(*["pagedown"] * 9)
        gate.release(20)
        await answered(pilot, app)
        assert view.scroll_offset.y == view.max_scroll_y
        assert "  line 79" in lines(view)

    drive(test, ScriptedConversation([rows], gate=gate), size=(80, 24))


def test_a_frame_of_tokens_draws_the_tail_only(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Semaphore(300)
    rows = record(*(f"line {i}\n" for i in range(300)), "tail")

    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        view = app.transcript
        await say(pilot, app, "Hi")
        await until(pilot, lambda: len(view.tokens) == 300)
        drawn: list[int] = []
        draw = view._draw
        monkeypatch.setattr(view, "_draw", lambda line, width: drawn.append(line) or draw(line, width))
        gate.release()
        await answered(pilot, app)
        assert "  tail" in lines(view)
        assert len(set(drawn)) <= 2, "the line that grew, and the blank line below it"

    drive(test, ScriptedConversation([rows], gate=gate))


def test_a_selection_is_copied_as_it_was_before_the_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a sentence that is too long for one row of this narrow view\n\nand an end"
    copied: list[str] = []

    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        monkeypatch.setattr(app, "copy_to_clipboard", copied.append)
        await say(pilot, app, "Hi")
        await answered(pilot, app)
        app.transcript.text_select_all()
        await pilot.press("ctrl+c")
        assert app.is_running
        assert copied[0].endswith(f"Hi\n\n{text}")

    drive(test, ScriptedConversation([record(*text)]), size=(40, 30))


def test_status_numbers_and_their_shorter_forms() -> None:
    answer = record("a", ("b", "ngram"), ("c", "bonus"), ("d", "ngram"), ("e", "resampled"))

    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        assert lines(app.status)[0].split() == ["ready", "context", "0", "/", "8192"]
        await say(pilot, app, "Hi")
        await answered(pilot, app)
        await pilot.pause()
        line = lines(app.status)[0]
        assert line.strip().startswith("61.0 tok/s · 1.7/pass ·  67 % accepted · n-gram · seed 4127")
        assert line.endswith("context 12 / 8192")
        for width, shown in (
            (58, "61.0 tok/s · 1.7/pass ·  67 % accepted · seed 4127"),
            (40, "61.0 tok/s · 1.7/pass ·  67 % accepted"),
            (36, "61.0 tok/s · 1.7/pass ·  67 %"),
            (20, "61.0 tok/s"),
        ):
            await pilot.resize_terminal(width, 24)
            await pilot.pause()
            assert lines(app.status)[0].strip() == shown

    drive(test, ScriptedConversation([answer]), size=(110, 24))


def test_nothing_drafted_is_not_applicable_rather_than_zero() -> None:
    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, app, "Hi")
        await answered(pilot, app)
        assert "1.0/pass ·   n/a accepted · seed 4127" in lines(app.status)[0]

    drive(test, ScriptedConversation([record("a", "b")]))


@pytest.mark.parametrize("size", [(20, 6), (40, 12), (80, 24), (120, 40), (300, 100)])
def test_every_part_is_on_the_screen_at_every_size(size: tuple[int, int]) -> None:
    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, app, "Hi")
        await answered(pilot, app)
        parts = (app.transcript, app.status, app.prompt, app.legend)
        assert all(part.region.height >= 1 and part.region.bottom <= size[1] for part in parts)
        assert lines(app.legend)[0].strip().startswith("plain" if size[0] <= 40 else ("Esc", "Ctrl+J", "Enter"))
        assert "bonus" in lines(app.legend)[0] or size[0] < 40

    drive(test, ScriptedConversation([EACH]), size=size)


def test_a_mouse_over_a_token_finds_it() -> None:
    async def test(pilot: Pilot[None], app: ChatApp) -> None:
        await say(pilot, app, "Hi")
        await answered(pilot, app)
        row = lines(app.transcript).index("  Hello there")
        y = app.transcript.region.y + row
        assert app.screen.get_style_at(4, y).meta["token"] == 0
        assert app.screen.get_style_at(9, y).meta["token"] == 1

    drive(test, ScriptedConversation([record("Hello", " there")]))
