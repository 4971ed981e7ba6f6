"""A run with a marker in every text that a log can hold, and a look for markers in all bytes of a directory."""

import enum
import gzip
import struct
import tarfile
import types
import typing
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import attrs
import msgspec

from groupstate.core import events as ev
from groupstate.core.departed import Departed
from groupstate.core.group import Group, Session
from groupstate.core.phases import Phase
from groupstate.core.prompt import Prompt, encoded_prompt
from groupstate.core.snapshot import BookState, Capture, encoded
from groupstate.core.trajectory import Trajectory, checked, payload_of
from groupstate.log.archive import pack_segment
from groupstate.log.disk import OsDisk
from groupstate.log.file import FileLog
from groupstate.log.rundir import RunDir
from groupstate.log.snapshots import SnapshotInfo, snapshot_path, write_snapshot

MARKER = "SECRET"
TOKEN = int.from_bytes(MARKER[:4].encode(), "little")
"""A token id whose bytes are the beginning of the marker."""
LOG_ID = "0123456789abcdef" * 2


def filled(hint: Any, where: str) -> Any:
    """A value of a type, with a marker in each text; `where` tells them apart."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is str:
        return f"{MARKER} {where}"
    if hint is Any:
        return [f"{MARKER} {where}", {f"{MARKER} key of {where}": f"{MARKER} in {where}"}]
    if hint in (int, float, bool, bytes):
        return hint(1) if hint is not bytes else b""
    if origin is typing.Literal:
        return args[0]
    if origin in (typing.Union, types.UnionType):
        return filled(next(arg for arg in args if arg not in (type(None), bytes)), where)
    if origin is tuple:
        return (filled(args[0], where),) if args[-1] is ... else tuple(filled(arg, where) for arg in args)
    if origin is list:
        return [filled(args[0], where)]
    if origin in (dict, Mapping):
        return {filled(args[0], f"key of {where}"): filled(args[1], where)}
    if issubclass(hint, enum.Enum):
        return next(iter(hint))
    return made(hint, where)


def made(kind: Any, where: str = "", **given: Any) -> Any:
    """An instance of a struct or a class, with a marker in each text of it."""
    names = kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else [field.name for field in attrs.fields(kind)]
    hints = typing.get_type_hints(kind)
    values = {name: filled(hints[name], f"{where}{kind.__name__}.{name}") for name in names if name not in given}
    return kind(**values, **given)


WINDOW = {
    "evicted": {f"{MARKER} evicted": 1},
    "sessions_failed": {f"{MARKER} failed": 1},
    "starved": {f"{MARKER} starved": 1},
    f"{MARKER} unknown": f"{MARKER} of a later version",
}


def state() -> BookState:
    windows = {f"{MARKER} partition": WINDOW}
    totals = {f"{MARKER} total": 1, f"committed/{MARKER} partition": 1, f"evicted/{MARKER}": 1}
    return made(BookState, version=1, windows=windows, windows_out={1: WINDOW}, totals=totals)


def marked_run(path: Path) -> None:
    """A run directory with markers in all that groupstate writes, and in what it doesn't."""
    rows = [Trajectory(prompt_ids=[TOKEN], response_ids=[TOKEN], text=f"{MARKER} text", reward=1.0,
                       info={f"{MARKER} info": f"{MARKER} of info"})]  # fmt: skip
    payloads = [
        encoded_prompt(Prompt(f"{MARKER} prompt", extra={f"{MARKER} extra": f"{MARKER} of extra"}), "g"),
        payload_of(checked(rows, session=0, group_id="g"), "told so"),
        f"{MARKER} that is no payload".encode(),
        msgspec.msgpack.encode({MARKER: MARKER}),
    ]

    async def write() -> None:
        log = FileLog.create(path, inline=True, log_id=LOG_ID, durability="os", segment_bytes=2_000)
        refs = [log.payloads.put(data) for data in payloads if data is not None]
        for seq, kind in enumerate([*ev.EVENT_TYPES, ev.GroupSubmitted, ev.SessionFinished], 1):
            given = {}
            for name, ref in (("prompt", refs[0]), ("payload", refs[1])):
                if name in kind.__struct_fields__:
                    given[name] = ref
            log.post([ev.Record(seq, seq, made(kind, **given))])
        await log.aclose()

    anyio.run(write)
    run = RunDir.at(path)
    session = made(Session, "packed ")
    packed = made(Group, "packed ", kept=msgspec.msgpack.encode((session,)))
    left = Departed()
    left.add(f"{MARKER} departed", Phase.EVICTED)
    capture = Capture(state(), [made(Group), packed], [made(Group, "aside ")], left)
    write_snapshot(OsDisk(), run, bytes.fromhex(LOG_ID), SnapshotInfo(5, 5, 0, 1), encoded(capture))
    Path(snapshot_path(run, 7)).write_bytes(f"{MARKER} that is no snapshot".encode())
    pack_segment(OsDisk(), run, 1)
    with max(Path(run.log).glob("*.seg")).open("ab") as last:
        last.write(b"\xf1GSL" + f"{MARKER} torn".encode())
    for name in ("lock", "schema-0.json", "readers/1.json", "../notes.txt", "../payloads/0000000099.pay.tmp"):
        file = Path(run.log) / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"{MARKER} in {name}")
    marker = Path(run.marker)
    marker.write_text(marker.read_text().replace("{", f'{{"more": "{MARKER} in run.json",', 1))


# Looking ---------------------------------------------------------------------------------------------


def bytes_of(path: Path) -> Iterator[tuple[str, bytes]]:
    """All bytes of a file or a directory, unpacked where they are packed, with where they lie."""
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            yield f"name of {file.name}", str(file.relative_to(path)).encode()
            if file.is_file():
                yield from bytes_of(file)
        return
    data = path.read_bytes()
    yield path.name, data
    if path.name.endswith(".gz"):
        yield f"{path.name}, unpacked", gzip.decompress(data)
    if path.name.endswith(".tar.gz"):
        with tarfile.open(path) as archive:
            for member in archive:
                yield f"{member.name}, who", f"{member.name} {member.uname} {member.gname}".encode()
                found = archive.extractfile(member)
                if found is not None:
                    yield from _parts(member.name, found.read())
    yield from _parts(path.name, data)


def _parts(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    yield name, data
    if name.endswith(".seg.gz"):
        yield f"{name}, unpacked", gzip.decompress(data)
    if name.endswith(".snap") and data.startswith(b"GSSNAP"):
        at = 80
        while at < len(data):
            kind, length = struct.unpack_from("<BI", data, at)
            yield f"{name}, part of kind {kind}", zlib.decompress(data[at + 5 : at + 5 + length])
            at += 5 + length


def markers_in(path: Path) -> set[str]:
    """What is there behind each marker, or where a token's bytes are."""
    found = set()
    for where, data in bytes_of(path):
        at = data.find(MARKER[:4].encode())
        while at >= 0:
            text = data[at : at + 60].decode("utf-8", "replace")
            found.add(f"{where}: {text}")
            at = data.find(MARKER[:4].encode(), at + 1)
    return found
