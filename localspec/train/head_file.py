"""The file of an MTP head for a Llama: one block over the target's hidden states, with the target's own embeddings.

At position t the head gets the residual stream behind some of the target's layers (`taps`), the embedding of token
t + 1, and says what token t + 2 may be; DeepSeek-V3 (arXiv:2412.19437, section 2.2) has such heads, and EAGLE-3
(arXiv:2503.01840) the use of several layers. Tensors, H the hidden size:

    mtp.tap_norms.{i}.weight [H], mtp.fuse.weight [H, taps * H]        g = fuse(concat_i RMSNorm_i(tap_i))
    mtp.pre_fc_norm_{embedding,hidden}.weight [H], mtp.fc.weight [H, 2H]    x = fc(concat[norm(embedding), norm(g)])
    mtp.layers.0.*    a block of the target's architecture, RoPE at position t
    mtp.norm.weight [H]    the last norm: what comes out is a hidden state that the target's output matrix reads
    mtp.draft_ids [R] int32, ascending    the rows of the output matrix that are used

For a deeper draft, what came out takes the place of g, and the drafted token that of token t + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localspec.errors import LocalspecError

FORMAT, VERSION = "localspec-mtp", "1"
PREFIX = "mtp."
DRAFT_IDS = "draft_ids"


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What the tensors alone do not tell."""

    taps: tuple[int, ...]
    """Layers of the target, from 0, whose residual stream (behind the layer) is used."""
    heads: int
    kv_heads: int
    rope_theta: float
    rms_eps: float
    layers: int
    """Of the target."""
    vocabulary: str
    """localspec.vocabulary.fingerprint of the target's tokenizer."""

    def metadata(self) -> dict[str, str]:
        """As the file has it."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "taps": ",".join(map(str, self.taps)),
            "heads": str(self.heads),
            "kv_heads": str(self.kv_heads),
            "rope_theta": repr(self.rope_theta),
            "rms_eps": repr(self.rms_eps),
            "layers": str(self.layers),
            "vocabulary": self.vocabulary,
        }


def write_head(
    path: Path, shape: HeadShape, weights: Mapping[str, NDArray[np.float32]], draft_ids: NDArray[np.int32]
) -> None:
    """Write a head whole or not at all, its weights (by names without `mtp.`) rounded to bfloat16."""
    import mlx.core as mx

    arrays = {f"{PREFIX}{name}": mx.array(weight).astype(mx.bfloat16) for name, weight in weights.items()}
    arrays[f"{PREFIX}{DRAFT_IDS}"] = mx.array(draft_ids.astype(np.int32))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.partial.safetensors")
    try:
        mx.save_safetensors(str(temporary), arrays, metadata=shape.metadata())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_head(path: Path) -> tuple[HeadShape, dict[str, NDArray[np.float32]], NDArray[np.int32]]:
    """Shape, weights by their names without `mtp.`, and draft ids. LocalspecError when the file is no such head."""
    import mlx.core as mx

    try:
        loaded: Any = mx.load(str(path), format="safetensors", return_metadata=True)
        arrays, metadata = loaded
        if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
            raise ValueError(f"its format is {metadata.get('format')!r}, version {metadata.get('version')!r}")
        shape = HeadShape(
            tuple(int(tap) for tap in metadata["taps"].split(",")),
            int(metadata["heads"]),
            int(metadata["kv_heads"]),
            float(metadata["rope_theta"]),
            float(metadata["rms_eps"]),
            int(metadata["layers"]),
            metadata["vocabulary"],
        )
        draft_ids = np.array(arrays.pop(f"{PREFIX}{DRAFT_IDS}"))
        weights = {name.removeprefix(PREFIX): np.array(array.astype(mx.float32)) for name, array in arrays.items()}
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise LocalspecError(f"{path} is not an MTP head: {' '.join(str(error).split())}") from error
    return shape, weights, draft_ids
