"""Where an MTP head is on disk, found by the tensors that are there: what a config promises is not looked at.

Reads headers only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from localspec.checkpoint import Tensor


@dataclass(frozen=True, slots=True)
class HeadSource:
    """A head that was found."""

    family: str
    """The file of `localspec.models.mtp` that knows the layout."""
    path: Path
    """The file or folder, for messages."""
    files: tuple[Path, ...]
    """Those with the head's tensors."""
    prefix: str
    """What the names of the head's tensors begin with."""
    tensors: Mapping[str, Tensor]
    """The head's tensors, under their names in the files."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """What a file of our own says of itself."""

    @property
    def bytes(self) -> int:
        """Size of the head as stored."""
        return sum(tensor.bytes for tensor in self.tensors.values())
