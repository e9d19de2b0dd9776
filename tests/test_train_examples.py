"""What a corpus gives to train on: what is kept apart, what is left out, the draft vocabulary, batches, scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from localspec.errors import LocalspecError
from localspec.train.evaluate import Score
from localspec.train.examples import RUN, Example, Split, coverage, frequent, word_runs
from localspec.train.head_file import HeadShape, read_head, write_head
from localspec.train.prompts import Prompts
from localspec.train.shards import Sample

TASKS = Prompts(
    tuple(f"Task {n} on {{thing}}" for n in range(24)),
    {"thing": ("rain", "snow", "a cup that is full of cold tea")},
    (),
)
ANSWER = tuple(range(200, 240))


def encode(text: str) -> list[int]:
    return [1, *(ord(character) for character in text), 2]


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(i) for i in ids if i > 2)


def split(kept_out: Sequence[str] = ()) -> Split:
    return Split(TASKS, encode, decode, kept_out)


def sample(text: str, kind: str = "task", answer: tuple[int, ...] = ANSWER, loop: int | None = None) -> Sample:
    return Sample(kind, tuple(encode(text)), answer, 0.0, loop)


def apart(examples: Sequence[Example]) -> list[bool]:
    return [example.held_out for example in examples]


def test_whole_tasks_are_kept_apart() -> None:
    samples = [sample(text) for task in TASKS.tasks for text in TASKS.of(task)]
    found = apart(split().examples(samples))
    assert found == [n in (6, 18) for n in range(24) for _ in range(3)]


def test_a_share_of_what_the_model_made_up_is_kept_apart() -> None:
    samples = [sample(f"Why is {n} a number?", "own") for n in range(600)]
    found = apart(split().examples(samples))
    assert 20 <= sum(found) <= 90  # 50 are to be expected, with a standard deviation below 7
    assert apart(split().examples(samples[::-1])) == found[::-1]  # whatever came before


def test_a_second_turn_goes_where_its_first_is() -> None:
    firsts = [sample(TASKS.of(TASKS.tasks[n])[0]) for n in (5, 6)]
    firsts += [sample(f"Why is {n} a number?", "own") for n in range(40)]
    seconds = [
        Sample("second-turn", (*first.prompt, *first.answer, *encode("More?")), ANSWER, 0.8, None) for first in firsts
    ]
    examples = split().examples([*firsts, *seconds])
    assert apart(examples[: len(firsts)]) == apart(examples[len(firsts) :])
    assert set(apart(examples[2 : len(firsts)])) == {True, False}


def test_what_the_bench_asks_is_left_out() -> None:
    bench = "please tell me why a cup that is full of cold tea fell down"
    samples = [sample(f"Task {n} on {thing}") for n in (0, 1) for thing in ("rain", "a cup that is full of cold tea")]
    assert len(split().examples(samples)) == 4
    examples = split([bench]).examples(samples)
    assert [decode(e.tokens[: e.start]) for e in examples] == ["Task 0 on rain", "Task 1 on rain"]
    assert RUN == 8
    assert word_runs("One, two three; four five six seven EIGHT nine") == {
        ("one", "two", "three", "four", "five", "six", "seven", "eight"),
        ("two", "three", "four", "five", "six", "seven", "eight", "nine"),
    }


def test_repetition_short_answers_and_doubles_are_left_out() -> None:
    same = split()
    looped = same.examples([sample("one", "own", ANSWER + (7,) * 60, loop=len(ANSWER) + 1)])
    assert [e.tokens[e.start :] for e in looped] == [(*ANSWER, 7)]
    assert same.examples([sample("two", "own", (5,) * 60, loop=1), sample("three", "own", ANSWER[:15])]) == []
    assert len(same.examples([sample("four", "own"), sample("four", "own")])) == 1
    assert same.examples([sample("four", "own")]) == []
    assert len(same.examples([sample("four", "own", ANSWER[::-1])])) == 1


def test_the_draft_vocabulary_is_of_answers_only() -> None:
    examples = [Example("own", (9, 9, 9, 9, 3, 3, 5), 4, 0.0, False), Example("own", (8, 5, 7), 1, 0.0, False)]
    assert frequent(examples, 2, 10).tolist() == [3, 5]
    assert frequent(examples, 3, 10).tolist() == [3, 5, 7]
    assert frequent(examples, 4, 10).tolist() == [0, 3, 5, 7]
    assert coverage(examples, np.array([3, 9], dtype=np.int32)) == 2 / 5


def test_scores_of_one_answer() -> None:
    # Tokens 0..2 are the prompt, 3..9 the answer. From position t the first draft is of token t + 2.
    first = [t in (2, 3, 5, 7) for t in range(10)]
    second = [t in (2, 5) for t in range(10)]
    found = Score.empty(2)
    found.add([first, second], start=3, end=10)
    assert found.positions == [6, 5]  # tokens 4..9, tokens 5..9
    assert found.right == [4, 2]
    assert found.shares == [4 / 6, 2 / 5]
    # One draft a pass says 4 and 5, 6, 7 and 8, 9; two say 4 to 6, 7 to 9.
    assert (found.tokens, found.passes) == ([6, 6], [4, 2])
    assert found.per_pass == [1.5, 3.0]


def test_what_a_pass_says_beyond_the_end_does_not_count() -> None:
    found = Score.empty(1)
    found.add([[True] * 8], start=3, end=7)
    assert (found.positions, found.right) == ([3], [3])
    assert (found.tokens, found.passes) == ([3], [2])


SHAPE = HeadShape((1, 3), 4, 2, 10000.0, 1e-5, 4, "abc")
WEIGHTS = {"norm.weight": np.ones(4, np.float32), "fc.weight": np.arange(32, dtype=np.float32).reshape(4, 8) / 8}
IDS = np.array([2, 5, 60000], dtype=np.int32)


def test_a_head_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "heads" / "one.safetensors"
    write_head(file, SHAPE, WEIGHTS, IDS)
    assert [found.name for found in file.parent.iterdir()] == [file.name]
    shape, weights, ids = read_head(file)
    assert shape == SHAPE
    assert ids.tolist() == IDS.tolist()
    assert weights.keys() == WEIGHTS.keys()
    assert all((weights[name] == WEIGHTS[name]).all() for name in WEIGHTS)


def test_weights_are_rounded_to_bfloat16(tmp_path: Path) -> None:
    write_head(tmp_path / "head.safetensors", SHAPE, {"norm.weight": np.array([1 + 2**-9], np.float32)}, IDS)
    assert read_head(tmp_path / "head.safetensors")[1]["norm.weight"].tolist() == [1.0]


def test_another_file_is_not_a_head(tmp_path: Path) -> None:
    import mlx.core as mx

    place = tmp_path / "head.safetensors"
    with pytest.raises(LocalspecError, match="is not an MTP head"):
        read_head(place)
    place.write_bytes(b"nonsense")
    with pytest.raises(LocalspecError, match="is not an MTP head"):
        read_head(place)
    mx.save_safetensors(str(place), {"mtp.draft_ids": mx.array(IDS)}, metadata={"format": "pt"})
    with pytest.raises(LocalspecError, match="is not an MTP head: its format is 'pt'"):
        read_head(place)
    mx.save_safetensors(str(place), {"mtp.norm.weight": mx.ones(4)}, metadata=SHAPE.metadata())
    with pytest.raises(LocalspecError, match="draft_ids"):
        read_head(place)
    mx.save_safetensors(str(place), {"mtp.draft_ids": mx.array(IDS)}, metadata=SHAPE.metadata() | {"taps": "one"})
    with pytest.raises(LocalspecError, match="is not an MTP head"):
        read_head(place)
