"""Blocking twin of the API: `groupstate.sync.open_run`."""

from groupstate.runtime.sync import Run, open_run

__all__ = ["Run", "open_run"]
