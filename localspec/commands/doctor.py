"""`localspec doctor`: what this machine can do, what is wrong, and the command that fixes it."""

from __future__ import annotations

import json

import click

from localspec.commands.process import FAILED, output, say, the_process

EPILOG = """\b
Examples:
  localspec doctor                           one screen
  localspec doctor --json | jq .problems     one JSON document on stdout
  localspec doctor --test-kernels            test and race the Metal kernels now, and record how it went

Nothing is asked of the network. The exit code is 1 when there is something to fix, and with --test-kernels when a
kernel disagrees with its reference or fails.
"""


@click.command(epilog=EPILOG, short_help="What this machine can do, and what is wrong.")
@click.option("--test-kernels", is_flag=True, help="Run the Metal kernels' self-tests and races, whatever is recorded.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.pass_context
def doctor(ctx: click.Context, test_kernels: bool, as_json: bool) -> None:
    """Look at the machine, the versions, the models that are here and the Metal kernels, and say what is wrong."""
    from localspec.doctor import examine
    from localspec.text import printable

    def progress(line: str) -> None:
        the_process(ctx).raise_if_interrupted()
        say(line)

    report = examine(test_kernels=test_kernels, progress=progress)
    output().write((json.dumps(report.as_dict(), indent=1) if as_json else printable(report.screen())) + "\n")
    if not report.ok:
        ctx.exit(FAILED)
