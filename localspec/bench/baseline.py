"""Plain decoding here against mlx-lm's own decoder: `python -m localspec.bench.baseline [MODEL]`.

The promise "never slower" means little if the plain decoder that speculation is compared with were slow itself. Both
decode one prompt greedily on one model, in pairs and in alternating order; what counts is the time from the first token
to the last, so that prompt processing has no part in it.
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

from localspec.bench.machine import machine, versions, weights_format
from localspec.bench.run import encode
from localspec.bench.summary import Spread
from localspec.bench.workloads import choose_workloads
from localspec.errors import LocalspecError, SettingsError

if TYPE_CHECKING:
    from localspec.engine import Engine

PROMPT = "open-chat/running"
"""A prompt that most models answer at length."""
WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Decoded:
    """What one decoder made of the prompt."""

    ids: tuple[int, ...]
    first_to_last_s: float

    @property
    def decode_tps(self) -> float | None:
        """Tokens per second after the first one."""
        return (len(self.ids) - 1) / self.first_to_last_s if self.first_to_last_s > 0 else None

    @property
    def seconds_per_token(self) -> float | None:
        return self.first_to_last_s / (len(self.ids) - 1) if len(self.ids) > 1 else None


@dataclass(frozen=True, slots=True)
class BaselinePair:
    """Both decoders, one right after the other."""

    order: str
    mlx_lm: Decoded
    localspec: Decoded

    @property
    def ratio(self) -> float | None:
        """mlx-lm's time / localspec's, per token: above 1 localspec is the faster one."""
        ours, theirs = self.localspec.seconds_per_token, self.mlx_lm.seconds_per_token
        return theirs / ours if ours and theirs else None

    @property
    def identical(self) -> bool:
        return self.mlx_lm.ids == self.localspec.ids

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "order": self.order,
            "ratio": self.ratio,
            "identical": self.identical,
            "tokens": {"mlx_lm": len(self.mlx_lm.ids), "localspec": len(self.localspec.ids)},
            "first_to_last_s": {"mlx_lm": self.mlx_lm.first_to_last_s, "localspec": self.localspec.first_to_last_s},
        }


@dataclass(frozen=True, slots=True)
class Baseline:
    """All pairs of one comparison."""

    model: dict[str, Any]
    max_tokens: int
    versions: dict[str, str]
    machine: dict[str, Any]
    pairs: list[BaselinePair]

    @property
    def ratio(self) -> Spread | None:
        """mlx-lm's time / localspec's over the pairs."""
        return Spread.of(pair.ratio for pair in self.pairs)

    @property
    def identical(self) -> int:
        """Pairs with identical ids."""
        return sum(pair.identical for pair in self.pairs)

    def as_dict(self) -> dict[str, Any]:
        """One JSON document."""
        ratio = self.ratio
        return {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "versions": self.versions,
            "machine": self.machine,
            "ratio": None if ratio is None else ratio.as_dict(),
            "identical": self.identical,
            "pairs": [pair.as_dict() for pair in self.pairs],
        }

    def table(self) -> str:
        """For a terminal."""
        lines = [
            f"{self.model['name']}, {self.model['dtype']}, {self.machine['backend']} ({self.machine['blas']}), "
            f"greedy, up to {self.max_tokens} tokens",
            "",
            "pair  first      tokens  mlx-lm tok/s  localspec tok/s  ratio  ids",
        ]
        for index, pair in enumerate(self.pairs):
            lines.append(
                f"{index + 1:>4}  {pair.order:<9}  {len(pair.localspec.ids):>6}  "
                f"{_figure(pair.mlx_lm.decode_tps):>12}  {_figure(pair.localspec.decode_tps):>15}  "
                f"{_figure(pair.ratio, 3):>5}  "
                f"{'same' if pair.identical else 'DIFFERENT'}"
            )
        ratio = self.ratio
        found = "n/a" if ratio is None else f"{ratio.median:.3f} ({ratio.low:.3f}-{ratio.high:.3f})"
        same = f"{self.identical}/{len(self.pairs)}"
        lines += ["", f"mlx-lm's time / localspec's: median {found}; identical ids in {same}"]
        return "\n".join(lines)


def compare(engine: Engine, *, pairs: int = 5, max_tokens: int = 128, prompt: str = PROMPT) -> Baseline:
    """Decode a prompt of the workloads `pairs` times with each decoder, after a pass of each that is not counted."""
    if pairs < 1 or max_tokens < 2:
        raise SettingsError("a comparison takes at least one pair, and at least 2 tokens")
    before = machine()
    ids = encode(engine, choose_workloads([prompt])[0].prompts[0])
    decoders: dict[str, Callable[[int], Iterator[int]]] = {
        "mlx-lm": lambda limit: mlx_lm_ids(engine, ids, limit),
        "localspec": lambda limit: localspec_ids(engine, ids, limit),
    }
    for decode in decoders.values():
        _timed(decode(min(max_tokens, WARM_UP_TOKENS)))
    measured = []
    for index in range(pairs):
        names = list(decoders) if index % 2 == 0 else list(reversed(decoders))
        runs = {name: _timed(decoders[name](max_tokens)) for name in names}
        measured.append(BaselinePair(names[0], runs["mlx-lm"], runs["localspec"]))
    model = {"name": engine.name, "dtype": weights_format(engine.model)}
    return Baseline(model, max_tokens, versions(), before, measured)


def mlx_lm_ids(engine: Engine, prompt: Sequence[int], max_tokens: int) -> Iterator[int]:
    """mlx-lm's greedy decoder, up to and including an end token."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    for token, _ in generate_step(mx.array(list(prompt), mx.uint32), engine.model, max_tokens=max_tokens):
        yield int(token)
        if token in engine.end_ids:
            return


def localspec_ids(engine: Engine, prompt: Sequence[int], max_tokens: int) -> Iterator[int]:
    """This engine's plain greedy decoder."""
    for token in engine.stream(list(prompt), speculate=False, temperature=0.0, max_tokens=max_tokens):
        yield token.id


def _timed(ids: Iterator[int]) -> Decoded:
    import mlx.core as mx

    gc.collect()
    mx.synchronize()  # mlx-lm launches one pass more than it needs, which must not run into the next decoder's time
    found: list[int] = []
    first = last = 0.0
    for token in ids:
        last = time.perf_counter()
        if not found:
            first = last
        found.append(token)
    return Decoded(tuple(found), last - first)


def _figure(value: float | None, digits: int = 2) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, then one line of JSON. Exit status 1 when the ids differ or nothing could be compared."""
    parser = argparse.ArgumentParser(prog="python -m localspec.bench.baseline", description=compare.__doc__)
    parser.add_argument("model", nargs="?", default="smollm2", help="a catalogue name, a directory or a hub id")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="most tokens per run")
    parser.add_argument("--dtype", default=None, help="format of the weights")
    parser.add_argument("--blas", choices=("auto", "off"), default="auto")
    options = parser.parse_args(arguments)
    try:
        if arguments is None:  # started as a program: it may start itself over with a faster BLAS
            from localspec.blas import preload

            preload(sys.orig_argv, options.blas)
        import localspec

        engine = localspec.load(options.model, dtype=options.dtype, draft="none")
        baseline = compare(engine, pairs=options.pairs, max_tokens=options.tokens)
    except LocalspecError as error:
        print(f"localspec: {error}", file=sys.stderr)
        return 1
    print(baseline.table())
    print(json.dumps(baseline.as_dict()))
    return 0 if baseline.identical == len(baseline.pairs) else 1


if __name__ == "__main__":
    sys.exit(main())
