"""The list of commands, and what `localspec --help` says."""

from __future__ import annotations

import click

from localspec.commands import bench, cache, chat, doctor, models, verify
from localspec.commands.process import CommandGroup

EPILOG = """\b
Exit codes:
  0    done
  1    failed: one line on stderr says why and what to do
  2    wrong usage
  130  interrupted with Ctrl-C
  141  the program reading the output went away

\b
Examples:
  localspec chat
  echo "Name three colours" | localspec chat
  localspec bench --quick
  localspec verify --quick
  localspec doctor
"""


@click.group(cls=CommandGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(None, "--version", package_name="localspec")
def cli() -> None:
    """Run language models on this machine, faster, with the same tokens.

    Something cheap guesses the next tokens and the model checks all guesses in one pass.
    """


cli.add_command(chat.chat)
cli.add_command(bench.bench)
cli.add_command(verify.verify)
cli.add_command(models.models)
cli.add_command(cache.cache)
cli.add_command(doctor.doctor)
