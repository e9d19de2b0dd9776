"""Where a kernel's self-test and race were run, and so where their outcome holds."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

_ALSO = ("noise.py", "sampling.py", "acceptance.py")
"""Modules outside of this package whose arithmetic the references share."""


@dataclass(frozen=True, slots=True)
class Place:
    """A machine and the software on it. An outcome from any other place says nothing here."""

    device: str
    """The GPU's name, such as "Apple M2 Pro"."""
    macos: str
    mlx: str
    mlx_lm: str
    """Its kernel is what the replay's self-test compares bits with."""
    sources: str
    """Digest of localspec's kernels and their references."""


def here() -> Place | None:
    """This machine, if MLX computes on Metal by default in this thread."""
    if not mx.metal.is_available() or mx.default_device().type != mx.DeviceType.gpu:
        return None
    device = str(mx.device_info().get("device_name", "unknown"))
    return Place(device, platform.mac_ver()[0], version("mlx"), version("mlx-lm"), sources_digest())


@cache
def sources_digest() -> str:
    """Of every file that kernels and references are made of."""
    package = Path(__file__).parent
    files = [file for file in package.rglob("*") if file.suffix in (".py", ".metal")]
    return digest([*files, *(package.parent / name for name in _ALSO)])


def digest(files: list[Path]) -> str:
    """Of the names and contents of files, in whatever order."""
    found = hashlib.sha256()
    for file in sorted(files):
        content = file.read_bytes()
        found.update(f"{file.name} {len(content)}\n".encode() + content)
    return found.hexdigest()[:32]
