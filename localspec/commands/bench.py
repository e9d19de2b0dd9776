"""`localspec bench`: plain against speculative decoding on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from localspec.blas import Setting
from localspec.commands import options
from localspec.commands.chat import default_model
from localspec.commands.process import FAILED, output, say, the_process, use_fast_blas
from localspec.commands.progress import loading
from localspec.paths import atomic_write_text

if TYPE_CHECKING:
    from localspec.bench.report import Report
    from localspec.settings import Acceptance

EPILOG = """\b
Examples:
  localspec bench --quick                     one prompt of a few kinds, in a minute or two
  localspec bench smollm2 --json -            one JSON document on stdout
  localspec bench --workload code-edit --repeats 5
  localspec bench qwen3-4b --draft qwen3-0.6b --report bench.md

A table goes to stdout and what is going on to stderr. The exit code is 1 when ids differ that should be
identical, unless the last bits of two logits explain it.
"""


@click.command(epilog=EPILOG, short_help="Plain against speculative decoding, paired.")
@options.model_argument
@click.option("--quick", is_flag=True, help="One prompt of each of a few kinds of text, once.")
@click.option("--workload", "workloads", multiple=True, metavar="NAME", help="Only this kind; may be repeated.")
@click.option("--repeats", type=click.IntRange(min=1), help="Pairs per prompt.  [default: 2; 1 with --quick]")
@click.option("--max-tokens", type=click.IntRange(min=2), default=256, show_default=True, help="Tokens per answer.")
@click.option("--temperature", "-t", type=click.FloatRange(min=0), default=0.0, help="0 is greedy.  [default: 0]")
@options.accept_option
@options.draft_options
@options.seed_option
@options.machine_options
@click.option("--json", "json_file", metavar="FILE", help="Write one JSON document; - is stdout, without the table.")
@click.option("--report", "report_file", metavar="FILE", help="Write a Markdown report.")
@click.pass_context
def bench(
    ctx: click.Context,
    model: str | None,
    quick: bool,
    workloads: tuple[str, ...],
    repeats: int | None,
    max_tokens: int,
    temperature: float,
    accept: Acceptance | None,
    draft: str,
    mtp: str,
    draft_through_text: bool,
    draft_length: str | int | None,
    exact: Literal["auto", "rows", "off"] | None,
    seed: int | None,
    dtype: str,
    blas: Setting,
    kernels: str,
    json_file: str | None,
    report_file: str | None,
) -> None:
    """Decode the same prompts plainly and speculatively, in pairs, and check that the ids are identical.

    MODEL is a name from `localspec models list`, a directory, or a hub id. Default: smollm2.
    """
    if quick and workloads:
        raise click.UsageError("--quick chooses the workloads: leave out --workload")
    use_fast_blas(ctx, blas)
    from localspec.bench.run import run_bench
    from localspec.bench.workloads import QUICK, choose_workloads

    chosen = [QUICK] if quick else list(workloads) or None
    choose_workloads(chosen)  # a wrong name is told before the model is loaded
    for file in (json_file, report_file):
        options.check_writable(file)

    def on_progress(line: str) -> None:
        the_process(ctx).raise_if_interrupted()
        say(line)

    report = run_bench(
        loading(
            model or default_model(),
            draft=draft,
            mtp=mtp,
            draft_through_text=draft_through_text,
            dtype=dtype,
            kernels=kernels,
        ),
        workloads=chosen,
        repeats=repeats or (1 if quick else 2),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed or 0,
        draft_length=options.draft_length_value(draft_length),
        accept=accept or "coupled",
        exact=exact or "auto",
        on_progress=on_progress,
    )
    _deliver(report, json_file, report_file)
    excused = not report.exactness.startswith("bit for bit")
    if report.identity_expected and any(p.difference and not (excused and p.difference.near_tie) for p in report.pairs):
        ctx.exit(FAILED)


def _deliver(report: Report, json_file: str | None, report_file: str | None) -> None:
    document = json.dumps(report.as_dict(), indent=1) + "\n"
    from localspec.text import printable

    out = output()
    out.write(document if json_file == "-" else printable(report.table().rstrip("\n")) + "\n")
    out.flush()
    if json_file not in (None, "-"):
        atomic_write_text(Path(str(json_file)), document)
    if report_file is not None:
        atomic_write_text(Path(report_file), report.markdown())
