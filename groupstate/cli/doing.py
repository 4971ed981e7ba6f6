"""The commands that run something: scenarios and the demo. What they need is imported only when they are called."""

import importlib
from pathlib import Path

import click

from groupstate.cli.places import Place
from groupstate.cli.runs import records_of
from groupstate.errors import MissingExtra
from groupstate.inspect.writing import as_bad_input


@click.command(short_help="Run scenario files, or make one from a run.")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="PATH...")
@click.option("--schema", is_flag=True, help="Print the form of scenario files as JSON schema, and run nothing.")
@click.option(
    "--from", "run", type=click.Path(path_type=Path), default=None, metavar="RUN", help="Make one of this run."
)
@click.option("--group", "group_id", default=None, metavar="ID", help="The group whose decision it repeats.")
@click.option("--until", type=click.IntRange(min=1), default=None, metavar="SEQ", help="The last event that counts.")
@click.option(
    "--selection", default=None, metavar="MODULE:FUNCTION", help="Where the run's own selection rule is found now."
)
@click.option("--out", type=Place(path_type=Path, dir_okay=False), default=None, help="Where to; else stdout.")
@click.pass_context
def scenario(
    ctx: click.Context,
    paths: tuple[Path, ...],
    schema: bool,
    run: Path | None,
    group_id: str | None,
    until: int | None,
    selection: str | None,
    out: Path | None,
) -> None:
    """Run scenario files, or all that lie in a directory, and compare what happens with what they expect.

    Exits with 0 if all expectations hold, 1 if a step differs (the first one is printed, expected and actual) or
    couldn't be done, 2 if a file is malformed. Every file is run, whatever the others are.

    With --from RUN --group ID nothing is run of these: the smallest scenario is written in which the same is decided
    about that group as in the run, up to event --until, or else until it left. Exits with 2 if there is none. A
    selection rule that was in the script that was run, which the log names __main__:rule, is named by --selection.

    \b
    Examples:
      groupstate scenario tests/scenarios
      groupstate scenario stale.toml refill.toml
      groupstate scenario --from runs/demo --group g17 --out g17.toml
      groupstate scenario --schema > scenario.schema.json
    """
    if schema:
        click.echo(importlib.import_module("groupstate.simulate.schema").text(), nl=False)
        return
    if run is not None:
        if paths or group_id is None:
            raise click.UsageError("--from RUN makes a scenario: it needs --group ID, and no PATH.", ctx)
        _from_run(run, group_id, until, selection, out)
        return
    if (group_id, until, selection, out) != (None, None, None, None):
        raise click.UsageError("--group, --until, --selection and --out belong to --from RUN.", ctx)
    if not paths:
        raise click.UsageError("Missing argument 'PATH...'.", ctx)
    ctx.exit(importlib.import_module("groupstate.simulate.scenario").main_paths(paths))


def _from_run(run: Path, group_id: str, until: int | None, selection: str | None, out: Path | None) -> None:
    records_of(run)  # for its error, where this is no run
    found = importlib.import_module("groupstate.simulate.reproduce").reproduced_run(
        run, group_id, until, selection=selection
    )
    if out is None:
        click.echo(found.text, nl=False)
        return
    with as_bad_input(out):
        out.write_text(found.text, encoding="utf-8")
    click.echo(f"{out}: {found.steps} steps of the {found.told} of the run; run it with: groupstate scenario {out}")


@click.command(short_help="Train a small model through the event log, in a minute or two.")
@click.option("--mode", type=click.Choice(["sync", "async"]), default=None, help="Of the rules; async by default.")
@click.option("--steps", type=click.IntRange(min=1), default=None, help="Trainer steps; the recipe's by default.")
@click.option("--seed", type=int, default=None, help="Of the tasks, the model and the sampling; 0 by default.")
@click.option("--out", type=Place(path_type=Path), default=None, help="Run directory; runs/demo by default.")
@click.option("--engine", type=click.Choice(["torch", "vllm"]), default=None, help="Who generates; torch by default.")
@click.option("--resume", is_flag=True, help="Go on with a run that was stopped or killed.")
@click.pass_context
def demo(
    ctx: click.Context,
    mode: str | None,
    steps: int | None,
    seed: int | None,
    out: Path | None,
    engine: str | None,
    resume: bool,
) -> None:
    """Train a small language model on the CPU by GRPO, through the event log. Takes one to two minutes.

    Needs the extra 'demo' (from a clone: pip install '.[demo]'). With --engine vllm a tiny Qwen2 is trained on what a
    real vLLM generates; that needs vLLM and transformers too, and takes some minutes on a CPU. It can be killed at any
    time and goes on with --resume; the log that it leaves is one to look at with show, log, why and check.

    \b
    Examples:
      groupstate demo
      groupstate demo --mode sync --steps 20 --out runs/short
      groupstate demo --resume --out runs/short
    """
    try:
        module = importlib.import_module("groupstate.demo.main")
    except ImportError as error:
        raise MissingExtra("groupstate demo", error.name or "torch", "demo") from error
    result = module.demo(mode=mode, steps=steps, seed=seed, engine=engine, out=out, resume=resume)
    ctx.exit(result if isinstance(result, int) else 0)
