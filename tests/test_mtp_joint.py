"""The joint distribution of what comes out with an MTP head, whose draft vocabulary lacks a token that is often right.

The target knows four tokens, so the probability of every string of three is known by enumeration.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from heads import easy_llama, write_own
from odds import FALSE_ALARM, chi_square

from localspec import noise as noise_module
from localspec.drafters import MTPDrafter
from localspec.drafters.protocol import Draw, UnreadProposal
from localspec.engine import Engine
from localspec.models import mtp
from localspec.noise import Stream
from localspec.sampling import distribution
from localspec.settings import Settings

VOCABULARY, RUNS = 4, 250
PROMPT = [1, 2, 0, 3, 1]
SAMPLER = {"temperature": 1.0, "top_k": 3}


@pytest.fixture(autouse=True)
def _quick_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in test_joint.py."""

    def bits(seed: int, stream: Stream, positions: Sequence[int], size: int) -> mx.array:
        keys = [[seed, int(stream) << 32 | position] for position in positions]
        rows = [np.random.Generator(np.random.Philox(key=key)).integers(0, 2**32, size, np.uint32) for key in keys]
        return mx.array(np.stack(rows))

    monkeypatch.setattr(noise_module, "bits", bits)


class Misreporting(MTPDrafter):
    """A planted bug: q as if the draft had been drawn from all ids alike."""

    def fresh(self) -> Misreporting:
        return Misreporting(self.head, trial=self.trial)

    def propose(self, length: int, draw: Draw) -> UnreadProposal | None:
        proposal = super().propose(length, draw)
        if proposal is None or proposal.q is None:
            return proposal
        return replace(proposal, q=mx.full(proposal.q.shape, 1 / VOCABULARY))


@functools.cache
def _target() -> object:
    return easy_llama(3, vocabulary=VOCABULARY)


@functools.cache
def _strings() -> np.ndarray:
    out = np.ones((VOCABULARY,) * 3)
    for length in range(3):
        for prefix in itertools.product(range(VOCABULARY), repeat=length):
            logits = _target()(mx.array([[*PROMPT, *prefix]]))[0, -1:]  # type: ignore[operator]
            p = np.array(distribution(logits, Settings(**SAMPLER)).probabilities()[0], np.float64)  # type: ignore[arg-type]
            out[prefix] *= (p / p.sum()).reshape(-1, *[1] * (2 - length))
    return out


def _p_value(drafter: MTPDrafter, accept: str) -> tuple[float, float]:
    """(the odds of such counts, accepted / drafted)."""
    engine = Engine(_target(), drafters=[drafter])
    session = engine.new_session()
    counts = np.zeros((VOCABULARY,) * 3)
    drafted = accepted = 0
    for seed in range(RUNS):
        settings = Settings(max_tokens=3, seed=seed, accept=accept, draft_length=2, **SAMPLER)  # type: ignore[arg-type]
        generation = engine.generation(session, PROMPT, settings).run()
        counts[tuple(generation.ids)] += 1
        drafted, accepted = drafted + generation.stats.drafted, accepted + generation.stats.accepted
    return chi_square(counts, _strings()), accepted / drafted


@pytest.mark.parametrize("accept", ["rejection", "block"])
def test_strings_of_three_tokens_come_as_often_as_they_should(accept: str, tmp_path: Path) -> None:
    """250 runs over 64 strings. Odds of a false alarm: 1e-6 each. The same head with a misreported q is found."""
    write_own(tmp_path / "head.safetensors", _target(), draft_ids=(0, 1, 3))
    source = mtp.find(tmp_path / "head.safetensors")
    assert source is not None
    head = mtp.load_head(source, _target())
    assert _strings().sum() == pytest.approx(1)
    odds, rate = _p_value(MTPDrafter(head), accept)
    assert odds > FALSE_ALARM
    assert 0.1 < rate < 0.95
    assert _p_value(Misreporting(head), accept)[0] < FALSE_ALARM
