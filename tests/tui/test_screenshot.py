"""The picture of a recorded answer, and the reading of recordings."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
from scripted import record

from localspec.stats import Stats
from localspec.tokens import Round
from localspec.tui import screenshot
from localspec.tui.replay import Recording, RecordingError

TOKENS = record("Hello", (" [there", "ngram"), ("]", "ngram"), (" & bye", "resampled"))


def write(path: Path, *, result: bool = True) -> Path:
    """What `localspec chat --json` prints."""
    stats = Stats(prompt_tokens=9, total_s=0.5, ttft_s=0.1)
    stats.book_round(Round(0, None, (), 0, 1, 10))
    stats.book_round(Round(1, "ngram", (1, 2, 3), 2, 3, 11))
    entries = [asdict(token) for token in TOKENS]
    if result:
        entries.append({"finish_reason": "stop", "seed": 7, "text": "", "rounds": [], "stats": stats.as_dict()})
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), "utf-8")
    return path


def test_a_recording_comes_back_as_the_engine_gave_it(tmp_path: Path) -> None:
    recording = Recording.read(write(tmp_path / "answer.jsonl"))
    assert recording.tokens == TOKENS
    assert (recording.seed, recording.finish_reason) == (7, "stop")
    stats = recording.final_stats()
    assert stats.tokens_per_pass == 2.0
    assert stats.acceptance_rate == pytest.approx(2 / 3)
    assert stats.decode_tps == pytest.approx(3 / 0.4)
    assert stats.by_drafter["ngram"].drafted == 3


def test_without_a_result_only_what_the_tokens_tell_is_shown(tmp_path: Path) -> None:
    stats = Recording.read(write(tmp_path / "answer.jsonl", result=False)).final_stats()
    assert stats.tokens_per_pass == 2.0
    assert stats.acceptance_rate is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds no tokens"),
        ("no json\n", "line 1"),
        ('{"source": "magic", "text": "x"}\n', "unknown source 'magic'"),
        ('{"source": "plain", "text": "x"}\n', "line 1"),
        ("[1]\n", "line 1"),
    ],
)
def test_what_is_no_recording_is_refused_by_line(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "answer.jsonl"
    path.write_text(text, "utf-8")
    with pytest.raises(RecordingError, match=reason):
        Recording.read(path)


def test_the_picture_shows_the_answer_and_fetches_nothing(tmp_path: Path) -> None:
    out = tmp_path / "chat.svg"
    arguments = [str(out), str(write(tmp_path / "answer.jsonl")), "--prompt", "Say [/hello]"]
    assert screenshot.main(arguments) == 0
    svg = out.read_text("utf-8")
    words = "".join("".join(ElementTree.fromstring(svg).itertext()).split())
    assert "Say[/hello]" in words
    assert "Hello[there]&bye" in words
    assert "seed7" in words
    assert "url(http" not in svg
    assert str(tmp_path) not in svg


def test_a_bad_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert screenshot.main([str(tmp_path / "chat.svg"), str(tmp_path / "none.jsonl"), "--prompt", "x"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
