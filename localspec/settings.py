"""What a caller may ask of one generation, validated before anything runs."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from localspec.errors import SettingsError
from localspec.grammar import Grammar, as_grammar

Acceptance = Literal["coupled", "rejection", "block"]
Exact = Literal["auto", "rows", "off"]
LogitsProcessor = Callable[[Any, Any], Any]
"""`processor(tokens, logits) -> logits`: ids so far, uint32 [n]; logits, [1, vocabulary]. mlx-lm's convention.

The answer may depend on the arguments only: a pass of several rows calls it once per row, rejected ones included.
"""

MAX_DRAFT_LENGTH = 32
MAX_SEED = 2**64 - 1
_LARGEST = 3e38
"""Logits are float32, which holds little more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One generation's settings. Raises SettingsError, with the allowed range, when constructed with a bad one."""

    max_tokens: int | None = 256
    """Most tokens to emit; None means until a stop or the end of the context window."""
    temperature: float = 0.0
    """0 takes the most probable token; filters below have no effect then."""
    top_p: float = 1.0
    """Nucleus sampling; 1 is off."""
    top_k: int = 0
    """Keep the k most probable tokens; 0, or the vocabulary's size and more, is off."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the top probability; 0 is off."""
    xtc_probability: float = 0.0
    """How often "exclude top choices" acts, per token; 0 is off."""
    xtc_threshold: float = 0.1
    """XTC drops all tokens above this probability but the least likely of them. The tokens of a newline and the end
    tokens are never dropped."""
    repetition_penalty: float | None = None
    """Divides positive logits, and multiplies negative ones, of tokens seen lately; None, 0 and 1 are off."""
    repetition_context_size: int = 20
    """How many of the latest tokens count, prompt included; 0 is all. The same for the other two."""
    presence_penalty: float | None = None
    """Subtracted once from the logits of tokens seen lately; None and 0 are off, a negative one encourages."""
    presence_context_size: int = 20
    frequency_penalty: float | None = None
    """Subtracted from a token's logit for each time it was seen lately; None and 0 are off."""
    frequency_context_size: int = 20
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the logits of single token ids; minus infinity forbids one."""
    seed: int | None = None
    """None takes a fresh one, reported with the result."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it."""
    logits_processors: tuple[LogitsProcessor, ...] = ()
    """Act on the logits after bias and penalties, in this order."""
    logprobs: int = 0
    """Report so many of the likeliest tokens with each token; 0 is none, the vocabulary's size and more is all."""
    grammar: Grammar | None = None
    """What the text must match; `from_keywords` takes a JSON schema as a dict as well."""
    speculate: bool = True
    accept: Acceptance = "coupled"
    """`coupled` keeps plain decoding's ids, `rejection` and `block` its distribution (`docs/acceptance.md`)."""
    exact: Exact = "auto"
    """`rows`: only pass sizes that round alike, for ids that are identical with and without speculation whatever the
    backend; `auto`: so where plain decoding loses no more than 5 % by it; `off`: any size."""
    draft_length: int | Literal["auto"] = "auto"
    """Most tokens to draft per round; `auto` decides from measured costs."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0, None)
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("top_p", self.top_p, 0.0, 1.0)
        _integer("top_k", self.top_k, 0, None)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("xtc_probability", self.xtc_probability, 0.0, 1.0)
        _number("xtc_threshold", self.xtc_threshold, 0.0, 0.5)
        if self.repetition_penalty is not None:
            _number("repetition_penalty", self.repetition_penalty, 0.0, _LARGEST)
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(self, name) is not None:
                _number(name, getattr(self, name), -_LARGEST, _LARGEST)
        for name in ("repetition_context_size", "presence_context_size", "frequency_context_size"):
            _integer(name, getattr(self, name), 0, None)
        # A copy: what the caller does with theirs later must not change a generation that runs.
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        _integer("logprobs", self.logprobs, 0, None)
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise SettingsError("stop must be non-empty strings")
        if any(not callable(p) for p in self.logits_processors):
            raise SettingsError("logits_processors must be callables (tokens, logits) -> logits")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise SettingsError(f"grammar must be made by localspec.grammar, not {self.grammar!r}")
        if not isinstance(self.speculate, bool):
            raise SettingsError(f"speculate must be True or False, not {self.speculate!r}")
        if self.accept not in get_args(Acceptance):
            raise SettingsError(f"accept must be one of {', '.join(get_args(Acceptance))}, not {self.accept!r}")
        if self.exact not in get_args(Exact):
            raise SettingsError(f"exact must be one of {', '.join(get_args(Exact))}, not {self.exact!r}")
        if self.draft_length != "auto":
            _integer("draft_length", self.draft_length, 0, MAX_DRAFT_LENGTH)

    @property
    def changes_logits(self) -> bool:
        """Whether logits are not the model's own any more when the filters see them."""
        penalties = self.repetition_penalty or self.presence_penalty or self.frequency_penalty
        return bool(self.logit_bias or penalties or self.logits_processors)

    @classmethod
    def from_keywords(cls, **keywords: Any) -> Settings:
        """Build from a caller's keywords; an unknown one is an error that names the nearest known one."""
        known = cls.__dataclass_fields__
        for name in keywords:
            if name not in known:
                import difflib

                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
                raise SettingsError(f"unknown setting {name!r}{hint}")
        if "stop" in keywords:
            keywords["stop"] = _items("stop", keywords["stop"])
        if "logits_processors" in keywords:
            keywords["logits_processors"] = _items("logits_processors", keywords["logits_processors"])
        if keywords.get("logit_bias", 0) is None:
            del keywords["logit_bias"]
        if "grammar" in keywords:
            keywords["grammar"] = as_grammar(keywords["grammar"])
        return cls(**keywords)


def _items(name: str, value: Any) -> tuple[Any, ...]:
    """One item, several, or None for none, as a tuple."""
    if value is None:
        return ()
    if isinstance(value, str) or callable(value):
        return (value,)
    if not isinstance(value, Iterable):
        raise SettingsError(f"{name} must be a list, not {value!r}")
    return tuple(value)


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise SettingsError(f"logit_bias must map token ids to numbers, not {value!r}")
    for token, bias in value.items():
        _integer("logit_bias: a token id", token, 0, None)
        if bias != -math.inf:  # which forbids the token
            _number(f"logit_bias of token {token}", bias, -math.inf, _LARGEST)
    return dict(value)


def _integer(name: str, value: object, low: int, high: int | None) -> None:
    allowed = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise SettingsError(f"{name} must be {allowed}, not {value!r}")


def _number(name: str, value: object, low: float, high: float) -> None:
    allowed = f"a number of at least {low:g}" if high == math.inf else f"a number from {low:g} to {high:g}"
    # An integer may be too large for a float, which `math.isfinite` answers with an OverflowError.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise SettingsError(f"{name} must be {allowed}, not {value!r}")
    if not low <= value <= high:
        raise SettingsError(f"{name} must be {allowed}, not {value!r}")
