"""The terminal UI of `localspec chat`: a Textual app that reads the engine's own record of each token.

Imported only as `localspec.tui`; nothing else in localspec imports it, so that the engine never loads Textual.
"""
