"""Structured logging that keeps quiet until it is asked for.

A program that has configured structlog gets groupstate's events through its own processors. Any other gets
them through the standard library's `logging`, where warnings show and the rest doesn't.
"""

import functools
import logging
from typing import Any

import structlog

_STANDARD_PROCESSORS = (
    structlog.stdlib.filter_by_level,
    structlog.stdlib.add_log_level,
    structlog.processors.format_exc_info,
    structlog.processors.KeyValueRenderer(key_order=["event"]),
)


class Logger:
    """Stands for the logger of a module; decides at each call where it goes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def info(self, event: str, **values: Any) -> None:
        _target(self._name, structlog.is_configured()).info(event, **values)

    def warning(self, event: str, **values: Any) -> None:
        _target(self._name, structlog.is_configured()).warning(event, **values)

    def error(self, event: str, **values: Any) -> None:
        _target(self._name, structlog.is_configured()).error(event, **values)


@functools.lru_cache(maxsize=64)
def _target(name: str, configured: bool) -> Any:
    if configured:
        return structlog.get_logger(name)
    return structlog.wrap_logger(
        logging.getLogger(name), processors=_STANDARD_PROCESSORS, wrapper_class=structlog.stdlib.BoundLogger
    )
