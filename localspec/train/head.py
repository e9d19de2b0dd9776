"""Trains an MTP head on what its target said: `python -m localspec.train.head HEAD WORK CORPUS...`.

HEAD is the file that is written; WORK keeps hidden states and checkpoints, so that a run that ended goes on where it
was; each CORPUS is a folder that localspec.train.corpus made. Needs the extra `train`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localspec.errors import LocalspecError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from localspec.train.block import Head
    from localspec.train.lessons import Judge
    from localspec.train.material import Material

_WARM_UP = 20
"""Steps in which the learning rate rises."""
_DECAY = 0.5
"""The share of the steps, at the end, in which it falls to nothing."""
_SAVE = 50
"""Steps between checkpoints."""
_MEASURED = 96
"""Greedy answers, of those kept apart, that are measured on the way."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a head is trained."""

    steps: int
    tokens: int
    """Of a batch, prompts and padding included."""
    rate: float
    """The highest learning rate of matrices (Muon, with updates of the size that AdamW's have)."""
    weights: tuple[float, ...] = (1.0, 0.8, 0.64)
    """Of the losses of the first draft, the second, ..."""
    seed: int = 0

    def rate_at(self, step: int) -> float:
        """The share of the highest learning rate at a step: up, level, down in a straight line."""
        left = (self.steps - step) / max(1.0, _DECAY * self.steps)
        return max(0.0, min(1.0, (step + 1) / _WARM_UP, left))


def train(
    head: Head, judge: Judge, material: Material, plan: Plan, checkpoint: Path, *, until: int | None = None
) -> None:
    """Train, going on from `checkpoint` where there is one, printing a line at every checkpoint.

    `until`: end after that step, as if interrupted.
    """
    import torch

    from localspec.train.evaluate import score
    from localspec.train.lessons import batches

    optimizers = _optimizers(head, plan)
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        head.load_state_dict(saved["head"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        step = saved["step"]
    measured = [lesson for lesson in material.held_out if lesson.example.temperature == 0][:_MEASURED]
    started, seen, losses = time.perf_counter(), 0, 0.0
    for batch in batches(material.learned, plan.tokens, plan.seed, skip=step):
        if step >= (plan.steps if until is None else until):
            break
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = plan.rate * plan.rate_at(step)
        loss = judge.loss(head, batch, plan.weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        seen += int(batch.counts(0).sum())
        losses += loss.item()
        if step % _SAVE == 0 or step == plan.steps:
            states = [optimizer.state_dict() for optimizer in optimizers]
            temporary = checkpoint.with_suffix(".partial")
            torch.save({"head": head.state_dict(), "optimizers": states, "step": step}, temporary)
            temporary.replace(checkpoint)
            rate = seen / (time.perf_counter() - started)
            found = score(head, judge, measured, lambda _: "all", len(plan.weights))["all"]
            print(f"step {step} of {plan.steps}: loss {losses / _SAVE:.3f}, {found}; {rate:.0f} tokens/s", flush=True)
            started, seen, losses = time.perf_counter(), 0, 0.0


def _optimizers(head: Head, plan: Plan) -> list[Optimizer]:
    import torch

    matrices = [weight for weight in head.parameters() if weight.ndim == 2]
    vectors = [weight for weight in head.parameters() if weight.ndim != 2]
    return [
        torch.optim.Muon(matrices, lr=plan.rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(vectors, lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print how it goes, then write the head."""
    parser = argparse.ArgumentParser(prog="python -m localspec.train.head", description=__doc__)
    parser.add_argument("head", type=Path, help="the head's file")
    parser.add_argument("work", type=Path, help="a folder for hidden states and checkpoints")
    parser.add_argument("corpora", type=Path, nargs="+", help="folders that localspec.train.corpus made")
    parser.add_argument("--model", default="smollm2", help="a catalogue name, a directory or a hub id (smollm2)")
    parser.add_argument(
        "--taps", default="9,19,29", help="layers whose output the head gets, the last one too (9,19,29)"
    )
    parser.add_argument("--draft-ids", type=int, default=8192, help="size of the draft vocabulary (8192)")
    parser.add_argument("--width", type=int, default=1536, help="of the head's MLP (1536)")
    parser.add_argument("--steps", type=int, default=2000, help="of training (2000)")
    parser.add_argument("--tokens", type=int, default=4096, help="of a batch (4096)")
    parser.add_argument("--rate", type=float, default=2e-3, help="the highest learning rate (0.002)")
    parser.add_argument("--seed", type=int, default=0, help="of the order and of what starts random (0)")
    parser.add_argument("--threads", type=int, default=2, help="of torch (2)")
    options = parser.parse_args(arguments)
    try:
        taps = tuple(int(tap) for tap in options.taps.split(","))
    except ValueError:
        parser.error(f"--taps must be numbers with commas between, not {options.taps!r}")
    for name in ("draft_ids", "width", "steps", "tokens", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    try:
        import torch

        import localspec
        from localspec.train.block import new_head
        from localspec.train.examples import coverage, frequent
        from localspec.train.head_file import HeadShape, write_head
        from localspec.train.lessons import Judge
        from localspec.train.material import prepare
        from localspec.train.torch_llama import TorchLlama
        from localspec.vocabulary import fingerprint

        torch.set_num_threads(options.threads)
        torch.manual_seed(options.seed)
        engine = localspec.load(options.model, dtype="float32", drafters=[])
        llama = TorchLlama(engine.model)
        if taps[-1] != llama.layers - 1:
            parser.error(f"--taps must end with the last layer, {llama.layers - 1}")
        material = prepare(engine, llama, options.corpora, options.work, taps)
        examples = [lesson.example for lesson in material.learned]
        draft_ids = frequent(examples, options.draft_ids, llama.weights["embed_tokens.weight"].shape[0])
        held_out = [lesson.example for lesson in material.held_out]
        print(
            f"{len(examples)} answers to learn from, {sum(len(e.tokens) - e.start for e in examples)} tokens; "
            f"{len(held_out)} kept apart; the draft ids hold {coverage(held_out, draft_ids):.2%} of their tokens",
            flush=True,
        )
        shape = HeadShape(
            taps,
            llama.heads,
            llama.kv_heads,
            llama.rope_theta,
            llama.rms_eps,
            llama.layers,
            fingerprint(engine.tokenizer),
        )
        head = new_head(shape, llama, options.width)
        plan = Plan(options.steps, options.tokens, options.rate, seed=options.seed)
        train(head, Judge(llama, draft_ids), material, plan, options.work / "checkpoint.pt")
        weights = {name: weight.numpy() for name, weight in head.state_dict().items()}
        write_head(options.head, shape, weights, draft_ids)
    except (LocalspecError, OSError) as error:
        print(f"localspec: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
