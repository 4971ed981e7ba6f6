"""Where the files of a run lie, and how to tell a run from any other directory.

runs/NAME/
    run.json                     marks the directory as a run; written last when a run is created
    log/00000000000000000001.seg events from 1 on
    log/head                     how far they are acknowledged
    log/lock                     who writes
    log/schema-*.json            names of the fields
    payloads/0000000001.pay      tokens and log-probabilities
"""

import datetime
import json
import os
import uuid

import attrs

from groupstate.errors import BadInput, NotARun, UnsupportedLog
from groupstate.log.disk import Disk, make_file, read_file

MARKER = "run.json"
FORMAT_NAME = "groupstate-run"
FORMAT_VERSION = 1

SEGMENT_SUFFIX = ".seg"


@attrs.frozen
class RunDir:
    """The paths of a run."""

    path: str

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> "RunDir":
        return cls(os.path.abspath(os.fspath(path)))

    @property
    def marker(self) -> str:
        return os.path.join(self.path, MARKER)

    @property
    def log(self) -> str:
        return os.path.join(self.path, "log")

    @property
    def head(self) -> str:
        return os.path.join(self.log, "head")

    @property
    def lock(self) -> str:
        return os.path.join(self.log, "lock")

    @property
    def payloads(self) -> str:
        return os.path.join(self.path, "payloads")

    def segment(self, first_seq: int) -> str:
        return os.path.join(self.log, f"{first_seq:020d}{SEGMENT_SUFFIX}")


LOG_ID_BYTES = 16


@attrs.frozen
class RunInfo:
    """What run.json says."""

    log_id: bytes
    created_ns: int

    def encode(self) -> bytes:
        created = datetime.datetime.fromtimestamp(self.created_ns // 1_000_000_000, datetime.UTC)
        fields = {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "log_id": self.log_id.hex(),
            "created": created.isoformat(),
            "created_ns": self.created_ns,
        }
        return json.dumps(fields, indent=2).encode() + b"\n"


def parse_log_id(log_id: str | None) -> bytes:
    """16 bytes from 32 hexadecimal digits, or random ones."""
    if log_id is None:
        return uuid.uuid4().bytes
    try:
        return uuid.UUID(hex=log_id).bytes
    except ValueError as error:
        raise BadInput(f"log_id {log_id!r} isn't an id; it must be 32 hexadecimal digits, as uuid4().hex is") from error


def write_run_info(disk: Disk, run: RunDir, info: RunInfo) -> None:
    make_file(disk, run.marker, info.encode())
    disk.fsync_dir(os.path.dirname(run.path))


def read_run_info(disk: Disk, run: RunDir) -> RunInfo:
    """What run.json says.

    Raises:
        NotARun: there is none here, or something else has that name.
        UnsupportedLog: a run of a later format.
    """
    try:
        data = read_file(disk, run.marker)
    except OSError as error:
        raise NotARun(_not_a_run_text(disk, run, error)) from error
    try:
        fields = json.loads(data)
        if fields["format"] != FORMAT_NAME:
            raise ValueError(f"its format is {fields['format']!r}")
        version = int(fields["version"])
        # What else a later format holds is its own affair.
        _check_version(run, version)
        info = RunInfo(bytes.fromhex(fields["log_id"]), int(fields["created_ns"]))
        if len(info.log_id) != LOG_ID_BYTES:
            raise ValueError(f"its log_id is {fields['log_id']!r}")
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise NotARun(
            f"{run.marker} isn't what groupstate writes: {error!r}. A run's {MARKER} holds "
            f"format ({FORMAT_NAME!r}), version, log_id and created_ns"
        ) from error
    return info


def _check_version(run: RunDir, version: int) -> None:
    if version != FORMAT_VERSION:
        raise UnsupportedLog(
            f"{run.path} is a run of format {version}; this version of groupstate reads format {FORMAT_VERSION}. "
            "Open it with the version that wrote it, or a later one"
        )


def _not_a_run_text(disk: Disk, run: RunDir, error: OSError) -> str:
    """Says what would have been right, from what lies around."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        return f"{run.marker} can't be read: {error}"
    if not disk.exists(run.path):
        return f"{run.path} doesn't exist; name a run directory, the one that holds {MARKER}"
    parent = RunDir(os.path.dirname(run.path))
    in_run = disk.exists(parent.marker)
    if in_run and run.path in (parent.marker, parent.log, parent.payloads):
        return f"{run.path} is a part of a run; name the run directory itself: {parent.path}"
    inside = _runs_inside(disk, run)
    if inside:
        return f"{run.path} holds runs and is none itself; name one of them: {', '.join(inside)}"
    where = f"The one that it lies in has: {parent.path}" if in_run else "A run directory is made when a run is created"
    return f"{run.path} is not a run directory: it has no {MARKER}. {where}"


def _runs_inside(disk: Disk, run: RunDir) -> list[str]:
    try:
        names = disk.listdir(run.path)
    except OSError:
        return []
    return [name for name in names if disk.exists(os.path.join(run.path, name, MARKER))]
