"""Structured logging that keeps quiet until it is asked for.

A program that has configured structlog gets groupstate's events through its own processors. Any other gets
them through the standard library's `logging`, where warnings show and the rest doesn't. structlog is imported
only when something is said, since it brings in more than the rest of the library together.
"""

import contextlib
import contextvars
import logging
import sys
from collections.abc import Iterator
from typing import Any

_hushed: contextvars.ContextVar[bool] = contextvars.ContextVar("groupstate.hushed", default=False)


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Say nothing in the block: what happens in it is played, and concerns nobody."""
    token = _hushed.set(True)
    try:
        yield
    finally:
        _hushed.reset(token)


class Logger:
    """Stands for the logger of a module; decides at each call where it goes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._standard = logging.getLogger(name)
        self._wrapped: Any = None

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
        structlog = sys.modules.get("structlog")
        if structlog is not None and structlog.is_configured():
            return structlog.get_logger(self._name)
        if not self._standard.isEnabledFor(level):
            return None
        if self._wrapped is None:
            self._wrapped = _wrapped(self._standard)
        return self._wrapped


def _wrapped(standard: logging.Logger) -> Any:
    import structlog

    return structlog.wrap_logger(
        standard,
        processors=(
            structlog.stdlib.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ),
        wrapper_class=structlog.stdlib.BoundLogger,
    )
