"""One generation: an iterator of tokens that carries its own record."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import replace
from weakref import proxy

from localspec.controller import Controller
from localspec.decoder import Decoder, FinishReason
from localspec.exactness import Exactness
from localspec.kernels.selection import Kernels
from localspec.matcher import Matcher
from localspec.noise import fresh_seed
from localspec.rows import RowClass
from localspec.session import Session
from localspec.settings import Settings
from localspec.stats import Stats
from localspec.text import DetokenizerFactory, TextStream
from localspec.tokens import Round, Token


class _PromptStopped(Exception):
    """`stop` was called while the prompt was read."""


class Generation(Iterator[Token]):
    """Iterate to decode. The attributes are live while it runs and stay valid afterwards.

    However it ends (a stop, the limit, `close`, an exception, an abandoned loop), the session holds exactly the prompt
    and the tokens that were yielded, or nothing where an exception left caches that cannot be computed.
    """

    def __init__(
        self,
        session: Session,
        prompt: list[int],
        settings: Settings,
        *,
        end_ids: frozenset[int],
        context_length: int | None,
        texts: DetokenizerFactory,
        controller: Controller,
        exactness: Callable[[Settings], Exactness],
        kernels: Kernels,
        matcher: Matcher | None = None,
        on_end: Callable[[Generation], None] | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
        xtc_exempt: tuple[int, ...] = (),
    ) -> None:
        """`exactness` may measure, and is asked when decoding begins. `on_end` is called once the session is right
        again; `on_prefill(done, of)` reports prompt processing. `matcher`: a new one, where there is a grammar.
        `xtc_exempt`: ids that XTC never drops."""
        self.seed = fresh_seed() if settings.seed is None else settings.seed
        """The seed in use, picked if none was given."""
        self.settings = replace(settings, seed=self.seed)
        self.stats = Stats(prompt_tokens=len(prompt))
        self.rounds: list[Round] = []
        self.tokens: list[Token] = []
        """Tokens yielded so far."""
        self.prompt_ids = prompt
        self.finish_reason: FinishReason | None = None
        """`stop` or `length`; None while it runs, and when it was closed early."""
        self.exactness: str | None = None
        """How far these ids equal those without speculation, in one line; None before the first token is asked for."""
        self.failed = False
        """Whether an exception ended it,"""
        self.interrupted = False
        """and whether that was Ctrl-C."""
        self._session = session
        self._end_ids = end_ids
        self._context_length = context_length
        self._texts = texts
        self._controller = controller
        self._ask_exactness = exactness
        self._matcher = matcher
        self._kernels = kernels
        self._on_end = on_end
        self._on_prefill = on_prefill
        self._xtc_exempt = xtc_exempt
        self._stop_asked = False
        # Weakly: with a reference to this object in its frame the generator would form a cycle with it, and an
        # abandoned loop would be put right at some later garbage collection, in any thread, instead of at once.
        self._steps = Generation._run(proxy(self))
        session.occupy(self.close)

    @property
    def ids(self) -> list[int]:
        """The ids yielded so far, an end token included."""
        return [token.id for token in self.tokens]

    @property
    def text(self) -> str:
        """The text yielded so far."""
        return "".join(token.text for token in self.tokens)

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> Token:
        return next(self._steps)

    def close(self) -> None:
        """Stop here and keep what was yielded. Call it from the thread that decodes."""
        self._steps.close()

    def stop(self) -> None:
        """Have it end after the round, or the chunk of the prompt, that is running; from any thread.

        What was decided by then is still yielded; `finish_reason` stays None.
        """
        self._stop_asked = True

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_steps"):
            # Freed as part of a cycle, the weak reference in the generator's frame is dead already; the session finds
            # out by itself that its caches hold more than its tokens.
            with suppress(ReferenceError):
                self._steps.close()

    def run(self) -> Generation:
        """Decode to the end."""
        for _ in self:
            pass
        return self

    def _limit(self, row_class: RowClass | None = None) -> int:
        limit = self.settings.max_tokens
        context = self._context_length
        positions = self._session.target.positions
        if row_class is not None and positions is not None:
            # The last pass has filler rows behind its own, which need positions as well.
            usable = positions - (row_class.sizes[0] - 1)
            context = usable if context is None else min(context, usable)
        room = None if context is None else context - len(self.prompt_ids)
        if limit is None:
            return 2**31 if room is None else room
        return limit if room is None else min(limit, room)

    def _run(self) -> Generator[Token, None, None]:
        started = time.perf_counter()
        if self._limit() <= 0:
            self.finish_reason = "length"
            self._end()
            return
        decoder, settled = None, False
        try:
            exactness = self._ask_exactness(self.settings)
            self.exactness = exactness.line
            limit = self._limit(exactness.row_class)
            if limit <= 0:
                self.finish_reason, settled = "length", True
                return
            self._prefill(started)
            decoder = Decoder(
                self._session,
                self.settings,
                seed=self.seed,
                end_ids=self._end_ids,
                limit=limit,
                text=TextStream(self._texts.new(), self.settings.stop),
                controller=self._controller,
                stats=self.stats,
                rounds=self.rounds,
                stopping=lambda: self._stop_asked,
                row_class=exactness.row_class,
                speculates=exactness.speculates,
                xtc_exempt=self._xtc_exempt,
                matcher=self._matcher,
                kernels=self._kernels,
            )
            for token in decoder.run():
                self.stats.total_s = time.perf_counter() - started
                if not self.tokens:
                    self.stats.ttft_s = self.stats.total_s
                self.tokens.append(token)
                if decoder.finish_reason is not None and decoder.emitted == len(self.tokens):
                    self.finish_reason = decoder.finish_reason
                yield token
        except GeneratorExit:
            self._keep()
            settled = True
            raise
        except _PromptStopped:
            settled = True
        except BaseException as error:
            self.failed, self.interrupted = True, isinstance(error, KeyboardInterrupt)
            self._session.recover(len(self.prompt_ids) + len(self.tokens))
            settled = True
            raise
        else:
            self._keep()
            settled = True
        finally:
            try:
                if not settled:  # an interrupt while it was being settled
                    self._session.recover(len(self.prompt_ids) + len(self.tokens))
                self._count_what_was_yielded()
            finally:
                self._end()

    def _prefill(self, started: float) -> None:
        total = len(self.prompt_ids)

        def report(left: int) -> None:
            if self._on_prefill is not None:
                self._on_prefill(total - left, total)
            if self._stop_asked:
                raise _PromptStopped

        self.stats.reused_tokens = self._session.prepare(self.prompt_ids, report)
        self.stats.prefill_s = time.perf_counter() - started

    def _keep(self) -> None:
        try:
            self._session.truncate(len(self.prompt_ids) + len(self.tokens))
        except BaseException:
            self.failed = True
            self._session.clear()
            raise

    def _count_what_was_yielded(self) -> None:
        """After an early end: rounds and counts without the tokens that were decided but not yielded."""
        if self.stats.emitted != len(self.tokens):
            self.rounds[:] = self.stats.recount(self.rounds, self.tokens)

    def _end(self) -> None:
        if self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            on_end(self)
