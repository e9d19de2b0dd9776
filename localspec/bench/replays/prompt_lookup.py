"""Prompt lookup (Saxena 2023) as HF transformers' `PromptLookupCandidateGenerator` has it."""

from __future__ import annotations

from localspec.bench.replays.rule import Rule, places


class PromptLookup(Rule):
    """The longest n-gram of at most 2 tokens that stood before, at its earliest place; the 10 tokens behind it.

    The proposal ends at the end of the text. transformers' default sizes: `max_matching_ngram_size` 2,
    `prompt_lookup_num_tokens` 10.
    """

    name = "prompt lookup"
    longest, tokens = 2, 10

    def propose(self, limit: int) -> list[int]:
        for n in range(min(self.longest, len(self.text) - 1), 0, -1):
            found = places(self.text, n)
            if found:
                return self.text[found[0] : found[0] + min(limit, self.tokens)]
        return []
