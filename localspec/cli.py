"""The entry point of the `localspec` command.

Nothing heavy is imported on the way to `localspec --help`, so that it answers at once.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit. With no arguments given, those of the process."""
    # Only a process that was started as `localspec` may start itself over and handle signals in its own way.
    owned = arguments is None
    catching = owned and signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else somebody ignores it
    if catching:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # while importing, there is nothing to clean up
    from localspec.commands.process import Process, exit_status, make_streams_safe, quiet_libraries
    from localspec.commands.root import cli

    process = Process(owned)
    if catching:
        process.catch_interrupts()
    if owned:
        quiet_libraries()
    make_streams_safe()
    sys.exit(exit_status(lambda: cli.main(arguments, prog_name="localspec", standalone_mode=False, obj=process)))
