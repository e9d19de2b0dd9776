"""Where localspec keeps its files, and how it writes them: whole or not at all.

Knows nothing about what the files hold.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

PRIVATE = 0o600
"""Mode for what only its owner should read: the default here."""


def cache_dir() -> Path:
    """The folder for models and measurements: $LOCALSPEC_HOME, else the platform's cache folder. Not created here."""
    home = os.environ.get("LOCALSPEC_HOME")
    if home:
        return Path(home).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg and os.path.isabs(xdg):  # the XDG rules say that a relative path is to be ignored
        return Path(xdg) / "localspec"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "localspec"
    return Path.home() / ".cache" / "localspec"


def models_dir() -> Path:
    """The folder with the models that localspec itself fetched and converted. Not created here."""
    return cache_dir() / "models"


def atomic_write_bytes(path: Path, data: bytes, mode: int = PRIVATE) -> None:
    """Replace `path` by `data` in one step: a reader, or a crash, sees the old content or the new, nothing between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def atomic_write_text(path: Path, text: str, mode: int = PRIVATE) -> None:
    """`atomic_write_bytes` for text, in UTF-8."""
    atomic_write_bytes(path, text.encode("utf-8"), mode)
