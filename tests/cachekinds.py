"""One small model per kind of cache, a tokenizer for their ids, and what is in a session's caches: import as
`from cachekinds import ...`.

`KINDS` names the kinds. `engine(kind)` is an engine of that kind without drafters, the same one at every call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from architectures import VOCABULARY, build
from mlx_lm.models import llama
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    make_prompt_cache,
)
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from planted import OddCache
from tiny import _scaled, tiny_gemma
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from localspec.caches.leaves import CutLeaf
from localspec.caches.window import WindowCache
from localspec.engine import Engine
from localspec.session import Session
from localspec.settings import Settings
from localspec.transaction import Transaction

CONVERTED = 34
"""Tokens at which the kind "quantized later" goes over to few bits."""
TOLERANCE = 1e-4
QUANTIZED_TOLERANCE = 0.05
"""One step of an 8-bit cache: two ways to round may fall on either side of one."""


@dataclass(frozen=True)
class Kind:
    """How a kind is had."""

    build: Callable[[], Any]
    rollback: str
    caches: tuple[type, ...]
    """Among the leaves, once it decodes."""
    options: dict[str, Any] = field(default_factory=dict)
    """The engine's."""


def _llama(*caches: Callable[[], Any], head: int = 8, layers: int = 3) -> Any:
    """A random Llama whose layers have these kinds of cache in turn."""
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=layers,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head,
        rms_norm_eps=1e-5,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )
    model = _scaled(llama.Model(args), 0, 2.0)
    if caches:
        model.make_cache = lambda: [caches[i % len(caches)]() for i in range(layers)]
    return model


def _hybrid_and_odd() -> Any:
    """Gated delta and attention, the latter with a kind of cache that nobody has seen."""
    model = build("qwen3_next")
    known = make_prompt_cache(model)
    kinds = [OddCache if type(cache) is KVCache else type(cache) for cache in known]
    model.make_cache = lambda: [OddCache() if kind is OddCache else kind(2) for kind in kinds]
    return model


_IN_BITS = {"kv_bits": 8, "kv_group_size": 32}

KINDS: dict[str, Kind] = {
    "plain": Kind(_llama, "cut", (KVCache,)),
    "concatenate": Kind(lambda: _llama(ConcatenateKVCache, KVCache), "cut", (ConcatenateKVCache,)),
    "window not full": Kind(lambda: tiny_gemma(vocabulary=VOCABULARY, window=400, scale=2.0), "cut", (WindowCache,)),
    "window": Kind(lambda: build("gemma3_text"), "cut", (WindowCache, KVCache)),
    "chunked": Kind(lambda: build("llama4"), "cut", (ChunkedKVCache, KVCache)),
    "quantized": Kind(lambda: _llama(head=32), "cut", (QuantizedKVCache,), {**_IN_BITS, "quantized_kv_start": 0}),
    "quantized later": Kind(
        lambda: _llama(head=32), "cut", (QuantizedKVCache,), {**_IN_BITS, "quantized_kv_start": CONVERTED}
    ),
    "list": Kind(lambda: build("deepseek_v32"), "cut", (KVCache,)),
    "mamba": Kind(lambda: build("mamba"), "record", (ArraysCache,)),
    "mamba 2": Kind(lambda: build("mamba2"), "record", (ArraysCache,)),
    "rwkv": Kind(lambda: build("rwkv7"), "record", (ArraysCache,)),
    "gated delta, hybrid": Kind(lambda: build("qwen3_next"), "record", (ArraysCache, KVCache)),
    "short convolution, hybrid": Kind(lambda: build("lfm2"), "record", (ArraysCache, KVCache)),
    "recurrence and windows": Kind(lambda: build("recurrent_gemma"), "record", (ArraysCache, WindowCache)),
    "list with state": Kind(lambda: build("falcon_h1"), "record", (ArraysCache, KVCache)),
    "list with state, replayed": Kind(lambda: build("baichuan_m1"), "replay", (ArraysCache, KVCache, WindowCache)),
    "odd": Kind(lambda: _llama(OddCache, KVCache), "replay", (OddCache, KVCache)),
    "odd, hybrid": Kind(_hybrid_and_odd, "replay", (OddCache, ArraysCache)),
    "the model's own": Kind(lambda: build("deepseek_v41"), "replay", ()),
}
CUT = [name for name, kind in KINDS.items() if kind.rollback == "cut"]
NOT_CUT = [name for name, kind in KINDS.items() if kind.rollback != "cut"]


@functools.cache
def model(kind: str) -> Any:
    return KINDS[kind].build()


@functools.cache
def engine(kind: str) -> Engine:
    return Engine(model(kind), letters(), drafters=[], name=kind, **KINDS[kind].options)


@functools.cache
def letters() -> TokenizerWrapper:
    """A token per id, two letters each, the first of another alphabet than the second; no end token."""
    pieces = {
        first + second: 12 * i + j for i, first in enumerate("abcdefgh") for j, second in enumerate("mnopqrstuvwx")
    }
    assert len(pieces) == VOCABULARY
    backend = Tokenizer(
        models.BPE(vocab=pieces | {c: VOCABULARY + i for i, c in enumerate("abcdefghmnopqrstuvwx")}, merges=[])
    )
    backend.decoder = decoders.ByteLevel()
    wrapped = TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=backend), BPEStreamingDetokenizer)
    wrapped.eos_token_ids = set()
    return wrapped


def piece(token: int) -> str:
    """The text of a token."""
    return "abcdefgh"[token // 12] + "mnopqrstuvwx"[token % 12]


def settings(**values: Any) -> Settings:
    """Without a measurement of the machine's rounding: these models are too small to be worth it."""
    return Settings.from_keywords(**{"exact": "off", "temperature": 0.8, **values})


def cold(used: Engine, prompt: Sequence[int], **values: Any) -> list[int]:
    """Plain decoding from fresh caches."""
    return used.generation(used.new_session(), list(prompt), settings(speculate=False, **values)).run().ids


# What is in caches


def assert_holds(session: Session, ids: Sequence[int], *, computed: int | None = None) -> None:
    """The session's tokens are `ids`, and its caches hold them but for the newest, exactly: compared with fresh caches
    that were filled in one go. `computed`: other than all but the newest."""
    assert session.ids == list(ids)
    assert session.transaction.length == session.transaction.held
    assert_caches(session.transaction, ids, max(len(ids) - 1, 0) if computed is None else computed)


def assert_caches(transaction: Transaction, ids: Sequence[int], count: int) -> None:
    """The caches hold the first `count` of `ids`: keys, values and state as after one pass over them."""
    assert transaction.held == count
    assert not transaction._fillers
    fresh = Transaction(transaction._target)
    fresh.prefill(ids[:count])
    fresh._quantize_if_due()
    transaction._quantize_if_due()  # due at this very place, or not at all
    assert [type(leaf.cache) for leaf in transaction._leaves] == [type(leaf.cache) for leaf in fresh._leaves]
    for leaf, other in zip(transaction._leaves, fresh._leaves, strict=True):
        if isinstance(leaf, CutLeaf) or hasattr(leaf.cache, "offset"):
            assert leaf.cache.offset == other.cache.offset, leaf.name
            assert leaf.cache.offset in (0, count), leaf.name
        _assert_close(leaf.name, leaf.cache, other.cache)


def _assert_close(name: str, cache: Any, fresh: Any) -> None:
    one, other = dict(_contents(cache)), dict(_contents(fresh))
    assert one.keys() == other.keys(), name
    tolerance = QUANTIZED_TOLERANCE if isinstance(cache, QuantizedKVCache) else TOLERANCE
    for key, value in one.items():
        reference = other[key]
        if isinstance(cache, ChunkedKVCache):
            # Old entries leave when the next pass begins, but those of the latest chunk stay. What both still have:
            assert cache.start_position <= cache.offset // cache.chunk_size * cache.chunk_size
            both = min(value.shape[2], reference.shape[2])
            value, reference = value[..., -both:, :], reference[..., -both:, :]
        assert value.shape == reference.shape, (name, key)
        if value.size:
            apart = mx.max(mx.abs(value.astype(mx.float32) - reference.astype(mx.float32)))
            scale = mx.maximum(mx.max(mx.abs(reference.astype(mx.float32))), 1)
            assert float((apart / scale).item()) < tolerance, (name, key)


def _contents(cache: Any) -> Iterator[tuple[str, mx.array]]:
    """What counts of a cache's arrays, without free room."""
    if isinstance(cache, ArraysCache):
        yield from ((f"state {i}", value) for i, value in enumerate(cache.cache) if value is not None)
    elif not hasattr(cache, "keys"):
        yield from ((key, value) for key, value in vars(cache).items() if isinstance(value, mx.array))
    elif cache.keys is not None and cache.offset:
        first, end = 0, cache.offset
        if isinstance(cache, WindowCache):
            first, end = cache._idx - min(cache.offset, cache.max_size - 1), cache._idx
        elif isinstance(cache, ChunkedKVCache):
            end = cache.offset - cache.start_position
        elif isinstance(cache, ConcatenateKVCache):
            assert cache.keys.shape[2] == cache.offset  # it appends behind all that is there
        for key in ("keys", "values"):
            value = getattr(cache, key)
            if isinstance(cache, QuantizedKVCache):
                value = mx.dequantize(*value, group_size=cache.group_size, bits=cache.bits)
            yield key, value[..., first:end, :]


def leaf_types(transaction: Transaction) -> set[type]:
    return {type(leaf.cache) for leaf in transaction._leaves}
