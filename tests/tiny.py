"""Tiny models and a real tokenizer for tests: import as `from tiny import ...`.

Everything is made here from seeds, in milliseconds: nothing is downloaded.

- `tiny_llama`, `tiny_gemma`: random transformers built by mlx-lm's own classes (plain and rotating caches).
- `TableModel`: logits are looked up by the last two tokens, so that whole distributions can be enumerated.
- `ScriptModel`: says a fixed text, whatever it is fed.
- `ScriptDrafter`: drafts a fixed text, with mistakes at chosen places.
- `tiny_tokenizer`, `chat_engine`: a byte-level BPE in mlx-lm's wrapper with a chat template, and an engine with it.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models import gemma3_text, llama
from mlx_lm.models.cache import KVCache
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from localspec.drafters.protocol import Drafter, Draw, Proposal
from localspec.engine import Engine
from localspec.tokens import Source

VOCABULARY = 64
"""Rows of `tiny_llama`'s embedding unless told otherwise."""


def _scaled(model: Any, seed: int, scale: float) -> Any:
    """Matrices get normal weights of standard deviation scale / sqrt(width); vectors (norms) stay."""
    keys = iter(mx.random.split(mx.random.key(seed), 512))

    def fill(x: mx.array) -> mx.array:
        return mx.random.normal(x.shape, key=next(keys)) * (scale / x.shape[-1] ** 0.5) if x.ndim > 1 else x

    model.update(tree_map(fill, model.parameters()))
    mx.eval(model.parameters())
    return model


def tiny_llama(seed: int = 0, *, vocabulary: int = VOCABULARY, scale: float = 3.0, layers: int = 2) -> Any:
    """A random Llama with plain KV caches.

    At scale 3 greedy output does not fall into a loop, so an unrelated draft is mostly rejected; at scale 1 it soon
    does, so n-gram drafts are mostly accepted.
    """
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=layers,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=vocabulary,
        rope_theta=10000.0,
        tie_word_embeddings=False,
    )
    return _scaled(llama.Model(args), seed, scale)


def tiny_gemma(seed: int = 0, *, vocabulary: int = VOCABULARY, window: int = 16, scale: float = 3.0) -> Any:
    """A random Gemma 3 whose first layer has a RotatingKVCache of `window` tokens, its second a plain one."""
    args = gemma3_text.ModelArgs(
        model_type="gemma3_text",
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=2,
        head_dim=16,
        vocab_size=vocabulary,
        num_key_value_heads=1,
        query_pre_attn_scalar=16,
        sliding_window=window,
        sliding_window_pattern=2,
    )
    return _scaled(gemma3_text.Model(args), seed, scale)


class TableModel(nn.Module):
    """Next-token logits that depend on the last two tokens only: `table[before last, last]`.

    Keeps the ids in a KVCache, as a real model keeps its keys, so that a wrong rollback changes the logits. Before the
    first token there is a token 0.
    """

    def __init__(self, table: mx.array) -> None:
        super().__init__()
        self.table = table
        self.args = SimpleNamespace(vocab_size=table.shape[-1])

    def make_cache(self) -> list[KVCache]:
        return [KVCache()]

    def __call__(self, inputs: mx.array, cache: list[KVCache]) -> mx.array:
        rows = inputs.shape[1]
        kept = inputs.astype(mx.float32)[:, None, :, None]
        ids = cache[0].update_and_fetch(kept, kept)[0][0, 0, :, 0].astype(mx.int32)
        ids = mx.concatenate([mx.array([0], mx.int32), ids])
        return self.table[ids[-rows - 1 : -1], ids[-rows:]][None]


def random_table(seed: int, vocabulary: int, sharpness: float = 1.5) -> mx.array:
    """Logits for a TableModel, normal with standard deviation `sharpness`."""
    table = mx.random.normal((vocabulary, vocabulary, vocabulary), key=mx.random.key(seed)) * sharpness
    mx.eval(table)
    return table


class ScriptModel(nn.Module):
    """Greedily says `script[n]` after n tokens (prompt included), whatever they were; after its end, token 0.

    Other ids have logits that depend on the position and on the id, all of them far lower.
    """

    def __init__(self, script: Sequence[int], vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.script = mx.array([*script, 0], mx.int32)
        self.args = SimpleNamespace(vocab_size=vocabulary)

    def make_cache(self) -> list[KVCache]:
        return [KVCache(), KVCache()]

    def __call__(self, inputs: mx.array, cache: list[KVCache]) -> mx.array:
        rows = inputs.shape[1]
        start = cache[0].offset
        kept = inputs.astype(mx.float32)[:, None, :, None]
        for layer in cache:
            layer.update_and_fetch(kept, kept)
        following = mx.arange(start + 1, start + rows + 1)
        said = self.script[mx.minimum(following, self.script.size - 1)]
        ids = mx.arange(self.args.vocab_size)
        others = mx.sin(following[:, None] * 0.7 + ids[None, :] * 1.3)
        return mx.where(ids[None, :] == said[:, None], 20.0, others)[None]


class ScriptDrafter(Drafter):
    """Drafts `script[n]` for position n (prompt included), one more (modulo `vocabulary`) at the `wrong` positions."""

    free = False

    def __init__(
        self,
        script: Sequence[int],
        *,
        wrong: Collection[int] = (),
        vocabulary: int = VOCABULARY,
        name: Source = "draft",
        free: bool = False,
    ) -> None:
        super().__init__()
        self.script, self.wrong, self.vocabulary = list(script), frozenset(wrong), vocabulary
        self.name, self.free = name, free

    def fresh(self) -> ScriptDrafter:
        return ScriptDrafter(self.script, wrong=self.wrong, vocabulary=self.vocabulary, name=self.name, free=self.free)

    def commit(self, tokens: Sequence[int]) -> None:
        self.context.extend(tokens)

    def propose(self, length: int, draw: Draw) -> Proposal | None:
        start = len(self.context)
        drafts = [
            (token + (start + i in self.wrong)) % self.vocabulary
            for i, token in enumerate(self.script[start : start + length])
        ]
        return Proposal(drafts, self.name) if drafts else None


IM_START, IM_END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog, doesn't it?\n",
    "def f(x):\n    return [x for x in y]\n",
    "user assistant system\n",
    "中文和日本語 😀 👩‍👩‍👧 naïve café\n",
] * 20


@functools.cache
def _backend_json() -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=317,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>", IM_START, IM_END],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return str(backend.to_str())


def tiny_tokenizer(
    *, template: str | None = TEMPLATE, adds_start: bool = False, pieces: Sequence[str] = ()
) -> TokenizerWrapper:
    """A byte-level BPE of a little over 300 tokens; any text can be encoded. Ids: 1 `<|im_start|>`, 2 `<|im_end|>`.

    `adds_start`: encoding with special tokens puts the start token first. `pieces`: further strings that are one token.
    """
    backend = Tokenizer.from_str(_backend_json())
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    if adds_start:
        from tokenizers.processors import TemplateProcessing

        backend.post_processor = TemplateProcessing(single=f"{IM_START} $A", special_tokens=[(IM_START, 1)])
    inner = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=IM_START, eos_token=IM_END, clean_up_tokenization_spaces=False
    )
    inner.chat_template = template
    return TokenizerWrapper(inner, BPEStreamingDetokenizer)


def chat_engine(
    seed: int = 0,
    *,
    drafters: Sequence[Drafter | str] = ("ngram",),
    scale: float = 3.0,
    context_length: int | None = None,
    **tokenizer: Any,
) -> Engine:
    """A random tiny Llama behind `tiny_tokenizer`: it talks nonsense, and chats like any other."""
    words = tiny_tokenizer(**tokenizer)
    model = tiny_llama(seed, vocabulary=len(words), scale=scale)
    return Engine(model, words, drafters=drafters, name="tiny", context_length=context_length)


def script_engine(
    text: str, *, prompt: str = "say it", drafters: Sequence[Drafter | str] | None = None, **tokenizer: Any
) -> tuple[Engine, list[int], list[int]]:
    """An engine that answers `text` and then its end token; the prompt's ids; the answer's ids.

    Without `drafters`, drafts are right everywhere, so that whole blocks are accepted.
    """
    words = tiny_tokenizer(**tokenizer)
    start = words.encode(prompt, add_special_tokens=False)
    answer = [*words.encode(text, add_special_tokens=False), words.eos_token_id]
    script = [*start, *answer, *[5] * 40]
    model = ScriptModel(script, len(words))
    chosen = [ScriptDrafter(script, vocabulary=len(words))] if drafters is None else drafters
    return Engine(model, words, drafters=chosen), start, answer
