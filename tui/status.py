"""The status line: how fast, how much each pass of the model yields, how good the guesses are.

Numbers keep their width while they change, and what does not fit is left out whole, the least telling part first.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len
from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from localspec.stats import Stats
from localspec.tui.provenance import PROVENANCE

SEPARATOR = " · "


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of the line; lower ranks stay longest. `short` replaces `text` before the piece is dropped."""

    text: str
    rank: int
    short: str = ""


class StatusLine(Widget):
    """One line, right under the transcript."""

    state: reactive[str] = reactive("")
    """What the app is doing, in words; shown alone while there are no numbers."""
    parts: reactive[tuple[Part, ...]] = reactive(())
    context: reactive[str] = reactive("")
    """The right end."""

    def render(self) -> Content:
        width = self.content_size.width
        parts = self.parts if not self.state else (Part(self.state, 0), *self.parts)
        left = fit(parts, width)
        gap = width - cell_len(left) - cell_len(self.context)
        line = left + " " * gap + self.context if self.context and gap >= 3 else left
        return Content(line)


def fit(parts: tuple[Part, ...], width: int) -> str:
    """The line within `width` cells."""
    chosen = {part: part.text for part in parts}

    def line() -> str:
        return SEPARATOR.join(chosen[part] for part in parts if part in chosen)

    for part in sorted(parts, key=lambda part: -part.rank):
        if cell_len(line()) > width and part.short:
            chosen[part] = part.short
        if cell_len(line()) > width and part.rank > 0:
            del chosen[part]
    return line()


def measured(stats: Stats, seed: int, *, speculate: bool) -> tuple[Part, ...]:
    """The numbers of one answer, ready for `StatusLine.parts`."""
    parts = [Part(f"{_speed(stats.decode_tps)} tok/s", 0)]
    if not speculate:
        parts.append(Part("plain decoding: speculation is off", 1, short="plain"))
    else:
        per_pass = f"{stats.tokens_per_pass:3.1f}" if stats.tokens_per_pass is not None else "  –"
        rate = stats.acceptance_rate
        accepted = f"{100 * rate:3.0f} %" if rate is not None else "  n/a"
        parts.append(Part(f"{per_pass}/pass", 1))
        parts.append(Part(f"{accepted} accepted", 2, short=accepted))
        if drafters := drafter_names(stats):
            parts.append(Part(drafters, 4))
    parts.append(Part(f"seed {seed}", 3))
    return tuple(parts)


def _speed(rate: float | None) -> str:
    if rate is None:
        return "   –"
    return f"{rate:4.1f}" if rate < 99.95 else f"{rate:4.0f}"


def drafter_names(stats: Stats) -> str:
    """Who guessed, as on the legend."""
    # A copy: the decoding thread may add a drafter meanwhile.
    return " + ".join(p.label for source, p in PROVENANCE.items() if source in list(stats.by_drafter))


def context_use(used: int, length: int | None) -> str:
    """Context used, and its length where the model has one."""
    return f"context {used} / {length}" if length else f"context {used}"
