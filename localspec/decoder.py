"""The rounds of one generation: propose, verify in one target pass, accept, commit, emit.

Plain decoding is the same loop with nothing proposed, and then pipelined: the next pass is launched before the token
that it starts from has been read. Knows nothing of prompts, chats or how a prefix got into the caches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import mlx.core as mx

from localspec.acceptance import accept_block, accept_coupled, accept_rejection, block_weights, draw, residual
from localspec.controller import REPRODUCIBLE, Controller
from localspec.drafters.forced import ForcedDrafter
from localspec.drafters.protocol import Draw, Proposal
from localspec.errors import NumericsError
from localspec.matcher import Matcher
from localspec.noise import Noise, Stream, round_keys
from localspec.penalties import of_shape, penalise
from localspec.rows import RowClass
from localspec.sampling import Distribution, distribution, ranked
from localspec.session import Session
from localspec.settings import Settings
from localspec.stats import Stats
from localspec.text import TextStream
from localspec.tokens import Round, Source, Token

FinishReason = Literal["stop", "length"]

_QUIET = 2
"""Rounds without a proposal after which plain decoding runs ahead, as if nothing drafted."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A one-row pass on its way: lazy arrays of one entry each."""

    token: mx.array
    logprob: mx.array
    log_p: mx.array
    normalizer: mx.array
    top: tuple[mx.array, ...]
    """What `Distribution.top` gave; empty unless `logprobs` asks for it."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    """One token that a pass decided, before stops and limits."""

    id: int
    source: Source
    p: float
    logprob: float
    q: float | None = None
    draft_index: int | None = None
    match_length: int | None = None
    top: tuple[tuple[int, float], ...] = ()


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
        self._noise = Noise(seed)
        allowed = None if matcher is None else matcher.allowed
        self._draw = Draw(settings, self._noise, session.target.vocabulary_size, xtc_exempt, allowed)
        fixed: int | Literal["auto"] = settings.draft_length
        if fixed == "auto" and settings.accept != "coupled":
            fixed = REPRODUCIBLE
        self._fixed = fixed
        speculating = speculates and settings.speculate and fixed != 0
        self._matcher = matcher
        forced = [] if matcher is None else [ForcedDrafter(matcher)]
        self._drafters = [*forced, *session.drafters] if speculating else []
        self.emitted = 0
        """Tokens kept so far; those whose text is still held back are not yielded yet."""
        self._yielded = 0
        self.finish_reason: FinishReason | None = None

    def run(self) -> Iterator[Token]:
        """Yield each token once. The caller puts the session right when the iterator is closed or fails."""
        step: _Step | None = None
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
            chosen = self._read(step)
            seconds += time.perf_counter() - started
            self._stats.verify_s += seconds
            if was_ahead == runs_ahead:
                # Else the time is that of two passes begun, or of what was left of one.
                self._controller.learn_plain(seconds)
            yield from self._emit([chosen], None, 0, in_flight=ahead is not None)
            step = ahead

    def _runs_ahead(self, quiet: int) -> bool:
        """Whether to launch the next pass before this one is read. What a grammar allows there is not known yet."""
        if self._matcher is not None or self._room() <= 1:
            return False
        return not self._drafters or (quiet >= _QUIET and not self._would_propose())

    # Propose

    def _room(self) -> int:
        return self._limit - self.emitted

    def _drafts_allowed(self) -> int:
        # The pass itself adds a token, and has a row for it.
        return min(self._room(), self._session.transaction.rows_allowed()) - 1

    def _propose(self) -> tuple[Proposal | None, float]:
        """The first drafter's proposal that is worth a wider pass, and the seconds it took."""
        started = time.perf_counter()
        limit = self._drafts_allowed()
        proposal = None
        for drafter in self._drafters if limit > 0 else ():
            length = self._controller.before(drafter, min(limit, drafter.longest()), self._fixed)
            offered = self._usable(drafter.propose(length, self._draw)) if length else None
            if offered is not None:
                proposal = self._controller.after(offered, self._fixed) if drafter.free else offered
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
            if offered is not None:
                found = self._controller.after(offered, self._fixed, peek=True) is not None
            else:
                found = length > 0 and not drafter.free
            if found:
                break
        self._stats.draft_s += time.perf_counter() - started
        return found

    def _usable(self, proposal: Proposal | None) -> Proposal | None:
        """The proposal up to the first id that the target lacks, or the grammar forbids; None when nothing is left."""
        if proposal is None:
            return None
        size = self._session.target.vocabulary_size
        known = next((i for i, token in enumerate(proposal.tokens) if not 0 <= token < size), len(proposal.tokens))
        if not known:
            return None
        return proposal.cut(known) if self._matcher is None else self._matcher.cut(proposal.cut(known))

    # Plain decoding

    def _launch(self, token: mx.array, history: Sequence[int]) -> _Step:
        """Start a one-row pass on `token` [1], which may not have been computed yet; `history`: the ids before it."""
        logits = self._forward(token)
        row = self._distribution(logits, token, history)
        noise = self._gumbel(row, [len(history) + 1])
        chosen = row.choose(noise)
        step = _Step(chosen, row.logprob_of(chosen), row.log_probability_of(chosen), row.normalizer, self._top(row))
        mx.async_eval(step.token, step.logprob, step.log_p, step.normalizer, *step.top)  # type: ignore[no-untyped-call]
        return step

    def _read(self, step: _Step) -> _Chosen:
        self._check(_floats(step.normalizer)[0], 0)
        p, top = math.exp(_floats(step.log_p)[0]), ranked(step.top, 1)[0]
        return _Chosen(_ints(step.token)[0], "plain", p, _floats(step.logprob)[0], top=top)

    # Verify and accept

    def _speculative_round(self, proposal: Proposal, draft_s: float) -> Iterator[Token]:
        session, drafts = self._session, proposal.tokens
        started = time.perf_counter()
        fed = mx.array([session.ids[-1], *drafts], mx.uint32)
        logits = self._forward(fed)
        rows = self._distribution(logits, fed, session.ids[:-1])
        if self._settings.accept == "coupled":
            accepted, tokens, log_ps, logprobs = self._accept_coupled(rows, drafts)
        elif self._settings.accept == "rejection":
            accepted, tokens, log_ps, logprobs = self._accept_rejection(rows, proposal)
        else:
            accepted, tokens, log_ps, logprobs = self._accept_block(rows, proposal)
        tops = ranked(self._top(rows), len(tokens))
        seconds = time.perf_counter() - started
        self._stats.verify_s += seconds
        self._controller.learn(proposal, accepted, draft_s, seconds)
        chosen = []
        for i, token in enumerate(tokens):
            p, logprob = math.exp(log_ps[i]), logprobs[i]
            if i < accepted:
                q = 1.0 if proposal.probabilities is None else proposal.probabilities[i]
                chosen.append(_Chosen(token, proposal.source, p, logprob, q, i, proposal.match_length, tops[i]))
            else:
                source: Source = "resampled" if accepted < len(drafts) else "bonus"
                chosen.append(_Chosen(token, source, p, logprob, top=tops[i]))
        yield from self._emit(chosen, proposal, accepted)

    def _accept_coupled(self, rows: Distribution, drafts: list[int]) -> tuple[int, list[int], list[float], list[float]]:
        first = len(self._session.ids)
        chosen = rows.choose(self._gumbel(rows, range(first, first + len(drafts) + 1)))
        log_p, logprob = rows.log_probability_of(chosen), rows.logprob_of(chosen)
        mx.eval(chosen, log_p, logprob, rows.normalizer)
        accepted = accept_coupled(_ints(chosen), drafts)
        self._check_rows(rows, accepted + 1)
        kept = accepted + 1
        return accepted, _ints(chosen)[:kept], _floats(log_p)[:kept], _floats(logprob)[:kept]

    def _accept_rejection(
        self, rows: Distribution, proposal: Proposal
    ) -> tuple[int, list[int], list[float], list[float]]:
        count, p = len(proposal.tokens), rows.probabilities()
        drafts = mx.array(proposal.tokens, mx.uint32)
        passed = _ints(accept_rejection(p, proposal.q, drafts, self._coins(count)))
        accepted = passed.index(0) if 0 in passed else count
        return self._drawn(rows, proposal, accepted, p[accepted])

    def _accept_block(self, rows: Distribution, proposal: Proposal) -> tuple[int, list[int], list[float], list[float]]:
        # The rule looks at all rows at once. Only the drafts up to a row that is not finite are judged: whether the
        # text comes to that row, and so to an error, is then decided like everything else.
        self._check_rows(rows, 1)
        finite = [math.isfinite(normalizer) for normalizer in _floats(rows.normalizer)]
        proposal = proposal.cut(finite.index(False)) if False in finite else proposal
        count, p = len(proposal.tokens), rows.probabilities()
        drafts = mx.array(proposal.tokens, mx.uint32)
        passed = _ints(accept_block(p, proposal.q, drafts, self._coins(count)))
        accepted = max((i + 1 for i, one in enumerate(passed) if one), default=0)
        return self._drawn(rows, proposal, accepted, block_weights(p, proposal.q, drafts)[accepted] * p[accepted])

    def _coins(self, count: int) -> mx.array:
        return self._noise.uniform(round_keys(len(self._session.ids), count))

    def _drawn(
        self, rows: Distribution, proposal: Proposal, accepted: int, weights: mx.array
    ) -> tuple[int, list[int], list[float], list[float]]:
        """The accepted drafts and the token behind them: of `weights`, less what a rejected draft had of them."""
        self._check_rows(rows, accepted + 1)
        drafts = mx.array(proposal.tokens, mx.uint32)
        if accepted < len(proposal.tokens):
            weights = residual(weights, None if proposal.q is None else proposal.q[accepted], drafts[accepted])
        noise = self._noise.gumbel([len(self._session.ids) + accepted], weights.shape[-1], Stream.RESIDUAL)[0]
        final = draw(weights, noise)
        chosen = mx.concatenate([drafts[:accepted], final[None].astype(mx.uint32)])
        kept = Distribution(
            rows.logprobs[: accepted + 1], rows.scores[: accepted + 1], rows.normalizer[: accepted + 1], rows.greedy
        )
        log_p, logprob = kept.log_probability_of(chosen), kept.logprob_of(chosen)
        mx.eval(chosen, log_p, logprob)
        return accepted, _ints(chosen), _floats(log_p), _floats(logprob)

    def _distribution(self, logits: mx.array, fed: mx.array, history: Sequence[int]) -> Distribution:
        """Each row's distribution; its processors see `history` and the tokens fed up to that row, nothing else."""
        settings = self._settings
        logits = penalise(logits, settings, history, fed, self._draw.vocabulary_size)
        processors = settings.logits_processors
        if processors:
            before = mx.array(list(history), mx.uint32)
            rows = []
            for i in range(logits.shape[0]):
                row = logits[i : i + 1]
                seen = mx.concatenate([before, fed[: i + 1].astype(mx.uint32)])
                for processor in processors:
                    row = of_shape(processor(seen, row), logits.shape[-1], processor)
                rows.append(row)
            logits = mx.concatenate(rows)
        coins = self._draw.coins(len(history) + 1, logits.shape[0])
        if self._matcher is not None:
            return self._matcher.distribution(logits, settings, _ints(fed)[1:], coins, self._draw.xtc_exempt)
        return distribution(logits, settings, coins, self._draw.xtc_exempt)

    def _top(self, rows: Distribution) -> tuple[mx.array, ...]:
        return rows.top(self._settings.logprobs) if self._settings.logprobs else ()

    def _gumbel(self, rows: Distribution, positions: Sequence[int]) -> mx.array | None:
        return None if rows.greedy else self._noise.gumbel(positions, rows.scores.shape[-1])

    def _check_rows(self, rows: Distribution, count: int) -> None:
        for i, normalizer in enumerate(_floats(rows.normalizer[:count])):
            self._check(normalizer, i)

    def _check(self, normalizer: float, row: int) -> None:
        if not math.isfinite(normalizer):
            position = len(self._session.ids) + row
            if self._matcher is not None and normalizer == -math.inf:
                raise NumericsError(
                    f"the model rules out each token that the grammar allows at position {position}: all their logits "
                    "are -inf; check logit bias and logits processors"
                )
            place = f"at position {position} are not finite (log-sum-exp {normalizer})"
            if self._settings.changes_logits:
                raise NumericsError(
                    f"the logits {place} after logit bias, penalties and logits processors: these may rule out every "
                    "token or overflow; if the same happens without them, the model's weights may be damaged"
                )
            raise NumericsError(
                f"the model's logits {place}; the weights may be damaged, or their dtype too narrow: "
                "try --dtype float32"
            )

    # Commit and emit

    def _emit(
        self, chosen: list[_Chosen], proposal: Proposal | None, accepted: int, *, in_flight: bool = False
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
            self._stats.by_source[choice.source] = self._stats.by_source.get(choice.source, 0) + 1
        yield from self._release(ready)

    def _forward(self, ids: mx.array) -> mx.array:
        # A close takes back what was not yielded, though it was committed: text may be held back for several rounds.
        self._session.transaction.undecided = self._prompt_length + self._yielded - 1
        return self._session.transaction.forward(ids)

    def _release(self, ready: list[tuple[Token, str]]) -> Iterator[Token]:
        for token, text in ready:
            self._yielded += 1
            yield replace(token, text=text) if text else token


def _ints(values: mx.array) -> list[int]:
    return [int(v) for v in values.tolist()]  # type: ignore[union-attr, arg-type]


def _floats(values: mx.array) -> list[float]:
    return values.tolist()  # type: ignore[return-value]
