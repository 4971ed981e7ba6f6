"""A log that is gone with the process: for tests, dry runs and the simulator. Durable as soon as posted."""

import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import count

from groupstate.core.events import PayloadRef, Record
from groupstate.errors import DamagedPayload, LogFailed
from groupstate.log.checks import check_numbers, check_payload
from groupstate.log.codec import read_back
from groupstate.log.waiters import Waiters


class MemoryPayloads:
    """Bytes in a dictionary, with the same checks as those on a disk."""

    blocks = False

    def __init__(self) -> None:
        self._keys = count(1)
        self._lock = threading.Lock()
        self._data: dict[int, bytes] = {}

    def put(self, data: bytes) -> PayloadRef:
        data = bytes(data)
        with self._lock:
            key = next(self._keys)
            self._data[key] = data
        return PayloadRef(key, len(data), zlib.crc32(data))

    def get(self, ref: PayloadRef) -> bytes:
        data = self._data.get(ref.key)
        if data is None:
            raise DamagedPayload(f"payload {ref.key} is not in the store: it was freed, or belongs to another run")
        return check_payload(ref, data, "the store")

    def in_memory(self, ref: PayloadRef) -> bool:
        return True

    def free(self, refs: Iterable[PayloadRef]) -> None:
        for ref in refs:
            self._data.pop(ref.key, None)

    def keep_only(self, keys: set[int]) -> int:
        orphans = [key for key in self._data if key not in keys]
        for key in orphans:
            del self._data[key]
        return len(orphans)


class MemoryLog:
    """An `EventLog` in memory. Needs neither threads nor files, so it runs under any event loop."""

    def __init__(self) -> None:
        self.payloads = MemoryPayloads()
        self._records: list[Record] = []
        self._waiters = Waiters()
        self._closed = False

    def __repr__(self) -> str:
        return f"<MemoryLog events={self.last_seq}{' closed' if self._closed else ''}>"

    @property
    def last_seq(self) -> int:
        return len(self._records)

    @property
    def durable_seq(self) -> int:
        return len(self._records)

    def post(self, records: Sequence[Record]) -> None:
        if self._closed:
            raise LogFailed("the log is closed")
        check_numbers(records, self.last_seq)
        # Encoded only to find out what a file would refuse, and to give back what a file would give back.
        self._records += read_back(records)
        self._waiters.wake(self.last_seq)

    async def durable(self, seq: int) -> None:
        if seq <= self.last_seq:
            return
        if not self._closed:
            await self._waiters.add(seq)
        if seq > self.last_seq:
            raise LogFailed(f"the log was closed after event {self.last_seq}, so event {seq} will not come")

    def read(self, start: int = 1, stop: int | None = None) -> Iterator[Record]:
        assert start >= 1
        upto = self.last_seq if stop is None else min(stop - 1, self.last_seq)
        # By place, since the list may grow while somebody reads.
        return (self._records[index] for index in range(start - 1, upto))

    async def aclose(self) -> None:
        self._closed = True
        self._waiters.wake(float("inf"))
