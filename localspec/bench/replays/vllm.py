"""vLLM's n-gram proposer (`vllm/v1/spec_decode/ngram_proposer.py`)."""

from __future__ import annotations

from localspec.bench.replays.rule import Rule, places


class VllmNgram(Rule):
    """The longest n-gram of 2 to 4 tokens that stood before, at its earliest place; the 5 tokens behind it.

    The proposal ends at the end of the text. The sizes are those of vLLM's own example of n-gram speculation
    (`prompt_lookup_max` 4, `num_speculative_tokens` 5), with `prompt_lookup_min` 2.
    """

    name = "vLLM n-gram"
    shortest, longest, tokens = 2, 4, 5

    def propose(self, limit: int) -> list[int]:
        for n in range(min(self.longest, len(self.text) - 1), self.shortest - 1, -1):
            found = places(self.text, n)
            if found:
                return self.text[found[0] : found[0] + min(limit, self.tokens)]
        return []
