"""What a book holds beside its groups: waits, batches, credit, marks, and counts."""

from collections import Counter

import attrs

from groupstate.core import events as ev

DISK_HOLD = "disk: "
"""How the reason of a hold begins that is for want of room on the disk."""

MARKS_REMEMBERED = 100
"""Marks of which the place is known, to keep the events since one of them."""

MARKS_KEPT = 2
"""Checkpoint marks that a run can go back to; committed groups newer than the older one are kept aside."""

UNDELIVERED = frozenset({"cancelled", "damaged"})
"""Reasons with which a batch comes back that its sampler never got."""


@attrs.frozen
class OpenRequest:
    """A `sample()` that waits."""

    request: int
    partition: ev.Partition
    size: int
    weight_version: int
    seq: int
    at_ns: int


@attrs.frozen
class OpenBatch:
    """A batch that is with the trainer: sampled, and neither committed nor returned."""

    batch: int
    partition: ev.Partition
    group_ids: tuple[str, ...]
    lags: tuple[int, ...]
    weight_version: int
    seq: int


@attrs.frozen
class Credit:
    """One refill that an eviction earned and that is still to be submitted."""

    size: int
    """Sessions that the evicted group needed."""
    dataset: str
    evicted: str
    target_version: int | None = None


@attrs.frozen
class Mark:
    mark: int
    seq: int
    weight_version: int
    lineage: int
    name: str = ""


@attrs.define
class DatasetUse:
    """Training groups of one dataset, for shares and the signal of starvation."""

    submitted: int = 0
    evicted: int = 0
    open: int = 0
    """In flight or terminal."""
    new: int = 0
    """Submitted since one was sampled, or since the dataset was last called starved."""
    version: int = 0
    """Weight version when one was last sampled, or when the dataset was first submitted."""
    told_version: int = 0
    """Weight version from which the next signal counts."""

    @property
    def kept(self) -> int:
        return self.submitted - self.evicted


@attrs.define
class Window:
    """Counts of one partition since its previous batch was sampled.

    Each field is a number, a list or a `Counter`, and empty at first: that is all that `add` knows of them.
    """

    evicted: Counter[str] = attrs.field(factory=Counter)
    """Groups per reason; a group with two reasons counts under both."""
    evicted_groups: int = 0
    stale_lags: list[int] = attrs.field(factory=list)
    submitted: int = 0
    refills: int = 0
    forfeited: int = 0
    fenced: int = 0
    requeued: int = 0
    """Failed groups that the rules started over."""
    sessions_failed: Counter[str] = attrs.field(factory=Counter)
    starved: Counter[str] = attrs.field(factory=Counter)
    """Signals of starvation per dataset."""
    filtered_values: Counter[float] = attrs.field(factory=Counter)
    """Groups evicted for zero variance, by the value that all their sessions share; without those that share none."""

    def add(self, other: "Window") -> None:
        """Take in counts that were reported to nobody, whatever fields there are."""
        for field in attrs.fields(Window):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if isinstance(mine, Counter):
                mine.update(theirs)
            else:
                # What was counted earlier comes first.
                setattr(self, field.name, theirs + mine)
