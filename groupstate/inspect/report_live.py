"""A run that goes on, for the page: followed from its files, and asked from other threads for what is new.

Rule 1: the run is never asked and never waited for: this reads what its files say is durable.
Rule 2: what was read is worked on only when somebody asks, or when it has become much.
"""

import contextlib
import os
import threading
from itertools import islice
from typing import Final

import anyio
import anyio.lowlevel

from groupstate.core.book import Book
from groupstate.core.events import Record
from groupstate.core.invariants import INVARIANTS, Checker, Violation
from groupstate.errors import GroupstateError, LogError
from groupstate.inspect.checking import Checked
from groupstate.inspect.replay import applied
from groupstate.inspect.report import Gathered
from groupstate.inspect.report_page import (
    NOT_CHECKED,
    UNREADABLE,
    Notice,
    Verdict,
    meta_of,
    notices_of,
    texts_of,
    verdict_of,
)
from groupstate.inspect.report_prompts import PromptReader
from groupstate.inspect.report_tables import Packed
from groupstate.log.disk import OsDisk
from groupstate.log.follow import follow
from groupstate.log.reading import beginning, read_log
from groupstate.log.rundir import RunDir, read_run_info

POLL_S: Final = 0.25
CHECK_POLL_S: Final = 1.0
WAITING_MAX: Final = 20_000
"""Records that were read and that nobody has asked for."""
CHECKED_AT_ONCE: Final = 250
"""Some milliseconds, after which others have their turn."""


class LiveReport:
    """What the page asks for. `data_since` may be called by any thread while `follow` runs in another."""

    def __init__(
        self, run: str | os.PathLike[str], *, prompts: bool = True, check: bool = True, name: str = ""
    ) -> None:
        """
        Raises:
            NotARun: `run` is no run directory.
        """
        read_run_info(OsDisk(), RunDir.at(run))
        self._run = run
        self._name = name
        self._check = check
        self._reader = PromptReader(run) if prompts else None
        self._prompts: list[str | None] = []
        self._lock = threading.Lock()
        self._gathered = Gathered()
        self._waiting: list[Record] = []
        self._notices: list[Notice] = []
        self._verdict = Verdict("checking", "Not checked yet.") if check else NOT_CHECKED
        self._checked_seq = 0
        self._read_whole = False
        """What there was when the reading began has been read."""
        self._caught_up = False
        """The whole log was checked once: from then on the verdict is right but for the last moment."""
        self._state = 0
        """Changes with what isn't a table."""

    # Asking ------------------------------------------------------------------------------------------

    def data_since(self, seq: int, state: int) -> bytes | None:
        """What the page lacks that knows the run up to event `seq`; None where that is nothing.

        Args:
            seq: 0 for all.
            state: the number of what the page knows beside the tables.
        """
        with self._lock:
            self._take_in()
            gathered = self._gathered
            if 0 < seq == gathered.last_seq and state == self._state:
                return None
            if self._reader is not None:
                self._prompts += self._reader.texts(gathered.prompts[len(self._prompts) :])
            tables = gathered.since(seq)
            new = len(tables["groups"]["seq"])
            prompts = self._prompts[len(self._prompts) - new :] if new else []
            notices = (
                [*self._notices, *notices_of(gathered)] if gathered.last_seq or not self._notices else self._notices
            )
            meta = meta_of(gathered, self._verdict_now(), notices, name=self._name)
            meta |= texts_of(gathered, seq, prompts) | {"after": seq, "state": self._state}
        return Packed(tables).beside(meta)

    def _verdict_now(self) -> Verdict:
        if self._read_whole and self._checked_seq >= self._gathered.last_seq:
            self._caught_up = True
        if self._caught_up or self._verdict.state != "well":
            return self._verdict
        text = f"Up to event {self._checked_seq:,} nothing is wrong; what comes after it is being checked."
        return Verdict("checking", text)

    def _take_in(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting and waiting[0].seq == self._gathered.last_seq + 1:  # else one before it couldn't be followed
            try:
                self._gathered.feed(waiting)
            except LogError as error:
                self._say(Notice("damaged", str(error)))

    def _say(self, notice: Notice) -> None:
        self._notices.append(notice)
        self._state += 1

    # Following ---------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Read the run and go on reading it. Doesn't end by itself; damage ends the reading, not the answers."""
        try:
            base, start = beginning(self._run)
        except GroupstateError as error:
            with self._lock:
                self._say(Notice("damaged", str(error)))
                self._verdict = UNREADABLE
            return
        self._gathered = Gathered(base)
        async with anyio.create_task_group() as tasks:
            if self._check:
                tasks.start_soon(self._hold, start)
            try:
                await self._read(start)
            except GroupstateError as error:
                tasks.cancel_scope.cancel()
                with self._lock:
                    self._say(Notice("damaged", str(error)))
                    self._verdict = UNREADABLE

    async def _read(self, start: int) -> None:
        """
        Raises:
            GroupstateError: it can't be read; what came before is there.
        """
        source, first = read_log(self._run, start), -1
        while self._gathered.last_seq != first:
            first = self._gathered.last_seq
            with self._lock:
                self._gathered.feed(islice(source, WAITING_MAX))
            await anyio.lowlevel.checkpoint()
        self._read_whole = True
        async for records in follow(self._run, max(start, self._gathered.last_seq + 1), poll_s=POLL_S):
            with self._lock:
                self._waiting += records
                if len(self._waiting) > WAITING_MAX:
                    self._take_in()
            await anyio.lowlevel.checkpoint()

    async def _hold(self, start: int) -> None:
        """Hold the run against the invariants, on the way and as it goes on. What can't be read, the reader tells."""
        base, _ = beginning(self._run)
        held = _Held(base, start)
        with contextlib.suppress(GroupstateError):
            async for records in follow(self._run, start, poll_s=CHECK_POLL_S):
                for begin in range(0, len(records), CHECKED_AT_ONCE):
                    held.feed(records[begin : begin + CHECKED_AT_ONCE])
                    await anyio.lowlevel.checkpoint()
                self._verdict, self._checked_seq = verdict_of(held.seen), records[-1].seq
                self._state += 1


class _Held:
    """The invariants over a log, as `groupstate check` holds it, piece by piece."""

    def __init__(self, base: Book | None, start: int) -> None:
        self._book = Book() if base is None else base
        self._checker = Checker(self._book) if base is None else None
        self._start = start
        self._count = 0
        self._found: list[Violation] = []

    def feed(self, records: list[Record]) -> None:
        for record in records:
            self._count += 1
            if self._checker is not None:
                self._found += self._checker.feed(record)
            elif not self._found:
                try:
                    applied(self._book, record)
                except LogError as error:
                    self._found.append(Violation(9, record.seq, getattr(record.event, "group_id", ""), str(error)))

    @property
    def seen(self) -> Checked:
        return Checked(self._count, self._start, 0, len(INVARIANTS), tuple(self._found))
