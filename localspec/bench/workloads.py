"""The named prompts that the bench decodes, read from workloads.toml, and the choice among them.

Knows nothing of engines or tokenizers.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from localspec.errors import SettingsError

QUICK = "quick"
"""Chooses the quick kinds with their first prompt each."""
WORKLOADS, AGENT_LOGS, MORE = "workloads.toml", "agent_logs.toml", "recorded.toml"
"""What the bench decodes, and what is only recorded beside it for replays: one more kind, and more of every kind."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user message."""

    kind: str
    name: str
    text: str
    day: int = 0
    """Of a week of use, from 1 on; 0 outside one."""

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}]


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of work and its prompts."""

    name: str
    title: str
    prompts: tuple[Prompt, ...]
    quick: bool = False
    """Whether this kind is part of the quick choice."""


def read_workloads(name: str = WORKLOADS) -> list[Workload]:
    """All workloads of a file of this package, in its order."""
    text = (files("localspec.bench") / name).read_text(encoding="utf-8")
    workloads = []
    for kind in tomllib.loads(text)["kind"]:
        name = kind["name"]
        prompts = tuple(Prompt(name, prompt["name"], prompt["user"].strip()) for prompt in kind["prompt"])
        workloads.append(Workload(name, kind["title"], prompts, kind.get("quick", False)))
    return workloads


def choose_workloads(names: Sequence[str] | None) -> list[Workload]:
    """The named workloads, in the file's order; None is all of them with all their prompts.

    A name is a kind ("code-edit"), one prompt of a kind ("code-edit/inventory"), or "quick". SettingsError for others.
    """
    known = read_workloads()
    if names is None:
        return known
    if not names:
        raise SettingsError("name at least one workload, or none at all for all of them")
    wanted: set[tuple[str, str]] = set()
    for name in names:
        found = [
            (prompt.kind, prompt.name)
            for workload in known
            for index, prompt in enumerate(workload.prompts)
            if name in (workload.name, f"{workload.name}/{prompt.name}")
            or (name == QUICK and workload.quick and index == 0)
        ]
        if not found:
            listed = ", ".join([workload.name for workload in known] + [QUICK])
            example = f"{known[0].name}/{known[0].prompts[0].name}"
            raise SettingsError(f"no workload is called {name!r}; there are {listed}, and prompts such as {example}")
        wanted.update(found)
    chosen = []
    for workload in known:
        prompts = tuple(prompt for prompt in workload.prompts if (prompt.kind, prompt.name) in wanted)
        if prompts:
            chosen.append(Workload(workload.name, workload.title, prompts, workload.quick))
    return chosen
