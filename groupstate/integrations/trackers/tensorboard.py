"""TensorBoard's event files.

They are written by tensorboardX, which needs numpy and protobuf alone; to look at them takes TensorBoard itself,
installed wherever one looks.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from groupstate.core.arguments import seconds
from groupstate.errors import BadSettings
from groupstate.integrations.trackers.packages import needed, path_given

FLUSH_S = 10
"""Seconds after which what was logged is in the file at the latest."""


class TensorBoard:
    name = "tensorboard"

    def __init__(self, log_dir: str | os.PathLike[str], *, flush_s: float = FLUSH_S) -> None:
        """
        Args:
            log_dir: folder of the event files of this run.
            flush_s: seconds after which what was logged is in the file.

        Raises:
            MissingExtra: tensorboardX isn't installed.
            BadSettings: what is given can't be.
        """
        self._package = needed("tensorboardX", tracker="TensorBoard", package="tensorboardX", extra="tensorboard")
        self._log_dir = path_given("log_dir", log_dir)
        self._flush_s = seconds("flush_s", flush_s, error=BadSettings)
        self._writer: Any = None
        self._step = 0

    def start(self) -> None:
        self._writer = self._package.SummaryWriter(self._log_dir, flush_secs=self._flush_s)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        writer = self._open()
        self._step = step
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """TensorBoard has no tables: the new rows become a text of their step, which is shown as one."""
        lines = [" | ".join(map(str, line)) for line in (columns, ["---"] * len(columns), *rows)]
        self._open().add_text(name, "\n".join(f"| {line} |" for line in lines), step)

    def finish(self, exit_code: int) -> None:
        """Event files have no end, so the code is a number like others."""
        writer = self._open()
        writer.add_scalar("status/exit_code", exit_code, self._step)
        writer.close()

    def _open(self) -> Any:
        if self._writer is None:
            self.start()
        return self._writer
