"""The bench of drafters alone and together: every way is paired with the plain run, and other ids are a failure."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tiny import ScriptDrafter, chat_engine

import localspec
from localspec.bench import cascade
from localspec.bench.pairs import Run
from localspec.bench.workloads import choose_workloads
from localspec.engine import Engine
from localspec.errors import LocalspecError


def _weighted() -> Engine:
    engine = chat_engine()
    drafter = ScriptDrafter([1, 2, 3] * 400, vocabulary=200, name="mtp")
    return Engine(engine.model, engine.tokenizer, drafters=["ngram", drafter])


def test_each_way_is_paired_with_plain_decoding() -> None:
    engine, workloads = _weighted(), choose_workloads(["open-chat/sky", "json/orders"])
    ways = cascade.ways_of(engine)
    assert list(ways) == ["ngram", "mtp", cascade.CASCADE, "skip"]
    lines: list[str] = []
    pairs = cascade.measure(engine, ways, workloads, repeats=2, max_tokens=12, on_progress=lines.append)
    assert len(lines) == 4
    for way, found in pairs.items():
        assert [(pair.kind, pair.repeat) for pair in found] == [(k, r) for r in (0, 1) for k in ("open-chat", "json")]
        assert all(pair.identical for pair in found)
        drafters = {"ngram": {"ngram"}, "mtp": {"mtp"}, cascade.CASCADE: {"ngram", "mtp"}, "skip": {"skip"}}[way]
        assert all(set(pair.speculative.stats.by_drafter) <= drafters for pair in found)
        assert all(pair.plain.stats.drafted == 0 for pair in found)
    # Every way was the first once in as many turns as there are ways.
    assert len({pair.order for pair in pairs["mtp"]}) == 4
    shown = cascade.table(cascade.summaries_of(workloads, pairs)).splitlines()
    assert len(shown) == 2 + 2 * len(ways)
    assert len({line.count("|") for line in shown}) == 1


def test_a_model_with_n_grams_only_has_nothing_to_compare() -> None:
    with pytest.raises(LocalspecError, match="no drafter but n-grams"):
        cascade.ways_of(chat_engine())


@pytest.mark.parametrize("wrong", [False, True])
def test_command(wrong: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(localspec, "load", lambda *_, **__: _weighted())
    if wrong:
        run = cascade._run

        def other(*args: Any, speculate: bool) -> Run:
            found = run(*args, speculate=speculate)
            return replace(found, ids=(*found.ids[:-1], 0)) if speculate else found

        monkeypatch.setattr(cascade, "_run", other)
    code = cascade.main(["tiny", "--workload", "open-chat/sky", "--tokens", "8"])
    out = capsys.readouterr().out.splitlines()
    assert code == int(wrong)
    kinds = json.loads(out[-1])["kinds"]
    (rows,) = kinds.values()
    assert {row["identical"] for row in rows.values()} == {1 - wrong}


def test_bad_figures_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--tokens", "1"], ["--repeats", "0"]):
        with pytest.raises(SystemExit):
            cascade.main(arguments)
        assert "at least" in capsys.readouterr().err
