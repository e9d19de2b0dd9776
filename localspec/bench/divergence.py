"""How often ids with speculation part from ids without it, counted: `python -m localspec.bench.divergence --help`.

Every prompt is decoded plainly and then with speculation. The drafts are the plain run's own ids with mistakes sown in
and in changing numbers, so that passes of all sizes occur and all numbers of drafts get accepted. Where the two part,
both start again behind the plain ids up to there. Log-probabilities are compared as well, to the last bit: they differ
long before ids do.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localspec import blas
from localspec.bench.pairs import first_difference
from localspec.drafters.rehearsed import Rehearsed
from localspec.errors import SettingsError
from localspec.session import Session
from localspec.settings import Settings

if TYPE_CHECKING:
    from localspec.engine import Engine

_ANSWER = 192
"""Tokens per prompt."""
_SIZES = {"1M": (128, 4, 1024), "8M": (320, 6, 2048), "40M": (640, 8, 4096)}
"""Hidden width, layers and vocabulary of the random models."""


@dataclass(slots=True)
class Tally:
    """What one way of decoding gave."""

    exact: str
    temperature: float
    exactness: str = ""
    tokens: int = 0
    divergences: int = 0
    other_bits: int = 0
    """Tokens before a divergence whose log-probability is not the same to the last bit."""
    drafted: int = 0
    accepted: int = 0
    plain_s: float = 0.0
    speculative_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        per = 10_000 * self.divergences / self.tokens if self.tokens else None
        fields = {name: getattr(self, name) for name in self.__slots__}
        return fields | {"divergences_per_10000": per}


def count(engine: Engine, prompts: Iterator[list[int]], tally: Tally, tokens: int, seconds: float) -> None:
    """Compare until `tokens` were compared or `seconds` have passed; at least one prompt."""
    end = time.perf_counter() + seconds
    for number, first in enumerate(prompts):
        prompt, left = first, _ANSWER
        while left > 0:
            settings: dict[str, Any] = {
                "max_tokens": left, "temperature": tally.temperature, "seed": number, "exact": tally.exact
            }  # fmt: skip
            started = time.perf_counter()
            plain = engine.generate(prompt, speculate=False, **settings)
            half = time.perf_counter()
            session = Session(engine.target, [Rehearsed(prompt + plain.ids)])
            generation = engine.generation(session, prompt, Settings(draft_length=15, **settings)).run()
            tally.plain_s += half - started
            tally.speculative_s += time.perf_counter() - half
            tally.exactness = str(generation.exactness)
            tally.drafted += generation.stats.drafted
            tally.accepted += generation.stats.accepted
            difference = first_difference(plain.ids, generation.ids)
            compared = len(plain.ids) if difference is None else difference.index + 1
            tally.tokens += compared
            tally.divergences += difference is not None
            same = zip(plain.tokens, generation.tokens[: compared - (difference is not None)], strict=False)
            tally.other_bits += sum(a.logprob != b.logprob for a, b in same)
            left -= compared
            prompt = prompt + plain.ids[:compared]
            if len(plain.ids) < settings["max_tokens"] and difference is None:
                break  # an end token
        if tally.tokens >= tokens or time.perf_counter() >= end:
            return


def random_engine(size: str) -> Engine:
    """An engine with random weights of about that many parameters, which does not fall into loops."""
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm.models import llama

    from localspec.engine import Engine

    hidden, layers, vocabulary = _SIZES[size]
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=3 * hidden,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 64),
        rms_norm_eps=1e-5,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
    )
    model = llama.Model(args)
    keys = iter(mx.random.split(mx.random.key(0), 1024))

    def fill(weights: Any) -> Any:
        if weights.ndim < 2:
            return weights
        return mx.random.normal(weights.shape, key=next(keys)) * (2.0 / weights.shape[-1] ** 0.5)

    model.update(tree_map(fill, model.parameters()))
    mx.eval(model.parameters())
    return Engine(model, drafters=[], name=f"random {size}")


def _prompts(engine: Engine) -> Iterator[list[int]]:
    number = 0
    if engine.tokenizer is not None:
        from localspec.bench.workloads import choose_workloads

        texts = [prompt.text for workload in choose_workloads(None) for prompt in workload.prompts]
        for text in texts:
            ids = engine.encode(text)
            yield ids[-64:]
    size = engine.target.vocabulary_size
    while True:
        number += 1
        chance = random.Random(number)
        yield [chance.randrange(size) for _ in range(8 + number % 40)]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m localspec.bench.divergence", description=__doc__)
    parser.add_argument("model", nargs="?", help="a catalogue name, directory or hub id")
    parser.add_argument("--random", choices=list(_SIZES), help="random weights of about that size instead of a model")
    parser.add_argument("--tokens", type=int, default=10_000, help="tokens to compare per way of decoding (10000)")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop earlier, after so long per way of decoding")
    parser.add_argument("--exact", nargs="+", choices=["off", "rows", "auto"], default=["off", "rows"])
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 0.8])
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16", "quantized"])
    arguments = parser.parse_args(argv)
    if (arguments.model is None) == (arguments.random is None):
        parser.error("give a model, or --random")
    if arguments.random:
        engine = random_engine(arguments.random)
    else:
        import localspec

        engine = localspec.load(arguments.model, dtype=arguments.dtype, drafters=[])
    found = engine.row_classes()
    best = found.best()
    print(f"{engine.name}, {blas.status()}; probe: {found.passes} passes, {found.probe_s:.1f} s", flush=True)
    for one in found.classes:
        costs = ", ".join(f"T({k})={1000 * s:.1f}" for k, s in zip(one.sizes, one.seconds, strict=True))
        print(f"  class of {one.describe()}: {costs} ms{'  <- rows' if one is best else ''}")
    tallies = []
    for exact in arguments.exact:
        for temperature in arguments.temperature:
            tally = Tally(exact, temperature)
            count(engine, _prompts(engine), tally, arguments.tokens, arguments.seconds)
            tallies.append(tally)
            entry = tally.as_dict()
            print(
                f"exact={exact:4} temperature={temperature:g}: {tally.tokens} tokens, {tally.divergences} divergences "
                f"({entry['divergences_per_10000']:.2f} per 10,000), {tally.other_bits} log-probabilities with other "
                f"bits; {tally.accepted}/{tally.drafted} drafts accepted; "
                f"plain {1000 * tally.plain_s / tally.tokens:.1f} ms per token",
                flush=True,
            )
    document = {
        "model": engine.name,
        "blas": blas.status(),
        "classes": found.as_dict(),
        "runs": [tally.as_dict() for tally in tallies],
    }
    print(json.dumps(document))
    return 1 if any(tally.divergences or tally.other_bits for tally in tallies if tally.exact == "rows") else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SettingsError as error:
        sys.exit(f"localspec: {error}")
