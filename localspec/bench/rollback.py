"""What taking rejected rows back costs on a model with recurrent state, by the two ways there are.

`python -m localspec.bench.rollback` builds a hybrid model of random weights (gated delta layers with full attention in
between, about 100M parameters), drafts so that most proposals are rejected in part, and decodes three times in turn:
plainly, with rollback from the layers' own record, and with rollback by running the kept rows through the target again.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import click
import mlx.core as mx

from localspec.drafters.protocol import Drafter, Draw, Proposal
from localspec.engine import Engine
from localspec.settings import Settings
from localspec.tokens import Source
from localspec.transaction import Transaction


class OftenWrong(Drafter):
    """Knows the plain answer and spoils each token of a proposal with a fixed chance: rejections at every depth."""

    name: Source = "draft"

    def __init__(self, answer: Sequence[int], wrong: float) -> None:
        """`answer`: the whole sequence, prompt included. `wrong`: chance that a drafted token is spoiled."""
        super().__init__()
        self._answer = list(answer)
        self._wrong = wrong

    def fresh(self) -> OftenWrong:
        return OftenWrong(self._answer, self._wrong)

    def commit(self, tokens: Sequence[int]) -> None:
        self.context.extend(tokens)

    def propose(self, length: int, draw: Draw) -> Proposal | None:
        start = len(self.context)
        # Keyed by the position, so that every way of rollback is given the same proposals.
        chance = random.Random(start)
        tokens = [
            (token + 1) % draw.vocabulary_size if chance.random() < self._wrong else token
            for token in self._answer[start : start + length]
        ]
        return Proposal(tokens, self.name) if tokens else None


def hybrid_model(seed: int = 0) -> Any:
    """A random Qwen3.5-like model, float32, about 100M parameters: three gated delta layers to each full attention."""
    from mlx.utils import tree_map
    from mlx_lm.models import qwen3_5

    arguments = qwen3_5.ModelArgs.from_dict(
        {
            "model_type": "qwen3_5",
            "text_config": {
                "model_type": "qwen3_5",
                "hidden_size": 640,
                "intermediate_size": 1792,
                "num_hidden_layers": 16,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "head_dim": 80,
                "vocab_size": 16384,
                "linear_num_value_heads": 8,
                "linear_num_key_heads": 8,
                "linear_key_head_dim": 80,
                "linear_value_head_dim": 80,
                "tie_word_embeddings": True,
            },
        }
    )
    mx.random.seed(seed)
    model = qwen3_5.Model(arguments)
    model.update(tree_map(lambda w: w * 2 if w.ndim == 2 else w, model.parameters()))
    mx.eval(model.parameters())
    return model


@click.command(help=__doc__)
@click.option("--tokens", default=64, show_default=True, help="Tokens per run.")
@click.option("--repeats", default=5, show_default=True, help="Runs of each kind, in turn.")
@click.option("--draft-length", default=4, show_default=True)
@click.option("--wrong", default=0.5, show_default=True, help="Chance that a drafted token is spoiled.")
def main(tokens: int, repeats: int, draft_length: int, wrong: float) -> None:
    from mlx.utils import tree_flatten

    model = hybrid_model()
    parameters = sum(w.size for _, w in tree_flatten(model.parameters()))
    prompt = [random.Random(1).randrange(1000) for _ in range(32)]
    plain_ids = Engine(model, drafters=()).generate(prompt, max_tokens=tokens).ids
    engine = Engine(model, drafters=[OftenWrong(prompt + plain_ids, wrong)])
    times: dict[str, list[float]] = {"plain": [], "record": [], "replay": []}
    passes = 0
    for _ in range(repeats):
        for kind, seconds in times.items():
            session = engine.new_session()
            session.transaction = Transaction(engine.target, record=kind != "replay")
            settings = Settings(max_tokens=tokens, speculate=kind != "plain", draft_length=draft_length)
            started = time.perf_counter()
            generation = engine.generation(session, prompt, settings).run()
            seconds.append(time.perf_counter() - started - generation.stats.prefill_s)
            if generation.ids != plain_ids:
                raise SystemExit(f"ids with rollback by {kind} differ from plain decoding")
            passes = generation.stats.target_passes if kind == "record" else passes
    rate = engine.generate(prompt, max_tokens=tokens, draft_length=draft_length).stats
    click.echo(
        f"{parameters / 1e6:.0f}M parameters, {tokens} tokens, {draft_length} drafts a round, acceptance rate "
        f"{rate.acceptance_rate:.0%}, {rate.tokens_per_pass:.2f} tokens per pass; ids identical in all runs\n"
    )
    click.echo("rollback    tokens/s: median (range)    of plain")
    base = median(times["plain"])
    for kind, seconds in times.items():
        name = "(plain)" if kind == "plain" else kind
        click.echo(
            f"{name:10}  {tokens / median(seconds):7.2f} ({tokens / max(seconds):.2f}-{tokens / min(seconds):.2f})"
            f"           {base / median(seconds):.2f}x"
        )
    click.echo(
        json.dumps(
            {
                "parameters": parameters,
                "tokens": tokens,
                "draft_length": draft_length,
                "wrong": wrong,
                "seconds": times,
                "acceptance_rate": rate.acceptance_rate,
            }
        )
    )


if __name__ == "__main__":
    main()
