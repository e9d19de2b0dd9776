"""`localspec verify`: whether speculation changes a token, on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from localspec.blas import Setting
from localspec.commands import options
from localspec.commands.chat import default_model
from localspec.commands.process import is_terminal, output, say, the_process, use_fast_blas
from localspec.commands.progress import loading
from localspec.paths import atomic_write_text
from localspec.settings import MAX_SEED

if TYPE_CHECKING:
    from localspec.verify.report import Report

EPILOG = """\b
Examples:
  localspec verify                        the default model, in about three minutes
  localspec verify --quick                less of everything, in under a minute
  localspec verify qwen3-4b --draft qwen3-0.6b --exact rows
  localspec verify --json -               one JSON document on stdout

One screen goes to stdout and what is going on to stderr. The exit code is 0 when nothing differed, or only
at near-ties in the last bits where no more is promised, and 1 when something did.
"""


@click.command(epilog=EPILOG, short_help="Look for a token that speculation changes here.")
@options.model_argument
@click.option("--quick", is_flag=True, help="Fewer prompts, seeds and tokens.")
@click.option("--tokens", type=click.IntRange(min=8), help="Tokens per answer.  [default: 48; 16 with --quick]")
@click.option("--seed", type=click.IntRange(0, MAX_SEED), default=0, help="Of the first answers.  [default: 0]")
@options.drafter_options
@options.exact_option
@options.machine_options
@click.option("--json", "json_file", metavar="FILE", help="Write one JSON document; - is stdout, without the screen.")
@click.pass_context
def verify(
    ctx: click.Context,
    model: str | None,
    quick: bool,
    tokens: int | None,
    seed: int,
    draft: str,
    mtp: str,
    draft_through_text: bool,
    exact: Literal["auto", "rows", "off"] | None,
    dtype: str,
    blas: Setting,
    kernels: str,
    json_file: str | None,
) -> None:
    """Decode with and without speculation and look for a token that differs.

    Several temperatures and seeds, each drafter, drafts that are wrong on purpose, sliding windows, second turns; then
    what the acceptance rules draw is counted. Penalties, filters, grammars, stop strings and failures in the middle are
    not tried here: localspec's tests do that.

    MODEL is a name from `localspec models list`, a directory, or a hub id. Default: smollm2.
    """
    use_fast_blas(ctx, blas)
    options.check_writable(json_file)
    from localspec.verify.run import run_verify

    def on_progress(line: str) -> None:
        the_process(ctx).raise_if_interrupted()
        say(line)

    report = run_verify(
        loading(
            model or default_model(),
            draft=draft,
            mtp=mtp,
            draft_through_text=draft_through_text,
            dtype=dtype,
            kernels=kernels,
        ),
        tokens=tokens,
        quick=quick,
        seed=seed,
        exact=exact or "auto",
        on_progress=on_progress,
    )
    if report.interrupted and is_terminal(sys.stderr):
        say("")  # the terminal has printed ^C
    _deliver(report, json_file)
    ctx.exit(report.exit_status)


def _deliver(report: Report, json_file: str | None) -> None:
    from localspec.text import printable

    document = json.dumps(report.as_dict(), indent=1) + "\n"
    out = output()
    out.write(document if json_file == "-" else printable(report.screen()) + "\n")
    out.flush()
    if json_file not in (None, "-"):
        atomic_write_text(Path(str(json_file)), document)
