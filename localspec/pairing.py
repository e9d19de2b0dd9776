"""Which model drafts for a target: the one that was named, or the best of those that are here.

Decides from files' headers, tokenizers and the catalogue, before any weights are loaded. Nothing is ever fetched that
was not named.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localspec import hub, memory
from localspec.checkpoint import Checkpoint
from localspec.errors import (
    DrafterWarning,
    IncompatibleDrafterError,
    IncompleteModelError,
    LocalspecError,
    SettingsError,
    UnsupportedModelError,
)
from localspec.memory import format_bytes
from localspec.models import Entry, catalogue
from localspec.package import Progress
from localspec.plan import Plan, plan, plan_of, require_memory
from localspec.vocabulary import check_same_vocabulary, same_rows

if TYPE_CHECKING:
    from localspec.models.mtp import HeadSource

AUTO, NONE = "auto", "none"
"""What `draft` may be beside a model's name. A directory of such a name is written ./auto."""

TokenizerOf = Callable[[Checkpoint], Any]
"""Loads a model's tokenizer."""

_LARGEST_SHARE = 0.5
"""Most that a draft which nobody named may take of what its target takes: a bigger one hardly ever pays."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """What drafts for one target, behind its n-grams."""

    draft: Plan | None = None
    """A small model."""
    head: HeadSource | None = None
    """An MTP head."""
    layers: int | None = None
    """How many of the target's own layers draft for it, 0 for the drafter's default share; None for none."""
    through_text: bool = False
    """Whether `draft` has another vocabulary, and drafts through text."""
    tokenizer: Any = None
    """The draft's, where it drafts through text."""
    line: str | None = None
    """What was chosen, for people, in one line; None where there was nothing to choose."""


def pair(
    target: Plan,
    tokenizer: Any,
    draft: str | None,
    tokenizer_of: TokenizerOf,
    *,
    mtp: str | None = AUTO,
    through_text: bool = False,
    dtype: str | None = None,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
) -> Pairing:
    """What is to draft for the target: `draft` is "auto", "none" (or None), "layers" or "layers:N" for (N of) its own
    layers, or a model, which is fetched if need be.

    tokenizer: the target's. mtp: the file or folder of a head, which then drafts as well; "auto", the target's own
    where `draft` is "auto" too; "none" or None, no head. through_text: a model with another vocabulary will do. dtype:
    the format for the draft's weights, None for what is fastest here. notify: told in one line why a head that nobody
    named is left out; None warns.

    Raises IncompatibleDrafterError when the model that was named cannot serve or cannot gain, IncompleteModelError when
    there is no head where one was named, SettingsError when `draft` makes no sense, and InsufficientMemoryError when
    there is no room for all of it.
    """
    name, layers = named(draft), own_layers(draft)
    if through_text and name is None:
        raise SettingsError("drafting through text takes a draft model: name one with draft (--draft NAME)")
    head = None
    if named(mtp) is not None or (mtp == AUTO and draft == AUTO):
        from localspec.models.mtp import choose

        try:
            head = choose(target.checkpoint, tokenizer, mtp)
            if head is not None:
                require_memory(target, head=head.bytes)
        except LocalspecError as error:
            if mtp != AUTO:
                raise
            head = None
            leave_out(error, notify)
    if head is not None and name is None:
        line = f"an MTP head drafts for {target.name}; --draft none leaves it out" if mtp == AUTO else None
        return Pairing(head=head, layers=layers, line=line)
    if name is None:
        return _best(target, tokenizer, tokenizer_of, dtype) if draft == AUTO else Pairing(layers=layers)
    chosen = plan(name, dtype, progress)
    if chosen.checkpoint.path.resolve() == target.checkpoint.path.resolve():
        raise IncompatibleDrafterError(
            f"{target.name} cannot draft for itself: a draft would cost what it saves; name a smaller model, or none"
        )
    if chosen.bytes >= target.bytes:
        raise IncompatibleDrafterError(
            f"the draft {chosen.name} ({format_bytes(chosen.bytes)}) is not smaller than {target.name} "
            f"({format_bytes(target.bytes)}), so its drafts would cost more than they save; name a smaller model, or "
            "none"
        )
    require_memory(target, chosen, 0 if head is None else head.bytes)
    theirs = tokenizer_of(chosen.checkpoint)
    try:
        check_same_vocabulary(tokenizer, theirs)
        through_text = False
    except IncompatibleDrafterError as error:
        if not through_text:
            raise IncompatibleDrafterError(
                f"{error}, or allow it to draft through text (--draft-through-text), which is slower"
            ) from None
    line = f"{chosen.name} drafts for {target.name}" + (", through text" if through_text else "")
    return Pairing(chosen, head, through_text=through_text, tokenizer=theirs if through_text else None, line=line)


def leave_out(error: Exception, notify: Callable[[str], None] | None) -> None:
    """Tell `notify` in one line that the head, which nobody named, is left out; None warns."""
    reason = str(error) if isinstance(error, LocalspecError) else f"{type(error).__name__}: {error}"
    line = f"{' '.join(reason.split())}; decoding goes on without that MTP head"
    if notify is None:
        warnings.warn(line, DrafterWarning, stacklevel=4)
    else:
        notify(line)


def named(draft: str | None) -> str | None:
    """The model that `draft` names; None where it names none."""
    return None if draft in (AUTO, NONE, None) or own_layers(draft) is not None else draft


def own_layers(draft: str | None) -> int | None:
    """How many of the target's own layers are to draft: N of "layers:N", 0 of "layers"; None for all other drafts.

    Raises SettingsError for an N that is no number, or 0.
    """
    kind, colon, count = (draft or "").partition(":")
    if kind != "layers":
        return None
    if colon and not (count.isascii() and count.isdigit() and int(count)):
        raise SettingsError(f'"layers:N" runs N of the model\'s layers, at least 1, not {count!r}')
    return int(count) if colon else 0


def candidates(name: str) -> list[Entry]:
    """The models of the catalogue that may draft for the model of that name, best first; here or not.

    For one that is not in the catalogue these are all that draft for others, of which few will have its vocabulary.
    """
    known = catalogue()
    entry = known.get(name) or known.by_hub(name)
    if entry is not None:
        return [known[draft] for draft in entry.drafts]
    drafts = {draft for other in known.values() for draft in other.drafts}
    return [known[draft] for draft in known if draft in drafts]


def _best(target: Plan, tokenizer: Any, tokenizer_of: TokenizerOf, dtype: str | None) -> Pairing:
    """The first candidate that is here, fits and speaks its ids."""
    available, cramped = memory.available_bytes(), None
    for entry in candidates(target.name):
        draft = _here(entry, target, dtype)
        if draft is None or not fits(target, tokenizer, draft, tokenizer_of):
            continue
        need = memory.needed_bytes(target.bytes + draft.bytes)
        if available is None or need <= available:
            return Pairing(draft, line=f"{draft.name} drafts for {target.name}; --draft none leaves it out")
        cramped = cramped or (
            f"{draft.name} could draft for {target.name}, but both need {format_bytes(need)} of memory and "
            f"{format_bytes(available)} is available"
        )
    return Pairing(line=cramped or _missing(target))


def fits(target: Plan, tokenizer: Any, draft: Plan, tokenizer_of: TokenizerOf) -> bool:
    """Whether a draft that nobody named is small enough for the target and speaks its ids."""
    small = draft.bytes <= target.bytes * _LARGEST_SHARE
    if not small or not same_rows(target.checkpoint.config, draft.checkpoint.config):
        return False
    try:
        check_same_vocabulary(tokenizer, tokenizer_of(draft.checkpoint))
    except (IncompatibleDrafterError, UnsupportedModelError):
        return False
    return True


def drafts_here(target: Plan, tokenizer: Any, tokenizer_of: TokenizerOf) -> list[Entry]:
    """The candidates on this machine that may draft for the target, by the tokenizers of both."""
    plans = ((entry, _here(entry, target, target.dtype)) for entry in candidates(target.name))
    return [entry for entry, draft in plans if draft is not None and fits(target, tokenizer, draft, tokenizer_of)]


def _here(entry: Entry, target: Plan, dtype: str | None) -> Plan | None:
    """The plan of a candidate, where it is on this machine, whole, and not the target itself."""
    path = hub.find(entry.name)
    if path is None or path.resolve() == target.checkpoint.path.resolve():
        return None
    try:
        return plan_of(entry.name, path, dtype)
    except IncompleteModelError:
        return None  # it was whole a moment ago


def _missing(target: Plan) -> str | None:
    """How to get a draft for a target of the catalogue, where none is here."""
    if target.name not in catalogue():
        return None
    absent = [entry.name for entry in candidates(target.name) if hub.find(entry.name) is None]
    return f"{absent[0]} could draft for {target.name}: localspec models pull {absent[0]}" if absent else None
