"""The options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import click

from localspec.errors import SettingsError
from localspec.kernels.choice import parse
from localspec.settings import MAX_DRAFT_LENGTH, MAX_SEED, Acceptance

if TYPE_CHECKING:
    from localspec.grammar import Grammar

    _LengthType = click.ParamType[str | int]
    _BiasType = click.ParamType[tuple[int, float]]
    _TextType = click.ParamType[str]
else:
    _LengthType = _BiasType = _TextType = click.ParamType  # not generic before click 8.4

Command = TypeVar("Command", bound=Callable[..., Any])


class DraftLength(_LengthType):
    """`auto`, or a number of tokens."""

    name = "auto|N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | int:
        if value == "auto":
            return "auto"
        try:
            length = int(value)
        except ValueError:
            length = -1
        if not 0 <= length <= MAX_DRAFT_LENGTH:
            self.fail(f"{value!r} is neither 'auto' nor a number from 0 to {MAX_DRAFT_LENGTH}", param, ctx)
        return length


class TokenBias(_BiasType):
    """`ID=VALUE`: a token id and what is added to its logit."""

    name = "ID=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        if isinstance(value, tuple):
            return value  # click converts what it converted before
        token, _, bias = value.partition("=")
        try:
            return int(token), float(bias)
        except ValueError:
            self.fail(f"{value!r} is not a token id, =, and a number, as in 198=-5 or 198=-inf", param, ctx)


class KernelChoice(_TextType):
    """What `localspec.kernels.choice` reads."""

    name = "auto|on|off|NAME=on,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            parse(value)
        except SettingsError as error:
            self.fail(str(error), param, ctx)
        return str(value)


def model_argument(command: Command) -> Command:
    """MODEL: a catalogue name, a directory, or a hub id."""
    return click.argument("model", required=False, metavar="[MODEL]")(command)


def draft_options(command: Command) -> Command:
    """--draft, --mtp, --draft-through-text, --draft-length and --exact."""
    return _stack(
        command,
        drafter_options,
        click.option(
            "--draft-length",
            type=DraftLength(),
            help="Tokens to guess per pass, at most 32.  [default: auto, from costs]",
        ),
        exact_option,
    )


def drafter_options(command: Command) -> Command:
    """--draft, --mtp and --draft-through-text: what `localspec.pairing` reads."""
    return _stack(
        command,
        click.option(
            "--draft",
            metavar="auto|MODEL|layers[:N]|none",
            default="auto",
            help="A smaller model with the same vocabulary that drafts, or (N of) the model's own layers; auto takes "
            "its MTP head, or a model that is here and known to fit, and fetches nothing.  [default: auto]",
        ),
        click.option(
            "--mtp",
            metavar="auto|none|PATH",
            default="auto",
            help="A file or folder with an MTP head that drafts; auto, with --draft auto, takes the one that comes "
            "with the model, or with localspec.  [default: auto]",
        ),
        click.option(
            "--draft-through-text", is_flag=True, help="Allow a --draft with another vocabulary, which is slower."
        ),
    )


def exact_option(command: Command) -> Command:
    """--exact."""
    return click.option(
        "--exact",
        type=click.Choice(["auto", "rows", "off"]),
        help="rows: on any backend the same ids as without speculation, to the last bit; auto: where that costs "
        "next to nothing.  [default: auto]",
    )(command)


def accept_option(command: Command) -> Command:
    """--accept. None means: the default of `localspec.Settings`."""
    return click.option(
        "--accept",
        type=click.Choice(get_args(Acceptance)),
        help="coupled: the ids of plain decoding; rejection, block: its distribution.  [default: coupled]",
    )(command)


def sampling_options(command: Command) -> Command:
    """--temperature, the filters and --seed. None means: the default of `localspec.Settings`."""
    return _stack(
        command,
        click.option("--temperature", "-t", type=click.FloatRange(min=0), help="0 is greedy.  [default: 0]"),
        click.option("--top-p", type=click.FloatRange(0, 1), help="Nucleus sampling.  [default: off]"),
        click.option("--top-k", type=click.IntRange(min=0), help="Keep the K likeliest tokens.  [default: off]"),
        click.option("--min-p", type=click.FloatRange(0, 1), help="Keep tokens this near to the top.  [default: off]"),
        click.option(
            "--xtc-probability",
            type=click.FloatRange(0, 1),
            help="How often to exclude the top choices.  [default: off]",
        ),
        click.option(
            "--xtc-threshold",
            type=click.FloatRange(0, 0.5),
            help="They are the tokens above this probability but the least likely of them.  [default: 0.1]",
        ),
        seed_option,
    )


def penalty_options(command: Command) -> Command:
    """The penalties, their contexts and --logit-bias. None means: the default of `localspec.Settings`."""
    penalties = [
        ("repetition", click.FloatRange(min=0), "Divides the logits of recent tokens; 1 is off.  [default: off]"),
        ("presence", click.FLOAT, "Subtracted from the logits of recent tokens.  [default: off]"),
        ("frequency", click.FLOAT, "Subtracted once for each recent occurrence.  [default: off]"),
    ]
    decorators = []
    for name, kind, text in penalties:
        decorators.append(click.option(f"--{name}-penalty", type=kind, metavar="X", help=text))
        decorators.append(
            click.option(
                f"--{name}-context-size",
                type=click.IntRange(min=0),
                metavar="N",
                help="How many of the latest tokens are recent; 0 is all.  [default: 20]",
            )
        )
    return _stack(
        command,
        *decorators,
        click.option(
            "--logit-bias",
            type=TokenBias(),
            multiple=True,
            callback=_each_once,
            help="Added to the logit of a token id, -inf forbids it; may be repeated.",
        ),
    )


def grammar_options(command: Command) -> Command:
    """--json-schema and --regex: what `grammar` below reads."""
    return _stack(
        command,
        click.option("--json-schema", metavar="FILE", help="Answer in JSON, valid under this schema; - is stdin."),
        click.option("--regex", metavar="PATTERN", help="Answer with a text that this matches as a whole."),
    )


def grammar(json_schema: str | None, regex: str | None) -> Grammar | None:
    """What --json-schema and --regex ask for; None without either."""
    if json_schema is not None and regex is not None:
        raise click.UsageError("--json-schema and --regex exclude each other")
    if regex is not None:
        from localspec.grammar import regex as of_regex

        return of_regex(regex)
    if json_schema is None:
        return None
    from localspec.grammar import json_schema as of_schema

    try:
        with click.open_file(json_schema, encoding="utf-8-sig") as file:
            text = file.read()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"the JSON schema is not UTF-8 text (at byte {error.start})") from None
    except OSError as error:
        raise click.UsageError(f"cannot read the JSON schema {json_schema}: {error.strerror}") from None
    return of_schema(text)


def seed_option(command: Command) -> Command:
    """--seed."""
    return click.option("--seed", type=click.IntRange(0, MAX_SEED), help="Same seed, same text.  [default: random]")(
        command
    )


def machine_options(command: Command) -> Command:
    """--dtype, --blas and --kernels."""
    return _stack(
        command,
        click.option(
            "--dtype",
            type=click.Choice(["auto", "float32", "bfloat16", "float16", "quantized"]),
            default="auto",
            help="Format of the weights; auto measures once what is fastest here, quantized is as stored.",
        ),
        click.option(
            "--blas",
            type=click.Choice(["auto", "off"]),
            default="auto",
            help="Linux: use an installed OpenBLAS. LOCALSPEC_BLAS=off does the same as off.",
        ),
        click.option(
            "--kernels",
            type=KernelChoice(),
            default="auto",
            help="Metal kernels: auto uses those that passed their test here and are faster; NAME=on or off forces "
            "one. LOCALSPEC_KERNELS does the same.",
        ),
    )


def draft_length_value(value: str | int | None) -> int | Literal["auto"]:
    """What --draft-length means, left out or not."""
    return value if isinstance(value, int) else "auto"


def check_writable(file: str | None) -> None:
    """For a file option: before minutes are spent on what could not be written."""
    if file in (None, "-"):
        return
    path = Path(str(file))
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise click.UsageError(f"cannot write {path}: not a file in an existing directory")


def _each_once(
    ctx: click.Context, param: click.Parameter, pairs: tuple[tuple[int, float], ...]
) -> dict[int, float] | None:
    """The pairs as a mapping; None for none."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise click.BadParameter("a token id is given twice", ctx, param)
    return mapping or None


def _stack(command: Command, *decorators: Callable[[Command], Command]) -> Command:
    for decorator in reversed(decorators):
        command = decorator(command)
    return command
