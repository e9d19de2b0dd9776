"""Verification of a pass in one Metal dispatch: tokens, acceptance and probabilities from logits, nothing in between.

`verify_reference.py` gives the same answers in MLX's operations and says what they mean.
"""

from __future__ import annotations

from localspec.kernels.verify_reference import (
    Coupled,
    DraftDistribution,
    Judged,
    coupled_reference,
    rejection_reference,
)

__all__ = ["Coupled", "DraftDistribution", "Judged", "coupled_reference", "rejection_reference"]
