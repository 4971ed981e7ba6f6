"""The commands that run something: scenarios and the demo. What they need is imported only when they are called."""

import importlib
from pathlib import Path

import click

from groupstate.errors import MissingExtra


@click.command(short_help="Run scenario files.")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="PATH...")
@click.option("--schema", is_flag=True, help="Print the form of scenario files as JSON schema, and run nothing.")
@click.pass_context
def scenario(ctx: click.Context, paths: tuple[Path, ...], schema: bool) -> None:
    """Run scenario files, or all that lie in a directory, and compare what happens with what they expect.

    Exits with 0 if all expectations hold, 1 if a step differs (the first one is printed, expected and actual) or
    couldn't be done, 2 if a file is malformed. Every file is run, whatever the others are.

    \b
    Examples:
      groupstate scenario tests/scenarios
      groupstate scenario stale.toml refill.toml
      groupstate scenario --schema > scenario.schema.json
    """
    if schema:
        click.echo(importlib.import_module("groupstate.simulate.schema").text(), nl=False)
        return
    if not paths:
        raise click.UsageError("Missing argument 'PATH...'.", ctx)
    ctx.exit(importlib.import_module("groupstate.simulate.scenario").main_paths(paths))


@click.command(short_help="Train a small model through the event log, in a minute or two.")
@click.option("--mode", type=click.Choice(["sync", "async"]), default=None, help="Of the rules; async by default.")
@click.option("--steps", type=click.IntRange(min=1), default=None, help="Trainer steps; the recipe's by default.")
@click.option("--seed", type=int, default=None, help="Of the tasks, the model and the sampling; 0 by default.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Run directory; runs/demo by default.")
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
