"""Memory traffic of the kernels, counted on paper: `python -m localspec.kernels.traffic` prints the table.

Against the least (every input read once, every result written once), and against MLX's operations that a kernel
replaces. Not a claim about speed: nothing here was measured.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """One piece of work: bytes to and from memory, dispatches, arithmetic."""

    kernel: str
    shape: str
    minimum_bytes: int
    kernel_bytes: int
    mlx_bytes: int
    kernel_dispatches: int
    mlx_dispatches: int
    operations: int
    """Of the kernel: additions, multiplications, and integer operations alike."""


def entries() -> list[Entry]:
    """All kernels' work."""
    from localspec.kernels import traffic_matmul, traffic_verify

    return [*traffic_verify.entries(), *traffic_matmul.entries()]


def table(rows: list[Entry]) -> str:
    """Markdown, megabytes and millions of operations."""
    lines = [
        "| kernel | work | least MB | kernel MB | MLX MB | kernel dispatches | MLX dispatches | kernel operations, M |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        numbers = [f"{n / 1e6:.2f}" for n in (row.minimum_bytes, row.kernel_bytes, row.mlx_bytes)]
        cells = [row.kernel, row.shape, *numbers, str(row.kernel_dispatches), str(row.mlx_dispatches)]
        lines.append(f"| {' | '.join(cells)} | {row.operations / 1e6:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(entries()))
