"""How a command behaves as a process: its exit codes, its streams, its restart with a faster BLAS.

Knows nothing about what the commands do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn, TextIO

import click

from localspec.blas import Setting, preload
from localspec.errors import LocalspecError, SettingsError

FAILED = 1
MISUSED = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


@dataclass(slots=True)
class Process:
    """What a command may do with the process it runs in, and what has happened to it."""

    owned: bool = False
    """Whether localspec was started as a program. Called from another program, it may not replace the process."""
    interrupted: bool = False
    """Whether Ctrl-C was pressed. The exception alone can get lost: Python drops those raised in a destructor."""
    catching: bool = False
    """Whether Ctrl-C comes here first."""

    def catch_interrupts(self) -> None:
        """Raise KeyboardInterrupt at Ctrl-C and remember it."""

        def interrupt(signal_number: int, frame: FrameType | None) -> None:
            self.interrupted = True
            raise KeyboardInterrupt

        def unraisable(fault: sys.UnraisableHookArgs) -> None:
            if not issubclass(fault.exc_type, KeyboardInterrupt):
                sys.__unraisablehook__(fault)

        signal.signal(signal.SIGINT, interrupt)
        sys.unraisablehook = unraisable
        self.catching = True

    def release_interrupts(self) -> None:
        """Leave Ctrl-C to Python, for an event loop that takes it from there."""
        if self.catching:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self.catching = False

    def raise_if_interrupted(self) -> None:
        """To be called now and then in long work."""
        if self.interrupted:
            raise KeyboardInterrupt


def the_process(ctx: click.Context) -> Process:
    """The process that a command runs in."""
    return ctx.find_object(Process) or Process()


class CommandGroup(click.Group):
    """A group of commands that ends errors, interrupts and broken pipes in an exit code instead of a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SettingsError as error:
            fail(ctx, str(error), MISUSED)
        except LocalspecError as error:
            fail(ctx, str(error))
        except BrokenPipeError:
            discard_output()
            ctx.exit(BROKEN_PIPE)
        except KeyboardInterrupt:
            if sys.stderr is not None and sys.stderr.isatty():
                say("")  # the terminal has printed ^C
            ctx.exit(INTERRUPTED)
        except OSError as error:
            reason = error.strerror or str(error)
            fail(ctx, f"{error.filename}: {reason}" if error.filename else reason)


def exit_status(run: Callable[[], object]) -> int:
    """Run a click command outside of its standalone mode and turn how it ended into an exit code."""
    try:
        status = run()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except SystemExit as error:  # click's own answer to a broken pipe
        return error.code if isinstance(error.code, int) else FAILED
    return status if isinstance(status, int) else 0


def fail(ctx: click.Context, message: str, code: int = FAILED) -> NoReturn:
    """End the command with one line on stderr."""
    say("localspec: " + " ".join(message.split()))
    ctx.exit(code)


def say(line: str) -> None:
    """One line on stderr, for the person at the terminal."""
    from localspec.text import printable

    click.echo(printable(line), err=True)


def output() -> TextIO:
    """Standard output; where it was closed (`>&-`), nowhere."""
    return sys.stdout if sys.stdout is not None else open(os.devnull, "w", encoding="utf-8")


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person reads (or writes) this stream."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def make_streams_safe() -> None:
    """Let a stream that cannot encode a character (an ASCII terminal) show its code point instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def quiet_libraries() -> None:
    """Keep the advice of libraries off stderr: what a person should know, localspec says itself."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def discard_output() -> None:
    """Send the rest of the output nowhere: the interpreter flushes at exit and would report the broken pipe again."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def use_fast_blas(ctx: click.Context, setting: Setting, verbose: bool = False) -> None:
    """Restart this process with OpenBLAS where that helps. Nothing may have been read from stdin before."""
    if the_process(ctx).owned:
        preload(sys.orig_argv, setting, verbose)
