"""A trajectory as a session returns it, the checks at the door, and its two halves: record and payload.

Rule 1: what is not finite, not whole or not of its type is refused here (`UnusableResult`), before any event.
Rule 2: metrics and counts go into the event, tokens and texts into the payload; both come from one value.
"""

import array
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import msgspec

from groupstate.core.events import TrajectoryRecord, VersionSpan
from groupstate.errors import UnusableResult

TOKEN_ID_MAX = 2**31 - 1
"""Token ids are kept as 32-bit integers."""


@attrs.frozen(kw_only=True)
class Trajectory:
    """One trainable row: a prompt, the response to it, and what the response was worth.

    Only `reward` or `metrics` is needed to drive the rules; `batch.to_torch()` needs the tokens too.
    """

    prompt_ids: Sequence[int] = ()
    response_ids: Sequence[int] = ()
    """All tokens after the prompt, those that the environment wrote included."""
    log_probs: Sequence[float] = ()
    """Natural logarithms as generated, one per response token (0.0 for the environment's), or none at all."""
    spans: Sequence[VersionSpan] = ()
    """Which weight version generated which response tokens."""
    environment: Sequence[tuple[int, int]] = ()
    """Ranges [start, stop) of response tokens that the environment wrote."""
    reward: float | None = None
    """Short for `metrics["reward"]`."""
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    text: str = ""
    info: Mapping[str, Any] = attrs.field(factory=dict)
    """Anything else to keep: JSON-like values."""


class _Wire(msgspec.Struct, array_like=True, frozen=True):
    """The payload of one trajectory, as it is stored."""

    prompt_ids: bytes
    response_ids: bytes
    log_probs: bytes
    text: str
    info: dict[str, Any]


_wire_decoder = msgspec.msgpack.Decoder(list[_Wire])


def checked(result: Any, *, session: int, group_id: str) -> tuple[Trajectory, ...]:
    """What a session returned, as trajectories; an empty tuple if it returned nothing.

    Raises:
        UnusableResult: a wrong type, a metric that is not finite, lengths that don't fit.
    """
    who = f"session {session} of group {group_id!r}"
    if result is None:
        return ()
    if isinstance(result, Trajectory):
        rows: tuple[Any, ...] = (result,)
    elif isinstance(result, (list, tuple)):
        rows = tuple(result)
    else:
        raise UnusableResult(
            f"{who} returned {type(result).__name__}; it must return a Trajectory, a list of them, or None"
        )
    for index, row in enumerate(rows):
        if not isinstance(row, Trajectory):
            raise UnusableResult(f"{who} returned {type(row).__name__} at index {index}; it must be a Trajectory")
        _check(row, f"trajectory {index} of {who}")
    return rows


def metrics_of(trajectory: Trajectory) -> dict[str, float]:
    """Its metrics as plain floats, the reward among them."""
    metrics = dict(trajectory.metrics)
    if trajectory.reward is not None:
        metrics["reward"] = trajectory.reward
    return {name: float(value) for name, value in metrics.items()}


def _check(row: Trajectory, who: str) -> None:
    if not isinstance(row.metrics, Mapping):
        raise UnusableResult(f"{who} has metrics of type {type(row.metrics).__name__}; it must be a dict of numbers")
    named = dict(row.metrics) if row.reward is None else {**row.metrics, "reward": row.reward}
    for name, value in named.items():
        _check_metric(name, value, who)
    for field, ids in (("prompt_ids", row.prompt_ids), ("response_ids", row.response_ids)):
        for position, token in enumerate(ids):
            if not isinstance(token, int) or not 0 <= token <= TOKEN_ID_MAX:
                raise UnusableResult(f"{who} has {token!r} at {field}[{position}]; token ids are integers from 0")
    if len(row.log_probs) not in (0, len(row.response_ids)):
        raise UnusableResult(
            f"{who} has {len(row.log_probs)} log_probs for {len(row.response_ids)} response tokens; "
            "give one for each, or none"
        )
    for position, value in enumerate(row.log_probs):
        if not math.isfinite(value):
            raise UnusableResult(f"{who} has {value!r} at log_probs[{position}]; it must be finite")
    _check_ranges(((s.start, s.stop) for s in row.spans), len(row.response_ids), f"{who}: spans")
    _check_ranges(row.environment, len(row.response_ids), f"{who}: environment")


def _check_metric(name: Any, value: Any, who: str) -> None:
    if not isinstance(name, str):
        raise UnusableResult(f"{who} has a metric named {name!r}; names are strings")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise UnusableResult(f"{who} has {name} = {value!r}; it must be a number") from error
    if not math.isfinite(number):
        raise UnusableResult(f"{who} has {name} = {value!r}; it must be finite")


def _check_ranges(ranges: Iterable[tuple[int, int]], length: int, who: str) -> None:
    end = 0
    for start, stop in ranges:
        if not end <= start < stop <= length:
            raise UnusableResult(
                f"{who} holds [{start}, {stop}); ranges are in order, not empty, and within {length} response tokens"
            )
        end = stop


def record_of(index: int, row: Trajectory) -> TrajectoryRecord:
    """The half that goes into the event."""
    return TrajectoryRecord(
        index=index,
        metrics=metrics_of(row),
        prompt_tokens=len(row.prompt_ids),
        response_tokens=len(row.response_ids),
        spans=tuple(row.spans),
        environment=tuple((start, stop) for start, stop in row.environment),
    )


def payload_of(rows: Sequence[Trajectory], who: str) -> bytes | None:
    """The half that goes into the payload store; None where there is nothing to keep.

    Raises:
        UnusableResult: `info` holds what can't be stored.
    """
    if not any(row.prompt_ids or row.response_ids or row.text or row.info for row in rows):
        return None
    wires = [
        _Wire(
            array.array("i", row.prompt_ids).tobytes(),
            array.array("i", row.response_ids).tobytes(),
            array.array("f", row.log_probs).tobytes(),
            row.text,
            dict(row.info),
        )
        for row in rows
    ]
    try:
        return msgspec.msgpack.encode(wires)
    except (TypeError, ValueError, OverflowError) as error:
        raise UnusableResult(f"{who} has info or text that can't be stored: {error}") from error


def restored(records: Sequence[TrajectoryRecord], payload: bytes | None) -> tuple[Trajectory, ...]:
    """The trajectories of a session, from its event and its payload."""
    wires = [None] * len(records) if payload is None else _wire_decoder.decode(payload)
    return tuple(
        Trajectory(metrics=record.metrics, spans=record.spans, environment=record.environment)
        if wire is None
        else Trajectory(
            prompt_ids=tuple(_numbers("i", wire.prompt_ids)),
            response_ids=tuple(_numbers("i", wire.response_ids)),
            log_probs=tuple(_numbers("f", wire.log_probs)),
            metrics=record.metrics,
            spans=record.spans,
            environment=record.environment,
            text=wire.text,
            info=wire.info,
        )
        for record, wire in zip(records, wires, strict=True)
    )


def _numbers(code: str, data: bytes) -> "array.array[Any]":
    numbers = array.array(code)
    numbers.frombytes(data)
    return numbers
