"""How many drafts each acceptance rule keeps, on the same text: `python -m localspec.bench.acceptance [MODEL]`.

The model answers prompts of the bench by plain sampling. At places along the answers drafters propose a few tokens,
and one target pass over them gives p. What a rule would keep is then computed, not drawn: given a draft, the chance
that its first i tokens are all accepted is a formula in p and q (`docs/acceptance.md`). So the rules are compared on
the same drafts, and coins add no noise to the comparison.

Nothing here is about time.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from localspec.bench.run import encode
from localspec.bench.workloads import choose_workloads
from localspec.drafters.protocol import Drafter, Draw
from localspec.errors import LocalspecError, SettingsError
from localspec.settings import MAX_DRAFT_LENGTH, Settings

if TYPE_CHECKING:
    import mlx.core as mx

    from localspec.engine import Engine

RULES = ("coupled", "rejection", "block")
_GROUP = 64
"""Weights that share a scale and an offset where a draft is the target with rounded weights."""


@dataclass(slots=True)
class Kept:
    """What the rules keep of one drafter's proposals."""

    drafter: str
    draft_length: int
    chances: dict[str, list[list[float]]] = field(default_factory=lambda: {rule: [] for rule in RULES})
    """Per rule and proposal: entry i is the chance that at least i+1 drafts are kept."""

    @property
    def proposals(self) -> int:
        return len(self.chances[RULES[0]])

    def at_least(self, rule: str) -> list[float]:
        """Entry i: the share of proposals of which at least i+1 drafts are kept."""
        found = self.chances[rule]
        return [math.fsum(chances[i] for chances in found) / len(found) for i in range(self.draft_length)]

    def mean(self, rule: str) -> float:
        """Drafts kept per proposal."""
        return math.fsum(self.at_least(rule))

    def error(self, rule: str, other: str | None = None) -> float:
        """Standard error of the mean, or of its difference to another rule's on the same drafts."""
        values = [math.fsum(chances) for chances in self.chances[rule]]
        if other is not None:
            values = [a - math.fsum(b) for a, b in zip(values, self.chances[other], strict=True)]
        n = len(values)
        mean = math.fsum(values) / n
        return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n) if n > 1 else math.nan

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        rules = {
            rule: {"mean": self.mean(rule), "error": self.error(rule), "at_least": self.at_least(rule)}
            for rule in RULES
            if self.proposals > 1
        }
        return {"drafter": self.drafter, "proposals": self.proposals, "rules": rules}


def keep_chances(p: mx.array, q: mx.array | None, drafts: mx.array) -> dict[str, list[float]]:
    """Per rule: the chance that the first i drafts are kept, given what they are, for i = 1 to n.

    Given the first i, not those behind them, by which the block rule judges too: on average its chances fall with i, in
    one proposal they need not.

    p: the target's probabilities, float32 [n, vocabulary] or more rows; q: the draft's, float32 [n, vocabulary], None
    for deterministic drafts; drafts: ids [n].
    """
    import mlx.core as mx

    from localspec.acceptance import block_weights

    ids = drafts[:, None].astype(mx.int32)
    n = ids.shape[0]
    p = p[:n]
    p_draft = mx.take_along_axis(p, ids, axis=-1)
    if q is None:
        token = shared = p_draft[:, 0]
    else:
        q_draft = mx.take_along_axis(q, ids, axis=-1)
        token = mx.minimum(p_draft / q_draft, 1.0)[:, 0]
        # Both choose x when g(x) - g(y) is at least log p(y)/p(x) and log q(y)/q(x) for every y.
        scaled = mx.where(p_draft > 0, p * (q_draft / p_draft), math.inf)
        shared = 1.0 / mx.maximum(scaled, q).sum(axis=-1)
    found = {
        "coupled": mx.cumprod(shared),
        "rejection": mx.cumprod(token),
        "block": block_weights(p, q, drafts)[1:],
    }
    return {rule: chances.tolist() for rule, chances in found.items()}  # type: ignore[misc]


def measure(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    drafters: dict[str, Drafter],
    *,
    draft_length: int = 4,
    tokens: int = 32,
    stride: int = 4,
    **sampling: Any,
) -> list[Kept]:
    """Let every drafter propose at each `stride`-th token of plain answers of `tokens` tokens.

    `sampling`: temperature, filters and seed, for target and drafts alike. A drafter that proposes fewer tokens than
    asked for at some place, or none, is left out there.
    """
    import mlx.core as mx

    from localspec.noise import Noise
    from localspec.sampling import distribution

    settings = Settings.from_keywords(
        accept="block", **sampling
    )  # with it drafters hand over q, and draw by themselves
    draw = Draw(settings, Noise(settings.seed or 0), engine.target.vocabulary_size)
    kept = [Kept(name, draft_length) for name in drafters]
    for prompt in prompts:
        plain = engine.generate(prompt, speculate=False, max_tokens=tokens, exact="off", **sampling).ids
        session = engine.new_session()
        for start in range(0, len(plain), stride):
            context = [*prompt, *plain[:start]]
            session.prepare(context)
            for one, drafter in zip(kept, drafters.values(), strict=True):
                drafter.follow(context)
                proposal = drafter.propose(draft_length, draw)
                if proposal is None or len(proposal.tokens) < draft_length:
                    continue
                fed = mx.array([context[-1], *proposal.tokens[:-1]], mx.uint32)
                p = distribution(session.transaction.forward(fed), settings).probabilities()
                found = keep_chances(p, proposal.q, mx.array(proposal.tokens, mx.uint32))
                session.transaction.commit(len(context) - 1)
                for rule, chances in found.items():
                    one.chances[rule].append(chances)
    return kept


def rounded(model: Any, bits: int) -> Any:
    """A copy of a model whose matrices were rounded to so many bits per weight, and are computed with as before."""
    import mlx.core as mx
    from mlx.utils import tree_map

    def coarse(weights: mx.array) -> mx.array:
        if weights.ndim != 2 or weights.shape[-1] % _GROUP:
            return weights
        packed = mx.quantize(weights, group_size=_GROUP, bits=bits)
        return mx.dequantize(*packed, group_size=_GROUP, bits=bits).astype(weights.dtype)

    copy = type(model)(model.args)
    copy.update(tree_map(coarse, model.parameters()))
    mx.eval(copy.parameters())
    return copy


def table(found: Sequence[Kept]) -> str:
    """For a terminal, and for the docs."""
    length = max(one.draft_length for one in found)
    lines = [
        f"| drafts by | proposals | rule | kept of {length} | "
        + " | ".join(f"{i + 1} or more" for i in range(length))
        + " |",
        "|---" * (4 + length) + "|",
    ]
    for one in found:
        for rule in RULES if one.proposals > 1 else ():
            mean = f"{one.mean(rule):.3f} ± {one.error(rule):.3f}"
            shares = " | ".join(f"{share:.3f}" for share in one.at_least(rule))
            lines.append(f"| {one.drafter} | {one.proposals} | {rule} | {mean} | {shares} |")
        if one.proposals < 2:
            lines.append(f"| {one.drafter} | {one.proposals} |" + " n/a |" * (2 + length))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table, then one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m localspec.bench.acceptance", description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2", help="a catalogue name, a directory or a hub id")
    parser.add_argument(
        "--workload", nargs="+", default=None, metavar="NAME", help="kinds or prompts of the bench (all)"
    )
    parser.add_argument("--bits", nargs="*", type=int, default=[4, 3], help="drafts by the model itself, rounded (4 3)")
    parser.add_argument("--draft-length", type=int, default=4, choices=range(1, MAX_DRAFT_LENGTH + 1), metavar="N")
    parser.add_argument("--tokens", type=int, default=32, help="most tokens per answer (32)")
    parser.add_argument("--stride", type=int, default=4, help="tokens from one proposal to the next (4)")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    options = parser.parse_args(arguments)
    try:
        if min(options.tokens, options.stride) < 1:
            raise SettingsError("tokens and stride must be at least 1")
        if options.temperature <= 0:
            raise SettingsError("at temperature 0 the rules are one: give a temperature above it")
        chosen = choose_workloads(options.workload)
        if arguments is None:  # started as a program: it may start itself over with a faster BLAS
            from localspec.blas import preload

            preload(sys.orig_argv, "auto")
        import localspec
        from localspec.drafters import ModelDrafter, NgramDrafter

        engine = localspec.load(options.model, dtype=options.dtype, drafters=[])
        drafters: dict[str, Drafter] = {
            f"itself in {bits} bits": ModelDrafter(rounded(engine.model, bits)) for bits in options.bits
        }
        drafters["n-gram"] = NgramDrafter()
        prompts = [encode(engine, prompt) for workload in chosen for prompt in workload.prompts]
        found = measure(
            engine,
            prompts,
            drafters,
            draft_length=options.draft_length,
            tokens=options.tokens,
            stride=options.stride,
            temperature=options.temperature,
            seed=options.seed,
        )
    except LocalspecError as error:
        print(f"localspec: {error}", file=sys.stderr)
        return 1
    print(
        f"{engine.name}, {options.dtype}, temperature {options.temperature:g}, {len(prompts)} answers of up to "
        f"{options.tokens} tokens, a proposal every {options.stride}\n"
    )
    print(table(found) + "\n")
    for one in found:
        if one.proposals > 1:
            gain = one.mean("block") - one.mean("rejection")
            print(f"{one.drafter}: block keeps {gain:.4f} ± {one.error('block', 'rejection'):.4f} more than rejection")
    print(json.dumps({"model": engine.name, "settings": vars(options), "found": [one.as_dict() for one in found]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
