"""A lock between processes that ends with its holder, however that ends. Knows nothing of what it protects."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PAUSE = 0.02
"""Seconds between two tries."""


@contextmanager
def locked(path: Path, patience: float) -> Iterator[None]:
    """Hold the lock file `path`, made where there is none, while the block runs; its holder may remove it.

    patience: seconds to wait for another holder. Raises TimeoutError after that, OSError where there can be no lock.
    """
    end = time.monotonic() + patience
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            if _got(descriptor, path):
                yield
                return
        finally:
            os.close(descriptor)
        if time.monotonic() >= end:
            raise TimeoutError(f"{path} is held by another process")
        time.sleep(_PAUSE)


def _got(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # Whoever held it may have removed the file: what is locked then is one that nobody else will look at.
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
