"""The tokens of one context, the caches that hold them, and the drafters that watch them.

A session outlives a generation: the next prompt reuses whatever prefix of it the caches hold already. Knows nothing of
text, sampling or chat templates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakMethod

from localspec.drafters.protocol import Drafter, common_prefix
from localspec.errors import CacheError
from localspec.hidden import HiddenStates
from localspec.target import Target
from localspec.transaction import Transaction


class Session:
    """Invariant between rounds: the caches hold `ids` without the newest, which is the first row of the next pass."""

    def __init__(self, target: Target, drafters: Sequence[Drafter]) -> None:
        self.target = target
        self.drafters = list(drafters)
        self.ids: list[int] = []
        self._close_user: WeakMethod[Callable[[], None]] | None = None
        self._fresh_caches()

    def occupy(self, close: Callable[[], None]) -> None:
        """Note the `close` method of the generation that uses this session from now on; it is referred to weakly."""
        self.release()
        self._close_user = WeakMethod(close)

    def release(self) -> None:
        """Close the generation that uses this session, if it was left unfinished: two would disturb each other."""
        close = None if self._close_user is None else self._close_user()
        self._close_user = None
        if close is not None:
            close()

    def prepare(self, prompt: Sequence[int], progress: Callable[[int], None] | None = None) -> int:
        """Make `prompt` the context, computing what the caches do not hold; returns how many tokens were reused.

        `progress` is called with the tokens still to be computed, after each chunk and before the first.
        After an exception the session holds what was computed by then, or nothing; never anything wrong.
        """
        last = len(prompt) - 1
        reused = min(common_prefix(self.ids[: self.transaction.held], prompt), last)
        try:
            if not self.transaction.rewind(reused):
                self._fresh_caches()
                reused = 0
        except BaseException:
            self.clear()  # on the way back the caches hold neither the old tokens nor the prompt's
            raise
        try:
            missing = last - reused
            if progress is not None:
                progress(missing)
            self.transaction.prefill(prompt[reused:last], None if progress is None else lambda n: progress(missing - n))
            self.ids = list(prompt)
            for drafter in self.drafters:
                drafter.follow(self.ids)
        except BaseException:
            self._recover_prefix(prompt)
            raise
        return reused

    def extend(self, tokens: Sequence[int]) -> None:
        """Append kept tokens, whose rows the caches must hold but for the newest."""
        self.ids.extend(tokens)
        for drafter in self.drafters:
            drafter.commit(tokens)

    def truncate(self, length: int) -> None:
        """Forget everything after the first `length` tokens, in the caches too.

        Where the caches cannot go back that far, the session starts over.
        """
        if not self.transaction.rewind(min(self.transaction.held, max(length - 1, 0))):
            self.clear()
        if length < len(self.ids):
            del self.ids[length:]
            for drafter in self.drafters:
                drafter.rewind(length)
        # Evaluated here, in the thread that built them: the next turn may come from another one.
        self.transaction.evaluate()
        for drafter in self.drafters:
            drafter.settle()

    def recover(self, length: int) -> None:
        """After an exception anywhere in a round: truncate to `length` tokens, or start over where that fails too.

        It fails when arrays in the caches belong to the pass that failed: only computing them can tell.
        """
        try:
            self.transaction.abort()
            self.truncate(min(length, self.transaction.length + 1))
            for drafter in self.drafters:
                if drafter.free:
                    drafter.reset()  # it may have been interrupted anywhere, and begins afresh at next to no cost
                else:
                    drafter.rewind(len(self.ids))  # what it drafted for the round that failed goes, too
        except (RuntimeError, ValueError, CacheError):
            self.clear()
        except BaseException:
            self.clear()
            raise

    def _recover_prefix(self, prompt: Sequence[int]) -> None:
        try:
            self.transaction.abort()
            self.transaction.evaluate()
            self.ids = list(prompt[: self.transaction.length])
        except (RuntimeError, ValueError, CacheError):
            self.clear()
        except BaseException:
            self.clear()
            raise

    def clear(self) -> None:
        """Start over with empty caches."""
        self.ids = []
        self._fresh_caches()
        for drafter in self.drafters:
            drafter.reset()

    def _fresh_caches(self) -> None:
        taps = [tap for drafter in self.drafters for tap in drafter.taps]
        hidden = HiddenStates(self.target.model, taps) if taps else None
        self.transaction = Transaction(self.target, hidden=hidden)
        if hidden is not None:
            for drafter in self.drafters:
                drafter.watch(self.transaction)
