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
_WAYS_OUT = "choose a draft of the same model family, or --draft-through-text, which is slower"


def check_same_vocabulary(target: Any, draft: Any) -> None:
    """Raise IncompatibleDrafterError unless a draft's ids mean to the target what they mean to the draft.

    Ids at the end that only one of them has (padding, later additions) are allowed: the draft cannot propose what it
    lacks, and what the target lacks is never accepted.
    """
    ours, theirs = _by_id(target), _by_id(draft)
    shared_end = min(max(ours, default=-1), max(theirs, default=-1))
    for position in range(shared_end + 1):
        mine, other = ours.get(position), theirs.get(position)
        if mine != other:
            raise IncompatibleDrafterError(
                f"the draft model has another vocabulary: id {position} is {_shown(mine)} in the target and "
                f"{_shown(other)} in the draft; {_WAYS_OUT}"
            )
    tail = max(len(ours), len(theirs)) - min(len(ours), len(theirs))
    if tail > max(_TAIL_FLOOR, int(len(ours) * _TAIL_SHARE)):
        position = shared_end + 1
        raise IncompatibleDrafterError(
            f"the draft model has another vocabulary: {len(theirs)} tokens against the target's {len(ours)}; id "
            f"{position} is {_shown(ours.get(position))} in the target and {_shown(theirs.get(position))} in the "
            f"draft; {_WAYS_OUT}"
        )


def fingerprint(tokenizer: Any) -> str:
    """SHA-256, in hex, of the vocabulary, added tokens included: equal for the same token string at every id."""
    return hashlib.sha256(json.dumps(sorted(_by_id(tokenizer).items())).encode()).hexdigest()


def _by_id(tokenizer: Any) -> dict[int, str]:
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    # Should two strings share an id, sorting makes the choice the same on both sides.
    return {id_: token for token, id_ in sorted(vocabulary.items(), reverse=True)}


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token)
