"""What a measurement was made on and with: versions, processor, backend, BLAS, the weights' format."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide speed and numbers."""
    found = {"python": platform.python_version()}
    for package in ("localspec", "mlx", "mlx-lm"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"  # run from a checkout that was never installed
    return found


def machine() -> dict[str, Any]:
    """The machine as it is now. `load_average`: of the last minute, so that a busy machine shows in the record."""
    from localspec import blas

    return {
        "system": f"{platform.system()} {platform.release()}",
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "backend": backend(),
        "blas": blas.status(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def cpu_model() -> str:
    """The processor's own name for itself, else its architecture."""
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        try:
            name = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            name = ""
        return name or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else platform.machine()


def usable_cores() -> int:
    """Cores that this process may use."""
    if sys.platform == "darwin":
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(0))


def backend() -> str:
    """Where MLX computes: "metal", "cuda" or "cpu"."""
    import mlx.core as mx

    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def weights_format(model: Any) -> str:
    """The format most of a model's weights are in: "float32", "bfloat16", "4-bit", ..."""
    from mlx.utils import tree_flatten

    sizes: Counter[str] = Counter()
    bits = {module.bits for module in model.modules() if isinstance(getattr(module, "bits", None), int)}
    for _, array in tree_flatten(model.parameters()):
        sizes[str(array.dtype).removeprefix("mlx.core.")] += array.nbytes
    if not sizes:
        return "unknown"
    name = sizes.most_common(1)[0][0]
    return "/".join(str(b) for b in sorted(bits)) + "-bit" if name == "uint32" and bits else name
