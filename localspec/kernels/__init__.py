"""Metal kernels for verification and sampling, each with a pure-MLX reference that gives the same results anywhere.

A kernel is used only on a machine where its self-test agreed with the reference and it won its race against MLX's own
operations; everywhere else, and wherever it is turned off, the reference runs. `docs/kernels.md` has the details.
"""
