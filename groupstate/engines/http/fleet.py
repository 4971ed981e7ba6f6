"""The servers behind an engine: which of them may be asked, and what weights they have.

Takes: reports of requests that failed, weights. Makes: replicas in rotation, places at them. Blocked by: servers that
can't be reached or don't take the weights. Unblocked by: a caretaker for each replica that is out of rotation, which
asks it until it is fit.

Rule 1: a replica never serves under a wrong version: one that may have been started anew, or that failed to take
weights, gets the current ones before it is asked again.
Rule 2: a request waits for a server at most `reconnect_s`. If none was reachable all that time, the engine dies.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import anyio
import attrs

from groupstate.engines.http.client import Broken, Client, NotReached
from groupstate.engines.http.dialects import Dialect, Untouched
from groupstate.engines.http.routing import QUIET_S, Replica, Router
from groupstate.engines.http.weights import Given
from groupstate.engines.port import State, Weights
from groupstate.engines.tasks import loose
from groupstate.errors import EngineDied, EngineError, EngineUnavailable
from groupstate.logs import Logger

log = Logger("groupstate.engines.openai")

CARE_S_MAX = 5.0
"""Longest pause between two looks at a server that is out of rotation."""

Publish: TypeAlias = Callable[[str, Weights, int], Awaitable[None]]
"""`publish(url, weights, weight_version)`: brings weights to a server by a way of the user's own. `EngineError` says
that the server refused them and has its old ones; after any other exception nobody knows what it has."""


@attrs.frozen
class ReplicaView:
    """A server, as the engine sees it now."""

    url: str
    in_rotation: bool
    weight_version: int | None
    """None: unknown, or other weights than the engine's."""
    requests: int
    problem: str
    """Why it is out of rotation."""


class Fleet:
    def __init__(
        self,
        replicas: Sequence[Replica],
        dialect: Dialect,
        *,
        model: str | None,
        version: int,
        publish: Publish | None,
        slots_max: int | None,
        reconnect_s: float,
        state: Callable[[], State],
        interrupt: Callable[[Replica], Awaitable[None]],
        on_change: Callable[[], None],
        on_death: Callable[[EngineDied], None],
    ) -> None:
        self.replicas = replicas
        self.dialect = dialect
        self.router = Router(replicas, slots_max, on_change)
        self.version = version
        self.model = model or ""
        """As the servers call it."""
        self.context: int | None = None
        """Tokens of prompt and answer together, as the servers say."""
        self._model_given = model
        self._publish = publish
        self._reconnect_s = reconnect_s
        self._state = state
        self._interrupt = interrupt
        self._on_death = on_death
        self._given: Given | None = None
        """The current weights; None: those that the servers were started with."""
        self._empty_since: float | None = None
        """Since when no replica is in rotation; None before anybody wanted one."""
        self._caretakers: dict[Replica, asyncio.Task[None]] = {}
        self._closed = False

    # Places ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """
        Raises:
            EngineError: a server isn't up, or isn't what it should be.
        """
        problems: dict[str, Exception] = {}

        async def meet(replica: Replica) -> None:
            try:
                await self._meet(replica)
                self._enter(replica)
            except NotReached as error:
                problems[replica.url] = EngineError(f"no server answers at {replica.url}: {error}")
            except (Broken, EngineError) as error:
                problems[replica.url] = EngineError(f"the server at {replica.url} can't be used: {error}")

        async with anyio.create_task_group() as tasks:
            for replica in self.replicas:
                if not replica.in_rotation:
                    tasks.start_soon(meet, replica)
        if problems:
            raise EngineError("; ".join(str(problems[url]) for url in sorted(problems)))

    async def ready(self) -> None:
        """Until a replica is in rotation."""
        self._look_after_all()
        await self.router.wait_any()

    async def acquire(self, affinity: str) -> Replica:
        self._look_after_all()
        return await self.router.acquire(affinity)

    def served(self, replica: Replica) -> None:
        """A request was answered to its end."""
        replica.failures = 0
        replica.heard()

    def failed(
        self,
        replica: Replica,
        problem: str,
        *,
        lost: bool = False,
        reachable: bool = True,
        pause_s: float | None = None,
    ) -> None:
        """Take a replica out of rotation until it has been looked after."""
        replica.lost = replica.lost or lost
        if not replica.in_rotation:
            return  # One death ends many requests, and counts once.
        replica.failures += 1
        replica.reachable = reachable
        self._take_out(replica, problem)
        if pause_s is None:
            # One that asks for a pause is busy, and that is nothing to warn of.
            self._tell(replica)
        self._look_after(replica, replica.pause_s if pause_s is None else pause_s)

    def _tell(self, replica: Replica) -> None:
        """Say that a server is out, and why; once for each reason, since it is asked again and again."""
        if replica.problem == replica.told or self._closed:
            return
        replica.told = replica.problem
        others = len(self.router.in_rotation)
        log.warning("a server is out of use", url=replica.url, problem=replica.problem, servers_left=others)

    def _enter(self, replica: Replica) -> None:
        self.router.enter(replica)
        if replica.told:
            replica.told = ""
            log.warning("a server is in use again", url=replica.url, weight_version=replica.version)

    def _take_out(self, replica: Replica, problem: str) -> None:
        self.router.leave(replica, problem)
        if not self.router.in_rotation:
            self._empty_since = time.monotonic()

    def views(self) -> tuple[ReplicaView, ...]:
        return tuple(
            ReplicaView(replica.url, replica.in_rotation, replica.version, replica.count, replica.problem)
            for replica in self.replicas
        )

    # Care ------------------------------------------------------------------------------------------

    def _look_after_all(self) -> None:
        now = time.monotonic()
        if self._empty_since is None:
            self._empty_since = now
        for replica in self.replicas:
            idle = replica.in_rotation and not replica.count
            if idle and replica.label is not None and now - replica.heard_at > QUIET_S:
                self._take_out(replica, "it is asked which weights it has")
            if not replica.in_rotation:
                self._look_after(replica, 0.0)

    def _look_after(self, replica: Replica, pause_s: float) -> None:
        if replica not in self._caretakers and not self._closed:
            self._caretakers[replica] = loose(self._care(replica, pause_s))

    async def _care(self, replica: Replica, pause_s: float) -> None:
        try:
            while True:
                # Where it is the only one, nobody waits for longer than it is time to give up.
                await anyio.sleep(pause_s if self.router.in_rotation else min(pause_s, self._patience_s()))
                if await self._made_fit(replica):
                    break
                pause_s = min(max(0.1, 2 * pause_s), CARE_S_MAX)
        except Exception as error:
            # A fault of ours: without a caretaker the requests would wait for ever.
            died = EngineDied(f"looking after {replica.url} failed: {type(error).__name__}: {error}")
            died.__cause__ = error
            self._on_death(died)
        finally:
            del self._caretakers[replica]

    async def _made_fit(self, replica: Replica) -> bool:
        try:
            await self._meet(replica)
        except (NotReached, Broken) as error:
            replica.reachable, replica.lost, replica.problem = False, True, str(error)
        except EngineError as error:
            replica.reachable, replica.problem = True, str(error)
        else:
            # Weights may have been published since.
            if replica.version == self.version:
                self._enter(replica)
                return True
        self._tell(replica)
        self._give_up_if_due()
        return False

    def _patience_s(self) -> float:
        """Until it is time to give up."""
        left = self._reconnect_s - self._empty_s
        return left if left > 0 else CARE_S_MAX

    @property
    def _empty_s(self) -> float:
        return 0.0 if self._empty_since is None else time.monotonic() - self._empty_since

    def _give_up_if_due(self) -> None:
        late = self._empty_s >= self._reconnect_s
        if self.router.in_rotation or not self.router.waited_for or not late:
            return
        problems = "; ".join(f"{replica.url}: {replica.problem}" for replica in self.replicas)
        if not any(replica.reachable for replica in self.replicas):
            self._on_death(EngineDied(f"no server was reachable for {self._reconnect_s:g} s: {problems}"))
            return
        self.router.fail(lambda: EngineUnavailable(f"no server is fit to serve: {problems}"))
        self._empty_since = time.monotonic()

    async def _meet(self, replica: Replica) -> None:
        """Ask a server what it is, and give it the current weights if it has others."""
        async with replica.lock:
            met = await self.dialect.meet(replica.client)
            self._take_model(replica, met.models)
            label = None if self._publish is not None else await self.dialect.label(replica.client)
            if not replica.met:
                replica.version = self.version if self._given is None else None
                replica.label, replica.root, replica.met = label, met.root, True
                replica.frozen = self._stays_paused  # Perhaps; resuming one that isn't does no harm.
                if not replica.frozen:
                    await self.dialect.rouse(replica.client)
            elif self._is_other(replica, label):
                replica.version = None
            replica.lost = False
            replica.heard()
            await self._thaw_if_due(replica)
            if replica.version != self.version:
                await self._interrupt(replica)
                await self._restore(replica)
                # The engine may have been resumed while a server that was to stay paused was given weights.
                await self._thaw_if_due(replica)

    async def _thaw_if_due(self, replica: Replica) -> None:
        if replica.frozen and not self._stays_paused:
            await self.dialect.thaw(replica.client)
            replica.frozen = False

    def _take_model(self, replica: Replica, models: Mapping[str, int | None]) -> None:
        if self._model_given is None and not models:
            raise EngineError("it doesn't list its models; name one: model=...")
        name = next(iter(models)) if self._model_given is None else self._model_given
        if models and name not in models:
            raise EngineError(f"it has no model {name!r}; it has {', '.join(map(repr, models))}")
        if self.model not in ("", name):
            raise EngineError(f"its model is {name!r}, and that of another server {self.model!r}; name one: model=...")
        self.model = name
        context = models.get(name)
        if context is not None:
            self.context = context if self.context is None else min(context, self.context)

    def _is_other(self, replica: Replica, label: str | None) -> bool:
        """Whether its weights may be others than those it had."""
        if label is not None and replica.label is not None:
            return label != replica.label
        return replica.lost and self._given is not None

    # Weights ---------------------------------------------------------------------------------------

    async def _restore(self, replica: Replica) -> None:
        """Give the current weights to a replica that has others."""
        given = self._given
        if given is not None and given.can_be_given_again:
            await self._give(replica, given)
        elif given is None and replica.root is not None and self.dialect.takes_weights and self._publish is None:
            await self._load(replica, replica.root, replica.label or "default")
            replica.version = self.version
        else:
            raise EngineError(
                f"it may have other weights than those of version {self.version}, which can't be given to it again; "
                "it serves from the next publication on"
            )

    async def _give(self, replica: Replica, given: Given) -> None:
        """
        Raises:
            Untouched: the old weights are whole.
            EngineError: nobody knows what it has now.
        """
        before, replica.version = replica.version, None
        try:
            if self._publish is None:
                label = str(given.version)
                await self._load(replica, os.fspath(given.weights), label)  # type: ignore[arg-type]
                replica.label = label if await self.dialect.label(replica.client) == label else None
            else:
                await self._give_by_user(self._publish, replica, given)
        except Untouched:
            replica.version = before
            raise
        replica.version = given.version
        replica.heard()

    async def _load(self, replica: Replica, folder: str, label: str) -> None:
        if replica.asleep and not replica.weights_awake:
            await self.dialect.wake(replica.client, "weights")
            replica.weights_awake = True
        stays = self._stays_paused
        await self.dialect.load(replica.client, folder, label, stay_paused=stays)
        replica.frozen = stays

    async def _give_by_user(self, publish: Publish, replica: Replica, given: Given) -> None:
        try:
            await publish(replica.url, given.weights, given.version)
        except EngineError as error:
            raise Untouched(str(error)) from error
        except Exception as error:
            raise EngineError(f"publish failed: {type(error).__name__}: {error}") from error

    @property
    def _stays_paused(self) -> bool:
        return self._state() != "generating"

    @property
    def takers(self) -> list[Replica]:
        """Replicas that can be given weights: also those that are out of rotation for want of them."""
        return [
            replica
            for replica in self.replicas
            if replica.in_rotation or (replica.met and replica.reachable and replica.version != self.version)
        ]

    async def publish(self, given: Given) -> None:
        """Give weights to every replica that can take them; the others get them before they are back in rotation.

        Raises:
            EngineError: none took them.
        """
        problems: dict[Replica, Exception] = {}

        async def give(replica: Replica) -> None:
            try:
                async with replica.lock:
                    await self._give(replica, given)
            except (NotReached, Broken, EngineError) as error:
                problems[replica] = error

        targets = self.takers
        async with anyio.create_task_group() as tasks:
            for replica in targets:
                tasks.start_soon(give, replica)
        if len(problems) < len(targets):
            self._given, self.version = given, given.version
        for replica, error in problems.items():
            if replica.version != self.version:
                gone = isinstance(error, NotReached | Broken)
                problem = f"it didn't take the weights of version {given.version}: {error}"
                self.failed(replica, problem, lost=gone, reachable=not gone)
        if len(problems) == len(targets):
            told = "; ".join(f"{replica.url}: {error}" for replica, error in problems.items())
            raise EngineError(f"no server took the weights of version {given.version}: {told}")

    # States ----------------------------------------------------------------------------------------

    async def freeze(self) -> list[Replica]:
        """Stop the servers' work where they can keep the requests; returns those that can't."""
        unable: list[Replica] = []

        async def freeze(replica: Replica) -> None:
            replica.frozen = await self.dialect.freeze(replica.client)
            if not replica.frozen:
                unable.append(replica)

        await self._each([replica for replica in self.router.in_rotation if replica.count], freeze)
        return unable

    async def thaw(self) -> None:
        async def thaw(replica: Replica) -> None:
            await self.dialect.thaw(replica.client)
            replica.frozen = False

        problems = await self._each([replica for replica in self.replicas if replica.frozen], thaw)
        for replica, error in problems.items():
            self.failed(replica, str(error))
            await self._interrupt(replica)

    async def sleep(self) -> None:
        """
        Raises:
            EngineError: a server can't. Those that could are awake again.
        """

        async def sleep(replica: Replica) -> None:
            await self.dialect.sleep(replica.client)
            replica.asleep, replica.weights_awake = True, False

        if problems := await self._each(self.router.in_rotation, sleep):
            await self._wake([replica for replica in self.replicas if replica.asleep])
            raise EngineError(_joined(problems))

    async def wake(self) -> None:
        """
        Raises:
            EngineError: a server doesn't wake up.
        """
        if problems := await self._wake([replica for replica in self.replicas if replica.asleep]):
            raise EngineError(_joined(problems))

    async def _wake(self, replicas: Iterable[Replica]) -> dict[Replica, EngineError]:
        async def wake(replica: Replica) -> None:
            await self.dialect.wake(replica.client, "kv_cache" if replica.weights_awake else None)
            replica.asleep = replica.weights_awake = False

        return await self._each(replicas, wake)

    async def _each(
        self, replicas: Iterable[Replica], act: Callable[[Replica], Awaitable[None]]
    ) -> dict[Replica, EngineError]:
        """Do it to all at once; returns what was refused. One that can't be reached leaves the rotation."""
        problems: dict[Replica, EngineError] = {}

        async def one(replica: Replica) -> None:
            try:
                await act(replica)
            except (NotReached, Broken) as error:
                replica.frozen = replica.asleep = replica.weights_awake = False
                self.failed(replica, str(error), lost=True, reachable=False)
            except EngineError as error:
                problems[replica] = error

        async with anyio.create_task_group() as tasks:
            for replica in replicas:
                tasks.start_soon(one, replica)
        return problems

    async def aclose(self) -> None:
        self._closed = True
        caretakers = list(self._caretakers.values())
        for caretaker in caretakers:
            caretaker.cancel()
        await asyncio.gather(*caretakers, return_exceptions=True)
        for replica in self.replicas:
            await replica.client.aclose()


def _joined(problems: Mapping[Replica, EngineError]) -> str:
    return "; ".join(f"{replica.url}: {error}" for replica, error in problems.items())


def replicas_of(urls: Sequence[str], api_key: str | None) -> list[Replica]:
    return [Replica(url, Client(url, api_key)) for url in urls]
