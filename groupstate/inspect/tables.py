"""A run as tidy tables in Parquet files, made in one pass over its log.

Rule 1: a folder with tables is there whole or not at all, and its `export.json` is what marks it.
Rule 2: rows are written in groups as they come; what is held is what is open, and the rows of one group.
"""

import os
from collections.abc import Callable, Iterable
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import attrs
import msgspec

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.errors import BadInput, MissingExtra
from groupstate.inspect.columns import METRICS, TABLES, TEXT, TEXTS, TIME, Column
from groupstate.inspect.lives import Attempt, Draw, Life, Listener, Lives, Version
from groupstate.inspect.words import KINDS, time_of
from groupstate.inspect.writing import whole_folder
from groupstate.version import VERSION

MARKER: Final = "export.json"
FORMAT: Final = "groupstate-tables"
FORMAT_VERSION: Final = 1

SAME_FIELDS_MAX: Final = 256
"""Of each kind, so many events are remembered as JSON: most say the same as another, such as the same worker."""

ROW_GROUP_ROWS: Final = 32_768
"""Rows that are gathered before they are written. A row of `sessions` takes under a kilobyte until then."""

LOOKED_AT: Final = 256
"""Events after which it is looked whether so many rows have gathered."""

Row = tuple[Any, ...]


@attrs.frozen
class Written:
    path: str
    first_seq: int
    last_seq: int
    """Events of the log that the tables tell of."""
    rows: dict[str, int]
    """By table."""


def write_tables(
    records: Iterable[ev.Record], folder: str | os.PathLike[str], base: Book | None = None, *, overwrite: bool = False
) -> Written:
    """Write the tables of a log to a folder, one Parquet file each (`groupstate.inspect.columns`).

    Args:
        base: the book before the first of the records; None where they are all that there were.
        overwrite: the folder may hold tables that an earlier call wrote; anything else is never replaced.

    Raises:
        MissingExtra: pyarrow isn't installed.
        BadInput: no records, or the folder can't be written.
        LogError: the log can't be read, or isn't one that a run wrote. Nothing is left then.
    """
    parquet = _Parquet()
    target = Path(folder)
    with whole_folder(target, MARKER, overwrite=overwrite) as beside:
        files = {name: parquet.file(beside / f"{name}.parquet", columns) for name, columns in TABLES.items()}
        try:
            tables = _Tables(files, base)
            first, last = tables.take(records)
        finally:
            for file in files.values():
                file.close()
        written = Written(str(target), first, last, {name: file.rows for name, file in files.items()})
        (beside / MARKER).write_bytes(msgspec.json.format(msgspec.json.encode(_about(tables, written)), indent=2))
    return written


def _about(tables: "_Tables", written: Written) -> dict[str, Any]:
    """What the marker says: of which run, and what the columns mean."""
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "groupstate": VERSION,
        "run_id": tables.run_id,
        "began": time_of(tables.origin_ns),
        "first_seq": written.first_seq,
        "last_seq": written.last_seq,
        "tables": {
            name: {
                "rows": written.rows[name],
                "columns": {column.name: {"type": column.kind, "about": column.about} for column in columns},
            }
            for name, columns in TABLES.items()
        },
    }


# Rows ------------------------------------------------------------------------------------------------


class _Tables(Listener):
    """Makes rows of records, in the order of the columns."""

    def __init__(self, files: "dict[str, _File]", base: Book | None) -> None:
        self.run_id = "" if base is None else base.run_id
        self.origin_ns = 0 if base is None else base.started_at_ns
        self._has_origin = base is not None
        self._files = tuple(files.values())
        self._add: dict[str, Callable[[Row], None]] = {name: file.gathered.append for name, file in files.items()}
        self._lives = Lives(self, base)

    def take(self, records: Iterable[ev.Record]) -> tuple[int, int]:
        """All records; gives the first and the last number."""
        first = last = 0
        feed, add = self._lives.feed, self._add["events"]
        for record in records:
            event, at_ns, last = record.event, record.at_ns, record.seq
            if not first:
                first = last
                if not self._has_origin:
                    self.origin_ns = at_ns
                if isinstance(event, ev.RunStarted):
                    self.run_id = event.run_id
            names, rest, kind = _EVENTS[type(event)]
            common = [None if name is None else getattr(event, name) for name in names]
            add((last, at_ns, (at_ns - self.origin_ns) / 1e9, kind, *common, rest(event)))
            feed(record, at_ns)
            if not last % LOOKED_AT:
                for file in self._files:
                    file.write_full()
        if not first:
            raise BadInput("there are no events to make tables of")
        self._lives.close()
        return first, last

    def _s(self, at_ns: int | None) -> float | None:
        return None if at_ns is None else (at_ns - self.origin_ns) / 1e9

    def attempt_ended(self, attempt: Attempt) -> None:
        life, rows = attempt.life, attempt.trajectories
        who = (life.group_id, attempt.session, attempt.attempt)
        begun_ns, ended_ns = attempt.at_ns, attempt.ended_ns
        prompt = response = environment = 0
        oldest = newest = None
        for row in rows:
            own = 0
            for start, stop in row.environment:
                own += stop - start
            least, most = _versions(row)
            if least is not None and (oldest is None or least < oldest):
                oldest = least
            if most is not None and (newest is None or most > newest):
                newest = most
            prompt += row.prompt_tokens
            response += row.response_tokens
            environment += own
            self._add["trajectories"](
                (
                    *who, row.index, life.partition, life.dataset, row.prompt_tokens, row.response_tokens, own,
                    least, most, row.metrics.get("reward"), row.metrics,
                )
            )  # fmt: skip
        metrics = rows[-1].metrics if rows else None
        self._add["sessions"](
            (
                *who, life.partition, life.dataset, attempt.seq or None, attempt.ended_seq, begun_ns, ended_ns,
                self._s(begun_ns), self._s(ended_ns), _between(begun_ns, ended_ns), attempt.outcome or None,
                attempt.message or None, attempt.retry_in_s, attempt.worker or None, attempt.observed,
                attempt.started_version, attempt.current_version if attempt.seq else None, len(rows), prompt, response,
                environment, oldest, newest, None if metrics is None else metrics.get("reward"), metrics,
                attempt.payload_bytes,
            )
        )  # fmt: skip

    def group_final(self, life: Life) -> None:
        rewards = life.rewards.values()
        evicted = life.evicted
        self._add["groups"](
            (
                life.group_id, life.partition, life.dataset, life.size, life.oversample, life.cause,
                life.source_position if life.source_position >= 0 else None, life.prompt_length, life.stamp,
                life.lineage, life.target_version, str(life.phase), life.submitted_seq, life.submitted_ns,
                self._s(life.submitted_ns), self._s(life.begun_ns), life.terminal_seq, self._s(life.terminal_ns),
                None if life.terminal is None else str(life.terminal), life.partial, life.cancelled, life.left_seq,
                self._s(life.left_ns), _between(life.submitted_ns, life.begun_ns),
                _between(life.begun_ns, life.terminal_ns),
                *_eviction(evicted, life.lag),
                life.batch, life.rows, life.response_tokens, life.dropped_tokens, life.finished_count,
                life.attempt_count, life.failed_count, life.requeue_count,
                sum(rewards) / len(rewards) if rewards else None, min(rewards, default=None),
                max(rewards, default=None),
            )
        )  # fmt: skip

    def draw_final(self, draw: Draw) -> None:
        waited_until_ns = draw.sampled_ns if draw.batch is not None else draw.ended_ns
        lags = draw.lags
        self._add["batches"](
            (
                draw.request or None, draw.batch, draw.partition, draw.size, draw.requested_seq or None,
                draw.requested_ns, self._s(draw.requested_ns), draw.requested_version, draw.sampled_seq,
                self._s(draw.sampled_ns), _between(draw.requested_ns, waited_until_ns), draw.weight_version,
                draw.outcome or None, draw.reason or None, draw.ended_seq, self._s(draw.ended_ns),
                _between(draw.sampled_ns, draw.ended_ns), len(draw.lives), sum(lags) / len(lags) if lags else None,
                max(lags, default=None), sum(life.rows for life in draw.lives),
                sum(life.response_tokens for life in draw.lives),
            )
        )  # fmt: skip
        for position, (life, lag) in enumerate(zip(draw.lives, lags, strict=False)):
            self._add["batch_groups"]((draw.batch, position, life.group_id, lag))

    def version_ended(self, version: Version) -> None:
        self._add["versions"](
            (
                version.weight_version, version.lineage, version.cause, version.seq, version.at_ns,
                self._s(version.at_ns), self._s(version.ended_ns), _between(version.at_ns, version.ended_ns),
            )
        )  # fmt: skip


def _versions(row: ev.TrajectoryRecord) -> tuple[int | None, int | None]:
    """The least and the greatest weight version of its tokens."""
    if len(row.spans) == 1:
        version = row.spans[0].weight_version
        return version, version
    versions = [span.weight_version for span in row.spans]
    return min(versions, default=None), max(versions, default=None)


def _eviction(evicted: ev.GroupEvicted | None, lag: int | None) -> Row:
    if evicted is None:
        return (None, lag, None, None, None, None)
    return (
        evicted.reasons, lag, evicted.credit, evicted.shared_value, evicted.metric or None, evicted.message or None,
    )  # fmt: skip


def _between(begun_ns: int | None, ended_ns: int | None) -> float | None:
    return None if begun_ns is None or ended_ns is None else (ended_ns - begun_ns) / 1e9


# Events ----------------------------------------------------------------------------------------------

_JSON: Final = msgspec.json.Encoder().encode
_COMMON: Final = ("group_id", "session", "attempt", "partition", "request", "batch", "weight_version", "lineage")
"""Fields that have a column of their own."""
_LEFT_OUT: Final = (*_COMMON, "trajectories")


def _rest(kind: type[ev.Event]) -> Callable[[Any], bytes]:
    """Gives the fields of an event that no column has, as JSON."""
    names = [name for name in kind.__struct_fields__ if name not in _LEFT_OUT]
    if not names:
        return lambda event: b"{}"
    # A tuple of all values; of one field as well.
    values = attrgetter(*names) if len(names) > 1 else lambda event: (getattr(event, names[0]),)
    refs = [name for name in names if name in ("prompt", "payload")]
    if not refs and not {"rules", "details"} & set(names):
        told = lru_cache(SAME_FIELDS_MAX)(lambda found: _JSON(dict(zip(names, found, strict=True))))
        return lambda event: told(values(event))

    def with_refs(event: Any) -> bytes:
        found = dict(zip(names, values(event), strict=True))
        for name in refs:
            if (ref := found[name]) is not None:
                found[name] = {"key": ref.key, "length": ref.length, "crc": ref.crc}
        return _JSON(found)

    return with_refs


_EVENTS: Final = {
    kind: (
        tuple(field if field in kind.__struct_fields__ else None for field in _COMMON),
        _rest(kind),
        name,
    )
    for name, kind in KINDS.items()
}
"""By kind: which of the common columns it has, what else it has, and its name."""


# Files -----------------------------------------------------------------------------------------------


class _Parquet:
    """pyarrow, imported where it is used."""

    def __init__(self) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise MissingExtra("writing tables", "pyarrow", "parquet") from error
        self.pa, self.pq = pa, pq

    def file(self, path: Path, columns: tuple[Column, ...]) -> "_File":
        return _File(self, path, columns)

    def type_of(self, column: Column) -> Any:
        pa = self.pa
        if column.kind == TIME:
            return pa.timestamp("us", tz="UTC")
        if column.kind == TEXTS:
            return pa.list_(pa.string())
        if column.kind == METRICS:
            return pa.map_(pa.string(), pa.float64())
        return pa.type_for_alias(column.kind)

    def array(self, column: Column, values: Iterable[Any]) -> Any:
        if column.kind == TIME:
            return self.pa.array([None if at is None else at // 1000 for at in values], self.type_of(column))
        if column.kind == METRICS:
            return self._maps(values)
        return self.pa.array(values, self.type_of(column))

    def _maps(self, values: Iterable[dict[str, float] | None]) -> Any:
        """Of its parts, which takes a fraction of the time that pairs take."""
        pa = self.pa
        offsets: list[int | None] = []
        names: list[str] = []
        numbers: list[float] = []
        for metrics in values:
            offsets.append(None if metrics is None else len(names))
            if metrics:
                names += metrics
                numbers += metrics.values()
        offsets.append(len(names))
        return pa.MapArray.from_arrays(
            pa.array(offsets, pa.int32()), pa.array(names, pa.string()), pa.array(numbers, pa.float64())
        )


class _File:
    """One table on its way to a file."""

    def __init__(self, parquet: _Parquet, path: Path, columns: tuple[Column, ...]) -> None:
        self.rows = 0
        self._parquet = parquet
        self._columns = columns
        about = {column.name: {"about": column.about.encode()} for column in columns}
        pa = parquet.pa
        self._schema = pa.schema(
            [pa.field(column.name, parquet.type_of(column), metadata=about[column.name]) for column in columns]
        )
        self.gathered: list[Row] = []
        # What repeats; numbers and JSON texts mostly don't, and are larger with a dictionary.
        repeated = [column.name for column in columns if column.kind == TEXT and column.name != "fields"]
        repeated += [f"{column.name}.key_value.key" for column in columns if column.kind == METRICS]
        self._writer = parquet.pq.ParquetWriter(
            path, self._schema, compression="zstd", use_dictionary=repeated or False
        )

    def write_full(self) -> None:
        """Write what has gathered, once it is enough for a row group."""
        if len(self.gathered) >= ROW_GROUP_ROWS:
            self._write()

    def _write(self) -> None:
        values = zip(*self.gathered, strict=True) if self.gathered else ([] for _ in self._columns)
        arrays = [self._parquet.array(column, found) for column, found in zip(self._columns, values, strict=True)]
        self._writer.write_table(self._parquet.pa.Table.from_arrays(arrays, schema=self._schema))
        self.rows += len(self.gathered)
        self.gathered.clear()

    def close(self) -> None:
        try:
            if self.gathered:
                self._write()
        finally:
            self._writer.close()
