"""What a file of n-grams looks like, byte by byte; nothing of it is trusted before it was checked.

    8s  magic
    u32 version
    u32 CRC-32 of the 12 bytes before: these 16 bytes stay as they are in every version
    u32 CRC-32 of everything behind this field, begun with the CRC-32 above
    u32 length of the next part, such that the columns begin at a multiple of 8
        JSON: fingerprint, orders, rows, answers, texts, tokens, created, updated, labels, digests; spaces behind it
        columns: keys u64, followers u32, hits u16, seen u16, days u16, each [rows], little-endian
        answers: u32, as many as the JSON says; version 1 has none

Knows nothing of locks, or of what is done about a file that is damaged.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from localspec.ngrams.answers import END
from localspec.ngrams.store import ORDERS, ROW_BYTES, Columns, NgramStore, Tokens

MAGIC = b"LSNGRAM\n"
VERSION = 2
_OLDEST = 1
MOST_TIME = 253_402_300_799
"""Seconds since 1970: the last second of the year 9999, behind which no calendar goes."""
MOST_HEADER = 4 << 20
"""Bytes; a longer one is not ours."""

_LEAD = struct.Struct("<8sI")
_CHECK = struct.Struct("<I")
_BODY = struct.Struct("<II")
_FIXED = _LEAD.size + _CHECK.size + _BODY.size
_TYPES = ("<u8", "<u4", "<u2", "<u2", "<u2")
_ANSWERS = np.dtype("<u4")

Stamp = tuple[int, int, int]
"""Which file it was: inode, bytes, time of its last change in ns."""


class DamagedFileError(Exception):
    """Not a file of n-grams, or not whole; the message says in what way."""


class NewerFileError(Exception):
    """Written by a later version."""


class Content(NamedTuple):
    """What a file holds."""

    columns: Columns
    answers: Tokens
    """The latest answers, END behind each."""
    fingerprint: str = ""
    """Of the tokenizer whose ids it counts."""
    texts: int = 0
    tokens: int = 0
    created: int = 0
    """Seconds since 1970,"""
    updated: int = 0
    """and of its last change."""
    labels: tuple[str, ...] = ()
    """Names of the models that taught it, the latest last."""
    digests: tuple[str, ...] = ()
    """Of the texts that it was taught, the latest last."""


def empty(fingerprint: str) -> Content:
    """A file that nothing was learned in yet."""
    store = NgramStore()
    return Content(store.to_arrays(), store.answers.tokens, fingerprint)


def most_rows(content: Content, most_bytes: int) -> int:
    """Rows that fit into a file of so many bytes beside the content's header and answers."""
    return max(most_bytes - _FIXED - len(_header(content)) - 8 - content.answers.nbytes, 0) // ROW_BYTES


def encode(content: Content) -> bytes:
    """The bytes of a file."""
    header = _header(content)
    arrays = zip((*content.columns, content.answers), (*_TYPES, _ANSWERS), strict=True)
    columns = [np.ascontiguousarray(array, dtype).tobytes() for array, dtype in arrays]
    lead = _LEAD.pack(MAGIC, VERSION)
    lead_sum = zlib.crc32(lead)
    size = struct.pack("<I", len(header))
    body_sum = lead_sum
    for part in (size, header, *columns):
        body_sum = zlib.crc32(part, body_sum)
    return b"".join((lead, _CHECK.pack(lead_sum), _CHECK.pack(body_sum), size, header, *columns))


def read(path: Path, fingerprint: str | None = None) -> tuple[Content, Stamp]:
    """What `path` holds, checked, and which file that was.

    fingerprint: what it has to be of; None takes any. Raises DamagedFileError, NewerFileError, or OSError where it
    cannot be read, FileNotFoundError among them.
    """
    # A link is somebody's doing, not ours; a pipe would have us wait.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(None, "not a regular file")
        fixed = file.read(_FIXED)
        header = file.read(_header_size(fixed))
        fields = _fields(header, status.st_size - len(fixed))
        # All at once, into memory that nothing has to clear first.
        data = np.empty(fields["rows"] * ROW_BYTES + fields["answers"] * _ANSWERS.itemsize, np.uint8)
        view, filled = data.data, 0
        while filled < data.size and (count := file.readinto(view[filled:])):
            filled += count
    if filled < data.size:
        raise DamagedFileError("it ends early")
    body_sum = zlib.crc32(fixed[_LEAD.size + _CHECK.size + 4 :], zlib.crc32(fixed[: _LEAD.size]))
    body_sum = zlib.crc32(data.data, zlib.crc32(header, body_sum))
    if _BODY.unpack_from(fixed, _LEAD.size + _CHECK.size)[0] != body_sum:
        raise DamagedFileError("its checksum is wrong")
    columns = _columns(data, fields["rows"])
    content = _content(fields, columns, data[fields["rows"] * ROW_BYTES :].copy().view(_ANSWERS))
    if fingerprint is not None and content.fingerprint != fingerprint:
        raise DamagedFileError("it belongs to another tokenizer")
    _check(content.columns)
    if content.answers.size and content.answers[-1] != END:
        raise DamagedFileError("its last answer has no end")
    return content, stamp_of(status)


def stamp_of(status: os.stat_result) -> Stamp:
    """Which file it is."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def _header(content: Content) -> bytes:
    fields = content._asdict()
    fields["rows"] = fields.pop("columns").keys.size
    fields["answers"] = content.answers.size
    fields["orders"] = ORDERS
    header = json.dumps(fields).encode()
    return header + b" " * (-(_FIXED + len(header)) % 8)


def _header_size(fixed: bytes) -> int:
    if len(fixed) < _FIXED or fixed[: len(MAGIC)] != MAGIC:
        raise DamagedFileError("it is not a file of n-grams")
    _, version = _LEAD.unpack_from(fixed)
    if _CHECK.unpack_from(fixed, _LEAD.size)[0] != zlib.crc32(fixed[: _LEAD.size]):
        raise DamagedFileError("its checksum is wrong")
    if version > VERSION:
        raise NewerFileError(f"version {version}")
    if version < _OLDEST:
        raise DamagedFileError(f"there never was a version {version}")
    size: int = _BODY.unpack_from(fixed, _LEAD.size + _CHECK.size)[1]
    if size > MOST_HEADER or (_FIXED + size) % 8:
        raise DamagedFileError("its header is damaged")
    return size


def _fields(header: bytes, size: int) -> dict[str, Any]:
    """The header's, of a file of so many bytes from the header on: no more is read where that cannot be right."""
    try:
        fields: dict[str, Any] = json.loads(header)
        sizes = rows, answers = fields["rows"], fields.setdefault("answers", 0)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedFileError("its header is damaged") from None
    whole = all(type(number) is int and number >= 0 for number in sizes)
    if not whole or size != len(header) + rows * ROW_BYTES + answers * _ANSWERS.itemsize:
        raise DamagedFileError("its size is wrong")
    return fields


def _columns(data: np.ndarray[Any, Any], rows: int) -> Columns:
    columns, start = [], 0
    for dtype in map(np.dtype, _TYPES):
        end = start + rows * dtype.itemsize
        columns.append(data[start:end].view(dtype))
        start = end
    return Columns(*columns)


def _content(fields: dict[str, Any], columns: Columns, answers: Tokens) -> Content:
    try:
        if fields["orders"] != list(ORDERS):
            raise DamagedFileError("its contexts have other lengths")
        numbers = [fields[name] for name in ("texts", "tokens", "created", "updated")]
        texts, tokens, created, updated = (number for number in numbers if type(number) is int and number >= 0)
        if max(created, updated) > MOST_TIME:
            raise DamagedFileError("its times are wrong")
        labels, digests = (tuple(fields[name]) for name in ("labels", "digests"))
        words = (fields["fingerprint"], *labels, *digests)
    except (KeyError, TypeError, ValueError):
        raise DamagedFileError("its header is damaged") from None
    if not all(isinstance(word, str) for word in words):
        raise DamagedFileError("its header is damaged")
    return Content(columns, answers, fields["fingerprint"], texts, tokens, created, updated, labels, digests)


def _check(columns: Columns) -> None:
    """What look-ups and merges rely on."""
    keys, _, hits, seen, days = columns
    same = keys[1:] == keys[:-1]
    later = (hits[1:] < hits[:-1]) | ((hits[1:] == hits[:-1]) & (days[1:] <= days[:-1]))
    sound = (keys[1:] >= keys[:-1]).all() and (~same | (later & (seen[1:] == seen[:-1]))).all()
    if not (sound and (hits > 0).all() and (hits <= seen).all()):
        raise DamagedFileError("its counts are out of order")
