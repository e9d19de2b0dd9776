"""The command line as a process, on pipes and on terminals, with a real if tiny model."""

from __future__ import annotations

import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_checkpoint import write_tiny_checkpoint

from localspec.commands import process


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = str(tmp_path_factory.mktemp("home"))
    inherited = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONIOENCODING", "PYTHONUTF8", "LC_ALL", "NO_COLOR")
    }
    return inherited | {"LOCALSPEC_HOME": home, "LOCALSPEC_BLAS": "off", "TERM": "xterm-256color"}


def command(model: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "localspec", "chat", str(model), "--dtype", "float32", *arguments]


def test_process_prints_the_answer_and_nothing_else(tiny: Path, environment: dict[str, str]) -> None:
    arguments = command(tiny, "--max-tokens", "30", "-t", "1.5", "--seed", "4")
    done = subprocess.run(arguments, input=b"Hi", capture_output=True, env=environment, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b"\n")
    assert len(done.stdout.decode()) > 5
    again = subprocess.run(arguments, input=b"Hi", capture_output=True, env=environment, timeout=240, check=False)
    assert again.stdout == done.stdout


def test_process_on_an_ascii_stdout(tiny: Path, environment: dict[str, str]) -> None:
    for extra in ([], ["--json"]):
        done = subprocess.run(
            command(tiny, "--max-tokens", "60", "-t", "1.5", "--seed", "4", "-p", "Hi", *extra),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment | {"PYTHONIOENCODING": "ascii"},
            timeout=240,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert "\\u" in done.stdout.decode("ascii") or "\\x" in done.stdout.decode("ascii")
    assert "\ufffd" in json.loads(done.stdout.splitlines()[-1])["text"]


def test_process_with_closed_streams(tiny: Path, environment: dict[str, str]) -> None:
    line = f"exec {shlex.join(command(tiny, '-p', 'Hi', '--max-tokens', '3'))} >&-"
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, env=environment, timeout=240, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_process_that_is_refused_says_one_line(tiny: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        command(tiny, "-p", "word " * 9000), capture_output=True, env=environment, timeout=240, check=False
    )
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"localspec: ")
    assert done.stderr.count(b"\n") == 1


def test_process_whose_reader_goes_away(tiny: Path, environment: dict[str, str]) -> None:
    for arguments in (["-p", "Hi", "--max-tokens", "1500", "-t", "2"], ["-p", "Hi", "--max-tokens", "1500", "--json"]):
        child = subprocess.Popen(
            command(tiny, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.read(1)
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(240) == process.BROKEN_PIPE
        child.stderr.close()


def test_process_interrupted(tiny: Path, environment: dict[str, str]) -> None:
    child = subprocess.Popen(
        command(tiny, "-p", "Hi", "--max-tokens", "1500", "-t", "2", "--seed", "1"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        # A shell has what it runs in the background ignore interrupts, and whatever that starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert child.stdout is not None
    first = child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=240)
    assert child.returncode == process.INTERRUPTED
    assert err == b""
    assert (first + out).endswith(b"\n")


class Pty:
    """A child on a terminal of 100 by 30, with stdout and stderr apart where asked."""

    def __init__(self, arguments: list[str], environment: dict[str, str], stderr: int | None = None) -> None:
        self.master, slave = pty.openpty()
        self.child = subprocess.Popen(
            arguments,
            stdin=slave,
            stdout=slave,
            stderr=slave if stderr is None else stderr,
            env=environment | {"COLUMNS": "100", "LINES": "30"},
            start_new_session=True,
        )
        os.close(slave)
        self.seen = b""

    def read_until(self, wanted: bytes | None, seconds: float = 240) -> bytes:
        end = time.monotonic() + seconds
        while time.monotonic() < end and (wanted is None or wanted not in self.seen):
            if not select.select([self.master], [], [], 0.2)[0]:
                continue
            try:
                data = os.read(self.master, 65536)
            except OSError:  # Linux's end of a terminal
                break
            if not data:
                break
            self.seen += data
        return self.seen

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait()
        os.close(self.master)


def test_process_on_a_terminal_prints_no_escape_codes_with_a_prompt(tiny: Path, environment: dict[str, str]) -> None:
    terminal = Pty(command(tiny, "-p", "Hi", "--max-tokens", "60", "-t", "2", "--seed", "3"), environment)
    try:
        seen = terminal.read_until(None)
        assert terminal.child.wait(240) == 0
        assert b"\x1b" not in seen
        assert b"seed 3" in seen
    finally:
        terminal.close()


def test_process_ends_when_its_terminal_is_gone(tiny: Path, environment: dict[str, str]) -> None:
    """No signal reaches it here: the terminal is not its controlling one."""
    terminal = Pty(command(tiny), environment)
    try:
        assert b"ready" in terminal.read_until(b"ready")
    finally:
        os.close(terminal.master)
    try:
        assert terminal.child.wait(240) == 128 + signal.SIGHUP
    finally:
        terminal.child.kill()
        terminal.child.wait()


def test_process_on_a_terminal_opens_the_chat_and_leaves_it(tiny: Path, environment: dict[str, str]) -> None:
    terminal = Pty(command(tiny), environment)
    try:
        assert b"ready" in terminal.read_until(b"ready")
        assert b"\x1b[?1049h" in terminal.seen  # the alternate screen
        os.write(terminal.master, b"\x11")
        assert b"\x1b[?1049l" in terminal.read_until(None)
        assert terminal.child.wait(240) == 0
    finally:
        terminal.close()
