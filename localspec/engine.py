"""The engine: a target, its tokenizer and its drafters, and the ways to ask them for text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from localspec.caches.quantization import KVQuantization
from localspec.controller import Controller
from localspec.drafters.ngram import NgramDrafter
from localspec.drafters.protocol import Drafter
from localspec.errors import PromptTooLongError, SettingsError
from localspec.exactness import Exact, Exactness
from localspec.generation import Generation
from localspec.kernels.selection import Kernels
from localspec.matcher import Matchers
from localspec.rows import RowClasses
from localspec.session import Session
from localspec.settings import Settings
from localspec.target import Target
from localspec.text import DetokenizerFactory

if TYPE_CHECKING:
    from localspec.conversation import Conversation
    from localspec.learning import Learning

Message = dict[str, str]
"""One chat turn: `{"role": "system" | "user" | "assistant", "content": text}`."""
Prompt = str | Sequence[Message] | Sequence[int]

_PROMPTS = "a prompt is a text, a list of ids, or a list of {role, content} messages"
_LONGEST_TOKEN = 64
"""Characters; hardly any token stands for more."""


class Engine:
    """Decodes with speculation, or plainly: the same ids either way under coupled acceptance."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        drafters: Sequence[Drafter | str] = ("ngram",),
        name: str = "model",
        context_length: int | None = None,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        quantized_kv_start: int = 5000,
        kernels: str | Kernels = "auto",
        learn: bool | Learning = False,
    ) -> None:
        """`model`, `tokenizer`: what mlx_lm.load returned; without a tokenizer prompts must be ids.

        drafters: asked in this order; names ("ngram") or Drafter objects, of which each session takes a fresh copy.
        context_length: the most tokens, prompt included, that the model can attend to; None means unknown.
        kv_bits: quantize plain key/value caches to so many bits (2, 3, 4, 6, 8) in groups of kv_group_size once they
        hold quantized_kv_start tokens; None leaves them as they are.
        kernels: "auto" uses the Metal kernels that proved themselves on this machine, "on" or "off" all or none of
        them, NAME=on and so on one; several with commas between (docs/kernels.md).
        learn: True keeps the answers on disk for this tokenizer, the latest whole and all as n-grams, and lets the
        "ngram" drafter draft from those of earlier sessions and from texts given to `localspec cache learn`; not where
        `localspec cache off` was said. Under rejection and block acceptance, whose ids depend on the drafts, it keeps
        to the context. False neither reads nor writes any of this (docs/learning.md).

        Raises IncompatibleDrafterError when a drafter does not fit the target, SettingsError for wrong settings.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.context_length = context_length
        self.kernels = kernels if isinstance(kernels, Kernels) else Kernels(kernels)
        quantization = None if kv_bits is None else KVQuantization(kv_bits, kv_group_size, quantized_kv_start)
        self.target = Target(model, quantization)
        self._kernels_chosen = False
        self.controller = Controller()
        self._exact = Exact(self.target, context_length)
        self._learning = self._open_learning(learn)
        self.drafters = [_drafter(d, self._learning) for d in drafters]
        for drafter in self.drafters:
            drafter.check(model, tokenizer)
        self._texts = DetokenizerFactory(tokenizer)
        self._matchers = Matchers(tokenizer, self.target.vocabulary_size)

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids that end a generation."""
        return frozenset() if self.tokenizer is None else frozenset(self.tokenizer.eos_token_ids)

    def stream(self, prompt: Prompt, **settings: Any) -> Generation:
        """Decode `prompt`, a text to continue, a list of messages, or a list of ids; iterate the result.

        Keywords are the fields of Settings. Raises SettingsError or PromptTooLongError before anything runs.
        """
        return self.generation(self.new_session(), self.encode(prompt), Settings.from_keywords(**settings))

    def generate(self, prompt: Prompt, **settings: Any) -> Generation:
        """Like `stream`, run to its end."""
        return self.stream(prompt, **settings).run()

    def conversation(self, system: str | None = None) -> Conversation:
        """A chat whose turns share one cache."""
        from localspec.conversation import Conversation

        return Conversation(self, system)

    def new_session(self) -> Session:
        """An empty context with caches and drafters of its own."""
        return Session(self.target, [drafter.fresh() for drafter in self.drafters])

    def generation(
        self,
        session: Session,
        prompt: list[int],
        settings: Settings,
        *,
        on_end: Callable[[Generation], None] | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Generation:
        """Decode ids in a session, reusing what its caches hold of them."""
        if not prompt:
            raise SettingsError("the prompt is empty: give at least one token")
        self.target.check_ids(prompt)
        if self.context_length is not None and len(prompt) >= self.context_length:
            raise PromptTooLongError(
                f"the prompt has {len(prompt)} tokens and {self.name} can attend to {self.context_length}: "
                "shorten it, or start a new conversation"
            )
        if settings.stop and self.tokenizer is None:
            raise SettingsError("stop strings need a tokenizer, and this engine has none")
        for token in settings.logit_bias:
            if token >= self.target.vocabulary_size:
                raise SettingsError(
                    f"logit_bias: token id {token} is outside the model's vocabulary "
                    f"(0 to {self.target.vocabulary_size - 1})"
                )
        return Generation(
            session,
            prompt,
            settings,
            end_ids=self.end_ids,
            context_length=self.context_length,
            texts=self._texts,
            matcher=None if settings.grammar is None else self._matchers.new(settings.grammar, self.end_ids),
            controller=self.controller,
            exactness=self._exactness,
            kernels=self.kernels,
            on_end=self._learning_from(on_end),
            on_prefill=on_prefill,
            xtc_exempt=self.xtc_exempt() if settings.xtc_probability > 0 else (),
        )

    def _open_learning(self, learn: bool | Learning) -> Learning | None:
        if not learn:
            return None
        if self.tokenizer is None:
            raise SettingsError("learn needs a tokenizer, whose ids it keeps n-grams of, and this engine has none")
        from localspec.learning import Learning

        return learn if isinstance(learn, Learning) else Learning(self.tokenizer, label=self.name)

    def _learning_from(self, on_end: Callable[[Generation], None] | None) -> Callable[[Generation], None] | None:
        """`on_end`, and then what the answer teaches: the text was delivered before, the call ends after the save."""
        learning = self._learning
        if learning is None:
            return on_end

        def end(generation: Generation) -> None:
            if on_end is not None:
                on_end(generation)
            if generation.interrupted or not generation.failed:
                learning.take(generation.prompt_ids, generation.ids)

        return end

    def xtc_exempt(self) -> tuple[int, ...]:
        """Ids that XTC never drops: those of a newline and the end tokens, as in mlx-lm's server and commands."""
        if self.tokenizer is None:
            return ()
        return tuple(sorted({*self.tokenizer.encode("\n"), *self.end_ids}))

    def exactness(self, settings: Settings) -> str:
        """How far ids with speculation equal ids without it under these settings, in one line.

        Measures the model where that has not been done yet: call it from the thread that decodes.
        """
        return self._exactness(settings).line

    def row_classes(self) -> RowClasses:
        """Which sizes of passes round alike on this machine. Takes many passes the first time."""
        self._choose_kernels()
        return self._exact.classes()

    def _exactness(self, settings: Settings) -> Exactness:
        self._choose_kernels()
        return self._exact.of(settings)

    def _choose_kernels(self) -> None:
        """Before anything is measured, in the thread that decodes: passes round by what they are multiplied with."""
        if self._kernels_chosen:
            return
        import mlx.nn as nn

        quantized = any(isinstance(m, nn.QuantizedLinear | nn.QuantizedEmbedding) for m in self.model.modules())
        self.target.few_rows = quantized and self.kernels.uses("few-rows")
        # Models with such layers have imported them.
        self.target.replay_kernel = "mlx_lm.models.gated_delta" in sys.modules and self.kernels.uses("replay")
        self._kernels_chosen = True

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; a start token is added where the tokenizer wants one and the text has none."""
        if not isinstance(prompt, str):
            if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable):
                raise SettingsError(f"{_PROMPTS}, not {type(prompt).__name__}")
            # numpy's and MLX's integers are ids as well.
            items = [
                item.__index__() if hasattr(item, "__index__") and not isinstance(item, bool) else item
                for item in prompt
            ]
            if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
                return [item for item in items if isinstance(item, int)]
            return self._encode_messages(items)
        start = self._needed_tokenizer("a text prompt").bos_token
        return self.tokenize(prompt, add_start=not (start and prompt.startswith(start)))

    def tokenize(self, text: str, *, add_start: bool = False) -> list[int]:
        """Ids of a text; `add_start` lets the tokenizer add what it begins a text with. Raises SettingsError for text
        that is not valid Unicode, PromptTooLongError for one that is hopelessly long, before minutes go into it."""
        if self.context_length is not None and len(text) > _LONGEST_TOKEN * self.context_length:
            raise PromptTooLongError(
                f"the prompt has {len(text)} characters, far more than {self.name}'s {self.context_length} tokens can "
                "hold: shorten it"
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise SettingsError("the prompt is not valid Unicode text (it has lone surrogates)") from None
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_start)
        return ids

    def render(self, messages: Sequence[Message]) -> str:
        """The text that the chat template makes of the messages, ready for an answer."""
        tokenizer = self._needed_tokenizer("a list of messages")
        if not tokenizer.has_chat_template:
            raise SettingsError(f"{self.name} has no chat template: give a text prompt instead of messages")
        from jinja2 import TemplateError

        # A template is a program that came with the model: it may fail in any of these ways.
        faults = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
        try:
            text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except faults as error:
            raise SettingsError(f"{self.name}'s chat template refuses these messages: {error}") from None
        return text

    def _encode_messages(self, items: Sequence[Any]) -> list[int]:
        for item in items:
            if not (
                isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)
            ):
                raise SettingsError(f"{_PROMPTS}, not {item!r}")
        return self.tokenize(self.render(items))

    def _needed_tokenizer(self, purpose: str) -> Any:
        if self.tokenizer is None:
            raise SettingsError(f"{purpose} needs a tokenizer, and this engine has none: give a list of ids")
        return self.tokenizer


def _drafter(drafter: Drafter | str, learning: Learning | None) -> Drafter:
    if not isinstance(drafter, str):
        return drafter
    if drafter != "ngram":
        raise SettingsError(f"unknown drafter {drafter!r}; known: ngram")
    return NgramDrafter() if learning is None else NgramDrafter(levels=learning.levels)
