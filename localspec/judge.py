"""What a target pass decides: from its logits to tokens, by the settings' sampler and acceptance rule.

Knows nothing of caches, stops or limits: what is kept of a decision is the decoder's business. Where the verify kernel
is in use, whatever it can do is done by it, in plain decoding as in passes with drafts: a generation's tokens must not
come from the kernel here and from MLX's operations there, which may round otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from localspec.acceptance import accept_block, accept_coupled, accept_rejection, block_weights, draw, residual
from localspec.drafters.protocol import Draw, Offer, Proposal
from localspec.errors import NumericsError
from localspec.kernels import truncation, verify
from localspec.kernels.selection import Kernels
from localspec.kernels.truncation import Cutoff, cutoff_reference
from localspec.kernels.verify_reference import Coupled, Judged, coupled_reference, rejection_reference
from localspec.matcher import Matcher
from localspec.noise import Stream, round_keys
from localspec.penalties import of_shape, penalise
from localspec.sampling import Distribution, distribution, ranked
from localspec.tokens import Level, Source


@dataclass(frozen=True, slots=True)
class Step:
    """A one-row pass on its way: lazy arrays of one entry each."""

    token: mx.array
    logprob: mx.array
    log_p: mx.array
    normalizer: mx.array
    top: tuple[mx.array, ...]
    """What `Distribution.top` gave; empty unless `logprobs` asks for it."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """One token that a pass decided, before stops and limits."""

    id: int
    source: Source
    p: float
    logprob: float
    q: float | None = None
    draft_index: int | None = None
    match_length: int | None = None
    level: Level | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What an acceptance rule made of one pass: the accepted drafts and the token behind them."""

    proposal: Proposal
    """The drafts that could be judged."""
    accepted: int
    tokens: list[int]
    log_ps: list[float]
    logprobs: list[float]


class Judge:
    """Decides the tokens of one generation, pass by pass."""

    def __init__(self, draw: Draw, kernels: Kernels, matcher: Matcher | None = None) -> None:
        """`draw`: the settings and the noise, shared with the drafters. `matcher`: where there is a grammar."""
        self._draw = draw
        self._settings = draw.settings
        self._noise = draw.noise
        self._matcher = matcher
        self._kernels = kernels
        settings = draw.settings
        xtc = settings.xtc_probability > 0 and settings.temperature > 0
        self._known = matcher is None and not xtc
        """Whether the kernels know all that these settings ask for, but for the acceptance rule."""
        self._choosing = "verify" if settings.temperature > 0 else "verify-greedy"
        """The kernel that chooses tokens by themselves, and by the coupled rule."""
        # Decided now: a first use may take seconds of tests, which no round is to be charged with.
        if self._fused(self._choosing) or self._judging() is not None:
            self._find()

    def start(self, logits: mx.array, token: mx.array, history: Sequence[int]) -> Step:
        """Begin to compute the token after a pass of `token` [1], which may not have been computed yet.

        logits: [1, vocabulary]; history: the ids before the token.
        """
        if self._fused(self._choosing):
            logits = self._adjusted(logits, token, history)
            found = self._run_coupled(logits, len(history) + 1, None, mx.async_eval)
            top = self._top_of(logits, found.normalizer)
            step = Step(found.tokens, found.logprob, found.log_p, found.normalizer, top)
        else:
            row = self._distribution(logits, token, history)
            chosen = row.choose(self._gumbel(row, [len(history) + 1]))
            step = Step(chosen, row.logprob_of(chosen), row.log_probability_of(chosen), row.normalizer, self._top(row))
        mx.async_eval(step.token, step.logprob, step.log_p, step.normalizer, *step.top)  # type: ignore[no-untyped-call]
        return step

    def finish(self, step: Step, position: int) -> Chosen:
        """The token that `start` began, which stands at `position`. Raises NumericsError, as `decide` does."""
        self._check(_floats(step.normalizer)[0], position)
        p, top = math.exp(_floats(step.log_p)[0]), ranked(step.top, 1)[0]
        return Chosen(_ints(step.token)[0], "plain", p, _floats(step.logprob)[0], top=top)

    def decide(
        self, logits: mx.array, fed: mx.array, history: Sequence[int], offered: Offer
    ) -> tuple[Proposal, int, list[Chosen]]:
        """The drafts that could be judged, how many of them the target accepts, and those with the token behind them.

        logits: [n+1, vocabulary] of a pass of `fed`, integer [n+1]: the last kept token and the n drafts offered.
        history: the ids before `fed`. What was offered is read once the pass has been computed, not before. Raises
        NumericsError where the text comes to a row that is not finite.
        """
        first = len(history) + 1
        drafts = fed[1:]
        judging = self._judging()
        if judging is not None:
            logits = self._adjusted(logits, fed, history)
            verdict, normalizer = judging(logits, offered, drafts, first)
            top = self._top_of(logits, normalizer)
        else:
            rows = self._distribution(logits, fed, history)
            if self._settings.accept == "coupled":
                verdict = self._accept_coupled(rows, offered, first)
            elif self._settings.accept == "rejection":
                verdict = self._accept_rejection(rows, offered, drafts, first)
            else:
                verdict = self._accept_block(rows, offered, drafts, first)
            top = self._top(rows)
        return verdict.proposal, verdict.accepted, _chosen(verdict, ranked(top, len(verdict.tokens)))

    def _fused(self, kernel: str) -> bool:
        return self._known and self._kernels.uses(kernel)

    def _judging(self) -> Callable[[mx.array, Offer, mx.array, int], tuple[_Verdict, mx.array]] | None:
        """What judges drafts by a kernel; None where none does."""
        if self._settings.accept == "coupled":
            return self._fused_coupled if self._fused(self._choosing) else None
        if self._settings.accept == "rejection" and self._settings.temperature > 0:
            return self._fused_rejection if self._fused("verify-rejection") else None
        return None

    def _cutoff(self, logits: mx.array, find: Callable[..., Cutoff]) -> Cutoff | None:
        settings = self._settings
        size = logits.shape[-1]
        sorts = 0 < settings.top_p < 1 or 0 < settings.top_k < size
        if settings.temperature == 0 or not (sorts or settings.min_p > 0):
            return None
        if not sorts:
            find = cutoff_reference  # a maximum: nothing that the kernel would save
        return find(logits, top_p=settings.top_p, min_p=settings.min_p, top_k=settings.top_k)

    def _find(self) -> Callable[..., Cutoff]:
        return truncation.cutoff if self._kernels.uses("truncation") else cutoff_reference

    def _run_coupled(
        self, logits: mx.array, first: int, drafts: mx.array | None, evaluate: Callable[..., None]
    ) -> Coupled:
        def judged(judge: Callable[..., Coupled], find: Callable[..., Cutoff]) -> Coupled:
            cutoff, heat = self._cutoff(logits, find), self._settings.temperature
            return judge(logits, cutoff, temperature=heat, noise=self._noise, position=first, drafts=drafts)

        # What takes the kernel's place has no kernel in it: either of the two may be what failed.
        found: Coupled = self._kernels.run(
            self._choosing,
            lambda: judged(verify.coupled, self._find()),
            lambda: judged(coupled_reference, cutoff_reference),
            evaluate,
        )
        return found

    def _fused_coupled(
        self, logits: mx.array, offered: Offer, drafts: mx.array, first: int
    ) -> tuple[_Verdict, mx.array]:
        """The verdict, and the rows' normalizers."""
        found = self._run_coupled(logits, first, drafts, mx.eval)
        tokens, proposal = _ints(found.tokens), self._read(offered)
        accepted = min(_ints(found.accepted[None])[0], len(proposal))
        kept = accepted + 1
        self._check_rows(found.normalizer, kept, first)
        log_p, logprob = _floats(found.log_p)[:kept], _floats(found.logprob)[:kept]
        return _Verdict(proposal, accepted, tokens[:kept], log_p, logprob), found.normalizer

    def _fused_rejection(
        self, logits: mx.array, offered: Offer, drafts: mx.array, first: int
    ) -> tuple[_Verdict, mx.array]:
        """The verdict, and the rows' normalizers."""

        def judged(judge: Callable[..., Judged], find: Callable[..., Cutoff]) -> Judged:
            cutoff, heat = self._cutoff(logits, find), self._settings.temperature
            return judge(logits, cutoff, drafts, offered.q, temperature=heat, noise=self._noise, position=first)

        found = self._kernels.run(
            "verify-rejection",
            lambda: judged(verify.rejection, self._find()),
            lambda: judged(rejection_reference, cutoff_reference),
        )
        # No draft is accepted whose q is not a number, and the token in its place is then drawn from p.
        accepted, proposal = _ints(found.accepted[None])[0], self._read(offered)
        self._check_rows(found.normalizer, accepted + 1, first)
        verdict = _Verdict(
            proposal,
            accepted,
            [*proposal.tokens[:accepted], _ints(found.tokens)[accepted]],
            [*_floats(found.draft_log_p)[:accepted], _floats(found.log_p)[accepted]],
            [*_floats(found.draft_logprob)[:accepted], _floats(found.logprob)[accepted]],
        )
        return verdict, found.normalizer

    def _accept_coupled(self, rows: Distribution, offered: Offer, first: int) -> _Verdict:
        chosen = rows.choose(self._gumbel(rows, range(first, first + len(offered) + 1)))
        logprob = rows.logprob_of(chosen)
        # At temperature 0 the choice is certain, and there is nothing to work out.
        log_p = mx.zeros_like(logprob) if rows.greedy else rows.log_probability_of(chosen)
        mx.eval(chosen, log_p, logprob, rows.normalizer)
        proposal = self._read(offered)
        accepted = accept_coupled(_ints(chosen), proposal.tokens)
        kept = accepted + 1
        self._check_rows(rows.normalizer, kept, first)
        return _Verdict(proposal, accepted, _ints(chosen)[:kept], _floats(log_p)[:kept], _floats(logprob)[:kept])

    def _accept_rejection(self, rows: Distribution, offered: Offer, drafts: mx.array, first: int) -> _Verdict:
        p = rows.probabilities()
        passed = _ints(accept_rejection(p, offered.q, drafts, self._coins(first, len(offered))))
        proposal = self._read(offered)
        passed = passed[: len(proposal)]
        accepted = passed.index(0) if 0 in passed else len(passed)
        return self._drawn(rows, proposal, drafts, accepted, p[accepted], first)

    def _accept_block(self, rows: Distribution, offered: Offer, drafts: mx.array, first: int) -> _Verdict:
        # The rule looks at all rows at once. Only the drafts up to a row that is not finite are judged: whether the
        # text comes to that row, and so to an error, is then decided like everything else.
        self._check_rows(rows.normalizer, 1, first)
        finite = [math.isfinite(normalizer) for normalizer in _floats(rows.normalizer)]
        proposal, p = self._read(offered), rows.probabilities()
        judged = proposal.cut(finite.index(False)) if False in finite else proposal
        count, accepted, weights = len(judged), 0, p[0]
        if count:
            drafts = drafts[:count]
            passed = _ints(accept_block(p, judged.q, drafts, self._coins(first, count)))
            accepted = max((i + 1 for i, one in enumerate(passed) if one), default=0)
            weights = block_weights(p, judged.q, drafts)[accepted] * p[accepted]
        return replace(self._drawn(rows, judged, drafts, accepted, weights, first), proposal=proposal)

    def _coins(self, first: int, count: int) -> mx.array:
        return self._noise.uniform(round_keys(first, count))

    def _drawn(
        self, rows: Distribution, proposal: Proposal, drafts: mx.array, accepted: int, weights: mx.array, first: int
    ) -> _Verdict:
        """The accepted drafts and the token behind them: of `weights`, less what a rejected draft had of them."""
        self._check_rows(rows.normalizer, accepted + 1, first)
        if accepted < len(proposal):
            weights = residual(weights, None if proposal.q is None else proposal.q[accepted], drafts[accepted])
        noise = self._noise.gumbel([first + accepted], weights.shape[-1], Stream.RESIDUAL)[0]
        final = draw(weights, noise)
        chosen = mx.concatenate([drafts[:accepted], final[None].astype(mx.uint32)])
        kept = Distribution(
            rows.logprobs[: accepted + 1], rows.scores[: accepted + 1], rows.normalizer[: accepted + 1], rows.greedy
        )
        log_p, logprob = kept.log_probability_of(chosen), kept.logprob_of(chosen)
        mx.eval(chosen, log_p, logprob)
        return _Verdict(proposal, accepted, _ints(chosen), _floats(log_p), _floats(logprob))

    def _read(self, offered: Offer) -> Proposal:
        return offered.read(self._draw.vocabulary_size)

    def _distribution(self, logits: mx.array, fed: mx.array, history: Sequence[int]) -> Distribution:
        logits = self._adjusted(logits, fed, history)
        coins = self._draw.coins(len(history) + 1, logits.shape[0])
        if self._matcher is not None:
            return self._matcher.distribution(logits, self._settings, _ints(fed)[1:], coins, self._draw.xtc_exempt)
        return distribution(logits, self._settings, coins, self._draw.xtc_exempt)

    def _adjusted(self, logits: mx.array, fed: mx.array, history: Sequence[int]) -> mx.array:
        """Each row's logits after penalties and processors, which see `history` and the tokens fed up to that row."""
        logits = penalise(logits, self._settings, history, fed, self._draw.vocabulary_size)
        processors = self._settings.logits_processors
        if not processors:
            return logits
        before = mx.array(list(history), mx.uint32)
        rows = []
        for i in range(logits.shape[0]):
            row = logits[i : i + 1]
            seen = mx.concatenate([before, fed[: i + 1].astype(mx.uint32)])
            for processor in processors:
                row = of_shape(processor(seen, row), logits.shape[-1], processor)
            rows.append(row)
        return mx.concatenate(rows)

    def _top(self, rows: Distribution) -> tuple[mx.array, ...]:
        return rows.top(self._settings.logprobs) if self._settings.logprobs else ()

    def _top_of(self, logits: mx.array, normalizer: mx.array) -> tuple[mx.array, ...]:
        if not self._settings.logprobs:
            return ()
        logprobs = logits.astype(mx.float32) - normalizer[:, None]
        return self._top(Distribution(logprobs, logprobs, normalizer, greedy=True))

    def _gumbel(self, rows: Distribution, positions: Sequence[int]) -> mx.array | None:
        return None if rows.greedy else self._noise.gumbel(positions, rows.scores.shape[-1])

    def _check_rows(self, normalizers: mx.array, count: int, first: int) -> None:
        for i, normalizer in enumerate(_floats(normalizers[:count])):
            self._check(normalizer, first + i)

    def _check(self, normalizer: float, position: int) -> None:
        if not math.isfinite(normalizer):
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


def _chosen(verdict: _Verdict, tops: list[tuple[tuple[int, float], ...]]) -> list[Chosen]:
    """The tokens of a verdict with where they came from."""
    chosen, proposal = [], verdict.proposal
    levels: Sequence[Level | None] | None = proposal.levels
    if levels is None:
        levels = ["context" if proposal.source == "ngram" else None] * len(proposal)
    for i, token in enumerate(verdict.tokens):
        p, logprob = math.exp(verdict.log_ps[i]), verdict.logprobs[i]
        if i < verdict.accepted:
            q = 1.0 if proposal.probabilities is None else proposal.probabilities[i]
            chosen.append(Chosen(token, proposal.source, p, logprob, q, i, proposal.match_length, levels[i], tops[i]))
        else:
            source: Source = "resampled" if verdict.accepted < len(proposal) else "bonus" if len(proposal) else "plain"
            chosen.append(Chosen(token, source, p, logprob, top=tops[i]))
    return chosen


def _ints(values: mx.array) -> list[int]:
    return [int(v) for v in values.tolist()]  # type: ignore[union-attr, arg-type]


def _floats(values: mx.array) -> list[float]:
    return values.tolist()  # type: ignore[return-value]
