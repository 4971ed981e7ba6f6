"""Copies of golden logs, changed as another version would have written them."""

import gzip
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from groupstate.core.snapshot import STATE
from groupstate.log.disk import OsDisk
from groupstate.log.frames import HEADER_BYTES, build_frame, checksum_seed, walk
from groupstate.log.rundir import RunDir, read_run_info
from groupstate.log.snapshots import encode_snapshot, list_snapshots, read_snapshot, snapshot_path


def log_id(path: Path) -> bytes:
    return read_run_info(OsDisk(), RunDir.at(path)).log_id


def segments(path: Path) -> list[Path]:
    return sorted([*(path / "log").glob("*.seg"), *(path / "log").glob("*.seg.gz")])


def unpacked(file: Path) -> bytes:
    return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()


def put(file: Path, data: bytes) -> None:
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)


def change_events(path: Path, change: Callable[[list[Any]], list[Any]]) -> None:
    """Every event of a log, as an array, made another."""
    seed = checksum_seed(log_id(path))
    for file in segments(path):
        data = unpacked(file)
        whole = data[:HEADER_BYTES]
        for frame in walk(memoryview(data), HEADER_BYTES, seed, int(file.name.partition(".")[0])):
            records = msgspec.msgpack.decode(data[frame.body_start : frame.stop])
            changed = [[seq, at_ns, change(event)] for seq, at_ns, event in records]
            whole += build_frame(msgspec.msgpack.encode(changed), frame.count, frame.first_seq, seed)
        put(file, whole)


def set_format(data: bytes, form: int) -> bytes:
    """A segment or payload file whose header names another format."""
    header = data[:8] + struct.pack("<H", form) + data[10:60]
    return header + struct.pack("<I", zlib.crc32(header)) + data[64:]


def set_snapshot_format(data: bytes, form: int, packing: int = 1) -> bytes:
    header = data[:8] + struct.pack("<HB", form, packing) + data[11:76]
    return header + struct.pack("<I", zlib.crc32(header)) + data[80:]


def change_states(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The state in every snapshot made another."""
    disk, run, owner = OsDisk(), RunDir.at(path), log_id(path)
    for seq in list_snapshots(disk, run):
        found = read_snapshot(disk, run, owner, seq)
        assert found is not None
        parts = _changed(found.parts(), change)
        Path(snapshot_path(run, seq)).write_bytes(encode_snapshot(owner, found.info, parts))


def _changed(
    parts: Iterator[tuple[int, bytes]], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> Iterator[tuple[int, bytes]]:
    for kind, data in parts:
        if kind == STATE:
            yield kind, msgspec.msgpack.encode(change(msgspec.msgpack.decode(data, strict=False)))
        else:
            yield kind, data


def change_marker(path: Path, **fields: Any) -> None:
    marker = path / "run.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), **fields}))
