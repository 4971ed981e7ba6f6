"""The command line. Each command is thin: a function of another part, and how its value is shown.

Rule 1: 0 is well, 1 is what was looked for and found wrong, 2 is what can't be done; errors are one text on stderr.
Rule 2: whoever reads the output may go at any time, as `head` does: a command that would write on ends then, with 0.
Rule 3: a terminal gets tables and colours, a pipe gets tabs and lines.
"""

import importlib
from typing import Any, Final

import click

from groupstate.errors import GroupstateError
from groupstate.version import VERSION

EXIT_CODES = """\b
Exit codes:
  0  done; `check`, `explore`, `report`: nothing is wrong; `scenario`: all expectations hold
  1  `check`, `explore`, `report`: something is wrong; `scenario`: an expectation doesn't hold
  2  it can't be done: a bad option, a path that is no run, a damaged log, an unknown group
`run` has more of them, see its own help.
"""


COMMANDS: Final = {
    "run": "collecting.run",
    "log": "looking.log",
    "show": "looking.show",
    "diff": "traveling.diff_command",
    "stats": "stats.stats_command",
    "why": "looking.why",
    "check": "looking.check",
    "report": "reporting.report",
    "view": "reporting.view",
    "trace": "exporting.trace",
    "export": "exporting.export",
    "repair": "repairing.repair",
    "disk": "repairing.disk",
    "scenario": "doing.scenario",
    "explore": "exploring.explore",
    "simulate": "simulating.simulate",
    "whatif": "supposing.whatif",
    "demo": "doing.demo",
}
"""Command -> module and function below this package, imported when it is called: all would take twice as long."""


class Commands(click.Group):
    """Finds the commands, and turns groupstate's errors into one text and exit code 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name].split(".")
        command: click.Command = getattr(importlib.import_module(f"groupstate.cli.{module}"), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            meant = importlib.import_module("groupstate.core.near").meant(name, COMMANDS)
            ctx.fail(f"No such command {name!r}{meant}.")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except GroupstateError as error:
            click.echo(f"groupstate: {error}", err=True)
            ctx.exit(2)
        except OSError as error:
            if isinstance(error, BrokenPipeError) and importlib.import_module("groupstate.cli.output").nobody_reads():
                ctx.exit(0)
            click.echo(f"groupstate: {error}", err=True)
            ctx.exit(2)
        except KeyboardInterrupt:
            ctx.exit(130)


@click.group(cls=Commands, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="groupstate")
def main() -> None:
    """Prompt groups of an RL post-training run: look at a run, check its log, try rules out.

    RUN is a run directory, the one that holds run.json. Commands that look at a run work while it is being
    written, and show only what can't be lost any more.

    \b
    Examples:
      groupstate show runs/demo
      groupstate log runs/demo --group g17
      groupstate why runs/demo g17
      groupstate check runs/demo
      groupstate view runs/demo
    """
