"""`localspec verify`, without verifying."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_engine import ESCAPE, Scripted, run
from tiny import chat_engine

import localspec


class FakeReport:
    """What the command needs of a report."""

    interrupted = False
    exit_status = 0

    def as_dict(self) -> dict[str, Any]:
        return {"model": "fake"}

    def screen(self) -> str:
        return f"a screen of {ESCAPE}[31mfake"


@pytest.fixture
def verified(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    state = SimpleNamespace(report=FakeReport(), asked={})

    def run_verify(engine: Any, **keywords: Any) -> FakeReport:
        state.asked = keywords
        keywords["on_progress"]("measuring")
        return state.report

    monkeypatch.setattr("localspec.verify.run.run_verify", run_verify)
    return state


def test_verify_prints_one_screen(verified: SimpleNamespace, scripted: Scripted) -> None:
    outcome = run("verify", "--quick", "--seed", "5", "--exact", "rows", "--tokens", "20", "--draft", "small")
    assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (0, "a screen of [31mfake\n", "measuring\n")
    del verified.asked["on_progress"]
    assert verified.asked == {"quick": True, "seed": 5, "exact": "rows", "tokens": 20}
    assert scripted.loads[0][0] == "smollm2"
    assert scripted.loads[0][1]["draft"] == "small"
    run("verify", "some-model")
    del verified.asked["on_progress"]
    assert verified.asked == {"quick": False, "seed": 0, "exact": "auto", "tokens": None}
    assert scripted.loads[1][0] == "some-model"


def test_verify_writes_json(verified: SimpleNamespace, tmp_path: Path) -> None:
    assert json.loads(run("verify", "--json", "-").stdout) == {"model": "fake"}
    screen = run("verify", "--json", str(tmp_path / "v.json")).stdout
    assert screen == "a screen of [31mfake\n"
    assert json.loads((tmp_path / "v.json").read_text()) == {"model": "fake"}


@pytest.mark.parametrize("status", [0, 1, 130])
def test_verify_leaves_with_the_verdict(verified: SimpleNamespace, status: int) -> None:
    verified.report.exit_status = status
    verified.report.interrupted = status == 130
    outcome = run("verify")
    assert outcome.exit_code == status
    assert outcome.stdout  # what was found so far, too


@pytest.mark.parametrize(
    "arguments", [["--tokens", "3"], ["--exact", "nearly"], ["--json", "/nonexistent/x.json"], ["--seed", "-1"]]
)
def test_verify_refuses_before_it_loads(verified: SimpleNamespace, scripted: Scripted, arguments: list[str]) -> None:
    assert run("verify", *arguments).exit_code == 2
    assert not scripted.loads


def test_verify_on_a_real_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path / "home"))
    engine = chat_engine()
    engine.name = f"tiny{ESCAPE}\n[31m"
    monkeypatch.setattr(localspec, "load", lambda name, **keywords: engine)
    monkeypatch.setattr("localspec.verify.distributions.DRAWS", 4000)
    monkeypatch.setattr("localspec.verify.distributions.STRINGS", 60)
    outcome = run("verify", "--quick", "--tokens", "8")
    assert outcome.exit_code == 0
    first, *_, last = outcome.stdout.splitlines()
    assert first.startswith("localspec verify: tiny [31m, float32, ")
    assert "IDENTICAL" in last
    assert ESCAPE not in outcome.stdout
