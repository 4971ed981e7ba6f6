"""The command line. Each command is thin: a function of another part, and how its value is shown.

Rule 1: 0 is well, 1 is what was looked for and found wrong, 2 is what can't be done; errors are one text on stderr.
Rule 2: a terminal gets tables and colours, a pipe gets tabs and lines.
"""

from typing import Any

import click

from groupstate.cli.collecting import run
from groupstate.cli.doing import demo, scenario
from groupstate.cli.exploring import explore
from groupstate.cli.exporting import export, trace
from groupstate.cli.looking import check, log, show, why
from groupstate.cli.repairing import disk, repair
from groupstate.cli.reporting import report, view
from groupstate.cli.simulating import simulate
from groupstate.cli.stats import stats_command
from groupstate.cli.supposing import whatif
from groupstate.cli.traveling import diff_command
from groupstate.errors import GroupstateError
from groupstate.version import VERSION

EXIT_CODES = """\b
Exit codes:
  0  done; `check`, `explore`, `report`: nothing is wrong; `scenario`: all expectations hold
  1  `check`, `explore`, `report`: something is wrong; `scenario`: an expectation doesn't hold
  2  it can't be done: a bad option, a path that is no run, a damaged log, an unknown group
`run` has more of them, see its own help.
"""


class Commands(click.Group):
    """Turns groupstate's errors into one text and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except GroupstateError as error:
            click.echo(f"groupstate: {error}", err=True)
            ctx.exit(2)
        except OSError as error:
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


for command in (
    run,
    log,
    show,
    diff_command,
    stats_command,
    why,
    check,
    report,
    view,
    trace,
    export,
    repair,
    disk,
    scenario,
    explore,
    simulate,
    whatif,
    demo,
):
    main.add_command(command)
