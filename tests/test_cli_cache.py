"""`localspec cache`: what it shows, deletes, switches and teaches."""

from __future__ import annotations

import json
import os
import random
import string
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result
from scripted_engine import ESCAPE, run
from tiny import tiny_tokenizer
from tiny_checkpoint import write_tiny_checkpoint

from localspec.commands import cache
from localspec.memory import format_bytes
from localspec.models import catalogue
from localspec.ngrams import NgramFile, Shelf
from localspec.ngrams.store import ORDERS

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen.\n"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a default model, whose tokens are bytes."""
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("LOCALSPEC_NGRAMS", "LOCALSPEC_NGRAM_MB"):
        monkeypatch.delenv(name, raising=False)
    write_tiny_checkpoint(tmp_path / "home" / "models" / "smollm2")
    return tmp_path / "home"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text(TEXT)
    return folder


@pytest.fixture
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localspec.loading.load_tokenizer", lambda *a: pytest.fail("a tokenizer was loaded"))


def seed_file() -> NgramFile:
    (entry,) = Shelf().entries()
    assert entry.level == "seed"
    return Shelf().file("seed", entry.fingerprint)


def ids(text: str) -> list[int]:
    """As the default model's tokenizer has them."""
    tokenizer, _ = cache._tokenizer("smollm2")
    found: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return found


def fill(level: Any, fingerprint: str, label: str, tokens: list[int]) -> None:
    Shelf().file(level, fingerprint, label).learn([(tokens, 0)])


def failed(outcome: Result, status: int = 1) -> str:
    """The one line that it failed with."""
    assert outcome.exit_code == status, outcome.output
    assert outcome.stderr.count("\n") == 1 or status == 2
    assert outcome.stdout == ""
    return outcome.stderr


# -- learn -------------------------------------------------------------------------------------------------------------


def test_a_file_is_learned(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localspec.loading.load_weights", lambda *a: pytest.fail("weights were loaded"))
    outcome = run("cache", "learn", str(texts / "a.txt"))
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    assert outcome.stdout.startswith(f"learned 1 text, {len(TEXT)} tokens, for smollm2: ")
    assert outcome.stdout.count("\n") == 1
    file, tokens = seed_file(), ids(TEXT)
    assert (file.info().tokens, file.info().labels) == (len(TEXT), ("smollm2",))
    for end in (2, 3, 6, 40, len(tokens) - 1):
        assert file.store.matches(tokens[:end])[-1].order == max(order for order in ORDERS if order <= end)
    assert file.store.matches(tokens[:40])[-1].token == tokens[40]


def test_no_start_token_is_learned(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer(adds_start=True)
    assert tokenizer.encode("ab")[0] == tokenizer.bos_token_id
    monkeypatch.setattr(cache, "_tokenizer", lambda name: (tokenizer, name))
    run("cache", "learn", str(texts))
    assert tokenizer.bos_token_id not in seed_file().store.to_arrays().followers
    assert seed_file().info().tokens == len(tokenizer.encode(TEXT, add_special_tokens=False))


def test_what_is_left_out_in_a_folder(texts: Path, tmp_path: Path) -> None:
    (texts / "sub" / "deep").mkdir(parents=True)
    (texts / "sub" / "deep" / "b.md").write_text("deep\r\nlines\n")
    (texts / ".hidden").write_text("secret one")
    (texts / ".git").mkdir()
    (texts / ".git" / "c.txt").write_text("secret two")
    (texts / "binary.png").write_bytes(b"\x89PNG\0\0")
    (texts / "latin.txt").write_bytes("é".encode("latin-1"))
    (texts / "cut.txt").write_bytes(b"ab\xc3")
    (texts / "nothing.txt").write_text("")
    (texts / "blank.txt").write_text(" \n\n")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "d.txt").write_text("secret three")
    (texts / "link.txt").symlink_to(tmp_path / "outside" / "d.txt")
    (texts / "link").symlink_to(tmp_path / "outside")
    (texts / "round").symlink_to(texts)
    (texts / "same.txt").write_text(TEXT)
    os.mkfifo(texts / "pipe")
    outcome = run("cache", "learn", str(texts))
    assert outcome.exit_code == 0
    assert outcome.stderr.splitlines() == [
        "skipped 1: binary",
        "skipped 2: empty",
        "skipped 2: hidden",
        "skipped 1: known already",
        "skipped 1: neither files nor folders",
        "skipped 2: not UTF-8",
        "skipped 3: symbolic links",
    ]
    assert outcome.stdout.startswith(f"learned 2 texts, {len(TEXT) + len('deep') + len('lines') + 2} tokens, ")
    store = seed_file().store
    assert store.matches(ids("deep\n"))[-1].order == 4
    for secret in ("secret one", "secret two", "secret three"):
        assert not store.matches(ids(secret[:4]))


def test_a_text_that_is_known_is_left_out(texts: Path) -> None:
    run("cache", "learn", str(texts))
    before = seed_file().info()
    (texts / "renamed.txt").write_text(TEXT)
    (texts / "new.txt").write_text("something else")
    outcome = run("cache", "learn", str(texts))
    assert outcome.stderr == "skipped 2: known already\n"
    assert outcome.stdout.startswith("learned 1 text, 14 tokens, ")
    assert seed_file().info().tokens == before.tokens + 14
    again = run("cache", "learn", str(texts))
    assert again.exit_code == 0
    assert again.stdout.startswith("learned 0 texts, 0 tokens, ")


def test_a_byte_order_mark_is_no_text(texts: Path) -> None:
    (texts / "a.txt").write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    run("cache", "learn", str(texts))
    assert seed_file().info().tokens == len(TEXT)


def test_a_long_text_is_learned_in_parts_without_seams(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(3)
    lines = ["".join(chance.choices(string.ascii_letters, k=29)) + "\n" for _ in range(400)]
    (texts / "a.txt").write_text("".join(lines))
    saves: list[int] = []
    teach = NgramFile.teach
    monkeypatch.setattr(NgramFile, "teach", lambda self, texts: saves.append(len(texts)) or teach(self, texts))
    monkeypatch.setattr("localspec.ngrams.texts.PIECE", 50)
    monkeypatch.setattr(cache, "_BATCH", 1000)
    outcome = run("cache", "learn", str(texts))
    assert outcome.stdout.startswith("learned 1 text, 12,000 tokens, ")
    assert len(saves) >= 12
    store, tokens = seed_file().store, ids("".join(lines))
    for end in range(6, len(tokens)):
        found = store.matches(tokens[end - 6 : end])
        assert found[-1].order == 6
        assert found[-1].token == tokens[end]
    assert run("cache", "learn", str(texts)).stderr == "skipped 1: known already\n"


def test_many_small_texts_are_saved_together(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(200):
        (texts / f"{number}.txt").write_text(f"number {number}")
    saves: list[int] = []
    teach = NgramFile.teach
    monkeypatch.setattr(NgramFile, "teach", lambda self, texts: saves.append(len(texts)) or teach(self, texts))
    run("cache", "learn", str(texts))
    assert saves == [201]
    assert seed_file().info().texts == 201
    assert run("cache", "learn", str(texts)).stderr == "skipped 201: known already\n"


def _interrupted_at(text: str) -> Callable[[str], tuple[Any, str]]:
    tokenizer = tiny_tokenizer()

    def encode(piece: str, **keywords: Any) -> Any:
        if piece == text:
            raise KeyboardInterrupt
        return tokenizer.encode(piece, **keywords)

    return lambda name: (SimpleNamespace(encode=encode, get_vocab=tokenizer.get_vocab), name)


def test_ctrl_c_keeps_what_was_learned(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b", "c", "d"):
        (texts / f"{name}.txt").write_text(f"the text of {name}")
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_tokenizer", _interrupted_at("the text of c"))
        outcome = run("cache", "learn", str(texts))
    assert outcome.exit_code == 130
    assert outcome.stdout.startswith("learned 2 texts, ")
    assert seed_file().info().texts == 2
    monkeypatch.setattr(cache, "_tokenizer", lambda name: (tiny_tokenizer(), name))
    again = run("cache", "learn", str(texts))
    assert again.stderr == "skipped 2: known already\n"
    assert again.stdout.startswith("learned 2 texts, ")


@pytest.mark.parametrize("saved", [False, True])
def test_ctrl_c_in_the_middle_of_a_save_drops_nothing(
    texts: Path, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    for name in ("b", "c", "d"):
        (texts / f"{name}.txt").write_text(f"the text of {name}")
    teach, calls = NgramFile.teach, []

    def interrupted(file: NgramFile, texts: Any) -> bool:
        calls.append(len(texts))
        if len(calls) > 1:
            return teach(file, texts)
        if saved:
            teach(file, texts)
        raise KeyboardInterrupt

    monkeypatch.setattr(NgramFile, "teach", interrupted)
    monkeypatch.setattr(cache, "_BATCH", len(TEXT) + 1)
    outcome = run("cache", "learn", str(texts))
    assert outcome.exit_code == 130
    size = len(TEXT) + len("the text of b")
    assert calls == [2, 2]
    assert outcome.stdout.startswith(f"learned 2 texts, {size} tokens, ")
    assert (seed_file().info().texts, seed_file().info().tokens) == (2, size)


def test_more_than_the_file_holds(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALSPEC_NGRAM_MB", "1")
    chance = random.Random(1)
    (texts / "long.txt").write_text("".join(chance.choices(string.ascii_letters + "\n", k=40_000)))
    outcome = run("cache", "learn", str(texts))
    assert outcome.exit_code == 0
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("the file is full (1 MiB): ")
    assert "LOCALSPEC_NGRAM_MB" in line
    assert Shelf().entries()[0].info.bytes <= 1 << 20


def test_learning_for_another_model(texts: Path, tmp_path: Path) -> None:
    other = write_tiny_checkpoint(tmp_path / "other")
    outcome = run("cache", "learn", str(texts), "--model", str(other))
    assert "for other: " in outcome.stdout
    assert seed_file().info().labels == ("other",)


def test_learning_while_it_is_off_says_so(texts: Path) -> None:
    run("cache", "off")
    outcome = run("cache", "learn", str(texts))
    assert outcome.exit_code == 0
    assert "localspec cache on" in outcome.stderr
    assert seed_file().info().texts == 1


def test_progress_on_a_terminal(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "is_terminal", lambda stream: True)
    (texts / "b.txt").write_text("é\r\n" * 9)
    (texts / "c.txt").write_bytes(b"\0")
    outcome = run("cache", "learn", str(texts))
    assert outcome.exit_code == 0
    assert "learning" in outcome.stderr
    assert "learning" not in outcome.stdout


def test_missing_paths_are_told_before_anything_is_loaded(texts: Path, no_tokenizer: None, home: Path) -> None:
    line = failed(run("cache", "learn", str(texts), str(texts / "nowhere")))
    assert line == f"localspec: {texts / 'nowhere'}: no such file or folder\n"
    assert "neither a file nor a folder" in failed(run("cache", "learn", "/dev/null"))
    assert not (home / "ngrams").exists()


@pytest.mark.parametrize(
    ("path", "said"), [("", "a path is empty"), (" ", "a path is empty"), ("~nobody-at-all/x", "no such user")]
)
def test_a_path_that_means_something_else_is_refused(path: str, said: str, no_tokenizer: None, home: Path) -> None:
    assert said in failed(run("cache", "learn", path))
    assert not (home / "ngrams").exists()


def test_a_path_that_may_not_be_read(texts: Path, no_tokenizer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localspec.ngrams.texts.os.access", lambda *a: False)  # root may read everything
    assert failed(run("cache", "learn", str(texts / "a.txt"))).endswith("a.txt: no permission to read it\n")


def test_a_file_that_cannot_be_read_after_all_is_skipped(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (texts / "b.txt").write_text("more")
    open_ = Path.open

    def opened(path: Path, *arguments: Any, **keywords: Any) -> Any:
        if path.name == "a.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return open_(path, *arguments, **keywords)

    monkeypatch.setattr(Path, "open", opened)
    outcome = run("cache", "learn", str(texts))
    assert outcome.stderr == "skipped 1: not readable\n"
    assert outcome.stdout.startswith("learned 1 text, 4 tokens")


def test_nothing_to_learn(tmp_path: Path, no_tokenizer: None) -> None:
    (tmp_path / "empty").mkdir()
    assert "nothing to learn" in failed(run("cache", "learn", str(tmp_path / "empty")))
    (tmp_path / "empty" / ".hidden").write_text("x")
    assert "(skipped: 1 hidden)" in failed(run("cache", "learn", str(tmp_path / "empty")))


def test_nothing_but_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    outcome = run("cache", "learn", str(tmp_path / "empty.txt"))
    assert outcome.exit_code == 1
    assert outcome.stderr.splitlines()[:-1] == ["skipped 1: empty"]
    assert outcome.stderr.splitlines()[-1].startswith("localspec: nothing to learn")


def test_a_disk_that_cannot_be_written(texts: Path, home: Path) -> None:
    (home / "ngrams").write_text("in the way")
    outcome = run("cache", "learn", str(texts))
    assert outcome.exit_code == 1
    assert "could not be saved" in outcome.stderr.splitlines()[-1]
    assert "Traceback" not in outcome.stderr
    assert "ngrams" in outcome.stderr.splitlines()[0]


def test_an_unknown_model(texts: Path) -> None:
    assert "smollm2" in failed(run("cache", "learn", str(texts), "--model", "smolm2"))


# -- show --------------------------------------------------------------------------------------------------------------


def test_show_nothing(home: Path) -> None:
    outcome = run("cache", "show")
    assert outcome.stdout == f"learning is on\nnothing is remembered in {home / 'ngrams'}\n"
    assert not (home / "ngrams").exists()


def test_show(home: Path) -> None:
    fill("learned", "a" * 64, "one", list(range(30)))
    fill("learned", "a" * 64, "two", list(range(40)))
    fill("seed", "b" * 64, f"ev{ESCAPE}[31mil", list(range(1000, 1010)))
    (home / "ngrams" / f"learned-{'c' * 64}.ngrams").write_bytes(b"garbage")
    outcome = run("cache", "show")
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    assert ESCAPE not in outcome.stdout
    state, folder, header, *rows, total = outcome.stdout.splitlines()
    assert (state, folder) == ("learning is on", f"{home / 'ngrams'}:")
    assert header.split()[0] == "LEVEL"
    assert [row.split()[0] for row in rows] == ["learned", "learned", "seed"]
    assert "one, two" in rows[0]
    assert " 70 " in rows[0]
    assert f"learned-{'a' * 64}.ngrams" in rows[0]
    assert "(damaged)" in rows[1]
    assert "64 MiB" in total
    document = json.loads(run("cache", "show", "--json").stdout)
    assert document["learning"] is True
    assert document["bytes"] == sum(record["bytes"] for record in document["files"])
    first = document["files"][0]
    assert {"level": "learned", "models": ["one", "two"], "tokens": 70, "texts": 2, "problem": None}.items() <= (
        first.items()
    )
    assert Path(first["path"]).stat().st_size == first["bytes"]
    assert first["ngrams"] == Shelf().file("learned", "a" * 64).store.rows
    assert document["files"][1]["problem"] == "damaged"


def test_show_a_file_that_was_set_aside(home: Path) -> None:
    fill("learned", "a" * 64, "one", list(range(30)))
    (path,) = (home / "ngrams").glob("*.ngrams")
    path.write_bytes(b"garbage")
    fill("learned", "a" * 64, "one", list(range(30)))
    records = json.loads(run("cache", "show", "--json").stdout)["files"]
    assert sorted(record["problem"] or "" for record in records) == ["", "set aside"]
    for record in records:
        assert Path(record["path"]).stat().st_size == record["bytes"]


# -- off and on --------------------------------------------------------------------------------------------------------


def test_off_and_on(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill("learned", "a" * 64, "one", list(range(30)))
    assert "learning is off" in run("cache", "off").stdout
    assert "learning is off; to turn it on: localspec cache on" in run("cache", "show").stdout
    document = json.loads(run("cache", "show", "--json").stdout)
    assert (document["learning"], document["off_by"], len(document["files"])) == (False, "cache off", 1)
    assert run("cache", "off").exit_code == 0
    assert run("cache", "on").stdout == "learning is on\n"
    assert run("cache", "on").exit_code == 0
    assert json.loads(run("cache", "show", "--json").stdout)["learning"] is True
    monkeypatch.setenv("LOCALSPEC_NGRAMS", "off")
    assert "LOCALSPEC_NGRAMS says so" in run("cache", "show").stdout
    assert "LOCALSPEC_NGRAMS" in run("cache", "on").stdout
    monkeypatch.setenv("LOCALSPEC_NGRAMS", "nope")
    assert "on or off, not 'nope'" in failed(run("cache", "show"), 2)


def test_a_bad_switch_is_told_before_anything_is_done(
    texts: Path, no_tokenizer: None, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("cache", "off")
    monkeypatch.setenv("LOCALSPEC_NGRAMS", "nope")
    for arguments in (["on"], ["learn", str(texts)]):
        assert "on or off, not 'nope'" in failed(run("cache", *arguments), 2)
    assert not Shelf().enabled
    assert os.listdir(home / "ngrams") == ["off"]


# -- clear -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def filled(home: Path) -> Callable[[], list[tuple[str, str]]]:
    """Four files; what is left of them."""
    for level in ("learned", "seed"):
        for name in ("a", "b"):
            fill(level, name * 64, f"model-{name}", list(range(30)))
    return lambda: [(entry.level, entry.fingerprint[0]) for entry in Shelf().entries()]


ALL = [("learned", "a"), ("learned", "b"), ("seed", "a"), ("seed", "b")]


def test_clear_asks_for_yes_where_nobody_can_be_asked(filled: Callable[[], list[tuple[str, str]]]) -> None:
    assert "add --yes" in failed(run("cache", "clear"), 2)
    assert filled() == ALL


@pytest.mark.parametrize(("answer", "left"), [("y\n", []), ("n\n", ALL), ("\n", ALL)])
def test_clear_asks_on_a_terminal(
    filled: Callable[[], list[tuple[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    left: list[tuple[str, str]],
) -> None:
    monkeypatch.setattr(cache, "is_terminal", lambda stream: True)
    outcome = run("cache", "clear", stdin=answer)
    assert outcome.exit_code == 0
    assert "model-a" in outcome.stdout
    assert filled() == left


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        ([], []),
        (["--level", "seed"], [("learned", "a"), ("learned", "b")]),
        (["--model", "model-b"], [("learned", "a"), ("seed", "a")]),
        (["--model", "model-a", "--level", "learned"], [("learned", "b"), ("seed", "a"), ("seed", "b")]),
    ],
)
def test_clear(
    filled: Callable[[], list[tuple[str, str]]], home: Path, arguments: list[str], left: list[tuple[str, str]]
) -> None:
    size = format_bytes(
        sum(entry.info.bytes for entry in Shelf().entries() if (entry.level, entry.fingerprint[0]) not in left)
    )
    outcome = run("cache", "clear", "--yes", *arguments)
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    noun = f"{4 - len(left)} file{'s' if len(left) < 3 else ''}"
    assert outcome.stdout == f"removed {noun}: {size}\n"
    assert filled() == left
    kept = [path.name for path in (home / "ngrams").iterdir() if path.suffix == ".ngrams"]
    assert len(kept) == len(left)


def test_clear_by_a_model_that_is_here(home: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("cache", "learn", str(texts))
    other = write_tiny_checkpoint(home / "twin")  # the same tokenizer under a name that taught nothing
    fill("learned", "a" * 64, "elsewhere", list(range(30)))
    assert run("cache", "clear", "--yes", "--model", str(other)).stdout.startswith("removed 1 file: ")
    assert [entry.fingerprint for entry in Shelf().entries()] == ["a" * 64]
    assert run("cache", "clear", "--yes", "--model", str(other)).stdout.startswith("nothing is remembered")
    assert "localspec cache show" in failed(run("cache", "clear", "--yes", "--model", "nobody/nothing"))


def test_clear_by_any_name_of_a_model_in_the_catalogue(home: Path, no_tokenizer: None) -> None:
    fill("learned", "a" * 64, "qwen3-4b", list(range(30)))
    hub_name = str(catalogue()["qwen3-4b"].hub)
    assert run("cache", "clear", "--yes", "--model", hub_name).stdout.startswith("removed 1 file: ")
    assert Shelf().entries() == []


def test_clear_by_a_name_that_several_tokenizers_have(home: Path, texts: Path, no_tokenizer: None) -> None:
    for name in ("a", "b"):
        fill("learned", name * 64, "twin", list(range(30)))
    line = failed(run("cache", "clear", "--yes", "--model", "twin"))
    assert "files of 2 tokenizers (aaaaaaaaaaaa, bbbbbbbbbbbb): give the folder" in line
    assert len(Shelf().entries()) == 2


def test_clear_by_a_folder_takes_its_own_tokenizer(home: Path, texts: Path) -> None:
    folder = write_tiny_checkpoint(home / "twin")
    run("cache", "learn", str(texts), "--model", str(folder))
    fill("learned", "a" * 64, "twin", list(range(30)))
    assert run("cache", "clear", "--yes", "--model", str(folder)).stdout.startswith("removed 1 file: ")
    assert [entry.fingerprint for entry in Shelf().entries()] == ["a" * 64]


def test_clear_nothing_asks_nothing() -> None:
    assert run("cache", "clear").stdout == "nothing is remembered\n"


def test_clear_removes_what_a_killed_process_left(home: Path) -> None:
    (home / "ngrams").mkdir()
    (home / "ngrams" / f".learned-{'a' * 64}.ngrams.x1y2").write_bytes(b"private")
    assert run("cache", "clear").stdout == "nothing is remembered\n"
    assert os.listdir(home / "ngrams") == []


def test_wrong_usage() -> None:
    failed(run("cache", "learn"), 2)
    failed(run("cache", "clear", "--level", "context"), 2)
