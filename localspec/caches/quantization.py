"""Key/value caches in few bits from a fixed number of tokens on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_lm.models.cache import CacheList, KVCache

from localspec.errors import SettingsError


@dataclass(frozen=True, slots=True)
class KVQuantization:
    """When and how plain key/value caches are converted; other kinds of cache stay as they are.

    The conversion happens when the caches hold exactly `start` tokens, in every run: passes end there. mlx-lm converts
    after the first pass that reaches `start`, which would make the result depend on the sizes of passes.
    """

    bits: int
    group_size: int = 64
    start: int = 5000

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4, 6, 8):
            raise SettingsError(f"kv_bits must be 2, 3, 4, 6 or 8, not {self.bits!r}")
        if self.group_size not in (32, 64, 128):
            raise SettingsError(f"kv_group_size must be 32, 64 or 128, not {self.group_size!r}")
        if isinstance(self.start, bool) or not isinstance(self.start, int) or self.start < 0:
            raise SettingsError(f"quantized_kv_start must be an integer of at least 0, not {self.start!r}")

    def convert(self, cache: Any) -> Any:
        """The same cache, quantized if it is a plain key/value cache (inside a list, too); `cache` itself stays."""
        if type(cache) is KVCache:
            width = None if cache.keys is None else min(cache.keys.shape[-1], cache.values.shape[-1])
            if width is not None and width % self.group_size:
                raise SettingsError(f"kv_group_size {self.group_size} does not divide this model's head width {width}")
            return cache.to_quantized(group_size=self.group_size, bits=self.bits)
        if type(cache) is CacheList:
            return CacheList(*(self.convert(inner) for inner in cache.caches))
        return cache
