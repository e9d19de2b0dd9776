"""What this machine can do, what is wrong, and the command that fixes it.

Asks this machine only, never the network, and changes nothing but the record of the kernels' tests.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from localspec import blas, memory
from localspec.bench.machine import backend, machine, versions
from localspec.errors import IncompleteModelError, LocalspecError, SettingsError, UnsupportedModelError
from localspec.memory import format_bytes
from localspec.paths import cache_dir

if TYPE_CHECKING:
    from localspec.hub import Installed
    from localspec.kernels.selection import Decision, Kernels

TEST_AGAIN = "localspec doctor --test-kernels"


@dataclass(frozen=True, slots=True)
class Remark:
    """Something to know."""

    level: Literal["problem", "note"]
    """A problem is for the user to fix; a note is not, or need not be."""
    text: str
    fix: str = ""
    """What to do, a command where there is one."""


@dataclass(slots=True)
class Section:
    """One subject."""

    name: str
    lines: list[str]
    """For people."""
    data: Any
    """The same for JSON."""
    remarks: list[Remark] = field(default_factory=list)

    def add(self, level: Literal["problem", "note"], text: str, fix: str = "") -> None:
        """Remark on it."""
        self.remarks.append(Remark(level, text, fix))


@dataclass(frozen=True, slots=True)
class Report:
    """All subjects."""

    sections: tuple[Section, ...]

    def remarks(self, level: Literal["problem", "note"]) -> list[Remark]:
        """All of that level."""
        return [remark for section in self.sections for remark in section.remarks if remark.level == level]

    @property
    def ok(self) -> bool:
        """Whether there is nothing for the user to fix."""
        return not self.remarks("problem")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        told = {"problems": self.remarks("problem"), "notes": self.remarks("note")}
        return {
            "ok": self.ok,
            **{section.name: section.data for section in self.sections},
            **{name: [{"text": r.text, "fix": r.fix or None} for r in remarks] for name, remarks in told.items()},
        }

    def screen(self) -> str:
        """For a terminal."""
        width = max(len(section.name) for section in self.sections)
        lines = []
        for section in self.sections:
            for number, line in enumerate(section.lines):
                lines.append(f"{'' if number else section.name:{width}}  {line}")
        for remark in [*self.remarks("note"), *self.remarks("problem")]:
            lines += ["", f"{remark.level}: {remark.text}"]
            lines += [f"  {remark.fix}"] if remark.fix else []
        return "\n".join([*lines, "", "all is well" if self.ok else "something is wrong"])


def examine(*, test_kernels: bool = False, progress: Callable[[str], None] | None = None) -> Report:
    """Look at everything. `test_kernels` runs the kernels' self-tests and races, some seconds each, and records them;
    `progress` is told what is going on then."""
    software = _software()
    if software.remarks:  # without MLX the others cannot be asked
        return Report((software, _cache(), _terminal()))
    kernels = _kernels(test_kernels, progress or (lambda line: None))
    return Report((_machine(), _memory(), software, _device(), _blas(), _models(), _cache(), _terminal(), kernels))


def _software() -> Section:
    data = versions()
    section = Section("software", [", ".join(f"{name} {version}" for name, version in data.items())], data)
    try:
        import_module("mlx.core")
        if find_spec("mlx_lm") is None:  # to import it takes seconds
            raise ImportError("there is no mlx_lm")
    except ImportError as error:
        fix = f"{sys.executable} -m pip install --force-reinstall mlx mlx-lm"
        section.add("problem", f"MLX cannot be loaded: {' '.join(str(error).split())}", fix)
    return section


def _machine() -> Section:
    data = machine()
    return Section("machine", [f"{data['cpu']}, {data['cores']} cores, {data['system']}"], data)


def _memory() -> Section:
    available = memory.available_bytes()
    text = "not known" if available is None else f"{format_bytes(available)} for a model"
    return Section("memory", [text], {"available_bytes": available})


def _device() -> Section:
    import mlx.core as mx

    name = str(mx.device_info().get("device_name", "unknown"))
    return Section("device", [f"{backend()}: {name}"], {"backend": backend(), "name": name})


def _blas() -> Section:
    section = Section("blas", [blas.status()], {"status": blas.status(), "library": None})
    if not blas.applies() or blas.active():
        return section
    if os.environ.get("LOCALSPEC_BLAS", "auto").lower() == "off":
        section.add("note", "LOCALSPEC_BLAS=off keeps MLX's own BLAS, which is several times slower than OpenBLAS")
        return section
    try:
        library = blas.find_openblas()
    except LocalspecError as error:
        section.add("problem", str(error), "unset LOCALSPEC_OPENBLAS")
        return section
    if library is None:
        fix = f"on Debian or Ubuntu: sudo apt install {blas.DEBIAN_PACKAGE}"
        section.add("note", "MLX's Linux wheel has a slow BLAS; an OpenBLAS makes it several times faster", fix)
        return section
    section.lines = [f"{library}, which chat, bench and verify start with"]
    section.data["library"] = str(library)
    return section


def _models() -> Section:
    from localspec import hub

    section = Section("models", [], [])
    try:
        for model in hub.installed():
            _model(section, model)
    except OSError as error:
        section.lines.append("cannot be looked at")
        section.add("problem", f"{error.filename}: {error.strerror}", "make the folder readable for you")
    if not section.lines:
        section.lines.append("none here; to get the default one: localspec models pull smollm2")
    return section


def _model(section: Section, model: Installed) -> None:
    from localspec.checkpoint import read_checkpoint

    need: int | None = None
    pull = f"localspec models pull {model.name}"
    try:
        need = memory.needed_bytes(read_checkpoint(model.path, finish=pull).bytes)
    except (IncompleteModelError, UnsupportedModelError, OSError) as error:
        state = "not whole"
        # The hub's cache is not ours alone: what others keep there for other programs is no fault of it.
        ours = model.origin == "package" or any(model.path.glob("model*.safetensors*"))
        text = f"{model.name}: {str(error).partition('; to finish it')[0]}"
        section.add("problem" if ours else "note", text, pull if ours else "")
    else:
        available = memory.available_bytes()
        fits = available is None or need <= available
        state = "whole" if fits else "whole, too big for the memory that is free now"
        if not fits and available is not None:
            text = f"{model.name} needs {format_bytes(need)} of memory and {format_bytes(available)} is available"
            section.add("note", text, "close other programs, or take a smaller model: localspec models list")
    section.lines.append(f"{model.name}  {format_bytes(model.bytes)}  {state}")
    section.data.append(
        {
            "name": model.name,
            "path": str(model.path),
            "bytes": model.bytes,
            "whole": need is not None,
            "needed_bytes": need,
        }
    )


def _cache() -> Section:
    folder = cache_dir()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free: int | None = None
    try:
        with tempfile.TemporaryFile(dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:
        section = Section("cache", [f"{folder}  not writable"], {"path": str(folder), "writable": False})
        reason = error.strerror or str(error)
        fix = "give yourself the right to write there, or set LOCALSPEC_HOME to another folder"
        section.add("problem", f"nothing can be stored in {folder} ({there}: {reason})", fix)
        return section
    data = {"path": str(folder), "writable": True, "free_bytes": free}
    return Section("cache", [f"{folder}  {format_bytes(free)} free"], data)


def _terminal() -> Section:
    term, wanted = os.environ.get("TERM", ""), not os.environ.get("NO_COLOR")
    if term in ("", "dumb"):
        colours = "none: the chat needs a terminal that can place text"
    elif not wanted:
        colours = "none, as NO_COLOR asks for"
    elif os.environ.get("COLORTERM", "").lower() in ("truecolor", "24bit"):
        colours = "all"
    else:
        colours = "256" if "256color" in term else "16"
    return Section("terminal", [f"{term or 'not known'}, colours: {colours}"], {"term": term, "colours": colours})


def _kernels(test: bool, progress: Callable[[str], None]) -> Section:
    from localspec.kernels import place, registry
    from localspec.kernels.selection import Kernels, Status

    here = place.here()
    section = Section("kernels", [], {"metal": here is not None, "table": []})
    try:
        kernels = Kernels(notify=lambda line: section.add("note", line))
    except SettingsError as error:
        section.lines = ["not known"]
        section.add("problem", str(error), "unset LOCALSPEC_KERNELS")
        return section
    if test and here is None:
        section.add("note", "there is no Metal here: no kernel was tested")
    for name in registry.names():
        if test and here is not None:
            progress(f"testing the {name} kernel")
        _kernel(section, kernels, name, tested=test and here is not None)
    if any(row["status"] == Status.UNTRIED for row in section.data["table"]):
        section.add("note", "kernels not tried yet are tested at their first use, in some seconds each", TEST_AGAIN)
    if not section.lines:
        section.lines.append("none")
    return section


def _kernel(section: Section, kernels: Kernels, name: str, *, tested: bool) -> None:
    from localspec.kernels import registry
    from localspec.kernels.records import as_dict

    decision = kernels.test(name) if tested else kernels.outlook(name)
    record = decision.record
    section.lines.append(_kernel_line(name, decision))
    section.data["table"].append(
        {
            "name": name,
            "purpose": registry.kernel(name).purpose,
            "choice": kernels.choices.of(name),
            "status": decision.status,
            "record": None if record is None else as_dict(record),
        }
    )
    if record is not None and record.outcome != "agreed":
        text = f"the {name} kernel {record.outcome} ({record.detail}); its reference is used instead"
        section.add("problem" if tested else "note", text, f"report it with what this prints: {TEST_AGAIN} --json")


def _kernel_line(name: str, decision: Decision) -> str:
    record = decision.record
    words = [f"{name:10}  {decision.status}"]
    if record is not None:
        words.append(f"self-test {record.outcome}")
        if record.race is not None:
            laps = ", ".join(f"{lap.name} {lap.ratio:.2f}x" for lap in record.race.laps)
            words.append(f"race {record.race.ratio:.2f}x ({laps})")
        words.append(f"on {record.recorded[:10]}")
    return "; ".join(words)
