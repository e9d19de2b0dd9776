"""Token ids to text, one id at a time: what has been given out is never taken back or given twice.

The pieces of a Detokenizer, joined, are the tokenizer's own `decode` of all the ids, special tokens included and
without its cleaning up of spaces. To promise that, the decoder declared by a fast tokenizer is run here as a chain of
stages, each the streaming form of one of the `tokenizers` library's decoders, holding back just what a later token
could still change. A tokenizer whose decoder is not known here (or that overrides `decode`) goes through `Window`.

Knows nothing about stop strings or about which tokens are shown.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from localspec.detokenizer_stages import (
    ByteFallback,
    ByteLevel,
    EndOfWord,
    FusedReplace,
    Indexed,
    LeadingStrip,
    Local,
    Stage,
)
from localspec.detokenizer_window import Window


class Detokenizer:
    """The text of one sequence of ids. Made by `DetokenizerFactory.new`."""

    def __init__(self, token_of: Callable[[int], str | None], stages: list[Stage], window: Window | None) -> None:
        self._token_of = token_of
        self._stages = stages
        self._window = window

    def add(self, token_id: int) -> str:
        """Take one more id; returns the text that is certain now, which may be empty.

        An id that the tokenizer does not have (a padded row of the embedding) adds nothing, as in `decode`.
        """
        if self._window is not None:
            return self._window.add(token_id)
        token = self._token_of(token_id)
        return "" if token is None else _through(self._stages, [token])

    def finish(self) -> str:
        """The rest: unfinished characters become the marks that `decode` shows for them. Nothing may be added after."""
        if self._window is not None:
            return self._window.finish()
        text = ""
        for index, stage in enumerate(self._stages):
            text += _through(self._stages[index + 1 :], stage.end())
        return text

    @property
    def pending(self) -> bool:
        """Whether `finish` could still return text."""
        if self._window is not None:
            return self._window.pending
        return any(stage.pending for stage in self._stages)

    def peek(self, token_id: int) -> str:
        """The text there would be from here if `token_id` came next and was the last; changes nothing."""
        twin = Detokenizer(self._token_of, [copy.copy(stage) for stage in self._stages], copy.copy(self._window))
        return twin.add(token_id) + twin.finish()


class DetokenizerFactory:
    """Reads a tokenizer's decoder once; makes a Detokenizer for each sequence.

    `tokenizer` is a Hugging Face tokenizer, mlx-lm's wrapper around one, or None, for which every text is empty.
    """

    def __init__(self, tokenizer: Any) -> None:
        inner = vars(tokenizer).get("_tokenizer") if hasattr(tokenizer, "__dict__") else None
        self._tokenizer: Any = inner if hasattr(inner, "backend_tokenizer") else tokenizer
        self._tokens: dict[int, str | None] = {}
        self._backend = None if tokenizer is None else getattr(self._tokenizer, "backend_tokenizer", None)
        self._stages: list[Stage] | None = [] if tokenizer is None else self._compile()

    @property
    def exact(self) -> bool:
        """Whether the decoder is known, so that the text is `decode`'s by construction and not by observation."""
        return self._stages is not None

    def new(self) -> Detokenizer:
        """A detokenizer for a new sequence."""
        if self._stages is None:
            return Detokenizer(self._token, [], Window(self._decode, len(self._tokenizer)))
        return Detokenizer(self._token, [copy.copy(stage) for stage in self._stages], None)

    def _token(self, token_id: int) -> str | None:
        if token_id not in self._tokens:
            known = self._backend is not None and 0 <= token_id < 2**32
            self._tokens[token_id] = self._backend.id_to_token(token_id) if known else None  # type: ignore[union-attr]
        return self._tokens[token_id]

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def _compile(self) -> list[Stage] | None:
        """The stages for this tokenizer; None if some part of how it decodes is not known here."""
        if self._backend is None:
            return None
        after: list[Stage] = []
        if not (_from_transformers(self._tokenizer, "decode") and _from_transformers(self._tokenizer, "_decode")):
            if type(self._tokenizer).__qualname__ != "NewlineTokenizer":
                return None
            after = [FusedReplace("<n>", "\n")]  # mlx-lm's: decodes as usual, then replaces
        decoder = self._backend.decoder
        if decoder is None:
            return [Indexed(lambda token: token, lambda token: " " + token), *after]
        try:
            spec = json.loads(decoder.__getstate__())
        except (TypeError, ValueError):  # a decoder written in Python cannot be read
            return None
        stages = _compile(spec)
        return None if stages is None else stages + after


def _through(stages: list[Stage], tokens: list[str]) -> str:
    for stage in stages:
        tokens = [out for token in tokens for out in stage.feed(token)]
    return "".join(tokens)


def _from_transformers(tokenizer: Any, method: str) -> bool:
    """Whether the tokenizer's class leaves this method to the transformers library's base classes."""
    owner = next((cls for cls in type(tokenizer).__mro__ if method in vars(cls)), None)
    return owner is not None and owner.__module__.startswith("transformers.tokenization_utils")


def _compile(spec: dict[str, Any]) -> list[Stage] | None:
    parts = _flatten(spec)
    stages: list[Stage] = []
    fused = False  # from here on the library sees one token holding the whole text
    for part in parts:
        kind = part["type"]
        stage: Stage | None = None
        if kind != "Fuse":
            stage = _fused_stage(kind, part) if fused else _token_stage(kind, part)
            if stage is None:
                return None
            stages.append(stage)
        fused = fused or kind in ("Fuse", "ByteLevel")
    return stages


def _flatten(spec: dict[str, Any]) -> list[dict[str, Any]]:
    if spec["type"] != "Sequence":
        return [spec]
    return [part for inner in spec["decoders"] for part in _flatten(inner)]


def _token_stage(kind: str, part: dict[str, Any]) -> Stage | None:
    from tokenizers import Regex, decoders

    if kind == "ByteLevel":
        return ByteLevel()
    if kind == "ByteFallback":
        return ByteFallback()
    if kind == "BPEDecoder":
        return EndOfWord(part["suffix"])
    if kind == "Replace":
        find = part["pattern"]
        replace = decoders.Replace(find["String"] if "String" in find else Regex(find["Regex"]), part["content"])
        return Local(lambda token: str(replace.decode([token])))
    if kind == "Strip" and not part["stop"]:
        strip = decoders.Strip(part["content"], part["start"], 0)
        return Local(lambda token: str(strip.decode([token])))
    if kind == "Metaspace":
        space = part["replacement"]
        first = " " if part["prepend_scheme"] == "never" else ""
        return Indexed(lambda token: token.replace(space, first), lambda token: token.replace(space, " "))
    if kind == "WordPiece":
        words = decoders.WordPiece(part["prefix"], part["cleanup"])
        return Indexed(lambda token: str(words.decode([token])), lambda token: str(words.decode(["", token])))
    return None


def _fused_stage(kind: str, part: dict[str, Any]) -> Stage | None:
    if kind == "Replace" and part["pattern"].get("String"):
        return FusedReplace(part["pattern"]["String"], part["content"])
    if kind == "Strip" and not part["stop"]:
        return LeadingStrip(part["content"], part["start"])
    if kind == "Metaspace":
        space = " " if part["prepend_scheme"] == "never" else ""
        return Local(lambda text: text.replace(part["replacement"], space))
    return None
