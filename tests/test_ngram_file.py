"""Files of n-grams: whole, checked, shared between processes, and never in the way."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localspec.ngrams import file as file_module
from localspec.ngrams.answers import END
from localspec.ngrams.file import MOST_LABELS, MOST_WAITING, PAGE, Info, NgramFile
from localspec.ngrams.format import DamagedFileError, NewerFileError, encode, read
from localspec.ngrams.lock import locked
from localspec.ngrams.store import ROW_BYTES, Columns, Found, NgramStore, contexts

PRINT = "f" * 64


class Setting:
    """A file's place, and what was said about it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ngrams" / "learned.ngrams"
        self.lines: list[str] = []

    def open(self, fingerprint: str = PRINT, **settings: Any) -> NgramFile:
        return NgramFile(self.path, fingerprint, say=self.lines.append, **settings)

    def names(self) -> list[str]:
        return sorted(os.listdir(self.path.parent))


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_module, "PATIENCE", 0.0)


def columns_of(store: NgramStore) -> list[list[int]]:
    return [column.tolist() for column in store.to_arrays()]


def text(count: int, seed: int = 0, vocabulary: int = 40_000) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocabulary) for _ in range(count)]


def test_what_was_learned_is_there_for_the_next_process(setting: Setting) -> None:
    file = setting.open(label="Smol")
    assert (file.store.rows, file.info()) == (0, Info())
    assert not setting.path.parent.exists()  # looking leaves nothing behind
    store = file.store
    assert file.learn([([1, 2, 3, 4], 1), ([9, 8, 7], 0)])
    assert file.store is store
    again = setting.open(label="Other")
    assert again.store.matches([1, 2, 3]) == file.store.matches([1, 2, 3]) == [Found(2, 4, 1, 1), Found(3, 4, 1, 1)]
    assert again.learn([([1, 2, 5, 3], 2)])
    info = again.info()
    assert (info.rows, info.texts, info.tokens, info.labels) == (again.store.rows, 2, 8, ("Smol", "Other"))
    assert info.bytes == setting.path.stat().st_size
    assert 0 <= time.time() - info.updated < 600
    assert info.created <= info.updated
    assert setting.lines == []


def test_it_knows_when_it_was_begun(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    for now in (86_400.5, 3 * 86_400.5):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        setting.open().learn([([1, 2, int(now)], 0)])
    info = setting.open().info()
    assert (info.created, info.updated) == (86_400, 3 * 86_400 + 1)
    assert setting.open().store.to_arrays().days.tolist() == [3, 1]


def test_it_is_for_its_owner_alone(setting: Setting) -> None:
    old = os.umask(0)
    try:
        setting.open().learn([([1, 2, 3], 0)])
    finally:
        os.umask(old)
    assert setting.names() == ["learned.ngrams", "learned.ngrams.lock"]
    assert [(setting.path.parent / name).stat().st_mode & 0o777 for name in setting.names()] == [0o600, 0o600]
    assert setting.path.parent.stat().st_mode & 0o777 == 0o700


def test_an_answer_counts_once_whatever_it_repeats(setting: Setting) -> None:
    file = setting.open()
    file.learn([([1, 2, 3] * 5, 0), ([1, 2, 3, 4], 0)])
    assert file.store.matches([1, 2])[0] == Found(2, 3, 1, 1)
    file.learn([([1, 2, 4], 0)])
    assert file.store.matches([1, 2])[0] == Found(2, 4, 1, 2)
    file.learn([([1, 2, 3], 2)])
    assert file.store.matches([1, 2])[0] == Found(2, 3, 2, 3)
    # Of what one answer wrote in the same place, the last thing counts as the latest.
    file.learn([([7, 8, 5, 7, 8, 6, 7, 8, 4], 0)])
    assert file.store.matches([7, 8])[0] == Found(2, 4, 1, 3)
    file.learn([([17, 18, 5, 17, 18, 6, 17, 18, 5], 0)])
    assert file.store.matches([17, 18])[0] == Found(2, 5, 1, 2)


def test_a_text_counts_once_a_page_and_is_taught_once(setting: Setting) -> None:
    ids = text(3 * PAGE, seed=4)
    for page in range(3):
        for place in (10, 50, 90):
            ids[page * PAGE + place : page * PAGE + place + 3] = [1, 2, 3]
    file = setting.open()
    assert not file.knows("d1")
    assert file.learn([(ids, 0)], digest="d1")
    assert file.store.matches([1, 2])[0] == Found(2, 3, 3, 3)
    assert file.knows("d1")
    before = columns_of(file.store)
    for other in (file, setting.open()):
        assert other.learn([(ids, 0)], digest="d1")
        assert columns_of(other.store) == before
        assert (other.info().texts, other.info().tokens) == (1, 3 * PAGE)
    # No context is lost where one page ends and the next begins.
    for place in range(PAGE - 8, PAGE + 8):
        assert len(file.store.matches(ids[:place])) == 4
    # A second process that did not know it yet.
    third, fourth = setting.open(), setting.open()
    assert third.store.rows == fourth.store.rows
    assert third.learn([([5, 6, 7], 0)], digest="d2")
    assert fourth.learn([([5, 6, 7], 0)], digest="d2")
    assert fourth.store.matches([5, 6])[0] == Found(2, 7, 1, 1)


def test_digests_and_labels_are_bounded(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_module, "MOST_DIGESTS", 3)
    for i in range(MOST_LABELS + 3):
        setting.open(label=f"m{i}").learn([], digest=f"d{i}")
    file, last = setting.open(label="m5"), MOST_LABELS + 2
    assert [i for i in range(last + 1) if file.knows(f"d{i}")] == [last - 2, last - 1, last]
    assert file.info().labels == tuple(f"m{i}" for i in range(3, last + 1))
    file.learn([([1, 2, 3], 0)])
    assert file.info().labels == (*(f"m{i}" for i in range(3, last + 1) if i != 5), "m5")


def test_much_at_once_is_merged_in_portions(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, whole = text(6_000, seed=1, vocabulary=50), setting.open()
    monkeypatch.setattr(file_module, "PAGE", 500)
    whole.learn([(ids[:2_000], 3), (ids[2_000:], 0)], digest="d")
    setting.path.unlink()
    monkeypatch.setattr(file_module, "_BULK", 100)
    parts = setting.open()
    parts.learn([(ids[:2_000], 3), (ids[2_000:], 0)], digest="d")
    assert columns_of(parts.store) == columns_of(whole.store)
    assert parts.learn([([61, 62, 63, 64, 65], 3)], digest="e")
    assert parts.store.matches([61, 62]) == []
    assert parts.store.matches([62, 63]) == [Found(2, 64, 1, 1)]


def test_memory_is_bounded_whatever_is_taught(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_module, "PAGE", 100)
    monkeypatch.setattr(file_module, "_BULK", 1)
    most, real = 0, NgramStore.shrink

    def watch(store: NgramStore, most_rows: int) -> None:
        nonlocal most
        most = max(most, store.rows)
        real(store, most_rows)

    monkeypatch.setattr(NgramStore, "shrink", watch)
    setting.open(most_bytes=18_000).learn([(text(5_000), 0)], digest="d")
    assert 0 < most < 1_400  # what the bound allows, and a page


def test_the_file_keeps_to_its_bound(setting: Setting) -> None:
    file = setting.open(most_bytes=20_000)
    sizes = []
    for seed in range(12):
        file.learn([(text(100, seed), 0)], digest=f"{seed:064}")
        sizes.append(setting.path.stat().st_size)
    assert max(sizes) <= 20_000
    assert sizes[-1] > 15_000
    assert file.store.matches(text(100, 11)[:20])  # the newest of equals, too, by its favourites at least
    smaller = setting.open(most_bytes=5_000)
    smaller.learn([([1, 2], 0)])  # that teaches nothing
    assert setting.path.stat().st_size <= 5_000
    assert smaller.info().rows == smaller.store.rows == setting.open().store.rows


LEARN = """
import sys
from pathlib import Path
from localspec.ngrams import file
from localspec.ngrams.file import NgramFile
file.PATIENCE = 120.0  # a busy machine is no fault
name, path = int(sys.argv[1]), Path(sys.argv[2])
file = NgramFile(path, "f" * 64, say=lambda line: sys.exit(line))
file.store
print("ready", flush=True)
sys.stdin.readline()
for i in range(25):
    tokens = [1, 2, 3, 1000 * name + i, 5, 6, 7, 1000 * name + i]
    while not file.learn([(tokens, 0)]):
        pass
"""


def test_two_processes_lose_nothing(setting: Setting) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LEARN, str(name), str(setting.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in (1, 2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=120)
        assert process.returncode == 0
    expected = NgramFile(setting.path.with_name("other.ngrams"), PRINT)
    for name in (1, 2):
        for i in range(25):
            expected.learn([([1, 2, 3, 1000 * name + i, 5, 6, 7, 1000 * name + i], 0)])
    file = setting.open()
    assert file.info().texts == 50
    assert file.store.matches([1, 2])[0] == Found(2, 3, 50, 50)
    assert file.store.rows == expected.store.rows
    for column in (0, 3):  # keys and how often they were seen; equals may stand in another order
        assert columns_of(file.store)[column] == columns_of(expected.store)[column]


def test_what_another_wrote_meanwhile_is_kept_and_seen(setting: Setting) -> None:
    one, two = setting.open(), setting.open()
    assert one.store.rows == two.store.rows == 0
    one.learn([([1, 2, 3], 0)])
    two.learn([([1, 2, 3, 4, 5], 0)])
    assert two.store.matches([1, 2]) == [Found(2, 3, 2, 2)]
    one.learn([])  # nothing to say, nothing to read
    assert one.store.matches([1, 2]) == [Found(2, 3, 1, 1)]
    one.learn([([7, 8, 9], 0)])
    assert one.store.matches([1, 2]) == [Found(2, 3, 2, 2)]
    setting.path.unlink()  # cleared by another process: what it held is not brought back
    one.learn([([5, 6, 7], 0)])
    assert one.store.matches([1, 2]) == []
    assert setting.open().store.rows == one.store.rows == 1


@pytest.mark.usefixtures("impatient")
def test_while_another_holds_the_lock_lessons_wait(setting: Setting) -> None:
    file = setting.open()
    file.learn([([1, 2, 3], 0)])
    with locked(setting.path.with_name("learned.ngrams.lock"), 0):
        for _ in range(2):
            assert not file.learn([([1, 2, 3], 0)])
        assert file.store.matches([1, 2]) == [Found(2, 3, 3, 3)]  # in this process they count
        assert setting.open().store.matches([1, 2]) == [Found(2, 3, 1, 1)]
        assert file.info().texts == 1
        for _ in range(2):
            file.learn([([7, 8, 9], 0)], digest="d")
    assert file.learn([])
    assert file.info().texts == 4
    assert setting.open().store.matches([7, 8]) == [Found(2, 9, 1, 1)]  # waited twice, counts once
    assert setting.open().store.matches([1, 2]) == file.store.matches([1, 2]) == [Found(2, 3, 3, 3)]
    with locked(setting.path.with_name("learned.ngrams.lock"), 0):
        for i in range(MOST_WAITING + 2):
            file.learn([([50, 60, 1_000 + i], 0)])
    assert file.learn([])
    assert file.store.matches([50, 60])[0].seen == MOST_WAITING
    assert len(setting.lines) == 2  # one each time that it was held, whatever had to wait
    for line in setting.lines:
        assert "is held by another process): the next answer tries again; what was learned is not kept yet" in line


def test_a_lock_that_was_removed_is_none(setting: Setting) -> None:
    setting.path.parent.mkdir()
    lock = setting.path.with_name("lock")
    with locked(lock, 0):
        with pytest.raises(TimeoutError), locked(lock, 0):
            pass
        lock.unlink()
        with locked(lock, 0), pytest.raises(TimeoutError), locked(lock, 0):
            pass
    with locked(lock, 0):
        pass


@pytest.mark.parametrize("replaced", [False, True])
def test_a_lock_that_is_removed_while_it_is_taken(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    setting.path.parent.mkdir()
    lock, real = setting.path.with_name("lock"), fcntl.flock
    removed = []

    def remove_first(descriptor: int, operation: int) -> None:
        if not removed:
            removed.append(lock.unlink())
            if replaced:
                lock.touch()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with locked(lock, 60), lock.open() as stream, pytest.raises(BlockingIOError):
        real(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


HOLD = """
import sys, time
from pathlib import Path
from localspec.ngrams.lock import locked
with locked(Path(sys.argv[1]), 0):
    print("held", flush=True)
    sys.stdin.readline()
    time.sleep(0.3)
"""


def test_the_lock_is_taken_once_its_holder_is_done(setting: Setting) -> None:
    setting.path.parent.mkdir()
    lock = setting.path.with_name("lock")
    command = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(TimeoutError, match="another process"), locked(lock, 0):
            pass
        assert holder.stdin is not None
        holder.stdin.write("go\n")
        holder.stdin.flush()
        with locked(lock, 60):
            pass


def small(setting: Setting) -> bytes:
    setting.open(label="Smol").learn([([1, 2, 3, 4, 5], 0)], digest="d")
    return setting.path.read_bytes()


def test_any_damaged_byte_is_noticed(setting: Setting) -> None:
    whole = small(setting)
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        setting.path.write_bytes(damaged)
        setting.lines.clear()
        file = setting.open()
        assert file.store.rows == 0
        assert len(setting.lines) == 1, place
        assert "cannot be used, it" in setting.lines[0]
        assert "\n" not in setting.lines[0]
        assert setting.path.with_name("learned.ngrams.damaged").read_bytes() == damaged
        assert not setting.path.exists()
    assert file.learn([([1, 2, 3], 0)])
    assert setting.open().store.rows == 1
    assert setting.names() == ["learned.ngrams", "learned.ngrams.damaged", "learned.ngrams.lock"]


def test_cut_or_grown_files_are_damaged(setting: Setting) -> None:
    whole = small(setting)
    for wrong in [*(whole[:end] for end in range(len(whole))), whole + b"\0", whole + whole, b"{}" * 500]:
        setting.path.write_bytes(wrong)
        with pytest.raises(DamagedFileError):
            read(setting.path)
    setting.path.write_bytes(whole)
    assert read(setting.path, PRINT)[0].texts == 1
    with pytest.raises(DamagedFileError, match="another tokenizer"):
        read(setting.path, "e" * 64)


def signed(header: bytes, columns: bytes = b"", version: int = 2) -> bytes:
    """A file of any content, with the right checksums."""
    header += b" " * (-(24 + len(header)) % 8)
    lead = struct.pack("<8sI", b"LSNGRAM\n", version)
    lead_sum = zlib.crc32(lead)
    body = struct.pack("<I", len(header)) + header + columns
    return lead + struct.pack("<II", lead_sum, zlib.crc32(body, lead_sum)) + body


GOOD = (
    b'{"fingerprint": "%s", "orders": [2, 3, 4, 6], "rows": 0, "answers": 0, "texts": 0, "tokens": 0, "created": 0,'
    b' "updated": 0, "labels": [], "digests": []}' % PRINT.encode()
)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"rows": 0', b'"rows": -1'),
        (b'"rows": 0', b'"rows": 1'),
        (b'"rows": 0', b'"rows": false'),
        (b'"rows": 0', b'"rows": 1' + b"0" * 30),
        (b'"rows": 0, ', b""),
        (b'"answers": 0', b'"answers": -1'),
        (b'"answers": 0', b'"answers": 1'),
        (b'"answers": 0', b'"answers": null'),
        (b'"answers": 0', b'"answers": 1' + b"0" * 30),
        (b'"texts": 0', b'"texts": "many"'),
        (b'"created": 0', b'"created": 1.5'),
        (b'"created": 0', b'"created": 253402300800'),
        (b'"updated": 0', b'"updated": 253402300800'),
        (b"[2, 3, 4, 6]", b"[2, 3, 4]"),
        (b'"labels": []', b'"labels": [1]'),
        (b'"labels": []', b'"labels": null'),
        (b'"digests": []', b'"digests": 7'),
        (b'"fingerprint"', b'"finger"'),
        (b"ffff", b"\xff\xff\xff\xff"),
        (GOOD, b"[]"),
        (GOOD, b"7"),
        (GOOD, b"[" * 100_000),
        (GOOD, b""),
    ],
)
def test_a_header_of_the_wrong_kind_is_damage(setting: Setting, old: bytes, new: bytes) -> None:
    setting.path.parent.mkdir()
    setting.path.write_bytes(signed(GOOD))
    assert setting.open().store.rows == 0
    assert setting.lines == []
    assert old in GOOD
    setting.path.write_bytes(signed(GOOD.replace(old, new)))
    with pytest.raises(DamagedFileError):
        read(setting.path, PRINT)


def test_answers_are_kept_whole_for_the_next_process(setting: Setting) -> None:
    file = setting.open()
    assert file.learn([([1, 2, 3, 4], 1), ([9, 8, 7], 0)])
    assert file.learn([(list(range(10, 40)), 6)])
    expected = [1, 2, 3, 4, END, 9, 8, 7, END, *range(10, 40), END]
    for one in (file, setting.open()):
        assert one.store.answers.tokens.tolist() == expected
        assert one.store.answers.longest([5, *range(10, 30)]) == (20, 29)
    assert setting.open().learn([([1, 2, 3], 0)], digest="d")  # a text that was taught is counted only
    assert setting.open().store.answers.tokens.tolist() == expected


def test_two_processes_keep_the_answers_of_both(setting: Setting) -> None:
    one, two = setting.open(), setting.open()
    assert one.store.rows == two.store.rows == 0
    one.learn([([1, 2, 3], 0)])
    two.learn([([4, 5, 6], 0)])
    assert two.store.answers.tokens.tolist() == [1, 2, 3, END, 4, 5, 6, END]
    assert one.store.answers.tokens.tolist() == [1, 2, 3, END]
    setting.path.unlink()  # cleared by another process: what it held is not brought back
    two.learn([([7, 8, 9], 0)])
    for file in (two, setting.open()):
        assert file.store.answers.tokens.tolist() == [7, 8, 9, END]


@pytest.mark.usefixtures("impatient")
def test_an_answer_that_cannot_be_saved_yet_is_known_in_its_process(setting: Setting) -> None:
    file = setting.open()
    file.learn([([1, 2, 3], 0)])
    with locked(setting.path.with_name("learned.ngrams.lock"), 0):
        for _ in range(2):
            assert not file.learn([([4, 5, 6], 0)])
    assert file.store.answers.tokens.tolist() == [1, 2, 3, END, 4, 5, 6, END, 4, 5, 6, END]
    assert setting.open().store.answers.tokens.tolist() == [1, 2, 3, END]
    assert file.learn([])
    assert setting.open().store.answers.tokens.tolist() == file.store.answers.tokens.tolist()
    assert len(file.store.answers.tokens) == 12


def test_answers_are_bounded(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    file = setting.open(most_bytes=16_000)
    for seed in range(12):
        file.learn([(text(150, seed), 0)])
        assert setting.path.stat().st_size <= 16_000
    kept = file.store.answers.tokens.tolist()
    assert kept == [*text(150, 5), END, *(id for seed in range(6, 12) for id in [*text(150, seed), END])][-1_000:]
    assert file.store.rows > 300  # and counts have most of the file
    monkeypatch.setattr(file_module, "MOST_TOKENS", 60)
    larger = setting.open()
    larger.learn([([1, 2, 3], 0)])
    assert larger.store.answers.tokens.tolist() == [*kept, 1, 2, 3, END][-60:]


def test_a_file_of_the_first_version_has_no_answers_yet(setting: Setting) -> None:
    small(setting)
    content, _ = read(setting.path)
    first = GOOD.replace(b'"answers": 0, ', b"").replace(b'"rows": 0', b'"rows": %d' % content.columns.keys.size)
    arrays = zip(content.columns, ("<u8", "<u4", "<u2", "<u2", "<u2"), strict=True)
    columns = b"".join(column.astype(kind).tobytes() for column, kind in arrays)
    setting.path.write_bytes(signed(first, columns, version=1))
    file = setting.open()
    assert file.store.rows == content.columns.keys.size == 6
    assert file.store.answers.tokens.size == 0
    assert file.learn([([7, 8, 9], 0)])
    again = setting.open()
    assert again.store.rows == 7
    assert again.store.answers.tokens.tolist() == [7, 8, 9, END]
    assert setting.lines == []
    setting.path.write_bytes(signed(first, columns, version=0))
    assert setting.open().store.rows == 0
    assert len(setting.lines) == 1


def test_answers_without_an_end_are_damage(setting: Setting) -> None:
    """Who follows them relies on it, and would go on behind the last."""
    small(setting)
    content, _ = read(setting.path)
    for tokens, sound in (([1, 2, END], True), ([END], True), ([1, 2], False), ([1, END, 2], False)):
        setting.path.write_bytes(encode(content._replace(answers=np.array(tokens, np.uint32))))
        if sound:
            assert read(setting.path)[0].answers.tolist() == tokens
        else:
            with pytest.raises(DamagedFileError, match="no end"):
                read(setting.path)


def test_counts_out_of_order_are_damage(setting: Setting) -> None:
    small(setting)
    content, _ = read(setting.path)
    good = content._replace(
        columns=Columns(
            np.array([4, 4, 8], np.uint64),
            np.array([1, 2, 3], np.uint32),
            np.array([5, 2, 1], np.uint16),
            np.array([9, 9, 1], np.uint16),
            np.array([7, 8, 9], np.uint16),
        )
    )
    setting.path.write_bytes(encode(good))
    assert read(setting.path)[0].columns.hits.tolist() == [5, 2, 1]
    wrong: list[tuple[str, list[int]]] = [
        ("keys", [8, 8, 4]),
        ("hits", [2, 5, 1]),
        ("hits", [5, 0, 1]),
        ("hits", [5, 5, 1]),  # with equal hits the later day comes first
        ("hits", [5, 2, 2]),
        ("seen", [9, 8, 1]),
    ]
    for name, values in wrong:
        column = np.array(values, getattr(good.columns, name).dtype)
        setting.path.write_bytes(encode(good._replace(columns=good.columns._replace(**{name: column}))))
        with pytest.raises(DamagedFileError, match="out of order"):
            read(setting.path)


def test_a_foreign_file_is_set_aside(setting: Setting) -> None:
    small(setting)
    file = setting.open("e" * 64)
    assert file.store.rows == 0
    [line] = setting.lines
    why = "it belongs to another tokenizer: moved to learned.ngrams.damaged, and begun anew"
    assert line == f"{setting.path} cannot be used, {why}"
    file.learn([([7, 8, 9], 0)])
    small(setting)  # the other tokenizer's again: replaces what was set aside
    assert len(setting.lines) == 2
    assert read(setting.path.with_name("learned.ngrams.damaged"))[0].fingerprint == "e" * 64


def test_damage_that_comes_later_is_noticed_when_learning(setting: Setting) -> None:
    file = setting.open()
    file.learn([([1, 2, 3], 0)])
    setting.path.write_bytes(b"rubbish")
    assert file.learn([([4, 5, 6], 0)])
    assert len(setting.lines) == 1
    assert file.store.matches([4, 5]) == setting.open().store.matches([4, 5]) == [Found(2, 6, 1, 1)]
    assert file.store.matches([1, 2]) == []


def newer(whole: bytes) -> bytes:
    lead = struct.pack("<8sI", b"LSNGRAM\n", 3)
    return lead + struct.pack("<I", zlib.crc32(lead)) + whole[16:] + b"more"


def test_a_newer_version_is_left_alone(setting: Setting) -> None:
    later = newer(small(setting))
    open_before = setting.open()
    assert open_before.store.rows == 6
    setting.path.write_bytes(later)
    with pytest.raises(NewerFileError):
        read(setting.path)
    for file in (setting.open(), open_before):
        setting.lines.clear()
        for _ in range(2):
            assert not file.learn([([1, 2, 3], 0)])
        assert len(setting.lines) == 1
        assert "newer localspec" in setting.lines[0]
        assert file.info().problem == "newer"
    assert setting.open().store.rows == 0
    assert setting.path.read_bytes() == later
    assert setting.names() == ["learned.ngrams", "learned.ngrams.lock"]


def test_a_full_disk_is_said_once_and_what_was_learned_comes_later(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = setting.open()
    file.learn([([1, 2, 3], 0)])
    whole = setting.path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for _ in range(2):
            assert not file.learn([([1, 2, 3], 0)])
    saying = "cannot be saved (No space left on device): free some space; what was learned is not kept yet"
    assert setting.lines == [f"{setting.path} {saying}"]
    assert setting.path.read_bytes() == whole
    assert file.store.matches([1, 2]) == [Found(2, 3, 3, 3)]
    assert file.learn([])
    assert setting.open().store.matches([1, 2]) == [Found(2, 3, 3, 3)]
    assert setting.names() == ["learned.ngrams", "learned.ngrams.lock"]
    monkeypatch.setattr(os, "fsync", full)
    assert not file.learn([([1, 2, 3], 0)])
    assert len(setting.lines) == 2  # it is full again


@pytest.mark.parametrize("call", ["open", "mkdir"])
def test_a_folder_that_cannot_be_written(setting: Setting, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    real = getattr(os, call)

    def refuse(path: Any, *arguments: Any, **keywords: Any) -> Any:
        if str(setting.path.parent) in str(path):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *arguments, **keywords)

    monkeypatch.setattr(os, call, refuse)
    file = setting.open()
    for _ in range(2):
        assert not file.learn([([1, 2, 3], 0)])
    assert file.store.matches([1, 2]) == [Found(2, 3, 2, 2)]
    assert len(setting.lines) == 1
    assert "(Permission denied): make it and its folder yours, and writable" in setting.lines[0]


def test_a_file_that_cannot_be_read_is_not_replaced(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, real = small(setting), os.open

    def refuse(path: Any, *arguments: Any, **keywords: Any) -> int:
        if str(path) == str(setting.path):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *arguments, **keywords)

    monkeypatch.setattr(os, "open", refuse)
    file = setting.open()
    assert file.store.rows == 0
    assert not file.learn([([1, 2, 3], 0)])
    assert setting.path.read_bytes() == whole
    assert len(setting.lines) == 1
    assert "cannot be read (Permission denied)" in setting.lines[0]


@pytest.mark.parametrize("kind", ["link", "loop", "dangling", "folder", "pipe", "lock link", "parent"])
def test_what_is_no_file_is_left_alone(setting: Setting, tmp_path: Path, kind: str) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    if kind == "parent":
        setting.path.parent.write_bytes(b"")
    else:
        setting.path.parent.mkdir()
    if kind == "link":
        setting.path.symlink_to(precious)
    elif kind == "loop":
        setting.path.symlink_to(setting.path)
    elif kind == "dangling":
        setting.path.symlink_to(tmp_path / "nothing")
    elif kind == "folder":
        setting.path.mkdir()
    elif kind == "pipe":
        os.mkfifo(setting.path)
    elif kind == "lock link":
        setting.path.with_name("learned.ngrams.lock").symlink_to(precious)
    file = setting.open()
    for _ in range(2):
        assert not file.learn([([1, 2, 3], 0)])
    assert file.store.matches([1, 2]) == [Found(2, 3, 2, 2)]
    assert len(setting.lines) == 1
    assert "\n" not in setting.lines[0]
    assert precious.read_bytes() == b"precious"
    assert not (tmp_path / "nothing").exists()
    assert kind in ("parent", "lock link") or not setting.path.is_file() or setting.path.is_symlink()


@pytest.mark.usefixtures("impatient")
def test_damage_under_a_held_lock_is_said_and_put_right_later(setting: Setting) -> None:
    small(setting)
    setting.path.write_bytes(b"rubbish")
    with locked(setting.path.with_name("learned.ngrams.lock"), 0):
        file = setting.open()
        assert file.store.rows == 0
        assert len(setting.lines) == 1
        assert setting.path.read_bytes() == b"rubbish"
    assert file.learn([([1, 2, 3], 0)])
    assert len(setting.lines) == 2
    assert setting.open().store.rows == 1


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_an_interrupt_leaves_the_file_whole(setting: Setting, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    file = setting.open()
    file.learn([([1, 2, 3], 0)])
    whole = setting.path.read_bytes()

    def interrupt(*arguments: Any, **keywords: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            file.learn([([1, 2, 3], 0)])
    assert setting.path.read_bytes() == whole
    assert setting.names() == ["learned.ngrams", "learned.ngrams.lock"]
    assert file.learn([([1, 2, 3], 0)])  # the lock was let go
    assert setting.open().store.matches([1, 2]) == [Found(2, 3, 3, 3)]


def test_what_a_killed_process_left_is_removed(setting: Setting) -> None:
    setting.path.parent.mkdir()
    setting.path.with_name(".learned.ngrams.x1y2").write_bytes(b"half")
    setting.path.with_name(".other.ngrams.x1y2").write_bytes(b"another's")
    setting.open().learn([([1, 2, 3], 0)])
    assert setting.names() == [".other.ngrams.x1y2", "learned.ngrams", "learned.ngrams.lock"]


def test_odd_lessons(setting: Setting) -> None:
    file = setting.open()
    assert file.learn([])
    assert not setting.path.exists()
    assert file.learn([([], 0), ([1, 2, 3], 9), ([1, 2], -5)])
    assert (file.info().rows, file.info().tokens) == (0, 2)
    with pytest.raises(ValueError, match="token ids"):
        file.learn([([1, 2, 3], 0), ([1, 2, -3], 0)])
    assert file.learn([([1, 2, 3], 0)])
    assert file.info().texts == 2


def test_a_file_of_rows_is_as_large_as_is_said(setting: Setting) -> None:
    setting.open().learn([(text(500), 0)])
    one = setting.path.stat().st_size
    keys, followers = contexts(text(500), 0)
    store = NgramStore()
    store.merge(keys, followers, day=int(time.time()) // 86_400)
    assert one - store.rows * ROW_BYTES - (500 + 1) * 4 < 400
