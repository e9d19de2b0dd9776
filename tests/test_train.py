"""The corpus of a model's own answers: batched decoding, repetition, requests, files, going on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny import chat_engine, tiny_llama

from localspec.bench.week import read_week
from localspec.bench.workloads import AGENT_LOGS, MORE, WORKLOADS, read_workloads
from localspec.engine import Engine
from localspec.errors import LocalspecError
from localspec.train import corpus
from localspec.train import requests as requests_module
from localspec.train.decoding import Sampling, decode, draw
from localspec.train.prompts import read_prompts
from localspec.train.repetition import repeats
from localspec.train.requests import CYCLE, OWN, SECOND_TURN, TASK, WRITTEN, Requests, is_request
from localspec.train.shards import Sample, Shards

GREEDY = Sampling(0.0, 1.0, ())
PROMPTS = [[5, 6, 7, 8], [5, 6, 9], [5, 6, *range(10, 40)], [5, 6, 7, 8, 20, 21], [5, 6, 30]]


def gaps(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> Any:
    """How far each of an answer's tokens is below the likeliest, in one pass without a batch."""
    logits = model(mx.array([[*prompt, *answer[:-1]]]), cache=make_prompt_cache(model))[0, len(prompt) - 1 :]
    return np.array(logits.max(axis=-1) - logits[mx.arange(len(answer)), mx.array(answer)])


@pytest.mark.parametrize("prompts", [PROMPTS, [[1, *range(n, n + 3)] for n in range(9)], [[3], [4, 5]], [[7, 8]] * 3])
def test_a_batch_says_what_each_prompt_alone_would(prompts: list[list[int]]) -> None:
    model = tiny_llama()
    answers = decode(model, prompts, [GREEDY] * len(prompts), end_ids={11, 12, 13}, most=40)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert gaps(model, prompt, answer).max() < 1e-3
        assert len(answer) == 40 or answer[-1] in {11, 12, 13}
        assert not {11, 12, 13}.intersection(answer[:-1])
    if prompts is PROMPTS:  # some rows left the batch before others
        assert len({len(answer) for answer in answers}) > 2


def test_a_sampled_answer_depends_on_its_seed_only() -> None:
    model = tiny_llama()
    samplings = [Sampling(1.0, 0.9, (3, row)) for row in range(5)]
    together = decode(model, PROMPTS, samplings, end_ids={11}, most=20)
    assert decode(model, PROMPTS[2:3], samplings[2:3], end_ids={11}, most=20) == together[2:3]
    assert decode(model, PROMPTS, [Sampling(1.0, 0.9, (4, row)) for row in range(5)], end_ids={11}, most=20) != together


def test_an_answer_that_repeats_itself_is_cut_short() -> None:
    answer = decode(tiny_llama(scale=1.0), [[5, 6, 7]], [GREEDY], end_ids=(), most=400)[0]
    assert repeats(answer) is not None
    assert len(answer) < 400


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_draws_follow_the_distribution(top_p: float) -> None:
    logits = np.random.default_rng(1).normal(size=50).astype(np.float32) * 2
    counts = Counter(draw(logits, 0.7, top_p, (step + 0.5) / 20_000) for step in range(20_000))
    p = np.exp(logits.astype(np.float64) / 0.7)
    p /= p.sum()
    order = np.argsort(-p)
    kept = order[np.cumsum(p[order]) - p[order] < top_p]
    assert set(counts) <= set(kept.tolist())
    for token in kept:  # chances on a regular grid: off by one step at each end
        assert abs(counts[int(token)] - p[token] / p[kept].sum() * 20_000) <= 2


def test_draws_from_a_flat_distribution_leave_nothing_out() -> None:
    # Each weight is far below the likeliest one's, and together they are far more.
    logits = np.zeros(100_000, dtype=np.float32)
    logits[7] = 11.0
    drawn = [draw(logits, 1.0, 0.95, chance) for chance in (0.0, 0.5, 0.7, 0.99)]
    assert drawn[0] == 7
    assert len({7, *drawn[1:]}) == len(drawn)


def test_where_repetition_begins() -> None:
    prose = list(range(100, 160))
    assert repeats([]) is None
    assert repeats(prose) is None
    assert repeats([*prose, *[1, 2, 3] * 15]) is None  # 45 tokens
    assert repeats([*prose, *[1, 2, 3] * 16]) == len(prose) + 3
    assert repeats([*prose, *[1, 2, 3] * 16, 1, 2]) == len(prose) + 3  # in the middle of a piece
    assert repeats([*prose, *[1, 2, 3] * 16, 9]) is None  # it ended
    assert repeats([7] * 47) is None
    assert repeats([7] * 48) == 1
    assert repeats(list(range(30)) * 3) is None  # three times
    assert repeats(list(range(30)) * 4) == 30


def test_the_written_requests() -> None:
    prompts = read_prompts()
    slots = [re.findall(r"\{([a-z]+)\}", task) for task in prompts.tasks]
    assert all(len(slot) == 1 for slot in slots)
    assert {slot[0] for slot in slots} == set(prompts.fillings)
    requests = [request for task in prompts.tasks for request in prompts.of(task)]
    assert len(requests) == len(set(requests)) > 5000
    assert len(prompts.tasks) >= 60
    assert sum(len(fillings) for fillings in prompts.fillings.values()) >= 150


def word_runs(text: str, length: int = 5) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


def test_no_written_request_shares_five_words_in_a_row_with_the_bench() -> None:
    kinds = [kind for name in (WORKLOADS, AGENT_LOGS, MORE) for kind in read_workloads(name)]
    bench = [*(prompt.text for kind in kinds for prompt in kind.prompts), *(prompt.text for prompt in read_week())]
    seen = set().union(*map(word_runs, bench))
    assert word_runs("Write a Python function that counts vowels") & seen
    prompts = read_prompts()
    requests = [*prompts.follow_ups, *(request for task in prompts.tasks for request in prompts.of(task))]
    assert not [request for request in requests if word_runs(request) & seen]


def test_requests_come_in_rounds() -> None:
    prompts = read_prompts()
    tasks = len(prompts.tasks)
    first = list(islice(prompts.shuffled(1), 12 * tasks))
    assert first == list(islice(prompts.shuffled(1), 12 * tasks))
    assert first[:tasks] != list(islice(prompts.shuffled(2), tasks))
    of_task = {request: task for task in prompts.tasks for request in prompts.of(task)}
    rounds = [[of_task[request] for request in first[i * tasks : (i + 1) * tasks]] for i in range(2)]
    assert set(rounds[0]) == set(rounds[1]) == set(prompts.tasks)
    assert list(prompts.tasks) != rounds[0] != rounds[1]
    shortest = min(len(fillings) for fillings in prompts.fillings.values())
    assert len(set(first[: shortest * tasks])) == shortest * tasks
    assert len(set(first)) < len(first)


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("Can you help me plan a party?", True),
        ("write a poem about my cat", True),
        ("My sink is broken and I need a plumber.", True),
        ("The weather was nice on that day.", False),
        ("Who are you?", False),  # three words
        ("Écrivez un poème sur mon chat, please.", False),
        ("Write a poem about <|im_start|> and me", False),
        ("Listen to what I have to say.", False),
        ("Write " + "very " * 100 + "much", False),
    ],
)
def test_what_is_a_request(text: str, good: bool) -> None:
    assert is_request(text, ["<|im_start|>"]) is good


SAMPLES = [
    Sample("task", (1, 2, 3), (4, 5), 0.0, None),
    Sample("own", (1, 2**32 - 1), (9,) * 60, 0.8, 1),
    Sample("second-turn", (6,), (7,), 0.8, None),
]


def test_shards_give_back_what_was_written(tmp_path: Path) -> None:
    shards = Shards(tmp_path / "new")
    assert shards.numbers() == []
    shards.write(12, SAMPLES)
    shards.write(3, [])
    assert shards.numbers() == [3, 12]
    assert shards.read(12) == SAMPLES
    assert list(shards.samples()) == SAMPLES


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    shards.write(1, SAMPLES)
    file = tmp_path / "batch-00001.npz"
    whole = file.read_bytes()
    for damaged in (b"", whole[:-40], whole.replace(b"prompt_lengths", b"prompt_lengthz"), b"nonsense"):
        file.write_bytes(damaged)
        with pytest.raises(LocalspecError, match=r"batch-00001\.npz is not a batch of answers .* remove it"):
            shards.read(1)


def test_any_flipped_bit_of_a_shard_is_noticed_or_makes_no_difference(tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    shards.write(1, SAMPLES)
    file = tmp_path / "batch-00001.npz"
    whole = file.read_bytes()
    lines: list[str] = []
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (0, 3, 7)[place % 3]
        file.write_bytes(damaged)
        try:
            assert shards.read(1) == SAMPLES, place  # what a zip file says twice is read once
        except LocalspecError as error:
            lines.append(str(error))
    assert len(lines) > len(whole) // 2
    assert all(line.endswith("remove it to make it anew") for line in lines)


def test_an_answer_of_no_ids_is_damage(tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    shards.write(1, [*SAMPLES, Sample("task", (1,), (), 0.0, None)])
    with pytest.raises(LocalspecError, match=r"not a batch of answers \(an answer of no ids\): remove it"):
        shards.read(1)


def run(engine: Engine, folder: Path, tokens: int, seed: int = 0) -> dict[str, bytes]:
    corpus.collect(engine, folder, tokens=tokens, seed=seed, size=4, longest=12)
    return {file.name: file.read_bytes() for file in folder.glob("*.npz")}


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine, Sequence[str]], None]:
    """Has the model make up these requests, one after another, over and over."""

    def script(engine: Engine, texts: Sequence[str]) -> None:
        def made_up(_: Any, prompts: Sequence[Sequence[int]], *rest: Any, **more: Any) -> list[list[int]]:
            assert all(engine.tokenizer.decode(prompt).endswith("<|im_start|>user\n") for prompt in prompts)
            end = min(engine.end_ids)
            return [[*engine.tokenize(texts[row % len(texts)]), end] for row in range(len(prompts))]

        monkeypatch.setattr(requests_module, "decode", made_up)

    return script


def test_a_corpus_goes_on_where_it_was(
    tmp_path: Path, says: Callable[[Engine, Sequence[str]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = chat_engine()
    says(engine, ["What is the time now?", "Nothing.", "Please give me a spoon."])
    whole = run(engine, tmp_path / "a", 600)
    said = capsys.readouterr().out
    assert len(whole) > len(CYCLE)
    assert re.search(r"^batch 1, own: 2 answers, \d+ tokens, .* of 600, \d+ min left$", said, re.MULTILINE)
    assert re.search(r"^\d+ answers \(\d+ own, \d+ task\), [67]\d\d tokens; ", said, re.MULTILINE)
    part = run(engine, tmp_path / "b", 200)
    assert 0 < len(part) < len(whole)
    (tmp_path / "b" / "batch-00001.npz").unlink()
    capsys.readouterr()
    assert run(engine, tmp_path / "b", 600) == whole
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines[:-1]] == [
        "batch 1",
        *(f"batch {n}" for n in range(len(part), len(whole))),
    ]
    assert run(engine, tmp_path / "c", 600, seed=1) != whole


def test_no_two_answers_have_the_same_seed(
    tmp_path: Path, says: Callable[[Engine, Sequence[str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = chat_engine()
    says(engine, ["What is the time now?", "Please give me a spoon."])
    seeds: list[tuple[int, ...]] = []

    def noted(_: Any, prompts: Sequence[Any], samplings: Sequence[Sampling], **more: Any) -> list[list[int]]:
        seeds.extend(sampling.seed for sampling in samplings)
        return [[5] * 12] * len(prompts)

    monkeypatch.setattr("localspec.train.decoding.decode", noted)
    run(engine, tmp_path / "a", 300)
    run(engine, tmp_path / "b", 300, seed=1)
    assert len(set(seeds)) == len(seeds) > 40


def test_what_the_batches_hold(tmp_path: Path, says: Callable[[Engine, Sequence[str]], None]) -> None:
    engine = chat_engine()
    says(engine, ["What is the time now?", "Please give me a spoon."])
    run(engine, tmp_path, 700)
    shards = Shards(tmp_path)
    tasks = set(islice(read_prompts().shuffled(0), 16))
    decoded = engine.tokenizer.decode
    for number in range(len(CYCLE)):
        for row, sample in enumerate(shards.read(number)):
            assert sample.kind == CYCLE[number]
            assert sample.temperature == (0.8 if row % 2 else 0.0)
            text = decoded(sample.prompt)
            assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
            if sample.kind == TASK:
                request = text.removeprefix("<|im_start|>user\n").partition("<|im_end|>")[0]
                tasks.remove(request)
            elif sample.kind == OWN:
                assert "the time" in text or "a spoon" in text
            if sample.temperature == 0:
                assert gaps(engine.model, sample.prompt, sample.answer).max() < 1e-3
    assert len(tasks) < 8  # of 16; those that are long in this tokenizer are left out


def test_second_turns_go_on_with_answers_that_ended() -> None:
    engine = chat_engine()
    first = tuple(engine.encode([{"role": "user", "content": "Hi"}]))
    words, end = engine.tokenize("the fox"), min(engine.end_ids)
    earlier = [
        Sample(TASK, first, (*words, end), 0.0, None),
        Sample(TASK, first, tuple(words), 0.0, None),  # cut off
        Sample(TASK, first, (*words * 100, end), 0.0, None),  # too long
        Sample(TASK, first, (*words, end), 0.0, 1),  # in a loop
    ]
    asked: list[int] = []

    def read(number: int) -> list[Sample]:
        asked.append(number)
        return earlier if number == 9 else []

    prompts = Requests(engine, 0, 4, read).batch(17)
    assert Requests(engine, 0, 4, read).kind(17) == SECOND_TURN
    assert set(asked) == set(range(9, 17))
    assert len(prompts) == 1
    text = engine.tokenizer.decode(prompts[0])
    begin = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nthe fox<|im_end|>\n<|im_start|>user\n"
    assert text.startswith(begin)
    follow_up = text.removeprefix(begin).removesuffix("<|im_end|>\n<|im_start|>assistant\n")
    assert follow_up in read_prompts().follow_ups


def test_written_requests_alone() -> None:
    engine = chat_engine()
    requests = Requests(engine, 0, 4, lambda _: [], cycle=WRITTEN)
    assert [requests.kind(number) for number in range(5)] == [TASK, TASK, TASK, SECOND_TURN, TASK]
    batches = [requests.batch(number) for number in (0, 1, 2, 4)]
    prompts = [tuple(prompt) for batch in batches for prompt in batch]
    assert len(set(prompts)) == len(prompts) > 8
    lengths = [len(prompt) for batch in batches[:3] for prompt in batch]
    assert lengths == sorted(lengths)


def test_another_recipe_needs_another_folder(tmp_path: Path) -> None:
    engine = chat_engine()
    run(engine, tmp_path, 10)
    with pytest.raises(LocalspecError, match=r"another recipe .* name another folder"):
        run(engine, tmp_path, 10, seed=5)


def test_a_template_without_the_message_is_reported() -> None:
    engine = chat_engine(template="<|im_start|>hello")
    with pytest.raises(LocalspecError, match="chat template leaves messages out"):
        Requests(engine, 0, 2, lambda _: []).batch(1)


@pytest.mark.parametrize("arguments", [["--tokens", "0"], ["--batch", "0"], ["--longest", "-1"], ["--seed", "-1"]])
def test_wrong_numbers_are_refused(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        corpus.main([str(tmp_path), *arguments])
    assert f"{arguments[0]} must be" in capsys.readouterr().err


def test_an_unknown_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert corpus.main([str(tmp_path / "x"), "--model", str(tmp_path / "nothing")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("localspec: ")
    assert said.count("\n") == 1
    assert not (tmp_path / "x").exists()
