"""The C++ compiler, and a cache of what it made.

The compiler is clang: the one in the ziglang package, or the one that the variable METAL_CXX names. The cache is a
folder of files named by the digest of all that went into them; each is written under another name and renamed, so that
several processes can share it. METAL_CACHE names another folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
SHIM = HERE / "shim"
RUNTIME = HERE / "runtime"

_MACHINE = ["-march=x86-64-v3"] if platform.machine() in ("x86_64", "AMD64") else []
_COMMON = ["-fPIC", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off", "-fno-math-errno"]


class CompilerError(Exception):
    """There is no compiler, or it refused; the message is its own."""


@cache
def folder() -> Path:
    """Where the cache is; made when it is not there."""
    chosen = os.environ.get("METAL_CACHE")
    path = Path(chosen) if chosen else Path(tempfile.gettempdir()) / f"metal-emulator-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise CompilerError(f"{path} belongs to somebody else: name another folder for compiled kernels in METAL_CACHE")
    return path


@cache
def _commands() -> tuple[list[str], list[str]]:
    """clang itself, and a driver that knows the C library's headers and how to link."""
    chosen = os.environ.get("METAL_CXX")
    if chosen:
        return shlex.split(chosen), shlex.split(chosen)
    package = importlib.util.find_spec("ziglang")
    if package is None or package.origin is None:
        raise CompilerError(
            "no C++ compiler for Metal kernels: pip install ziglang, or name a clang (19 or newer) in METAL_CXX"
        )
    zig = str(Path(package.origin).parent / "zig")
    return [zig, "clang"], [zig, "c++", "-fno-sanitize=undefined"]


def _run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "ZIG_GLOBAL_CACHE_DIR": str(folder() / "zig"),
        "ZIG_LOCAL_CACHE_DIR": str(folder() / "zig"),
    }
    try:
        return subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
    except OSError as error:
        raise CompilerError(
            f"no C++ compiler for Metal kernels: {arguments[0]} cannot be run ({error.strerror}); "
            "pip install ziglang, or name a clang (19 or newer) in METAL_CXX"
        ) from None


def require() -> None:
    """Raise CompilerError, in one line, where there is no compiler."""
    _run([*_commands()[0], "--version"])


def _must_run(arguments: list[str]) -> None:
    done = _run(arguments)
    if done.returncode:
        raise CompilerError(done.stderr.strip() or f"{shlex.join(arguments[:4])} ended with {done.returncode}")


@cache
def _sources() -> bytes:
    """Everything of ours that goes into a compilation."""
    files = sorted(path for place in (SHIM, RUNTIME) for path in place.rglob("*") if path.is_file())
    files += [Path(__file__), HERE / "instrument.py"]
    return b"".join(path.read_bytes() for path in files)


def digest(*parts: str) -> str:
    """Names what was made from these parts with this compiler and this shim."""
    made_from = hashlib.sha256(_sources())
    # Not by the path of the package: every new environment would compile everything again.
    for part in (os.environ.get("METAL_CXX", ""), platform.machine(), sys.platform, _version(), *parts):
        made_from.update(part.encode() + b"\0")
    return made_from.hexdigest()[:24]


@cache
def _version() -> str:
    if os.environ.get("METAL_CXX"):
        return _run([*_commands()[0], "--version"]).stdout
    from importlib.metadata import version

    return version("ziglang")


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """The file of that name in the cache; `make` writes it to the path it is given when it is missing."""
    path = folder() / name
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder(), prefix="making-") as scratch:
            fresh = Path(scratch) / name
            make(fresh)
            fresh.replace(path)
    return path


def shared_library(objects: list[Path], out: Path) -> None:
    """Links without any library: what is missing is in the process that loads it."""
    undefined = ["-Wl,-undefined,dynamic_lookup"] if sys.platform == "darwin" else []
    _must_run([*_commands()[1], "-shared", "-nostdlib", *undefined, *map(str, objects), "-o", str(out)])


def compile_runtime(out: Path, options: list[str]) -> None:
    """The runtime as an object file; `options` say for which machine."""
    fixed = ["-std=c++17", "-O2", "-Wall", "-Werror", *_COMMON]
    _must_run([*_commands()[1], *options, *fixed, "-c", str(RUNTIME / "runtime.cpp"), "-o", str(out)])


def runtime() -> Path:
    """The runtime as a shared library."""

    def make(out: Path) -> None:
        compiled = out.with_suffix(".o")
        compile_runtime(compiled, [])
        shared_library([compiled], out)

    return cached(f"runtime-{digest()}.so", make)


_KERNEL = [
    "-x", "c++", "-std=c++17", "-nostdinc", "-isystem", str(SHIM), "-DMETAL_VERSION=320", "-w", "-fvisibility=hidden",
    "-gline-tables-only", "-ftrivial-auto-var-init=pattern", "-Xclang", "-cl-single-precision-constant", *_COMMON,
]  # fmt: skip
_CHECKED = [
    "-O1",
    "-fsanitize=thread,array-bounds,shift-exponent,integer-divide-by-zero,signed-integer-overflow,float-cast-overflow",
    "-mllvm", "-tsan-instrument-func-entry-exit=0", "-mllvm", "-tsan-instrument-read-before-write=1",
]  # fmt: skip


def to_ir(source: Path, out: Path, check: bool, machine: list[str] = _MACHINE) -> None:
    """C++ to the compiler's intermediate language, optimised and with the sanitizers' calls in it."""
    mode = _CHECKED if check else ["-O1"]
    _must_run([*_commands()[0], *_KERNEL, *machine, *mode, "-S", "-emit-llvm", str(source), "-o", str(out)])


def from_ir(source: Path, out: Path, machine: list[str] = _MACHINE) -> None:
    """The rest of the way to machine code."""
    _must_run([*_commands()[0], "-O1", "-w", "-fPIC", *machine, "-c", "-x", "ir", str(source), "-o", str(out)])


def complaints(source: Path, options: list[str]) -> list[str]:
    """What the compiler has to say about a file that it need not compile: its errors and warnings, a line each."""
    done = _run([*_commands()[0], *options, "-fsyntax-only", "-fno-caret-diagnostics", str(source)])
    lines = [line for line in done.stderr.splitlines() if ": error: " in line or ": warning: " in line]
    if done.returncode and not lines:
        lines = [done.stderr.strip()]
    return lines
