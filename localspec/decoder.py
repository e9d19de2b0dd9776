"""The rounds of one generation: propose, verify in one target pass, accept, commit, emit.

Plain decoding is the same loop with nothing proposed, and then pipelined: the next pass is launched before the token
that it starts from has been read. Knows nothing of prompts, chats or how a prefix got into the caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import mlx.core as mx

from localspec.controller import QUIET, REPRODUCIBLE, Controller
from localspec.drafters.forced import ForcedDrafter
from localspec.drafters.protocol import Draw, Offer, Proposal, UnreadProposal
from localspec.judge import Chosen, Judge, Step
from localspec.kernels.selection import Kernels
from localspec.matcher import Matcher
from localspec.noise import Noise
from localspec.rows import RowClass
from localspec.session import Session
from localspec.settings import Settings
from localspec.stats import Stats
from localspec.text import TextStream
from localspec.tokens import Round, Token

FinishReason = Literal["stop", "length"]


class Decoder:
    """Decodes from a prepared session until a stop, the limit, or the consumer's close."""

    def __init__(
        self,
        session: Session,
        settings: Settings,
        *,
        seed: int,
        end_ids: frozenset[int],
        limit: int,
        text: TextStream[Token],
        controller: Controller,
        stats: Stats,
        rounds: list[Round],
        stopping: Callable[[], bool],
        row_class: RowClass | None = None,
        speculates: bool = True,
        xtc_exempt: tuple[int, ...] = (),
        matcher: Matcher | None = None,
        kernels: Kernels,
    ) -> None:
        """`limit`: most tokens to emit, at least 1. `stats` and `rounds` are filled as decoding goes on. `stopping` is
        asked before each round whether to end here. `row_class`: the sizes that passes may have, None for any.
        `speculates`: False for a model whose passes of several rows are not to be relied on. `xtc_exempt`: ids that XTC
        never drops. `matcher`: a new one, where there is a grammar."""
        self._stopping = stopping
        self._session = session
        self._prompt_length = len(session.ids)
        self._settings = settings
        self._end_ids = end_ids
        self._limit = limit
        self._text = text
        self._controller = controller
        self._row_class = row_class
        session.transaction.row_class = row_class
        self._stats = stats
        self._rounds = rounds
        allowed = None if matcher is None else matcher.allowed
        self._draw = Draw(settings, Noise(seed), session.target.vocabulary_size, xtc_exempt, allowed)
        fixed: int | Literal["auto"] = settings.draft_length
        if fixed == "auto" and settings.accept != "coupled":
            fixed = REPRODUCIBLE
        self._fixed = fixed
        speculating = speculates and settings.speculate and fixed != 0
        self._matcher = matcher
        self._judge = Judge(self._draw, kernels, matcher)
        forced = [] if matcher is None else [ForcedDrafter(matcher)]
        willing = [drafter for drafter in session.drafters if drafter.takes_part(settings)] if speculating else []
        self._drafters = [*forced, *willing] if speculating else []
        self.emitted = 0
        """Tokens kept so far; those whose text is still held back are not yielded yet."""
        self._yielded = 0
        self.finish_reason: FinishReason | None = None

    def run(self) -> Iterator[Token]:
        """Yield each token once. The caller puts the session right when the iterator is closed or fails."""
        step: Step | None = None
        quiet = 0
        while self.finish_reason is None:
            if self._stopping():
                yield from self._release(self._text.finish())
                return
            self._controller.row_class = self._row_class  # other generations may use the controller in between
            seconds, was_ahead = 0.0, step is not None
            if step is None:
                proposal, draft_s = self._propose()
                if proposal is not None:
                    quiet = 0
                    yield from self._speculative_round(proposal, draft_s)
                    continue
                quiet += 1
                started = time.perf_counter()
                step = self._launch(mx.array(self._session.ids[-1:], mx.uint32), self._session.ids[:-1])
                seconds = time.perf_counter() - started
            runs_ahead = self._runs_ahead(quiet)
            started = time.perf_counter()
            ahead = self._launch(step.token, self._session.ids) if runs_ahead else None
            chosen = self._judge.finish(step, len(self._session.ids))
            seconds += time.perf_counter() - started
            self._stats.verify_s += seconds
            if was_ahead == runs_ahead:
                # Else the time is that of two passes begun, or of what was left of one.
                self._controller.learn_plain(seconds, ahead=was_ahead)
            yield from self._emit([chosen], None, 0, in_flight=ahead is not None)
            step = ahead

    def _runs_ahead(self, quiet: int) -> bool:
        """Whether to launch the next pass before this one is read. What a grammar allows there is not known yet."""
        if self._matcher is not None or self._room() <= 1:
            return False
        return not self._drafters or (quiet >= QUIET and not self._would_propose())

    # Propose

    def _room(self) -> int:
        return self._limit - self.emitted

    def _drafts_allowed(self) -> int:
        # The pass itself adds a token, and has a row for it.
        return min(self._room(), self._session.transaction.rows_allowed()) - 1

    def _propose(self) -> tuple[Offer | None, float]:
        """The first drafter's proposal that is worth a wider pass, and the seconds it took so far."""
        started = time.perf_counter()
        limit = self._drafts_allowed()
        proposal: Offer | None = None
        for drafter in self._drafters if limit > 0 else ():
            length = self._controller.before(drafter, min(limit, drafter.longest()), self._fixed)
            offered = self._usable(drafter.propose(length, self._draw)) if length else None
            proposal = offered
            if drafter.free and isinstance(offered, Proposal):
                proposal = self._controller.after(offered, self._fixed, rival=self._rival(limit))
            if proposal is not None:
                break
        seconds = time.perf_counter() - started
        self._stats.draft_s += seconds
        return proposal, seconds

    def _would_propose(self) -> bool:
        """Whether there would be a proposal at the tokens known so far; only free drafters are really asked."""
        started = time.perf_counter()
        limit, found = self._drafts_allowed(), False
        for drafter in self._drafters if limit > 0 else ():
            length = self._controller.before(drafter, min(limit, drafter.longest()), self._fixed, peek=True)
            offered = self._usable(drafter.propose(length, self._draw)) if length and drafter.free else None
            if isinstance(offered, Proposal):
                rival = self._rival(limit, peek=True)
                found = self._controller.after(offered, self._fixed, peek=True, rival=rival) is not None
            else:
                found = length > 0 and not drafter.free
            if found:
                break
        self._stats.draft_s += time.perf_counter() - started
        return found

    def _rival(self, limit: int, *, peek: bool = False) -> float:
        """What the drafters with weights are worth here, which a free one has to be worth as well."""
        costly = (drafter for drafter in self._drafters if not drafter.free)
        worths = (self._controller.worth(d, min(limit, d.longest()), peek=peek) for d in costly)
        return max(worths, default=1.0)

    def _usable(self, proposal: Offer | None) -> Offer | None:
        """The proposal up to the first id that the target lacks, or the grammar forbids; None when nothing is left.

        One that the device has not finished goes into the pass as it is, unless a grammar has to see it.
        """
        if proposal is None or (isinstance(proposal, UnreadProposal) and self._matcher is None):
            return proposal
        known = proposal.read(self._session.target.vocabulary_size)
        if not known.tokens:
            return None
        return known if self._matcher is None else self._matcher.cut(known)

    # Verify

    def _launch(self, token: mx.array, history: Sequence[int]) -> Step:
        """Start a one-row pass on `token` [1], which may not have been computed yet; `history`: the ids before it."""
        return self._judge.start(self._forward(token), token, history)

    def _speculative_round(self, offered: Offer, draft_s: float) -> Iterator[Token]:
        history, started = self._session.ids[:-1], time.perf_counter()
        apart = self._controller.times_apart(offered)
        if apart and isinstance(offered, UnreadProposal):
            mx.eval(offered.ids)
            waited = time.perf_counter() - started
            started, draft_s = started + waited, draft_s + waited
            self._stats.draft_s += waited
        fed = offered.after(self._session.ids[-1])
        proposal, accepted, chosen = self._judge.decide(self._forward(fed), fed, history, offered)
        verify_s = time.perf_counter() - started
        if not apart:
            building = draft_s
            draft_s, verify_s = self._controller.shares(offered, draft_s + verify_s)
            self._stats.draft_s += draft_s - building
        self._stats.verify_s += verify_s
        self._controller.learn(offered, accepted, draft_s, verify_s, apart=apart)
        yield from self._emit(chosen, proposal if proposal.tokens else None, accepted)

    # Commit and emit

    def _emit(
        self, chosen: list[Chosen], proposal: Proposal | None, accepted: int, *, in_flight: bool = False
    ) -> Iterator[Token]:
        """Cut at the earliest stop, commit what is kept, then yield it."""
        session, position = self._session, len(self._session.ids)
        index = len(self._rounds)
        ready: list[tuple[Token, str]] = []
        kept = 0
        for choice in chosen:
            token = Token(
                choice.id,
                "",
                choice.source,
                position + kept,
                index,
                choice.p,
                choice.q,
                choice.logprob,
                choice.draft_index,
                choice.match_length,
                choice.level,
                choice.top,
            )
            kept += 1
            at_end = choice.id in self._end_ids
            over = self._matcher is not None and self._matcher.keep(choice.id)
            ready += self._text.push(choice.id, token, hidden=at_end)
            if at_end or over or self._text.stopped:
                self.finish_reason = "stop"
            elif self.emitted + kept == self._limit:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                ready += self._text.finish()
                if self._text.stopped:
                    self.finish_reason = "stop"
                break
        self.emitted += kept
        session.transaction.commit(position + kept - 1, int(in_flight))
        session.extend([choice.id for choice in chosen[:kept]])
        record = Round(
            index,
            None if proposal is None else proposal.source,
            () if proposal is None else tuple(proposal.tokens),
            min(accepted, kept),
            kept,
            position,
        )
        self._rounds.append(record)
        self._stats.book_round(record)
        for choice in chosen[:kept]:
            self._stats.book_token(choice.source, choice.level)
        yield from self._release(ready)

    def _forward(self, ids: mx.array) -> mx.array:
        # A close takes back what was not yielded, though it was committed: text may be held back for several rounds.
        self._session.transaction.undecided = self._prompt_length + self._yielded - 1
        return self._session.transaction.forward(ids)

    def _release(self, ready: list[tuple[Token, str]]) -> Iterator[Token]:
        for token, text in ready:
            self._yielded += 1
            yield replace(token, text=text) if text else token
