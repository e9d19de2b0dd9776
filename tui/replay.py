"""A recorded answer as a conversation: the app shows it as if a model were writing it.

Reads the JSON lines of `localspec chat --json`: one object per token, with the fields of `Token`; other objects may
carry `stats`, `seed`, `finish_reason`, `rounds` and `prompt`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from localspec.errors import LocalspecError
from localspec.stats import DrafterStats, Stats
from localspec.tokens import Round, Token
from localspec.tui.provenance import PROVENANCE


class RecordingError(LocalspecError):
    """A file is no recording; the message names the line."""


@dataclass(slots=True)
class Recording:
    """One answer, as it was recorded."""

    tokens: list[Token] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    finish_reason: str | None = None
    prompt: str = ""

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Read a file. Raises RecordingError where it is not a recording."""
        recording = cls()
        try:
            lines = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise RecordingError(f"cannot read {path.name}: {error}") from None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                recording._take(json.loads(line))
            except (ValueError, TypeError, AttributeError) as error:
                reason = f"{path.name}, line {number}: not a record of `localspec chat --json`: {error}"
                raise RecordingError(reason) from None
        if not recording.tokens:
            raise RecordingError(f"{path.name} holds no tokens; record one with `localspec chat --json`")
        return recording

    def _take(self, entry: dict[str, Any]) -> None:
        if "source" in entry and "text" in entry:
            if entry["source"] not in PROVENANCE:
                raise ValueError(f"unknown source {entry['source']!r}")
            known = {f.name for f in fields(Token)}
            token = {name: value for name, value in entry.items() if name in known}
            # JSON has lists for tuples, and nothing for minus infinity.
            pairs = token.get("top_logprobs", ())
            token["top_logprobs"] = tuple((i, -math.inf if logprob is None else logprob) for i, logprob in pairs)
            self.tokens.append(Token(**token))
            return
        self.stats = entry.get("stats", self.stats)
        self.seed = entry.get("seed", self.seed)
        self.finish_reason = entry.get("finish_reason", self.finish_reason)
        self.prompt = entry.get("prompt", self.prompt)

    def final_stats(self) -> Stats:
        """The recorded numbers; those that the tokens alone tell, where none were recorded."""
        if self.stats:
            return _stats(self.stats)
        passes = len({token.round for token in self.tokens})
        return Stats(emitted=len(self.tokens), target_passes=passes)


def _stats(record: dict[str, Any]) -> Stats:
    stats = Stats()
    for name in ("prompt_tokens", "reused_tokens", "emitted", "target_passes", "ttft_s", "prefill_s", "total_s"):
        setattr(stats, name, record.get(name, getattr(stats, name)))
    stats.all_drafters = _drafter(record)
    stats.by_drafter = {name: _drafter(counts) for name, counts in record.get("by_drafter", {}).items()}
    return stats


def _drafter(record: dict[str, Any]) -> DrafterStats:
    rounds, drafted, accepted = (int(record.get(name, 0)) for name in ("rounds", "drafted", "accepted"))
    return DrafterStats(rounds, drafted, accepted)


class ReplayGeneration:
    """Yields the recorded tokens, as fast as they are asked for."""

    def __init__(self, recording: Recording) -> None:
        self.seed = recording.seed
        self.stats = recording.final_stats()
        self.rounds: list[Round] = []
        self.finish_reason: str | None = None
        self._recording = recording

    def __iter__(self) -> Iterator[Token]:
        yield from self._recording.tokens
        self.finish_reason = self._recording.finish_reason

    def close(self) -> None:
        """Nothing to put right."""

    def stop(self) -> None:
        """It ends soon enough."""


@dataclass(frozen=True, slots=True)
class ReplayEngine:
    """What is said of the model that spoke."""

    name: str
    context_length: int | None = None


class ReplayConversation:
    """Gives the recorded answer to whatever is said."""

    def __init__(self, recording: Recording, name: str) -> None:
        self.engine = ReplayEngine(name)
        self.context_used = 0
        self._recording = recording

    def send(
        self, text: str, *, on_prefill: Callable[[int, int], None] | None = None, **settings: Any
    ) -> ReplayGeneration:
        """The recorded answer."""
        generation = ReplayGeneration(self._recording)
        self.context_used = generation.stats.prompt_tokens + len(self._recording.tokens)
        return generation

    def reset(self) -> None:
        """Forget the turn."""
        self.context_used = 0
