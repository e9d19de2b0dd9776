"""A faster BLAS for MLX's CPU backend on Linux: find an installed OpenBLAS and start over with it preloaded.

MLX's Linux wheel carries the reference BLAS, several times slower than OpenBLAS. A library can only take its place
before the process starts, so the command line starts itself once more with LD_PRELOAD. Nothing here runs when
localspec is imported as a library, and the second start puts the environment back, so that child processes see
what the user set and nothing else.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from localspec.errors import LocalspecError

Setting = Literal["auto", "off"]

DEBIAN_PACKAGE = "libopenblas0-pthread"
GUARD = "LOCALSPEC_PRELOAD_GUARD"
"""Set across the restart only; its value is the record of what to put back."""
_LIBRARY = re.compile(r"libopenblas[po]?(-r[\d.]+)?\.so(\.\d+)*")
"""Not `libopenblas64`: its integers are 64 bits wide, which MLX's calls are not."""


def find_openblas() -> Path | None:
    """The OpenBLAS to preload: LOCALSPEC_OPENBLAS, else a distribution's, the POSIX-threads build first."""
    override = os.environ.get("LOCALSPEC_OPENBLAS")
    if override:
        path = Path(override)
        if not _loadable(path):
            raise LocalspecError(f"LOCALSPEC_OPENBLAS={override} is not a shared library for this machine; unset it")
        return path.absolute()
    return next((path for path in _candidates() if _loadable(path)), None)


def applies() -> bool:
    """Whether MLX here is the Linux wheel with the reference BLAS inside."""
    if not sys.platform.startswith("linux"):
        return False
    spec = find_spec("mlx")
    places = list(spec.submodule_search_locations or ()) if spec else []
    site_packages = [Path(place).parent for place in places]
    if any(next(place.glob("mlx_cuda*.dist-info"), None) for place in site_packages):
        return False
    return any(next(place.glob("mlx_cpu.libs/libblas*"), None) for place in site_packages)


def preload(argv: Sequence[str], setting: Setting = "auto", verbose: bool = False) -> None:
    """Replace this process by itself with OpenBLAS preloaded, where that helps; returns where it does not.

    `argv` is the interpreter's own command line (`sys.orig_argv`). Call it before anything was read from standard
    input and before MLX is imported. The announcement comes once per machine; `verbose` repeats it.
    """
    if settle():
        if not active():
            _say("the OpenBLAS to preload could not be loaded; going on with MLX's own BLAS")
        return
    if setting == "off" or os.environ.get("LOCALSPEC_BLAS", "auto").lower() == "off" or not applies() or active():
        return
    library = find_openblas()
    if library is None:
        if _first_time("openblas-hint") or verbose:
            _say(
                "MLX's Linux wheel has a slow BLAS; an OpenBLAS makes it several times faster "
                f"(on Debian or Ubuntu: apt install {DEBIAN_PACKAGE})"
            )
        return
    if _first_time("openblas-announced") or verbose:
        _say(f"using {library} for faster matrix products (--blas off or LOCALSPEC_BLAS=off turns it off)")
    environment = dict(os.environ)
    earlier = environment.get("LD_PRELOAD")
    changes = {"LD_PRELOAD": f"{library}:{earlier}" if earlier else str(library)}
    threads = _quota_threads()
    if threads and not any(name in environment for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")):
        changes["OPENBLAS_NUM_THREADS"] = str(threads)
    environment[GUARD] = json.dumps({name: environment.get(name) for name in changes})
    environment.update(changes)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it is where the shell closed it (`>&-`)
            stream.flush()
    os.execve(sys.executable, [sys.executable, *argv[1:]], environment)


def settle() -> bool:
    """After a restart by `preload`: put the user's environment back. False when there was no restart."""
    record = os.environ.pop(GUARD, None)
    if record is None:
        return False
    for name, value in json.loads(record).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return True


def active() -> bool:
    """Whether an OpenBLAS stands before MLX's own BLAS in this process."""
    return _symbol("openblas_get_config") is not None


def status() -> str:
    """The BLAS in use, for reports: "OpenBLAS 0.3.21 via preload, 2 threads", "reference (wheel)", ..."""
    if sys.platform == "darwin":
        return "Accelerate"
    config = _symbol("openblas_get_config")
    if config is None:
        return "reference (wheel)" if applies() else "the one MLX was built with"
    config.restype = ctypes.c_char_p
    words = (config() or b"").decode("ascii", "replace").split()
    version = next((word for word in words if re.fullmatch(r"\d+(\.\d+)+\S*", word)), "of unknown version")
    threads = _symbol("openblas_get_num_threads")
    count = int(threads()) if threads is not None else 1
    return f"OpenBLAS {version} via preload, {count} thread{'s' if count != 1 else ''}"


def _symbol(name: str) -> ctypes._NamedFuncPointer | None:
    # Only the global scope: NumPy carries an OpenBLAS of its own, which does not serve MLX.
    try:
        return ctypes.CDLL(None)[name]
    except (AttributeError, OSError, TypeError):
        return None


def _candidates() -> Iterator[Path]:
    triplet = f"{platform.machine()}-linux-gnu"
    for flavour in ("openblas-pthread", "openblas-openmp", "openblas-serial"):
        yield Path("/usr/lib", triplet, flavour, "libopenblas.so.0")  # Debian, Ubuntu
    for folder in ("/usr/lib64/openblas-pthreads", "/usr/lib64/openblas-openmp"):
        yield Path(folder, "libopenblas.so.0")  # openSUSE
    for name in ("libopenblasp.so.0", "libopenblaso.so.0", "libopenblas.so.0"):
        yield Path("/usr/lib64", name)  # Fedora
    for name in ("libopenblas.so.0", "libopenblas.so"):
        yield Path("/usr/lib", name)  # Arch
    for line in _ldconfig():
        name, arrow, path = line.strip().partition(" => ")
        if arrow and _LIBRARY.fullmatch(name.split(" ")[0]):
            yield Path(path)


def _ldconfig() -> list[str]:
    for program in ("/sbin/ldconfig", "/usr/sbin/ldconfig", "ldconfig"):
        try:
            run = subprocess.run([program, "-p"], capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        return run.stdout.splitlines()
    return []


def _loadable(path: Path) -> bool:
    """A shared library for this interpreter's machine, at a path that LD_PRELOAD can name."""
    if re.search(r"[\s:]", str(path.absolute())):
        return False
    library, interpreter = _elf_kind(path), _elf_kind(Path("/proc/self/exe"))
    return library is not None and library == interpreter


def _elf_kind(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            header = file.read(20)
    except OSError:
        return None
    # Class and byte order, then the machine.
    return header[4:6] + header[18:20] if header[:4] == b"\x7fELF" else None


def _quota_threads() -> int | None:
    """The whole processors a container's quota allows, when that is fewer than it shows; OpenBLAS does not look."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        allowed = max(1, round(int(quota) / int(period)))
    except (OSError, ValueError):
        return None
    return allowed if allowed < len(os.sched_getaffinity(0)) else None


def _first_time(marker: str) -> bool:
    from localspec.paths import cache_dir

    try:
        path = cache_dir() / marker
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True  # nowhere to remember it: saying it again is the lesser evil
    return True


def _say(note: str) -> None:
    print(f"localspec: {note}", file=sys.stderr)
