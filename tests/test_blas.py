"""The search for OpenBLAS and the restart with it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localspec import blas
from localspec.errors import LocalspecError

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the preload is for Linux alone")

LIBRARY = Path("/somewhere/libopenblas.so.0")


class Restart(Exception):
    """Raised in place of the restart."""

    def __init__(self, program: str, argv: list[str], environment: dict[str, str]) -> None:
        super().__init__(program)
        self.argv = argv
        self.environment = environment


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which the restart would help, with an empty memory."""

    def execve(program: str, argv: list[str], environment: dict[str, str]) -> None:
        raise Restart(program, argv, environment)

    for name in (
        blas.GUARD,
        "LD_PRELOAD",
        "LOCALSPEC_BLAS",
        "LOCALSPEC_OPENBLAS",
        "OPENBLAS_NUM_THREADS",
        "OMP_NUM_THREADS",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(blas, "applies", lambda: True)
    monkeypatch.setattr(blas, "active", lambda: False)
    monkeypatch.setattr(blas, "find_openblas", lambda: LIBRARY)
    monkeypatch.setattr(blas, "_quota_threads", lambda: None)
    monkeypatch.setattr(os, "execve", execve)
    return tmp_path / "home"


def restart(setting: blas.Setting = "auto", verbose: bool = False) -> Restart:
    with pytest.raises(Restart) as caught:
        blas.preload(["python", "-m", "localspec", "chat"], setting, verbose)
    return caught.value


def test_restarts_the_same_command_with_the_library(home: Path) -> None:
    again = restart()
    assert again.argv == [sys.executable, "-m", "localspec", "chat"]
    assert again.environment["LD_PRELOAD"] == str(LIBRARY)


def test_keeps_what_the_user_preloads_and_puts_it_back(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/mine.so")
    again = restart()
    assert again.environment["LD_PRELOAD"] == f"{LIBRARY}:/mine.so"
    monkeypatch.setenv("LD_PRELOAD", again.environment["LD_PRELOAD"])
    monkeypatch.setenv(blas.GUARD, again.environment[blas.GUARD])
    assert blas.settle()
    assert os.environ["LD_PRELOAD"] == "/mine.so"
    assert blas.GUARD not in os.environ


def test_children_of_the_second_start_see_no_preload(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again = restart()
    monkeypatch.setenv("LD_PRELOAD", again.environment["LD_PRELOAD"])
    monkeypatch.setenv(blas.GUARD, again.environment[blas.GUARD])
    monkeypatch.setattr(blas, "active", lambda: True)
    blas.preload(["python"])  # the second start: no restart
    assert not {"LD_PRELOAD", blas.GUARD} & os.environ.keys()


def test_a_library_that_did_not_load_is_told_and_not_tried_for_ever(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(blas.GUARD, json.dumps({"LD_PRELOAD": None}))
    blas.preload(["python"])
    assert "could not be loaded" in capsys.readouterr().err


def test_threads_follow_a_container_quota_unless_the_user_says(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_quota_threads", lambda: 3)
    again = restart()
    assert again.environment["OPENBLAS_NUM_THREADS"] == "3"
    assert json.loads(again.environment[blas.GUARD])["OPENBLAS_NUM_THREADS"] is None
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "OPENBLAS_NUM_THREADS" not in restart().environment


@pytest.mark.parametrize("variable", [None, "off", "OFF"])
def test_off(home: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None) -> None:
    if variable is not None:
        monkeypatch.setenv("LOCALSPEC_BLAS", variable)
    blas.preload(["python"], "auto" if variable else "off")
    assert not home.exists()


@pytest.mark.parametrize("name", ["applies", "active"])
def test_not_where_it_would_not_help(home: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(blas, name, lambda: name == "active")
    blas.preload(["python"])


def test_announced_once_in_one_line(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    restart()
    first = capsys.readouterr().err
    restart()
    assert capsys.readouterr().err == ""
    restart(verbose=True)
    assert capsys.readouterr().err == first
    assert first.count("\n") == 1
    assert str(LIBRARY) in first
    assert "LOCALSPEC_BLAS=off" in first


def test_hint_once_where_there_is_none(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(blas, "find_openblas", lambda: None)
    blas.preload(["python"])
    assert blas.DEBIAN_PACKAGE in capsys.readouterr().err
    blas.preload(["python"])
    assert capsys.readouterr().err == ""


def test_a_home_that_cannot_be_written_is_no_obstacle(home: Path) -> None:
    home.write_text("a file where the folder should be")
    restart()


def test_a_closed_stdout_is_no_obstacle(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    restart()


def test_called_from_another_program_the_command_line_never_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from localspec.commands import process
    from localspec.commands.root import cli

    called: list[Any] = []
    monkeypatch.setattr(process, "preload", lambda *arguments: called.append(arguments))
    outcome = CliRunner().invoke(cli, ["chat"], input="")
    assert outcome.exit_code == 2  # past the restart: the prompt is empty
    assert not called
    CliRunner().invoke(cli, ["chat"], input="", obj=process.Process(owned=True))
    assert len(called) == 1


def test_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libmine.so"
    shutil.copy(os.path.realpath(sys.executable), library)  # any file of this machine's kind
    monkeypatch.setenv("LOCALSPEC_OPENBLAS", str(library))
    assert blas.find_openblas() == library


@pytest.mark.parametrize("content", [None, b"", b"text, not a library at all", b"\x7fELF\x01\x01" + bytes(14)])
def test_a_wrong_override_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> None:
    library = tmp_path / "libmine.so"
    if content is not None:
        library.write_bytes(content)
    monkeypatch.setenv("LOCALSPEC_OPENBLAS", str(library))
    with pytest.raises(LocalspecError, match="LOCALSPEC_OPENBLAS"):
        blas.find_openblas()


def test_a_path_that_ld_preload_cannot_name(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    shutil.copy(os.path.realpath(sys.executable), folder / "lib.so")
    shutil.copy(os.path.realpath(sys.executable), tmp_path / "lib.so")
    assert blas._loadable(tmp_path / "lib.so")
    assert not blas._loadable(folder / "lib.so")


def test_libraries_with_wide_integers_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "\tlibopenblas64.so.0 (libc6,x86-64) => /lib/libopenblas64.so.0",
        "\tlibopenblas64_.so.0 (libc6,x86-64) => /lib/libopenblas64_.so.0",
        "\tlibblas.so.3 (libc6,x86-64) => /lib/libblas.so.3",
        "\tlibopenblasp-r0.3.21.so (libc6,x86-64) => /lib/good-1",
        "\tlibopenblas.so.0 (libc6,x86-64) => /lib/good-2",
    ]
    monkeypatch.setattr(blas, "_ldconfig", lambda: lines)
    found = [str(path) for path in blas._candidates() if str(path).startswith("/lib/")]
    assert found == ["/lib/good-1", "/lib/good-2"]


def test_not_on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not blas.applies()
    assert blas.status() == "Accelerate"


def run_script(body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    base = {k: v for k, v in os.environ.items() if not k.startswith(("LOCALSPEC", "LD_PRELOAD"))}
    return subprocess.run(
        [sys.executable, "-c", body], capture_output=True, text=True, timeout=120, env=base | environment, check=True
    )


@pytest.mark.skipif(not (blas.applies() and blas.find_openblas()), reason="needs an installed OpenBLAS")
def test_the_real_restart(tmp_path: Path) -> None:
    body = (
        "import sys; from localspec import blas; blas.preload(sys.orig_argv); import mlx.core as mx, os\n"
        "print(mx.ones((2, 3)) @ mx.ones((3, 2)), blas.status(), os.environ.get('LD_PRELOAD'), sys.stdin.read())"
    )
    first = run_script(body, LOCALSPEC_HOME=str(tmp_path))
    assert "OpenBLAS" in first.stdout
    assert "via preload" in first.stdout
    assert "None" in first.stdout
    assert first.stderr.count("\n") == 1
    off = run_script(body, LOCALSPEC_HOME=str(tmp_path), LOCALSPEC_BLAS="off")
    assert "reference (wheel)" in off.stdout
    assert off.stderr == ""


def test_importing_localspec_changes_nothing(tmp_path: Path) -> None:
    body = (
        "import os; before = dict(os.environ); import localspec; localspec.Engine; localspec.load\n"
        "from localspec import blas; assert not blas.active(); assert dict(os.environ) == before"
    )
    assert run_script(body, LOCALSPEC_HOME=str(tmp_path / "home")).stderr == ""
    assert not (tmp_path / "home").exists()


def test_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    def reading(text: str) -> Callable[..., str]:
        return lambda *arguments, **keywords: text

    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(Path, "read_text", reading("max 100000\n"))
    assert blas._quota_threads() is None
    monkeypatch.setattr(Path, "read_text", reading(f"{100_000 * (cores + 1)} 100000\n"))
    assert blas._quota_threads() is None
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(Path, "read_text", reading("250000 100000\n"))
    assert blas._quota_threads() == 2
