"""Functions that users give: whether they can be called as they will be.

Rule: only what can be seen without calling them; one that hides what it takes is trusted.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from groupstate.core.arguments import shown


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await: an `async def`, an object whose `__call__` is one, or a
    `functools.partial` of either."""
    function = inspect.unwrap(_inner(function))
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _is_lambda(function: Any) -> bool:
    """It may hand on to a function that is async, which shows only when it is called."""
    return getattr(_inner(function), "__name__", "") == "<lambda>"


def session_problem(function: Any) -> str:
    """Why it can't be run as a session, as the end of a sentence about it; empty if nothing is wrong."""
    name = _name(function)
    write = f"write: async def {name if name.isidentifier() else 'session'}(ctx): ..."
    if not callable(function):
        return f"is no function; {write}"
    if isinstance(function, type):
        return "is a class; give an object of it that has an async __call__(ctx)"
    inner = _inner(function)
    if inspect.isasyncgenfunction(inner) or inspect.isasyncgenfunction(type(inner).__call__):
        return f"yields, and a session returns its trajectories, all at once; {write}"
    if not is_async(function) and not _is_lambda(function):
        return f"is not async; {write}"
    misfit = call_problem(function, "ctx")
    return f"{misfit}; {write}" if misfit else ""


def call_problem(function: Callable[..., Any], *names: str) -> str:
    """Why it can't be called with these arguments, by position, as the end of a sentence; empty if it can, as far as
    can be seen."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*names)
    except TypeError as error:
        return f"can't be called with ({', '.join(names)}), since it takes {signature}: {error}"
    return ""


def named(function: Any) -> str:
    """What to call it in a text."""
    return repr(_name(function)) if _name(function) else shown(function)


def _name(function: Any) -> str:
    """The name that it was written with; empty for what is no function."""
    name = getattr(_inner(function), "__name__", "")
    return name if isinstance(name, str) else ""


def _inner(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function
