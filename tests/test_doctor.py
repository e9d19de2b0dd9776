"""`localspec doctor`: what it sees, what it calls wrong, and that its exit code says so."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from kernels import Bench, bench
from scripted_engine import ESCAPE, run
from tiny_checkpoint import write_tiny_checkpoint

from localspec import blas, doctor, memory

__all__ = ["bench"]  # the fixture


@pytest.fixture(autouse=True)
def machine(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sound one, with no models, no kernels and no network."""
    for name in list(bench.modules):
        del bench.modules[name]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(blas, "applies", lambda: False)
    monkeypatch.setattr(memory, "available_bytes", lambda: 8 * 10**9)
    monkeypatch.setattr(socket.socket, "connect", unreachable)
    bench.file.parent.mkdir()


def unreachable(*arguments: Any) -> None:
    raise AssertionError("doctor asked the network")


def report(*arguments: str, code: int = 0) -> Any:
    outcome = run("doctor", "--json", *arguments)
    assert outcome.exit_code == code, outcome.stdout
    document = json.loads(outcome.stdout)
    assert document["ok"] is (code == 0)
    assert bool(document["problems"]) is not document["ok"]
    return document


def problems(*arguments: str) -> list[dict[str, str]]:
    return list(report(*arguments, code=1)["problems"])


def test_a_sound_machine() -> None:
    document = report()
    assert document["software"]["mlx"]
    assert document["machine"]["backend"] == document["device"]["backend"]
    assert document["memory"] == {"available_bytes": 8 * 10**9}
    assert document["cache"]["writable"]
    assert document["models"] == []
    outcome = run("doctor")
    assert outcome.exit_code == 0
    assert outcome.stderr == ""
    assert outcome.stdout.splitlines()[-1] == "all is well"
    for name in ("machine", "memory", "software", "device", "blas", "models", "cache", "terminal", "kernels"):
        assert f"\n{name} " in f"\n{outcome.stdout}"
        assert name in document


def test_help_has_examples() -> None:
    assert "localspec doctor --test-kernels" in run("doctor", "--help").stdout


# -- models -----------------------------------------------------------------------------------------------------------


def test_models_whole_and_not(bench: Bench) -> None:
    folder = write_tiny_checkpoint(bench.file.parent / "models" / "smollm2")
    document = report()
    assert document["models"][0]["whole"]
    assert document["models"][0]["needed_bytes"] > document["models"][0]["bytes"] > 0
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-4])
    (problem,) = problems()
    assert "model.safetensors is cut off" in problem["text"]
    assert problem["fix"] == "localspec models pull smollm2"
    screen = run("doctor")
    assert screen.exit_code == 1
    assert "smollm2  " in screen.stdout
    assert screen.stdout.count("localspec models pull smollm2") == 1
    assert screen.stdout.splitlines()[-1] == "something is wrong"


def test_a_model_too_big_for_now_is_no_fault(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_checkpoint(bench.file.parent / "models" / "smollm2")
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    assert "is available" in report()["notes"][0]["text"]
    assert "too big" in run("doctor").stdout


def hub_model(tmp_path: Path, name: str) -> Path:
    repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
    folder = repository / "snapshots" / "abcdef0123"
    write_tiny_checkpoint(folder)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abcdef0123")
    return folder


def test_what_others_keep_in_the_hubs_cache_is_no_fault(tmp_path: Path) -> None:
    folder = hub_model(tmp_path, "somebody/a-model")
    assert report()["models"][0]["name"] == "somebody/a-model"
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "PyTorch weights" in report()["notes"][0]["text"]
    (folder / "model.safetensors.index.json").write_text("{}")
    assert problems()[0]["fix"] == "localspec models pull somebody/a-model"


def test_names_that_others_chose_cannot_drive_the_terminal(tmp_path: Path) -> None:
    hub_model(tmp_path, "somebody/a\x1b[31m")
    outcome = run("doctor")
    assert "somebody/a" in outcome.stdout
    assert ESCAPE not in outcome.stdout


# -- the machine ------------------------------------------------------------------------------------------------------


def test_without_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    (problem,) = problems()
    assert "MLX cannot be loaded" in problem["text"]
    assert problem["fix"].endswith("-m pip install --force-reinstall mlx mlx-lm")
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert not doctor.examine().ok


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path / "file" / "home"))
    (problem,) = problems()
    assert str(tmp_path / "file" / "home") in problem["text"]
    assert "LOCALSPEC_HOME" in problem["fix"]


def test_doctor_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path / "new" / "home"))
    report()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("environment", "library", "text", "fix"),
    [
        ({}, "/opt/lib.so", None, None),
        ({}, None, "has a slow BLAS", "apt install libopenblas0-pthread"),
        ({"LOCALSPEC_BLAS": "off"}, None, "LOCALSPEC_BLAS=off", None),
    ],
)
def test_blas(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], library: str | None, text: str | None, fix: str | None
) -> None:
    monkeypatch.delenv("LOCALSPEC_BLAS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(blas, "applies", lambda: True)
    monkeypatch.setattr(blas, "active", lambda: False)
    monkeypatch.setattr(blas, "find_openblas", lambda: None if library is None else Path(library))
    document = report()
    assert document["blas"]["library"] == library
    if text is None:
        assert document["notes"] == []
    else:
        assert text in document["notes"][0]["text"]
        assert (fix or "") in (document["notes"][0]["fix"] or "")


def test_a_blas_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "x.so").write_text("no library")
    monkeypatch.setattr(blas, "applies", lambda: True)
    monkeypatch.setattr(blas, "active", lambda: False)
    monkeypatch.delenv("LOCALSPEC_BLAS", raising=False)
    monkeypatch.setenv("LOCALSPEC_OPENBLAS", str(tmp_path / "x.so"))
    assert problems()[0]["fix"] == "unset LOCALSPEC_OPENBLAS"


@pytest.mark.parametrize(
    ("environment", "colours"),
    [
        ({"TERM": "xterm", "COLORTERM": "truecolor"}, "all"),
        ({"TERM": "xterm-256color"}, "256"),
        ({"TERM": "xterm"}, "16"),
        ({"TERM": "xterm", "COLORTERM": "truecolor", "NO_COLOR": "1"}, "none, as NO_COLOR"),
        ({"TERM": "dumb", "COLORTERM": "truecolor"}, "none: the chat"),
        ({}, "none: the chat"),
    ],
)
def test_terminal(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], colours: str) -> None:
    for name in ("TERM", "COLORTERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert report()["terminal"]["colours"].startswith(colours)


# -- kernels ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def three(bench: Bench) -> Bench:
    bench.add("good")
    bench.add("bad", "row 3: 0.5 instead of 0.25")
    bench.add("slow", ratio=0.5)
    return bench


def statuses(document: Any) -> list[str]:
    return [row["status"] for row in document["kernels"]["table"]]


def test_nothing_is_run_unless_asked(three: Bench) -> None:
    document = report()
    assert statuses(document) == ["not tried yet"] * 3
    assert document["kernels"]["table"][0]["purpose"] == "test of good"
    assert document["notes"][0]["fix"] == "localspec doctor --test-kernels"
    assert not three.ran
    assert not three.file.exists()


def test_what_an_engine_found_is_shown(three: Bench) -> None:
    kernels = three.kernels()
    for name in three.modules:
        kernels.uses(name)
    document = report()  # that a kernel is not used is no fault of the machine
    assert statuses(document) == ["in use", "disagrees with its reference", "lost its race"]
    assert document["kernels"]["table"][0]["record"]["race"]["ratio"] == pytest.approx(2)
    assert "row 3" in document["notes"][0]["text"]
    screen = run("doctor").stdout
    assert "good        in use; self-test agreed; race 2.00x (all 2.00x); on 20" in screen
    assert "slow        lost its race; self-test agreed; race 0.50x" in screen


def use_clock(three: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands make their own Kernels, whose clock stands still for fake work: give them the one that moves."""
    from localspec.kernels import selection, trial

    monkeypatch.setattr(selection, "try_out", lambda *a, **k: trial.try_out(*a, **k | {"clock": three.clock}))


def test_testing_them_now(three: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    use_clock(three, monkeypatch)
    kernels = three.kernels()
    assert [kernels.uses(name) for name in three.modules] == [True, False, False]
    three.add("bad")
    three.add("slow", ratio=2.0)
    outcome = run("doctor", "--json", "--test-kernels")
    assert outcome.exit_code == 0
    assert statuses(json.loads(outcome.stdout)) == ["in use"] * 3
    assert outcome.stderr.splitlines() == [f"testing the {name} kernel" for name in ("good", "bad", "slow")]
    assert all(three.kernels().uses(name) for name in three.modules)


def test_a_kernel_that_disagrees_when_tested_now_is_a_fault(three: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    use_clock(three, monkeypatch)
    three.add("odd", RuntimeError("no library"))
    found = problems("--test-kernels")
    assert [problem["text"].split(" (")[0] for problem in found] == [
        "the bad kernel disagreed", "the odd kernel failed",
    ]  # fmt: skip
    assert "no library" in found[1]["text"]


def test_a_kernel_turned_off_is_tested_too(three: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    use_clock(three, monkeypatch)
    del three.modules["bad"]
    monkeypatch.setenv("LOCALSPEC_KERNELS", "off")
    document = report("--test-kernels")
    assert statuses(document) == ["turned off"] * 2
    assert document["kernels"]["table"][0]["record"]["outcome"] == "agreed"


def test_without_metal(three: Bench) -> None:
    three.at(None)
    document = report("--test-kernels")
    assert not document["kernels"]["metal"]
    assert statuses(document) == ["no Metal here"] * 3
    assert "no kernel was tested" in document["notes"][0]["text"]
    assert not three.ran


def test_a_wrong_variable(three: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALSPEC_KERNELS", "maybe")
    assert problems()[0]["fix"] == "unset LOCALSPEC_KERNELS"


def test_a_damaged_record_is_told(three: Bench) -> None:
    three.file.write_text("{")
    assert any("kernels.json.broken" in note["text"] for note in report()["notes"])
    assert os.listdir(three.file.parent).count("kernels.json.broken") == 1


# -- the workflow for hosted runners ----------------------------------------------------------------------------------


def test_the_workflow_runs_what_it_should() -> None:
    file = Path(__file__).parents[1] / ".github" / "workflows" / "ci.yml"
    workflow = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    assert "pull_request" in workflow[True]  # YAML's `on`
    jobs = workflow["jobs"]
    assert {job["runs-on"].split("-")[0] for job in jobs.values()} == {"ubuntu", "macos"}
    commands = {name: " ".join(step.get("run", "") for step in job["steps"]) for name, job in jobs.items()}
    assert ".ci/run" in commands["linux"]
    assert "make test" in commands["macos"]
    assert "localspec doctor --json --test-kernels" in commands["macos"]
    for job in jobs.values():
        assert job["timeout-minutes"] <= 60
        for step in job["steps"]:
            assert "uses" not in step or step["uses"].rpartition("@v")[2].isdigit()
