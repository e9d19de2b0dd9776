"""`localspec models`: what is known, what is here, and what it takes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localspec.commands.printing import print_json, print_line, print_table
from localspec.commands.process import CommandGroup
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
    records = [_record(name, known.get(name), here.get(name)) | {"pairs": _pairs(name)} for name in names]
    if as_json:
        print_json(records)
        return
    header = ("NAME", "PARAMETERS", "DOWNLOAD", "MEMORY", "LICENCE", "HERE", "DRAFTS WITH")
    print_table([header, *(_row(record) for record in records)])


@models.command(
    epilog="""\b
Examples:
  localspec models pull smollm2
  localspec models pull mlx-community/Qwen3-4B-4bit
""",
)
@click.argument("name")
@click.option("--refresh", is_flag=True, help="Ask the hub for newer files even if the model is here.")
def pull(name: str, refresh: bool) -> None:
    """Get NAME, a catalogue name or a hub id, and print its directory."""
    print_line(str(fetch(name, refresh=refresh)[0]))


@models.command(epilog="\b\nExamples:\n  localspec models show smollm2\n  localspec models show ./my-model --json")
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """What is known about NAME; nothing is fetched. A model's directory does too."""
    record = _describe(name)
    if as_json:
        print_json(record)
        return
    pairs = record.pop("pairs")
    record.pop("drafts", None)  # the pairs say more
    lines = [(field, _shown(field, value)) for field, value in record.items() if value or field == "installed"]
    lines += [("drafts with", _pair_line(pair)) for pair in pairs]
    width = max(len(field) for field, _ in lines)
    for field, text in lines:
        print_line(f"{field.replace('_', ' '):{width}}  {text}")


@models.command(epilog="\b\nExamples:\n  localspec models rm smollm2")
@click.argument("name")
def rm(name: str) -> None:
    """Delete the downloaded files of NAME. Never touches a directory of your own."""
    from localspec import hub
    from localspec.memory import format_bytes

    print_line(f"removed {name}: {format_bytes(hub.remove(name))}")


@models.command(
    "add-head",
    epilog="""\b
Examples:
  localspec models add-head ./Qwen3.6-27B mlx-community/Qwen3.6-27B-4bit
  localspec models add-head ./gemma-4-E4B-it-assistant ./gemma-4-E4B-it-4bit
""",
)
@click.argument("checkpoint", type=click.Path(exists=True))
@click.argument("target", required=False)
def add_head(checkpoint: str, target: str | None) -> None:
    """Take the MTP head out of CHECKPOINT, a Hugging Face folder, and keep it beside TARGET, in TARGET's format.

    TARGET is a converted model: a name or a directory. Without it, the one on this machine that CHECKPOINT fits.
    From then on TARGET drafts with the head.
    """
    from localspec import hub
    from localspec.checkpoint import read_checkpoint
    from localspec.errors import IncompleteModelError
    from localspec.memory import format_bytes
    from localspec.models.mtp import add_head as add
    from localspec.models.mtp import find

    source = find(checkpoint)
    if source is None:
        raise IncompleteModelError(f"{checkpoint} holds no MTP head: none of its tensors is one of a layout we know")
    name = target if target is not None else _fitting(Path(checkpoint))
    file = add(source, read_checkpoint(hub.resolve(name)))
    print_line(
        f"{file}: a {source.family} head, {format_bytes(file.stat().st_size)}; {name} drafts with it from now on"
    )


def _fitting(checkpoint: Path) -> str:
    """The installed model with the sizes of the checkpoint's; an error unless it is the only one."""
    from localspec import hub
    from localspec.errors import ModelNotFoundError

    def sizes(folder: Path) -> tuple[Any, ...]:
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            text = config.get("text_config") or config
            return tuple(text.get(name) for name in ("hidden_size", "num_hidden_layers", "vocab_size"))
        except (OSError, ValueError, RecursionError, AttributeError):
            return ()

    wanted = sizes(checkpoint)
    fitting = [model.name for model in hub.installed() if wanted and model.complete and sizes(model.path) == wanted]
    if len(fitting) == 1:
        return fitting[0]
    found = f"{len(fitting)} models here fit ({', '.join(fitting)})" if fitting else "no model here fits"
    raise ModelNotFoundError(
        f"{found} {checkpoint}: name the target, as in localspec models add-head {checkpoint} TARGET"
    )


def _describe(name: str) -> dict[str, Any]:
    from localspec import hub
    from localspec.errors import ModelNotFoundError
    from localspec.models import catalogue

    known = catalogue()
    entry = known.get(name) or known.by_hub(name)
    called = entry.name if entry is not None else name
    model = next((model for model in hub.installed() if model.name in (called, name)), None)
    if entry is not None or model is not None:
        known_pairs = _pairs(called) if entry is not None or model is None else _pairs_of(called, model.path)
        return _record(called, entry, model) | _config(model.path if model else None) | {"pairs": known_pairs}
    if "/" in name and not Path(name).is_dir() and not name.startswith((".", "/", "~")):
        raise ModelNotFoundError(f"{name} is not on this machine; to get it: localspec models pull {name}")
    path = hub.resolve(name)  # a directory, or the error that suggests names
    return {"name": name, "installed": True, "path": str(path)} | _config(path) | {"pairs": _pairs_of(name, path)}


def _record(name: str, entry: Entry | None, model: Installed | None) -> dict[str, Any]:
    known: dict[str, Any] = asdict(entry) if entry is not None else {}
    package = known.pop("package", None)
    return {
        **known,
        "name": name,
        "package": package["name"] if package else None,
        "installed": model is not None and model.complete,
        "incomplete": model is not None and not model.complete,
        "path": str(model.path) if model is not None else None,
        "bytes": model.bytes if model is not None else None,
    }


def _pairs(name: str) -> list[dict[str, Any]]:
    """The drafts that the catalogue has for one of its models, best first; nothing for a model that it lacks."""
    from localspec.models import catalogue
    from localspec.pairing import candidates

    entry = catalogue().get(name)
    return [] if entry is None else [_pair(draft, entry.memory_bytes) for draft in candidates(name)]


def _pairs_of(name: str, path: Path) -> list[dict[str, Any]]:
    """The catalogue's drafts on this machine that fit a model which the catalogue lacks, by both tokenizers."""
    from localspec.errors import LocalspecError
    from localspec.loading import load_tokenizer
    from localspec.memory import needed_bytes
    from localspec.pairing import drafts_here
    from localspec.plan import plan_of

    try:
        target = plan_of(name, path, "quantized")  # that is, as stored
        found = drafts_here(target, load_tokenizer(target.checkpoint), load_tokenizer)
    except LocalspecError:
        return []  # what is wrong with it is told where it is loaded
    return [_pair(entry, needed_bytes(target.bytes)) for entry in found]


def _pair(draft: Entry, target_bytes: int) -> dict[str, Any]:
    """A draft, and the memory that it and its target take together."""
    from localspec import hub, memory

    together, available = target_bytes + draft.memory_bytes, memory.available_bytes()
    return {
        "name": draft.name,
        "parameters": draft.parameters,
        "licence": draft.licence,
        "installed": hub.find(draft.name) is not None,
        "memory_bytes": together,
        "fits": None if available is None else together <= available,
    }


def _pair_line(pair: dict[str, Any]) -> str:
    parts = [
        f"{pair['name']} ({pair['parameters']})",
        pair["licence"],
        f"{_shown('memory_bytes', pair['memory_bytes'])} together",
    ]
    parts += ["more than is available now"] if pair["fits"] is False else []
    parts += ["here" if pair["installed"] else f"to get it: localspec models pull {pair['name']}"]
    return ", ".join(parts)


def _config(path: Path | None) -> dict[str, Any]:
    """What a model that is here says of itself."""
    if path is None:
        return {}
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(config, dict):
        return {}
    quantization = config.get("quantization")
    return {
        "architecture": config.get("model_type"),
        "stored_as": f"{quantization.get('bits')}-bit" if isinstance(quantization, dict) else config.get("torch_dtype"),
    }


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    return (
        record["name"],
        record.get("parameters") or "",
        _shown("download_bytes", record.get("download_bytes")),
        _shown("memory_bytes", record.get("memory_bytes")),
        record.get("licence") or "",
        "yes" if record["installed"] else "incomplete" if record["incomplete"] else "no",
        ", ".join(pair["name"] + (" (here)" if pair["installed"] else "") for pair in record["pairs"]),
    )


def _shown(field: str, value: Any) -> str:
    from localspec.memory import format_bytes

    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and field.endswith("bytes"):
        return format_bytes(value)
    return ", ".join(value) if isinstance(value, list | tuple) else str(value)
