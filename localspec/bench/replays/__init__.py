"""Drafting rules of other programs, written from what was published, to be replayed beside localspec's own."""

from __future__ import annotations

from localspec.bench.replays.llama_cpp import LlamaCpp
from localspec.bench.replays.prompt_lookup import PromptLookup
from localspec.bench.replays.rule import Rule
from localspec.bench.replays.suffix import SuffixDecoding
from localspec.bench.replays.vllm import VllmNgram

BASELINES: tuple[type[Rule], ...] = (PromptLookup, VllmNgram, LlamaCpp, SuffixDecoding)

__all__ = ["BASELINES", "LlamaCpp", "PromptLookup", "Rule", "SuffixDecoding", "VllmNgram"]
