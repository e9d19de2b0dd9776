"""Where an MTP head is on disk, found by the tensors that are there: what a config promises is not looked at.

Reads headers only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    config: Mapping[str, Any] = field(default_factory=dict)
    """The config.json beside a head that is a model of its own."""
    converted: bool = False
    """Whether the tensors are the head's parameters as they are used: `localspec models add-head` wrote them."""

    @property
    def bytes(self) -> int:
        """Size of the head as stored."""
        return sum(tensor.bytes for tensor in self.tensors.values())
