"""The bench of sessions in sequence: what is asked on which day, and what the days before may know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import chat_engine

import localspec
from localspec.bench import sessions
from localspec.bench.sessions import CONTEXT, LEARNED, PLAIN, Day, measure, table
from localspec.bench.week import read_week
from localspec.ngrams import Shelf

WEEK = """
[material]
notes = "Ann brings tea. Bob brings cake."

[[change]]
day = 2
in = "notes"
old = "tea"
new = "juice"

[[prompt]]
kind = "summary"
name = "notes"
days = [1, 2]
user = "What do they bring? <<notes>>"

[[prompt]]
kind = "open-chat"
name = "hello"
days = [1]
user = "Say hello."

[[prompt]]
kind = "open-chat"
name = "other"
days = [2]
user = "Say something else."
"""


def test_standing_questions_are_the_first_days_over_each_days_material() -> None:
    asked = [(prompt.day, prompt.name) for prompt in read_week(WEEK)]
    assert asked == [(1, "notes"), (1, "hello"), (2, "notes"), (2, "other")]
    standing = read_week(WEEK, standing=True)
    assert [(prompt.day, prompt.name) for prompt in standing] == [
        (1, "notes"),
        (1, "hello"),
        (2, "notes"),
        (2, "hello"),
    ]
    assert "juice" in standing[2].text
    assert "tea" in standing[0].text


@pytest.fixture
def short_week(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localspec.bench.week.read_week", lambda standing=False: read_week(WEEK, standing=standing))


@pytest.mark.usefixtures("short_week")
def test_later_days_draft_from_earlier_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path))
    outcome = measure(chat_engine(), days=2, repeats=1, max_tokens=24, week=False)
    assert list(outcome) == [1, 2]
    first, second = outcome.values()
    assert first.learned_tokens == 0
    # The same question over the same words: "hello" has the same answer again.
    assert second.learned_tokens > 0
    for day in outcome.values():
        assert day.questions == day.identical == 2
        assert list(day.speedup) == [LEARNED]
        assert day.passes[PLAIN] >= day.passes[LEARNED]
    assert not Shelf().entries()  # nothing of it stays, or was there before
    lines = table(outcome).splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.usefixtures("short_week")
def test_a_week_is_decoded_with_its_own_context_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path))
    outcome = measure(chat_engine(), days=2, repeats=2, max_tokens=12, week=True)
    for day in outcome.values():
        assert day.questions == day.identical == 4
        assert {way: len(values) for way, values in day.speedup.items()} == {CONTEXT: 2, LEARNED: 2}
    assert CONTEXT in table(outcome)


@pytest.mark.usefixtures("short_week")
def test_the_command_prints_a_table_and_one_document(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path))
    monkeypatch.setattr(localspec, "load", lambda name, draft: chat_engine() if draft == "none" else None)
    assert sessions.main(["--days", "1", "--tokens", "8"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("| day |")
    assert json.loads(out[-1])["days"]["1"]["identical"] == 2


def test_a_day_with_other_ids_is_not_identical() -> None:
    engine = chat_engine()
    day = Day()
    plain = engine.generate("a b", max_tokens=4, speculate=False)
    day.book({PLAIN: plain, LEARNED: engine.generate("a c", max_tokens=5)})
    assert (day.questions, day.identical) == (1, 0)
