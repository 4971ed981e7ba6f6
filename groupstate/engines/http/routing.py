"""Which of several servers answers a request.

Takes: requests that want a place, replicas that come and go. Makes: places, the least loaded replica first, a session's
own replica before that. Blocked by: a closed gate, no replica in rotation, no free slot. Unblocked by: `open`, `enter`,
`release`; `fail` ends every wait with an error.

Rule 1: deciding is synchronous; whoever waits is handed a place in order of arrival, and a place that is handed to one
who has gone is given on.
Rule 2: a replica is in rotation only while its weights are the engine's.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

import anyio
import attrs

from groupstate.engines.http.client import Client

AFFINITIES_MAX = 65_536
"""Sessions whose replica is remembered: more than are ever under way at once."""

QUIET_S = 5.0
"""After so long without a word from an idle replica it is asked first which weights it has: it may have been started
anew. Shorter than any server takes to start."""

FAILURES_MAX = 7
"""Doublings of the pause that a failing replica gets: 0.1 s to 12.8 s."""


@attrs.define(eq=False)
class Replica:
    """One server."""

    url: str
    client: Client
    version: int | None = None
    """Of its weights; None: unknown, or other ones than the engine's."""
    label: str | None = None
    """What it should call them, where it says."""
    met: bool = False
    count: int = 0
    """Requests that have a place here."""
    in_rotation: bool = False
    reachable: bool = True
    lost: bool = False
    """A connection failed since it was last asked which weights it has: it may have been started anew."""
    problem: str = "it wasn't asked yet"
    """Why it is out of rotation."""
    told: str = ""
    """The problem that was logged last, since it was last in rotation."""
    failures: int = 0
    """In a row."""
    root: str | None = None
    """The checkpoint that it was started from, as it names it."""
    frozen: bool = False
    asleep: bool = False
    weights_awake: bool = False
    heard_at: float = 0.0
    lock: anyio.Lock = attrs.field(factory=anyio.Lock)
    """Held while it is given weights or asked for them."""

    def heard(self) -> None:
        self.heard_at = time.monotonic()

    @property
    def pause_s(self) -> float:
        """How long it is left alone after its last failure."""
        return 0.1 * 2.0 ** min(self.failures - 1, FAILURES_MAX) if self.failures else 0.0


Waiter = tuple[str, "asyncio.Future[Replica]"]


class Router:
    def __init__(self, replicas: Sequence[Replica], slots_max: int | None, on_change: Callable[[], None]) -> None:
        self.replicas = replicas
        self._slots_max = slots_max
        self._on_change = on_change
        self._is_open = True
        self._waiting: deque[Waiter] = deque()
        self._looking: dict[asyncio.Future[None], None] = {}
        """Who waits for any replica; in order of arrival."""
        self._affinities: OrderedDict[str, Replica] = OrderedDict()

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def in_rotation(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.in_rotation]

    @property
    def waited_for(self) -> bool:
        return bool(self._waiting or self._looking)

    async def acquire(self, affinity: str) -> Replica:
        """A place at a replica. Give it back with `release`."""
        place: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        self._waiting.append((affinity, place))
        self._hand_out()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.release(place.result())
            raise

    def release(self, replica: Replica) -> None:
        replica.count -= 1
        self._hand_out()

    async def wait_any(self) -> None:
        """Until a replica is in rotation."""
        if self.in_rotation:
            return
        found: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._looking[found] = None
        try:
            await found
        finally:
            del self._looking[found]
            if found.done() and not found.cancelled():
                found.exception()  # Looked at, also if the wait was cancelled at the same moment.

    def open(self, is_open: bool) -> None:
        self._is_open = is_open
        self._hand_out()

    def enter(self, replica: Replica) -> None:
        replica.in_rotation = replica.reachable = True
        replica.problem = ""
        for found in self._looking:
            if not found.done():
                found.set_result(None)
        self._hand_out()
        self._on_change()

    def leave(self, replica: Replica, problem: str) -> None:
        replica.in_rotation = False
        replica.problem = problem
        self._on_change()

    def fail(self, error: Callable[[], Exception]) -> None:
        """End every wait."""
        pending: Iterable[asyncio.Future[None] | asyncio.Future[Replica]]
        pending = [*(place for _, place in self._waiting), *self._looking]
        self._waiting.clear()
        for future in pending:
            if not future.done():
                future.set_exception(error())

    def _hand_out(self) -> None:
        while self._is_open and self._waiting:
            affinity, place = self._waiting[0]
            if not place.done():
                replica = self._choose(affinity)
                if replica is None:
                    return
                replica.count += 1
                place.set_result(replica)
            self._waiting.popleft()

    def _choose(self, affinity: str) -> Replica | None:
        """The replica that has the beginning of the session in its cache, or the least loaded one."""
        known = self._affinities.get(affinity) if affinity else None
        free = [replica for replica in self.replicas if self._has_room(replica)]
        if not free:
            return None
        chosen = known if known in free else min(free, key=lambda replica: replica.count)
        if affinity:
            self._affinities[affinity] = chosen
            self._affinities.move_to_end(affinity)
            if len(self._affinities) > AFFINITIES_MAX:
                self._affinities.popitem(last=False)
        return chosen

    def _has_room(self, replica: Replica) -> bool:
        return replica.in_rotation and (self._slots_max is None or replica.count < self._slots_max)
