"""What a text must match: a JSON schema or a regular expression, checked before anything runs.

Knows nothing of models or tokens; where a generation stands in a grammar is localspec/matcher.py. The grammars
themselves are llguidance's, which is loaded when the first one is made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from localspec.errors import SettingsError

_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As `json.dumps` writes it."""
_FORMS = "localspec.grammar.json_schema(...), localspec.grammar.regex(...), or a JSON schema as a dict"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a text must match from its first character to its last. Made by `json_schema` and `regex`."""

    kind: Literal["json_schema", "regex"]
    text: str
    """The schema as JSON, or the pattern."""
    compiled: str = field(repr=False)
    """The same in llguidance's notation."""


def json_schema(schema: Mapping[str, Any] | str, *, free_layout: bool = False) -> Grammar:
    """JSON that is valid under a schema, a mapping or its JSON text; `{}` is any JSON value.

    The text is laid out as `json.dumps` does it, in one line: what follows from the schema needs no guessing then, and
    no model can go on with blanks for ever. `free_layout` allows white space wherever JSON does.

    Raises SettingsError for what is not a schema and for keywords that cannot be enforced: none is ignored in silence,
    but for annotations and for keywords that JSON Schema does not know.
    """
    library = llguidance()
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise SettingsError(f"the JSON schema is not JSON: {error}") from None
    if not isinstance(schema, Mapping):
        raise SettingsError(f"a JSON schema is an object such as {{'type': 'object'}}, not {schema!r}")
    misread = {"regex", "json_schema"}.intersection(schema)
    if misread and len(schema) == 1:
        # Other programs spell their grammars so; as a schema it would allow anything.
        raise SettingsError(f"{{{misread.pop()!r}: ...}} is not a JSON schema; grammar must be {_FORMS}")
    try:
        text = json.dumps(schema, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"the JSON schema cannot be written as JSON: {error}") from None
    compiled = library.LLMatcher.grammar_from_json_schema(text, defaults={} if free_layout else _ONE_LINE)
    return _checked(Grammar("json_schema", text, compiled), "JSON schema")


def regex(pattern: str) -> Grammar:
    """Text that a regular expression matches as a whole.

    The expression is of the kind that needs no memory: classes, repetition and alternatives, but no look-around, no
    back references and no word boundaries. `.` is any character but a line break. Raises SettingsError.
    """
    library = llguidance()
    if not isinstance(pattern, str):
        raise SettingsError(f"a regular expression is a text, not {pattern!r}")
    return _checked(Grammar("regex", pattern, library.LLMatcher.grammar_from_regex(pattern)), "regular expression")


def as_grammar(value: object) -> Grammar | None:
    """What `grammar=` was given: a Grammar, a JSON schema as a mapping, or None. Raises SettingsError."""
    if value is None or isinstance(value, Grammar):
        return value
    if isinstance(value, Mapping):
        return json_schema(value)
    raise SettingsError(f"grammar must be {_FORMS}, not {value!r}")


def llguidance() -> Any:
    """The library. Raises SettingsError where it is missing."""
    try:
        import llguidance as library
    except ImportError as error:
        raise SettingsError(f"a grammar needs the package llguidance ({error}): pip install llguidance") from None
    return library


def _checked(grammar: Grammar, name: str) -> Grammar:
    failed, notes = llguidance().LLMatcher.validate_grammar_with_warnings(grammar.compiled)
    if failed:
        raise SettingsError(f"this {name} cannot be used: {one_line(notes[0])}")
    return grammar


def one_line(message: str) -> str:
    """The part of one of llguidance's messages that says what is wrong."""
    found = re.findall(r"error: (.+)", message)
    reason = found[-1] if found else message.partition("\n   1 |")[0].rpartition("(in regex): ")[2]
    return " ".join(reason.split())
