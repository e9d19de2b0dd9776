"""An emulator of Metal compute kernels for tests: the source of an `mx.fast.metal_kernel`, unmodified, on the CPU.

Knows nothing of localspec. `emulator.py` is the way in; README.md says what is emulated and what cannot be.
"""
