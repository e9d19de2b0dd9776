"""Whether the installed package is whole. Run outside of the checkout: the tests themselves import the checkout."""

import sys
from importlib.resources import files
from pathlib import Path

import localspec
from localspec.bench.workloads import read_workloads
from localspec.models import catalogue
from localspec.train.prompts import read_prompts
from localspec.tui.app import ChatApp

checkout = Path(__file__).resolve().parents[1]
package = Path(str(localspec.__file__)).resolve().parent
if package == checkout / "localspec":
    sys.exit(f"this is the checkout, not an installed package: {package}")
read = [catalogue(), read_workloads(), read_prompts()]
if not (all(read) and files("localspec.tui").joinpath(str(ChatApp.CSS_PATH)).is_file()):
    sys.exit("data files are missing from the installed package")
heads = files("localspec.models").joinpath("heads")
named = [entry.head for entry in catalogue().values() if entry.head is not None]
if absent := [head for head in named if not heads.joinpath(head).is_file()]:
    sys.exit(f"not in the installed package: {', '.join(absent)}")
missing = [
    str(source.relative_to(checkout))
    for folder, home in (("localspec", "."), ("models", "models"), ("tui", "tui"))
    for source in [*(checkout / folder).rglob("*.py"), *(checkout / folder).rglob("*.metal")]
    if not (package / home / source.relative_to(checkout / folder)).is_file()
]
if missing:
    sys.exit(f"not in the installed package: {', '.join(missing)}")
