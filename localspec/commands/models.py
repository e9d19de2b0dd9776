"""`localspec models`: what is known, what is here, and what it takes."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from localspec.commands.process import CommandGroup, output
from localspec.commands.progress import fetch

if TYPE_CHECKING:
    from localspec.hub import Installed
    from localspec.models import Entry

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")


@click.group(
    cls=CommandGroup,
    epilog="""\b
Examples:
  localspec models list
  localspec models pull smollm2
  localspec models show smollm2
  localspec models rm smollm2
""",
)
def models() -> None:
    """List, get, describe and remove models."""


@models.command(
    "list",
    epilog="""\b
Examples:
  localspec models list
  localspec models list --json | jq '.[] | select(.installed) | .name'
""",
)
@json_option
def list_(as_json: bool) -> None:
    """The models that localspec knows by name, and those on this machine."""
    from localspec import hub
    from localspec.models import catalogue

    known, here = catalogue(), {model.name: model for model in hub.installed()}
    names = [*known, *(name for name in here if name not in known)]
    records = [_record(name, known.get(name), here.get(name)) for name in names]
    if as_json:
        _print_json(records)
        return
    header = ("NAME", "PARAMETERS", "DOWNLOAD", "MEMORY", "HERE", "DRAFTS WITH")
    _print_table([header, *(_row(record) for record in records)])


@models.command(epilog="\b\nExamples:\n  localspec models pull smollm2\n  localspec models pull mlx-community/Qwen3-4B-4bit")
@click.argument("name")
@click.option("--refresh", is_flag=True, help="Ask the hub for newer files even if the model is here.")
def pull(name: str, refresh: bool) -> None:
    """Get NAME, a catalogue name or a hub id, and print its directory."""
    _print(str(fetch(name, refresh=refresh)[0]))


@models.command(epilog="\b\nExamples:\n  localspec models show smollm2\n  localspec models show ./my-model --json")
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """What is known about NAME; nothing is fetched. A model's directory does too."""
    record = _describe(name)
    if as_json:
        _print_json(record)
        return
    width = max(len(field) for field in record)
    for field, value in record.items():
        if value not in (None, [], {}):
            _print(f"{field.replace('_', ' '):{width}}  {_shown(field, value)}")


@models.command(epilog="\b\nExamples:\n  localspec models rm smollm2")
@click.argument("name")
def rm(name: str) -> None:
    """Delete the downloaded files of NAME. Never touches a directory of your own."""
    from localspec import hub
    from localspec.memory import format_bytes

    _print(f"removed {name}: {format_bytes(hub.remove(name))}")


def _describe(name: str) -> dict[str, Any]:
    from localspec import hub
    from localspec.models import catalogue

    known = catalogue()
    entry = known.get(name) or known.by_hub(name)
    here = {model.name: model for model in hub.installed()}
    model = here.get(name) or (here.get(entry.name) if entry is not None else None)
    if entry is not None or model is not None:
        return _record(entry.name if entry is not None else name, entry, model) | _shape(model.path if model else None)
    path = hub.find(name) if "/" in name and not name.startswith((".", "/", "~")) else None
    path = path or hub.local(name)
    return {"name": name, "path": str(path)} | _shape(path)


def _record(name: str, entry: Entry | None, model: Installed | None) -> dict[str, Any]:
    known: dict[str, Any] = asdict(entry) if entry is not None else {}
    package = known.pop("package", None)
    return {
        "name": name,
        **known,
        "package": package["name"] if package else None,
        "installed": model is not None and model.complete,
        "incomplete": model is not None and not model.complete,
        "path": str(model.path) if model is not None else None,
        "bytes": model.bytes if model is not None else None,
    }
