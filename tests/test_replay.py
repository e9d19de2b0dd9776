"""Replays: the baselines on texts with known answers, the counts of a replay, recordings, and the tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from localspec.bench import replay as replays
from localspec.bench.record import recorded_prompts
from localspec.bench.replay import ALL, Reliability, Tally, at_waste, replay, replay_all
from localspec.bench.replays import BASELINES, LlamaCppContext, PromptLookup, Rule, SuffixDecoding, VllmNgram
from localspec.bench.replays.own import Localspec
from localspec.bench.streams import RECORDED, WEEK, Recording, Stream, read_recording, write_recording
from localspec.bench.week import read_week
from localspec.errors import LocalspecError

KNOWN: list[tuple[type[Rule], list[int], list[int]]] = [
    # The earliest place of the longest n-gram, up to the end of the text.
    (PromptLookup, [1, 2, 3, 1, 2, 4, 1, 2], [3, 1, 2, 4, 1, 2]),
    (PromptLookup, [2, 7, 1, 2, 8, 9, 1, 2], [8, 9, 1, 2]),  # two tokens before one
    (PromptLookup, [1, 2, 7, 6, 1, 2, 8, 6, 1, 2], [7, 6, 1, 2, 8, 6, 1, 2]),  # never three
    (PromptLookup, [2, 7, 1, 2], [7, 1, 2]),
    (PromptLookup, [1, 2, 3], []),
    (PromptLookup, [1, *range(2, 15), 1], [*range(2, 10)]),  # at most 8 were asked for
    (VllmNgram, [1, 2, 3, 4, 2, 3], [4, 2, 3]),  # the example in vLLM's own docstring
    (VllmNgram, [2, 7, 1, 2], []),  # one token is no match
    (VllmNgram, [5, 1, 2, 7, 6, 1, 2, 8, 6, 1, 2], [8, 6, 1, 2]),
    (VllmNgram, [1, 2, *range(3, 15), 1, 2], [3, 4, 5, 6, 7]),
    (LlamaCppContext, [1, 5, 1], []),  # one sample of one token
    (LlamaCppContext, [1, 5, 1, 6, 1], []),  # two samples, one half each
    (LlamaCppContext, [7, 1, 5, 8, 2, 1, 5, 9, 1], [5, 8, 2, 1, 5, 9, 1, 5]),
    (LlamaCppContext, [1, 2, 3, 4, 1, 2, 3], [4, 1, 2, 3, 4, 1, 2, 3]),  # over the draft itself
    (SuffixDecoding, [1, 2, 3, 9, 1, 2], [3, 9]),  # as long as the match
    (SuffixDecoding, [1, 2, 3, 9, 8, 7, 1, 2, 3], [9, 8, 7]),
    (SuffixDecoding, [1, 5, 2, 1, 6, 2, 1, 6, 3, 1], [6]),  # the most frequent
    (SuffixDecoding, [1, 2, 3], []),
    # "2 3" was followed by 4 twice of three places, "1 2 3" by 5 once: 2/4 (1 + 1) at most against 1/2 (1 + 1 + 1).
    (SuffixDecoding, [1, 2, 3, 5, 6, 7, 2, 3, 4, 8, 2, 3, 4, 8, 1, 2, 3], [5, 6, 7]),
]


def _proposed(rule: type[Rule], text: Sequence[int], limit: int = 8) -> list[int]:
    made = rule()
    made.commit(text)
    return made.propose(limit)


@pytest.mark.parametrize(("rule", "text", "drafts"), KNOWN)
def test_baselines_propose_what_their_rules_say(rule: type[Rule], text: list[int], drafts: list[int]) -> None:
    assert _proposed(rule, text) == drafts


@pytest.mark.parametrize("rule", [*BASELINES, Localspec])
def test_rules_do_not_depend_on_how_the_text_came(rule: type[Rule]) -> None:
    text = [i * i % 11 for i in range(60)]
    bit_by_bit = rule()
    for token in text:
        bit_by_bit.commit([token])
        assert len(bit_by_bit.propose(3)) <= 3
    assert bit_by_bit.propose(8) == _proposed(rule, text)


class _Latest(PromptLookup):
    def propose(self, limit: int) -> list[int]:
        self.text = self.text[::-1]
        return super().propose(limit)


class _Longer(PromptLookup):
    longest = 3


class _Shorter(VllmNgram):
    shortest = 1


class _More(VllmNgram):
    tokens = 8


class _Ungated(LlamaCppContext):
    def _next(self, text: list[int]) -> int | None:
        followers = self._followers.get(tuple(text[-1:]))
        return followers.most_common(1)[0][0] if followers else None


class _Unbounded(SuffixDecoding):
    factor = 8.0


class _AnyChance(SuffixDecoding):
    def _path(self, node: tuple[int, ...], limit: int) -> tuple[list[int], float]:
        drafts, _ = super()._path(node, limit)
        return drafts, 1.0 / len(node)


@pytest.mark.parametrize("fault", [_Latest, _Longer, _Shorter, _More, _Ungated, _Unbounded, _AnyChance])
def test_faulty_baselines_are_found(fault: type[Rule]) -> None:
    assert any(_proposed(fault, text) != drafts for rule, text, drafts in KNOWN if issubclass(fault, rule))


class _Script(Rule):
    """Proposes given drafts, round by round."""

    name = "script"

    def __init__(self, rounds: list[list[int]]) -> None:
        super().__init__()
        self.rounds = rounds

    def propose(self, limit: int) -> list[int]:
        return self.rounds.pop(0)[:limit]


def test_a_replay_counts_what_a_greedy_target_would_accept() -> None:
    stream = Stream("chat", "one", (1, 2), (3, 4, 5, 6, 7, 8))
    rule = _Script([[4, 5, 9, 7], []])
    tally = replay(stream, rule)
    # 3 comes with the prompt; 4 and 5 are accepted, 6 comes with them; 7 alone, and 8, behind which nothing is drafted.
    assert (tally.tokens, tally.passes, tally.drafted, tally.accepted) == (5, 3, 4, 2)
    assert rule.text == [1, 2, 3, 4, 5, 6, 7, 8]
    assert tally.tokens_per_pass == pytest.approx(5 / 3)
    assert tally.wasted_per_token == pytest.approx(2 / 5)
    assert tally.drafted_per_token == pytest.approx(4 / 5)
    # A right draft behind a wrong one is not accepted, and nothing is drafted beyond the answer.
    tally = replay(stream, _Script([[9, 5, 6], [5, 6, 7, 8, 1]]))
    assert (tally.tokens, tally.passes, tally.drafted, tally.accepted) == (5, 2, 6, 3)


def test_kinds_add_up() -> None:
    streams = [Stream(kind, "x", (1, 2, 3), (1, 2, 3, 1, 2, 3)) for kind in ("a", "b", "a")]
    found = replay_all(streams, PromptLookup)
    assert list(found) == ["a", "b", ALL]
    assert found["a"].tokens == 2 * found["b"].tokens
    assert found[ALL] == found["a"] + found["b"]


def test_the_curve_is_read_between_its_points() -> None:
    curve = [Tally(10, 8, 1, 1), Tally(10, 5, 5, 3), Tally(10, 5, 9, 3), Tally(10, 4, 10, 4)]  # wasted 0, .2, .6, .6
    assert at_waste(curve, 0.0) == pytest.approx(1.25)
    assert at_waste(curve, 0.1) == pytest.approx((1.25 + 2) / 2)
    assert at_waste(curve, 0.4) == pytest.approx(2.25)
    assert at_waste(curve, 3.0) == pytest.approx(2.5)
    assert at_waste(curve[1:], 0.1) == pytest.approx(1.5)  # half of the rounds plain


def test_reliability_counts_tested_drafts_only() -> None:
    found = Reliability()
    found.book([0.95, 0.85, 0.15, 0.95], 2)
    found.book([0.91], 1)
    assert found.seen == [0, 1, 0, 0, 0, 0, 0, 0, 1, 2]
    assert found.accepted == [0, 0, 0, 0, 0, 0, 0, 0, 1, 2]
    assert found.error == pytest.approx((0.15 + 0.15 + 0.14) / 4)


def test_recordings_come_back_as_they_were(tmp_path: Path) -> None:
    recording = Recording("m", "greedy", (Stream("a", "x", (1, 2), (3,)), Stream("b", "y", (4,), (5, 6))))
    write_recording(recording, tmp_path)
    assert read_recording(tmp_path) == recording
    assert list(recording.by_kind()) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "bench.record"),
        ("{", "not a recording"),
        ('{"version": 99, "streams": []}', "version 99"),
        ('{"version": 1, "model": "m", "how": "h", "streams": [{"kind": "a"}]}', "not a recording"),
        (
            '{"version": 1, "model": "m", "how": "h", "streams": ['
            '{"kind": "a", "name": "b", "prompt": [-1], "answer": []}]}',
            "numbers from 0",
        ),
    ],
)
def test_recordings_that_cannot_be_read_say_so(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / RECORDED).write_text(text)
    with pytest.raises(LocalspecError, match=said):
        read_recording(tmp_path)
    assert replays.main(["--streams", str(tmp_path)]) == 1


def test_the_package_has_a_recording_of_every_kind() -> None:
    recording = read_recording()
    kinds = recording.by_kind()
    assert set(kinds) == {"open-chat", "code", "code-edit", "summary", "json", "quoting", "agent-log"}
    assert [(stream.kind, stream.name) for stream in recording.streams] == [
        (p.kind, p.name) for p in recorded_prompts()
    ]
    assert all(len(streams) >= 9 for streams in kinds.values())
    assert all(len(stream.answer) >= 24 for stream in recording.streams)
    assert not any(_runs_away(stream.answer) for stream in recording.streams)


def test_the_package_has_a_recording_of_the_week() -> None:
    recording = read_recording(name=WEEK)
    asked = [(prompt.day, prompt.kind, prompt.name) for prompt in read_week()]
    assert [(stream.day, stream.kind, stream.name) for stream in recording.streams] == asked
    assert not any(_runs_away(stream.answer) for stream in recording.streams)


def _runs_away(answer: Sequence[int]) -> bool:
    """Whether its last half and more only repeats itself: such an answer flatters every rule that copies."""
    half = len(answer) // 2
    return half >= 24 and any(answer[-half:] == answer[-half - period : -period] for period in range(1, half // 3))


def test_runaway_answers_are_told_from_others() -> None:
    start = tuple(range(100, 200))
    assert _runs_away((*start, *((1, 2, 3) * 50)))
    assert not _runs_away((*start, *((1, 2, 3) * 20)))
    assert not _runs_away((*start, *start))


def test_the_replay_prints_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    passage = tuple(range(10, 40))
    streams = (Stream("edit", "x", (1, 2, *passage, 3), (*passage, 4)), Stream("chat", "y", (1, 2), (*range(50, 80),)))
    write_recording(Recording("m", "greedy", streams), tmp_path)
    assert replays.main(["--streams", str(tmp_path), "--most", "4"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    assert found["rules"]["localspec"]["edit"]["tokens_per_pass"] > 3
    assert found["rules"]["localspec"]["chat"]["tokens_per_pass"] == 1
    assert found["rules"]["suffix decoding"][ALL]["tokens"] == 59
    for part in ("prompt lookup", "| edit |", "with as many rows wasted", "mean distance"):
        assert part in out
