"""Word wrap of a stream: where rows break, and that pieces do not matter."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from localspec.tui.wrap import Wrapper


def rows(*pieces: str, width: int) -> list[str]:
    wrapper = Wrapper(width)
    for ref, piece in enumerate(pieces):
        wrapper.feed(piece, ref)
    return [wrapper[i].text for i in range(len(wrapper))]


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [
        ("", 8, [""]),
        ("one two three", 8, ["one two ", "three"]),
        ("one two three", 7, ["one two", "three"]),
        ("one two   three", 7, ["one two", "three"]),
        ("one two \nthree", 7, ["one two", "three"]),
        ("a\n\nb\n", 8, ["a", "", "b", ""]),
        ("abcdefghij", 4, ["abcd", "efgh", "ij"]),
        ("    abcdefgh", 6, ["    ab", "cdefgh"]),
        ("x\ty", 8, ["x   y"]),
        ("well-known", 6, ["well-", "known"]),
        ("中文字符测试", 5, ["中文", "字符", "测试"]),
        ("你好,世界。", 5, ["你好,", "世", "界。"]),
        ("你好世界。", 8, ["你好世", "界。"]),
        ("ab 中文", 5, ["ab 中", "文"]),
        ("🙂🙂🙂", 4, ["🙂🙂", "🙂"]),
        ("中", 1, ["中"]),
        ("no\u00a0break here", 8, ["no\u00a0break", "here"]),
    ],
)
def test_rows(text: str, width: int, expected: list[str]) -> None:
    assert rows(text, width=width) == expected


def test_a_word_is_moved_whole_though_its_tokens_came_apart() -> None:
    wrapper = Wrapper(8)
    for ref, piece in enumerate(["the ", "pre", "dic", "tion"]):
        wrapper.feed(piece, ref)
    assert [wrapper[i].text for i in range(len(wrapper))] == ["the ", "predicti", "on"]
    assert [(run.text, run.ref) for run in wrapper[1].runs] == [("pre", 1), ("dic", 2), ("ti", 3)]


def test_joined_characters_stay_one_though_their_tokens_came_apart() -> None:
    family = "👨\u200d👩\u200d👧"
    wrapper = Wrapper(4)
    for ref, character in enumerate("ab" + family + "e\u0301"):
        wrapper.feed(character, ref)
    assert [wrapper[i].text for i in range(len(wrapper))] == ["ab" + family, "e\u0301"]
    assert [run.ref for run in wrapper[0].runs] == [0, 1, 2]


def test_a_character_that_a_selector_widens_moves_to_the_next_row() -> None:
    assert rows("abc❤", "\ufe0f", width=4) == ["abc", "❤\ufe0f"]


def test_feed_names_the_first_row_that_changed() -> None:
    wrapper = Wrapper(5)
    assert wrapper.feed("one two th", 0) == 0
    assert len(wrapper) == 3
    assert wrapper.feed("ree", 1) == 2
    assert wrapper.feed("\nx", 2) == 2
    assert wrapper[2].text == "three"


def test_what_the_wrap_swallowed_is_known() -> None:
    wrapper = Wrapper(3)
    wrapper.feed("one two\nabcd", 0)
    assert "".join(wrapper[i].text + wrapper[i].end for i in range(len(wrapper))) == "one two\nabcd"


TEXT = st.text(st.sampled_from([*"ab cd-\n\t 。", "中", "文", "🙂", "👩", "\u200d", "\u0301", "\ufe0f", "❤", "🇩", "🇪"]))


@given(TEXT, st.integers(2, 9), st.lists(st.integers(0, 60)))
def test_pieces_do_not_matter_and_nothing_is_lost_or_too_wide(text: str, width: int, cuts: list[int]) -> None:
    edges = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    whole = rows(text, width=width)
    assert rows(*pieces, width=width) == whole
    squeeze = str.maketrans("", "", " \t\n")
    assert "".join(whole).translate(squeeze) == text.translate(squeeze)
    assert all(cell_len(row) <= max(width, 4) for row in whole)
