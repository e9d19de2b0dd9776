"""Records the token streams that replays need: `python -m localspec.bench.record FOLDER`.

Decodes prompts of all kinds, and a week of one user, plainly and greedily, and writes the ids of prompts and answers
into one file each. Each answer is written as soon as it is there, and a prompt whose answer is in the folder is not
decoded again, so that an interrupted recording goes on. Takes half an hour on a CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from localspec.bench.streams import RECORDED, WEEK, Recording, Stream, read_recording, write_recording
from localspec.bench.week import read_week
from localspec.bench.workloads import AGENT_LOGS, MORE, Prompt, choose_workloads, read_workloads
from localspec.errors import LocalspecError

Decode = Callable[[Prompt, tuple[int, ...]], tuple[int, ...]]


def recorded_prompts() -> list[Prompt]:
    """The prompts of all kinds, each kind together: the bench's first."""
    found = [
        prompt
        for workload in [*choose_workloads(None), *read_workloads(AGENT_LOGS), *read_workloads(MORE)]
        for prompt in workload.prompts
    ]
    kinds = list(dict.fromkeys(prompt.kind for prompt in found))
    return sorted(found, key=lambda prompt: kinds.index(prompt.kind))


def record(
    prompts: Iterable[tuple[Prompt, Sequence[int]]], start: Recording, decode: Decode, folder: Path, name: str
) -> Path:
    """Answer the prompts (with their ids) and write what came of it into `folder`, after each answer; the file.

    An answer that the folder's recording has to the very ids of a prompt is kept; answers to others are dropped.
    LocalspecError where that recording is of another model, or was made otherwise than `start` says.
    """
    known: dict[tuple[str, str, int, tuple[int, ...]], Stream] = {}
    if (folder / name).exists():
        before = read_recording(folder, name)
        if (before.model, before.how) != (start.model, start.how):
            raise LocalspecError(
                f"{folder / name} is of {before.model}, {before.how}, not of {start.model}, {start.how}: "
                "name another folder"
            )
        known = {(s.kind, s.name, s.day, s.prompt): s for s in before.streams}
    wanted = [(prompt, (prompt.kind, prompt.name, prompt.day, tuple(ids))) for prompt, ids in prompts]

    def write() -> Path:
        kept = tuple(known[key] for _, key in wanted if key in known)
        return write_recording(Recording(start.model, start.how, kept), folder, name)

    for prompt, key in wanted:
        if key not in known:
            known[key] = Stream(prompt.kind, prompt.name, key[3], decode(prompt, key[3]), prompt.day)
            write()
    return write()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line per stream, then the places of the files."""
    parser = argparse.ArgumentParser(prog="python -m localspec.bench.record", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the recordings are written, or gone on with")
    parser.add_argument("--model", default="smollm2", help="a catalogue name, a directory or a hub id (smollm2)")
    parser.add_argument("--tokens", type=int, default=256, help="most tokens per answer (256)")
    parser.add_argument("--dtype", default="float32", help="format of the weights (float32)")
    options = parser.parse_args(arguments)
    try:
        if arguments is None:  # started as a program: it may start itself over with a faster BLAS
            from localspec.blas import preload

            preload(sys.orig_argv, "auto")
        import localspec
        from localspec.bench.run import encode

        engine = localspec.load(options.model, dtype=options.dtype, drafters=[])

        def decode(prompt: Prompt, ids: tuple[int, ...]) -> tuple[int, ...]:
            answer = engine.generate(list(ids), max_tokens=options.tokens, temperature=0.0, speculate=False).ids
            day = f"day {prompt.day}, " if prompt.day else ""
            print(f"{day}{prompt.kind}/{prompt.name}: {len(ids)} + {len(answer)} tokens", flush=True)
            if engine.tokenizer is not None:
                print(engine.tokenizer.decode(answer), file=sys.stderr)
            return tuple(answer)

        start = Recording(engine.name, f"{options.dtype}, greedy, up to {options.tokens} tokens", ())
        for name, prompts in ((RECORDED, recorded_prompts()), (WEEK, read_week())):
            pairs = [(prompt, encode(engine, prompt)) for prompt in prompts]
            print(record(pairs, start, decode, options.folder, name))
    except (LocalspecError, OSError) as error:
        print(f"localspec: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
