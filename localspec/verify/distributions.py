"""Whether the acceptance rules leave the target's distribution as it is, by counting what they draw.

The probabilities come from rows of the loaded model's own logits. What is expected of them is computed here in float64,
by other code than the engine's; what is drawn comes from the engine's functions and its noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import mlx.core as mx
import numpy as np

from localspec import acceptance, noise
from localspec.drafters.rehearsed import Rehearsed
from localspec.drafters.small_model import ModelDrafter
from localspec.engine import Engine
from localspec.noise import Stream
from localspec.sampling import Distribution, distribution
from localspec.settings import MAX_SEED, Settings
from localspec.verify.markov import Markov, strings
from localspec.verify.odds import chi_square

if TYPE_CHECKING:
    from localspec.drafters.protocol import Drafter

DRAWS, STRINGS = 40_000, 900
"""Outcomes of each rule, and answers decoded for each joint distribution."""
_LEAST = 20
"""Outcomes that expect less are counted together: the chi-square tail is to be believed far out."""
_SEEDS = 16
_COLUMNS, _KEPT = 24, 12
"""Tokens that the draws are made among, and how many of them the target's filter keeps."""
_ALPHABET = 4
_HEAT = 0.9
_SPREAD = 1.2
"""Standard deviation that the logits of whole rounds are scaled to, so that drafts get kept and rejected often."""

Rule = Literal["coupled", "rejection", "block"]
RULES: tuple[Rule, ...] = get_args(Rule)


@dataclass(frozen=True, slots=True)
class Check:
    """One distribution that was counted."""

    rule: Rule
    name: str
    draws: int
    p_value: float
    """How likely counts as far from expected are when the rule is right; 0 or 1 where chance has no say."""

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def checks(logits: np.ndarray, *, seed: int, quick: bool) -> list[Callable[[], Check]]:
    """The checks, to be called in turn. `logits`: float32 [rows, vocabulary], of rows of the loaded model."""
    # What a model rules out with -inf is far out of reach already here.
    logits = np.maximum(logits, logits.max(axis=-1, keepdims=True) - 60.0)
    draws, answers = (DRAWS // 2, STRINGS // 3) if quick else (DRAWS, STRINGS)
    found: list[Callable[[], Check]] = [check_edges]
    for pair in _pairs(logits):
        found += [partial(rule, pair, draws, seed) for rule in (coupled, rejection, rejection_of_certain_drafts)]
    target, draft = _tables(logits)
    found += [
        partial(rounds, target, draft, rule, sampled, answers, seed) for rule in RULES for sampled in (True, False)
    ]
    return found


@dataclass(frozen=True, slots=True)
class Pair:
    """A target's and a draft's distribution over the same few tokens."""

    name: str
    target: Distribution
    """One row."""
    draft: Distribution
    expected: np.ndarray
    """The target's probabilities, float64."""


def check_edges() -> Check:
    """Coins at both ends: a token of probability 0 is never accepted, one that is at least as likely as drafted is."""
    p = mx.array([[0.0, 0.5, 0.5]] * 3)
    q = mx.array([[0.5, 0.25, 0.25]] * 3)
    drafts, least, most = mx.array([0, 1, 2], mx.uint32), mx.zeros((3,)), mx.full((3,), 1 - 2.0**-24)
    right = all(
        acceptance.accept_rejection(p, given, drafts, coins).tolist() == expected
        for given, coins, expected in (
            (q, least, [False, True, True]),
            (q, most, [False, True, True]),
            (None, least, [False, True, True]),
            (None, most, [False, False, False]),
        )
    )
    # Rejected through rounding only, nothing is left to draw from: then the target itself, not a uniform draw.
    right = right and bool(mx.array_equal(acceptance.residual(p[0], p[0], drafts[1]), p[0]))
    return Check("rejection", "coins at both ends", 0, float(right))


def coupled(pair: Pair, draws: int, seed: int) -> Check:
    """The token that comes out when target and draft are drawn with one noise."""
    out = []
    for shared in _noise(pair, draws, seed, Stream.GUMBEL):
        tokens, drafts = _ints(pair.target.choose(shared)), _ints(pair.draft.choose(shared))
        for token, draft in zip(tokens, drafts, strict=True):
            # With the draft accepted, it is the draft that is emitted.
            out.append(draft if acceptance.accept_coupled([token, token], [draft]) else token)
    return _check("coupled", pair, out)


def rejection(pair: Pair, draws: int, seed: int) -> Check:
    """The token that comes out for drafts drawn from q."""
    q = pair.draft.probabilities()
    out: list[int] = []
    sources = (_noise(pair, draws, seed, stream) for stream in (Stream.DRAFT, Stream.RESIDUAL))
    for number, (drafting, drawing) in enumerate(zip(*sources, strict=True)):
        drafts = pair.draft.choose(drafting)
        out += _ints(_reject(pair, q, drafts, _seed(seed, number), drawing))
    return _check("rejection", pair, out)


def rejection_of_certain_drafts(pair: Pair, draws: int, seed: int) -> Check:
    """The token that comes out for a draft that is always the same."""
    favourite = mx.argmax(pair.draft.scores, axis=-1)
    out: list[int] = []
    for number, drawing in enumerate(_noise(pair, draws, seed, Stream.RESIDUAL)):
        drafts = mx.broadcast_to(favourite, drawing.shape[:1])
        out += _ints(_reject(pair, None, drafts, _seed(seed, number), drawing))
    return _check("rejection", pair, out, ", certain drafts")


def rounds(target: np.ndarray, draft: np.ndarray, accept: Rule, sampled: bool, answers: int, seed: int) -> Check:
    """Three tokens of the whole engine, over two drafts and what follows them, against all that can be said.

    target, draft: tables of logits for Markov. sampled: drafts by a model, else the target's favourites.
    """
    first = int(target[0].argmax())
    prompt = [1, 0]
    favourites = [first, int(target[first].argmax())]
    drafter: Drafter = ModelDrafter(Markov(draft)) if sampled else Rehearsed([*prompt, *favourites], mistakes=False)
    engine = Engine(Markov(target), drafters=[drafter], name="what the model's logits say")
    session = engine.new_session()
    counts = np.zeros((len(target),) * 3)
    for number in range(answers):
        settings = Settings(
            max_tokens=3,
            temperature=_HEAT,
            seed=_seed(seed, number),
            accept=accept,
            exact="off",
            draft_length=2,
        )
        counts[tuple(engine.generation(session, prompt, settings).run().ids)] += 1
    p_value = chi_square(counts, strings(target, _HEAT, prompt[-1]), least=_LEAST / 2)
    return Check(
        accept, f"three tokens of whole rounds, {'sampled' if sampled else 'certain'} drafts", answers, p_value
    )


def _reject(pair: Pair, q: mx.array | None, drafts: mx.array, seed: int, drawing: mx.array) -> mx.array:
    """One token per draft, as a round with one draft decides it."""
    count, size = drawing.shape
    p = pair.target.probabilities()
    coins = noise.uniform(noise.bits(seed, Stream.COIN, range(count), 1))[:, 0]
    rows = mx.broadcast_to(p, (count, size))
    passed = acceptance.accept_rejection(rows, None if q is None else mx.broadcast_to(q, (count, size)), drafts, coins)
    left = mx.stack(
        [acceptance.residual(p[0], None if q is None else q[0], mx.array(draft, mx.uint32)) for draft in range(size)]
    )
    return mx.where(passed, drafts, acceptance.draw(left[drafts], drawing))


def _noise(pair: Pair, draws: int, seed: int, stream: Stream) -> Iterator[mx.array]:
    """Gumbel noise [draws of one seed, tokens], for several seeds."""
    each, size = draws // _SEEDS, pair.target.scores.shape[-1]
    for number in range(_SEEDS):
        yield noise.gumbel(noise.bits(_seed(seed, number), stream, range(each), size))


def _check(rule: Rule, pair: Pair, out: Sequence[int], also: str = "") -> Check:
    counts = np.bincount(out, minlength=len(pair.expected))
    return Check(rule, pair.name + also, len(out), chi_square(counts, pair.expected, least=_LEAST))


def _pairs(logits: np.ndarray) -> list[Pair]:
    """The row that the model is least sure of with a flatter draft, and a usual one with another row as its draft."""
    unsure, usual = _chosen(logits)[:2]
    return [
        _pair("a flatter draft", logits[unsure], logits[unsure], 2.0),
        _pair("another row's draft", logits[usual], logits[unsure], 1.5),
    ]


def _pair(name: str, target: np.ndarray, draft: np.ndarray, heat: float) -> Pair:
    columns = np.sort(np.argsort(-target, kind="stable")[:_COLUMNS])
    row = target[columns]
    kept = np.argsort(-row, kind="stable")[:_KEPT]
    expected = np.zeros(len(columns))
    expected[kept] = np.exp(row[kept].astype(np.float64) - row.max())
    return Pair(
        name,
        distribution(mx.array(row[None]), Settings(temperature=1.0, top_k=_KEPT)),
        distribution(mx.array(draft[columns][None]), Settings(temperature=heat)),
        expected / expected.sum(),
    )


def _tables(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two tables of logits among a few tokens, for a target and for a draft that is often right."""
    order = _chosen(logits)
    columns = np.sort(np.argsort(-logits[order[0]], kind="stable")[:_ALPHABET])
    size = len(columns)
    rows = [_scaled(logits[order[i % len(order)]][columns]) for i in range(2 * size)]
    target, other = np.stack(rows[:size]), np.stack(rows[size:])
    return target, 0.7 * target + 0.6 * other


def _scaled(row: np.ndarray) -> np.ndarray:
    centred: np.ndarray = row - row.mean()
    scaled: np.ndarray = centred * (_SPREAD / max(float(centred.std()), 1e-6))
    return scaled


def _chosen(logits: np.ndarray) -> list[int]:
    """Rows from the least sure one on, then the one in the middle, then all others by how unsure they are."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    p = np.exp(shifted)
    p /= p.sum(axis=-1, keepdims=True)
    entropy = -(p * np.where(p > 0, np.log(np.maximum(p, 1e-30)), 0.0)).sum(axis=-1)
    order = [int(i) for i in np.argsort(-entropy, kind="stable")]
    return [order[0], order[len(order) // 2], *order[1 : len(order) // 2], *order[len(order) // 2 + 1 :]]


def _seed(seed: int, number: int) -> int:
    return (seed + number) % (MAX_SEED + 1)


def _ints(values: mx.array) -> list[int]:
    return [int(v) for v in values.tolist()]  # type: ignore[union-attr, arg-type]
