"""The beginnings of prompts, read from the payload files of a run that somebody else may be writing."""

import os
from collections.abc import Iterable

import msgspec

from groupstate.core.events import PayloadRef
from groupstate.core.prompt import decoded_prompt
from groupstate.errors import GroupstateError, UnsupportedLog
from groupstate.log.disk import Disk, OsDisk
from groupstate.log.frames import checksum_seed
from groupstate.log.payload_files import (
    FILE_HEADER_BYTES,
    RECORD_HEADER_BYTES,
    Place,
    list_payload_files,
    parse_record_header,
    payload_path,
    read_record,
    scan_file,
)
from groupstate.log.rundir import RunDir, read_run_info

PROMPT_CHARS_MAX = 300
"""Of a prompt that the page shows."""


class PromptReader:
    """Finds prompts by their references. What it found it remembers, so a file is searched once, and where it has
    grown on from there."""

    def __init__(self, path: str | os.PathLike[str], *, disk: Disk | None = None) -> None:
        self._disk = OsDisk() if disk is None else disk
        self._run = RunDir.at(path)
        info = read_run_info(self._disk, self._run)
        self._seed = checksum_seed(info.log_id)
        self._places: dict[int, list[Place]] = {}
        self._searched: dict[int, int] = {}
        """Per file: up to which byte."""

    def texts(self, refs: Iterable[PayloadRef | None]) -> list[str | None]:
        """The beginning of each prompt; None where there is none, or none that can be read any more."""
        wanted = list(refs)
        if any(ref is not None and ref.key not in self._places for ref in wanted):
            self._search()
        files: dict[int, int] = {}
        try:
            return [None if ref is None else self._text(ref, files) for ref in wanted]
        finally:
            for fd in files.values():
                if fd >= 0:
                    self._disk.close(fd)

    def _text(self, ref: PayloadRef, files: dict[int, int]) -> str | None:
        for place in reversed(self._places.get(ref.key, [])):
            if place.file not in files:
                try:
                    files[place.file] = self._disk.open_to_read(payload_path(self._run, place.file))
                except OSError:
                    files[place.file] = -1  # removed: nothing needs it any more
            if files[place.file] < 0 or (place.length, place.crc) != (ref.length, ref.crc):
                continue
            record = read_record(self._disk, files[place.file], place, self._seed)
            if record is not None:
                return _beginning(record[RECORD_HEADER_BYTES:])
        return None

    def _search(self) -> None:
        for file in list_payload_files(self._disk, self._run):
            try:
                found = self._grown(file) if file in self._searched else self._whole(file)
            except (OSError, UnsupportedLog):
                continue  # removed in this moment, or of a later version: its prompts aren't shown
            for place in found:
                self._places.setdefault(place.key, []).append(place)
                self._searched[file] = place.stop

    def _whole(self, file: int) -> list[Place]:
        self._searched[file] = FILE_HEADER_BYTES
        return scan_file(self._disk, self._run, file, self._seed).places

    def _grown(self, file: int) -> list[Place]:
        fd = self._disk.open_to_read(payload_path(self._run, file))
        try:
            offset, size = self._searched[file], self._disk.size(fd)
            found: list[Place] = []
            while offset < size:
                header = self._disk.pread(fd, RECORD_HEADER_BYTES, offset)
                place = parse_record_header(header, file, offset, self._seed)
                if place is None or place.stop > size:
                    break
                found.append(place)
                offset = place.stop
            return found
        finally:
            self._disk.close(fd)


def _beginning(data: bytes) -> str | None:
    try:
        content = decoded_prompt(data, dataset="", n=1, group_id="").content
    except (msgspec.MsgspecError, GroupstateError):
        return None
    text = _text_of(content)
    return text if len(text) <= PROMPT_CHARS_MAX else text[:PROMPT_CHARS_MAX] + "..."


def _text_of(content: object) -> str:
    """What a person recognises a prompt by: its text, the last message of a chat, else its values."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and all(isinstance(item, dict) and "content" in item for item in content):
        return _text_of(content[-1]["content"])
    if isinstance(content, list) and content and all(isinstance(item, int) for item in content):
        return f"{len(content)} token ids: " + " ".join(map(str, content[:PROMPT_CHARS_MAX]))
    return msgspec.json.encode(content).decode()
