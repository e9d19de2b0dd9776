"""Key/value caches and recurrent state: how what a pass appended is taken back, for every kind that mlx-lm has."""
