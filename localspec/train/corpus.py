"""Has a model answer varied requests and keeps the ids: `python -m localspec.train.corpus FOLDER --tokens N`.

Half of the requests were written (prompts.toml), most others the model makes up itself, and some go on with an earlier
answer. Half of the answers are greedy, half sampled. Answers that end in endless repetition are marked with the place
where it begins. Started again, it goes on where it was: a batch is the same whenever it is made, up to near-ties on
another machine. Takes hours on a CPU; with --torch, which needs the extra `train`, less than one where the CPU
multiplies bfloat16 in hardware (AMX).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from localspec.errors import LocalspecError

if TYPE_CHECKING:
    from localspec.engine import Engine
    from localspec.train.decoding import BatchModel
    from localspec.train.shards import Sample

_VERSION = 3
"""Of what a recipe makes, the written requests included: batches of two versions do not mix."""
_TEMPERATURE, _TOP_P = 0.8, 0.95
"""Of the answers that are not greedy."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line per batch, then how much there is."""
    parser = argparse.ArgumentParser(prog="python -m localspec.train.corpus", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the answers are written")
    parser.add_argument("--tokens", type=int, default=400_000, help="end after so many tokens of answers (400000)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other requests and answers (0)")
    parser.add_argument("--model", default="smollm2", help="a catalogue name, a directory or a hub id (smollm2)")
    parser.add_argument("--dtype", default="float32", help="format of the weights (float32)")
    parser.add_argument("--batch", type=int, default=64, help="answers written at the same time (64)")
    parser.add_argument("--longest", type=int, default=256, help="most tokens per answer (256)")
    parser.add_argument("--torch", action="store_true", help="decode with torch, in bfloat16")
    parser.add_argument("--written", action="store_true", help="no requests that the model makes up: twice as fast")
    options = parser.parse_args(arguments)
    for name in ("tokens", "batch", "longest"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be 1 or more")
    if options.seed < 0:
        parser.error("--seed must be 0 or more")
    try:
        if arguments is None:  # started as a program: it may start itself over with a faster BLAS
            from localspec.blas import preload

            preload(sys.orig_argv, "auto")
        import localspec

        engine = localspec.load(options.model, dtype=options.dtype, drafters=[])
        model = None
        if options.torch:
            from localspec.train.torch_llama import TorchLlama

            model = TorchLlama(engine.model)
        collect(
            engine,
            options.folder,
            tokens=options.tokens,
            seed=options.seed,
            size=options.batch,
            longest=options.longest,
            how="torch bfloat16" if options.torch else options.dtype,
            model=model,
            written_only=options.written,
        )
    except (LocalspecError, OSError) as error:
        print(f"localspec: {error}", file=sys.stderr)
        return 1
    return 0


def collect(
    engine: Engine,
    folder: Path,
    *,
    tokens: int,
    seed: int,
    size: int,
    longest: int,
    how: str = "float32",
    model: BatchModel | None = None,
    written_only: bool = False,
) -> None:
    """Fill `folder` with batches of `size` answers until they have `tokens` tokens; go on where an earlier run ended.

    `model` decodes in place of the engine's own, where there is one; `how` is noted with the recipe. `written_only`:
    leave out what the model makes up.
    Raises LocalspecError when the folder belongs to another recipe or the model makes nothing of any use.
    """
    from localspec.train.requests import CYCLE, WRITTEN, Requests
    from localspec.train.shards import Shards

    shards = Shards(folder)
    recipe = {"version": _VERSION, "model": engine.name, "dtype": how, "seed": seed, "batch": size, "longest": longest}
    shards.begin({**recipe, "written": written_only, "temperature": _TEMPERATURE, "top_p": _TOP_P})
    cycle = WRITTEN if written_only else CYCLE
    requests = Requests(engine, seed, size, shards.read, model, cycle)
    have = set(shards.numbers())
    total = fresh = number = barren = 0
    started = time.perf_counter()
    while total < tokens:
        if number in have:
            total += sum(len(sample.answer) for sample in shards.read(number))
            number += 1
            continue
        before = time.perf_counter()
        samples = answer(engine, requests.kind(number), requests.batch(number), (seed, number), longest, model)
        shards.write(number, samples)
        made = sum(len(sample.answer) for sample in samples)
        total, fresh = total + made, fresh + made
        barren = 0 if samples else barren + 1
        if barren > len(cycle):
            raise LocalspecError(f"{engine.name} answers nothing that was asked")
        now = time.perf_counter()
        left = max(0, tokens - total) * (now - started) / max(fresh, 1)
        print(
            f"batch {number}, {requests.kind(number)}: {len(samples)} answers, {made} tokens, "
            f"{made / (now - before):.1f} tokens/s; {total} of {tokens}, {left / 60:.0f} min left",
            flush=True,
        )
        number += 1
    print(summary([sample for kept in range(number) for sample in shards.read(kept)]))


def answer(
    engine: Engine,
    kind: str,
    prompts: Sequence[Sequence[int]],
    seed: tuple[int, ...],
    longest: int,
    model: BatchModel | None = None,
) -> list[Sample]:
    """The model's answers to a batch of prompts, every other one greedy."""
    from localspec.train.decoding import Sampling, decode
    from localspec.train.repetition import repeats
    from localspec.train.shards import Sample

    if not prompts:
        return []
    samplings = [Sampling(_TEMPERATURE if row % 2 else 0.0, _TOP_P, (*seed, row)) for row in range(len(prompts))]
    model = engine.model if model is None else model
    answers = decode(model, prompts, samplings, end_ids=engine.end_ids, most=longest)
    return [
        Sample(kind, tuple(prompt), tuple(ids), sampling.temperature, repeats(ids))
        for prompt, ids, sampling in zip(prompts, answers, samplings, strict=True)
    ]


def summary(samples: Sequence[Sample]) -> str:
    """What a corpus consists of, in one line."""
    tokens = sum(len(sample.answer) for sample in samples)
    loops = [sample for sample in samples if sample.loop is not None]
    kinds = sorted({sample.kind for sample in samples})
    counts = ", ".join(f"{sum(sample.kind == kind for sample in samples)} {kind}" for kind in kinds)
    return f"{len(samples)} answers ({counts}), {tokens} tokens; {len(loops)} answers end in repetition"


if __name__ == "__main__":
    sys.exit(main())
