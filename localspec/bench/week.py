"""A week of one user: the prompts of each day over material that changes a little from day to day.

Read from week.toml; knows nothing of engines or tokenizers.
"""

from __future__ import annotations

import re
import tomllib
from collections import deque
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from localspec.bench.workloads import Prompt
from localspec.errors import LocalspecError

PROMPTS = "week.toml"
_MATERIAL = re.compile(r"<<([a-z-]+)>>")


def read_week(text: str | None = None, *, standing: bool = False) -> list[Prompt]:
    """The prompts, day by day in the file's order, with the day's material where a prompt names it (<<notes>>).

    standing: the first day's questions on every day, over that day's material, instead of each day's own.
    text: in the format of week.toml; None is that file. A prompt with several days has the same name on each of them,
    and the same words but for changes of the material. LocalspecError for a change that finds nothing to change, for
    material that is not there, and for two prompts of one name on one day.
    """
    found = tomllib.loads((files("localspec.bench") / PROMPTS).read_text(encoding="utf-8") if text is None else text)
    material: dict[str, str] = dict(found["material"])
    prompts: dict[tuple[str, str, int], Prompt] = {}
    changes = deque(sorted(found.get("change", []), key=lambda change: change["day"]))
    days = sorted({day for entry in found["prompt"] for day in entry["days"]})
    for day in days:
        while changes and changes[0]["day"] <= day:
            _change(material, changes.popleft())
        for entry in found["prompt"]:
            if (days[0] if standing else day) in entry["days"]:
                prompt = Prompt(entry["kind"], entry["name"], _fill(entry["user"], material), day)
                key = (prompt.kind, prompt.name, day)
                if key in prompts:
                    raise LocalspecError(f"{PROMPTS} has {prompt.kind}/{prompt.name} twice on day {day}")
                prompts[key] = prompt
    return list(prompts.values())


def _change(material: dict[str, str], change: Mapping[str, Any]) -> None:
    name, old = change["in"], change["old"]
    if material.get(name, "").count(old) != 1:
        raise LocalspecError(f"{PROMPTS}, change of day {change['day']}: {old!r} must be in {name!r} once")
    material[name] = material[name].replace(old, change["new"])


def _fill(text: str, material: Mapping[str, str]) -> str:
    """The text with its material. Parted by hand, since material may hold anything, marks of other material too."""
    parts = _MATERIAL.split(text)
    for i, name in enumerate(parts[1::2]):
        if name not in material:
            raise LocalspecError(f"{PROMPTS} has no material called {name!r}; there is {', '.join(material)}")
        parts[2 * i + 1] = material[name].strip()
    return "".join(parts).strip()
