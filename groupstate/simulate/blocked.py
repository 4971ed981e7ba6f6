"""Where blocked tasks wait: what to tell of a deadlock, which is raised once, so that its cost doesn't matter."""

import asyncio
import linecache
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import anyio

TASKS_NAMED_MAX = 3
"""Of those that wait at the same line."""

PLACES_MAX = 20

LIBRARIES = tuple(
    f"{folder}{os.sep}" for folder in (Path(os.__file__).parent, Path(anyio.__file__).parent, Path(__file__).parents[1])
)
"""Folders of code that isn't the user's: Python's own, and of what a run stands on."""


def blocked_tasks(loop: asyncio.AbstractEventLoop) -> list[str]:
    """Of each line at which tasks wait, the innermost one of the user's own: its place, its text, and who waits there.

    Tasks of the libraries alone are told only where there are no others.
    """
    users: dict[str, list[str]] = defaultdict(list)
    others: dict[str, list[str]] = defaultdict(list)
    for task in asyncio.all_tasks(loop):
        frames = list(_frames(task.get_coro()))
        own = [frame for frame in frames if not frame.f_code.co_filename.startswith(LIBRARIES)]
        if own:
            users[_place(own[-1])].append(task.get_name())
        elif frames:
            others[_place(frames[-1])].append(task.get_name())
    told = [f"{_who(sorted(names))} waits at {place}" for place, names in sorted((users or others).items())]
    return told if len(told) <= PLACES_MAX else [*told[:PLACES_MAX], f"and at {len(told) - PLACES_MAX} places more"]


def _who(names: list[str]) -> str:
    if len(names) <= TASKS_NAMED_MAX:
        return ", ".join(names)
    return f"{', '.join(names[:TASKS_NAMED_MAX])} and {len(names) - TASKS_NAMED_MAX} more: each"


def _place(frame: FrameType) -> str:
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{file}:{line} in {frame.f_code.co_name}: {linecache.getline(file, line).strip()}"


def _frames(awaited: Any) -> Iterator[FrameType]:
    """Of coroutines and generators that await each other, outermost first."""
    while awaited is not None:
        for kind, then in (("cr", "await"), ("gi", "yieldfrom"), ("ag", "await")):
            if hasattr(awaited, f"{kind}_frame"):
                frame = getattr(awaited, f"{kind}_frame")
                if frame is not None:
                    yield frame
                awaited = getattr(awaited, f"{kind}_{then}")
                break
        else:
            return
