"""Prompt groups of an RL post-training run as explicit state machines over a durable event log."""

from groupstate.batch import Batch, BatchGroup, Row, merged_metrics
from groupstate.core.book import Book
from groupstate.core.custom import Drop, Select
from groupstate.core.events import PayloadRef, Record, VersionSpan
from groupstate.core.explain import Explanation
from groupstate.core.held import OpenRequest
from groupstate.core.metrics import Tally
from groupstate.core.phases import TRANSITIONS, Phase
from groupstate.core.prompt import Prompt
from groupstate.core.rules import Capacity, PerBatch, PerDataset, Rules, Slots
from groupstate.core.trajectory import Trajectory, broadcast_reward
from groupstate.engines.port import Engine, Generation, Request, SamplingParams
from groupstate.errors import GroupstateError
from groupstate.runtime.handles import Attempt, GroupHandle
from groupstate.runtime.opening import open_run
from groupstate.runtime.recovery import CheckpointMark
from groupstate.runtime.run import Run
from groupstate.runtime.session import RetryableError, SessionContext, session_from_reward
from groupstate.runtime.sources import MixedSource
from groupstate.runtime.transcript import Transcript
from groupstate.version import VERSION

__version__ = VERSION

__all__ = [
    "TRANSITIONS",
    "Attempt",
    "Batch",
    "BatchGroup",
    "Book",
    "Capacity",
    "CheckpointMark",
    "Drop",
    "Engine",
    "Explanation",
    "Generation",
    "GroupHandle",
    "GroupstateError",
    "MixedSource",
    "OpenRequest",
    "PayloadRef",
    "PerBatch",
    "PerDataset",
    "Phase",
    "Prompt",
    "Record",
    "Request",
    "RetryableError",
    "Row",
    "Rules",
    "Run",
    "SamplingParams",
    "Select",
    "SessionContext",
    "Slots",
    "Tally",
    "Trajectory",
    "Transcript",
    "VersionSpan",
    "broadcast_reward",
    "merged_metrics",
    "open_run",
    "session_from_reward",
]
