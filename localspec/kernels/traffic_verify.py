"""Bytes that verification and truncation move, counted on paper: for a pass of `rows` rows over a vocabulary.

Counted are logits and what has a number for each token; results and settings, a few bytes per row, are not. A second
reading of a row within a dispatch counts in full, though 300 KB should come from a cache. MLX runs each operation of
localspec's own MLX path by itself: it reads its inputs and writes its result, 4 bytes each but for logits and bools.
"""

from __future__ import annotations

from localspec.kernels.traffic import Entry

_NOISE_ROUND = 52 // 2
"""Per token, of a round for two: x0 + x1, two shifts and an or, an exclusive or: 12 + 8 + 8 + 12 + 12 bytes."""
_NOISE = 20 * _NOISE_ROUND + 6 * 16 // 2 + 16 + 4 * 8 + 5 * 8
"""Per token: rounds; six additions of keys to both words; pairs put side by side; the uniform; its two logarithms."""
_NOISE_OPERATIONS = 20 * 5 + 12 + 3 + 4 + 5


def coupled(rows: int, size: int, width: int) -> Entry:
    """The coupled rule with temperature, no filter. `width`: bytes of a logit.

    Kernel: log-sum-exp reads a row once, choosing once more. MLX: to float32; log-sum-exp; log-probabilities; of the
    temperature: maximum, difference, product, lower limit, comparison, choice; noise, sum, argmax; log-sum-exp.
    """
    row = rows * size
    to_float, logprobs = width + 4, 4 + 8
    heat = 4 + 8 + 8 + 8 + 5 + 9
    mlx = to_float + logprobs + heat + _NOISE + 12 + 4 + 4
    shape = f"coupled, {rows} x {size}"
    return Entry("verify", shape, row * width, 2 * row * width, row * mlx, 1, 12 + _NOISE_OPERATIONS, _threefry(row))


def rejection(rows: int, size: int, width: int) -> Entry:
    """The rejection rule with dense q for all rows but the last, with temperature, no filter.

    Kernel: log-sum-exp, sum of the scores, drawing each read a row; q is read where p alone would win, for few tokens,
    and is counted in full. MLX draws for one row only: as above up to the temperature; softmax; at that row difference,
    limit, sum, choice, comparison, logarithm, noise, sum, choice, argmax; and log-sum-exp of all rows.
    """
    row, q = rows * size, 4 * (rows - 1) * size
    heat = 4 + 8 + 8 + 8 + 5 + 9
    all_rows = width + 4 + 4 + 8 + heat + 8 + 4
    one_row = 12 + 8 + 4 + 8 + 5 + 8 + _NOISE + 12 + 9 + 4
    shape = f"rejection, {rows} x {size}, q of all tokens"
    mlx = row * all_rows + size * one_row
    least, ours = row * width + q, 3 * row * width + q
    return Entry("verify", shape, least, ours, mlx, 1, 22 + _NOISE_OPERATIONS, _threefry(row))


def top_p(rows: int, size: int, width: int) -> Entry:
    """Kernel: log-sum-exp, total mass, eight digits. MLX: to float32, log-sum-exp, log-probabilities; a sort (blocks of
    2,048, then merges of two, each reading and writing all); exp, running sum, comparison, count, filter."""
    row = rows * size
    merges = max((-(-size // 2048) - 1).bit_length(), 0)
    sort = 8 * (1 + merges)
    mlx = width + 4 + 4 + 8 + sort + 8 + 8 + 5 + 1 + 5 + 9
    shape = f"top-p, {rows} x {size}"
    # Per token and digit: difference, bits, comparison, exponential, 16 choices and additions.
    return Entry("truncation", shape, row * width, 10 * row * width, row * mlx, 1, 11 + merges, 8 * 36 * row)


def entries() -> list[Entry]:
    """Plain decoding and a pass with four drafts, at the vocabulary of a Qwen model in bfloat16."""
    size, width = 151_936, 2
    return [count(rows, size, width) for count in (coupled, top_p) for rows in (1, 5)] + [rejection(5, size, width)]


def _threefry(tokens: int) -> int:
    # 20 rounds of 5 for two tokens with 12 additions, then about 20 multiplications and additions and 2 logarithms.
    return tokens * (112 // 2 + 24)
