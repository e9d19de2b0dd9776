"""The first promise on mlx-lm's architectures: a subset by kind of cache and rollback here, all of them in sweep.py."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from architectures import ARCHITECTURES, CANNOT_BE_BUILT, HELPERS, VOCABULARY, build, modules
from mlx_lm.models.cache import make_prompt_cache
from sweep import PROMPTS, Examination, kinds

from localspec.caches.leaves import SnapshotLeaf
from localspec.target import Target
from localspec.transaction import Transaction

SUBSET = {
    "deepseek_v32": "lists of two key/value caches",
    "deepseek_v41": "a kind of cache of the model's own, with compressed blocks: replayed",
    "falcon_h1": "lists of recurrent state and a key/value cache",
    "gemma3n": "sliding windows, layers that share another's cache",
    "iquestloopcoder": "two caches per layer, one of them a sliding window",
    "llama4": "chunked attention",
    "longcat_flash_ngram": "the last tokens themselves as state",
    "mamba2": "state space layers only",
    "qwen3_next": "gated delta layers among attention, experts",
    "recurrent_gemma": "linear recurrence among sliding windows",
}

WINDOWED = {"deepseek_v41", "gemma3n", "iquestloopcoder", "llama4", "recurrent_gemma"}

RECURRENT = [
    "baichuan_m1",
    "bailing_hybrid",
    "bailing_moe_linear",
    "bailing_moe_v3",
    "falcon_h1",
    "gear",
    "granitemoehybrid",
    "jamba",
    "kimi_k3",
    "kimi_linear",
    "lfm2",
    "lfm2-vl",
    "lfm2_moe",
    "longcat_flash_ngram",
    "mamba",
    "mamba2",
    "nemotron_h",
    "olmo_hybrid",
    "plamo2",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "recurrent_gemma",
    "rwkv7",
]
"""All architectures that hold recurrent state."""
NOT_RECORDED = {"baichuan_m1"}
"""Those whose layers are handed recurrent state and keys and values in one list."""
_ONE_PER_FAMILY = {
    "baichuan_m1",  # convolution of keys and values
    "bailing_moe_linear",  # linear attention
    "granitemoehybrid",  # mamba 2
    "jamba",  # mamba
    "kimi_linear",  # delta attention with gates per channel
    "lfm2",  # short convolution
    "plamo2",  # mamba 2 of its own
    "qwen3_next",  # gated delta
    "recurrent_gemma",  # linear recurrence
    "rwkv7",  # token shift and delta rule
}
ROWS = 7


def test_every_architecture_of_mlx_lm_has_a_configuration() -> None:
    known = set(ARCHITECTURES) | set(CANNOT_BE_BUILT)
    assert known - modules() <= set()
    # mlx-lm may gain some within the range of versions that is allowed; none that is known may be forgotten.
    assert len(modules() - known - HELPERS) <= 10


@pytest.mark.parametrize("name", SUBSET)
def test_ids_do_not_depend_on_speculation(name: str) -> None:
    """Three drafters; ids, the next turn's ids, and mlx-lm's own. Shorter and longer prompts where windows fill."""
    result = Examination(name).run((4,), (0.8,), tuple(PROMPTS) if name in WINDOWED else ("long",))
    assert not result.fault, result
    assert result.rounding or result.verdict == "identical", result
    assert len(result.divergences) <= 1, result
    assert set(result.partial) == {1, 2, 3}
    assert result.distinct >= 15


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sweep(name: str) -> None:
    """Minutes to an hour; `make sweep` shows more of it."""
    result = Examination(name).run()
    assert not result.fault, result
    assert result.rounding or result.verdict == "identical", result
    assert len(result.partial) >= 5
    assert result.distinct >= 15


@pytest.mark.parametrize("name", ["gemma3_text", "iquestloopcoder", "plamo3"])
def test_rows_of_a_pass_see_the_window_that_single_rows_see(name: str) -> None:
    """PLaMo 3 asks for a mask one token wider than the window that its caches hold."""
    assert Examination(name).rounding() < 1e-3


def _state(transaction: Transaction) -> list[mx.array]:
    leaves = [leaf for leaf in transaction._leaves if isinstance(leaf, SnapshotLeaf)]
    return [array for leaf in leaves for array in leaf.arrays()]


def _kept(target: Target, rows: int, kept: int, record: bool) -> tuple[Transaction, mx.array, list[mx.array]]:
    """A pass of which `kept` rows stay: the transaction, the logits of one more row, the state before that one."""
    transaction = Transaction(target, record=record)
    transaction.prefill(PROMPTS["long"])
    ids = mx.array([(13 * i + 5) % VOCABULARY for i in range(ROWS + 1)], mx.uint32)
    transaction.forward(ids[:rows])
    transaction.commit(len(PROMPTS["long"]) + kept)
    state = [mx.array(array) for array in _state(transaction)]
    mx.eval(state)
    return transaction, transaction.forward(ids[kept : kept + 1]), state


def _apart(one: list[mx.array], other: list[mx.array]) -> float:
    """Largest difference, where numbers are large relative to them."""
    assert [a.shape for a in one] == [b.shape for b in other]
    assert one
    pairs = [(a.astype(mx.float32), b.astype(mx.float32)) for a, b in zip(one, other, strict=True)]
    return max(float((mx.max(mx.abs(a - b)) / mx.maximum(mx.max(mx.abs(b)), 1)).item()) for a, b in pairs)


def rebuilt(name: str) -> tuple[float, float, float]:
    """How far recorded state is from that of a pass of the kept rows alone, from replayed state, and their logits."""
    target = Target(build(name))
    worst = [0.0, 0.0, 0.0]
    for kept in range(1, ROWS):
        recorded, logits, state = _kept(target, ROWS, kept, True)
        assert recorded.rollback == ("replay" if name in NOT_RECORDED else "record")
        _, replayed_logits, replayed = _kept(target, ROWS, kept, False)
        _, alone_logits, alone = _kept(target, kept, kept, False)
        found = (
            _apart(state, alone),
            _apart(state, replayed),
            max(_apart([logits], [replayed_logits]), _apart([logits], [alone_logits])),
        )
        worst = [max(a, b) for a, b in zip(worst, found, strict=True)]
    return worst[0], worst[1], worst[2]


@pytest.mark.parametrize(
    "name", [name if name in _ONE_PER_FAMILY else pytest.param(name, marks=pytest.mark.slow) for name in RECURRENT]
)
def test_recorded_state_is_that_of_the_kept_rows(name: str) -> None:
    """For every number of kept rows: as if only they had run, and as if they had run again."""
    assert max(rebuilt(name)) < 1e-5


def test_recurrent_architectures_are_all_there() -> None:
    def holds_state(cache: Any) -> bool:
        return any("ArraysCache" in kind for kind in kinds(cache))

    assert all(holds_state(make_prompt_cache(build(name))) for name in sorted(_ONE_PER_FAMILY))
