"""Accepted groups as a file: one row per trajectory, JSONL or Parquet.

Rule: the file is there whole or not at all. It is written beside its place, flushed, then named.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from groupstate.batch import Batch, BatchGroup, Row
from groupstate.core.trajectory import metrics_of
from groupstate.errors import BadInput, MissingExtra
from groupstate.inspect.writing import beside_of, remove_left_over

ROW_GROUP_ROWS = 4_096
"""Rows that a Parquet file gathers before it writes them, at most."""

ROW_GROUP_TOKENS = 500_000
"""Tokens that it gathers, at most but for the last row's: they take some hundred bytes each until then."""


class RowFile(Protocol):
    """A file of rows that isn't in its place yet."""

    def write(self, batch: Batch) -> int:
        """Add the rows of a batch; returns how many there were."""
        ...

    def finish(self) -> None:
        """Put the file in its place.

        Raises:
            BadInput: something has come to lie there, and it may not be overwritten.
        """
        ...

    def discard(self) -> None:
        """Leave nothing behind. Nothing happens after `finish`."""
        ...


def row_file(path: Path, *, overwrite: bool) -> RowFile:
    """
    Raises:
        BadInput: another ending, a file that is there already, or a directory that can't be written to.
    """
    kinds: dict[str, type[_JsonLines | _Parquet]] = {".jsonl": _JsonLines, ".parquet": _Parquet}
    kind = kinds.get(path.suffix.lower())
    if kind is None:
        what = "a folder" if path.is_dir() else "none by its name"
        raise BadInput(f"rows go to a .jsonl or a .parquet file, and {str(path)!r} is {what}")
    if path.is_dir() or (os.path.lexists(path) and not overwrite):
        raise BadInput(_taken(path))
    remove_left_over(path)
    try:
        return kind(path, beside_of(path), overwrite=overwrite)
    except OSError as error:
        raise BadInput(f"{path} can't be written: {error.strerror}") from error


def _taken(path: Path) -> str:
    if path.is_dir():
        return f"{path} is a directory; name a file in it"
    return f"{path} is there already; name another file, or pass --overwrite"


def rows_of(batch: Batch) -> Iterator[dict[str, Any]]:
    """The rows of a file, as JSON-like values."""
    for group in batch.groups:
        for row in group.rows():
            yield _row(group, row)


def _row(group: BatchGroup, row: Row) -> dict[str, Any]:
    trajectory = row.trajectory
    metrics = metrics_of(trajectory)
    return {
        "group_id": group.group_id,
        "session": row.session,
        "index": row.index,
        "group_size": group.size,
        "dataset": group.dataset,
        "prompt": None if group.prompt is None else group.prompt.content,
        "extra": {} if group.prompt is None else dict(group.prompt.extra),
        "response": trajectory.text,
        "reward": metrics.get("reward"),
        "metrics": metrics,
        "weight_version": row.weight_version,
        "prompt_ids": list(trajectory.prompt_ids),
        "response_ids": list(trajectory.response_ids),
        "log_probs": list(trajectory.log_probs),
        "environment": [list(part) for part in trajectory.environment],
        "spans": [[span.start, span.stop, span.weight_version] for span in trajectory.spans],
        "info": dict(trajectory.info),
    }


class _Named:
    """The way from beside into the place."""

    def __init__(self, path: Path, beside: Path, *, overwrite: bool) -> None:
        self._path = path
        self._beside = beside
        self._overwrite = overwrite
        self._file: IO[bytes] = beside.open("wb")

    def finish(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if self._overwrite:
            self._beside.replace(self._path)
        else:
            try:
                # Unlike a rename, a link doesn't replace what has come to lie there meanwhile.
                os.link(self._beside, self._path)
            except FileExistsError as error:
                raise BadInput(_taken(self._path)) from error
            self._beside.unlink()
        _flush_folder(self._path.parent)

    def discard(self) -> None:
        self._file.close()
        self._beside.unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _JsonLines(_Named):
    def write(self, batch: Batch) -> int:
        lines = [msgspec.json.encode(row) for row in rows_of(batch)]
        self._file.writelines(line + b"\n" for line in lines)
        return len(lines)


class _Parquet(_Named):
    """Prompts that aren't texts, `extra` and `info` are JSON texts, since their form differs from row to row."""

    def __init__(self, path: Path, beside: Path, *, overwrite: bool) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise MissingExtra(f"writing {path.name}", "pyarrow", "parquet") from error
        super().__init__(path, beside, overwrite=overwrite)
        pairs = pa.list_(pa.list_(pa.int64()))
        self._schema = pa.schema(
            {
                "group_id": pa.string(),
                "session": pa.int64(),
                "index": pa.int64(),
                "group_size": pa.int64(),
                "dataset": pa.string(),
                "prompt": pa.string(),
                "extra": pa.string(),
                "response": pa.string(),
                "reward": pa.float64(),
                "metrics": pa.map_(pa.string(), pa.float64()),
                "weight_version": pa.int64(),
                "prompt_ids": pa.list_(pa.int32()),
                "response_ids": pa.list_(pa.int32()),
                "log_probs": pa.list_(pa.float32()),
                "environment": pairs,
                "spans": pairs,
                "info": pa.string(),
            }
        )
        self._table_of = pa.Table.from_pylist
        self._writer = pq.ParquetWriter(self._file, self._schema)
        self._rows: list[dict[str, Any]] = []
        self._tokens = 0
        """Of these rows."""

    def write(self, batch: Batch) -> int:
        count = 0
        for row in rows_of(batch):
            count += 1
            self._rows.append(_flat(row))
            self._tokens += len(row["prompt_ids"]) + len(row["response_ids"])
            if len(self._rows) >= ROW_GROUP_ROWS or self._tokens >= ROW_GROUP_TOKENS:
                self._write_out()
        return count

    def finish(self) -> None:
        self._write_out()
        self._writer.close()
        super().finish()

    def discard(self) -> None:
        self._writer.close()
        super().discard()

    def _write_out(self) -> None:
        if self._rows:
            self._writer.write_table(self._table_of(self._rows, schema=self._schema))
            self._rows.clear()
            self._tokens = 0


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    prompt = row["prompt"]
    return {
        **row,
        "prompt": prompt if prompt is None or isinstance(prompt, str) else msgspec.json.encode(prompt).decode(),
        "extra": msgspec.json.encode(row["extra"]).decode(),
        "info": msgspec.json.encode(row["info"]).decode(),
        "metrics": list(row["metrics"].items()),
    }
