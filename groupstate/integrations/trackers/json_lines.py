"""A file with one JSON object a line, for whoever reads numbers with tools of their own.

| line | what it is |
| --- | --- |
| `{"at_s": ..., "step": 3, "metrics": {"name": 1.5}}` | numbers of one step |
| `{"at_s": ..., "step": 3, "table": "name", "columns": [...], "rows": [[...]]}` | new rows of a table |
| `{"at_s": ..., "exit_code": 0}` | the end |

A line is written as a whole or, on a full disk, not at all. One that was left in pieces by a machine that went down
stays a line of its own: what is logged later begins behind it.

JSON has no numbers that are not finite, so these are the texts `"NaN"`, `"Infinity"` and `"-Infinity"`.
"""

import contextlib
import io
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupstate.integrations.trackers.packages import path_given


class JsonLines:
    name = "json lines"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """
        Args:
            path: made with its folders if it isn't there; what it holds already stays in front.

        Raises:
            BadSettings: it is no path.
        """
        self._path = Path(path_given("path", path))
        self._file: io.FileIO | None = None

    def start(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: somebody may follow the file, and the process may be killed.
        self._file = self._path.open("ab", buffering=0)
        if _ends_within_a_line(self._path):
            self._file.write(b"\n")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._write({"step": step, "metrics": {name: _plain(value) for name, value in metrics.items()}})

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        whole = [[_plain(value) for value in row] for row in rows]
        self._write({"step": step, "table": name, "columns": list(columns), "rows": whole})

    def finish(self, exit_code: int) -> None:
        try:
            self._write({"exit_code": exit_code})
        finally:
            if self._file is not None:
                self._file.close()

    def _write(self, told: Mapping[str, Any]) -> None:
        if self._file is None:
            self.start()
        assert self._file is not None
        line = f"{json.dumps({'at_s': round(time.time(), 3), **told}, allow_nan=False)}\n".encode()
        begin = self._file.seek(0, os.SEEK_END) if self._file.seekable() else None
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            if begin is not None:
                # The error to tell is that of the line; devices have no size.
                with contextlib.suppress(OSError):
                    self._file.truncate(begin)
            raise


def _ends_within_a_line(path: Path) -> bool:
    """Its last line isn't whole."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
