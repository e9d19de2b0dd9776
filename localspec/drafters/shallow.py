"""A model with some of its layers left out, made of the model's own modules: no array is copied.

The layers that are left out stay in the model's list as `Skipped`, which give on what they are given. So whatever the
model decides by a layer's index (which of them slide a window, which are recurrent, where a mask comes from) stays
right, and only caches of the layers that run have to be kept.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, make_prompt_cache

from localspec.caches.leaves import CutLeaf, leaves_of
from localspec.errors import IncompatibleDrafterError

_Place = tuple[nn.Module, str]
"""A module, and the name of something in it."""
_ROWS = 2
"""Rows of the pass that shows whether a model runs without the other layers."""


class Skipped(nn.Module):  # type: ignore[misc]
    """Stands in for a layer: its output is its input. What else is asked of it, the layer answers.

    The layer is not among its children: whoever goes through the model's modules finds those that run.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_layer", layer)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return next(iter((*inputs, *named.values())))

    def __getattr__(self, name: str) -> Any:
        layer = vars(self).get("_layer")
        if layer is None:  # not there yet, while this is being copied
            raise AttributeError(name)
        return getattr(layer, name)


class ShallowModel(nn.Module):  # type: ignore[misc]
    """A model of mlx-lm running some of its layers only, then its own final norm and head.

    Called like the model, with one cache per layer that runs, as `make_cache` makes them. Other attributes are the
    model's.
    """

    def __init__(self, model: Any, kept: Sequence[int]) -> None:
        """`kept`: indices of the layers that run, ascending. Raises IncompatibleDrafterError where the model cannot be
        cut, or not in this way; the message says why."""
        super().__init__()
        layers, places = _find_layers(model)
        if not kept or list(kept) != sorted(set(kept)) or not 0 <= kept[0] <= kept[-1] < len(layers):
            raise IncompatibleDrafterError(
                f"layers {list(kept)} are not some of the model's, in order: it has {len(layers)}, from 0 on"
            )
        self._kept = tuple(kept)
        self._stand_ins = _stand_ins(kinds_of_layers(model), self._kept)
        # From the list up to the model: a copy of each module on the way, which refers to the copy below it.
        inner: Any = [layer if i in self._kept else Skipped(layer) for i, layer in enumerate(layers)]
        for holder, name in reversed(places):
            outer = copy.copy(holder)
            outer[name] = inner
            inner = outer
        self.inner = inner
        self._try()

    @property
    def kept(self) -> tuple[int, ...]:
        """Indices of the layers that run."""
        return self._kept

    def make_cache(self) -> list[Any]:
        """Empty caches of the layers that run, in their order."""
        caches = make_prompt_cache(self.inner)
        return [caches[i] for i in self._kept]

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        """inputs: integer [batch, rows]; returns logits [batch, rows, vocabulary]."""
        logits: mx.array = self.inner(inputs, cache=[cache[i] for i in self._stand_ins])
        return logits

    def __getattr__(self, name: str) -> Any:
        value = self.get(name)
        return getattr(self["inner"], name) if value is None and "inner" in self else super().__getattr__(name)

    def _try(self) -> None:
        """Build a pass, computing nothing: a model that hands more than one array from layer to layer fails here."""
        caches = self.make_cache()
        try:
            logits = self(mx.zeros((1, _ROWS), mx.uint32), caches)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise _refused(f"what its layers give to each other is more than one array ({error})") from error
        offsets = {leaf.cache.offset for leaf in leaves_of(caches) if isinstance(leaf, CutLeaf)}
        if logits.shape[:2] != (1, _ROWS) or not offsets <= {0, _ROWS}:
            raise _refused("other layers than those chosen ran")


def kinds_of_layers(model: Any) -> list[Any]:
    """Per layer, what tells the kinds of its cache apart: equal for layers whose masks and offsets are alike."""
    layers, _ = _find_layers(model)
    caches = make_prompt_cache(model)
    if len(caches) != len(layers):
        raise _refused(f"it has {len(caches)} caches for {len(layers)} layers, so that they do not go by layer")
    return [_kind(cache) for cache in caches]


def _kind(cache: Any) -> Any:
    if type(cache) is CacheList:
        return tuple(_kind(inner) for inner in cache.caches)
    return type(cache).__name__, getattr(cache, "max_size", None), getattr(cache, "chunk_size", None)


def _stand_ins(kinds: list[Any], kept: tuple[int, ...]) -> tuple[int, ...]:
    """Per layer of the whole model, which of the kept ones' caches to show where the model looks for its own.

    It never runs on it, but the masks of all layers of its kind may be made from it.
    """
    found = []
    for i, kind in enumerate(kinds):
        alike = [place for place, layer in enumerate(kept) if kinds[layer] == kind]
        if not alike:
            raise IncompatibleDrafterError(
                f"the layers {list(kept)} leave out all of a kind that the model has: take layer {i} as well"
            )
        found.append(min(alike, key=lambda place: abs(kept[place] - i)))
    return tuple(found)


def _find_layers(model: Any) -> tuple[list[Any], list[_Place]]:
    """The layers, and the way to their list: the model first, each module with the name of what is next."""
    layers = getattr(model, "layers", None)
    if not isinstance(layers, list) or len(layers) < 2:
        raise _refused("it has no list of layers")
    found = list(_ways(model, layers))
    if len(found) != 1:
        raise _refused("its layers are not one list in one place")
    return layers, found[0]


def _ways(module: nn.Module, layers: list[Any]) -> Iterator[list[_Place]]:
    for name, value in module.items():
        if isinstance(value, nn.Module):
            yield from ([(module, name), *way] for way in _ways(value, layers))
        elif isinstance(value, list) and len(value) == len(layers) and all(map(is_, value, layers)):
            yield [(module, name)]


def _refused(reason: str) -> IncompatibleDrafterError:
    return IncompatibleDrafterError(f"this model cannot draft for itself with fewer layers: {reason}")
