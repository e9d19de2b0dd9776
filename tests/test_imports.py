"""What importing localspec loads, and what it offers."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import localspec

HEAVY = ("mlx", "mlx_lm", "textual", "huggingface_hub", "transformers", "numpy", "tokenizers", "httpx", "llguidance")


def loaded_by(code: str) -> set[str]:
    """The top-level modules in a fresh interpreter after `code`."""
    script = f"import sys\n{code}\nprint('modules:', *{{name.partition('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=240)
    return set(run.stdout.rpartition("modules:")[2].split())


def test_the_probe_sees_a_heavy_module() -> None:
    assert "numpy" in loaded_by("import numpy")


def test_importing_localspec_loads_nothing_heavy() -> None:
    assert not loaded_by(
        "import localspec; localspec.__version__; localspec.Settings(); localspec.LocalspecError"
    ).intersection(HEAVY)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["chat", "--help"],
        ["bench", "--help"],
        ["verify", "--help"],
        ["models", "pull", "--help"],
        ["doctor", "--help"],
        ["cache", "--help"],
        ["cache", "learn", "--help"],
        ["cache", "show", "--help"],
    ],
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = f"from localspec.cli import main\ntry: main({arguments!r})\nexcept SystemExit as end: assert end.code == 0"
    assert not loaded_by(code).intersection(HEAVY)


def test_public_names() -> None:
    for name in localspec.__all__:
        assert getattr(localspec, name) is not None
        assert name in dir(localspec)
    assert localspec.drafters.__name__ == "localspec.drafters"
    assert callable(localspec.load)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        localspec.lod  # noqa: B018


def test_version() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert localspec.__version__ == project["version"]


def test_python_dash_m() -> None:
    run = subprocess.run([sys.executable, "-m", "localspec", "--version"], capture_output=True, text=True, timeout=240)
    assert (run.returncode, run.stderr) == (0, "")
    assert localspec.__version__ in run.stdout
