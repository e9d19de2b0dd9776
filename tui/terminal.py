"""Whether there still is a terminal."""

from __future__ import annotations

import os
import signal
import sys


def end_without_a_terminal() -> None:
    """End the process, as a hang-up signal would, when the terminal it was started on is gone.

    The signal does not reach everybody: not where a parent such as make leads the session and outlives the terminal,
    nor under nohup. What is left then waits for keys that cannot come, at the price of a whole core.
    """
    stream = sys.__stdin__
    if stream is None or stream.closed:
        return
    try:
        os.get_terminal_size(stream.fileno())
    except OSError:
        os._exit(128 + signal.SIGHUP)
