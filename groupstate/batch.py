"""What the trainer gets: whole groups with their trajectories, and the same as tensors.

Rule 1: a batch holds whole groups only; a row is found by (group_id, session, index), never by position.
Rule 2: torch is imported inside the functions that need it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import msgspec

from groupstate.core.events import VersionSpan
from groupstate.core.prompt import Prompt
from groupstate.core.trajectory import Trajectory


@attrs.frozen
class Row:
    """One trainable row of a batch."""

    group_id: str
    session: int
    index: int
    trajectory: Trajectory
    weight_version: int
    """The stamp of its group: the weight version that was current when the group was submitted."""

    @property
    def key(self) -> str:
        """`{group_id}_{session}_{index}`; splits from the right."""
        return f"{self.group_id}_{self.session}_{self.index}"


@attrs.frozen
class BatchGroup:
    """One prompt group of a batch."""

    group_id: str
    size: int
    """Sessions the group had."""
    phase: str
    """`finished` or `failure`."""
    partial: bool
    dataset: str
    weight_version: int
    lag: int
    """Weight versions between the group's and the trainer's when the batch was sampled."""
    sessions: tuple[tuple[int, tuple[Trajectory, ...]], ...]
    """(session, its trajectories) of each session that finished."""
    prompt: Prompt | None = None

    def rows(self) -> Iterator[Row]:
        for session, trajectories in self.sessions:
            for index, trajectory in enumerate(trajectories):
                yield Row(self.group_id, session, index, trajectory, self.weight_version)


@attrs.frozen
class Batch:
    """Groups that one `sample()` claimed. Commit it once a checkpoint of the trainer holds it."""

    number: int
    partition: str
    groups: tuple[BatchGroup, ...]
    weight_version: int
    """The trainer's version when the batch was sampled."""
    metrics: dict[str, float]

    @property
    def group_ids(self) -> list[str]:
        return [group.group_id for group in self.groups]

    @property
    def rows(self) -> list[Row]:
        """All trajectories: groups in sampling order, sessions and trajectories ascending."""
        return [row for group in self.groups for row in group.rows()]

    def __len__(self) -> int:
        return len(self.groups)

    def to_bytes(self) -> bytes:
        """For other ranks of the trainer; `Batch.from_bytes` gives the batch back."""
        return msgspec.msgpack.encode(attrs.asdict(self, value_serializer=_plain))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Batch":
        return _batch(msgspec.msgpack.decode(data))


def _plain(instance: Any, attribute: Any, value: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes, tuple)) else value


def _batch(data: dict[str, Any]) -> Batch:
    groups = tuple(
        BatchGroup(
            **{
                **group,
                "prompt": None if group["prompt"] is None else Prompt(**group["prompt"]),
                "sessions": tuple(
                    (number, tuple(_trajectory(row) for row in rows)) for number, rows in group["sessions"]
                ),
            }
        )
        for group in data["groups"]
    )
    return Batch(**{**data, "groups": groups})


def _trajectory(row: dict[str, Any]) -> Trajectory:
    return Trajectory(
        **{
            **row,
            "prompt_ids": tuple(row["prompt_ids"]),
            "response_ids": tuple(row["response_ids"]),
            "log_probs": tuple(row["log_probs"]),
            "spans": tuple(VersionSpan(*span) for span in row["spans"]),
            "environment": tuple((start, stop) for start, stop in row["environment"]),
        }
    )
