"""Bytes that the product of few rows and the recurrence's replay move, counted on paper.

What a kernel reads again within a call counts once where it is small (rows, keys, scales: it should come from a cache),
and in full where it is not (weights).
"""

from __future__ import annotations

from localspec.kernels.traffic import Entry


def few_rows(rows: int, depth: int, columns: int, *, bits: int = 4, group_size: int = 64, width: int = 2) -> Entry:
    """A product [rows, depth] x [depth, columns]; `width`: bytes of a row's numbers, of scales and of results.

    Kernel: everything once; `cached` has what its simdgroups read of it again. MLX, on M1 and M2: the matrix-vector
    kernel reads the weights for every row, up to a number of rows that depends on the matrix; from there on the
    matrix-matrix kernel reads them once. From M3 on they are read once per 5 rows, which is not counted here.
    """
    weights = columns * depth * bits // 8 + 2 * columns * (depth // group_size) * width
    rest = rows * (depth + columns) * width
    enough = 14 if max(depth, columns) <= 2048 else 10 if max(depth, columns) <= 4096 else 6
    mlx = (rows if rows < enough else 1) * weights + rest
    # Per weight: shift, mask, conversion, and per row a multiplication and an addition. Per row and four weights:
    # conversion and addition of a number of the row.
    operations = depth * columns * (3 + 2 * rows) + depth * columns // 4 * 2 * rows
    shape = f"{rows} row{'s' if rows > 1 else ''}, {depth} x {columns}"
    return Entry("few-rows", shape, weights + rest, weights + rest, mlx, 1, 1, operations)


def cached(rows: int, depth: int, columns: int, *, width: int = 2) -> int:
    """Bytes of rows, scales and biases that all threads of the product read together.

    The rows once per simdgroup of four columns, scales and biases once per stretch of eight weights.
    """
    return (-(-columns // 4) * rows * depth + 2 * columns * depth // 8) * width


def replay(rows: int, key_heads: int, value_heads: int, value_width: int, key_width: int, *, width: int = 2) -> Entry:
    """The state of one layer after `rows` rows; state and gates in float32, the rest in `width` bytes.

    Kernel: reads a state and writes one, and reads what was recorded but the queries. MLX: mlx-lm's kernel reads these
    too, and writes an output per row.
    """
    state = value_heads * value_width * key_width
    keys, values = rows * key_heads * key_width * width, rows * value_heads * value_width * width
    least = 2 * 4 * state + keys + values + rows * value_heads * (4 + width)
    shape = f"{rows} row{'s' if rows > 1 else ''}, {value_heads} heads of {value_width} x {key_width}"
    # Per number of the state and row: the gate; product and sum; product and sum.
    return Entry("replay", shape, least, least, least + keys + values, 1, 1, 5 * rows * state)


def entries() -> list[Entry]:
    """The work of the two kernels' races: layers of a model of 8 billion weights, and a gated delta layer."""
    products = [few_rows(rows, 4096, columns) for columns in (4096, 14336) for rows in (1, 2, 4, 8)]
    return [*products, replay(8, 16, 32, 128, 128)]
