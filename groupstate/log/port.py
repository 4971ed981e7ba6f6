"""The two protocols between the ledger and whatever keeps its events.

Rule 1: `post` numbers nothing and waits for nothing; it takes records that are numbered already.
Rule 2: the records of one `post` are kept together: after a crash all of them are there or none.
Rule 3: a payload is kept before the first event that is posted after its `put`.
Rule 4: after a failed write the log refuses everything (`LogFailed`), and every waiter is told.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Protocol, TypeAlias

from groupstate.core.events import PayloadRef, Record

Durability: TypeAlias = Literal["fsync", "os", "memory"]
"""`fsync`: survives the machine. `os`: survives the process. `memory`: survives nothing (tests, dry runs)."""


class PayloadStore(Protocol):
    """Bytes by key, beside the log."""

    @property
    def blocks(self) -> bool:
        """Whether `get` may wait for a disk, so that it is better called from a worker thread."""
        ...

    def put(self, data: bytes) -> PayloadRef:
        """Take `data` for keeping and say how to find it. Doesn't wait; readable at once."""
        ...

    def get(self, ref: PayloadRef) -> bytes:
        """The bytes of `ref`. May read a disk, so call it from a worker thread where that matters.

        Raises:
            DamagedPayload: missing, freed, or not the bytes that were put.
        """
        ...

    def in_memory(self, ref: PayloadRef) -> bool:
        """Whether `get` needs no disk for this one, whatever `blocks` says."""
        ...

    def free(self, refs: Iterable[PayloadRef]) -> None:
        """Let go of payloads that no event will be asked for any more. Unknown keys are ignored."""
        ...

    def keep_only(self, keys: set[int]) -> int:
        """Free all but these, and say how many that were. For an opened run, whose book says what it needs."""
        ...


class EventLog(Protocol):
    """Numbered records, appended only. Created or opened by its class; one writer at a time."""

    @property
    def last_seq(self) -> int:
        """Number of the last record posted; 0 while there is none."""
        ...

    @property
    def durable_seq(self) -> int:
        """Every record up to this number survives what the log's durability names."""
        ...

    @property
    def payloads(self) -> PayloadStore: ...

    def post(self, records: Sequence[Record]) -> None:
        """Append records numbered `last_seq + 1` and up, as one unit.

        Raises:
            LogFailed: an earlier write failed, or the log is closed; or this one failed, in a log that writes here.
        """
        ...

    async def durable(self, seq: int) -> None:
        """Wait until `durable_seq >= seq`. Cancelling it changes nothing.

        Raises:
            LogFailed: a write failed before that.
        """
        ...

    def read(self, start: int = 1, stop: int | None = None) -> Iterator[Record]:
        """Records `start` up to (not including) `stop`, of those that are durable or posted here."""
        ...

    async def aclose(self) -> None:
        """Keep everything posted so far, then let go of the files and the lock. Idempotent."""
        ...
