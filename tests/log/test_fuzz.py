"""Readers of files, fed with bytes that nobody wrote: an error of the library's own, or what was written.

Ten minutes of it: `python -m pytest tests/log/test_fuzz.py --hypothesis-profile=fuzz --timeout=0`.
"""

import asyncio
import gzip
import json
import zlib

from hypothesis import example, given
from hypothesis import strategies as st

from groupstate.core.folding import replayed
from groupstate.core.rules import Rules
from groupstate.core.snapshot import decoded
from groupstate.errors import GroupstateError
from groupstate.log.archive import archive_path, read_segment
from groupstate.log.codec import decode
from groupstate.log.frames import (
    HEADER_BYTES,
    build_frame,
    checksum_seed,
    claimed_stop,
    find_frame_behind,
    parse_header,
    walk,
)
from groupstate.log.head import read_head
from groupstate.log.payload_files import parse_file_header, scan_file
from groupstate.log.reading import beginning, first_event, read_book, read_log, snapshot_digests
from groupstate.log.repair import diagnose
from groupstate.log.retention import readers
from groupstate.log.rundir import RunDir, read_run_info
from groupstate.log.snapshots import Snapshot, SnapshotInfo, encode_snapshot, read_info, read_snapshot
from groupstate.runtime.ledger import Ledger
from groupstate.runtime.recovery import load
from groupstate.simulate.faults import FaultyDisk

from .retiring import OPTIONS, told
from .scenes import LOG_ID, RUN, close, reopen

RUN_DIR = RunDir.at(RUN)
ID = bytes.fromhex(LOG_ID)
SEED = checksum_seed(ID)


def whole(keep):
    disk = FaultyDisk()
    kept = asyncio.run(told(disk, keep, count=7))
    return disk, kept.attempted, [replayed(kept.attempted[:seq]).digest() for seq in range(kept.acknowledged + 1)]


WHOLE = {keep: whole(keep) for keep in ("archive", 1)}
FILES = {keep: sorted(disk.sizes(RUN)) for keep, (disk, _, _) in WHOLE.items()}


@st.composite
def mangled(draw, data):
    """Bytes that were these: cut, with others put in, parts moved, doubled or turned around."""
    data = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at, other = draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))
        start, stop = min(at, other), max(at, other)
        how = draw(st.sampled_from(["flip", "cut", "remove", "insert", "overwrite", "double", "zero"]))
        if how == "flip" and at < len(data):
            data[at] ^= draw(st.integers(1, 255))
        elif how == "cut":
            del data[at:]
        elif how == "remove":
            del data[start:stop]
        elif how == "double":
            data[stop:stop] = data[start:stop]
        elif how == "zero":
            data[start:stop] = bytes(stop - start)
        else:
            new = draw(st.binary(max_size=80))
            data[at : at + (len(new) if how == "overwrite" else 0)] = new
    return bytes(data)


@st.composite
def damaged_runs(draw):
    """A run of which one or two files aren't as they were written. Also which files."""
    keep = draw(st.sampled_from(["archive", 1]))
    disk = WHOLE[keep][0].copy()
    paths = draw(st.lists(st.sampled_from(FILES[keep]), min_size=1, max_size=2, unique=True))
    for path in paths:
        disk.replace(path, draw(mangled(disk.read(path)) | st.binary(max_size=200)))
    return keep, disk, paths


@given(damaged_runs())
def test_a_run_with_bytes_that_nobody_wrote_is_read_right_or_refused(damaged):
    keep, disk, paths = damaged
    _, known, digests = WHOLE[keep]
    reader = disk.copy()
    # Where the watermark went as well, a lost end can't be told from one that was never written.
    spoiled = any(path.endswith(("/head", "/run.json")) for path in paths)
    try:
        log = reopen(disk, keep=keep, **OPTIONS)
    except GroupstateError:
        log = None
    if log is not None:
        ledger = Ledger(log, Rules())
        try:
            load(ledger)
            assert spoiled or ledger.book.last_seq == len(known)
            assert ledger.book.digest() == digests[ledger.book.last_seq]
        except GroupstateError:
            pass
        asyncio.run(close(log))
    for look in (_reads, _reads_books, _diagnoses):
        try:
            look(reader, known, digests)
        except GroupstateError:
            pass


def _reads(disk, known, digests):
    first = first_event(RUN, disk=disk)
    events = list(read_log(RUN, first, disk=disk))
    assert events == known[first - 1 : first - 1 + len(events)]


def _reads_books(disk, known, digests):
    book = read_book(RUN, disk=disk)
    assert book is None or book.digest() == digests[book.last_seq]
    assert all(digests[seq] == digest for seq, digest in snapshot_digests(RUN, disk=disk).items())
    beginning(RUN, disk=disk)


def _diagnoses(disk, known, digests):
    diagnose(RUN, disk=disk)


# Each reader by itself, on any bytes ----------------------------------------------------------------------


def holding(path, data):
    disk = FaultyDisk()
    disk.makedirs(RUN_DIR.log)
    disk.makedirs(f"{RUN}/payloads")
    disk.replace(path, data)
    return disk


SEGMENT = WHOLE["archive"][0].read(
    RUN_DIR.segment(max(map(int, [name[-24:-4] for name in FILES["archive"] if name.endswith(".seg")])))
)


@given(st.binary(max_size=300) | mangled(SEGMENT))
def test_a_segment_of_any_bytes_has_frames_or_none(data):
    view = memoryview(data)
    try:
        parse_header(data, "a segment")
    except GroupstateError:
        pass
    for frame in walk(view, min(HEADER_BYTES, len(data)), SEED, 1):
        assert frame.stop <= len(data)
    find_frame_behind(view, 0, SEED)
    claimed_stop(view, 0)


@given(st.binary(max_size=200))
def test_a_good_frame_may_hold_any_body(body):
    (frame,) = walk(memoryview(build_frame(body, 1, 1, SEED)), 0, SEED, 1)
    try:
        decode(memoryview(body), "a frame")
    except GroupstateError:
        pass
    assert frame.last_seq == 1


@given(st.binary(max_size=100))
def test_a_watermark_of_any_bytes_is_refused_or_none(data):
    try:
        assert read_head(holding(RUN_DIR.head, data), RUN_DIR.head, SEED) is None
    except GroupstateError:
        pass


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["format", "version", "log_id", "created_ns", "first_seq", "pid", "started", "host", "boot_id"])


def as_json(value):

    return json.dumps(value).encode()


MARKERS = st.fixed_dictionaries(
    {"format": st.just("groupstate-run") | JSON, "version": st.just(1) | JSON},
    optional={"log_id": st.just(LOG_ID) | st.text("0123456789abcdef ") | JSON, "created_ns": st.integers() | JSON},
)


@example(b'{"format": "groupstate-run", "version": 1, "log_id": "", "created_ns": 0}')
@example(b'{"format": "groupstate-run", "version": Infinity, "log_id": "", "created_ns": 0}')
@given(st.binary(max_size=200) | MARKERS.map(as_json) | JSON.map(as_json))
def test_a_run_json_of_any_bytes_names_a_log_or_is_refused(data):
    try:
        info = read_run_info(holding(RUN_DIR.marker, data), RUN_DIR)
    except GroupstateError:
        return
    assert len(info.log_id) == 16


@given(st.binary(max_size=200) | st.dictionaries(NAMES, JSON, max_size=9).map(as_json) | JSON.map(as_json))
def test_a_claim_of_any_bytes_is_a_readers_or_nobodys(data):
    disk = holding(f"{RUN_DIR.log}/readers/one.json", data)
    disk.makedirs(f"{RUN_DIR.log}/readers")
    assert all(isinstance(first, int) for first in readers(disk, RUN_DIR))


PARTS = st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=60)), max_size=4)


@given(PARTS, st.binary(max_size=100))
def test_a_good_snapshot_may_hold_any_parts(parts, body):
    data = encode_snapshot(ID, SnapshotInfo(7, 1, 0, 1), parts)
    found = read_snapshot(holding(f"{RUN_DIR.log}/{7:020d}.snap", data), RUN_DIR, ID, 7)
    assert found is not None
    assert list(found.parts()) == parts
    for snapshot in (found, Snapshot(found.info, body)):
        try:
            decoded(snapshot.parts())
        except ValueError:
            pass  # as msgspec's errors are


@given(st.binary(max_size=300))
def test_a_snapshot_of_any_bytes_is_none(data):
    assert read_info(data, ID, 7) is None
    assert read_snapshot(holding(f"{RUN_DIR.log}/{7:020d}.snap", data), RUN_DIR, ID, 7) is None


@given(st.binary(max_size=300))
def test_a_payload_file_of_any_bytes_has_no_payload(data):
    try:
        assert parse_file_header(data, "a payload file") is None
    except GroupstateError:
        pass
    disk = holding(f"{RUN}/payloads/{1:010d}.pay", data)
    assert not list(scan_file(disk, RUN_DIR, 1, SEED).places)


@given(st.binary(max_size=200) | mangled(gzip.compress(b"a segment " * 20, mtime=0)) | st.binary().map(zlib.compress))
def test_an_archive_of_any_bytes_is_unpacked_or_refused(data):
    disk = holding(archive_path(RUN_DIR, 1), data)
    try:
        assert isinstance(read_segment(disk, RUN_DIR, 1), bytes)
    except GroupstateError:
        pass
