"""Group commit: what was posted while the previous commit ran, or until somebody waits for it, becomes the next one.

Rule 1: one post is never split over two commits.
Rule 2: the first failure is the last write. Linux forgets a failed flush and says yes to the next one, so a
second try would acknowledge what isn't there.
Rule 3: whoever waits is told, whatever happens: written, failed or closed.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from groupstate.errors import LogFailed
from groupstate.log.waiters import FAR, Waiters

Later: TypeAlias = Callable[[Callable[[], None]], None]
"""Calls a function later, once, on the caller's thread: what an event loop's timer does."""

COMMIT_BYTES_MAX = 8 << 20
"""Posts are gathered up to this size, so that a burst doesn't become one commit that takes a second. A single
post may be larger."""

TURNS_MAX = 3
"""Turns of the event loop that one commit gathers, as long as each brings more: a commit takes the processor for half a
millisecond, however little is in it."""

GATHER_S_MAX = 0.2
"""How long a post that nobody waits for may lie in memory. A turn of the loop isn't waited for longer either: what was
posted must not wait for whoever computes in the loop for a minute."""

_EVERYBODY = float("inf")


class Commit:
    """What is kept in one go: payloads, then a frame of records, then payloads to let go."""

    __slots__ = ("count", "freed", "items", "puts", "size")

    def __init__(self) -> None:
        self.puts: list[tuple[int, bytes]] = []
        self.items: list[bytes] = []
        """Records, encoded, a part for each post."""
        self.count = 0
        """Of the records."""
        self.size = 0
        """Bytes of records and payloads."""
        self.freed: list[int] = []


class GroupCommit:
    """The queue between the ledger and the disk, worked off by a thread of its own, on the spot, or by steps that the
    caller's event loop takes.

    `write` keeps the entries of one commit; `tidy` does a little of what isn't urgent, behind a commit and where
    nothing is queued, and says whether more is left; `release` lets go of the files. All run in one thread at a time.
    """

    def __init__(
        self,
        name: str,
        durable_seq: int,
        write: Callable[[Commit], None],
        tidy: Callable[[], bool],
        release: Callable[[], None],
        *,
        inline: bool,
        later: Later | None = None,
    ) -> None:
        """
        Args:
            inline: without a thread, each post on the spot.
            later: without a thread, what has gathered when the function comes to be called.
        """
        self._name = name
        self._write = write
        self._tidy = tidy
        self._release = release
        self._inline = inline
        self._later = later
        self._due = False
        """A step is to be called."""
        self._in_turn = False
        """The event loop is in a turn that brings posts; the writer waits for its end."""
        self._ripe_at_s = 0.0
        """When what is queued is kept at the latest, on the monotonic clock."""
        self._awaited_seq = durable_seq
        """The last event that somebody has waited for."""
        self._gathers = False
        """The writer waits for more posts, or for somebody who waits for those that are queued."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[Commit] = deque()
        """What was posted and isn't taken yet; nearly always one commit, or none."""
        self._taken: list[Commit] = []
        """What is being kept; of a log that failed, all that won't be."""
        self._waiters = Waiters()
        self._error: Exception | None = None
        self._told = False
        """Somebody has heard of the error."""
        self._closing = False
        self._released = False
        self.last_seq = durable_seq
        self.durable_seq = durable_seq
        self._thread: threading.Thread | None = None
        """Started with the first entry."""

    @property
    def state(self) -> str:
        return "failed" if self._error else "closed" if self._closing else "open"

    # For the ledger ---------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raises LogFailed where nothing can be kept any more."""
        if self._error is not None or self._closing:
            raise self._refusal()

    def submit(
        self,
        items: bytes = b"",
        count: int = 0,
        puts: Sequence[tuple[int, bytes]] = (),
        freed: Sequence[int] = (),
    ) -> None:
        """Queue a post: `count` records, encoded. Never waits; without a thread it is kept when this returns.

        Raises:
            LogFailed: nothing can be kept any more, or, without a thread, this couldn't be.
        """
        size = len(items) + sum([len(body) for _, body in puts]) if puts else len(items)
        # By the lock itself: entering the condition is a call more, and this is done for every event.
        with self._lock:
            if self._error is not None or self._closing:
                raise self._refusal()
            if not self._queue:
                self._begin()
            commit = self._queue[-1]
            if commit.size + size > COMMIT_BYTES_MAX and commit.size:
                commit = Commit()
                self._queue.append(commit)
                self._changed.notify()
            commit.items.append(items)
            commit.size += size
            commit.count += count
            self.last_seq += count
            if puts:
                commit.puts += puts
            if freed:
                commit.freed += freed
        if self._inline:
            self._commit(self._take())
            self._tidied()
            if self.durable_seq < self.last_seq:
                raise self._refusal()
        else:
            self._call_later()

    def _call_later(self) -> None:
        if self._later is not None and not self._due:
            self._due = True
            self._later(self._step)

    def _begin(self) -> None:
        """Queue the first commit, and let the writer know: it waits only while nothing is queued."""
        self._queue.append(Commit())
        if self._inline or self._later is not None:
            return
        self._ripe_at_s = time.monotonic() + GATHER_S_MAX
        self._watch_turn()
        self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="groupstate-log", daemon=True)
            self._thread.start()

    def _watch_turn(self) -> None:
        """Have the writer wait for the end of this turn, where an event loop takes turns in this thread."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._in_turn = False  # A loop may have ended within its turn.
            return
        self._in_turn = True
        loop.call_soon(self._turned, loop, 1, self.last_seq)

    def _turned(self, loop: asyncio.AbstractEventLoop, turns: int, seq: int) -> None:
        """The loop has taken a turn since `seq` was the last event."""
        if turns < TURNS_MAX and self.last_seq > seq:
            loop.call_soon(self._turned, loop, turns + 1, self.last_seq)
            return
        self._in_turn = False
        self._hurry()

    def _hurry(self) -> None:
        """Let a writer that waits for more know that it needn't any longer.

        It says that it waits before it looks, and who calls this has changed what it looks at: one sees the other.
        """
        if self._gathers and self._is_ripe():
            with self._changed:
                self._changed.notify()

    async def wait(self, seq: int) -> None:
        if seq <= self.durable_seq:
            return
        woken = self._waiters.add(seq)
        if self._awaited_seq < seq < FAR:
            self._awaited_seq = seq
            self._hurry()
        # Looked at behind the entry in the list: what happened before it doesn't wake this task.
        if seq > self.durable_seq and self._error is None and not self._released:
            await woken
        if seq > self.durable_seq:
            raise self._refusal()

    async def aclose(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is None:
            # Nothing to wait for, so that a caller without an event loop can close an inline log.
            while self._queue:
                self._commit(self._take())
            self._finish()
        else:
            await self._finished()
            self._thread.join()
        if self.durable_seq < self.last_seq and not self._told:
            raise self._refusal()

    async def _finished(self) -> None:
        while True:
            woken = self._waiters.add(_EVERYBODY)
            if self._released:
                break
            await woken

    def unkept(self) -> tuple[int, list[bytes], int]:
        """The durable number, and the records posted behind it: encoded, and how many."""
        with self._lock:
            items = [part for commit in (*self._taken, *self._queue) for part in commit.items]
            return self.durable_seq, items, self.last_seq - self.durable_seq

    def _refusal(self) -> LogFailed:
        self._told = True
        if self._error is None:
            return LogFailed(f"{self._name} is closed; open the run again to go on behind event {self.durable_seq}")
        failure = LogFailed(
            f"{self._name} could not keep the events behind {self.durable_seq}: {self._error}. It refuses everything "
            "from here on; see to the disk, then open the run again to go on from there"
        )
        failure.__cause__ = self._error
        return failure

    # The writer -------------------------------------------------------------------------------------

    def _run(self) -> None:
        more = False
        while True:
            commit = self._next(wait=not more)
            if commit is not None:
                self._commit(commit)
            elif self._closing and not self._queue:
                break
            more = self._tidied()
        self._finish()

    def _next(self, *, wait: bool) -> Commit | None:
        """What is to be kept first; None where nothing is, and nothing will be or needn't be waited for."""
        with self._changed:
            while wait and not self._queue and not self._closing:
                self._changed.wait()
            self._gathers = True
            while wait and self._queue and not self._is_ripe():
                self._changed.wait(max(0.0, self._ripe_at_s - time.monotonic()))
            self._gathers = False
            if not self._queue or not self._is_ripe():
                return None
            return self._take()

    def _is_ripe(self) -> bool:
        """Whether what is queued is to be kept now. Any thread may ask."""
        if self._closing or len(self._queue) > 1 or time.monotonic() >= self._ripe_at_s:
            return True
        return self._awaited_seq > self.durable_seq and not self._in_turn

    def _take(self) -> Commit:
        commit = self._queue.popleft()
        self._taken.append(commit)
        return commit

    def _step(self) -> None:
        """What the thread does, once."""
        self._due = False
        if self._released:
            return
        if self._queue:
            self._commit(self._take())
        if self._tidied() or self._queue:
            self._call_later()

    def _tidied(self) -> bool:
        """Do some of what isn't urgent, after those who wait were told; True where more is left."""
        try:
            return self._error is None and self._tidy()
        except Exception as error:
            self._fail(error)
            return False

    def _commit(self, commit: Commit) -> None:
        """Keep a commit, and tell those who wait."""
        try:
            self._write(commit)
        except Exception as error:  # a full disk, a lost lock or our own fault: all end the log
            self._fail(error)
            return
        with self._lock:
            self.durable_seq += commit.count
            self._taken.clear()
        self._waiters.wake(self.durable_seq)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = error
            self._taken += self._queue
            self._queue.clear()
        self._waiters.wake(_EVERYBODY)

    def _finish(self) -> None:
        if not self._released:
            self._release()
            self._released = True
        self._waiters.wake(_EVERYBODY)
