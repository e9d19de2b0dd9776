"""What our drafting loop costs the host, against mlx-lm's: `python -m localspec.bench.draft_loop [MODEL]`.

Host time is the CPU time of the thread that decodes (`time.thread_time`): building graphs, handing them to the device,
reading what came, keeping caches and records. What the device computes runs in other threads, and waiting for it takes
no CPU time. It is counted from the first token to the last, and divided by the tokens drafted meanwhile: the whole loop
with drafting, verifying, accepting and rolling back, since the two loops draw the lines between these differently.

Both decode the same prompt greedily with the same target and the same draft, in pairs and in alternating order, and
must emit the same ids. The tiny models are random: nearly all time is the host's there. "itself" means that the target
drafts for itself, so that every draft is accepted; "another" is an unrelated draft, most of whose drafts are rejected.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localspec.bench.machine import machine, versions
from localspec.bench.run import encode
from localspec.bench.summary import Spread
from localspec.bench.workloads import choose_workloads
from localspec.errors import LocalspecError, SettingsError

if TYPE_CHECKING:
    from localspec.engine import Engine

PROMPT = "open-chat/running"
_TINY_PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@dataclass(frozen=True, slots=True)
class Loop:
    """One run of one loop."""

    ids: tuple[int, ...]
    drafted: int
    """Tokens drafted behind the first emitted one."""
    host_s: float
    wall_s: float

    @property
    def host_per_draft(self) -> float:
        """Seconds of host time per drafted token."""
        return self.host_s / self.drafted

    @property
    def wall_per_draft(self) -> float:
        return self.wall_s / self.drafted


@dataclass(frozen=True, slots=True)
class Case:
    """One target and draft, decoded by both loops in turn."""

    name: str
    draft_length: int
    pairs: list[tuple[Loop, Loop]]
    """(mlx-lm's, ours)."""

    @property
    def host_ratio(self) -> Spread | None:
        """Our host time per drafted token / mlx-lm's."""
        return Spread.of(ours.host_per_draft / theirs.host_per_draft for theirs, ours in self.pairs)

    @property
    def wall_ratio(self) -> Spread | None:
        """The same in wall-clock time."""
        return Spread.of(ours.wall_per_draft / theirs.wall_per_draft for theirs, ours in self.pairs)

    @property
    def identical(self) -> bool:
        return all(theirs.ids == ours.ids for theirs, ours in self.pairs)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        host, wall = self.host_ratio, self.wall_ratio
        return {
            "name": self.name,
            "draft_length": self.draft_length,
            "host_ratio": None if host is None else host.as_dict(),
            "wall_ratio": None if wall is None else wall.as_dict(),
            "identical": self.identical,
            "drafted": [[theirs.drafted, ours.drafted] for theirs, ours in self.pairs],
            "host_s": [[theirs.host_s, ours.host_s] for theirs, ours in self.pairs],
            "wall_s": [[theirs.wall_s, ours.wall_s] for theirs, ours in self.pairs],
        }

    def row(self) -> str:
        """For a terminal."""
        theirs = Spread.of(loop.host_per_draft * 1e6 for loop, _ in self.pairs)
        ours = Spread.of(loop.host_per_draft * 1e6 for _, loop in self.pairs)
        figures = [f"{spread.median:7.0f}" if spread else "n/a" for spread in (theirs, ours)]
        ratios = [_range(spread) for spread in (self.host_ratio, self.wall_ratio)]
        ids = "same" if self.identical else "DIFFERENT"
        return f"{self.name:<22}  {self.draft_length:>6}  {figures[0]:>9}  {figures[1]:>9}  {'  '.join(ratios)}  {ids}"


HEADER = f"{'target, draft':<22}  drafts  mlx-lm us  ours us    {'host: ours / mlx-lm':<19}  {'wall-clock':<19}  ids"


def compare(
    name: str, model: Any, draft: Any, prompt: Sequence[int], *, draft_length: int, tokens: int, repeats: int
) -> Case:
    """Decode `prompt` `repeats` times by each loop, after a run of each that is not counted."""
    from localspec.drafters import ModelDrafter
    from localspec.engine import Engine

    if repeats < 1 or tokens < 2 * draft_length + 2:
        raise SettingsError("a comparison takes at least one pair, and tokens for two rounds")
    engine = Engine(model, drafters=[ModelDrafter(draft)])
    loops: dict[str, Callable[[int], Loop]] = {
        "mlx-lm": lambda limit: _timed(_mlx_lm(model, draft, prompt, draft_length, limit)),
        "ours": lambda limit: _timed(_ours(engine, prompt, draft_length, limit)),
    }
    for run in loops.values():
        run(min(tokens, 4 * (draft_length + 1)))
    pairs = []
    for index in range(repeats):
        order = list(loops) if index % 2 == 0 else list(reversed(loops))
        done = {which: loops[which](tokens) for which in order}
        pairs.append((done["mlx-lm"], done["ours"]))
    return Case(name, draft_length, pairs)


def _mlx_lm(model: Any, draft: Any, prompt: Sequence[int], length: int, limit: int) -> Iterator[tuple[int, int]]:
    """Tokens of mlx-lm's loop, each with the tokens drafted so far."""
    import mlx.core as mx
    from mlx_lm.generate import speculative_generate_step

    ids = mx.array(list(prompt), mx.uint32)
    steps = speculative_generate_step(ids, model, draft, num_draft_tokens=length, max_tokens=limit)
    drafted, emitted, begins = 0, 0, True
    for token, _, from_draft in steps:
        if begins:
            drafted += min(limit - emitted, length)
        emitted, begins = emitted + 1, not from_draft
        yield int(token), drafted


def _ours(engine: Engine, prompt: Sequence[int], length: int, limit: int) -> Iterator[tuple[int, int]]:
    """Tokens of our loop, each with the tokens drafted so far."""
    generation = engine.stream(list(prompt), max_tokens=limit, draft_length=length, exact="off")
    for token in generation:
        yield token.id, generation.stats.drafted


def _timed(steps: Iterator[tuple[int, int]]) -> Loop:
    import mlx.core as mx

    gc.collect()
    mx.synchronize()
    ids: list[int] = []
    first_drafted = drafted = 0
    host = wall = 0.0
    for token, drafted in steps:
        if not ids:
            host, wall, first_drafted = time.thread_time(), time.perf_counter(), drafted
        ids.append(token)
    return Loop(tuple(ids), drafted - first_drafted, time.thread_time() - host, time.perf_counter() - wall)


def tiny_model(seed: int, *, layers: int) -> Any:
    """A random Llama of a few thousand weights, whose greedy text does not fall into a loop."""
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm.models import llama

    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=layers,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=64,
        tie_word_embeddings=False,
    )
    model = llama.Model(arguments)
    keys = iter(mx.random.split(mx.random.key(seed), 512))

    def fill(x: mx.array) -> mx.array:
        return mx.random.normal(x.shape, key=next(keys)) * (3.0 / x.shape[-1] ** 0.5) if x.ndim > 1 else x

    model.update(tree_map(fill, model.parameters()))
    mx.eval(model.parameters())
    return model


def _range(spread: Spread | None) -> str:
    return "n/a" if spread is None else f"{spread.median:.3f} ({spread.low:.3f}-{spread.high:.3f})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, then one line of JSON. Exit status 1 when ids differ or nothing could be compared."""
    parser = argparse.ArgumentParser(prog="python -m localspec.bench.draft_loop", description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2", help="a catalogue name, a directory or a hub id")
    parser.add_argument("--tiny", action="store_true", help="the tiny models only")
    parser.add_argument("--repeats", type=int, default=7, help="pairs of each case")
    parser.add_argument("--tokens", type=int, default=200, help="tokens per run of the tiny models")
    parser.add_argument("--model-tokens", type=int, default=64, help="tokens per run of MODEL")
    parser.add_argument("--draft-lengths", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--dtype", default=None, help="format of MODEL's weights")
    parser.add_argument("--blas", choices=("auto", "off"), default="auto")
    options = parser.parse_args(arguments)
    try:
        if arguments is None:  # started as a program: it may start itself over with a faster BLAS
            from localspec.blas import preload

            preload(sys.orig_argv, options.blas)
        before = machine()
        print(HEADER)
        cases = []
        for case in _cases(options):
            cases.append(case)
            print(case.row(), flush=True)
    except LocalspecError as error:
        print(f"localspec: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"versions": versions(), "machine": before, "cases": [case.as_dict() for case in cases]}))
    return 0 if all(case.identical for case in cases) else 1


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    target = tiny_model(0, layers=4)
    for title, draft in (("tiny, itself", target), ("tiny, another", tiny_model(1, layers=2))):
        for length in options.draft_lengths:
            tokens, repeats = options.tokens, options.repeats
            yield compare(title, target, draft, _TINY_PROMPT, draft_length=length, tokens=tokens, repeats=repeats)
    if options.tiny:
        return
    import localspec

    engine = localspec.load(options.model, dtype=options.dtype, drafters=())
    prompt = encode(engine, choose_workloads([PROMPT])[0].prompts[0])
    for length in options.draft_lengths:
        yield compare(
            f"{engine.name}, itself",
            engine.model,
            engine.model,
            prompt,
            draft_length=length,
            tokens=options.model_tokens,
            repeats=options.repeats,
        )


if __name__ == "__main__":
    sys.exit(main())
