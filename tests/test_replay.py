"""Replays: the baselines on texts with known answers, the counts of a replay, recordings, and the tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec.bench import replay as replays
from localspec.bench import replay_week
from localspec.bench.fit import Observations, fit, observe
from localspec.bench.record import recorded_prompts
from localspec.bench.replay import ALL, Reliability, Tally, at_waste, reliability, replay, replay_all
from localspec.bench.replay_week import AGAIN, NEW, Cold, live
from localspec.bench.replays import (
    BASELINES,
    LlamaCpp,
    PromptLookup,
    Rule,
    SuffixDecoding,
    VllmNgram,
    llama_cpp,
    suffix,
)
from localspec.bench.replays.own import Localspec, worthwhile
from localspec.bench.replays.sessions import LlamaCppSessions, OwnSessions, Sessions, SuffixSessions
from localspec.bench.streams import RECORDED, WEEK, Recording, Stream, read_recording, write_recording
from localspec.bench.week import read_week
from localspec.drafters import NgramDrafter, continuations
from localspec.drafters.evidence import NAMES, WEIGHTS
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
    (LlamaCpp, [1, 5, 1], []),  # one sample of one token
    (LlamaCpp, [1, 5, 1, 6, 1], []),  # two samples, one half each
    (LlamaCpp, [7, 1, 5, 8, 2, 1, 5, 9, 1], [5, 8, 2, 1, 5, 9, 1, 5]),
    (LlamaCpp, [1, 2, 3, 4, 1, 2, 3], [4, 1, 2, 3, 4, 1, 2, 3]),  # over the draft itself
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


@pytest.mark.parametrize("fault", [_Latest, _Longer, _Shorter, _More])
def test_faulty_baselines_are_found(fault: type[Rule]) -> None:
    assert any(_proposed(fault, text) != drafts for rule, text, drafts in KNOWN if issubclass(fault, rule))


@pytest.mark.parametrize(
    ("rule", "module", "name", "fault"),
    [
        (LlamaCpp, llama_cpp, "LAX", {1: (1, 1), 2: (2, 50), 3: (1, 50), 4: (1, 50)}),
        (LlamaCpp, llama_cpp, "LAX", {4: (1, 50)}),
        (SuffixDecoding, suffix, "FACTOR", 8.0),
        (SuffixDecoding, suffix, "LEAST", 0.9),
        (SuffixDecoding, suffix, "DEPTH", 2),
    ],
)
def test_faulty_gates_are_found(
    rule: type[Rule], module: Any, name: str, fault: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, fault)
    assert any(_proposed(of, text) != drafts for of, text, drafts in KNOWN if of is rule)


def _taught(sessions: Sessions, *answers: Sequence[int]) -> Sessions:
    for answer in answers:
        sessions.teach(Stream("a", "x", (90, 91), tuple(answer)))
    return sessions


def _drafts(sessions: Sessions, text: Sequence[int], limit: int = 4) -> list[int]:
    rule = sessions.begin()
    rule.commit(text)
    return rule.propose(limit)


def test_rules_with_a_memory_draft_from_earlier_answers() -> None:
    answer = (1, 2, 3, 4, 5, 6, 7, 8)
    text = (50, 1, 2, 3)
    assert _drafts(_taught(LlamaCppSessions(), answer), text) == []  # one sample is too few in earlier contexts
    assert _drafts(_taught(LlamaCppSessions(), answer, answer), text) == [4, 5, 6, 7]
    assert _drafts(_taught(SuffixSessions(), answer), text) == [4, 5, 6]  # as long as the match
    assert _drafts(_taught(OwnSessions(0.0), answer), text, 2) == [4, 5]
    for sessions in (LlamaCppSessions(), SuffixSessions(), OwnSessions(0.0)):
        assert _drafts(sessions, text) == []
        # What this text says goes before; suffix decoding holds its own last place, without a follower yet, against it.
        said = [4] if isinstance(sessions, SuffixSessions) else [9]
        assert _drafts(_taught(sessions, answer, answer), (1, 2, 3, 9, 9, 1, 2, 3), 1) == said


def test_llama_cpp_asks_the_corpus_last_and_among_several() -> None:
    corpus = [Stream("a", "x", (), (1, 2, 3)), Stream("a", "y", (), (1, 2, 3))]
    assert _drafts(LlamaCppSessions(corpus), (7, 1, 2)) == [3]
    # 8 and 3 followed once each in the context: the corpus knows 3.
    assert _drafts(LlamaCppSessions(corpus), (1, 2, 3, 5, 1, 2, 8, 1, 2), 1) == [3]
    assert _drafts(LlamaCppSessions(), (1, 2, 3, 5, 1, 2, 8, 1, 2), 1) in ([3], [8])


def test_a_week_is_lived_in_order_and_its_first_day_left_out() -> None:
    answer = tuple(range(10, 40))
    week = Recording(
        "m",
        "greedy",
        (
            Stream("chat", "x", (1, 2), answer, 1),
            Stream("chat", "x", (1, 3), answer, 2),
            Stream("code", "y", (1, 2), tuple(range(50, 80)), 2),
            Stream("code", "y", (1, 2), tuple(range(50, 80)), 3),
        ),
    )
    cold = live(week, Cold(SuffixDecoding))
    assert {tally.tokens_per_pass for tally in cold.values()} == {1}
    assert cold[ALL].tokens == 87
    for sessions in (SuffixSessions(), OwnSessions(0.0)):
        found = live(week, sessions)
        assert found[NEW].tokens_per_pass == 1
        assert found[AGAIN].tokens == 58
        assert found[AGAIN].tokens_per_pass > 3
        assert found["chat"].tokens + found["code"].tokens == found[ALL].tokens


def test_drafts_are_kept_while_they_are_worth_their_rows() -> None:
    assert worthwhile([], 0.5) == 0
    assert worthwhile([0.5, 0.5], 0.0) == 2
    # Alone, one half is worth as much as it wastes; with 1.9 tokens to come behind it in the next pass, less.
    assert worthwhile([0.5], 0.49) == 1
    assert worthwhile([0.5, 0.9], 0.49) == 0
    assert worthwhile([0.5, 0.9], 0.3) == 2
    assert worthwhile([0.5, 0.2], 0.3) == 1
    # A copy that is sure is followed to its end.
    assert worthwhile([0.99] * 8, 0.4) == 8
    for least in (0.1, 0.2, 0.4):
        assert worthwhile([0.8] * 8, least) >= worthwhile([0.8] * 8, least + 0.1)


def test_weights_are_fitted_to_what_came() -> None:
    rng = np.random.default_rng(0)
    seen = np.column_stack([np.ones(4000), rng.normal(size=4000), np.zeros(4000)])
    came = (rng.random(4000) < 1 / (1 + np.exp(-(seen @ [-1.0, 2.0, 0.0])))).astype(float)
    found = fit(seen, came)
    assert found[:2] == pytest.approx([-1.0, 2.0], abs=0.25)
    assert found[2] == 0


def test_observations_are_what_could_have_been_drafted() -> None:
    seen = Observations()
    seen.read(Stream("a", "x", (1, 2, 3), (1, 2, 4)), NgramDrafter())
    # Behind 1 stood 2, which comes; behind 2 stood 3, which does not.
    assert seen.came.tolist() == [1, 0]
    assert seen.seen.shape == (2, len(NAMES))
    halves = observe(
        [
            Recording("m", "greedy", (Stream("a", "x", (1, 2, 3), (1, 2, 4)), Stream("a", "y", (5,), (6, 7)))),
            Recording(
                "m", "greedy", (Stream("a", "x", (5,), (6, 7, 8, 9), 1), Stream("a", "x", (5,), (6, 7, 8, 9), 2))
            ),
        ]
    )
    # Of the second day, what the first one taught: 7 behind "5 6", and what follows it.
    assert halves["fit"].came.tolist() == [1, 0]
    assert halves["test"].came.tolist() == [1, 1, 1]


def test_the_shipped_weights_serve_the_half_that_they_were_not_fitted_to() -> None:
    """Predicted against observed on the other half; with weights that trust too much, or too little, it shows."""
    streams = read_recording().only("test").streams[::3]
    assert reliability(streams).error < 0.06


def test_wrong_weights_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = read_recording().only("test").streams[::3]
    for shift in (-1.5, 1.5):
        monkeypatch.setattr(continuations, "_OF_CONTEXT", sum(WEIGHTS[:2]) + shift)
        assert reliability(streams).error > 0.08


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


def test_the_week_prints_its_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    passage = tuple(range(10, 40))
    week = Recording("m", "greedy", tuple(Stream("chat", "x", (1, day), passage, day) for day in (1, 2, 3)))
    monkeypatch.setattr(replay_week, "read_recording", lambda name="": week)
    assert replay_week.main(["--most", "4"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])["rules"]
    assert found["localspec, cold"][AGAIN]["tokens_per_pass"] == 1
    assert found["localspec, learned"][AGAIN]["tokens_per_pass"] > 2
    assert found["suffix decoding, earlier answers"]["chat"]["tokens"] == 58
    assert "| suffix decoding, cold |" in out
