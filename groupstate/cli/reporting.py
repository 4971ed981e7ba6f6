"""The commands that show a run as a page: report, view."""

import importlib
import os
import signal
from pathlib import Path
from typing import Any

import anyio
import click

from groupstate.cli.places import FORCE, Place, force_told
from groupstate.cli.runs import records_of
from groupstate.inspect.disk import size_of
from groupstate.inspect.writing import whole_file

RUN = click.argument("run", type=click.Path(path_type=Path))
PROMPTS = click.option("--prompts/--no-prompts", default=True, help="With the beginnings of prompts; so by default.")
CHECK = click.option("--check/--no-check", default=True, help="With the verdict of `groupstate check`; so by default.")

NICENESS = 10
"""Of the viewer: the run that it follows comes first."""


@click.command(short_help="Write a page that shows a run.")
@RUN
@click.option(
    "-o",
    "--out",
    type=Place(path_type=Path, dir_okay=False),
    default=Path("report.html"),
    help="Where the page goes; report.html by default.",
)
@PROMPTS
@CHECK
@FORCE
@click.pass_context
def report(ctx: click.Context, run: Path, out: Path, *, prompts: bool, check: bool, force: bool) -> None:
    """Write RUN as one HTML file that needs nothing else: groups by phase over time, evictions, lag, rewards, each
    group with its sessions, and whether the log can be true. A slider moves all of it through the run.

    Works on a run that is being written, on one whose beginning is gone, and on a damaged one, up to the damage. Exits
    with 0 if nothing is wrong with the log, 1 if something is: the page is written all the same, and says so. A file
    that is there already is replaced only with --force.

    \b
    Examples:
      groupstate report runs/demo -o report.html
      groupstate report runs/demo --no-prompts --no-check
    """
    records_of(run)  # for its error, where this is no run
    with force_told(), whole_file(out, overwrite=force) as beside:
        made = importlib.import_module("groupstate.inspect.report_page").report(run, prompts=prompts, check=check)
        beside.write_text(made.html(_name(run)), encoding="utf-8")
    click.echo(f"{out} ({size_of(out.stat().st_size)}): open it in a browser")
    for notice in made.notices:
        click.echo(f"groupstate: {notice.text}", err=True)
    if made.verdict.state == "wrong":
        click.echo(f"groupstate: {made.verdict.text} `groupstate check {run}` says what", err=True)
    ctx.exit(0 if made.well else 1)


def _name(run: Path) -> str:
    """What to call a run: its directory."""
    return run.resolve().name


@click.command(short_help="Show a run as a page that keeps up with it.")
@RUN
@click.option("--port", type=click.IntRange(0, 65_535), default=0, help="A free one by default.")
@PROMPTS
@CHECK
def view(run: Path, port: int, *, prompts: bool, check: bool) -> None:
    """Serve the page of `groupstate report` on 127.0.0.1, and keep it up to date while RUN is written.

    Prints the address, with a key in it without which nobody gets the page. Only the files of the run are read, at a
    low priority, so the run doesn't notice. Ctrl-C and SIGTERM end it, with exit code 0.

    \b
    Examples:
      groupstate view runs/demo
      groupstate view runs/demo --port 8000
    """
    records_of(run)
    parts = importlib.import_module("groupstate.inspect.report_server")
    live = importlib.import_module("groupstate.inspect.report_live")
    os.nice(NICENESS)
    anyio.run(_serve, live.LiveReport(run, prompts=prompts, check=check, name=_name(run)), parts.serving, port)


async def _serve(live: Any, serving: Any, port: int) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals, serving(live, port) as address:
        click.echo(f"{address}\nCtrl-C ends it")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(live.follow)
            async for _ in signals:
                tasks.cancel_scope.cancel()
                break
