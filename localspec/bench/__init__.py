"""Plain against speculative decoding, paired in one run: `localspec bench`.

`workloads` says what is decoded, `pairs` holds what was measured, `summary` turns pairs into figures, `report` shows
them, `run` does the measuring. `baseline` compares plain decoding with mlx-lm's own.
"""
