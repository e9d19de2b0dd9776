"""The kernels there are, by name. Importing this loads none of them, nor MLX."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localspec.kernels.kernel import Kernel

MODULES: dict[str, str] = {
    "verify": "localspec.kernels.verify",
    "verify-greedy": "localspec.kernels.verify_greedy",
    "verify-rejection": "localspec.kernels.verify_rejection",
    "truncation": "localspec.kernels.truncation",
    "few-rows": "localspec.kernels.matmul",
    "replay": "localspec.kernels.recurrence",
}
"""Name -> the module whose KERNEL it is."""


def names() -> tuple[str, ...]:
    """What a kernel can be called by, in options too."""
    return tuple(MODULES)


def kernel(name: str) -> Kernel:
    """The kernel of that name; KeyError for any other."""
    found: Kernel = import_module(MODULES[name]).KERNEL
    return found
