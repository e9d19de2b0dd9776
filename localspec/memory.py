"""How much memory there is, and how much a model's weights will take once loaded.

Knows nothing about loading; the answers are bytes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from localspec.checkpoint import Checkpoint

_FLOAT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FLOOR = 256 * 2**20


def weights_bytes(checkpoint: Checkpoint, dtype: str) -> int:
    """Memory for the weights in `dtype`; `quantized` means as stored."""
    if dtype == "quantized":
        return checkpoint.bytes
    size = _FLOAT_BYTES[dtype]
    total = 0
    for name, tensor in checkpoint.tensors.items():
        stem, _, leaf = name.rpartition(".")
        scales = checkpoint.tensors.get(f"{stem}.scales")
        if leaf == "weight" and scales is not None:
            total += scales.elements * _group_size(checkpoint.config, stem) * size
        elif leaf in ("scales", "biases") and f"{stem}.weight" in checkpoint.tensors:
            continue  # spent in dequantising
        else:
            total += tensor.elements * size if tensor.floating else tensor.bytes
    return total


def needed_bytes(weights: int) -> int:
    """Memory to load and run weights of that size: caches and scratch beside them."""
    return weights + max(_FLOOR, weights // 10)


def available_bytes() -> int | None:
    """Memory that a model may take without making this machine swap; None where that cannot be told."""
    if sys.platform == "darwin":
        return _available_on_macos()
    found = [n for n in (_meminfo(Path("/proc/meminfo")), _cgroup(Path("/sys/fs/cgroup"))) if n is not None]
    return min(found, default=None)


def format_bytes(count: int) -> str:
    """Decimal units, three digits: `98.4 MB`."""
    value, unit = float(count), "bytes"
    for unit in ("bytes", "kB", "MB", "GB", "TB"):  # noqa: B007  (the last one stays)
        if value < 999.5:
            break
        value /= 1000
    return f"{count} bytes" if unit == "bytes" else f"{value:.3g} {unit}"


def _available_on_macos() -> int | None:
    """What the system leaves: macOS compresses and evicts, so its free-memory counters say little."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    available = total - max(2 * 10**9, total // 5)
    working_set = _device_info().get("max_recommended_working_set_size")
    return min(available, working_set) if isinstance(working_set, int) and working_set > 0 else available


def _device_info() -> dict[str, Any]:
    import mlx.core as mx

    if not mx.metal.is_available():
        return {}
    info: dict[str, Any] = mx.device_info()
    return info


def _meminfo(file: Path) -> int | None:
    try:
        for line in file.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def _cgroup(folder: Path) -> int | None:
    """The container's limit less what it uses; page cache can be dropped, so inactive files count as free."""
    try:
        limit = int((folder / "memory.max").read_text())  # "max" where there is none: no number
        used = int((folder / "memory.current").read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(statistics.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None


def _group_size(config: dict[str, Any], stem: str) -> int:
    table = config.get("quantization") or config.get("quantization_config") or {}
    own = table.get(stem) if isinstance(table, dict) else None
    for source in (own, table):
        if isinstance(source, dict) and isinstance(source.get("group_size"), int):
            return int(source["group_size"])
    return 64
