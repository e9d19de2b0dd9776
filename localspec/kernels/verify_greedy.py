"""Verification at temperature 0: the coupled kernel, with a race of its own, because MLX has less to do there."""

from __future__ import annotations

from localspec.kernels import verify_trial
from localspec.kernels.kernel import Kernel
from localspec.kernels.verify import coupled

KERNEL = Kernel(
    name="verify-greedy",
    purpose="the same at temperature 0",
    self_test=lambda: verify_trial.coupled_fault(coupled, greedy=True),
    heats=lambda: verify_trial.coupled_heats(coupled, greedy=True),
)
