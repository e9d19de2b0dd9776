"""What a drafter is: something that guesses the next tokens. It never decides what is emitted."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from localspec.hidden import Tap
from localspec.noise import Noise, Stream
from localspec.settings import Settings
from localspec.tokens import Level, Source

if TYPE_CHECKING:
    from localspec.transaction import Transaction


NO_BOUND = 2**31
"""What `Drafter.longest` says where nothing but the round limits a proposal."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens, and the distribution that each was really drawn from."""

    tokens: list[int]
    source: Source
    q: mx.array | None = None
    """Float32 [len(tokens), vocabulary]; None when the drafter is deterministic (one-hot q)."""
    probabilities: list[float] | None = None
    """q of each draft token; None means 1.0 each."""
    match_length: int | None = None
    """n-gram drafts: tokens that matched before the first of them, at its level."""
    confidence: list[float] | None = None
    """Predicted chance of each draft to be accepted when those before it were; None where the drafter has no idea."""
    levels: list[Level] | None = None
    """n-gram drafts: where each token was found; None means in the context, all of them."""

    def __len__(self) -> int:
        """How many rows it takes in a pass."""
        return len(self.tokens)

    def after(self, newest: int) -> mx.array:
        """What a verify pass is fed, uint32 [len(self) + 1]: the newest kept token, then the drafts."""
        return mx.array([newest, *self.tokens], mx.uint32)

    def read(self, vocabulary_size: int) -> Proposal:
        """The drafts before the first that is no id of the target; empty when that is the first one."""
        unknown = (i for i, token in enumerate(self.tokens) if not 0 <= token < vocabulary_size)
        return self.cut(next(unknown, len(self.tokens)))

    def cut(self, length: int) -> Proposal:
        """The same proposal with at most `length` tokens."""
        if length >= len(self.tokens):
            return self
        return Proposal(
            self.tokens[:length],
            self.source,
            None if self.q is None else self.q[:length],
            None if self.probabilities is None else self.probabilities[:length],
            self.match_length,
            None if self.confidence is None else self.confidence[:length],
            None if self.levels is None else self.levels[:length],
        )


@dataclass(frozen=True, slots=True)
class UnreadProposal:
    """A proposal that the device may still be computing.

    A verify pass is fed its ids before the host knows them, so that the device goes from the drafts to the pass without
    waiting for anybody. Reading it (`tokens`, `probabilities`, `read`) waits for the device; nothing else does.
    """

    ids: mx.array
    """Uint32 [n]; each below the target's vocabulary size, which nobody checks before the pass."""
    source: Source
    q: mx.array | None = None
    """As in Proposal."""
    chances: mx.array | None = None
    """q of each draft token, float32 [n]; None means 1.0 each. Not finite where the drafter's logits are not."""

    @property
    def confidence(self) -> None:
        """Nothing is predicted."""

    @property
    def tokens(self) -> list[int]:
        """The ids, once the device has them."""
        return self.ids.tolist()  # type: ignore[return-value]

    @property
    def probabilities(self) -> list[float] | None:
        """As in Proposal, once the device has them."""
        return None if self.chances is None else self.chances.tolist()  # type: ignore[return-value]

    def __len__(self) -> int:
        """How many rows it takes in a pass; waits for nothing."""
        return self.ids.shape[0]

    def after(self, newest: int) -> mx.array:
        """As in Proposal; waits for nothing."""
        return mx.concatenate([mx.array([newest], mx.uint32), self.ids])

    def read(self, vocabulary_size: int) -> Proposal:
        """The drafts before the first that is no guess or no id of the target; empty when that is the first one.

        A token is no guess any more, and q no distribution, where the drafter's logits were not finite.
        """
        tokens, chances = self.tokens, self.probabilities
        proposal = Proposal(tokens, self.source, self.q, chances).read(vocabulary_size)
        unsound = (i for i, chance in enumerate(chances or ()) if not math.isfinite(chance))
        return proposal.cut(next(unsound, len(tokens)))


Offer = Proposal | UnreadProposal
"""What a drafter may answer with."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What a drafter that samples must know to draw in step with the target."""

    settings: Settings
    noise: Noise
    vocabulary_size: int
    """The target's: proposed ids must be below it, and q has as many columns."""
    xtc_exempt: tuple[int, ...] = ()
    """Ids that XTC never drops."""
    allowed: Callable[[Sequence[int]], NDArray[np.bool_] | None] | None = None
    """Under a grammar: which ids may follow the context and these drafts, bool [vocabulary_size]; None at the end of
    the text. A drafter need not ask: what is not allowed is cut off its proposal."""

    def coins(self, position: int, rows: int) -> mx.array | None:
        """XTC's coin for each of `rows` positions from `position` on, float32 [rows]; None where it is not used.

        The same for plain decoding, verification and drafters, whichever asks first.
        """
        if self.settings.xtc_probability == 0 or self.settings.temperature == 0:
            return None
        return self.noise.uniform(range(position, position + rows), Stream.XTC)


class Drafter(ABC):
    """Guesses continuations of a context that it follows token by token."""

    name: Source
    free: bool = False
    """Whether proposing costs next to nothing, so that a proposal may be asked for and thrown away."""
    taps: tuple[Tap, ...] = ()
    """Hidden states of the target that it reads; only those of some drafter are kept."""

    def __init__(self) -> None:
        self.context: list[int] = []

    @abstractmethod
    def fresh(self) -> Drafter:
        """Another drafter of this kind (and weights) with an empty context: each session has its own."""

    @abstractmethod
    def propose(self, length: int, draw: Draw) -> Offer | None:
        """At most `length` tokens to follow the context; None when there is no good guess. `length` is at least 1."""

    def takes_part(self, settings: Settings) -> bool:
        """Asked as a generation of these settings begins: whether it may propose in it."""
        return True

    def longest(self) -> int:
        """Most tokens it could propose now; 0 when it cannot take part."""
        return NO_BOUND

    @abstractmethod
    def commit(self, tokens: Sequence[int]) -> None:
        """Append kept tokens to the context. Implementations extend `self.context`."""

    def reset(self) -> None:
        """Forget the context."""
        self.context = []

    def rewind(self, length: int) -> None:
        """Go back to the first `length` tokens of the context."""
        kept = self.context[:length]
        self.reset()
        self.commit(kept)

    def follow(self, ids: Sequence[int]) -> None:
        """Make `ids` the context; usually they extend it."""
        shared = len(self.context)
        if shared > len(ids) or self.context != ids[:shared]:
            self.rewind(common_prefix(self.context, ids))
            shared = len(self.context)
        self.commit(ids[shared:])

    def watch(self, transaction: Transaction) -> None:  # noqa: B027 - most drafters have no taps
        """From now on the session's caches are those of `transaction`, and the hidden states of its taps are in there.

        Called whenever the session starts with empty caches, if any of its drafters has taps. While a proposal is asked
        for, both are those of the context without its newest token; only the newest hidden states are remembered.
        """

    def settle(self) -> None:  # noqa: B027 - most drafters leave nothing to the device
        """Have everything computed that was left to the device, in the thread that began it: the next call may come
        from another one."""

    def check(self, target: Any, tokenizer: Any) -> None:  # noqa: B027 - most drafters fit any target
        """Raise IncompatibleDrafterError when this drafter cannot serve the target."""


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    for i in range(n):
        if a[i] != b[i]:
            return i
    return n
