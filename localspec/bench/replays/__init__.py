"""Drafting rules of other programs, written from what was published, to be replayed beside localspec's own."""

from __future__ import annotations

from localspec.bench.replays.llama_cpp import LlamaCppContext
from localspec.bench.replays.prompt_lookup import PromptLookup
from localspec.bench.replays.rule import Rule
from localspec.bench.replays.suffix import SuffixDecoding
from localspec.bench.replays.vllm import VllmNgram

BASELINES: tuple[type[Rule], ...] = (PromptLookup, VllmNgram, LlamaCppContext, SuffixDecoding)

__all__ = ["BASELINES", "LlamaCppContext", "PromptLookup", "Rule", "SuffixDecoding", "VllmNgram"]
