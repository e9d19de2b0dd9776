"""`localspec verify`: proof, on the user's machine, that speculation changes no token.

`run.py` has the whole of it, `trajectories.py` decodes with and without drafts, `comparison.py` judges what came out,
`distributions.py` counts what the acceptance rules draw, `report.py` shows the result.
"""
