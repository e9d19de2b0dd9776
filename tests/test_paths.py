"""Files go where they should, whole or not at all."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from localspec.paths import atomic_write_bytes, atomic_write_text, cache_dir


def test_home_wins_then_xdg_then_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "home"
    monkeypatch.setenv("LOCALSPEC_HOME", "")
    assert cache_dir() == tmp_path / "xdg" / "localspec"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_dir() == Path.home() / ".cache" / "localspec"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_dir() == Path.home() / "Library" / "Caches" / "localspec"


def test_atomic_write_replaces_and_keeps_the_old_on_failure(tmp_path: Path) -> None:
    file = tmp_path / "new" / "file"
    atomic_write_text(file, "é")
    assert file.read_bytes() == "é".encode()
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(TypeError):
        atomic_write_bytes(file, "not bytes")  # type: ignore[arg-type]
    assert file.read_text() == "é"
    assert os.listdir(file.parent) == ["file"]
