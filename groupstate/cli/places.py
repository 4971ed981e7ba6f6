"""Where a command writes to: what may be named, and what is said of a place that is taken."""

import contextlib
from collections.abc import Iterator
from typing import Any

import click

from groupstate.errors import BadInput
from groupstate.inspect.writing import Taken

FORCE = click.option("--force", is_flag=True, help="Replace what an earlier call wrote there.")


class Place(click.Path):
    """A path to write to. No command writes to standard output in its place, so `-` isn't taken for a file's name."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "-":
            self.fail("'-' is no place to write to; name one ('./-' where it is to be called so).", param, ctx)
        return super().convert(value, param, ctx)


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
