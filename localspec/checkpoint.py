"""Model directories on disk: are they whole, which files hold the weights, what do the files promise.

Reads headers and small JSON files only; knows nothing about MLX and loads no weights.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.errors import IncompleteModelError, UnsupportedModelError

INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"^(?P<stem>model.*)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors$")
_LARGEST_HEADER = 1 << 28
_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"), ("tekken.json",))
_ITEM_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """What a safetensors header says about one tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        product = 1
        for size in self.shape:
            product *= size
        return product

    @property
    def bytes(self) -> int:
        """What it takes in the file, and as stored in memory."""
        return self.elements * _ITEM_BITS.get(self.dtype, 32) // 8

    @property
    def floating(self) -> bool:
        """A dtype that casting applies to (8-bit floats are scales, and stay)."""
        return self.dtype in ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete model directory."""

    path: Path
    config: dict[str, Any]
    weights: tuple[Path, ...]
    """The files that belong to the model; others of that kind in the directory do not."""
    tensors: dict[str, Tensor]

    @property
    def bytes(self) -> int:
        """Size of the weights as stored."""
        return sum(t.bytes for t in self.tensors.values())


def read_checkpoint(path: Path, finish: str | None = None) -> Checkpoint:
    """Check a model directory and describe it; reads headers only.

    Raises IncompleteModelError that lists everything missing or damaged; `finish` is the command that completes it.
    """
    advice = f"; to finish it: {finish}" if finish else "; copy or download it again"
    if not (path / "config.json").is_file():
        raise IncompleteModelError(f"{path} is not a complete model: config.json is missing{_hint(path)}{advice}")
    problems: list[str] = []
    config = _json(path / "config.json", problems)
    if not any(all((path / name).is_file() for name in names) for names in _TOKENIZERS):
        problems.append("no tokenizer file (tokenizer.json or tokenizer.model)")
    expected, weights = _weight_files(path, problems)
    tensors: dict[str, Tensor] = {}
    for file in weights:
        if not file.is_file():
            problems.append(f"{file.name} is missing")
            continue
        header, _ = _header(file, problems)
        absent = [name for name in expected.get(file.name, ()) if name not in header]
        if header and absent:
            problems.append(
                f"{INDEX} is stale: it places {absent[0]} and {len(absent) - 1} other tensors in {file.name}, "
                "which does not hold them"
                if len(absent) > 1
                else f"{INDEX} is stale: it places {absent[0]} in {file.name}, which does not hold it"
            )
        tensors.update(header)
    if problems:
        raise IncompleteModelError(f"{path} is not a complete model: {'; '.join(problems)}{advice}")
    return Checkpoint(path, config, tuple(weights), tensors)


def check_complete(path: Path, finish: str | None = None) -> None:
    """Raise IncompleteModelError, listing what is missing, unless `path` holds a whole model."""
    read_checkpoint(path, finish)


def is_complete(path: Path) -> bool:
    """Whether `path` holds a whole model."""
    try:
        check_complete(path)
    except (IncompleteModelError, UnsupportedModelError, OSError):
        return False
    return True


def context_length(config: dict[str, Any]) -> int | None:
    """The model's context window in tokens, where the config names one."""
    for table in (config, config.get("text_config")):
        if not isinstance(table, dict):
            continue
        for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx"):
            value = table.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def end_ids(checkpoint: Checkpoint) -> set[int]:
    """The end tokens that config.json (its text part too) and generation_config.json name, together."""
    tables: list[Any] = [checkpoint.config, checkpoint.config.get("text_config")]
    generation = checkpoint.path / "generation_config.json"
    if generation.is_file():
        tables.append(_json(generation, []))  # a broken one is no reason not to run: the others name the end
    found: set[int] = set()
    for table in tables:
        value = table.get("eos_token_id") if isinstance(table, dict) else None
        values: Iterable[Any] = value if isinstance(value, list) else [value]
        found.update(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)
    return found


def _json(file: Path, problems: list[str]) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{file.name} cannot be read ({error})")
        return {}
    if not isinstance(document, dict):
        problems.append(f"{file.name} is not a JSON object")
        return {}
    return document


def _weight_files(path: Path, problems: list[str]) -> tuple[dict[str, list[str]], list[Path]]:
    """The weight files that belong to the model, and what the index (if there is one) places in each."""
    found = sorted(path.glob("model*.safetensors"))
    if (path / INDEX).is_file():
        before = len(problems)
        table = _json(path / INDEX, problems).get("weight_map")
        if isinstance(table, dict) and table and all(isinstance(name, str) for name in table.values()):
            expected: dict[str, list[str]] = {}
            for tensor, name in table.items():
                expected.setdefault(name, []).append(tensor)
            outside = [name for name in expected if Path(name).name != name]
            if outside:
                problems.append(f"{INDEX} names a file outside the directory: {outside[0]}")
                return {}, []
            others = [f.name for f in found if f.name not in expected]
            if others and not any((path / name).is_file() for name in expected):
                problems.append(f"{INDEX} is stale: it names none of the weight files that are here ({others[0]})")
            return expected, [path / name for name in sorted(expected)]
        if len(problems) == before:
            problems.append(f"{INDEX} has no weight_map")
        return {}, []
    if not found:
        problems.append(f"no model*.safetensors{_hint(path)}")
        return {}, []
    if (path / "model.safetensors").is_file():
        return {}, [path / "model.safetensors"]
    series: dict[tuple[str, str], None] = {}
    for file in found:
        match = _SHARD.match(file.name)
        if match:
            series[match["stem"], match["count"]] = None
    if len(series) == 1:
        ((stem, count),) = series
        width = len(count)
        return {}, [path / f"{stem}-{n:0{width}}-of-{count}.safetensors" for n in range(1, int(count) + 1)]
    if len(found) == 1:
        return {}, found
    names = ", ".join(f.name for f in found[:4])
    problems.append(f"several weight files ({names}) and no {INDEX} that says which belong together")
    return {}, []


def read_header(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors that a safetensors file holds, and what it says of itself. Raises IncompleteModelError."""
    if not file.is_file():
        raise IncompleteModelError(f"{file} is missing")
    problems: list[str] = []
    found = _header(file, problems)
    if problems:
        raise IncompleteModelError(f"{file.parent}: {problems[0]}")
    return found


def _header(file: Path, problems: list[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What a safetensors file holds, and its metadata; one shorter or longer than its header says is a problem."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start == b"version ":
            problems.append(f"{file.name} is a Git LFS pointer, not the weights (git lfs pull fetches them)")
            return {}, {}
        if len(start) < 8:
            problems.append(f"{file.name} is cut off ({size} bytes)")
            return {}, {}
        (length,) = struct.unpack("<Q", start)
        if length > _LARGEST_HEADER:
            problems.append(f"{file.name} is not a safetensors file")
            return {}, {}
        raw = stream.read(length)
    if len(raw) < length:
        problems.append(f"{file.name} is cut off ({size:,} bytes, its header alone has {length + 8:,})")
        return {}, {}
    try:
        table = json.loads(raw)
        metadata = dict(table.get("__metadata__") or {})
        end = max((int(t["data_offsets"][1]) for n, t in table.items() if n != "__metadata__"), default=0)
        tensors = {
            name: Tensor(str(t["dtype"]), tuple(int(s) for s in t["shape"]))
            for name, t in table.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        problems.append(f"{file.name} is not a safetensors file")
        return {}, {}
    whole = 8 + length + end
    if size < whole:
        problems.append(f"{file.name} is cut off ({size:,} of {whole:,} bytes)")
    elif size > whole:
        problems.append(f"{file.name} is damaged ({size:,} bytes where its header says {whole:,})")
    return tensors, metadata if all(isinstance(v, str) for v in metadata.values()) else {}


def _hint(path: Path) -> str:
    """What else the directory holds that would explain the gap."""
    names = sorted(os.listdir(path)) if path.is_dir() else []
    if any(name.endswith(".gguf") for name in names):
        return " (a GGUF file is here, but localspec runs MLX model directories)"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        return " (PyTorch weights are here; `mlx_lm.convert` turns such a model into an MLX one)"
    if any(name.endswith(".safetensors") for name in names):
        return " (safetensors files are here, but none named model*.safetensors)"
    return ""
