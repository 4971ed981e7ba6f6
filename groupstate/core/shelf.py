"""The indexes over the live groups of one partition.

Rule: adding or removing a group costs the same however many there are, up to a logarithm.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from sortedcontainers import SortedList

from groupstate.core import events as ev
from groupstate.core.group import Group
from groupstate.core.phases import IN_FLIGHT, TERMINAL, Phase

OrderKey = tuple[int, int, str]
"""(weight version, seq of the submission, group id)."""


class Aging:
    """Groups in the order of what their lag counts from, apart by the bound that holds for them.

    A class is a dataset with a lag bound of its own; all others are of the class "". So the groups above their
    bound are at the front of each class, and nobody looks further than the first below it."""

    def __init__(self, classes: frozenset[str] = frozenset()) -> None:
        self._classes = classes
        self._lists: dict[str, SortedList[OrderKey]] = {}

    @classmethod
    def of_all(cls, classes: frozenset[str], groups: Iterable[Group]) -> "Aging":
        """The index over these groups, built at once."""
        made = cls(classes)
        keys: dict[str, list[OrderKey]] = {}
        for group in groups:
            keys.setdefault(made.of(group), []).append(_age_key(group))
        made._lists = {name: SortedList(found) for name, found in keys.items()}
        return made

    def __len__(self) -> int:
        return sum(map(len, self._lists.values()))

    def of(self, group: Group) -> str:
        return group.dataset if group.dataset in self._classes else ""

    def add(self, group: Group) -> None:
        name = self.of(group)
        if name not in self._lists:
            self._lists[name] = SortedList()
        self._lists[name].add(_age_key(group))

    def remove(self, group: Group) -> None:
        name = self.of(group)
        self._lists[name].remove(_age_key(group))
        if not self._lists[name]:
            del self._lists[name]

    def by_class(self) -> Iterator[tuple[str, Iterator[str]]]:
        """Per class the ids, highest lag first."""
        return ((name, (key[2] for key in keys)) for name, keys in sorted(self._lists.items()))

    def count_at(self, version: int) -> int:
        return sum(_count_at(keys, version) for keys in self._lists.values())

    def state(self) -> dict[str, list[list[int | str]]]:
        return {name: [list(key) for key in keys] for name, keys in sorted(self._lists.items())}


class Shelf:
    """Indexes over the live groups of one partition."""

    def __init__(self, classes: frozenset[str] = frozenset()) -> None:
        self._classes = classes
        self.phases: dict[Phase, dict[str, None]] = {phase: {} for phase in Phase}
        self.ready: SortedList[OrderKey] = SortedList()
        """In the order of sampling: by the version that the basis names."""
        self.aging = Aging(classes)
        """Those of them whose lag grows, by the version that it is counted from: who turns stale first."""
        self.in_flight = Aging(classes)

    def add(self, group: Group) -> None:
        self.phases[group.phase][group.group_id] = None
        if group.phase in IN_FLIGHT:
            self.in_flight.add(group)
        elif group.phase in TERMINAL and has_rows(group):
            self.ready.add(_order_key(group))
            if group.kept_lag is None:
                self.aging.add(group)

    def remove(self, group: Group) -> None:
        del self.phases[group.phase][group.group_id]
        if group.phase in IN_FLIGHT:
            self.in_flight.remove(group)
        elif group.phase in TERMINAL and has_rows(group):
            self.ready.remove(_order_key(group))
            if group.kept_lag is None:
                self.aging.remove(group)

    def move(self, before: Group, after: Group) -> None:
        """A group has come to another phase. Most that are in flight go on so, at the same place of its order."""
        if after.phase in IN_FLIGHT and before.phase in IN_FLIGHT and before.aged_from == after.aged_from:
            del self.phases[before.phase][before.group_id]
            self.phases[after.phase][after.group_id] = None
        else:
            self.remove(before)
            self.add(after)

    def fill(self, phases: Mapping[Phase, Sequence[Group]]) -> None:
        """Take in all groups of an empty shelf at once, each phase in the order in which they came to it."""
        ready = []
        for phase, groups in phases.items():
            self.phases[phase] = {group.group_id: None for group in groups}
            ready += [_order_key(group) for group in groups if phase in TERMINAL and has_rows(group)]
        self.ready = SortedList(ready)
        self.classify(self._classes, (group for groups in phases.values() for group in groups))

    def classify(self, classes: frozenset[str], groups: Iterable[Group]) -> None:
        """Other datasets have bounds of their own from now on."""
        self._classes = classes
        every = list(groups)
        self.in_flight = Aging.of_all(classes, (group for group in every if group.phase in IN_FLIGHT))
        aging = (g for g in every if g.phase in TERMINAL and has_rows(g) and g.kept_lag is None)
        self.aging = Aging.of_all(classes, aging)

    def ready_at(self, version: int) -> Iterator[str]:
        return (key[2] for key in self.ready.irange((version,), (version + 1,)))

    def ready_count_at(self, version: int) -> int:
        return _count_at(self.ready, version)

    def freshest(self) -> Iterator[str]:
        """Newest version first; within a version in the order of submission."""
        keys = self.ready
        end = len(keys)
        while end:
            version = keys[end - 1][0]
            begin = keys.bisect_left((version,))
            yield from (key[2] for key in keys.islice(begin, end))
            end = begin


def _count_at(keys: SortedList[OrderKey], version: int) -> int:
    return int(keys.bisect_left((version + 1,)) - keys.bisect_left((version,)))


def _order_key(group: Group) -> OrderKey:
    return (group.version, group.submitted_seq, group.group_id)


def _age_key(group: Group) -> OrderKey:
    return (group.aged_from, group.submitted_seq, group.group_id)


def has_rows(group: Group) -> bool:
    """Training never samples a group without a trajectory, unless the rules keep it; validation takes every
    terminal one."""
    return group.trajectory_count > 0 or group.partition == ev.VALIDATION or group.kept_empty
