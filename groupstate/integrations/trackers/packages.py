"""What trackers are made of: the packages that they need, and the paths that they are given."""

import importlib
import os
from typing import Any

from groupstate.core.arguments import shown
from groupstate.errors import BadSettings, MissingExtra


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


def path_given(name: str, value: Any) -> str:
    """A path as it was given, as text.

    Raises:
        BadSettings: it is none.
    """
    if isinstance(value, str | os.PathLike) and isinstance(text := os.fspath(value), str) and text:
        return text
    raise BadSettings(f"{name} is {shown(value)}; it must be a path")
