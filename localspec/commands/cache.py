"""`localspec cache`: the n-grams that were learned from answers and texts, and whether any are."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localspec.commands.chat import default_model
from localspec.commands.printing import print_json, print_line, print_table
from localspec.commands.process import INTERRUPTED, CommandGroup, is_terminal, say
from localspec.commands.progress import fetch

if TYPE_CHECKING:
    from localspec.ngrams import Entry, NgramFile, Shelf
    from localspec.ngrams.file import Text
    from localspec.ngrams.lessons import Lesson
    from localspec.ngrams.shelf import Kept

_SHORT = 12
"""Digits of a fingerprint that tell it from the others."""
_BATCH = 200_000
"""Tokens that are counted and saved together: Ctrl-C loses no more, and a save costs up to a second."""


@click.group(
    cls=CommandGroup,
    epilog="""\b
Examples:
  localspec cache show
  localspec cache learn notes/ src/
  localspec cache clear --model smollm2
  localspec cache off
""",
)
def cache() -> None:
    """What is remembered to draft from: show it, clear it, teach it, turn it off.

    What the chat answers is kept as n-grams, one file for each tokenizer, and guessed from in later chats. The model
    checks each guess: answers are those of plain decoding, up to near-ties where passes of one and several tokens round
    differently (docs/exactness.md). `localspec chat --private` leaves one chat out.
    """


@cache.command(
    short_help="What is remembered, and whether any is learned.",
    epilog="""\b
Examples:
  localspec cache show
  localspec cache show --json | jq .learning
""",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def show(as_json: bool) -> None:
    """Whether answers are learned from, and what is remembered in which file."""
    from localspec.learning import switched_off
    from localspec.memory import format_bytes

    shelf = _shelf()
    off = "cache off" if not shelf.enabled else "LOCALSPEC_NGRAMS" if switched_off() else None
    records = [_record(shelf, entry) for entry in shelf.entries()]
    total = sum(record["bytes"] for record in records)
    bound = shelf.most_bytes()
    if as_json:
        document = {"learning": off is None, "off_by": off, "folder": str(shelf.folder), "bytes": total}
        print_json(document | {"most_bytes_per_file": bound, "files": records})
        return
    state = {
        None: "learning is on",
        "cache off": "learning is off; to turn it on: localspec cache on",
        "LOCALSPEC_NGRAMS": "learning is off here: LOCALSPEC_NGRAMS says so",
    }[off]
    print_line(state)
    if not records:
        print_line(f"nothing is remembered in {shelf.folder}")
        return
    print_line(f"{shelf.folder}:")
    header = ("LEVEL", "MODELS", "N-GRAMS", "TOKENS", "SIZE", "CHANGED", "FILE")
    print_table([header, *map(_row, records)])
    print_line(f"{format_bytes(total)} in all; a file holds at most {_mib(bound)}")


@cache.command(
    epilog="""\b
Examples:
  localspec cache clear
  localspec cache clear --level learned --yes
  localspec cache clear --model smollm2
"""
)
@click.option("--model", "-m", metavar="MODEL", help="Only what models with this one's tokenizer learned.")
@click.option("--level", type=click.Choice(["learned", "seed"]), help="Only this: from answers, or from your texts.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def clear(model: str | None, level: Kept | None, yes: bool) -> None:
    """Delete what is remembered."""
    from localspec.memory import format_bytes
    from localspec.ngrams.shelf import BOTH

    shelf = _shelf()
    levels = [level] if level is not None else list(BOTH)
    entries = [entry for entry in shelf.entries() if entry.level in levels]
    fingerprint = None
    if model is not None:
        fingerprint = _fingerprint_of(model, entries)
        entries = [entry for entry in entries if entry.fingerprint == fingerprint]
    if not entries:
        shelf.clear(levels, fingerprint)  # what a process that was killed while it wrote has left
        print_line("nothing is remembered" + (f" for {model}" if model else "") + (f" as {level}" if level else ""))
        return
    if not yes:
        if not is_terminal(sys.stdin):
            raise click.UsageError("nobody can be asked here: add --yes to delete what is remembered")
        print_table(_row(_record(shelf, entry)) for entry in entries)
        if not click.confirm("Delete it?"):
            print_line("nothing was deleted")
            return
    removed = shelf.clear(levels, fingerprint)
    size = format_bytes(sum(entry.info.bytes for entry in removed))
    print_line(f"removed {_count(len(removed), 'file')}: {size}")


@cache.command(short_help="Neither learn nor use what was learned.", epilog="\b\nExamples:\n  localspec cache off")
def off() -> None:
    """Learn nothing and use nothing of what was learned, until `localspec cache on`. Deletes nothing."""
    _shelf().turn(False)
    print_line("learning is off; what is remembered stays: localspec cache clear deletes it")


@cache.command(short_help="Learn again.", epilog="\b\nExamples:\n  localspec cache on")
def on() -> None:
    """Learn from answers again, and use what was learned."""
    from localspec.learning import switched_off

    but = ", but not where LOCALSPEC_NGRAMS says off, as here" if switched_off() else ""
    _shelf().turn(True)
    print_line(f"learning is on{but}")


@cache.command(
    short_help="Teach it texts of your own.",
    epilog="""\b
Examples:
  localspec cache learn ~/notes
  localspec cache learn src/ README.md --model qwen3-4b

In folders, hidden files and links are left out, and so is everywhere what is not UTF-8 text.
""",
)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("--model", "-m", metavar="MODEL", help="Learn for this one's tokenizer.  [default: the chat's]")
@click.pass_context
def learn(ctx: click.Context, /, paths: tuple[str, ...], model: str | None) -> None:
    """Teach the n-grams of your own texts: files, and folders with all that is in them.

    They are kept apart from what answers taught. A text that was taught before is left out.
    """
    from localspec.errors import LocalspecError
    from localspec.learning import switched_off
    from localspec.ngrams import texts
    from localspec.vocabulary import fingerprint

    amiss: list[str] = []
    shelf = _shelf(amiss.append)
    used = not switched_off() and shelf.enabled
    files, skipped = texts.find([texts.named(path) for path in paths])
    if not files:
        raise LocalspecError(f"nothing to learn: no texts in {', '.join(paths)}{_reasons(skipped)}")
    tokenizer, label = _tokenizer(model or default_model())
    lesson = _Lesson(tokenizer, shelf.file("seed", fingerprint(tokenizer), label), skipped)
    interrupted = False
    try:
        try:
            lesson.take(files)
        except KeyboardInterrupt:
            interrupted = True
        lesson.save()
    finally:
        for line in [*amiss, *(f"skipped {count}: {reason}" for reason, count in sorted(skipped.items()))]:
            say(line)
    if not lesson.texts and not skipped[_KNOWN] and not interrupted:
        raise LocalspecError(f"nothing to learn: no texts in {', '.join(paths)}")
    for line in _full(lesson.file):
        say(line)
    if not used:
        say("learning is off, so this is not used; to turn it on: localspec cache on")
    print_line(lesson.summary(label))
    if interrupted:
        ctx.exit(INTERRUPTED)


_KNOWN = "known already"
_NEARLY = 0.99
"""Share of what an eviction leaves: a file that has that much has seen one, or is about to."""


@dataclass(slots=True)
class _Lesson:
    """Texts on their way into a file."""

    tokenizer: Any
    file: NgramFile
    skipped: Counter[str]
    texts: int = 0
    tokens: int = 0
    """Of what was saved."""
    _waiting: list[Text] = field(default_factory=list)
    _tokens: int = 0
    """Of what waits."""

    def take(self, files: Sequence[Path]) -> None:
        """Learn all files. An interrupt leaves what was read whole by then to `save`."""
        from localspec.ngrams import texts

        sizes = [_size(path) for path in files]
        with ExitStack() as stack:
            advance: Callable[[int], object] = _nowhere
            if is_terminal(sys.stderr):
                bar: Any = click.progressbar(length=max(sum(sizes), 1), label="learning", file=sys.stderr)
                advance = stack.enter_context(bar).update
            for path, size in zip(files, sizes, strict=True):
                try:
                    read = self._read(path, texts.digest(path), advance)
                except texts.NotText as error:
                    read, self.skipped[error.reason] = 0, self.skipped[error.reason] + 1
                except OSError:
                    read, self.skipped[texts.UNREADABLE] = 0, self.skipped[texts.UNREADABLE] + 1
                advance(max(size - read, 0))

    def save(self) -> None:
        """Save what waits. Raises LocalspecError where that fails; the file has said why."""
        from localspec.errors import LocalspecError

        # An interrupt may leave the file with what it was given, or without: it is given once more, and knows digests.
        if not self.file.teach(self._waiting):
            raise LocalspecError(
                f"{self.file.path} could not be saved: once that is put right, give the same texts again"
            )
        self.tokens, self._waiting, self._tokens = self.tokens + self._tokens, [], 0

    def summary(self, label: str) -> str:
        """What came of it."""
        from localspec.memory import format_bytes

        info = self.file.info()
        return (
            f"learned {_count(self.texts, 'text')}, {self.tokens:,} tokens, for {label}: "
            f"{info.rows:,} n-grams in {format_bytes(info.bytes)}"
        )

    def _read(self, path: Path, digest: str, advance: Callable[[int], object]) -> int:
        """Learn one text, a long one in parts that are saved by themselves, of which the last has its digest.

        Returns what `advance` was told of: characters.
        """
        from localspec.ngrams import texts
        from localspec.ngrams.file import Text
        from localspec.ngrams.store import LONGEST

        if self.file.knows(digest) or any(text.digest == digest for text in self._waiting):
            self.skipped[_KNOWN] += 1
            return 0
        part: list[Lesson] = []
        tail: list[int] = []
        size = parts = read = 0
        for piece in texts.pieces(path):
            if size >= _BATCH:
                self._add(Text(part, f"{digest}/{parts}"), size)
                part, size, parts = [], 0, parts + 1
            ids: list[int] = self.tokenizer.encode(piece, add_special_tokens=False)
            part.append(([*tail, *ids], len(tail)))
            size += len(ids)
            tail = [*tail, *ids][-LONGEST:]
            read += len(piece)
            advance(len(piece))
        self.texts += 1  # before it is saved, which an interrupt leaves to `save`
        self._add(Text(part, digest), size)
        return read

    def _add(self, text: Text, tokens: int) -> None:
        self._waiting.append(text)
        self._tokens += tokens
        if self._tokens >= _BATCH:
            self.save()


def _full(file: NgramFile) -> list[str]:
    from localspec.ngrams.shelf import BOUND
    from localspec.ngrams.store import KEPT

    if file.info().bytes < file.most_bytes * KEPT * _NEARLY:
        return []
    return [f"the file is full ({_mib(file.most_bytes)}): what is rare is left out; {BOUND} sets another bound"]


def _shelf(note: Callable[[str], None] = say) -> Shelf:
    from localspec.ngrams import Shelf

    return Shelf(say=note)


def _tokenizer(name: str) -> tuple[Any, str]:
    """The tokenizer of a model, which is fetched where it is not here, and what the engine calls the model."""
    from localspec.checkpoint import read_checkpoint
    from localspec.loading import load_tokenizer
    from localspec.plan import label

    (path,) = fetch(name)
    return load_tokenizer(read_checkpoint(path)), label(name, path)


def _fingerprint_of(model: str, entries: Iterable[Entry]) -> str:
    """Of the tokenizer of a model that taught one of these files, or that is on this machine."""
    from localspec import hub
    from localspec.errors import LocalspecError
    from localspec.plan import label
    from localspec.vocabulary import fingerprint

    if not Path(model).expanduser().is_dir():  # of a folder's name there may be others
        called = label(model, Path(model))
        found = sorted({entry.fingerprint for entry in entries if called in entry.info.labels})
        if len(found) > 1:
            names = ", ".join(one[:_SHORT] for one in found)
            raise LocalspecError(
                f"{called} has taught files of {len(found)} tokenizers ({names}): give the folder of the model you mean"
            )
        if found:
            return found[0]
        if hub.find(model) is None:
            raise LocalspecError(
                f"no model {model} is here, nor has one taught any file; localspec cache show lists them"
            )
    return fingerprint(_tokenizer(model)[0])


def _nowhere(characters: int) -> None:
    """Where progress goes that nobody watches."""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # it will be found out when it is read


def _record(shelf: Shelf, entry: Entry) -> dict[str, Any]:
    info = entry.info
    name = f"{entry.level}-{entry.fingerprint}.ngrams" + (".damaged" if info.problem == "set aside" else "")
    return {
        "level": entry.level,
        "fingerprint": entry.fingerprint,
        "models": list(info.labels),
        "ngrams": info.rows,
        "texts": info.texts,
        "tokens": info.tokens,
        "bytes": info.bytes,
        "changed": info.updated or None,
        "problem": info.problem or None,
        "path": str(shelf.folder / name),
    }


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    from localspec.memory import format_bytes

    problem, changed = record["problem"], record["changed"]
    return (
        record["level"],
        f"({problem})" if problem else ", ".join(record["models"]) or "-",
        "" if problem else f"{record['ngrams']:,}",
        "" if problem else f"{record['tokens']:,}",
        format_bytes(record["bytes"]),
        f"{datetime.fromtimestamp(changed):%Y-%m-%d %H:%M}" if changed else "",
        Path(record["path"]).name,
    )


def _reasons(skipped: Counter[str]) -> str:
    return (
        f" (skipped: {', '.join(f'{count} {reason}' for reason, count in sorted(skipped.items()))})" if skipped else ""
    )


def _mib(size: int) -> str:
    return f"{size >> 20} MiB"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
