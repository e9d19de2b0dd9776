"""`localspec chat`: a terminal UI on a terminal, one answer on stdout otherwise."""

from __future__ import annotations

import io
import json
import math
import os
import stat
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

import click

from localspec.blas import Setting
from localspec.commands import options
from localspec.commands.process import INTERRUPTED, is_terminal, output, say, the_process, use_fast_blas
from localspec.commands.progress import fetch, loading
from localspec.settings import Settings

if TYPE_CHECKING:
    from localspec import Conversation, Generation, Token

EPILOG = """\b
Examples:
  localspec chat                                 the chat, with the default model
  localspec chat qwen3-4b --draft qwen3-0.6b     a bigger model with a small one that drafts
  echo "Name three colours" | localspec chat     just the answer, on stdout
  localspec chat -p "Summarise:" < notes.txt     the prompt, then the file as its attachment
  localspec chat -p "Hi" --json | jq -r .source  where each token came from
  localspec chat -p "Hi" --json --logprobs 5     each place's five likeliest tokens as well
  localspec chat --private                       nothing is learned, and nothing that was learned is used
  localspec chat -p "Ann is 9" --json-schema s.json   JSON of that form, and nothing else

With -p and something piped in, the prompt is the text of -p, an empty line, and what was piped in. When the output
is piped it is the answer's exact text; on a terminal, control characters in it are left out.
"""


@click.command(epilog=EPILOG, short_help="Talk with a model, or get one answer.")
@options.model_argument
@click.option("--prompt", "-p", metavar="TEXT", help="Answer this and exit.")
@click.option("--system", metavar="TEXT", help="A system message.")
@options.draft_options
@click.option("--no-speculation", is_flag=True, help="Plain decoding: one token per pass.")
@options.accept_option
@options.sampling_options
@options.penalty_options
@click.option("--max-tokens", type=click.IntRange(min=1), help="End the answer there.  [default: 1024]")
@click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before this text; may be repeated.")
@options.grammar_options
@options.machine_options
@click.option("--logprobs", type=click.IntRange(min=0), metavar="K", help="With --json: the K likeliest tokens too.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per token, then one with the result.")
@click.option(
    "--private",
    is_flag=True,
    help="Neither learn from this chat nor use what was learned. `localspec cache` has the rest.",
)
@click.option("--verbose", "-v", is_flag=True, help="Notes on stderr also when it is not a terminal.")
@click.pass_context
def chat(
    ctx: click.Context,
    /,
    model: str | None,
    prompt: str | None,
    system: str | None,
    draft: str,
    mtp: str,
    draft_through_text: bool,
    no_speculation: bool,
    max_tokens: int | None,
    json_schema: str | None,
    regex: str | None,
    dtype: str,
    blas: Setting,
    kernels: str,
    as_json: bool,
    private: bool,
    verbose: bool,
    **sampling: Any,
) -> None:
    """Talk with MODEL: a name from `localspec models list`, a directory, or a hub id. Default: smollm2.

    On a terminal this opens the chat. With -p, or with a prompt piped in, it prints the answer and exits.

    What it answers is remembered as n-grams, on this machine only, and guessed from in later chats. Answers stay those
    of plain decoding, up to near-ties where passes of one and several tokens round differently; --verbose says whether
    they do here. --private leaves both out, `localspec cache off` for good. Under --accept rejection and block, where
    answers depend on the guesses, n-grams come from the chat itself alone.
    """
    from localspec.pairing import NONE, named

    settings = {name: value for name, value in sampling.items() if value is not None and value != ()}
    settings |= {"max_tokens": max_tokens or 1024, "speculate": not no_speculation}
    Settings.from_keywords(**settings)  # a bad one is told before anything is loaded
    if settings.get("logprobs") and not as_json:
        raise click.UsageError("--logprobs is shown in the records of --json only: add --json, or leave it out")
    one_shot = prompt is not None or as_json or not is_terminal(sys.stdin)
    if not one_shot and (not is_terminal(sys.stdout) or os.environ.get("TERM") == "dumb"):
        raise click.UsageError("the chat needs a terminal that can place text; give a prompt with -p or on stdin")
    use_fast_blas(ctx, blas, verbose)  # may start the program over, so nothing was read from stdin yet
    grammar = options.grammar(json_schema, regex)
    if grammar is not None:
        settings["grammar"] = grammar
    text = _read_prompt(prompt) if one_shot else None
    name = model or default_model()
    if no_speculation and named(draft) is None:
        draft = NONE  # it would take memory for nothing
    if text is None:
        from localspec.tui.app import run_chat

        notes: list[str] = []  # the chat has the screen until it ends
        named_draft = named(draft)
        fetch(name, *([named_draft] if named_draft else []))  # now, while there is a plain terminal for the progress

        def open_conversation() -> Conversation:
            engine = loading(
                name,
                draft=draft,
                mtp=mtp,
                draft_through_text=draft_through_text,
                dtype=dtype,
                kernels=kernels,
                show=False,
                learn=not private,
                note=notes.append,
                on_choice=None,  # the chat shows who drafts
            )
            return engine.conversation(system)

        def tell_notes() -> None:
            for note in dict.fromkeys(notes):
                say(note)

        the_process(ctx).release_interrupts()
        title = f"{name} · private" if private else name
        run_chat(open_conversation, title=title, settings=settings, learns=not private, at_end=tell_notes)
        return
    tell = say if verbose or is_terminal(sys.stderr) else _silent
    engine = loading(
        name,
        draft=draft,
        mtp=mtp,
        draft_through_text=draft_through_text,
        dtype=dtype,
        kernels=kernels,
        learn=not private,
        on_choice=tell,
    )
    conversation = engine.conversation(system)
    generation = conversation.send(text, **settings)
    if _print_answer(generation, output(), as_json, the_process(ctx).raise_if_interrupted):
        ctx.exit(INTERRUPTED)
    tell(_summary(generation))
    if verbose and generation.exactness is not None:
        tell(f"ids with and without speculation: {generation.exactness}")


def _print_answer(generation: Generation, out: TextIO, as_json: bool, check: Callable[[], None]) -> bool:
    """Write the answer as it comes; returns whether Ctrl-C ended it, what was written being kept.

    `check` raises KeyboardInterrupt for a Ctrl-C whose exception got lost.
    """
    writer = _JsonWriter(out) if as_json else _TextWriter(out, safe=is_terminal(out))
    interrupted = False
    try:
        check()
        for token in generation:
            writer.token(token)
            check()
    except KeyboardInterrupt:
        interrupted = True
    except BrokenPipeError:
        raise
    except BaseException:
        writer.end_line()
        raise
    finally:
        generation.close()
    writer.result(generation)
    return interrupted


class _TextWriter:
    """The text alone, ending in one newline however many the answer ends in."""

    def __init__(self, out: TextIO, safe: bool) -> None:
        from localspec.text import printable

        self._out = out
        self._clean: Callable[[str], str] = printable if safe else str
        self._newlines = ""
        self._open = False

    def token(self, token: Token) -> None:
        text = self._newlines + self._clean(token.text)
        body = text.rstrip("\n")
        self._newlines = text[len(body) :]
        if body:
            self._open = True
            self._out.write(body)
            self._out.flush()

    def result(self, generation: Generation) -> None:
        self._open = True
        self.end_line()

    def end_line(self) -> None:
        if self._open:
            self._out.write("\n")
            self._out.flush()


class _JsonWriter:
    """One line per token, then one for the whole answer."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        # On a stream that has only some characters the escapes keep the JSON whole.
        self._ascii = (getattr(out, "encoding", None) or "ascii").lower().replace("-", "") != "utf8"

    def token(self, token: Token) -> None:
        self._line(asdict(token))

    def result(self, generation: Generation) -> None:
        self._line(
            {
                "finish_reason": generation.finish_reason,
                "seed": generation.seed,
                "exactness": generation.exactness,
                "text": generation.text,
                "rounds": [asdict(record) for record in generation.rounds],
                "stats": generation.stats.as_dict(),
            }
        )

    def end_line(self) -> None:
        pass  # lines are written whole

    def _line(self, record: dict[str, Any]) -> None:
        finite = {name: _finite(value) for name, value in record.items()}
        self._out.write(json.dumps(finite, ensure_ascii=self._ascii, allow_nan=False) + "\n")
        self._out.flush()


def _finite(value: Any) -> Any:
    """`value` with None for each number that JSON has not, in tuples too."""
    if isinstance(value, tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read_prompt(prompt: str | None) -> str:
    piped = _read_stdin() if _has_input(prompt is not None) else ""
    parts = [part for part in ((prompt or "").strip("\n"), piped.strip("\n")) if part.strip()]
    if not parts:
        raise click.UsageError("the prompt is empty; give one with -p or on stdin")
    return "\n\n".join(parts)


def _has_input(have_prompt: bool) -> bool:
    """Whether to read stdin. Beside -p only a pipe or a file: never a device, as a job scheduler's stdin is."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return False
    if not have_prompt:
        return True
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, io.UnsupportedOperation):
        return True  # not a file of the system, but there: another program's stream
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _read_stdin() -> str:
    from localspec.errors import LocalspecError

    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise LocalspecError(f"stdin is not UTF-8 text (at byte {error.start}); convert it first") from error


def default_model() -> str:
    """The catalogue's choice."""
    from localspec.models.catalogue import catalogue

    return catalogue().default


def _summary(generation: Generation) -> str:
    stats = generation.stats
    parts = [f"seed {generation.seed}", f"{stats.emitted} tokens"]
    if stats.decode_tps:
        parts.append(f"{stats.decode_tps:.1f} tokens/s")
    if stats.tokens_per_pass:
        parts.append(f"{stats.tokens_per_pass:.2f} per pass")
    if stats.acceptance_rate is not None:
        parts.append(f"{stats.acceptance_rate:.0%} of {stats.drafted} drafts accepted")
    if generation.finish_reason == "length":
        parts.append("cut off by --max-tokens or the context's end")
    return " · ".join(parts)


def _silent(note: str) -> None:
    """Where notes go when nobody reads stderr."""
