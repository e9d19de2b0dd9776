"""What would be loaded, and in which format: a model's directory, found and checked, and what it would take.

Reads headers and small files only. Knows nothing of tokenizers or of drafting.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from localspec import hub, memory
from localspec.checkpoint import Checkpoint, read_checkpoint
from localspec.errors import InsufficientMemoryError
from localspec.memory import format_bytes
from localspec.models import catalogue
from localspec.package import Progress


@dataclass(frozen=True, slots=True)
class Plan:
    """A model that is here and whole, and how to hold it in memory."""

    name: str
    checkpoint: Checkpoint
    dtype: str

    @property
    def bytes(self) -> int:
        """What its weights take in memory."""
        return memory.weights_bytes(self.checkpoint, self.dtype)


def plan(name: str, dtype: str | None, progress: Progress | None = None) -> Plan:
    """The plan for a catalogue name, directory or hub id, fetched if need be. `dtype` None: what is fastest here.

    Raises what `hub.resolve` and `read_checkpoint` raise, and InsufficientMemoryError before a download that would be
    in vain.
    """
    _refuse_hopeless(name)
    return plan_of(name, hub.resolve(name, progress), dtype)


def plan_of(name: str, path: Path, dtype: str | None) -> Plan:
    """The plan for a model that is in `path`, which `name` stands for."""
    return Plan(label(name, path), read_checkpoint(path), dtype or _choose_dtype(path))


def label(name: str, path: Path) -> str:
    """What to call the model that `name` stands for, which is in `path`."""
    known = catalogue()
    entry = known.get(name) or known.by_hub(name)
    if entry is not None:
        return entry.name
    return path.name if Path(name).expanduser().is_dir() else name


def require_memory(target: Plan, draft: Plan | None = None, head: int = 0) -> None:
    """Raise InsufficientMemoryError, with a way out, unless there is room for the target and its draft.

    head: bytes of an MTP head as stored, 0 for none.
    """
    available = memory.available_bytes()
    need = memory.needed_bytes(target.bytes + (draft.bytes if draft is not None else 0) + head)
    if available is None or need <= available:
        return
    what = f"{target.name} in {target.dtype}" + (f" with the draft {draft.name}" if draft is not None else "")
    what += " and an MTP head" if head else ""
    stored = memory.needed_bytes(target.checkpoint.bytes + (draft.checkpoint.bytes if draft is not None else 0) + head)
    fits = stored <= available and target.dtype != "quantized"
    ways = "; as stored it would fit (dtype quantized)" if fits else _smaller(available, target.name)
    raise InsufficientMemoryError(
        f"{what} needs {format_bytes(need)} of memory and {format_bytes(available)} is available{ways}"
    )


def _refuse_hopeless(name: str) -> None:
    """Before gigabytes are fetched: a catalogue model that would not fit as stored."""
    known = catalogue()
    entry = known.get(name) or known.by_hub(name)
    available = memory.available_bytes()
    if entry is None or available is None or entry.memory_bytes <= available or hub.find(name) is not None:
        return
    raise InsufficientMemoryError(
        f"{entry.name} needs about {format_bytes(entry.memory_bytes)} of memory and {format_bytes(available)} is "
        f"available{_smaller(available, entry.name)}"
    )


def _smaller(available: int, name: str) -> str:
    entry = catalogue().largest_within(available)
    if entry is None or entry.name == name:
        return "; close other programs"
    return f"; a model that fits: {entry.name} ({entry.title})"


def _choose_dtype(path: Path) -> str:
    """As stored on a GPU, which reads quantised weights fastest; on a CPU what `localspec.precision` measured."""
    import mlx.core as mx

    if mx.default_device().type == mx.DeviceType.gpu:
        return "quantized"
    from localspec.precision import choose_dtype

    return str(choose_dtype(path))
