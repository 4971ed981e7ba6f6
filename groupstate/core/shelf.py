"""The indexes over the live groups of one partition.

Rule: adding or removing a group costs the same however many there are, up to a logarithm.
"""

from sortedcontainers import SortedList

from groupstate.core import events as ev
from groupstate.core.group import Group
from groupstate.core.phases import IN_FLIGHT, TERMINAL, Phase

OrderKey = tuple[int, int, str]
"""(weight version, seq of the submission, group id)."""


class Shelf:
    """Indexes over the live groups of one partition."""

    def __init__(self) -> None:
        self.phases: dict[Phase, dict[str, None]] = {phase: {} for phase in Phase}
        self.ready: SortedList[OrderKey] = SortedList()
        """In the order of sampling: by the version that the basis names."""
        self.aging: SortedList[OrderKey] = SortedList()
        """Those of them whose lag grows, by the version that it is counted from: who turns stale first."""
        self.in_flight: SortedList[OrderKey] = SortedList()

    def add(self, group: Group) -> None:
        self.phases[group.phase][group.group_id] = None
        if group.phase in IN_FLIGHT:
            self.in_flight.add(_age_key(group))
        elif group.phase in TERMINAL and has_rows(group):
            self.ready.add(_order_key(group))
            if group.kept_lag is None:
                self.aging.add(_age_key(group))

    def remove(self, group: Group) -> None:
        del self.phases[group.phase][group.group_id]
        if group.phase in IN_FLIGHT:
            self.in_flight.remove(_age_key(group))
        elif group.phase in TERMINAL and has_rows(group):
            self.ready.remove(_order_key(group))
            if group.kept_lag is None:
                self.aging.remove(_age_key(group))


def _order_key(group: Group) -> OrderKey:
    return (group.version, group.submitted_seq, group.group_id)


def _age_key(group: Group) -> OrderKey:
    return (group.aged_from, group.submitted_seq, group.group_id)


def has_rows(group: Group) -> bool:
    """Training never samples a group without a trajectory; validation takes every terminal one."""
    return group.trajectory_count > 0 or group.partition == ev.VALIDATION
