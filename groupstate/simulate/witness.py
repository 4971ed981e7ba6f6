"""Who stands beside a simulated run: keeps what the trainer was told, and holds the log against that.

Rule 1: it asks nothing of the library's book; what the events mean is written here once more, in a few lines.
Rule 2: it takes in only events that are durable, so that a crash takes none of them back.
"""

from collections.abc import Callable, Iterable
from typing import Any

import attrs

from groupstate.batch import Batch
from groupstate.core import events as ev
from groupstate.errors import GroupstateError
from groupstate.runtime.recovery import CheckpointMark
from groupstate.simulate.prompts import Told, prompt_key


class Breach(GroupstateError):
    """Something that must never happen has happened."""

    def __init__(self, kind: str, text: str, seq: int = 0) -> None:
        self.kind = kind
        """What of all that must not happen, in a word or two: what a smaller run has to show too."""
        self.text = text
        self.seq = seq
        """The event at which it shows; 0 where it is none in particular."""
        super().__init__(f"{kind}: {text}")


@attrs.define
class InLog:
    """What the durable events say, plainly."""

    out: dict[int, tuple[str, ...]] = attrs.Factory(dict)
    sampled: dict[int, tuple[str, ...]] = attrs.Factory(dict)
    commits: list[tuple[int, int]] = attrs.Factory(list)
    """(seq, batch) of those that stand."""
    ever_committed: set[int] = attrs.Factory(set)
    marks: list[tuple[int, int]] = attrs.Factory(list)
    """(seq, mark), those that can be gone back to."""
    positions: dict[str, int] = attrs.Factory(dict)
    """Prompts of each dataset that were submitted."""
    left: dict[str, str] = attrs.Factory(dict)
    """Groups that left, and how."""
    validation: set[int] = attrs.Factory(set)
    """Batches of the validation partition: its rounds commit by themselves, and no trainer asks for it."""
    groups: int = 0
    version: int = 0
    recovering: bool = False
    rewinds: int = 0

    def feed(self, record: ev.Record) -> None:
        """
        Raises:
            Breach: what the event says can't be.
        """
        event = record.event
        if self.recovering and not isinstance(event, ev.BatchReturned | ev.RunRecovered):
            self.recovering = False
            if self.out:
                raise Breach("lost", f"batches {sorted(self.out)} were out and did not come back", record.seq)
        handler = _FEED.get(type(event))
        if handler is not None:
            handler(self, event, record.seq)

    def _submitted(self, event: ev.GroupSubmitted, seq: int) -> None:
        self.groups += 1
        if event.cause == "submit":
            return
        wanted = self.positions.get(event.dataset, 0)
        if event.source_position != wanted:
            told = "was submitted before" if event.source_position < wanted else "leaves out those before it"
            text = f"group {event.group_id!r} is of prompt {event.source_position} of {event.dataset!r}, which {told}"
            raise Breach("prompts", f"{text}; {wanted} is next", seq)
        self.positions[event.dataset] = wanted + 1

    def _evicted(self, event: ev.GroupEvicted, seq: int) -> None:
        if event.group_id in self.left:
            raise Breach("twice", f"group {event.group_id!r} is evicted and was {self.left[event.group_id]}", seq)
        if "damaged" in event.reasons:
            raise Breach("lost", f"a payload of group {event.group_id!r} is gone: {event.message}", seq)
        self.left[event.group_id] = "evicted"

    def _sampled(self, event: ev.BatchSampled, seq: int) -> None:
        taken = {group for groups in self.out.values() for group in groups}
        for group_id in event.group_ids:
            if group_id in taken or group_id in self.left:
                how = self.left.get(group_id, "in a batch that is out")
                raise Breach("twice", f"batch {event.batch} takes group {group_id!r}, which is {how}", seq)
        self.out[event.batch] = self.sampled[event.batch] = event.group_ids
        if event.partition != ev.TRAIN:
            self.validation.add(event.batch)

    def _published(self, event: ev.WeightsPublished, seq: int) -> None:
        self.version = event.weight_version

    def _returned(self, event: ev.BatchReturned, seq: int) -> None:
        self.out.pop(event.batch, None)

    def _committed(self, event: ev.BatchCommitted, seq: int) -> None:
        groups = self.out.pop(event.batch, None)
        if groups is None:
            raise Breach("twice", f"batch {event.batch} is committed and was not out", seq)
        self.commits.append((seq, event.batch))
        self.ever_committed.add(event.batch)
        self.left.update(dict.fromkeys(groups, "committed"))

    def _marked(self, event: ev.CheckpointMarked, seq: int) -> None:
        self.marks = [*self.marks, (seq, event.mark)][-2:]

    def _recovered(self, event: ev.RunRecovered, seq: int) -> None:
        self.recovering = True
        self.version = event.weight_version

    def _rewound(self, event: ev.RunRewound, seq: int) -> None:
        self.rewinds += 1
        self.version = event.weight_version
        while self.commits and self.commits[-1][0] > event.mark_seq:
            _, batch = self.commits.pop()
            for group_id in self.sampled[batch]:
                del self.left[group_id]
        self.marks = [mark for mark in self.marks if mark[0] <= event.mark_seq]


_FEED: dict[type[ev.Event], Callable[[InLog, Any, int], None]] = {
    ev.GroupSubmitted: InLog._submitted,
    ev.GroupEvicted: InLog._evicted,
    ev.WeightsPublished: InLog._published,
    ev.BatchSampled: InLog._sampled,
    ev.BatchReturned: InLog._returned,
    ev.BatchCommitted: InLog._committed,
    ev.CheckpointMarked: InLog._marked,
    ev.RunRecovered: InLog._recovered,
    ev.RunRewound: InLog._rewound,
}


@attrs.define
class Witness:
    """The trainer's own account, over all lives of its run."""

    log: InLog = attrs.Factory(InLog)
    out: dict[int, tuple[str, ...]] = attrs.Factory(dict)
    """Batches that the trainer has."""
    told_sampled: dict[int, tuple[str, ...]] = attrs.Factory(dict)
    told_committed: set[int] = attrs.Factory(set)
    trained: dict[str, int] = attrs.Factory(dict)
    """Prompts that are committed for good, and the batch."""
    prompts: dict[int, tuple[str, ...]] = attrs.Factory(dict)
    """Of each batch."""
    doubtful: set[int] = attrs.Factory(set)
    """Batches whose commit was asked for, and that nobody said was done."""
    marks: list[CheckpointMark] = attrs.Factory(list)
    began: dict[tuple[str, int], int] = attrs.Factory(dict)
    """The latest attempt of each session that has begun in this life."""

    # What the session functions say ------------------------------------------------------------------

    def begins(self, group_id: str, session: int, attempt: int) -> None:
        """
        Raises:
            Breach: a session begins an attempt that isn't later than the one before.
        """
        key = (group_id, session)
        before = self.began.get(key, 0)
        if attempt <= before:
            raise Breach("twice", f"session {session} of group {group_id!r} begins attempt {attempt} after {before}")
        self.began[key] = attempt

    # What the trainer is told ------------------------------------------------------------------------

    def sampled(self, batch: Batch) -> None:
        """
        Raises:
            Breach: it was given something twice, or something that isn't what the sessions returned.
        """
        ids = tuple(batch.group_ids)
        held = {group_id for groups in self.out.values() for group_id in groups}
        if batch.number in self.told_sampled or held & set(ids) or len(set(ids)) < len(ids):
            raise Breach("twice", f"batch {batch.number} has groups that the trainer has already: {sorted(ids)}")
        for group in batch.groups:
            self._check_rows(batch.number, group.group_id, Told.of_batch(group))
        prompts = tuple(prompt_key(group.prompt) for group in batch.groups)
        for prompt in prompts:
            if prompt in self.trained:
                text = f"batch {batch.number} has prompt {prompt}, which was trained on in batch "
                raise Breach("twice", f"{text}{self.trained[prompt]} for good")
        self.out[batch.number] = self.told_sampled[batch.number] = ids
        self.prompts[batch.number] = prompts

    def _check_rows(self, number: int, group_id: str, rows: Iterable[Told]) -> None:
        for row in rows:
            who = f"batch {number} has a row of session {row.session} of group {group_id!r}"
            if (row.group_id, row.returned_by) != (group_id, row.session):
                raise Breach("rows", f"{who}, which session {row.returned_by} of group {row.group_id!r} returned")
            latest = self.began.get((group_id, row.session), row.attempt)
            if row.attempt != latest:
                raise Breach("rows", f"{who} of attempt {row.attempt}, and attempt {latest} has begun since")

    def asks_commit(self, number: int) -> None:
        self.doubtful.add(number)

    def committed(self, number: int) -> None:
        self.doubtful.discard(number)
        self.told_committed.add(number)
        del self.out[number]
        self.trained.update(dict.fromkeys(self.prompts[number], number))

    def released(self, number: int) -> None:
        del self.out[number]

    def marked(self, mark: CheckpointMark) -> None:
        self.marks.append(mark)

    # After a recovery --------------------------------------------------------------------------------

    def best_mark(self) -> CheckpointMark | None:
        """The last mark that was told and that the log, as far as it is known to be durable, still keeps."""
        kept = set(self.log.marks)
        return next((mark for mark in reversed(self.marks) if (mark.seq, mark.mark) in kept), None)

    def recovers(self) -> None:
        """Hold what was told against the durable events of the log that was opened again.

        Raises:
            Breach: something is lost, or was done twice.
        """
        for number, groups in self.told_sampled.items():
            if self.log.sampled.get(number) != groups:
                raise Breach("lost", f"batch {number} was given out and is not in the log")
        if missing := self.told_committed - self.log.ever_committed:
            raise Breach("lost", f"the commits of batches {sorted(missing)} were told and are not in the log")
        if lost := [mark for mark in self.marks[-1:] if mark.seq and not self._is_marked(mark)]:
            raise Breach("lost", f"mark {lost[0].mark} was told and is not in the log")
        standing = {number for _, number in self.log.commits}
        if not self.log.rewinds and (undone := self.told_committed - standing):
            raise Breach("lost", f"the commits of batches {sorted(undone)} were undone by nothing")
        # A commit that was asked for may have been done, and what a mark was gone back behind is to be done again.
        unexpected = standing - self.told_committed - self.doubtful - self.log.validation
        if unexpected:
            raise Breach("twice", f"batches {sorted(unexpected)} are committed, and nobody asked for it")
        self.told_committed = {number for number in self.told_committed if number in standing} | (
            standing & self.doubtful
        )
        self.trained = {
            prompt: number for number in sorted(self.told_committed) for prompt in self.prompts.get(number, ())
        }
        self.out.clear()
        self.doubtful.clear()

    def _is_marked(self, mark: CheckpointMark) -> bool:
        return (mark.seq, mark.mark) in self.log.marks or bool(self.log.rewinds)

    def ends(self) -> None:
        """The run has come to its end.

        Raises:
            Breach: a batch is out that the trainer doesn't have, or the other way round.
        """
        if self.log.out.keys() != self.out.keys():
            text = f"the log has batches {sorted(self.log.out)} out, the trainer has {sorted(self.out)}"
            raise Breach("account", text)
        alone = {number for _, number in self.log.commits} ^ self.told_committed
        if alone - self.log.validation:
            raise Breach("account", f"batches {sorted(alone)} are committed by one account and not by the other")
