"""Whether two tokenizers mean the same by a token id.

Compares token strings, not sizes: embeddings are padded to different multiples in models that share a tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from localspec.errors import IncompatibleDrafterError

_TAIL_SHARE = 0.02
_TAIL_FLOOR = 1024
_WAY_OUT = "choose a draft of the same model family"


def check_same_vocabulary(target: Any, draft: Any) -> None:
    """Raise IncompatibleDrafterError unless a draft's ids mean to the target what they mean to the draft.

    Ids at the end that only one of them has (padding, later additions) are allowed: the draft cannot propose what it
    lacks, and what the target lacks is never accepted. What begins and what ends a text must be the same, too, as far
    as both say: a model that was trained on another frame guesses badly.
    """
    ours, theirs = _by_id(target), _by_id(draft)
    shared_end = min(max(ours, default=-1), max(theirs, default=-1))
    for position in range(shared_end + 1):
        mine, other = ours.get(position), theirs.get(position)
        if mine != other:
            raise IncompatibleDrafterError(
                f"the draft model has another vocabulary: id {position} is {_shown(mine)} in the target and "
                f"{_shown(other)} in the draft; {_WAY_OUT}"
            )
    tail = max(len(ours), len(theirs)) - min(len(ours), len(theirs))
    if tail > _tail(len(ours)):
        position = shared_end + 1
        raise IncompatibleDrafterError(
            f"the draft model has another vocabulary: {len(theirs)} tokens against the target's {len(ours)}; id "
            f"{position} is {_shown(ours.get(position))} in the target and {_shown(theirs.get(position))} in the "
            f"draft; {_WAY_OUT}"
        )

    _check_ends(target, draft, ours, theirs)


def same_rows(target: dict[str, Any], draft: dict[str, Any]) -> bool:
    """Whether two models may share a vocabulary, by the sizes in their configs, which costs nothing to ask.

    False is certain; True is not, and the tokenizers have to be compared.
    """
    ours, theirs = _rows(target), _rows(draft)
    return ours is None or theirs is None or abs(ours - theirs) <= _tail(ours)


def fingerprint(tokenizer: Any) -> str:
    """SHA-256, in hex, of the vocabulary, added tokens included: equal for the same token string at every id."""
    return hashlib.sha256(json.dumps(sorted(_by_id(tokenizer).items())).encode()).hexdigest()


def _check_ends(target: Any, draft: Any, ours: dict[int, str], theirs: dict[int, str]) -> None:
    for verb, roles in (("begins", _starts), ("ends", _ends)):
        mine, other = roles(target), roles(draft)
        if mine and other and not mine & other:
            raise IncompatibleDrafterError(
                f"the draft model {verb} a text with another token: {_shown(ours.get(min(mine)))} (id {min(mine)}) in "
                f"the target, {_shown(theirs.get(min(other)))} (id {min(other)}) in the draft; choose a draft of the "
                "same model family, trained for the same kind of text"
            )


def _starts(tokenizer: Any) -> set[int]:
    start = getattr(tokenizer, "bos_token_id", None)
    return set() if start is None else {int(start)}


def _ends(tokenizer: Any) -> set[int]:
    ends = getattr(tokenizer, "eos_token_ids", None)
    if ends is None:  # not mlx-lm's wrapper
        end = getattr(tokenizer, "eos_token_id", None)
        ends = () if end is None else (end,)
    return {int(end) for end in ends}


def _tail(size: int) -> int:
    """Most ids that one of two vocabularies may have more than the other, of `size`."""
    return max(_TAIL_FLOOR, int(size * _TAIL_SHARE))


def _rows(config: dict[str, Any]) -> int | None:
    text = config.get("text_config")
    size = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    return size if isinstance(size, int) else None


def _by_id(tokenizer: Any) -> dict[int, str]:
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    # Should two strings share an id, sorting makes the choice the same on both sides.
    return {id_: token for token, id_ in sorted(vocabulary.items(), reverse=True)}


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token)
