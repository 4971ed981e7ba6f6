"""A command imports what it needs, and no other command."""

import subprocess
import sys

import click
import pytest

from groupstate.cli import COMMANDS, main


@pytest.mark.parametrize("name", COMMANDS)
def test_each_name_is_that_of_its_command(name: str) -> None:
    command = main.get_command(click.Context(main), name)

    assert command is not None
    assert command.name == name
    assert command.get_short_help_str()


def test_a_command_leaves_the_others_alone() -> None:
    code = (
        "import sys\nfrom groupstate.cli import main\nmain(['show', '--help'], standalone_mode=False)\n"
        "print(*(name for name in sys.modules if name.startswith('groupstate.cli.')))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    loaded = set(told.splitlines()[-1].split())
    assert "groupstate.cli.looking" in loaded
    assert not loaded & {"groupstate.cli.exporting", "groupstate.cli.reporting", "groupstate.cli.simulating"}
