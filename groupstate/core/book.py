"""The projection of the log: every live group, the indexes over them, and the totals.

Rule 1: only `apply` changes it, and only after everything that could be wrong was checked.
Rule 2: applying an event costs the same however many groups are held.
Rule 3: here is what it holds and answers; what an event changes is in `book_changes`.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import attrs
import msgspec
from msgspec.structs import replace

from groupstate.core import book_checks as checks
from groupstate.core import events as ev
from groupstate.core.book_changes import CHANGES
from groupstate.core.departed import Departed
from groupstate.core.group import Group, evolve
from groupstate.core.held import MARKS_REMEMBERED, Credit, DatasetUse, Mark, OpenBatch, OpenRequest, Window
from groupstate.core.phases import Phase, next_phase
from groupstate.core.shelf import Shelf
from groupstate.errors import UnknownGroup


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
        self.previewed: tuple[ev.Event, int, int, Group, Group] | None = None
        """What `preview` said last (event, seq, at_ns, group before and after), so that an `apply` of the very same
        needn't find it again."""
        self.windows_out: dict[int, Window] = {}
        """What the batches that are out reported, in case they never reach anybody."""
        self.basis = "dispatch"
        """What the rules in force count lag from."""
        self.kept_empty: frozenset[Phase] = frozenset()
        """Phases in which they keep a training group that ended without a trajectory."""
        self.lag_classes: frozenset[str] = frozenset()
        """Datasets with a lag bound of their own."""
        self.shelves: dict[ev.Partition, Shelf] = {}
        """The indexes over the live groups."""
        self.committed_at: deque[tuple[int, str]] = deque()
        """The commits of the groups that are kept aside: event and group id, oldest first."""

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
            shelf = self.shelves.get(partition)
            return len(shelf.phases[phases[0]]) if shelf is not None else 0
        shelves = self.shelves.values() if partition is None else [self._look(partition)]
        return sum(len(shelf.phases[phase]) for shelf in shelves for phase in phases)

    def places(self) -> list[tuple[tuple[ev.Partition, Phase], int]]:
        """How many live groups there are, by partition and phase; where there are none nothing is said."""
        return [
            ((partition, phase), len(ids))
            for partition, shelf in self.shelves.items()
            for phase, ids in shelf.phases.items()
            if ids
        ]

    def in_phase(self, phase: Phase, partition: ev.Partition | None = None) -> Iterator[Group]:
        """Live groups in a phase, in the order in which they came to it."""
        shelves = list(self.shelves.values()) if partition is None else [self._look(partition)]
        return (self.groups[group_id] for shelf in shelves for group_id in shelf.phases[phase])

    def in_flight_count(self, partition: ev.Partition = ev.TRAIN) -> int:
        shelf = self.shelves.get(partition)
        return len(shelf.in_flight) if shelf is not None else 0

    def ready_count(self, partition: ev.Partition = ev.TRAIN) -> int:
        shelf = self.shelves.get(partition)
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
        return sorted(self.shelves)

    def is_taken(self, group_id: str) -> str | None:
        """Where an id is in use, as text; None if it is free."""
        if group_id in self.groups:
            return f"it is {self.groups[group_id].phase}"
        left = self.departed.get(group_id)
        return f"it was {left} and has left the book" if left else None

    def _look(self, partition: ev.Partition) -> Shelf:
        """The indexes of a partition, for reading: one that was never heard of isn't listed by it."""
        return self.shelves.get(partition) or Shelf()

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
        self.previewed = (event, seq, at_ns, before, after)
        return after

    def before(self, event: ev.GroupEvent) -> Group | None:
        """The group of the event that was just applied, as it was before: for observers that need what the event ended.

        None if it isn't known any more: it is from when the event was previewed, or the one before it.
        """
        known = self.previewed
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
        CHANGES[type(event)](self, event, seq, at_ns)
        self.last_seq = seq
        self.last_at_ns = at_ns

    def state(self) -> dict[str, Any]:
        """Everything as plain values, for comparison and digests; order included where it matters."""
        return {
            "groups": [_plain(group) for group in self.groups.values()],
            "aside": [_plain(group) for group in self.aside.values()],
            "departed": {key: str(phase) for key, phase in self.departed.items()},
            "ready": {name: [list(key) for key in shelf.ready] for name, shelf in sorted(self.shelves.items())},
            "aging": {name: shelf.aging.state() for name, shelf in sorted(self.shelves.items())},
            "in_flight": {name: shelf.in_flight.state() for name, shelf in sorted(self.shelves.items())},
            "phases": {
                name: {str(phase): list(ids) for phase, ids in shelf.phases.items()}
                for name, shelf in sorted(self.shelves.items())
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


def _plain(group: Group) -> Any:
    return msgspec.to_builtins(replace(group, kept=group.sessions))
