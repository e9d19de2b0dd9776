"""Slash commands: their names, their words for /help, and the reading of a line.

A line that merely begins with a slash (a path, say) is a message, not a command.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Any

from localspec.errors import LocalspecError, SettingsError
from localspec.settings import Settings


class CommandError(LocalspecError):
    """A line that looks like a command but is none; the message is for the person who typed it."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command."""

    name: str
    argument: str
    help: str


COMMANDS: dict[str, Command] = {
    c.name: c
    for c in (
        Command("help", "", "show this list"),
        Command("clear", "", "start a new conversation"),
        Command("temp", "[0.8]", "show or set the temperature; 0 always takes the likeliest token"),
        Command("seed", "[42|off]", "show or fix the seed: same seed, same answer; off takes a new one each time"),
        Command("max", "[512]", "show or set the most tokens of one answer"),
        Command("speculate", "[on|off]", "guess ahead, or decode plainly; the answers are the same"),
        Command("quit", "", "leave"),
    )
}

_COMMAND = re.compile(r"/([A-Za-z]+)(?:[ \t]+(.*))?", re.DOTALL)


def parse(line: str) -> tuple[Command, str] | None:
    """The command and its argument; None when the line is a message. Raises CommandError for an unknown one."""
    match = _COMMAND.fullmatch(line.strip())
    if match is None:
        return None
    name, argument = match[1].lower(), (match[2] or "").strip()
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean /{near[0]}?" if near else "/help lists them"
        raise CommandError(f"no command /{name}; {hint}")
    command = COMMANDS[name]
    if argument and not command.argument:
        raise CommandError(f"/{name} takes nothing after it")
    return command, argument


def change(settings: dict[str, Any], command: Command, argument: str) -> dict[str, Any]:
    """The settings after /temp, /seed, /max or /speculate with an argument. Raises SettingsError for a bad one."""
    key, value = _value(command, argument)
    changed = {**settings, key: value}
    Settings.from_keywords(**changed)
    return changed


def describe(settings: dict[str, Any], command: Command) -> str:
    """What /temp, /seed, /max or /speculate is set to."""
    current = Settings.from_keywords(**settings)
    match command.name:
        case "temp":
            return f"temperature {current.temperature:g}"
        case "seed":
            return "a new seed for each answer" if current.seed is None else f"seed {current.seed}"
        case "max":
            most = current.max_tokens
            return "no limit on tokens" if most is None else f"at most {most} tokens an answer"
        case _:
            return f"speculation {'on' if current.speculate else 'off'}"


def _value(command: Command, argument: str) -> tuple[str, Any]:
    match command.name:
        case "temp":
            return "temperature", _number(argument, float, "/temp takes a number of at least 0, as in /temp 0.8")
        case "seed" if argument.lower() == "off":
            return "seed", None
        case "seed":
            return "seed", _number(argument, int, "/seed takes a whole number or off, as in /seed 42")
        case "max":
            return "max_tokens", _number(argument, int, "/max takes a whole number, as in /max 512")
        case _:
            if argument.lower() not in ("on", "off"):
                raise SettingsError("/speculate takes on or off")
            return "speculate", argument.lower() == "on"


def _number(text: str, kind: type[int] | type[float], message: str) -> int | float:
    try:
        return kind(text)
    except ValueError:
        raise SettingsError(message) from None
