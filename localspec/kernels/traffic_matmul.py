"""Bytes that the product of few rows and the replay move, counted on paper: against the least, and MLX's own way.

Memory traffic only: what a kernel reads again within a call is taken to come from caches where it is small (rows,
keys), and from memory where it is not (weights). Nothing here is a claim about speed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
    """One call's bytes between memory and GPU, and its multiplications with an addition."""

    work: str
    least: int
    """Every input read once, every result written once."""
    ours: int
    theirs: int
    instead: str
    """What `theirs` is of."""
    cached: int
    """Bytes that ours reads from caches, over all simdgroups."""
    operations: int


def few_rows(rows: int, depth: int, columns: int, *, bits: int = 4, group_size: int = 64, width: int = 2) -> Traffic:
    """A product [rows, depth] x [depth, columns]; `width`: bytes of a row's numbers, of scales and of results.

    Ours reads weights, scales and biases once for all rows; from caches, the rows once per simdgroup of four columns,
    and scales and biases once per stretch of eight weights. MLX's, on M1 and M2: the matrix-vector kernel reads the
    weights for every row, up to a number of rows that depends on the matrix; from there on the matrix-matrix kernel
    reads them once. From M3 on they are read once per 5 rows.
    """
    enough = 14 if max(depth, columns) <= 2048 else 10 if max(depth, columns) <= 4096 else 6
    weights = columns * depth * bits // 8 + 2 * columns * (depth // group_size) * width
    rest = rows * (depth + columns) * width
    return Traffic(
        f"few-rows: {rows} row{'s' if rows > 1 else ''}, {depth} x {columns}, {bits} bits",
        weights + rest,
        weights + rest,
        (rows if rows < enough else 1) * weights + rest,
        "MLX's product on M1 and M2",
        (-(-columns // 4) * rows * depth + 2 * columns * depth // 8) * width,
        rows * depth * columns,
    )


def replay(rows: int, key_heads: int, value_heads: int, value_width: int, key_width: int, *, width: int = 2) -> Traffic:
    """The state of one layer after `rows` rows; state and gates in float32, the rest in `width` bytes.

    Ours reads a state and writes one, and reads what was recorded but the queries. mlx-lm's kernel reads these too, and
    writes an output per row. Per number of the state and row there are three multiplications in ours, five in theirs.
    """
    state = value_heads * value_width * key_width
    keys, values = rows * key_heads * key_width * width, rows * value_heads * value_width * width
    gates = rows * value_heads * (4 + width)
    least = 2 * 4 * state + keys + values + gates
    return Traffic(
        f"replay: {rows} row{'s' if rows > 1 else ''}, {value_heads} heads, {value_width} x {key_width}",
        least,
        least,
        least + keys + values,
        "mlx-lm's kernel, which computes the outputs too",
        rows * value_heads * value_width * key_width * width,
        3 * rows * state,
    )


def counts() -> list[Traffic]:
    """The work of the two kernels' races."""
    products = [few_rows(rows, 4096, columns) for columns in (4096, 14336) for rows in (1, 2, 4, 8)]
    return [*products, replay(8, 16, 32, 128, 128)]
