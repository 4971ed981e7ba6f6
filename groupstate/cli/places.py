"""What is said of a place to write to that is taken."""

import contextlib
from collections.abc import Iterator

import click

from groupstate.errors import BadInput
from groupstate.inspect.writing import Taken

FORCE = click.option("--force", is_flag=True, help="Replace what an earlier call wrote there.")


@contextlib.contextmanager
def force_told() -> Iterator[None]:
    """Say of a place that is taken what can be done about it on the command line.

    Raises:
        BadInput: it is taken.
    """
    try:
        yield
    except Taken as error:
        raise BadInput(f"{error.path} is there already; name another, or pass --force") from error
