"""How often a model's own layers guess what it says, by which of them run: `python -m localspec.bench.layer_skip`.

The model answers the bench's open-chat prompts by plain decoding. At places along the answers each choice of layers
proposes a few tokens, which are compared with what came. The costs are measured in the same run: that of a drafted
token and of a pass of the model with so many rows, both relative to a plain pass, and from these and the acceptance
what the best draft length would bring.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from localspec.bench.run import encode
from localspec.bench.workloads import choose_workloads
from localspec.errors import LocalspecError, SettingsError
from localspec.settings import MAX_DRAFT_LENGTH, Settings

if TYPE_CHECKING:
    from localspec.engine import Engine

_REPEATS = 9
"""Measured passes of a kind, of which the median counts."""


@dataclass(slots=True)
class Choice:
    """Some layers, and how often what they drafted was right."""

    name: str
    layers: tuple[int, ...]
    cost: float = 0.0
    """Of a drafted token, relative to a plain pass."""
    proposals: int = 0
    right: list[int] = field(default_factory=list)
    """right[i]: proposals of which at least i+1 tokens were right."""

    @property
    def at_least(self) -> list[float]:
        """Entry i: the share of proposals of which at least i+1 tokens were right."""
        return [count / self.proposals for count in self.right] if self.proposals else []

    def best(self, passes: Sequence[float]) -> tuple[int, float]:
        """The draft length with the most tokens per time, and how many times plain decoding's that is.

        passes: entry k is the cost of a pass of k+1 rows, relative to one of a single row. Length 0 is plain decoding.
        """
        gains = [1.0]
        for n in range(1, len(self.at_least) + 1):
            gains.append((1 + sum(self.at_least[:n])) / (passes[n] + n * self.cost))
        return max(enumerate(gains), key=lambda item: item[1])

    def as_dict(self, passes: Sequence[float]) -> dict[str, Any]:
        """Ready for JSON."""
        length, gain = self.best(passes)
        return {
            "name": self.name,
            "layers": list(self.layers),
            "cost": self.cost,
            "proposals": self.proposals,
            "at_least": self.at_least,
            "best_length": length,
            "gain": gain,
        }


def choices(of: int, counts: Sequence[int]) -> list[Choice]:
    """For each number of layers: what is default, the beginning, both ends, evenly."""
    from localspec.drafters.layer_skip import default_layers

    found: dict[tuple[int, ...], Choice] = {}
    for count in counts:
        ends = {*range(count - count // 4), *range(of - count // 4, of)}
        even = {round(i * (of - 1) / max(count - 1, 1)) for i in range(count)}
        for name, layers in (
            ("default", default_layers(count, of)),
            ("first", range(count)),
            ("both ends", ends),
            ("evenly", even),
        ):
            kept = tuple(sorted(layers))
            found.setdefault(kept, Choice(f"{len(kept)} {name}", kept))
    return list(found.values())


def measure(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    chosen: Sequence[Choice],
    *,
    draft_length: int,
    tokens: int,
    stride: int,
    temperature: float,
) -> list[float]:
    """Fill in the choices; returns the costs of passes with 1 to draft_length + 1 rows, relative to one row."""
    from localspec.drafters.layer_skip import LayerSkipDrafter
    from localspec.drafters.protocol import Draw
    from localspec.noise import Noise

    settings = Settings(temperature=temperature, seed=0)
    draw = Draw(settings, Noise(0), engine.target.vocabulary_size)
    answers = [
        engine.generate(prompt, speculate=False, max_tokens=tokens, temperature=temperature, seed=0, exact="off").ids
        for prompt in prompts
    ]
    for choice in chosen:
        choice.right = [0] * draft_length
        drafter = LayerSkipDrafter(engine.model, choice.layers)
        for prompt, answer in zip(prompts, answers, strict=True):
            for start in range(0, len(answer) - draft_length + 1, stride):
                drafter.follow([*prompt, *answer[:start]])
                proposal = drafter.propose(draft_length, draw)
                drafted = [] if proposal is None else proposal.tokens
                choice.proposals += 1
                for i in range(draft_length):
                    if drafted[: i + 1] != answer[start : start + i + 1]:
                        break
                    choice.right[i] += 1
    return _costs(engine, [*prompts[0], *answers[0]], chosen, draft_length)


def _costs(engine: Engine, context: list[int], chosen: Sequence[Choice], draft_length: int) -> list[float]:
    """Set each choice's cost; returns those of the model's passes with 1 to draft_length + 1 rows. All relative to a
    pass of one row of the same turn, so that a busy machine slows all alike."""
    import mlx.core as mx

    from localspec.drafters.shallow import ShallowModel
    from localspec.target import Target
    from localspec.transaction import Transaction

    def passes(target: Target, rows: int) -> Callable[[], float]:
        transaction = Transaction(target)
        transaction.prefill(context[:-1])
        ids = mx.array([context[-1]] * rows, mx.uint32)

        def seconds() -> float:
            started = time.perf_counter()
            mx.eval(mx.argmax(transaction.forward(ids), axis=-1))
            spent = time.perf_counter() - started
            transaction.commit(len(context) - 1)
            return spent

        return seconds

    timed = [passes(engine.target, rows) for rows in range(1, draft_length + 2)]
    timed += [passes(Target(ShallowModel(engine.model, choice.layers)), 1) for choice in chosen]
    for one in timed:
        one()  # the first pass of a kind is slower
    seconds = [[one() for one in timed] for _ in range(_REPEATS)]
    relative = [median(turn[i] / turn[0] for turn in seconds) for i in range(len(timed))]
    for choice, cost in zip(chosen, relative[draft_length + 1 :], strict=True):
        choice.cost = cost
    return relative[: draft_length + 1]


def table(chosen: Sequence[Choice], passes: Sequence[float]) -> str:
    """For a terminal, and for the docs."""
    length = len(passes) - 1
    shares = " | ".join(f"{i + 1} or more" for i in range(length))
    lines = [f"| layers | cost of a draft | right: {shares} | best length | gain |", "|---" * (4 + length) + "|"]
    for choice in chosen:
        best, gain = choice.best(passes)
        shares = " | ".join(f"{share:.2f}" for share in choice.at_least)
        lines.append(f"| {choice.name} | {choice.cost:.2f} | {shares} | {best} | {gain:.2f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table, then one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m localspec.bench.layer_skip", description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2", help="a catalogue name, a directory or a hub id")
    parser.add_argument("--workload", nargs="+", default=["open-chat"], metavar="NAME", help="kinds or prompts")
    parser.add_argument(
        "--layers", nargs="+", type=int, metavar="N", help="how many layers run (a third, half, ..., the default share)"
    )
    parser.add_argument("--draft-length", type=int, default=4, choices=range(1, MAX_DRAFT_LENGTH + 1), metavar="N")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens per answer (64)")
    parser.add_argument("--stride", type=int, default=4, help="tokens from one proposal to the next (4)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16", "quantized"), default=None)
    parser.add_argument("--blas", choices=("auto", "off"), default="auto")
    options = parser.parse_args(arguments)
    try:
        if min(options.tokens, options.stride) < 1:
            raise SettingsError("tokens and stride must be at least 1")
        workloads = choose_workloads(options.workload)
        if arguments is None:  # started as a program: it may start itself over with a faster BLAS
            from localspec.blas import preload

            preload(sys.orig_argv, options.blas)
        import localspec
        from localspec.drafters.layer_skip import SHARE

        engine = localspec.load(options.model, dtype=options.dtype, drafters=[])
        of = len(engine.model.layers)
        chosen = choices(of, options.layers or sorted({of // 3, of // 2, 2 * of // 3, 4 * of // 5, round(SHARE * of)}))
        prompts = [encode(engine, prompt) for workload in workloads for prompt in workload.prompts]
        passes = measure(
            engine,
            prompts,
            chosen,
            draft_length=options.draft_length,
            tokens=options.tokens,
            stride=options.stride,
            temperature=options.temperature,
        )
    except LocalspecError as error:
        print(f"localspec: {error}", file=sys.stderr)
        return 1
    widths = ", ".join(f"{cost:.2f}" for cost in passes)
    print(f"{engine.name}, {len(prompts)} answers, temperature {options.temperature:g}")
    print(f"passes of 1, 2, ... rows: {widths}\n")
    print(table(chosen, passes) + "\n")
    found = [choice.as_dict(passes) for choice in chosen]
    print(json.dumps({"model": engine.name, "settings": vars(options), "passes": passes, "found": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
