"""Records the token streams that replays need: `python -m localspec.bench.record FOLDER`.

Decodes the bench's prompts, and the agent logs beside them, plainly and greedily, and writes the ids of prompts and
answers into one file. Takes some minutes on a CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from localspec.bench.streams import Recording, Stream, write_recording
from localspec.bench.workloads import AGENT_LOGS, choose_workloads, read_workloads
from localspec.errors import LocalspecError


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line per stream, then the file's place."""
    parser = argparse.ArgumentParser(prog="python -m localspec.bench.record", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the recording is written")
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
        streams = []
        for workload in [*choose_workloads(None), *read_workloads(AGENT_LOGS)]:
            for prompt in workload.prompts:
                ids = encode(engine, prompt)
                answer = engine.generate(ids, max_tokens=options.tokens, temperature=0.0, speculate=False).ids
                streams.append(Stream(prompt.kind, prompt.name, tuple(ids), tuple(answer)))
                print(f"{prompt.kind}/{prompt.name}: {len(ids)} + {len(answer)} tokens", flush=True)
                if engine.tokenizer is not None:
                    print(engine.tokenizer.decode(answer), file=sys.stderr)
        how = f"{options.dtype}, greedy, up to {options.tokens} tokens"
        place = write_recording(Recording(engine.name, how, tuple(streams)), options.folder)
    except (LocalspecError, OSError) as error:
        print(f"localspec: {error}", file=sys.stderr)
        return 1
    print(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
