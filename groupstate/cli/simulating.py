"""`groupstate simulate`. What it needs is imported only when it is called."""

import importlib
from pathlib import Path

import click

from groupstate.cli.places import Place


@click.command(short_help="Simulate runs with crashes and faults, from a seed.")
@click.option("--seed", type=click.IntRange(min=0), default=None, help="Picks the whole configuration; 0 by default.")
@click.option("--runs", type=click.IntRange(min=1), default=None, help="So many seeds, from --seed on; 1 by default.")
@click.option("--hours", type=click.FloatRange(min=0, min_open=True), default=None, help="Virtual hours with faults.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=None, help="Start no run after these.")
@click.option("--plan", "plan_file", type=click.Path(path_type=Path), default=None, help="A configuration as a file.")
@click.option(
    "--out",
    type=Place(path_type=Path, file_okay=False),
    default=Path("simulate"),
    help="Where a failure leaves its files; simulate/ by default.",
)
@click.option("--show", is_flag=True, help="Print the configuration of the seed, and run nothing.")
@click.pass_context
def simulate(
    ctx: click.Context,
    seed: int | None,
    runs: int | None,
    hours: float | None,
    minutes: float | None,
    plan_file: Path | None,
    out: Path,
    show: bool,
) -> None:
    """Run the real rollout, ledger, rules and sampler with a trainer in virtual time, first with faults, then without.

    The seed picks everything: rules, sizes, delays, failures, crashes. The same seed gives the same log, byte for byte.
    Exits with 1 at the first run in which something went wrong: the configuration is made smaller and written to a file
    that repeats it.

    \b
    Examples:
      groupstate simulate --seed 7
      groupstate simulate --seed 1000 --runs 500
      groupstate simulate --minutes 30
      groupstate simulate --plan simulate/seed-7.plan.toml
    """
    if plan_file is not None and (seed, runs, minutes) != (None, None, None):
        raise click.UsageError("--plan holds a configuration with its seed: leave the others out.", ctx)
    report = importlib.import_module("groupstate.simulate.report")
    files = importlib.import_module("groupstate.simulate.plan_file")
    if plan_file is not None:
        plan = files.read_plan(plan_file)
        todo = [plan if hours is None else plan.changed(hours=hours)]
    else:
        count = runs if runs is not None or minutes is not None else 1
        todo = report.plans(seed or 0, count, hours, None if minutes is None else minutes * 60)
    if show:
        click.echo(files.plan_text(next(iter(todo))), nl=False)
        return
    options = {"seed": seed, "runs": runs, "hours": hours, "minutes": minutes, "plan": plan_file}
    given = " ".join(f"--{name} {value}" for name, value in options.items() if value is not None)
    ctx.exit(report.main(iter(todo), options=given or "none", out=out, say=click.echo))
