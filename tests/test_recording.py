"""Recordings: the prompts of all kinds and of a week, days and halves, and a recording that goes on."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest

from localspec.bench import replay as replays
from localspec.bench.record import record, recorded_prompts
from localspec.bench.streams import RECORDED, WEEK, Recording, Stream, read_recording, write_recording
from localspec.bench.week import read_week
from localspec.bench.workloads import AGENT_LOGS, MORE, Prompt, choose_workloads, read_workloads
from localspec.errors import LocalspecError

KINDS = ["open-chat", "code", "code-edit", "summary", "json", "quoting", "agent-log"]
START = Recording("m", "greedy", ())

PLAN = """
[material]
notes = '''
cups: 4
spoons: <<other>>
'''
other = "a"

[[change]]
day = 2
in = "notes"
old = "cups: 4"
new = "cups: 5"

[[change]]
day = 4
in = "other"
old = "b"
new = "c"

[[change]]
day = 2
in = "other"
old = "a"
new = "b"

[[change]]
day = 4
in = "notes"
old = "cups: 5"
new = "cups: 6"

[[change]]
day = 4
in = "other"
old = "c"
new = "d"

[[prompt]]
kind = "summary"
name = "notes"
days = [3, 1]
user = '''
Of <<notes>>, <<other>>:
'''

[[prompt]]
kind = "open-chat"
name = "tea"
days = [1]
user = "Tea?"

[[prompt]]
kind = "json"
name = "notes"
days = [4]
user = "<<notes>> <<other>>"
"""


def _ids(text: str) -> list[int]:
    return list(text.encode())


class _Model:
    """Answers with the prompt's last bytes, and remembers what it was asked; stops working after some answers."""

    def __init__(self, answers: int = 1000) -> None:
        self.asked: list[str] = []
        self.answers = answers

    def __call__(self, prompt: Prompt, ids: tuple[int, ...]) -> tuple[int, ...]:
        if len(self.asked) == self.answers:
            raise KeyboardInterrupt
        self.asked.append(f"{prompt.kind}/{prompt.name}")
        return ids[-3:]


def _pairs(*texts: str) -> list[tuple[Prompt, list[int]]]:
    return [(Prompt("chat", text[0], text, 1 + i), _ids(text)) for i, text in enumerate(texts)]


def test_the_prompts_of_a_kind_come_together_and_the_bench_s_first() -> None:
    prompts = recorded_prompts()
    assert [kind for kind, _ in itertools.groupby(prompts, lambda prompt: prompt.kind)] == KINDS
    first = [p for workload in [*choose_workloads(None), *read_workloads(AGENT_LOGS)] for p in workload.prompts]
    for kind in KINDS:
        own = [p for p in first if p.kind == kind]
        assert [p for p in prompts if p.kind == kind][: len(own)] == own
    assert {p.name for workload in read_workloads(MORE) for p in workload.prompts} <= {p.name for p in prompts}
    assert max(Counter((p.kind, p.name) for p in prompts).values()) == 1
    assert max(Counter(p.text for p in prompts).values()) == 1


def test_a_week_fills_in_the_material_of_its_day() -> None:
    found = [(p.day, f"{p.kind}/{p.name}", p.text) for p in read_week(PLAN)]
    assert found == [
        (1, "summary/notes", "Of cups: 4\nspoons: <<other>>, a:"),
        (1, "open-chat/tea", "Tea?"),
        (3, "summary/notes", "Of cups: 5\nspoons: <<other>>, b:"),  # the change of day 2, on which nothing was asked
        (4, "json/notes", "cups: 6\nspoons: <<other>> d"),
    ]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('old = "cups: 4"', 'old = "mugs"', "change of day 2.*'mugs'.*once"),
        ('old = "cups: 4"', 'old = "s"', "change of day 2.*once"),
        ('in = "notes"', 'in = "nots"', "'nots'"),
        ("<<other>>:", "<<others>>:", "no material called 'others'; there is notes, other"),
        ('kind = "open-chat"\nname = "tea"', 'kind = "summary"\nname = "notes"', "summary/notes twice on day 1"),
    ],
)
def test_a_week_with_a_slip_says_where(old: str, new: str, said: str) -> None:
    assert old in PLAN
    with pytest.raises(LocalspecError, match=said):
        read_week(PLAN.replace(old, new, 1))


def test_the_package_s_week_asks_again_in_the_same_and_in_other_words() -> None:
    prompts = read_week()
    assert {prompt.day for prompt in prompts} == set(range(1, 7))
    assert {prompt.kind for prompt in prompts} == set(KINDS)
    assert all("<<" not in prompt.text for prompt in prompts)
    for day in range(1, 7):
        names = [(p.kind, p.name) for p in prompts if p.day == day]
        before = {(p.kind, p.name) for p in prompts if p.day < day}
        assert 6 <= len(names) <= 7
        if day > 1:
            assert 1 <= sum(name in before for name in names) <= 4


def test_a_recording_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    pairs = _pairs("abc", "def", "ghi")
    first = _Model(answers=2)
    with pytest.raises(KeyboardInterrupt):
        record(pairs, START, first, tmp_path, WEEK)
    assert [stream.name for stream in read_recording(tmp_path, WEEK).streams] == ["a", "d"]
    second = _Model()
    assert record(pairs, START, second, tmp_path, WEEK) == tmp_path / WEEK
    assert second.asked == ["chat/g"]
    streams = read_recording(tmp_path, WEEK).streams
    assert streams == tuple(
        Stream("chat", t[0], tuple(_ids(t)), tuple(_ids(t)), i + 1) for i, t in enumerate(("abc", "def", "ghi"))
    )
    assert [path.name for path in tmp_path.iterdir()] == [WEEK]


def test_a_recording_keeps_answers_to_the_very_same_prompts_only(tmp_path: Path) -> None:
    record(_pairs("abc", "def", "ghi"), START, _Model(), tmp_path, RECORDED)
    model = _Model()
    record(_pairs("abc", "dxx"), START, model, tmp_path, RECORDED)
    assert model.asked == ["chat/d"]
    assert [stream.answer for stream in read_recording(tmp_path).streams] == [tuple(b"abc"), tuple(b"dxx")]
    for other in (Recording("n", "greedy", ()), Recording("m", "hot", ())):
        with pytest.raises(LocalspecError, match="name another folder"):
            record(_pairs("abc"), other, _Model(), tmp_path, RECORDED)
    assert len(read_recording(tmp_path).streams) == 2


def test_days_come_back_in_order(tmp_path: Path) -> None:
    streams = tuple(Stream("a", name, (1,), (2,), day) for name, day in (("x", 8), ("y", 1), ("x", 1)))
    recording = Recording("m", "greedy", (*streams, Stream("a", "z", (1,), (2,))))
    write_recording(recording, tmp_path, WEEK)
    assert read_recording(tmp_path, WEEK) == recording
    assert '"day"' not in (tmp_path / WEEK).read_text().splitlines()[4]
    assert [(day, [s.name for s in found]) for day, found in read_recording(tmp_path, WEEK).by_day().items()] == [
        (0, ["z"]),
        (1, ["y", "x"]),
        (8, ["x"]),
    ]


@pytest.mark.parametrize("day", [-1, "2", 1.5, True, None])
def test_a_day_is_a_number(tmp_path: Path, day: object) -> None:
    entry = {"kind": "a", "name": "b", "day": day, "prompt": [1], "answer": [2]}
    (tmp_path / WEEK).write_text(json.dumps({"version": 1, "model": "m", "how": "h", "streams": [entry]}))
    with pytest.raises(LocalspecError, match="day must be a number"):
        read_recording(tmp_path, WEEK)


def test_halves_take_turns_within_each_kind() -> None:
    recording = Recording("m", "greedy", tuple(Stream(kind, "x", (i,), (2,)) for i, kind in enumerate("aababba")))
    assert [stream.prompt[0] for stream in recording.only("fit").streams] == [0, 2, 3, 5]
    assert [stream.prompt[0] for stream in recording.only("test").streams] == [1, 4, 6]
    assert recording.only("fit").model == "m"


def test_a_replay_can_be_of_one_half(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    streams = tuple(Stream("chat", str(n), (1, 2), tuple(range(50, 60 + n))) for n in (1, 10, 100))
    write_recording(Recording("m", "greedy", streams), tmp_path)
    for half, tokens in (("fit", 10 + 109), ("test", 19), ("all", 10 + 19 + 109)):
        assert replays.main(["--streams", str(tmp_path), "--half", half]) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert found["rules"]["localspec"]["chat"]["tokens"] == tokens
