"""One log, and the partitions of TransferQueue that it tells of.

Rule 1: what follows from a listing is durable before anything is done in TransferQueue or given to the trainer.
Rule 2: what the core evicts is cleared; what it samples keeps the trajectories that are in the batch, which the trainer
clears.
"""

import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import attrs

from groupstate.core import events as ev
from groupstate.core.group import Group
from groupstate.core.phases import TERMINAL, Phase
from groupstate.errors import BadInput, MissingMetric, SampleError
from groupstate.integrations.verl.lives import Lives
from groupstate.integrations.verl.metrics import Evictions
from groupstate.integrations.verl.missing import explained
from groupstate.integrations.verl.options import VALIDATION, Options
from groupstate.integrations.verl.queue import Partition, Place
from groupstate.log.file import FileLog
from groupstate.log.memory import MemoryLog
from groupstate.log.port import EventLog
from groupstate.log.rundir import RunDir
from groupstate.logs import Logger
from groupstate.runtime.controller import Waiter
from groupstate.runtime.ledger import Ledger
from groupstate.runtime.observed import Sampled, StatusFeed, Steps
from groupstate.runtime.recovery import CheckpointMark
from groupstate.runtime.reported import ENDED, Reported, ReportedRow, RowKey, malformed

log = Logger("groupstate.verl")


class UnknownTag(BadInput, ValueError):
    """A prompt's tag that can't be read, where the configuration says that it stops the run."""


class NothingToTrainOn(SampleError, RuntimeError):
    """A batch of sync mode in which no group has a trajectory."""


def kind_of(partition: str) -> ev.Partition:
    """What a partition of TransferQueue is in the log."""
    return ev.VALIDATION if partition == VALIDATION else ev.TRAIN


@attrs.frozen
class Taken:
    """A batch, as verl knows it."""

    sampled: Sampled
    keys: list[str]
    tags: list[dict[str, object]]


class VerlRun:
    def __init__(
        self, options: Options, refill: Callable[[int], object] | None, *, training: str, log_path: str | None
    ) -> None:
        """
        Args:
            training: the partition of training groups.
            refill: dispatches so many prompts.
            log_path: the run directory; None keeps the log in memory.

        Raises:
            LogError: the log can't be opened.
        """
        self.options = options
        self.rules = options.rules
        self.evictions = Evictions()
        self._refill = refill
        self._training = training
        self._steps = Steps()
        self._path = log_path
        self._log = self._opened(log_path)
        self._feed: StatusFeed | None = None
        self._closed = False
        self._partitions: dict[str, Partition] = {}
        self._begun_anew = False
        """The log was there already, and what it owed has not been given up yet."""
        self._out: list[int] = []
        """Batches of training groups that are with the trainer."""
        self._lives = Lives()
        self._known: set[str] = set()
        """Partitions of which it is known which group each uid is."""
        self._folded: dict[str, dict[Place, Place]] = {}
        """Of groups with more sessions than they were submitted with: where the log has which trajectory."""

    @property
    def feed(self) -> StatusFeed:
        assert self._feed is not None, "the first call to the buffer begins the run"
        return self._feed

    @property
    def path(self) -> str | None:
        return self._path

    def close(self) -> None:
        if self._feed is not None:
            if self._saved():
                self._commit_out()
            self._feed.close()
            self._feed = None
        elif not self._closed:
            # Nobody asked for anything, so that no run was begun in it.
            with suppress(StopIteration):
                self._log.aclose().send(None)
        self._closed = True

    # The log -----------------------------------------------------------------------------------------

    def _opened(self, path: str | None) -> EventLog:
        if path is None:
            log.info("no log directory is configured; the log is kept in memory", option="sampler_kwargs.log")
            return MemoryLog()
        options = self.options
        if os.path.lexists(RunDir.at(path).marker):
            return FileLog.open(path, durability=options.durability, later=self._steps, take_over=options.take_over)
        return FileLog.create(path, durability=options.durability, later=self._steps)

    def begin(self, partition: str, weight_version: int) -> None:
        """Take in the log, before the first look at a partition. The trainer says where it is."""
        if self._feed is not None:
            return
        # A trainer that starts validates what it has, and trains the version after that.
        done = weight_version if kind_of(partition) == ev.VALIDATION else weight_version - 1
        self._feed = self._begun(weight_version, lambda ledger: self._resumed(ledger, done))
        listed = self._partition(self._training)
        listed.look()
        book, uids = self._feed.book, listed.listed()
        lost = [uid for uid in uids if book.departed.get(self._lives.latest(book, uid)) is Phase.COMMITTED]
        if lost:
            self._begin_another(len(lost), weight_version)
        self.feed.ledger.observers.append(self.evictions.note)

    def _begun(self, weight_version: int, resume: Callable[[Ledger], CheckpointMark | None]) -> StatusFeed:
        self._begun_anew = self._log.last_seq > 0
        return StatusFeed.begin(
            self._log,
            self.rules,
            group_size=self.options.group_size or 1,
            weight_version=weight_version,
            resume=resume,
            steps=self._steps,
            restamps=self.options.restart_age == "restart",
        )

    @staticmethod
    def _resumed(ledger: Ledger, done: int) -> CheckpointMark | None:
        """Bring a log to where the trainer is, which has trained on all up to a weight version and on nothing after
        it: what it was given until then is committed, and what was committed after that isn't."""
        book = ledger.book
        for batch in sorted(book.batches):
            out = book.batches[batch]
            if out.partition == ev.TRAIN and out.weight_version <= done:
                ledger.record(ev.BatchCommitted(batch))
        if book.weight_version < done + 2:
            return None
        for mark in reversed(book.marks):
            if mark.weight_version == done:
                return CheckpointMark(run_id=book.run_id, **attrs.asdict(mark))
        return None

    def _begin_another(self, count: int, weight_version: int) -> None:
        """The trainer went back behind what the log can go back to: what comes now is another run."""
        self.close()
        path = self._path
        if path is not None:
            taken = (f"{path}-{number}" for number in itertools.count(2))
            path = next(name for name in taken if not os.path.lexists(RunDir.at(name).marker))
        log.warning(
            "TransferQueue lists groups that this log has as trained on, and no checkpoint mark lies before that: "
            "another log is begun",
            groups=count,
            log=self._path,
            other=path,
        )
        self._path = path
        self._log = self._opened(path)
        self._closed = False
        self._feed = self._begun(weight_version, lambda ledger: None)

    # Looking -----------------------------------------------------------------------------------------

    def _partition(self, name: str) -> Partition:
        if name not in self._partitions:
            self._partitions[name] = Partition(
                name, split_left=self.options.uid_split == "left", unordered=self.options.ties == "set"
            )
        return self._partitions[name]

    def look(self, name: str) -> None:
        """Take in what changed in a partition since the last look.

        Raises:
            UnknownTag: a prompt's tag can't be read, and the configuration says that this is an error. Nothing is
                taken in then, and all that is listed is looked at again at the next look.
        """
        partition = self._partition(name)
        first = not partition.seen
        changes = partition.look()
        changed = partition.listed() if first else changes.changed
        if name not in self._known:
            self._known.add(name)
            for uid in changed:
                self._lives.find(self.feed.book, uid, in_flight=partition.groups[uid].in_flight)
        removed = list(map(self._lives.id_of, changes.removed))
        if first:
            # What the log has of an earlier process and isn't there any more.
            kind, there = kind_of(name), set(map(self._lives.id_of, changed))
            removed = [
                group.group_id
                for group in self.feed.book.groups.values()
                if group.partition == kind and group.phase is not Phase.SAMPLED and group.group_id not in there
            ]
        partition.seen = False
        reports = self._reports(partition, changed)
        partition.seen = True
        self.feed.observe_changes({self._lives.id_of(uid): report for uid, report in reports.items()}, removed)
        for uid in changes.removed:
            self._folded.pop(uid, None)
        if self._begun_anew and name != VALIDATION:
            # A trainer that starts fills up its batches ahead by its own count of what is listed.
            self._begun_anew = False
            self.feed.give_up_refills("the process began anew")

    def _reports(self, partition: Partition, changed: Iterable[str]) -> dict[str, Reported]:
        kind = kind_of(partition.name)
        uids = [uid for uid in changed if self._is_of(uid, kind)]
        metrics = self._metrics_of(partition, uids) if kind == ev.TRAIN else {}
        reports = {uid: self._report(partition, uid, kind, metrics) for uid in uids}
        if self.options.unknown_tags == "raise":
            for uid, report in reports.items():
                if problem := malformed(uid, report):
                    raise UnknownTag(f"the prompt {uid!r} of partition {partition.name!r} can't be read: {problem}")
        return reports

    def _group(self, uid: str) -> Group | None:
        return self.feed.book.groups.get(self._lives.id_of(uid))

    def _is_of(self, uid: str, kind: ev.Partition) -> bool:
        """Whether an id means the group that it means in the log: nothing hinders a uid in two partitions."""
        group = self._group(uid)
        if group is None or group.partition == kind:
            return True
        log.warning("a uid is in two partitions; the later one is passed over", group=uid, partition=kind)
        return False

    def _report(self, partition: Partition, uid: str, kind: ev.Partition, metrics: dict[str, float]) -> Reported:
        listed = partition.groups[uid]
        tag = listed.tag or {}
        status = tag.get("status")
        rows: dict[Place, ReportedRow] = {}
        if status in ENDED:
            rows = {place: self._row(partition, key, metrics.get(key)) for place, key in listed.rows.items()}
        size = self._size(uid, kind, status, rows)
        return Reported(
            status=status,  # type: ignore[arg-type]
            stamp=self._stamp(uid, tag),  # type: ignore[arg-type]
            size=size,
            partition=kind,
            rows=rows if size is None else self._fitting(uid, status, rows, size),
        )

    def _stamp(self, uid: str, tag: Mapping[str, Any]) -> object:
        """The tag's version; of a prompt that was dispatched anew that of the group that it was, where ages stay."""
        if self.options.restart_age == "recorded" and (before := self._lives.before(uid)) is not None:
            group = self.feed.book.groups.get(before)
            if group is not None:
                return group.stamp
        return tag.get("global_steps")

    def _row(self, partition: Partition, key: str, value: float | None) -> ReportedRow:
        """A trajectory with its value of the filter's metric, if it has one."""
        if value is None:
            return partition.row(key, {})
        metric = self.rules.filter_metric
        assert metric is not None
        if self.options.not_finite == "fail" or math.isfinite(value):
            return partition.row(key, {metric: value})
        log.warning("a value is no number, and its group is kept", partition=partition.name, key=key, value=repr(value))
        return partition.row(key, {}, not_finite=(metric,))

    def _size(self, uid: str, kind: ev.Partition, status: object, rows: dict[Place, ReportedRow]) -> int | None:
        """Sessions of a group: those it was submitted with, else those that are configured or seen."""
        group = self._group(uid)
        if group is not None:
            return group.size
        configured = self.options.group_size if kind == ev.TRAIN else self.options.val_group_size
        seen = max((session for session, _ in rows), default=-1) + 1
        if configured is None and kind == ev.TRAIN:
            # The next ones that are submitted before they have ended will have as many.
            self.feed.group_size = max(self.feed.group_size, seen)
        if status == "failure" and len({session for session, _ in rows}) == seen:
            # One that has no trajectory has failed.
            seen += 1
        return max(configured or 0, seen) or None

    def _fitting(self, uid: str, status: object, rows: dict[Place, ReportedRow], size: int) -> dict[Place, ReportedRow]:
        """Trajectories of sessions that have no place in the log, as further ones of the last session that has.

        There is none for sessions beyond the size that a group was submitted with, and, where it has failed and every
        session has a trajectory, none for the last one: the log needs one that failed.
        """
        most = size
        if status == "failure" and size > 1 and len({min(session, size - 1) for session, _ in rows}) == size:
            most -= 1
        beyond = sorted(place for place in rows if place[0] >= most)
        if not beyond:
            return rows
        fitting = {place: row for place, row in rows.items() if place[0] < most}
        free = max((index for session, index in fitting if session == most - 1), default=-1) + 1
        places = {(most - 1, free + number): place for number, place in enumerate(beyond)}
        if uid not in self._folded and most == size:
            log.warning("a group has more sessions than the configured n; the log has them in the last one", group=uid)
        self._folded[uid] = places
        return fitting | {to: rows[place] for to, place in places.items()}

    def _metrics_of(self, partition: Partition, uids: Iterable[str]) -> dict[str, float]:
        """The filter's metric of the trajectories of groups that have finished, by key."""
        if self.rules.filter_metric is None:
            return {}
        keys: list[str] = []
        for uid in uids:
            group, listed = self._group(uid), partition.groups[uid]
            # Of a group that has ended here, late trajectories count for nothing.
            if (listed.tag or {}).get("status") == "finished" and (group is None or group.phase not in TERMINAL):
                keys += listed.rows.values()
        return partition.values(keys, self.rules.filter_metric)

    # Doing -------------------------------------------------------------------------------------------

    def _uids(self, group_ids: Iterable[str]) -> list[str]:
        """What these groups are listed as."""
        return [uid for group_id in group_ids if (uid := self._lives.uid_of(group_id)) is not None]

    def sampleable(self, kind: ev.Partition, weight_version: int | None = None) -> list[str]:
        """Uids of the groups that could be sampled, oldest first."""
        return self._uids(self.feed.sampleable(weight_version=weight_version, partition=kind))

    def check(self, name: str, count: int) -> None:
        """
        Raises:
            MissingVerlMetric: a group lacks the filter's metric.
            SampleError: so many groups will not be sampleable.
        """
        never = self.feed.why_never(count, kind_of(name))
        if isinstance(never, MissingMetric):
            partition = self._partition(name)
            raise explained(never, partition, self._keys_read(partition, never))
        if never is not None:
            raise never

    def advance(self, weight_version: int) -> None:
        """The trainer is at this version: what it was given before is trained on."""
        if weight_version > self.feed.book.weight_version:
            self._commit_out()
        self.feed.publish(weight_version)

    def _commit_out(self) -> None:
        """The trainer is done with the current version; there is a mark if verl saved a checkpoint of it."""
        for batch in self._out:
            self.feed.commit(batch)
        self._out.clear()
        book = self.feed.book
        if self._saved() and all(mark.weight_version != book.weight_version for mark in book.marks):
            self.feed.mark(os.path.basename(self._checkpoint))

    @property
    def _checkpoint(self) -> str:
        """Where verl keeps the checkpoint of the current version."""
        return f"{self.options.checkpoints}/global_step_{self.feed.book.weight_version}"

    def _saved(self) -> bool:
        return self.options.checkpoints is not None and os.path.exists(os.path.join(self._checkpoint, "data.pt"))

    def told(self, name: str) -> dict[str, Any]:
        """What was evicted and not told of yet, as verl's metrics. Of validation groups nothing is."""
        return self.evictions.take(name) if kind_of(name) == ev.TRAIN else {}

    def act(self, name: str) -> bool:
        """Clear what was evicted and replace it; True if TransferQueue is worth another look at once."""
        evicted = self._uids(self.feed.take_evicted())
        for partition in self._partitions.values():
            partition.clear(key for uid in evicted for key in partition.keys_of(uid))
        if kind_of(name) != ev.TRAIN:
            return False
        if not self.options.refills:
            self.feed.give_up_refills("nothing is refilled under this configuration")
            return False
        return self._dispatch(self.feed.take_refills())

    def _dispatch(self, count: int) -> bool:
        if not count:
            return False
        assert self._refill is not None
        try:
            done = self._refill(count)
        except BaseException:
            self.feed.return_refills(count)
            raise
        if isinstance(done, int) and not isinstance(done, bool) and 0 <= done < count:
            self.feed.return_refills(count - done)
            return done > 0
        return True

    def taken(self, name: str, waiter: Waiter) -> Taken | None:
        """The batch that was waited for, out of TransferQueue's prompts; None if it isn't there yet.

        Raises:
            NothingToTrainOn: no group of it has a trajectory, in sync mode; else such a batch is empty, as verl's.
            MissingVerlMetric: a group lacks the filter's metric.
            SampleError: it can't come.
        """
        try:
            sampled = self.feed.answer(waiter)
        except MissingMetric as error:
            partition = self._partition(name)
            raise explained(error, partition, self._keys_read(partition, error)) from None
        if sampled is None:
            return None
        partition = self._partition(name)
        if kind_of(name) == ev.TRAIN and self.rules.mode == "sync" and not sampled.keys:
            self.feed.release(sampled)
            raise NothingToTrainOn(
                f"{len(sampled.groups)} groups were sampled and none has a trajectory; "
                "trainer.v1.sampler.sync_refill_failed_groups=True replaces failed groups without any"
            )
        keys = [key for row in sampled.keys if (key := self._key_of(partition, row)) is not None]
        uids = self._uids(sampled.group_ids)
        # With the prompts go trajectories that aren't in the batch, such as those of sessions that were refused: the
        # trainer clears what it was given.
        given = set(keys)
        partition.clear(key for uid in uids for key in partition.keys_of(uid) if key not in given)
        for uid in uids:
            self._folded.pop(uid, None)
        if kind_of(name) == ev.TRAIN:
            self._out.append(sampled.batch)
        else:
            self.feed.commit(sampled)
        return Taken(sampled, keys, [dict(partition.tags[key]) for key in keys])

    def _keys_read(self, partition: Partition, missing: MissingMetric) -> list[str]:
        """The trajectories of a session that the filter reads, of what is listed now."""
        uid = self._lives.uid_of(missing.group_id)
        listed = partition.groups.get(uid) if uid is not None else None
        if uid is None or listed is None:
            return []
        to = {place: logged for logged, place in self._folded.get(uid, {}).items()}
        places = sorted(place for place in listed.rows if to.get(place, place)[0] == missing.session)
        last = None if self.rules.per == "trajectory" else -1
        return [listed.rows[place] for place in places[last:]]

    def _key_of(self, partition: Partition, row: RowKey) -> str | None:
        """A trajectory's key; None if somebody has taken it out, as can be in validation, where nothing is evicted."""
        uid, place = self._lives.uid_of(row.group_id), (row.session, row.index)
        if uid is None:
            return None
        return partition.groups[uid].rows.get(self._folded.get(uid, {}).get(place, place))
