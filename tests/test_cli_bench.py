"""`localspec bench`, without benchmarking."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_engine import Scripted, run


class FakeReport:
    """What the command needs of a report."""

    identity_expected = True
    exactness = "up to near-ties: for a test"

    def __init__(self, *near_ties: bool | None) -> None:
        self.pairs = [SimpleNamespace(difference=SimpleNamespace(near_tie=tie)) for tie in near_ties]
        self.pairs.append(SimpleNamespace(difference=None))

    def as_dict(self) -> dict[str, Any]:
        return {"model": "fake"}

    def table(self) -> str:
        return "a table"

    def markdown(self) -> str:
        return "# a report\n"


@pytest.fixture
def benched(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    state = SimpleNamespace(report=FakeReport(), asked={})

    def run_bench(engine: Any, **keywords: Any) -> FakeReport:
        state.asked = keywords
        keywords["on_progress"]("warming up")
        return state.report

    monkeypatch.setattr("localspec.bench.run.run_bench", run_bench)
    return state


def test_bench_prints_a_table(benched: SimpleNamespace) -> None:
    outcome = run("bench", "--quick", "--draft-length", "5")
    assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (0, "a table\n", "warming up\n")
    assert benched.asked["workloads"] == ["quick"]
    assert benched.asked["draft_length"] == 5
    run("bench")
    assert benched.asked["workloads"] is None
    assert benched.asked["draft_length"] == "auto"
    assert benched.asked["accept"] == "coupled"
    run("bench", "--accept", "block")
    assert benched.asked["accept"] == "block"


def test_bench_writes_files(benched: SimpleNamespace, tmp_path: Path) -> None:
    assert json.loads(run("bench", "--json", "-").stdout) == {"model": "fake"}
    table = run("bench", "--json", str(tmp_path / "b.json"), "--report", str(tmp_path / "b.md")).stdout
    assert table == "a table\n"
    assert json.loads((tmp_path / "b.json").read_text()) == {"model": "fake"}
    assert (tmp_path / "b.md").read_text() == "# a report\n"


@pytest.mark.parametrize(("near_ties", "code"), [((), 0), ((True,), 0), ((True, False), 1), ((None,), 1)])
def test_bench_fails_when_ids_differ_for_no_reason(
    benched: SimpleNamespace, near_ties: tuple[bool | None, ...], code: int
) -> None:
    benched.report = FakeReport(*near_ties)
    assert run("bench").exit_code == code
    benched.report.exactness = "bit for bit: for a test"  # where bits are promised a near-tie excuses nothing
    assert run("bench").exit_code == int(bool(near_ties))
    benched.report.identity_expected = False
    assert run("bench").exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--workload", "nonsense"],
        ["--quick", "--workload", "open-chat"],
        ["--json", "/nonexistent/x.json"],
        ["--repeats", "0"],
    ],
)
def test_bench_refuses_before_it_loads(benched: SimpleNamespace, scripted: Scripted, arguments: list[str]) -> None:
    assert run("bench", *arguments).exit_code == 2
    assert not scripted.loads
