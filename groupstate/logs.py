"""Structured logging that keeps quiet until it is asked for.

A program that has configured structlog gets groupstate's events through its own processors. Any other gets
them through the standard library's `logging`, where warnings show and the rest doesn't; `configure`, or
`GROUPSTATE_LOG` in the environment, shows more, and as JSON. structlog is imported as a run is opened or
something is said, since it brings in more than the rest of the library together.

Rule 1: an event's name is a constant, one for each thing; what differs is in its values.
Rule 2: what is about a session says group, session and attempt; what an event of the log stands for says its seq.
Rule 3: below a warning there is no text that came from a prompt, an answer or an error.
"""

import contextlib
import contextvars
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any, Final, TextIO

VARIABLE: Final = "GROUPSTATE_LOG"
"""What it may hold: a level, `json`, or both with a comma between them."""

LEVELS: Final = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_hushed: contextvars.ContextVar[bool] = contextvars.ContextVar("groupstate.hushed", default=False)


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Say nothing in the block: what happens in it is played, and concerns nobody."""
    token = _hushed.set(True)
    try:
        yield
    finally:
        _hushed.reset(token)


_shown: logging.Handler | None = None
"""What `configure` has events shown by."""

_as_json = False


def configure(*, json: bool = False, level: str = "info", stream: TextIO | None = None) -> None:
    """Show events on a stream, for a program that configures neither structlog nor `logging` for them.

    Called again it replaces what was said before. Where the program has configured structlog it changes nothing.

    Args:
        json: one JSON object a line, with time, level and logger; else text.
        level: `info`, `warning` or `error`.
        stream: None is standard error.

    Raises:
        ValueError: no such level.
    """
    global _shown, _as_json
    if level not in LEVELS:
        raise ValueError(f"level is {level!r}; it must be one of {', '.join(LEVELS)}")
    library = logging.getLogger("groupstate")
    if _shown is not None:
        library.removeHandler(_shown)
    _shown, _as_json = logging.StreamHandler(stream), json
    _shown.setFormatter(logging.Formatter("%(message)s" if json else "%(asctime)s %(name)s %(message)s"))
    library.addHandler(_shown)
    library.setLevel(LEVELS[level])
    # Or a program that has a handler of its own at the root would see everything twice.
    library.propagate = False


def unconfigure() -> None:
    """Undo `configure`."""
    global _shown, _as_json
    library = logging.getLogger("groupstate")
    if _shown is not None:
        library.removeHandler(_shown)
    library.setLevel(logging.NOTSET)
    library.propagate = True
    _shown, _as_json = None, False


def configure_by(value: str) -> None:
    """Configure as the environment says; a value that isn't understood is told, and shows warnings as before."""
    words = {word.strip().lower() for word in value.split(",") if word.strip()}
    levels = words & LEVELS.keys()
    if words - LEVELS.keys() - {"json", "text"} or len(levels) > 1 or {"json", "text"} <= words:
        known = ", ".join((*LEVELS, "json", "text"))
        Logger("groupstate.logs").warning("the environment's log setting isn't understood", value=value, known=known)
    elif words:
        configure(json="json" in words, level=levels.pop() if levels else "info")


class Logger:
    """Stands for the logger of a module; decides at each call where it goes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._standard = logging.getLogger(name)
        self._wrapped: dict[bool, Any] = {}
        """As text, and as JSON."""

    def info(self, event: str, **values: Any) -> None:
        if (target := self._target(logging.INFO)) is not None:
            target.info(event, **values)

    def warning(self, event: str, **values: Any) -> None:
        if (target := self._target(logging.WARNING)) is not None:
            target.warning(event, **values)

    def error(self, event: str, **values: Any) -> None:
        if (target := self._target(logging.ERROR)) is not None:
            target.error(event, **values)

    def _target(self, level: int) -> Any:
        if _hushed.get():
            return None
        if "structlog" in sys.modules:
            # By the statement, which waits for another thread that imports it in this moment: half of it is there.
            import structlog

            if structlog.is_configured():
                return structlog.get_logger(self._name)
        if not self._standard.isEnabledFor(level):
            return None
        if _as_json not in self._wrapped:
            self._wrapped[_as_json] = _wrapped(self._standard, _as_json)
        return self._wrapped[_as_json]


def prepare() -> None:
    """Load what the first line of a log needs, while there is room: once a process has no file descriptor left, no
    module can be loaded, and a line that says so would itself fail."""
    import structlog  # noqa: F401


def _wrapped(standard: logging.Logger, as_json: bool) -> Any:
    import structlog

    processors: list[Any] = [structlog.stdlib.add_log_level, structlog.processors.format_exc_info]
    if as_json:
        processors += [
            structlog.stdlib.add_logger_name,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ]
    else:
        processors.append(structlog.processors.KeyValueRenderer(key_order=["event"]))
    return structlog.wrap_logger(standard, processors=processors, wrapper_class=structlog.stdlib.BoundLogger)


if VARIABLE in os.environ:
    configure_by(os.environ[VARIABLE])
