"""The bench of the drafting loop counts what it says it counts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tiny import tiny_llama

from localspec.bench import draft_loop
from localspec.bench.draft_loop import Case, Loop, compare
from localspec.errors import SettingsError

PROMPT = [3, 1, 4, 1]


class Counted:
    """A model that counts its passes behind the prompt, of which a draft makes one per drafted token."""

    def __init__(self, model: Any) -> None:
        self.model, self.passes = model, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, inputs: Any, cache: Any) -> Any:
        self.passes += cache[0].offset >= len(PROMPT) - 1
        return self.model(inputs, cache=cache)


@pytest.mark.parametrize("seed", [0, 1])
def test_mlx_lms_drafts_are_counted_by_its_passes(seed: int) -> None:
    draft = Counted(tiny_llama(seed))
    for limit in (1, 5, 13):
        draft.passes = 0
        *_, (_, drafted) = draft_loop._mlx_lm(tiny_llama(), draft, PROMPT, 3, limit)
        assert drafted == draft.passes


def test_both_loops_emit_the_same_ids() -> None:
    for draft in (tiny_llama(), tiny_llama(1, layers=1)):
        case = compare("tiny", tiny_llama(), draft, PROMPT, draft_length=2, tokens=8, repeats=1)
        assert case.identical
        ((theirs, ours),) = case.pairs
        assert len(ours.ids) == 8
        assert 0 < ours.drafted <= theirs.drafted  # mlx-lm drafts for the place of the last token, too
        json.dumps(case.as_dict(), allow_nan=False)


def test_figures_are_per_drafted_token() -> None:
    pairs = [
        (Loop((1,), 8, 1.0, 4.0), Loop((1,), 16, 1.0, 2.0)),
        (Loop((2,), 8, 1.0, 4.0), Loop((3,), 8, 0.75, 4.0)),
    ]
    case = Case("a", 2, pairs)
    assert case.host_ratio is not None
    assert (case.host_ratio.low, case.host_ratio.high) == (0.5, 0.75)
    assert case.wall_ratio is not None
    assert (case.wall_ratio.low, case.wall_ratio.high) == (0.25, 1.0)
    assert not case.identical
    assert "DIFFERENT" in case.row()
    assert "0.625 (0.500-0.750)" in case.row()


@pytest.mark.parametrize(("repeats", "tokens"), [(0, 20), (1, 5)])
def test_too_little_to_compare(repeats: int, tokens: int) -> None:
    with pytest.raises(SettingsError, match="at least one pair"):
        compare("tiny", tiny_llama(), tiny_llama(), PROMPT, draft_length=2, tokens=tokens, repeats=repeats)
