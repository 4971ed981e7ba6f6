"""Which events are about a group."""

from groupstate.core import events as ev


class About:
    """Says of each record, given in order from the first, whether a group is concerned."""

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self._batches: set[int] = set()

    def __call__(self, record: ev.Record) -> bool:
        event = record.event
        if isinstance(event, ev.BatchSampled):
            if self.group_id in event.group_ids:
                self._batches.add(event.batch)
                return True
            return False
        if isinstance(event, ev.BatchCommitted | ev.BatchReturned):
            return event.batch in self._batches
        return getattr(event, "group_id", None) == self.group_id
