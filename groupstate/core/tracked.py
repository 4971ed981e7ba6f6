"""A group as the checker of invariants knows it: from its events alone, and not by way of a `Group`."""

from typing import Final

import attrs

from groupstate.core import events as ev
from groupstate.core.phases import TERMINAL, Phase

TOKEN_BASES: Final = ("first_token", "oldest_token", "newest_token")


@attrs.define(eq=False)
class Tracked:
    """A group as its events tell."""

    group_id: str
    size: int
    partition: ev.Partition
    stamp: int
    submitted_seq: int
    aged_from: int
    dataset: str = ""
    oversample: int = 0
    target_version: int | None = None
    phase: Phase = Phase.PENDING
    attempts: list[int] = attrs.field(factory=list)
    """Latest attempt per session."""
    outcomes: list[str] = attrs.field(factory=list)
    """How the latest attempt of each session ended; empty while it hasn't."""
    rows: int = 0
    first_version: int | None = None
    oldest_version: int | None = None
    newest_version: int | None = None
    ending: Phase = Phase.FINISHED
    """Where it goes back to when it comes back from a batch."""
    kept_empty: bool = False
    """It ended without a row, and the rules of then keep it sampleable."""
    rule_requeues: int = 0
    left_seq: int = 0
    """The event that ended it, evicted it or put it into a batch: the last one of these."""
    batch: int = 0
    sampled_lag: int = 0
    kept_lag: int | None = None
    """The lag of the batch that it came back from."""
    rewound_to: int | None = None
    """The mark's version, where the run went back to one that the group was too new for."""
    stamped_seq: int = 0
    """The event that `stamp` is known from."""
    starts: dict[int, int | None] = attrs.field(factory=dict)
    """Version of the first token per session, where it was known at the start."""
    begun_seq: int = 0
    """Its submission, or the last event that started it over."""
    last_seqs: list[int] = attrs.field(factory=list)
    """The last event of each session since then; that event where a session has had none."""
    version_seqs: dict[str, int] = attrs.field(factory=dict)
    """By basis the event with the version that it names."""
    aged_seq: int = 0
    """The event that `aged_from` is known from."""
    rewound_seq: int = 0
    """The event with which the run went back to `rewound_to`."""
    sampled_seq: int = 0
    """The last event that put it into a batch."""
    started_over_seq: int = 0
    """The last event in which the rules started it over."""

    def begin(self, attempts: list[int], seq: int) -> None:
        self.begun_seq, self.last_seqs = seq, [seq] * self.size
        self.version_seqs = {}
        self.attempts = attempts
        self.outcomes = [""] * self.size
        self.rows = 0
        self.kept_lag = None
        self.kept_empty = False
        self.starts = {}
        self.first_version = self.oldest_version = self.newest_version = None

    @property
    def needed(self) -> int:
        """Finished sessions that make it whole."""
        return self.size - self.oversample

    @property
    def counts_from(self) -> int:
        """What its lag counts from while no token is known."""
        return self.stamp if self.target_version is None else self.target_version

    @property
    def unsettled(self) -> list[int]:
        return [number for number, outcome in enumerate(self.outcomes) if not outcome]

    @property
    def is_ready(self) -> bool:
        return self.phase in TERMINAL and (self.rows > 0 or self.partition == ev.VALIDATION or self.kept_empty)

    @property
    def open_seq(self) -> int:
        """The last event of the first session that hasn't ended; where all have, the last of them all."""
        unsettled = self.unsettled
        return self.last_seqs[unsettled[0]] if unsettled else max(self.last_seqs, default=self.begun_seq)

    def take_rows(self, session: int, rows: tuple[ev.TrajectoryRecord, ...], seq: int) -> None:
        """Count a session's rows, and the versions of its tokens: without spans the one known at its start."""
        self.rows += len(rows)
        versions = [span.weight_version for row in rows for span in row.spans]
        if not versions:
            started = self.starts.get(session)
            if not rows or started is None:
                return
            versions = [started]
        first = versions[0]
        low, high = (first, first) if len(versions) == 1 else (min(versions), max(versions))
        seqs = self.version_seqs
        if self.first_version is None or first < self.first_version:
            self.first_version, seqs["first_token"] = first, seq
        if self.oldest_version is None or low < self.oldest_version:
            self.oldest_version, seqs["oldest_token"] = low, seq
        if self.newest_version is None or high > self.newest_version:
            self.newest_version, seqs["newest_token"] = high, seq

    def age(self, basis: str) -> None:
        """Count the lag from what the rules' basis says, now that the group has ended."""
        versions = (self.first_version, self.oldest_version, self.newest_version)
        version = dict(zip(TOKEN_BASES, versions, strict=True)).get(basis)
        if version is not None:
            self.aged_from, self.aged_seq = version, self.version_seqs[basis]
