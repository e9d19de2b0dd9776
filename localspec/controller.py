"""How many tokens to draft: expected tokens per second from measured pass costs and observed acceptance.

Per round the length N, 0 included, with the largest (1 + sum_k prod_{i<=k} a_i) / (T(N+1) + draft cost) is taken: a_i
is the chance that draft i is accepted when those before it were, T(k) the cost of a target pass with k rows on this
machine. Knows nothing of tokens or models. Lengths never change which tokens are emitted under coupled acceptance.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Literal

from localspec.drafters.protocol import Drafter, Offer, Proposal
from localspec.rows import RowClass

MOST = 12
"""Longest draft that is considered."""
REPRODUCIBLE = 4
"""Fixed length where ids depend on lengths (rejection and block acceptance): a clock must not decide them."""
QUIET = 2
"""Rounds without a proposal after which plain decoding runs ahead, as if nothing drafted."""
_SAMPLES = 15
"""Recent passes of a width that its cost is the median of."""
_PLAIN_SAMPLES, _PLAIN_EVERY = 3, 128
"""Plain passes before a drafter with weights may draft, and rounds after which another is due: without them nobody
would notice that plain decoding is the faster one."""
_APART_FIRST, _APART_EVERY = 3, 16
"""Rounds of a width in which drafting and the pass are timed apart at first, and rounds in one go after which another
is: what a round costs as a whole is known from each."""
_FIRST_PROBE, _LAST_PROBE = 32, 512
"""Proposals declined in a row before one is tried all the same, at first and at most."""
_MEMORY = 0.97
"""Weight that old acceptance counts keep with each new one of their kind."""
_PRIOR, _PRIOR_WEIGHT = 0.6, 4.0
"""First guess of acceptance where the drafter has none, and the observations that a first guess is worth."""
_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Confidences are told apart by these."""
_POSITIONS = 4
"""Positions with estimates of their own; later drafts share the last one's."""


class Costs:
    """The cost of a target pass by its number of rows: medians of recent passes, straight lines between them.

    A median because single passes are often slow for reasons that say nothing about the next one: the first of its
    width, another program's turn.
    """

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._seconds: dict[int, float] = {}

    def observe(self, rows: int, seconds: float) -> None:
        if seconds <= 0:
            return  # a clock that stood still (virtual machines) says nothing, and nothing can be divided by it
        recent = self._recent.setdefault(rows, deque(maxlen=_SAMPLES))
        recent.append(seconds)
        self._seconds[rows] = median(recent)

    def seen(self, rows: int) -> int:
        """How many recent passes of this width are known."""
        return len(self._recent.get(rows, ()))

    def known(self) -> int:
        """The most rows that were measured; 0 before any."""
        return max(self._seconds, default=0)

    def relative(self, rows: int, plain: int = 1) -> float:
        """T(rows) / T(plain), as far as measured; between points on a line, beyond the last along its slope."""
        points = sorted(item for item in self._seconds.items() if item[0] >= plain)
        if not points or points[0][0] != plain:
            return 1.0 + 0.1 * (rows - plain)
        base = points[0][1]
        index = bisect_left(points, (rows, 0.0))
        if index < len(points) and points[index][0] == rows:
            return points[index][1] / base
        if index == len(points):
            if index == 1:
                return 1.0 + 0.1 * (rows - plain)
            # From the first point: neighbouring points are too noisy to extrapolate from.
            last_rows, last = points[-1]
            return 1.0 + (last / base - 1.0) * (rows - plain) / (last_rows - plain)
        (low, low_s), (high, high_s) = points[index - 1], points[index]
        return (low_s + (high_s - low_s) * (rows - low) / (high - low)) / base

    def of(self, rows: int) -> float | None:
        """Seconds of a pass of that many rows; None before one was measured."""
        return self._seconds.get(rows)


class Acceptance:
    """Chances that a draft is accepted when those before it were; old counts fade.

    By what the drafter itself predicts where it does, so that the first draft of a long match and the tenth of a short
    one teach each other; by position where it does not.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, int], tuple[float, float]] = {}

    def estimate(self, drafter: str, position: int, confidence: float | None = None) -> float:
        # A later draft of an accepted run is likelier to hold than the first.
        at_position = _PRIOR + (1 - _PRIOR) * 0.15 * min(position, _POSITIONS - 1)
        prior = at_position if confidence is None else confidence
        accepted, seen = self._counts.get(_key(drafter, position, confidence), (0.0, 0.0))
        return (accepted + _PRIOR_WEIGHT * prior) / (seen + _PRIOR_WEIGHT)

    def observe(self, proposal: Offer, accepted: int) -> None:
        """A draft behind a rejected one was not tested, and says nothing."""
        for i in range(min(accepted + 1, len(proposal))):
            key = _key(proposal.source, i, _confidence(proposal, i))
            good, seen = self._counts.get(key, (0.0, 0.0))
            self._counts[key] = (good * _MEMORY + (i < accepted), seen * _MEMORY + 1)

    def fade(self, proposal: Proposal) -> None:
        """What was not tried drifts back to its first guess, so that it is tried again."""
        key = _key(proposal.source, 0, _confidence(proposal, 0))
        if key in self._counts:
            good, seen = self._counts[key]
            self._counts[key] = (good * 0.99, seen * 0.99)


def _key(drafter: str, position: int, confidence: float | None) -> tuple[str, str, int]:
    if confidence is None:
        return drafter, "position", min(position, _POSITIONS - 1)
    return drafter, "confidence", bisect_left(_EDGES, confidence)


def _confidence(proposal: Offer, position: int) -> float | None:
    return None if proposal.confidence is None else proposal.confidence[position]


class Controller:
    """Chooses draft lengths for one engine and learns from every round."""

    def __init__(self) -> None:
        self.costs = Costs()
        self.acceptance = Acceptance()
        self._draft_costs: dict[str, deque[float]] = {}
        """Recent seconds per drafted token, per drafter."""
        self._since_plain = 0
        """Rounds that drafted since the last plain one."""
        self._alone: deque[float] = deque(maxlen=_SAMPLES)
        """Recent seconds of plain passes that nothing was launched behind."""
        self._joint: dict[str, int] = {}
        """Per drafter, rounds in one go since the last that was timed apart."""
        self._declined: dict[str, int] = {}
        self._waits: dict[str, int] = {}
        self.row_class: RowClass | None = None
        """The sizes that the passes of the generation under way are filled up to; None where none are."""

    def before(self, drafter: Drafter, limit: int, fixed: int | Literal["auto"], *, peek: bool = False) -> int:
        """Tokens to ask the drafter for. A free drafter is asked for all that is allowed, and `after` then cuts."""
        if fixed != "auto":
            return min(limit, fixed)
        limit = min(limit, MOST, self._cautious())
        if drafter.free or limit <= 0:
            return max(limit, 0)
        if self.costs.seen(self.width(1)) < _PLAIN_SAMPLES or self._since_plain >= _PLAIN_EVERY:
            return 0
        best, _ = self._best(drafter.name, limit, running=peek)
        if best and not peek:
            self._taken(drafter.name)
        return best or self._probe(drafter.name, peek)

    def worth(self, drafter: Drafter, limit: int, *, peek: bool = False) -> float:
        """Tokens per plain pass's time that a drafter with weights would bring at its best length; 1.0 for none."""
        limit = min(limit, MOST, self._cautious())
        if limit <= 0 or self.costs.seen(self.width(1)) < _PLAIN_SAMPLES:
            return 1.0
        return self._best(drafter.name, limit, running=peek)[1]

    def after(
        self, proposal: Proposal, fixed: int | Literal["auto"], *, peek: bool = False, rival: float = 1.0
    ) -> Proposal | None:
        """The proposal of a free drafter cut to what its evidence is worth; None when something else is worth more:
        plain decoding, or the drafters with weights behind it, whose `worth` is `rival`.

        `peek`: the answer is wanted, but no round will follow from it.
        """
        if fixed != "auto":
            return proposal
        best, value = self._best(proposal.source, len(proposal), proposal.confidence, running=peek)
        if best and value < rival:
            return None
        if best == 0:
            self.acceptance.fade(proposal)
            best = self._probe(proposal.source, peek)
        elif not peek:
            self._taken(proposal.source)
        return proposal.cut(best) if best else None

    def _taken(self, drafter: str) -> None:
        """A draft pays again: what was declined before is over."""
        self._declined[drafter] = 0
        self._waits[drafter] = _FIRST_PROBE

    def _probe(self, drafter: str, peek: bool) -> int:
        """1 when it is time to try a declined drafter again, else 0.

        Without probes one unlucky measurement of a wide pass would end drafting for good. Each declined proposal
        brings the next probe nearer, and each probe that changed nothing doubles the wait.
        """
        declined = self._declined[drafter] = self._declined.get(drafter, 0) + 1
        wait = self._waits.get(drafter, _FIRST_PROBE)
        if declined < wait:
            return 0
        if not peek:
            self._declined[drafter] = 0
            self._waits[drafter] = min(2 * wait, _LAST_PROBE)
        return 1

    def times_apart(self, proposal: Offer) -> bool:
        """Whether to wait for the drafts before their pass begins, so that the two can be timed apart.

        Now and then only: a round in one go is the faster one.
        """
        if isinstance(proposal, Proposal):
            return True  # there is nothing to wait for
        unknown = self.costs.seen(self.width(len(proposal) + 1)) < _APART_FIRST
        return unknown or self._joint.get(proposal.source, 0) >= _APART_EVERY

    def shares(self, proposal: Offer, seconds: float) -> tuple[float, float]:
        """(drafting, pass) of a round that did both in one go: the pass takes what passes of its width took when they
        were timed apart, the rest was drafting."""
        alone = self.costs.of(self.width(len(proposal) + 1)) or 0.0
        verify_s = min(alone, seconds)
        return seconds - verify_s, verify_s

    def learn(self, proposal: Offer, accepted: int, draft_s: float, verify_s: float, *, apart: bool = True) -> None:
        """Book one round that drafted; `apart`: whether the two times were measured, and not made by `shares`.

        `proposal` as it went into the pass, whatever could not be judged of it: its rows were paid for.
        """
        self._since_plain += 1
        self._joint[proposal.source] = 0 if apart else self._joint.get(proposal.source, 0) + 1
        self.acceptance.observe(proposal, accepted)
        if apart:
            self.costs.observe(self.width(len(proposal) + 1), verify_s)
        self._draft_costs.setdefault(proposal.source, deque(maxlen=_SAMPLES)).append(draft_s / len(proposal))

    def learn_plain(self, seconds: float, *, ahead: bool = True) -> None:
        """Book a pass without drafts; `ahead`: whether the next one was launched before this one was read."""
        self._since_plain = 0
        if ahead:
            self.costs.observe(self.width(1), seconds)
        else:
            self._alone.append(seconds)
            if not self.costs.seen(self.width(1)):
                self.costs.observe(self.width(1), seconds)  # better than nothing

    def width(self, rows: int) -> int:
        """The rows that a pass really has, fillers included."""
        return rows if self.row_class is None else self.row_class.width(rows)

    def _cautious(self) -> int:
        # Wide passes may cost many times a narrow one here: each width is tried after half of it was measured.
        return max(2 * self.costs.known() - 1, 1)

    def _best(
        self, drafter: str, limit: int, confidence: Sequence[float] | None = None, *, running: bool = False
    ) -> tuple[int, float]:
        """The length with the largest value, 0 for none, and that value. `running`: whether plain decoding runs ahead
        now."""
        plain = self.width(1)
        one = self.costs.of(plain)
        costs = self._draft_costs.get(drafter)
        draft = median(costs) / one if one and costs else 0.0
        # A pass that nothing follows at once costs more. Who drafts while plain decoding runs ahead pays for the passes
        # until it does again; else the pass in place of the draft would be such a one.
        alone = median(self._alone) / one - 1.0 if one and self._alone else 0.0
        stall = max(alone, 0.0) * (QUIET if running else -1)
        best, best_value = 0, 1.0
        expected, chance = 1.0, 1.0
        for n in range(1, limit + 1):
            chance *= self.acceptance.estimate(drafter, n - 1, None if confidence is None else confidence[n - 1])
            expected += chance
            value = expected / (self.costs.relative(self.width(n + 1), plain) + n * draft + stall)
            if value > best_value:
                best, best_value = n, value
        return best, best_value
