"""A finished bench as JSON, as a table for a terminal and as Markdown. Measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from localspec.bench.pairs import Pair
from localspec.bench.summary import Spread, Summary

BUSY = 1.5
"""Load per core from which on the machine is called busy; a bench that has just ended leaves up to 1."""

_HEADERS = (
    ("", "", "kind"),
    ("", "speedup", "median (range)"),
    ("", "end to", "end"),
    ("", "tokens", "per pass"),
    ("", "acceptance", "rate"),
    ("mean", "acceptance", "length"),
    ("", "decode_tps", "plain / spec"),
    ("", "ids", "identical"),
)
_COLUMNS = (
    "kind",
    "speedup (range)",
    "end-to-end speedup",
    "tokens_per_pass",
    "acceptance_rate",
    "mean_acceptance_length",
    "decode_tps plain",
    "decode_tps speculative",
    "ids identical",
)


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that one bench found, and what it was measured on."""

    model: dict[str, Any]
    """name, dtype, context_length, drafters."""
    settings: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, Any]
    pairs: list[Pair]
    kinds: list[Summary]
    overall: Summary
    identity_expected: bool
    """Whether the settings promise identical ids: coupled acceptance, or temperature 0."""
    exactness: str = ""
    """How far the engine says that the ids are identical, and by what means."""

    @property
    def identical(self) -> bool:
        """Whether every pair gave the same ids."""
        return self.overall.identical == self.overall.pairs

    @property
    def differences(self) -> list[str]:
        """One line per pair whose ids part."""
        return [
            f"{pair.kind}/{pair.prompt}, repeat {pair.repeat + 1}: ids differ from {pair.difference.sentence()}"
            for pair in self.pairs
            if pair.difference is not None
        ]

    @property
    def warnings(self) -> list[str]:
        """What makes the times worth less than they look."""
        found = []
        load, cores = self.machine["load_average"], self.machine["cores"]
        if load > BUSY * cores:
            found.append(
                f"The machine was busy (load {load:g} on {cores} cores when the bench began): repeat it alone."
            )
        idle = [kind.title for kind in self.kinds if kind.acceptance_rate is None]
        if idle:
            found.append(
                f"Nothing was drafted in {', '.join(idle)}: both runs decoded plainly, the ratio there is noise."
            )
        return found

    def as_dict(self) -> dict[str, Any]:
        """One JSON document."""
        return {
            "model": self.model,
            "settings": self.settings,
            "versions": self.versions,
            "machine": self.machine,
            "identical": self.identical,
            "identity_expected": self.identity_expected,
            "exactness": self.exactness,
            "warnings": self.warnings,
            "overall": self.overall.as_dict(),
            "kinds": [kind.as_dict() for kind in self.kinds],
            "pairs": [pair.as_dict() for pair in self.pairs],
        }

    def table(self) -> str:
        """For a terminal, in plain characters, under 100 columns."""
        rows = [self._cells(kind, kind.speedup) for kind in self.kinds] + [self._cells(self.overall, None)]
        widths = [max(len(cell) for cell in column) for column in zip(*_HEADERS_BY_LINE, *rows, strict=True)]
        lines = [_line(header, widths) for header in _HEADERS_BY_LINE]
        lines.append("-" * (sum(widths) + 2 * (len(widths) - 1)))
        lines += [_line(row, widths) for row in rows]
        return "\n".join([self._headline(), "", *lines, "", *self._notes()])

    def markdown(self) -> str:
        """A report to keep: how it was measured, then the figures."""
        rows = [self._cells(kind, kind.speedup) for kind in self.kinds] + [self._cells(self.overall, None)]
        drafters = [
            [
                _escape(name),
                str(counts["drafted"]),
                str(counts["accepted"]),
                _percent(counts["acceptance_rate"]),
                _number(counts["mean_acceptance_length"]),
            ]
            for name, counts in self.overall.by_drafter.items()
        ]
        parts = [
            f"# Plain against speculative: {_escape(str(self.model['name']))}",
            "\n".join(f"- {name}: {_escape(_value(value))}" for name, value in self._facts()),
            _markdown_table(_COLUMNS, [_split_rates(row) for row in rows]),
        ]
        if drafters:
            columns = ("drafter", "drafted", "accepted", "acceptance_rate", "mean_acceptance_length")
            parts.append(_markdown_table(columns, drafters))
        parts.append("\n\n".join(self._notes()))
        return "\n\n".join(parts) + "\n"

    def _headline(self) -> str:
        machine, settings = self.machine, self.settings
        return (
            f"{self.model['name']}, {self.model['dtype']}, {machine['backend']} ({machine['blas']}), "
            f"temperature {settings['temperature']:g}, seed {settings['seed']}, "
            f"up to {settings['max_tokens']} tokens, {settings['repeats']} "
            f"pair{'s' if settings['repeats'] != 1 else ''} per prompt"
        )

    def _facts(self) -> list[tuple[str, Any]]:
        facts = [(f"model {key}", value) for key, value in self.model.items() if key != "name"]
        return facts + list(self.machine.items()) + list(self.versions.items()) + list(self.settings.items())

    def _cells(self, summary: Summary, speedup: Spread | None) -> list[str]:
        """One row. The overall row gives ratios of total times instead of a median."""
        if summary is self.overall:
            first, end_to_end = _times(summary.total_speedup), _times(summary.end_to_end_total_speedup)
        else:
            first = _times(speedup.median if speedup else None)
            if speedup is not None and summary.pairs > 1:
                first += f" ({speedup.low:.2f}-{speedup.high:.2f})"
            end_to_end = _times(summary.end_to_end_speedup.median if summary.end_to_end_speedup else None)
        return [
            summary.title,
            first,
            end_to_end,
            _number(summary.tokens_per_pass),
            _percent(summary.acceptance_rate),
            _number(summary.mean_acceptance_length),
            f"{_number(summary.plain_decode_tps, 1)} / {_number(summary.speculative_decode_tps, 1)}",
            f"{summary.identical}/{summary.pairs}",
        ]

    def _notes(self) -> list[str]:
        notes = [
            "speedup: plain time / speculative time of one answer, without prompt processing; end to end: with it.",
            "Kinds: median over pairs. Overall: ratio of total times.",
        ]
        if self.identical:
            notes.append("The ids were identical in every pair.")
        elif not self.identity_expected:
            notes.append(
                f"Ids differ, as they may: above temperature 0, {self.settings['accept']} acceptance keeps the "
                "distribution, not the ids. Times are compared per token."
            )
        else:
            notes.append("THE IDS WERE NOT IDENTICAL; times are compared per token:")
            notes += self.differences
        if self.exactness:
            notes.append(f"Identity: {self.exactness}.")
        return notes + self.warnings


_HEADERS_BY_LINE = [[header[line] for header in _HEADERS] for line in range(3)]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = zip(cells, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]).rstrip()


def _split_rates(row: Sequence[str]) -> list[str]:
    plain, _, speculative = row[6].partition(" / ")
    return [*row[:6], plain, speculative, row[7]]


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _escape(text: str) -> str:
    """Names come from folders and hubs: nothing in them may act as Markdown."""
    return "".join("\\" + c if c in "\\`*_[]<>|#" else c for c in text.replace("\n", " "))


def _value(value: Any) -> str:
    return ", ".join(str(v) for v in value) if isinstance(value, list | tuple) else str(value)


def _times(ratio: float | None) -> str:
    return "n/a" if ratio is None else f"{ratio:.2f}x"


def _number(value: float | None, digits: int = 2) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.0%}"
