"""What verification tried and found, as one screen and as JSON. Decodes nothing."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from localspec.rows import RowClass, RowClasses
    from localspec.verify.comparison import Comparison, Promise
    from localspec.verify.distributions import Check
    from localspec.verify.prompts import Windows

FALSE_ALARM = 1e-6
"""Odds that a right program fails any of the distributions' checks; each gets an equal share."""
_WIDTH, _LABEL = 80, 20
_RULES = ("coupled", "rejection", "block")
_SHOWN = 2
"""Differences that the screen has room for."""

Verdict = Literal["identical", "near-ties", "bug", "interrupted"]
_EXITS: dict[Verdict, int] = {"identical": 0, "near-ties": 0, "bug": 1, "interrupted": 130}


@dataclass(slots=True)
class Report:
    """Filled while verification runs."""

    model: dict[str, Any]
    """name, dtype, context_length, drafters."""
    settings: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, Any]
    promise: Promise | None = None
    row_classes: RowClasses | None = None
    windows: Windows | None = None
    comparisons: list[Comparison] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    planned_checks: int = 1
    """How many share the odds of a false alarm, those that were not come to included."""
    complete: bool = False
    """Whether everything that was planned was done."""
    interrupted: bool = False

    @property
    def verdict(self) -> Verdict:
        if self.interrupted:
            return "interrupted"
        if self.bugs:
            return "bug"
        return "near-ties" if self.near_ties else "identical"

    @property
    def exit_status(self) -> int:
        """0: no token changed but at near-ties, where the promise allows them. 1: a bug. 130: interrupted."""
        return _EXITS[self.verdict]

    @property
    def bugs(self) -> int:
        return self._count("bug") + len(self.failed_checks)

    @property
    def near_ties(self) -> int:
        return self._count("near-tie")

    @property
    def tokens(self) -> int:
        """Compared, in all runs."""
        return sum(found.tokens for found in self.comparisons)

    @property
    def failed_checks(self) -> list[Check]:
        return [check for check in self.checks if check.p_value < self.share]

    @property
    def share(self) -> float:
        """The odds of a false alarm that each check has."""
        return FALSE_ALARM / self.planned_checks

    def as_dict(self) -> dict[str, Any]:
        """One JSON document."""
        windows, promise = self.windows, self.promise
        return {
            "verdict": self.verdict,
            "exit_status": self.exit_status,
            "complete": self.complete,
            "model": self.model,
            "settings": self.settings,
            "versions": self.versions,
            "machine": self.machine,
            "exactness": None if promise is None else promise.line,
            "every_bit_promised": None if promise is None else promise.bits,
            "tolerance": None if promise is None else promise.tolerance,
            "row_classes": None if self.row_classes is None else self.row_classes.as_dict(),
            "trajectories": {
                "runs": len(self.comparisons),
                "tokens": self.tokens,
                "near_ties": self.near_ties,
                "bugs": self._count("bug"),
                "comparisons": [found.as_dict() for found in self.comparisons],
            },
            "windows": None
            if windows is None
            else {"sizes": windows.sizes, "passed": windows.passed, "limit": windows.limit},
            "distributions": {
                "false_alarm": FALSE_ALARM,
                "failed": [check.name for check in self.failed_checks],
                "checks": [check.as_dict() for check in self.checks],
            },
            "kernels": [],
        }

    def screen(self) -> str:
        """For a terminal of 80 columns, in plain characters."""
        name, machine = " ".join(str(self.model["name"]).split()), self.machine
        title = f"localspec verify: {name}, {self.model['dtype']}, {machine['backend']} ({machine['blas']})"
        lines = textwrap.wrap(title, _WIDTH)
        for label, text in self._parts():
            lines += textwrap.wrap(
                text,
                _WIDTH,
                initial_indent=label.ljust(_LABEL),
                subsequent_indent=" " * _LABEL,
                break_on_hyphens=False,
            )
        return "\n".join(lines)

    def _count(self, outcome: str) -> int:
        return sum(found.outcome == outcome for found in self.comparisons)

    def _parts(self) -> Iterable[tuple[str, str]]:
        if self.promise is not None:
            yield "promise", self.promise.line
        if self.row_classes is not None:
            yield "row classes", _classes(self.row_classes)
        if self.comparisons:
            yield from self._trajectories()
        if self.checks:
            yield "distributions", self._distributions()
        yield "kernels", "none to test: MLX's own operations run here"
        yield "verdict", self._verdict()

    def _trajectories(self) -> Iterable[tuple[str, str]]:
        cases = [found.case for found in self.comparisons]
        heats = sorted({case.temperature for case in cases})
        seeds = len({case.seed for case in cases})
        yield (
            "trajectories",
            f"{len(cases)} runs, {self.tokens:,} tokens, each compared with plain decoding; "
            f"{_few(len({case.prompt for case in cases}), 'prompt')}, temperatures {_list(heats)}, "
            f"{_few(seeds, 'seed')}",
        )
        for way in dict.fromkeys(case.way for case in cases):
            found = [one for one in self.comparisons if one.case.way == way]
            yield f"  {way}", self._summary(found)
        kept = Counter(n for found in self.comparisons for n in found.kept)
        if kept:
            yield "  rejected", f"after {_list(sorted(kept))} kept drafts, {sum(kept.values())} times"
        elif not any(found.drafted for found in self.comparisons):
            yield "  drafted", "nothing: this model is decoded without drafts"
        if self.windows is not None:
            yield "  windows", self._windows(self.windows)
        if self.promise is not None and not self.promise.bits:
            yield "  last bits", self._last_bits(self.promise)
        wrong = [found for found in self.comparisons if found.outcome != "identical"]
        wrong.sort(key=lambda one: one.outcome != "bug")
        for one in wrong[:_SHOWN]:
            yield "  differs", one.sentence()
        if len(wrong) > _SHOWN:
            yield "", f"and {len(wrong) - _SHOWN} more; --json has them all"

    def _summary(self, found: list[Comparison]) -> str:
        counts = Counter(one.outcome for one in found)
        words = [f"{counts['bug']} NOT IDENTICAL"] if counts["bug"] else []
        words += [_few(counts["near-tie"], "near-tie")] if counts["near-tie"] else []
        drafted, accepted = sum(one.drafted for one in found), sum(one.accepted for one in found)
        tokens = sum(one.tokens for one in found)
        return (
            f"{_few(len(found), 'run')}, {tokens:,} tokens, {accepted} of {drafted} drafts kept: "
            f"{', '.join(words) or 'identical'}"
        )

    def _windows(self, windows: Windows) -> str:
        if not windows.sizes:
            return "none in this model"
        filled = {found.case.window for found in self.comparisons if found.case.window}
        said = [f"{_list(sorted(filled))} tokens, filled while decoding"] if filled else []
        missed = [size for size in windows.passed if size not in filled]
        if missed:
            said.append(f"{_list(missed)} not come to")
        if windows.left_out:
            said.append(f"{_list(windows.left_out)} NOT PASSED, longer than the {windows.limit} tokens tried")
        return "; ".join(said)

    def _last_bits(self, promise: Promise) -> str:
        others = sum(found.other_bits for found in self.comparisons)
        farthest = max(found.farthest for found in self.comparisons)
        if not others:
            return f"the same in all {self.tokens:,} log-probabilities"
        return (
            f"differ in {others} log-probabilities, by {farthest:.1g} at most; a near-tie is within "
            f"{promise.tolerance:g} (over temperature) of the top"
        )

    def _distributions(self) -> str:
        chance = [check for check in self.checks if 0 < check.p_value < 1]
        least = min((check.p_value for check in chance), default=1.0)
        said = []
        for rule in sorted({check.rule for check in self.checks}, key=_RULES.index):
            failed = [check for check in self.failed_checks if check.rule == rule]
            said.append(f"{rule} {'WRONG: ' + '; '.join(check.name for check in failed) if failed else 'right'}")
        draws = sum(check.draws for check in self.checks)
        return (
            f"{', '.join(said)}; {draws:,} draws, {_few(len(self.checks), 'check')}, smallest p {least:.1g} "
            f"(chi-square); false alarm: 1 in {round(1 / FALSE_ALARM):,}"
        )

    def _verdict(self) -> str:
        tried = f"{self.tokens:,} tokens"
        if self.verdict == "interrupted":
            wrong = f"{self.bugs} BUGS" if self.bugs else "nothing wrong"
            return f"INTERRUPTED: {wrong} in what was tried, {tried}"
        if self.verdict == "bug":
            return "NOT IDENTICAL: this is a bug in localspec; please report it with the output of --json"
        if self.verdict == "near-ties":
            return (
                f"IDENTICAL but for {_few(self.near_ties, 'near-tie')} in {tried}, as promised; "
                "--exact rows rules them out"
            )
        return f"IDENTICAL: speculation changed none of {tried}"


def _classes(found: RowClasses) -> str:
    if found.alike:
        low, high = found.tried[0], found.tried[-1]
        said = f"one: passes of {low} to {high} rows round alike"
    else:
        said = " | ".join(_sizes(one) for one in found.classes)
        if found.unfit:
            said += f"; in none: {_list(found.unfit)}"
    costs = {size: one.cost(size) for one in found.classes if one.seconds for size in one.sizes}
    shown = [f"T({size})={_ms(costs[size])}" for size in (1, 2, 4, 8, 16) if size in costs]
    return f"{said}; {' '.join(shown)} ms" if shown else said


def _sizes(one: RowClass) -> str:
    return "1" if one.sizes == (1,) else one.describe().removesuffix(" rows")


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.{0 if seconds >= 0.01 else 1}f}"


def _few(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _list(values: Iterable[float]) -> str:
    return " ".join(f"{value:g}" for value in values)
