"""Imports the packages that trackers need."""

import importlib
from typing import Any

from groupstate.errors import MissingExtra


def needed(module: str, *, tracker: str, package: str, extra: str) -> Any:
    """A module of a tracker's package.

    Raises:
        MissingExtra: it isn't installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.split(".")[0] != error.name.split(".")[0]:
            # It is there, and lacks something itself.
            raise
        raise MissingExtra(f"the tracker {tracker}", package, extra) from error
