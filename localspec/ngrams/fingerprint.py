"""Which tokenizer ids belong to, by its vocabulary: two models that share one share what is learned."""

from __future__ import annotations

from localspec.vocabulary import fingerprint

__all__ = ["fingerprint"]
