"""The folder of all files of n-grams."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from test_imports import loaded_by

from localspec.errors import LocalspecError
from localspec.ngrams import Shelf, shelf
from localspec.ngrams.lock import locked

A, B = "a" * 64, "b" * 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ngrams"


def filled(folder: Path) -> Shelf:
    made = Shelf(folder)
    made.file("learned", A, "Smol").learn([([1, 2, 3], 0)])
    made.file("learned", B).learn([([1, 2, 3, 4], 0)])
    made.file("seed", A).learn([([1, 2, 3], 0)], digest="d")
    return made


def test_the_package_is_light() -> None:
    assert "numpy" not in loaded_by("import localspec.ngrams")
    assert "numpy" in loaded_by("from localspec.ngrams import NgramStore")
    assert not {"mlx", "mlx_lm", "textual"} & loaded_by("from localspec.ngrams import Shelf, lessons")


def test_unknown_names_are_attribute_errors() -> None:
    import localspec.ngrams

    with pytest.raises(AttributeError, match="no attribute 'Shelve'"):
        localspec.ngrams.Shelve  # noqa: B018


def test_it_stands_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path / "home"))
    assert Shelf().folder == tmp_path / "home" / "ngrams"
    assert Shelf().enabled
    assert Shelf().entries() == Shelf().clear() == []
    assert not (tmp_path / "home").exists()


def test_levels_and_tokenizers_have_files_of_their_own(folder: Path) -> None:
    made = filled(folder)
    found = made.entries()
    assert [(entry.level, entry.fingerprint) for entry in found] == [("learned", A), ("learned", B), ("seed", A)]
    assert [(e.info.rows, e.info.texts, e.info.tokens, e.info.labels) for e in found] == [
        (1, 1, 3, ("Smol",)),
        (3, 1, 4, ()),
        (1, 1, 3, ()),
    ]
    assert all(entry.info.problem == "" and entry.info.bytes > 0 for entry in found)
    assert Shelf(folder).file("seed", A).knows("d")
    for fingerprint in ("", "../x", "A" * 64, "a.b"):
        with pytest.raises(ValueError, match="fingerprint"):
            made.file("learned", fingerprint)


def test_learning_is_turned_off_and_on(folder: Path) -> None:
    for _ in range(2):
        Shelf(folder).turn(False)
        assert not Shelf(folder).enabled
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "off").stat().st_mode & 0o777 == 0o600
    assert Shelf(folder).entries() == []
    for _ in range(2):
        Shelf(folder).turn(True)
        assert Shelf(folder).enabled


def test_off_stays_off_when_cleared(folder: Path) -> None:
    made = filled(folder)
    made.turn(False)
    made.clear()
    assert not made.enabled


def test_a_switch_that_cannot_be_turned(folder: Path) -> None:
    folder.write_text("a file")
    with pytest.raises(LocalspecError, match=r"cannot be turned off \(.*\): make .* writable"):
        Shelf(folder).turn(False)
    assert Shelf(folder).enabled
    assert Shelf(folder).entries() == []
    folder.unlink()
    (folder / "off").mkdir(parents=True)
    assert not Shelf(folder).enabled
    with pytest.raises(LocalspecError, match="cannot be turned on"):
        Shelf(folder).turn(True)


def test_files_that_cannot_be_used_are_reported(folder: Path) -> None:
    made = filled(folder)
    (folder / f"learned-{A}.ngrams").write_bytes(b"rubbish")
    (folder / f"learned-{A}.ngrams.damaged").write_bytes(b"older rubbish")
    (folder / f"seed-{B}.ngrams").write_bytes((folder / f"learned-{B}.ngrams").read_bytes()[:-1])
    (folder / "seed-c.ngrams").write_bytes((folder / f"learned-{B}.ngrams").read_bytes())  # another's
    (folder / "seed-d.ngrams").mkdir()
    (folder / "seed-e.ngrams").symlink_to(folder / f"learned-{B}.ngrams")
    (folder / "notes.txt").write_text("the user's")
    before = sorted(os.listdir(folder))
    found = {(e.level, e.fingerprint, e.info.problem): e.info for e in made.entries()}
    assert [key for key in found if key[2].partition(" ")[0] != "unreadable"] == [
        ("learned", A, "damaged"),
        ("learned", A, "set aside"),
        ("learned", B, ""),
        ("seed", A, ""),
        ("seed", B, "damaged"),
        ("seed", "c", "damaged"),
    ]
    assert sorted(key[1] for key in found if key[2].startswith("unreadable (")) == ["d", "e"]
    assert found["learned", A, "damaged"].bytes == 7
    assert sorted(os.listdir(folder)) == before


def test_clear_removes_what_was_chosen_and_nothing_else(folder: Path) -> None:
    made = filled(folder)
    (folder / "notes.txt").write_text("the user's")
    removed = made.clear(["learned"], A)
    assert [(entry.level, entry.fingerprint, entry.info.rows) for entry in removed] == [("learned", A, 1)]
    assert [(entry.level, entry.fingerprint) for entry in made.entries()] == [("learned", B), ("seed", A)]
    assert f"learned-{A}.ngrams.lock" not in os.listdir(folder)
    assert [entry.level for entry in made.clear(["learned"])] == ["learned"]
    assert [entry.level for entry in made.clear(["learned", "seed"], B)] == []
    assert [entry.level for entry in made.clear(fingerprint=A)] == ["seed"]
    assert os.listdir(folder) == ["notes.txt"]


def test_clear_leaves_nothing_of_a_file(folder: Path) -> None:
    made = filled(folder)
    (folder / f"learned-{A}.ngrams.damaged").write_bytes(b"private")
    (folder / f".learned-{A}.ngrams.x1y2").write_bytes(b"private")
    (folder / ".seed-c.ngrams.x1y2").write_bytes(b"private")
    (folder / "seed-e.ngrams.damaged").write_bytes(b"private")
    (folder / f"learned-{'d' * 64}.ngrams.lock").touch()
    removed = made.clear()
    assert os.listdir(folder) == []
    assert [(e.level, e.fingerprint, e.info.problem) for e in removed] == [
        ("learned", A, ""),
        ("learned", A, "set aside"),
        ("learned", B, ""),
        ("seed", A, ""),
        ("seed", "e", "set aside"),
    ]


def test_clear_waits_for_who_is_writing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = filled(folder)
    monkeypatch.setattr(shelf, "PATIENCE", 0.0)
    with (
        locked(folder / f"learned-{A}.ngrams.lock", 0),
        pytest.raises(LocalspecError, match=r"in use by another localspec: try again"),
    ):
        made.clear()
    assert len(made.entries()) == 3
    assert len(made.clear()) == 3


def test_clear_says_what_cannot_be_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, real = filled(folder), os.unlink

    def refuse(path: Any, *arguments: Any, **keywords: Any) -> None:
        if str(path).endswith(".ngrams"):
            raise PermissionError(errno.EACCES, "Permission denied")
        real(path, *arguments, **keywords)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(LocalspecError, match=r"learned-a+.ngrams cannot be removed \(Permission denied\)"):
        made.clear()


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Any) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied")

    made = filled(folder)
    monkeypatch.setattr(os, "listdir", refuse)
    for look in (made.entries, made.clear):
        with pytest.raises(LocalspecError, match=r"ngrams cannot be read \(Permission denied\): make it yours"):
            look()


@pytest.mark.parametrize(("given", "bound"), [("1", 1), (" 4096 ", 4096), ("007", 7), ("", 64)])
def test_the_bound_is_taken_from_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch, given: str, bound: int
) -> None:
    monkeypatch.setenv("LOCALSPEC_NGRAM_MB", given)
    lines: list[str] = []
    assert Shelf(folder, lines.append).file("learned", A).most_bytes == bound << 20
    assert lines == []


@pytest.mark.parametrize("given", ["0", "-1", "4097", "1.5", "much", "1e3", "٣", "9" * 5000, "1\n2"])
def test_a_bound_that_is_none_is_said_once(folder: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("LOCALSPEC_NGRAM_MB", given)
    lines: list[str] = []
    made = Shelf(folder, lines.append)
    assert made.file("learned", A).most_bytes == made.file("seed", A).most_bytes == 64 << 20
    assert len(lines) == 1
    assert "whole number from 1 to 4096" in lines[0]
    assert "\n" not in lines[0]
