"""What commands print on stdout: lines, tables, JSON, without control characters.

Names come from files that others wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from localspec.commands.process import output


def print_table(rows: Iterable[tuple[str, ...]]) -> None:
    """Rows of equally many cells, at least one of them, in columns."""
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_json(document: Any) -> None:
    """One JSON document."""
    print_line(json.dumps(document, indent=2))


def print_line(line: str) -> None:
    """One line, or several."""
    from localspec.text import printable

    output().write(printable(line) + "\n")
