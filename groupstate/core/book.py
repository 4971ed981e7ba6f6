"""The projection of the log: every live group, the indexes over them, and the totals.

Rule 1: only `apply` changes it, and only after everything that could be wrong was checked.
Rule 2: applying an event costs the same however many groups are held.
Rule 3: nothing here reads a rule, but the few that say how groups are kept in order (`_in_force`); the log
carries them.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import msgspec
from msgspec.structs import replace

from groupstate.core import book_checks as checks
from groupstate.core import events as ev
from groupstate.core.departed import Departed
from groupstate.core.group import Group, evolve, submitted, versions_used
from groupstate.core.held import UNDELIVERED, Credit, DatasetUse, Mark, OpenBatch, OpenRequest, Window
from groupstate.core.phases import IN_FLIGHT, TERMINAL, Phase, kept_empty, next_phase
from groupstate.core.shelf import Shelf
from groupstate.errors import UnknownGroup, UnsupportedLog

DEPARTED_IDS_MAX = 1_000_000
"""Ids of groups that have left, kept to refuse their reuse and to fence their late results (10 to 30 MB)."""

MARKS_REMEMBERED = 100
"""Marks of which the place is known, to keep the events since one of them."""

MARKS_KEPT = 2
"""Checkpoint marks that a run can go back to; committed groups newer than the older one are kept aside."""

BASES = frozenset({"dispatch", "first_token", "oldest_token", "newest_token", "target_version"})
"""What the rules may count lag from."""


class Book:
    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        """Live groups: everything but evicted and committed ones."""
        self.aside: dict[str, Group] = {}
        """Committed groups that a kept mark could still bring back."""
        self.departed = Departed()
        """The last so many groups that have left, in the order in which they did."""
        self.requests: dict[int, OpenRequest] = {}
        self.batches: dict[int, OpenBatch] = {}
        self.credits: deque[Credit] = deque()
        self.marks: list[Mark] = []
        self.mark_seqs: deque[int] = deque(maxlen=MARKS_REMEMBERED)
        """Events of the last marks, those that can't be gone back to any more included."""
        self.windows: dict[ev.Partition, Window] = {}
        self.totals: Counter[str] = Counter()
        self.datasets: dict[str, Counter[str]] = {}
        self.uses: dict[str, DatasetUse] = {}
        """Training groups by dataset."""
        self.targets: Counter[int] = Counter()
        """Training groups submitted and not evicted, by the weight version that they are made for; from the
        lowest version on that the run may come to (again)."""
        self.run_id = ""
        self.started_at_ns = 0
        self.openings = 0
        self.library = ""
        """The version that opened the run last."""
        self.rules: dict[str, Any] = {}
        self.rules_version = 1
        """Which meaning of the rules' settings is in force."""
        self.weight_version = 0
        self.lineage = 1
        self.last_seq = 0
        self.last_at_ns = 0
        self.last_request = 0
        self.last_batch = 0
        self.last_mark = 0
        self.source_position = 0
        """Index of the first prompt of the source that was not submitted yet."""
        self.source_positions: dict[str, int] = {}
        """The same by dataset, for a source of several."""
        self.source_exhausted = False
        self.source: ev.SourceOpened | None = None
        """What the positions count in, once a source has said so."""
        self.held_reason = ""
        self.closed = False
        self.released: list[ev.PayloadRef] = []
        """Payloads that nothing will ask for any more, since the ledger last looked."""
        self.notes_released = True
        """False where nobody will look, as in a replay."""
        self._previewed: tuple[ev.Event, int, int, Group, Group] | None = None
        """What `preview` said last (event, seq, at_ns, group before and after), so that an `apply` of the very same
        needn't find it again."""
        self._windows_out: dict[int, Window] = {}
        """What the batches that are out reported, in case they never reach anybody."""
        self._basis = "dispatch"
        self._kept_empty: frozenset[Phase] = frozenset()
        self._classes: frozenset[str] = frozenset()
        self._shelves: dict[ev.Partition, Shelf] = {}
        self._committed_at: deque[tuple[int, str]] = deque()

    # Reading -----------------------------------------------------------------------------------------

    def group(self, group_id: str, tried: str = "look up") -> Group:
        """The live group.

        Raises:
            UnknownGroup: it never was submitted or it has left.
        """
        found = self.groups.get(group_id)
        if found is None:
            left = self.departed.get(group_id)
            raise UnknownGroup(group_id, tried, f"it was {left} and has left" if left else "it was never submitted")
        return found

    def live(self, group_id: str, kind: type[ev.Event]) -> Group:
        """The group, for an event of `kind` that is about it.

        Raises:
            GroupstateError: the group has left, or never was.
        """
        group = self.groups.get(group_id)
        if group is None:
            next_phase(self.departed.get(group_id), kind, group_id)
        assert group is not None, "a group that has left or never was has no cell for it"
        return group

    def lag(self, group: Group) -> int:
        """Weight versions between what the group counts from and the current one; 0 if it is newer.

        A group whose batch came back keeps the lag it was sampled with: a resumed trainer is where it was
        then, and takes the same groups in the same order."""
        if group.kept_lag is not None:
            return group.kept_lag
        return max(0, self.weight_version - group.aged_from)

    def count(self, *phases: Phase, partition: ev.Partition | None = None) -> int:
        if partition is not None and len(phases) == 1:
            shelf = self._shelves.get(partition)
            return len(shelf.phases[phases[0]]) if shelf is not None else 0
        shelves = self._shelves.values() if partition is None else [self._look(partition)]
        return sum(len(shelf.phases[phase]) for shelf in shelves for phase in phases)

    def places(self) -> list[tuple[tuple[ev.Partition, Phase], int]]:
        """How many live groups there are, by partition and phase; where there are none nothing is said."""
        return [
            ((partition, phase), len(ids))
            for partition, shelf in self._shelves.items()
            for phase, ids in shelf.phases.items()
            if ids
        ]

    def in_phase(self, phase: Phase, partition: ev.Partition | None = None) -> Iterator[Group]:
        """Live groups in a phase, in the order in which they came to it."""
        shelves = list(self._shelves.values()) if partition is None else [self._look(partition)]
        return (self.groups[group_id] for shelf in shelves for group_id in shelf.phases[phase])

    def in_flight_count(self, partition: ev.Partition = ev.TRAIN) -> int:
        shelf = self._shelves.get(partition)
        return len(shelf.in_flight) if shelf is not None else 0

    def ready_count(self, partition: ev.Partition = ev.TRAIN) -> int:
        shelf = self._shelves.get(partition)
        return len(shelf.ready) if shelf is not None else 0

    def ready(self, partition: ev.Partition = ev.TRAIN) -> Iterator[Group]:
        """Terminal groups that can be sampled, oldest first (version, then submission)."""
        return (self.groups[key[2]] for key in self._look(partition).ready)

    def freshest(self, partition: ev.Partition = ev.TRAIN) -> Iterator[Group]:
        """The same groups, newest version first (then submission)."""
        return map(self.groups.__getitem__, self._look(partition).freshest())

    def ready_at(self, version: int, partition: ev.Partition = ev.TRAIN) -> Iterator[Group]:
        """Those of them that were made for one weight version, in the order of submission."""
        return map(self.groups.__getitem__, self._look(partition).ready_at(version))

    def ready_count_at(self, version: int, partition: ev.Partition = ev.TRAIN) -> int:
        return self._look(partition).ready_count_at(version)

    def in_flight_count_at(self, version: int, partition: ev.Partition = ev.TRAIN) -> int:
        return self._look(partition).in_flight.count_at(version)

    def by_age(self, partition: ev.Partition = ev.TRAIN) -> Iterator[Iterator[Group]]:
        """Sampleable groups whose lag grows with the current version, highest lag first; apart by lag bound."""
        return (map(self.groups.__getitem__, ids) for _, ids in self._look(partition).aging.by_class())

    def in_flight_by_age(self, partition: ev.Partition = ev.TRAIN) -> Iterator[Iterator[Group]]:
        """Groups in flight, highest lag first; apart by lag bound."""
        return (map(self.groups.__getitem__, ids) for _, ids in self._look(partition).in_flight.by_class())

    def waiting(self, partition: ev.Partition = ev.TRAIN) -> list[OpenRequest]:
        """Waiting `sample()` calls in order of arrival."""
        if not self.requests:
            return []
        return [request for request in self.requests.values() if request.partition == partition]

    def window(self, partition: ev.Partition) -> Window:
        """Counts since the partition's previous batch; for looking only."""
        return self.windows.get(partition) or Window()

    def partitions(self) -> list[ev.Partition]:
        return sorted(self._shelves)

    def is_taken(self, group_id: str) -> str | None:
        """Where an id is in use, as text; None if it is free."""
        if group_id in self.groups:
            return f"it is {self.groups[group_id].phase}"
        left = self.departed.get(group_id)
        return f"it was {left} and has left the book" if left else None

    # Writing -----------------------------------------------------------------------------------------

    def preview(self, event: ev.Event, seq: int, at_ns: int) -> Group | None:
        """The group that `event` is about, as it would be after it; nothing is changed.

        Raises:
            GroupstateError: the event can't happen now.
        """
        check = checks.CHECKS.get(type(event))
        if check is not None:
            check(self, event)
            return None
        group_id = getattr(event, "group_id", None)
        if group_id is None:
            return None
        before = self.groups.get(group_id) or self.live(group_id, type(event))
        after = evolve(before, event, seq, at_ns)
        self._previewed = (event, seq, at_ns, before, after)
        return after

    def before(self, event: ev.GroupEvent) -> Group | None:
        """The group of the event that was just applied, as it was before: for observers that need what the event ended.

        None if it isn't known any more: it is from when the event was previewed, or the one before it.
        """
        known = self._previewed
        if known is None:
            return None
        if known[0] is event:
            return known[3]
        return known[4] if known[4].group_id == event.group_id else None

    def apply(self, record: ev.Record) -> None:
        """Take one event in.

        Raises:
            GroupstateError: the event can't happen now; nothing has changed.
        """
        assert record.seq == self.last_seq + 1, f"event {record.seq} after event {self.last_seq}"
        event, seq, at_ns = record.event, record.seq, record.at_ns
        _APPLY[type(event)](self, event, seq, at_ns)
        self.last_seq = seq
        self.last_at_ns = at_ns

    def state(self) -> dict[str, Any]:
        """Everything as plain values, for comparison and digests; order included where it matters."""
        return {
            "groups": [_plain(group) for group in self.groups.values()],
            "aside": [_plain(group) for group in self.aside.values()],
            "departed": {key: str(phase) for key, phase in self.departed.items()},
            "ready": {name: [list(key) for key in shelf.ready] for name, shelf in sorted(self._shelves.items())},
            "aging": {name: shelf.aging.state() for name, shelf in sorted(self._shelves.items())},
            "in_flight": {name: shelf.in_flight.state() for name, shelf in sorted(self._shelves.items())},
            "phases": {
                name: {str(phase): list(ids) for phase, ids in shelf.phases.items()}
                for name, shelf in sorted(self._shelves.items())
            },
            "requests": [attrs.astuple(request) for request in self.requests.values()],
            "batches": [attrs.astuple(batch) for batch in self.batches.values()],
            "credits": [attrs.astuple(credit) for credit in self.credits],
            "marks": [attrs.astuple(mark) for mark in self.marks],
            "mark_seqs": list(self.mark_seqs),
            "windows": {name: attrs.asdict(window) for name, window in sorted(self.windows.items())},
            "totals": dict(sorted(self.totals.items())),
            "datasets": {name: dict(sorted(c.items())) for name, c in sorted(self.datasets.items())},
            "uses": {name: attrs.astuple(use) for name, use in sorted(self.uses.items())},
            "targets": sorted(self.targets.items()),
            "run": [
                self.run_id,
                self.started_at_ns,
                self.openings,
                self.library,
                self.rules,
                self.rules_version,
                self.weight_version,
                self.lineage,
                self.last_seq,
                self.last_request,
                self.last_batch,
                self.last_mark,
                self.source_position,
                dict(sorted(self.source_positions.items())),
                self.source_exhausted,
                self.source and msgspec.to_builtins(self.source),
                self.held_reason,
                self.closed,
            ],
        }

    def digest(self) -> str:
        """SHA-256 of `state()`: equal books have equal digests."""
        return hashlib.sha256(msgspec.json.encode(self.state())).hexdigest()

    # Parts of apply ----------------------------------------------------------------------------------

    def _look(self, partition: ev.Partition) -> Shelf:
        """The indexes of a partition, for reading: one that was never heard of isn't listed by it."""
        return self._shelves.get(partition) or Shelf()

    def _count_in(self, partition: ev.Partition) -> Window:
        if partition not in self.windows:
            self.windows[partition] = Window()
        return self.windows[partition]

    def _shelf(self, partition: ev.Partition) -> Shelf:
        shelf = self._shelves.get(partition)
        if shelf is None:
            shelf = self._shelves[partition] = Shelf(self._classes)
        return shelf

    def _put(self, before: Group, after: Group) -> None:
        """Replace a live group by what it is in another phase, and move it between the indexes."""
        after = self._aged(before, after)
        self._shelf(before.partition).move(before, after)
        self.groups[after.group_id] = after

    def _changed(self, event: Any, seq: int, at_ns: int) -> Group:
        """Replace the live group that an event is about; gives it as it was."""
        group_id = event.group_id
        before = self.groups.get(group_id) or self.live(group_id, type(event))
        known = self._previewed
        if known is None or known[0] is not event or known[3] is not before or known[1:3] != (seq, at_ns):
            after = evolve(before, event, seq, at_ns)
        else:
            after = known[4]
        if after.phase is before.phase and after.aged_from == before.aged_from:
            self.groups[group_id] = after
        else:
            self._put(before, after)
        return before

    def _aged(self, before: Group, after: Group) -> Group:
        """A group that has just become terminal keeps the version of then, and counts its lag from what the basis
        says."""
        if before.phase not in IN_FLIGHT or after.phase not in TERMINAL:
            return after
        empty = not after.trajectory_count and after.partition == ev.TRAIN
        after = replace(
            after,
            ended_version=self.weight_version,
            kept_empty=empty and after.phase in self._kept_empty,
        )
        used = None if self._basis in {"dispatch", "target_version"} else versions_used(before)
        if used is None:
            return after
        first, oldest, newest = used
        version = {"first_token": first, "oldest_token": oldest, "newest_token": newest}[self._basis]
        return replace(after, version=version, aged_from=version)

    def _leave(self, group: Group, phase: Phase) -> None:
        self._shelf(group.partition).remove(group)
        del self.groups[group.group_id]
        self._depart(group.group_id, phase)

    def _let_go(self, group: Group) -> None:
        if self.notes_released:
            self.released += group.payloads()

    def _depart(self, group_id: str, phase: Phase) -> None:
        self.departed.add(group_id, phase)
        if len(self.departed) > DEPARTED_IDS_MAX:
            self.departed.forget_oldest()

    def _dataset(self, name: str) -> Counter[str]:
        if name not in self.datasets:
            self.datasets[name] = Counter()
        return self.datasets[name]

    # Groups

    def _submitted(self, event: ev.GroupSubmitted, seq: int, at_ns: int) -> None:
        checks.check_submitted(self, event)
        group = submitted(event, seq, at_ns)
        self.groups[group.group_id] = group
        self._shelf(group.partition).add(group)
        self.totals["submitted"] += 1
        self._dataset(group.dataset)["submitted"] += 1
        window = self._count_in(group.partition)
        window.submitted += 1
        if event.cause == "refill":
            self.credits.popleft()
            self.totals["refills"] += 1
            window.refills += 1
        self.source_position = max(self.source_position, event.source_position + 1)
        if event.source_position >= 0:
            self.totals["drawn"] += 1
            known = self.source_positions.get(event.dataset, 0)
            self.source_positions[event.dataset] = max(known, event.source_position + 1)
        if group.partition == ev.TRAIN:
            self._used_more(group)

    def _used_more(self, group: Group) -> None:
        """A training group was submitted."""
        if group.target_version is not None:
            self.targets[group.target_version] += 1
        use = self.uses.get(group.dataset)
        if use is None:
            use = self.uses[group.dataset] = DatasetUse()
        if not use.open and not use.new:
            use.version = use.told_version = self.weight_version
        use.submitted += 1
        use.open += 1
        use.new += 1

    def _evicted(self, event: ev.GroupEvicted, seq: int, at_ns: int) -> None:
        before = self.live(event.group_id, ev.GroupEvicted)
        after = evolve(before, event, seq, at_ns)
        self._leave(before, after.phase)
        self._let_go(after)
        self.totals["evicted"] += 1
        self.totals["credit"] += event.credit
        self._dataset(before.dataset)["evicted"] += 1
        self.credits.extend(
            [Credit(before.needed, before.dataset, before.group_id, before.target_version)] * event.credit
        )
        if before.partition == ev.TRAIN:
            self.uses[before.dataset].evicted += 1
            self.uses[before.dataset].open -= 1
            if before.target_version is not None and before.target_version in self.targets:
                self.targets[before.target_version] -= 1
        window = self._count_in(before.partition)
        window.evicted_groups += 1
        for reason in event.reasons:
            window.evicted[reason] += 1
            self.totals[f"evicted/{reason}"] += 1
        if "stale" in event.reasons:
            window.stale_lags.append(event.lag)
        if event.shared_value is not None:
            window.filtered_values[event.shared_value] += 1

    def _fenced(self, event: ev.ResultFenced, seq: int, at_ns: int) -> None:
        checks.check_fenced(self, event)
        self.totals["fenced"] += 1
        group = self.groups.get(event.group_id)
        if group is not None:
            self._count_in(group.partition).fenced += 1

    def _session_finished(self, event: ev.SessionFinished, seq: int, at_ns: int) -> None:
        self._changed(event, seq, at_ns)
        self.count_finished(1, sum([row.response_tokens for row in event.trajectories]))

    def count_finished(self, sessions: int, response_tokens: int) -> None:
        self.totals["sessions_finished"] += sessions
        self.totals["response_tokens"] += response_tokens

    def _session_failed(self, event: ev.SessionFailed, seq: int, at_ns: int) -> None:
        before = self._changed(event, seq, at_ns)
        self.totals[f"session_failed/{event.failure}"] += 1
        self._count_in(before.partition).sessions_failed[event.failure] += 1

    def _forfeited(self, event: ev.RefillForfeited, seq: int, at_ns: int) -> None:
        checks.check_forfeited(self, event)
        for _ in range(min(event.count, len(self.credits))):
            self.credits.pop()
            self.totals["forfeited"] += 1
        self._count_in(ev.TRAIN).forfeited += event.count

    def _requeued(self, event: ev.GroupRequeued, seq: int, at_ns: int) -> None:
        before = self._changed(event, seq, at_ns)
        self._count_in(before.partition).requeued += event.by_rule
        self._let_go(replace(before, prompt=None))

    # Batches

    def _requested(self, event: ev.BatchRequested, seq: int, at_ns: int) -> None:
        checks.check_requested(self, event)
        self.requests[event.request] = OpenRequest(
            event.request, event.partition, event.size, event.weight_version, seq, at_ns
        )
        self._shelf(event.partition)
        self.last_request = event.request

    def _request_cancelled(self, event: ev.BatchRequestCancelled, seq: int, at_ns: int) -> None:
        checks.check_request_cancelled(self, event)
        del self.requests[event.request]

    def _sampled(self, event: ev.BatchSampled, seq: int, at_ns: int) -> None:
        groups = checks.check_sampled(self, event)
        for group, lag in zip(groups, event.lags, strict=True):
            after = replace(evolve(group, event, seq, at_ns), batch=event.batch, sampled_lag=lag)
            self._put(group, after)
            self._dataset(group.dataset)["sampled"] += 1
            self._opened(group, -1)
        del self.requests[event.request]
        self.batches[event.batch] = OpenBatch(
            event.batch, event.partition, event.group_ids, event.lags, event.weight_version, seq
        )
        self.last_batch = event.batch
        self.totals["batches"] += 1
        self._windows_out[event.batch] = self._count_in(event.partition)
        self.windows[event.partition] = Window()

    def _returned(self, event: ev.BatchReturned, seq: int, at_ns: int) -> None:
        batch = checks.check_batch(self, event, "return")
        del self.batches[event.batch]
        reported = self._windows_out.pop(event.batch, None)
        if reported is not None and event.reason in UNDELIVERED:
            self._count_in(batch.partition).add(reported)
        for group_id in batch.group_ids:
            group = self.groups[group_id]
            self._put(group, self._back(group, evolve(group, event, seq, at_ns)))
            self._opened(group, 1)
        self.totals["batches_returned"] += 1

    def _opened(self, group: Group, one: int) -> None:
        """A training group has gone into a batch, or come out of one."""
        if group.partition != ev.TRAIN:
            return
        use = self.uses[group.dataset]
        use.open += one
        if one < 0:
            use.new = 0
            use.version = use.told_version = self.weight_version

    def _back(self, before: Group, after: Group) -> Group:
        """A group made for one version keeps no lag: it is sampled at that version, or never."""
        kept = None if self._basis == "target_version" else before.sampled_lag
        return replace(after, kept_lag=kept, batch=0, sampled_lag=0)

    def _committed(self, event: ev.BatchCommitted, seq: int, at_ns: int) -> None:
        batch = checks.check_batch(self, event, "commit")
        del self.batches[event.batch]
        self._windows_out.pop(event.batch, None)
        for group_id in batch.group_ids:
            before = self.groups[group_id]
            self._leave(before, Phase.COMMITTED)
            self._dataset(before.dataset)["committed"] += 1
            after = evolve(before, event, seq, at_ns)
            if self.marks:
                self.aside[group_id] = after
                self._committed_at.append((seq, group_id))
            else:
                self._let_go(after)
        self.totals["committed"] += len(batch.group_ids)
        self.totals[f"committed/{batch.partition}"] += len(batch.group_ids)
        self.totals["batches_committed"] += 1

    # Run

    def _run_started(self, event: ev.RunStarted, seq: int, at_ns: int) -> None:
        self._in_force(event.rules, event.weight_version, event.lineage)
        self.run_id, self.started_at_ns, self.openings, self.library = event.run_id, at_ns, 1, event.library
        self.rules_version = event.rules_version

    def _recovered(self, event: ev.RunRecovered, seq: int, at_ns: int) -> None:
        self._in_force(event.rules, event.weight_version, event.lineage)
        self.rules_version = event.rules_version
        self.closed = False
        self.openings += 1
        self.library = event.library
        # Who waited is gone with its process, and the source may hold more than it did.
        self.requests.clear()
        self.source_exhausted = False

    def _in_force(self, rules: dict[str, Any], weight_version: int, lineage: int) -> None:
        basis = rules.get("basis", "dispatch")
        if basis not in BASES:
            raise UnsupportedLog(
                f"the log's rules count lag from {basis!r} (basis), which this version of groupstate doesn't know: "
                "a newer one wrote it. Open it with that version, or a later one"
            )
        self.rules = rules
        self._basis = basis
        self._kept_empty = kept_empty(rules)
        own = rules.get("datasets", {})
        classes = frozenset(name for name, settings in own.items() if settings.get("lag_max") is not None)
        if classes != self._classes:
            self._classes = classes
            for partition, shelf in self._shelves.items():
                shelf.classify(classes, (g for g in self.groups.values() if g.partition == partition))
        self._at_version(weight_version, lineage)

    def _at_version(self, weight_version: int, lineage: int) -> None:
        """A line of weights begins, maybe below where the one before it was."""
        self.weight_version = weight_version
        self.lineage = lineage
        for use in self.uses.values():
            use.version = min(use.version, weight_version)
            use.told_version = min(use.told_version, weight_version)

    def _published(self, event: ev.WeightsPublished, seq: int, at_ns: int) -> None:
        self.weight_version = event.weight_version
        self.lineage = event.lineage
        needed_from = min([event.weight_version, *(mark.weight_version for mark in self.marks)])
        for version in [version for version in self.targets if version < needed_from]:
            del self.targets[version]

    def _starved(self, event: ev.DatasetStarved, seq: int, at_ns: int) -> None:
        checks.check_starved(self, event)
        use = self.uses[event.dataset]
        use.told_version, use.new = self.weight_version, 0
        self.totals["starved"] += 1
        self._count_in(ev.TRAIN).starved[event.dataset] += 1

    def _exhausted(self, event: ev.SourceExhausted, seq: int, at_ns: int) -> None:
        self.source_exhausted = True

    def _source_opened(self, event: ev.SourceOpened, seq: int, at_ns: int) -> None:
        self.source = event

    def _held(self, event: ev.AdmissionHeld, seq: int, at_ns: int) -> None:
        self.held_reason = event.reason

    def _marked(self, event: ev.CheckpointMarked, seq: int, at_ns: int) -> None:
        self.last_mark = event.mark
        self.marks.append(Mark(event.mark, seq, event.weight_version, event.lineage, event.name))
        del self.marks[:-MARKS_KEPT]
        self.mark_seqs.append(seq)
        while self._committed_at and self._committed_at[0][0] <= self.marks[0].seq:
            self._let_go(self.aside.pop(self._committed_at.popleft()[1]))

    def _rewound(self, event: ev.RunRewound, seq: int, at_ns: int) -> None:
        checks.check_rewound(self, event)
        self._at_version(event.weight_version, event.lineage)
        self.marks = [mark for mark in self.marks if mark.seq <= event.mark_seq]
        while self.mark_seqs and self.mark_seqs[-1] > event.mark_seq:
            self.mark_seqs.pop()
        for group in list(self.groups.values()):
            capped = _capped(group, event.weight_version)
            if capped is not group:
                self._shelf(group.partition).remove(group)
                self._shelf(group.partition).add(capped)
                self.groups[group.group_id] = capped
        undone = [group_id for at, group_id in self._committed_at if at > event.mark_seq]
        self._committed_at = deque((at, g) for at, g in self._committed_at if at <= event.mark_seq)
        for group_id in undone:
            before = self.aside.pop(group_id)
            after = _capped(self._back(before, evolve(before, event, seq, at_ns)), event.weight_version)
            self.groups[group_id] = after
            self._shelf(after.partition).add(after)
            self._dataset(after.dataset)["committed"] -= 1
            self.totals[f"committed/{after.partition}"] -= 1
            self._opened(after, 1)
        self.departed.remove(undone)
        self.totals["committed"] -= len(undone)

    def _closed(self, event: ev.RunClosed, seq: int, at_ns: int) -> None:
        self.closed = True


def _plain(group: Group) -> Any:
    return msgspec.to_builtins(replace(group, kept=group.sessions))


def _capped(group: Group, weight_version: int) -> Group:
    """Work of the abandoned line of weights counts its lag from the mark, but for what awaits a later version."""
    if group.ended_version > weight_version:
        group = replace(group, ended_version=weight_version)
    if group.aged_from <= weight_version or group.target_version is not None:
        return group
    return replace(group, aged_from=weight_version, rewound_to=weight_version)


_APPLY: dict[type[ev.Event], Callable[[Book, Any, int, int], object]] = {
    ev.RunStarted: Book._run_started,
    ev.WeightsPublished: Book._published,
    ev.SourceExhausted: Book._exhausted,
    ev.AdmissionHeld: Book._held,
    ev.DatasetStarved: Book._starved,
    ev.SourceOpened: Book._source_opened,
    ev.CheckpointMarked: Book._marked,
    ev.RunRecovered: Book._recovered,
    ev.RunRewound: Book._rewound,
    ev.RunClosed: Book._closed,
    ev.GroupSubmitted: Book._submitted,
    ev.GroupFinished: Book._changed,
    ev.GroupFailed: Book._changed,
    ev.GroupEvicted: Book._evicted,
    ev.GroupRequeued: Book._requeued,
    ev.ResultFenced: Book._fenced,
    ev.RefillForfeited: Book._forfeited,
    ev.SessionStarted: Book._changed,
    ev.SessionFinished: Book._session_finished,
    ev.SessionFailed: Book._session_failed,
    ev.BatchRequested: Book._requested,
    ev.BatchRequestCancelled: Book._request_cancelled,
    ev.BatchSampled: Book._sampled,
    ev.BatchReturned: Book._returned,
    ev.BatchCommitted: Book._committed,
}
