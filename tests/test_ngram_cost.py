"""The cost bench and the recorder run end to end on small inputs; their times are not judged."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import chat_engine

import localspec
from localspec.bench import ngram_cost, record
from localspec.bench.streams import read_recording
from localspec.bench.workloads import AGENT_LOGS, read_workloads


def test_the_cost_bench_prints_a_line_per_history(capsys: pytest.CaptureFixture[str]) -> None:
    assert ngram_cost.main(["--history", "200", "400"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["200", "400", "ratio"]


def test_histories_are_the_same_each_time_and_the_longer_begins_with_the_shorter() -> None:
    assert ngram_cost.history(500) == ngram_cost.history(700)[:500]
    assert len(set(ngram_cost.history(5000))) > 500


def test_memory_is_counted() -> None:
    ids = ngram_cost.history(2000)
    assert 20 < ngram_cost.allocated(ids) / len(ids) < 400
    assert ngram_cost.allocated(ids) > 1.5 * ngram_cost.allocated(ids[:1000])


def test_the_recorder_writes_every_prompt_and_its_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = chat_engine()
    monkeypatch.setattr(localspec, "load", lambda *_, **__: engine)
    prompts = read_workloads(AGENT_LOGS)[0]
    monkeypatch.setattr(record, "recorded_prompts", lambda: prompts.prompts)
    monkeypatch.setattr(record, "read_week", lambda: prompts.prompts[:1])
    assert record.main([str(tmp_path), "--tokens", "3"]) == 0
    found = read_recording(tmp_path).streams
    assert [(stream.kind, stream.name) for stream in found] == [(one.kind, one.name) for one in prompts.prompts]
    for stream in found:
        assert list(stream.answer) == engine.generate(list(stream.prompt), max_tokens=3, speculate=False).ids
