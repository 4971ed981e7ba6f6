"""A group as `stats` follows it: the little that its counts need."""

from groupstate.core import events as ev
from groupstate.core.group import Group
from groupstate.core.phases import Phase


class Followed:
    """What is remembered of a group that may still be trained on."""

    __slots__ = (
        "answers",
        "cause",
        "dataset",
        "ended_at_ns",
        "ended_version",
        "half_at_ns",
        "observed",
        "open",
        "partition",
        "phase",
        "prompt_length",
        "rewards",
        "rows",
        "sampleable",
        "settled",
        "size",
        "submitted_at_ns",
        "terminal",
        "tokens",
        "version",
    )

    def __init__(self, event: ev.GroupSubmitted | Group, version: int, at_ns: int) -> None:
        self.partition = event.partition
        self.dataset = event.dataset
        self.cause: str = event.cause
        self.prompt_length = event.prompt_length
        self.size = event.size
        self.submitted_at_ns = at_ns
        self.version = version
        """Current when it was submitted, or dispatched anew."""
        self.phase = Phase.PENDING
        self.terminal = Phase.FINISHED
        self.sampleable = False
        """As far as it has ended with something to train on."""
        self.open: dict[int, int] = {}
        """When the open attempts of its sessions began."""
        self.settled = 0
        self.half_at_ns = 0
        self.observed = False
        """Its sessions ran outside, and are known by what was listed of them."""
        self.tokens = 0
        self.rows = 0
        self.rewards = 0.0
        self.answers = 0
        """Values that `rewards` is the sum of."""
        self.ended_at_ns = 0
        self.ended_version = 0

    @classmethod
    def known(cls, group: Group, metric: str) -> "Followed":
        """A group that was there before the first event."""
        made = cls(group, group.stamp, group.submitted_at_ns)
        made.phase = Phase(group.phase)
        made.terminal = group.terminal or Phase.FINISHED
        made.sampleable = group.terminal is not None and bool(group.trajectory_count or group.kept_empty)
        made.settled = group.settled_count
        made.ended_version = group.ended_version
        for number, session in enumerate(group.sessions):
            if session.state == "open":
                made.open[number] = session.started_at_ns
            made.ended_at_ns = max(made.ended_at_ns, session.ended_at_ns)
            made.take(session.trajectories, metric)
        made.half_at_ns = made.ended_at_ns
        return made

    @property
    def train(self) -> bool:
        return self.partition == ev.TRAIN

    def take(self, rows: tuple[ev.TrajectoryRecord, ...], metric: str) -> int:
        """Take in what a session yielded; how many tokens that is."""
        tokens = 0
        for row in rows:
            tokens += row.response_tokens
        self.tokens += tokens
        self.rows += len(rows)
        if rows:
            value = rows[-1].metrics.get(metric)
            if value is not None:
                self.rewards += value
                self.answers += 1
        return tokens

    def start_over(self, weight_version: int | None) -> None:
        """All that its sessions yielded is dropped.

        Args:
            weight_version: of which its prompt was dispatched anew; None where it keeps its own.
        """
        self.version = self.version if weight_version is None else weight_version
        self.open.clear()
        self.phase = Phase.PENDING
        self.sampleable = False
        self.settled = self.half_at_ns = self.tokens = self.rows = self.answers = 0
        self.rewards = 0.0
