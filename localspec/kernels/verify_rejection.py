"""Verification by the rejection rule, tested and raced by itself: another Metal file than the coupled rule's."""

from __future__ import annotations

from localspec.kernels import verify_trial
from localspec.kernels.kernel import Kernel
from localspec.kernels.verify import rejection

KERNEL = Kernel(
    name="verify-rejection",
    purpose="the same by the rejection rule",
    self_test=lambda: verify_trial.rejection_fault(rejection),
    heats=lambda: verify_trial.rejection_heats(rejection),
)
