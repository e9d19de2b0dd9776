"""`localspec models`, and the progress of a download."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripted_engine import ESCAPE, run
from tiny_checkpoint import write_tiny_checkpoint

from localspec.commands import progress


def test_progress_without_a_terminal_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.ExitStack() as stack:
        report = progress.reporter("smollm2", stack)
        for done in range(0, 92_871_041, 1_000_000):
            report(done, 92_871_040)
        report(92_871_040, 92_871_040)
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 11
    assert lines[-1] == "downloading smollm2: 92.9 MB of 92.9 MB"
    assert ESCAPE not in err


def test_progress_on_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    terminal = SimpleNamespace(
        isatty=lambda: True, write=written.append, flush=lambda: None, closed=False, encoding="utf-8"
    )
    monkeypatch.setattr(sys, "stderr", terminal)
    with contextlib.ExitStack() as stack:
        report = progress.reporter("smollm2", stack)
        assert not written  # nothing to fetch, nothing to show
        report(50, 100)
        report(100, 200)
        report(40, 200)  # a retry; the bar does not go back
        report(200, 200)
    shown = "".join(written)
    assert "downloading smollm2" in shown
    assert "100%" in shown


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "home"


def test_models_list(home: Path) -> None:
    records = json.loads(run("models", "list", "--json").stdout)
    assert {"name": "smollm2", "installed": False}.items() <= records[0].items()
    write_tiny_checkpoint(home / "models" / "smollm2")
    records = json.loads(run("models", "list", "--json").stdout)
    assert records[0]["installed"]
    assert records[0]["path"] == str(home / "models" / "smollm2")
    (home / "models" / "smollm2" / "model.safetensors").unlink()
    table = run("models", "list").stdout.splitlines()
    assert table[0].split()[0] == "NAME"
    assert "incomplete" in table[1]


def test_models_show_and_rm(home: Path, tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(home / "models" / "smollm2")
    shown = run("models", "show", "smollm2").stdout
    assert "Apache-2.0" in shown
    assert "llama" in shown
    assert json.loads(run("models", "show", "smollm2", "--json").stdout)["path"] == str(folder)
    assert run("models", "pull", "smollm2").stdout == f"{folder}\n"
    assert run("models", "rm", "smollm2").stdout.startswith("removed smollm2: ")
    assert not folder.exists()
    again = run("models", "rm", "smollm2")
    assert again.exit_code == 1
    assert again.stderr.count("\n") == 1
    mine = write_tiny_checkpoint(tmp_path / "mine")
    assert json.loads(run("models", "show", str(mine), "--json").stdout)["architecture"] == "llama"
    assert run("models", "rm", str(mine)).exit_code == 1
    assert mine.exists()


@pytest.mark.parametrize("command", ["show", "rm"])
def test_models_suggests_names(home: Path, command: str) -> None:
    outcome = run("models", command, "smolm2")
    assert outcome.exit_code == 1
    assert "smollm2" in outcome.stderr
    assert run("models", command, "nobody/nothing").exit_code == 1
