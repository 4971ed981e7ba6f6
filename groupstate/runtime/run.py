"""A run: the log, the ledger, the rules, the rollout and the sampler under one roof.

Rule 1: `open_run` is the only way in and out; leaving it leaves a log that can be opened again.
Rule 2: what a caller was told is durable first: batches, marks, commits.
"""

import asyncio
import heapq
import operator
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import anyio
import anyio.from_thread

from groupstate.batch import Batch
from groupstate.core import events as ev
from groupstate.core.arguments import boolean, integer, integer_or_none, string
from groupstate.core.book import Book
from groupstate.core.explain import Explanation
from groupstate.core.frontier import FrontierTracker, SourceFrontier
from groupstate.core.phases import Phase
from groupstate.core.prompt import Prompt, as_prompt
from groupstate.core.rules import Rules
from groupstate.engines.port import Engine, SamplingParams, Weights
from groupstate.errors import (
    BadSettings,
    DamagedPayload,
    IllegalTransition,
    LogFailed,
    RunIsClosed,
    WrongEventLoop,
)
from groupstate.logs import Logger
from groupstate.runtime import recovery
from groupstate.runtime.closing import Closing
from groupstate.runtime.controller import Controller
from groupstate.runtime.deadlines import Deadlines
from groupstate.runtime.handles import GroupHandle
from groupstate.runtime.ledger import CANCELLED, Ledger
from groupstate.runtime.recovery import CheckpointMark
from groupstate.runtime.rollout import Rollout
from groupstate.runtime.sampler import Patience, Sampler, check_partition
from groupstate.runtime.tracking import TrackerState, Tracking
from groupstate.runtime.turns import TrainerTurn
from groupstate.runtime.validation import validated

T = TypeVar("T")
log = Logger("groupstate.run")


class Run:
    """An open run. Made by `open_run`.

    Its plain methods may be called from any thread; of those, what looks at the book alone (`book`, `sampleable_count`,
    `explain`) waits for nobody, and off the loop's own thread may see it in the middle of a change. What is awaited
    belongs to the event loop that the run was opened in: in another one it raises `WrongEventLoop`.
    """

    def __init__(
        self, ledger: Ledger, controller: Controller, rollout: Rollout | None, engine: Engine | None, grace_s: float
    ) -> None:
        self.ledger = ledger
        self.engine = engine
        self._controller = controller
        self._rollout = rollout
        self._sampler = Sampler(controller, engine)
        controller.runner = rollout
        self.deadlines = Deadlines(
            controller,
            now=asyncio.get_running_loop().time,
            runs_here=lambda group_id: rollout is not None and rollout.runs(group_id),
        )
        self._closing = Closing(ledger, controller, rollout, grace_s)
        self._thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()
        self._publishing = anyio.Lock()
        """One publication at a time, or the engine could end with other weights than the run says."""
        self._engine_told = False
        """Whether it was said that the engine has other weights."""
        self._tracking = Tracking()
        self._frontier: FrontierTracker | None = None
        self.portal: anyio.from_thread.BlockingPortal | None = None
        """Runs functions on the run's event loop, from other threads."""

    # Looking -----------------------------------------------------------------------------------------

    @property
    def book(self) -> Book:
        """The projection, for looking only."""
        return self.ledger.book

    @property
    def id(self) -> str:
        return self.book.run_id

    @property
    def rules(self) -> Rules:
        return self.ledger.rules

    @property
    def weight_version(self) -> int:
        """The current version: what was last published."""
        return self.book.weight_version

    def sampleable_count(self, partition: str = ev.TRAIN) -> int:
        """Groups that could be sampled now."""
        return self._sampler.sampleable_count(partition)

    async def wait_sampleable(self, count: int, partition: str = ev.TRAIN, *, timeout_s: float | None = None) -> int:
        """Wait until `count` groups are sampleable; takes nothing.

        Raises:
            SampleTimeout: not within `timeout_s` seconds; it says what is missing.
            SampleError: there never will be so many.
            RunIsClosed: the run closes first.
        """
        self._need_loop("wait for groups")
        return await self._sampler.wait_sampleable(count, partition, timeout_s=timeout_s)

    def explain(self, partition: str = ev.TRAIN) -> Explanation:
        """What the oldest waiting `sample()` waits for, as a value; `str()` of it is a text."""
        return self._sampler.explain(partition)

    def frontier(self) -> tuple[SourceFrontier, ...]:
        """Which positions of the source are committed, open and evicted, by dataset.

        The first call reads the log, which takes time where that is long; later ones cost nothing. Of a run that keeps
        only what came since its last checkpoints, see `SourceFrontier.unknown`.
        """

        def look() -> tuple[SourceFrontier, ...]:
            if self._frontier is None:
                begins = getattr(self.ledger.log, "beginning", None)
                base, start = (None, 1) if begins is None else begins()
                tracker = FrontierTracker(base)
                for record in self.ledger.log.read(start):
                    tracker.feed(record)
                self._frontier = tracker
                self.ledger.observers.append(self._frontier.feed)
            return self._frontier.value()

        return self.in_loop(look)

    @property
    def trackers(self) -> tuple[TrackerState, ...]:
        """What became of the calls to each tracker, in their order."""
        return self._tracking.states()

    @property
    def final_mark(self) -> CheckpointMark | None:
        """The mark that the closing made (`close(mark=True)`, `close_on`); None if it made none."""
        return self._closing.final_mark

    # Driving -----------------------------------------------------------------------------------------

    def track(self, metrics: Mapping[str, Any], *, step: int | None = None) -> None:
        """Send numbers of your own, such as a loss, to the run's trackers. Without trackers it only checks them.

        Args:
            metrics: one number by name, of whatever library.
            step: None is the current weight version.

        Raises:
            BadInput: a name that is no string, a value that is no number, or a step that is none; nothing was sent.
            RunIsClosed: the run is closed.
        """
        self.in_loop(lambda: self._tracking.track(metrics, step))

    def _track_with(self, tracking: Tracking) -> None:
        """Where batches are told, from now on."""
        tracking.follow(self.book)
        self._tracking = tracking
        self._sampler.given.append(tracking.sampled)

    def submit(
        self,
        prompt: Any,
        *,
        n: int | None = None,
        group_id: str | None = None,
        partition: str = ev.TRAIN,
        dataset: str | None = None,
        weight_version: int | None = None,
        target_version: int | None = None,
    ) -> GroupHandle:
        """Submit a prompt: a new group, pending.

        Args:
            prompt: a `Prompt`, a row (a dict with a "prompt", as in a file) or its content.
            n: sessions; None takes the prompt's, then the run's.
            group_id: None makes one.
            weight_version: the stamp; leave it out outside of imports and tests.
            target_version: the one weight version at which the group may be sampled, for selection
                `exact_version`; None: the next one that isn't full.

        Raises:
            DuplicateGroup: the id is taken.
            BadInput: the prompt can't be stored, or nobody will sample at `target_version`.
            RunIsClosed: the run is closing.
        """
        given = as_prompt(prompt)
        whole = Prompt(
            given.content,
            given.dataset if dataset is None else dataset,
            given.n if n is None else n,
            given.group_id if group_id is None else group_id,
            given.extra,
        )

        check_partition(partition)
        return self._submit(
            whole,
            partition=partition,
            weight_version=integer_or_none("weight_version", weight_version),
            target_version=integer_or_none("target_version", target_version),
        )

    def _submit(self, prompt: Prompt, **settings: Any) -> GroupHandle:
        """As `submit`, of what was checked; `settings` are those of `Drawing.submit`."""

        def record() -> GroupHandle:
            self._need_open("submit")
            new = self._controller.drawing.submit(prompt, **settings)
            size = self.book.group(new).size
            # It may have left already by the end of this, if it is lost by the rules.
            self._controller.settle()
            return GroupHandle(new, size, prompt, self)

        return self.in_loop(record)

    def pending(self, *, limit: int | None = None) -> list[GroupHandle]:
        """Groups that nobody has started, oldest first: for users who dispatch sessions themselves.

        Args:
            limit: how many at most. A handle of each of ten thousand takes tens of milliseconds; None gives all.

        Raises:
            BadInput: `limit` is no number from 1.
        """
        limit = integer_or_none("limit", limit, least=1)

        def look() -> list[GroupHandle]:
            found, by_age = self.book.in_phase(Phase.PENDING), operator.attrgetter("submitted_seq")
            groups = sorted(found, key=by_age) if limit is None else heapq.nsmallest(limit, found, key=by_age)
            handles = []
            for group in groups:
                try:
                    prompt = self._controller.drawing.prompt_of(group)
                except DamagedPayload as error:
                    self._controller.fail_unreadable(group, error)
                else:
                    handles.append(GroupHandle(group.group_id, group.size, prompt, self))
            return handles

        return self.in_loop(look)

    async def wait_changed(self, *, timeout_s: float | None = None) -> bool:
        """Wait until something has happened in the run.

        Returns:
            False if nothing has within `timeout_s` seconds.

        Raises:
            RunIsClosed: the run is closed.
            LogFailed: the log has failed.
            BadInput: `timeout_s` is no duration.
        """
        return await self._wait_changed(self._controller.changed.count, timeout_s)

    async def _wait_changed(self, seen: int, timeout_s: float | None) -> bool:
        """As `wait_changed`, for who has seen so many changes; at once if there are more."""
        self._need_loop("wait for a change")
        self._need_log("wait for a change")
        self._need_sound_log()
        patience, changed = Patience.of(timeout_s), self._controller.changed
        if changed.count == seen:
            with anyio.move_on_at(patience.until):
                await changed.wait()
        self._need_sound_log()
        return changed.count != seen

    async def sample(
        self,
        batch_size: int,
        *,
        weight_version: int | None = None,
        partition: str = ev.TRAIN,
        timeout_s: float | None = None,
    ) -> Batch:
        """Claim the oldest `batch_size` groups, waiting until there are so many. See `Sampler.sample`."""
        self._need_loop("sample")
        return await self._sampler.sample(
            batch_size, weight_version=weight_version, partition=partition, timeout_s=timeout_s
        )

    async def commit(self, batch: Batch | int) -> None:
        """The trainer is done with a batch, for good: a checkpoint holds what was learned from it.

        Raises:
            UnknownBatch: it was never sampled, is committed or returned already, or is another run's.
        """
        self._need_loop("commit")
        self._need_log("commit")
        seq = self.ledger.commit(*_named(batch))
        self._controller.settle()
        await self.ledger.log.durable(seq)

    async def release(self, batch: Batch | int) -> None:
        """Give a batch back untrained: its groups are sampleable again, with the lag they had.

        Raises:
            UnknownBatch: it was never sampled, is committed or returned already, or is another run's.
        """
        self._need_loop("release")
        self._need_log("release")
        seq = self.ledger.release(*_named(batch))
        self._controller.settle()
        await self.ledger.log.durable(seq)

    async def publish_weights(self, weight_version: int, weights: Weights | None = None) -> None:
        """Make a weight version the current one, in the engine first.

        Args:
            weights: for the run's engine, tensors by name or the folder of a checkpoint; None where the engine gets
                them by another way.

        Raises:
            WeightVersionError: the version is below the current one.
            EngineError: the engine refused the weights; the version is not published.
            BadInput: the version is no integer. Nothing was touched.
        """
        weight_version = integer("weight_version", weight_version)
        self._need_loop("publish weights")
        async with self._publishing:
            self._need_log("publish weights")
            if weights is not None and weight_version >= self.weight_version:
                if self.engine is None:
                    raise BadSettings("this run has no engine to give the weights to; leave weights out")
                if not hasattr(self.engine, "publish_weights"):
                    raise BadSettings("this run's engine has no publish_weights, so it takes none; leave weights out")
                await self._give(self.engine, weights, weight_version)
            self.ledger.publish(weight_version)
            self._compare_engine()

    def _compare_engine(self) -> None:
        """Say it, once, where the engine generates under other weights than the run's current ones: its tokens are
        labelled by what it says, and nothing else would show it."""
        theirs = getattr(self.engine, "weight_version", None)
        if theirs in (None, self.weight_version):
            self._engine_told = False
        elif not self._engine_told:
            self._engine_told = True
            log.warning(
                "the engine generates under another weight version than the run's",
                engine_version=theirs,
                run_version=self.weight_version,
                help=f"publish_weights({self.weight_version}, weights) gives the engine its weights, or make it with "
                f"them and weight_version={self.weight_version}",
            )

    async def _give(self, engine: Engine, weights: Weights, weight_version: int) -> None:
        """To the engine. Where it has them although the wait was cancelled the run says so too: else another
        publication could give the same version to other weights."""
        before = engine.weight_version
        try:
            await engine.publish_weights(weights, weight_version)
        except asyncio.CancelledError:
            if engine.weight_version == weight_version != before:
                try:
                    self.ledger.publish(weight_version)
                except LogFailed as error:
                    # The caller has his cancellation; who waits for the run hears of the log.
                    self._controller.die(error)
            raise

    def trainer_turn(self, *, sleep: bool = True) -> TrainerTurn:
        """Let trainer and engine take turns on one device: `async with run.trainer_turn() as turn:`.

        Entering pauses the engine and has it sleep; in the block the trainer learns, and `await turn.publish(version,
        weights)`; leaving wakes and resumes it, whatever the block raised and whoever is cancelled.

        Args:
            sleep: False only pauses it, for an engine that has a device of its own or no memory to give.

        Raises, on entering:
            BadSettings: the run has no engine.
            EngineError: a turn is on already, or the engine isn't generating, or can't sleep.
            EngineDied: it is gone.
            WrongEventLoop: this is not the event loop that the run was opened in.
        """
        return TrainerTurn(self, sleep=boolean("sleep", sleep))

    def cancel(self, group_id: str) -> None:
        """Give a group up: its sessions are cancelled, each end is recorded, then the group fails.

        Raises:
            UnknownGroup: it isn't in the book.
            IllegalTransition: it is terminal already.
        """
        _check_id(group_id)

        def give_up() -> None:
            group = self.book.group(group_id, "cancel")
            if not group.in_flight:
                raise IllegalTransition(group_id, str(group.phase), "a cancellation", ["GroupEvicted", "BatchSampled"])
            self._controller.end(group_id, CANCELLED)

        self.in_loop(give_up)

    def requeue(self, group_id: str, reason: str = "asked for") -> None:
        """Start a group over: the same prompt, a new attempt for every session.

        Raises:
            UnknownGroup: it isn't in the book.
            IllegalTransition: it is finished or sampled.
        """
        _check_id(group_id)
        string("reason", reason)

        def again() -> None:
            self.book.group(group_id, "requeue")
            self._record(ev.GroupRequeued(group_id, reason), "requeue")

        self.in_loop(again)

    async def validate(
        self,
        prompts: Any,
        *,
        n: int | None = None,
        params: SamplingParams | None = None,
        greedy: bool = False,
        timeout_s: float | None = None,
    ) -> Batch:
        """Submit validation prompts and wait for all of them, beside training; never filtered, evicted or refilled.

        The groups get ids of their own, since the same prompts are used again and again; an id that a prompt
        brings along is in its `extra["group_id"]`. The batch is committed already, and `batch.by_dataset()` has the
        results. Cancelled, timed out or failed, the round takes its groups along: it returns once their sessions, which
        are cancelled, have ended.

        Args:
            prompts: as the `source` of `open_run`; all of them.
            n: sessions per group; None takes the prompt's, then the run's.
            params: how these sessions generate, in place of the run's parameters (`ctx.params`).
            greedy: the run's parameters at temperature 0, and one session per group unless `n` says more.
            timeout_s: seconds for the whole round.

        Raises:
            SampleTimeout: time is up; the text says what is missing.
            BadSettings: `params` and `greedy` together, or where the run starts no sessions.
            BadInput: a prompt that can't be stored; none was submitted.
            DamagedPayload: what a session returned can't be read.
            RolloutDied, RunIsClosed, LogFailed: as `sample` raises them.
        """
        self._need_loop("validate")
        return await validated(self, prompts, n=n, params=params, greedy=greedy, timeout_s=timeout_s)

    async def checkpoint(self, name: str = "") -> CheckpointMark:
        """Mark this place in the log. Keep the mark beside the weights; `open_run(resume_at=mark)` goes back."""
        string("name", name)
        self._need_loop("mark a checkpoint")
        self._need_log("mark a checkpoint")
        mark = recovery.mark(self.ledger, name)
        self._controller.settle()
        await self.ledger.log.durable(mark.seq)
        return mark

    async def close(self, reason: str = "closed", *, mark: bool = False) -> None:
        """Stop admitting, let sessions end within the grace, put the rest back, keep everything. Idempotent.

        Cancelling it doesn't stop the closing; the end of `open_run`'s block waits for it.

        Args:
            reason: kept in the log, and the name of the mark.
            mark: make a mark in the end, which `final_mark` is from then on. Then batches that are with the trainer
                have the grace too, to be committed: the mark is behind them.

        Raises:
            LogFailed: something could not be kept. It is raised once.
        """
        string("reason", reason)
        boolean("mark", mark)
        if not self._closing.over:
            self._need_loop("close")
        await self._closing.close(reason, mark=mark)

    def hurry(self) -> None:
        """Give sessions no time to end when the run closes."""
        self._closing.hurry()

    # Inside ------------------------------------------------------------------------------------------

    def in_loop(self, function: Callable[[], T]) -> T:
        """Call a plain function on the run's event loop, from whatever thread this is.

        Raises:
            RunIsClosed: the run is closed.
        """
        self._need_log("reach the run")
        if threading.get_ident() == self._thread:
            return function()
        assert self.portal is not None
        return self.portal.call(function)

    def _need_loop(self, tried: str) -> None:
        """Refuse to wait anywhere but in the run's own event loop: what a wait is for is told there, and nowhere else.

        Raises:
            WrongEventLoop: this is another one.
            RunIsClosed: it is, and the run is closed.
        """
        if asyncio.get_running_loop() is not self._loop:
            self._need_log(tried)
            raise WrongEventLoop(
                f"cannot {tried} in this event loop: the run lives in the one that it was opened in; await it there, "
                "from a thread by asyncio.run_coroutine_threadsafe(..., loop), or open the run with "
                "groupstate.sync.open_run"
            )

    def _record(self, event: ev.AnyEvent, tried: str) -> int:
        self._need_log(tried)
        seq = self.ledger.record(event)
        self._controller.settle()
        return seq

    def _need_log(self, tried: str) -> None:
        if self._closing.log_gone:
            raise RunIsClosed(f"cannot {tried}: the run is closed; open it again")

    def _need_sound_log(self) -> None:
        if isinstance(self._controller.dead, LogFailed):
            raise self._controller.dead

    def _need_open(self, tried: str) -> None:
        if self._controller.closing:
            raise RunIsClosed(f"cannot {tried}: the run is closing; open it again")


def _check_id(group_id: str) -> None:
    string("group_id", group_id, wanted="the id of a group, a string")


def _named(batch: Batch | int) -> tuple[int, str]:
    """Its number, and the run that it is from as far as that is known."""
    if isinstance(batch, Batch):
        return batch.number, batch.run_id
    return integer("batch", batch, wanted="a Batch or its number"), ""
