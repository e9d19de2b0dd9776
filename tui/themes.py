"""localspec's own dark and light theme: grey, so that the only colours on the screen are the tokens'."""

from __future__ import annotations

from textual.theme import Theme

DARK = Theme(
    name="localspec-dark",
    dark=True,
    primary="#9DB2C7",
    secondary="#7C8DA0",
    accent="#C3D0DD",
    foreground="#D9DEE4",
    background="#11151A",
    surface="#191F26",
    panel="#222A33",
    warning="#E69F00",
    error="#F08A7B",
    success="#4CB39A",
    variables={"border": "#4A5866", "border-blurred": "#2C3640", "scrollbar": "#2C3640", "scrollbar-hover": "#4A5866"},
)
LIGHT = Theme(
    name="localspec-light",
    dark=False,
    primary="#3F566C",
    secondary="#5B6F82",
    accent="#2B3D4F",
    foreground="#20262C",
    background="#FBFBF9",
    surface="#F0F1EF",
    panel="#E4E7E7",
    warning="#8A5D00",
    error="#A5271B",
    success="#00684B",
    variables={"border": "#93A1AE", "border-blurred": "#CBD3D9", "scrollbar": "#D3D9DD", "scrollbar-hover": "#93A1AE"},
)
THEMES = (DARK, LIGHT)
