"""The configuration of one simulated run, as data.

Rule 1: with the defaults nothing goes wrong: each feature is off by itself, so that a plan can be made smaller feature
by feature.
Rule 2: a plan and nothing else decides what a run does, to the last byte of its log.
"""

from typing import Any, Literal, TypeAlias

import msgspec

from groupstate.core.rules import Rules, rules_from_dict
from groupstate.engines.port import InFlight
from groupstate.runtime.opening import BY_PATH, own_selection
from groupstate.simulate.lots import Law

KeepLog: TypeAlias = Literal["all", "archive"] | int


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the plan."""


class SessionPlan(Part, frozen=True):
    delay: Law = Law(law="exponential", mean_s=20.0)
    error: float = 0.0
    """Parts of the sessions, 0 to 1, as all of these: raises."""
    retryable: float = 0.0
    """Raises what is tried again, as far as the rules' attempts go."""
    empty: float = 0.0
    """Returns nothing."""
    refused: float = 0.0
    """Returns a reward that is no number."""
    hangs: float = 0.0
    """Goes on until it is cancelled, or the faults stop."""
    stubborn: float = 0.0
    """Ignores its cancellation for a while, and may return a result all the same."""
    missing: float = 0.0
    """Returns without the filter's metric."""
    flat: float = 0.0
    """Parts of the prompts, of which every session has the same value."""
    rows_most: int = 1
    """Trajectories of one session, at most."""
    sizes: tuple[int, ...] = ()
    """Sessions of a group, as its prompt says; without any the run's."""


class SourcePlan(Part, frozen=True):
    prompts: int | None = None
    """Of each dataset, before it runs dry; None: no end while faults go on."""
    datasets: tuple[str, ...] = ()
    """Names; without any there is one source."""
    slow: dict[str, float] = {}
    """How many times as long the sessions of a dataset take."""


class TrainerPlan(Part, frozen=True):
    batch_size: int = 4
    workers: int = 1
    """Loops that sample side by side."""
    train: Law = Law(law="exponential", mean_s=10.0)
    commit_every: int = 1
    """Batches that are out before they are committed together."""
    publish_every: int = 1
    """Batches between two publications of weights."""
    version_jump: float = 0.0
    """Parts of the publications that skip versions."""
    tells_version: float = 0.0
    """Parts of the samples that publish by `weight_version`."""
    release: float = 0.0
    """Parts of the batches that are given back."""
    cancel: float = 0.0
    """Parts of the samples that are cancelled after a while, if they wait so long."""
    cancel_at_claim: float = 0.0
    """Parts of the samples that are cancelled just when they have been served."""
    timeout: float = 0.0
    """Parts of the samples that have a time-out."""
    other_size: float = 0.0
    """Parts of the samples that ask for fewer groups."""
    checkpoint_every: int = 0
    """Commits between two checkpoints; 0 for none."""
    rewind: float = 0.0
    """Parts of the openings that go back to the last checkpoint."""
    rewind_evicts: bool = False
    turns: bool = False
    """The trainer and the engine take turns."""


class EnginePlan(Part, frozen=True):
    in_flight: InFlight = "continue"
    slots: int | None = None
    tokens_most: int = 3
    turns: int = 1
    """Answers of one session."""
    death_every_s: float = 0.0
    """Seconds between two deaths, on average; 0 for none."""
    refuses_weights: float = 0.0
    """Parts of the publications that the engine refuses."""


class ValidationPlan(Part, frozen=True):
    every_s: float = 600.0
    prompts: int = 2
    cancel: float = 0.0
    timeout: float = 0.0


class UserPlan(Part, frozen=True):
    """What somebody does by hand. Seconds between two of it, on average; 0 for never."""

    cancel_every_s: float = 0.0
    requeue_every_s: float = 0.0
    submit_every_s: float = 0.0
    watch_every_s: float = 0.0
    """Waits until groups are sampleable, and gives up after a while."""


class CrashPlan(Part, frozen=True):
    every_s: float = 0.0
    """Seconds of virtual time between two ends of the process, on average; 0 for none."""
    power: float = 0.0
    """Parts of the ends that take the machine along, with all that wasn't flushed."""
    closes: float = 0.0
    """Parts of the ends that are clean."""
    disk_fault_every: int = 0
    """Operations of the disk before one fails, on average; 0 for none."""
    fault_once: float = 0.0
    """Parts of the disk's faults that pass; after the others the disk is dead until the process ends."""
    in_recovery: float = 0.0
    """Parts of the openings in which the disk fails."""


class StoragePlan(Part, frozen=True):
    commit: Law = Law(law="constant", mean_s=0.005)
    """From a post until it is on the disk."""
    segment_bytes: int = 1 << 20
    payload_file_bytes: int = 1 << 20
    snapshot_events: int = 2_000
    keep: KeepLog = "all"


class Plan(Part, frozen=True):
    seed: int = 0
    hours: float = 0.1
    """Virtual hours with faults."""
    lifetimes: int = 1_000_000
    """Groups after which the faults stop, though the hours aren't over."""
    group_size: int = 4
    rules: dict[str, Any] = {}
    """Settings of `Rules`, those that differ from the defaults."""
    sessions: SessionPlan = SessionPlan()
    source: SourcePlan = SourcePlan()
    trainer: TrainerPlan = TrainerPlan()
    storage: StoragePlan = StoragePlan()
    engine: EnginePlan | None = None
    validation: ValidationPlan | None = None
    user: UserPlan = UserPlan()
    crash: CrashPlan = CrashPlan()

    def made_rules(self) -> Rules:
        """
        Raises:
            BadSettings: rules that can't be.
        """
        return rules_from_dict({**self.rules, "stall_s": 0.0}, "rules of the plan")

    def check(self) -> None:
        """
        Raises:
            BadSettings: rules that can't be, or a selection function that isn't found.
        """
        own_selection(self.made_rules(), way_on=BY_PATH)

    def changed(self, **changes: Any) -> "Plan":
        return msgspec.structs.replace(self, **changes)
