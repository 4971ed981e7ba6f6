"""A trajectory as a session returns it, the checks at the door, and its two halves: record and payload.

Rule 1: what is not finite, not whole or not of its type is refused here (`UnusableResult`), before any event.
Rule 2: metrics and counts go into the event, tokens and texts into the payload; both come from one value.
"""

import array
import math
import operator
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import attrs
import msgspec

from groupstate.core.events import TrajectoryRecord, VersionSpan
from groupstate.core.packed import Code, Packed, PackedInfo, unpack_when_read
from groupstate.errors import UnusableResult

TOKEN_ID_MAX = 2**31 - 1
"""Token ids are kept as 32-bit integers."""

WEIGHT_VERSION_MAX = 2**63 - 1
"""Weight versions are kept as 64-bit integers."""

_NONE: tuple[()] = ()
"""What a trajectory has by default in place of tokens and the like: there is only one such object, so that nobody
needs to look further."""

NUMBER_BYTES = 4
"""What a token id or a log-probability is kept in."""

_TOP_BYTE = struct.pack("i", -(2**31)).index(0x80)
"""Where the byte of a number lies whose first bit is its sign, and the others, of a float, begin its exponent."""

_HUGE = (0x7F, 0xFF)
"""That byte of infinities, of what is no number, and of finite floats from 1.7e38 on; of no other float."""

SHOWN_CHARS_MAX = 80
"""Length at which a value is cut in an error's text."""


def _comparable(numbers: Any) -> Any:
    """The same for every sequence of the same numbers; what is none is refused at the door, and not before."""
    try:
        return tuple(numbers)
    except TypeError:
        return numbers


@attrs.frozen(kw_only=True)
class Trajectory:
    """One trainable row: a prompt, the response to it, and what the response was worth.

    Only `reward` or `metrics` is needed to drive the rules; `batch.to_torch()` needs the tokens too.

    Tokens and log-probabilities may be any sequences of numbers; two rows with the same numbers are equal. Those of a
    sampled batch are tuples, which are made when they are first read.
    """

    prompt_ids: Sequence[int] = attrs.field(default=(), eq=_comparable)
    response_ids: Sequence[int] = attrs.field(default=(), eq=_comparable)
    """All tokens after the prompt, those that the environment wrote included."""
    log_probs: Sequence[float] = attrs.field(default=(), eq=_comparable)
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


NumbersField: TypeAlias = Literal["prompt_ids", "response_ids", "log_probs"]

_SLOTS = unpack_when_read(Trajectory, (*get_args(NumbersField), "info"))


def held(row: Trajectory, field: NumbersField) -> Packed | Sequence[Any]:
    """A field's numbers as the row has them, without taking apart what is packed."""
    numbers: Packed | Sequence[Any] = _SLOTS[field].__get__(row)
    return numbers


def held_info(row: Trajectory) -> PackedInfo | Mapping[str, Any]:
    """`info` as the row has it. See `held`."""
    info: PackedInfo | Mapping[str, Any] = _SLOTS["info"].__get__(row)
    return info


class Admitted(msgspec.Struct, frozen=True):
    """A trajectory as it is kept, in Python's own types; its numbers are packed, as arrays have them in memory."""

    prompt_ids: bytes
    response_ids: bytes
    log_probs: bytes
    spans: tuple[VersionSpan, ...]
    environment: tuple[tuple[int, int], ...]
    metrics: dict[str, float]
    """The reward among them."""
    text: str
    info: dict[str, Any]


class Yielded(msgspec.Struct, frozen=True):
    """What a session returned, in the form in which it is kept, or why it can't be."""

    records: tuple[TrajectoryRecord, ...] = ()
    payload: bytes | None = None
    """None where there is nothing to keep beside the records."""
    error: str = ""
    """What is wrong with it, and no exception: that would hold on to all that the session returned."""


class _Wire(msgspec.Struct, array_like=True, frozen=True):
    """The payload of one trajectory, as it is stored."""

    prompt_ids: bytes
    response_ids: bytes
    log_probs: bytes
    text: str
    info: msgspec.Raw


_NO_INFO = msgspec.msgpack.encode({})
_wire_decoder = msgspec.msgpack.Decoder(list[_Wire])


def yielded(result: Any, *, session: int, group_id: str) -> Yielded:
    """What a session returned, checked, with both of its halves made.

    Raises:
        UnusableResult: it can't be kept.
    """
    rows = checked(result, session=session, group_id=group_id)
    payload = payload_of(rows, f"session {session} of group {group_id!r}")
    return Yielded(tuple([record_of(index, row) for index, row in enumerate(rows)]), payload)


def checked(result: Any, *, session: int, group_id: str) -> tuple[Admitted, ...]:
    """What a session returned, ready to be kept; an empty tuple if it returned nothing.

    Raises:
        UnusableResult: a wrong type, a number that is not finite, lengths that don't fit.
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
    return tuple([_admitted(row, f"trajectory {index} of {who}") for index, row in enumerate(rows)])


def _admitted(row: Trajectory, who: str) -> Admitted:
    try:
        return _plain(row, who)
    except UnusableResult:
        raise
    except Exception as error:
        # Numbers and sequences of other libraries fail in ways of their own; the session has failed by them.
        raise UnusableResult(f"{who} can't be read: {type(error).__name__}: {error}") from error


def metrics_of(trajectory: Trajectory) -> dict[str, float]:
    """Its metrics as plain floats, the reward among them."""
    metrics = dict(trajectory.metrics)
    if trajectory.reward is not None:
        metrics["reward"] = trajectory.reward
    return {name: float(value) for name, value in metrics.items()}


def broadcast_reward(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The trajectories of one session, each with the reward of the last one, whatever it had of its own.

    Where a session yields several rows, only the last tells how it went. Advantages follow from the last one's reward
    in any case; this gives it to the others too, for the rules that look at every trajectory, and for the metrics.

    Raises:
        UnusableResult: the last one has no reward.
    """
    if not trajectories:
        return []
    metrics = metrics_of(trajectories[-1])
    if "reward" not in metrics:
        present = ", ".join(map(repr, sorted(metrics))) or "none at all"
        raise UnusableResult(
            f"the last of {len(trajectories)} trajectories has no metric 'reward' for the others; it has {present}"
        )
    return [attrs.evolve(row, reward=metrics["reward"]) for row in trajectories]


def _plain(row: Trajectory, who: str) -> Admitted:
    """The same trajectory, whatever numbers it came in."""
    response_ids = _tokens("response_ids", row.response_ids, who)
    length = len(response_ids) // NUMBER_BYTES
    return Admitted(
        prompt_ids=_tokens("prompt_ids", row.prompt_ids, who),
        response_ids=response_ids,
        log_probs=_log_probs(row.log_probs, length, who),
        spans=_spans(row.spans, length, who),
        environment=_ranges(row.environment, length, f"{who}: environment"),
        metrics=_metrics(row, who),
        text=_text(row.text, who),
        info=_info(row.info, who),
    )


def _metrics(row: Trajectory, who: str) -> dict[str, float]:
    if type(row.metrics) is not dict and not isinstance(row.metrics, Mapping):
        raise UnusableResult(f"{who} has metrics of type {type(row.metrics).__name__}; it must be a dict of numbers")
    named = dict(row.metrics) if row.reward is None else {**row.metrics, "reward": row.reward}
    return {_name(name, who): _metric(name, value, who) for name, value in named.items()}


def _name(name: Any, who: str) -> str:
    if not isinstance(name, str):
        raise UnusableResult(f"{who} has a metric named {name!r}; names are strings")
    if not (name.isascii() or _is_unicode(name)):
        raise UnusableResult(f"{who} has a metric named {name!r}; half a surrogate pair can't be stored")
    return name


def _metric(name: str, value: Any, who: str) -> float:
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, (str, bytes, bytearray)):
        raise UnusableResult(f"{who} has {name} = {_shown(value)}; it must be a number")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise UnusableResult(f"{who} has {name} = {_shown(value)}; it must be a number") from error
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise UnusableResult(f"{who} has {name} = {_shown(value)}; it must be finite")
    return number


def _tokens(field: str, ids: Any, who: str) -> bytes:
    if ids is _NONE:
        return b""
    try:
        items = _items(ids)
        packed = struct.pack(f"{len(items)}i", *items)
        if packed[_TOP_BYTE::NUMBER_BYTES].isascii():  # None has its sign set.
            return packed
    except (TypeError, ValueError, OverflowError, struct.error):
        pass
    wrong = next(((i, token) for i, token in enumerate(_iterable(ids)) if not _is_token(token)), None)
    if wrong is None:
        raise UnusableResult(f"{who} has {field} = {_shown(ids)}; it must be a sequence of token ids")
    raise UnusableResult(f"{who} has {_shown(wrong[1])} at {field}[{wrong[0]}]; token ids are integers from 0")


def _is_token(token: Any) -> bool:
    try:
        return 0 <= operator.index(token) <= TOKEN_ID_MAX
    except TypeError:
        return False


def _log_probs(values: Any, length: int, who: str) -> bytes:
    if values is _NONE:
        return b""
    try:
        items = _items(values)
        packed = struct.pack(f"{len(items)}f", *items)  # What is too large for 32 bits is infinite then.
    except (TypeError, ValueError, OverflowError, RecursionError, struct.error) as error:
        raise UnusableResult(f"{who} has log_probs {_shown(values)}; they must be finite numbers") from error
    if len(items) not in (0, length):
        raise UnusableResult(
            f"{who} has {len(items)} log_probs for {length} response tokens; give one for each, or none"
        )
    top = packed[_TOP_BYTE::NUMBER_BYTES]
    if any(byte in top for byte in _HUGE):
        for position, value in enumerate(array.array("f", packed)):
            if not math.isfinite(value):
                raise UnusableResult(f"{who} has {_shown(items[position])} at log_probs[{position}]; it must be finite")
    return packed


def _spans(spans: Any, length: int, who: str) -> tuple[VersionSpan, ...]:
    if spans is _NONE or (type(spans) is tuple and _are_in_order(spans, length)):
        return spans
    found = []
    for span in _iterable(spans, f"{who}: spans"):
        if not isinstance(span, VersionSpan) or not _is_version(span.weight_version):
            raise UnusableResult(f"{who}: spans holds {_shown(span)}; it must be a VersionSpan of integers")
        found.append(span)
    ranges = _ranges([(span.start, span.stop) for span in found], length, f"{who}: spans")
    return tuple(VersionSpan(start, stop, s.weight_version) for (start, stop), s in zip(ranges, found, strict=True))


def _are_in_order(spans: tuple[Any, ...], length: int) -> bool:
    """Whether nothing is wrong with the spans of a response, and all numbers are Python's own; where not, somebody must
    look closer."""
    end = 0
    for span in spans:
        if type(span) is not VersionSpan or not type(span.start) is type(span.stop) is type(span.weight_version) is int:
            return False
        if not end <= span.start < span.stop <= length or not _is_version(span.weight_version):
            return False
        end = span.stop
    return True


def _is_version(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -WEIGHT_VERSION_MAX <= value <= WEIGHT_VERSION_MAX


def _ranges(ranges: Any, length: int, who: str) -> tuple[tuple[int, int], ...]:
    if ranges is _NONE:
        return ()
    found, end = [], 0
    for item in _iterable(ranges, who):
        try:
            start, stop = map(operator.index, item)
        except (TypeError, ValueError) as error:
            raise UnusableResult(f"{who} holds {_shown(item)}; it must be a pair of integers") from error
        if not end <= start < stop <= length:
            raise UnusableResult(
                f"{who} holds [{start}, {stop}); ranges are in order, not empty, and within {length} response tokens"
            )
        found.append((start, stop))
        end = stop
    return tuple(found)


def _text(text: Any, who: str) -> str:
    if not isinstance(text, str):
        raise UnusableResult(f"{who} has text = {_shown(text)}; it must be a string")
    return text


def _info(info: Any, who: str) -> dict[str, Any]:
    if type(info) is dict and not info:
        return {}
    if not isinstance(info, Mapping) or not all(isinstance(key, str) for key in info):
        raise UnusableResult(f"{who} has info = {_shown(info)}; it must be a dict whose keys are strings")
    return dict(info)


def _items(values: Any) -> Any:
    """What can be packed: bytes and texts would be taken for something else."""
    if isinstance(values, (list, tuple)):
        return values
    if isinstance(values, (bytes, bytearray, str)):
        raise TypeError("a text is no sequence of numbers")
    # Tensors and arrays make all their numbers at once, a hundred times as fast as one by one. Masks aren't numbers.
    whole = getattr(values, "tolist", None) if isinstance(values, Iterable) else None
    return list(values) if whole is None or "bool" in str(getattr(values, "dtype", "")) else whole()


def _iterable(values: Any, who: str | None = None) -> Iterable[Any]:
    if isinstance(values, Iterable) and not isinstance(values, (str, bytes, bytearray)):
        return values
    if who is None:
        return ()
    raise UnusableResult(f"{who} is {_shown(values)}; it must be a sequence")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    """A value in an error's text, however long it is."""
    # Python refuses to write out an integer of thousands of digits.
    is_huge = isinstance(value, int) and value.bit_length() > 512
    text = f"an integer of {value.bit_length()} bits" if is_huge else repr(value)
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}..."


def record_of(index: int, row: Admitted) -> TrajectoryRecord:
    """The half that goes into the event."""
    return TrajectoryRecord(
        index=index,
        metrics=row.metrics,
        prompt_tokens=len(row.prompt_ids) // NUMBER_BYTES,
        response_tokens=len(row.response_ids) // NUMBER_BYTES,
        spans=row.spans,
        environment=row.environment,
    )


def record_without_tokens(
    index: int,
    *,
    metrics: Any,
    prompt_tokens: Any,
    response_tokens: Any,
    spans: Any,
    who: str,
    not_finite: tuple[str, ...] = (),
) -> TrajectoryRecord:
    """The record of a row whose tokens lie elsewhere: only how many there are is known.

    Args:
        not_finite: metrics that are left out of `metrics`, since their value is no number.

    Raises:
        UnusableResult: a number that is not finite, a wrong type, spans that don't fit.
    """
    try:
        counts = _count("prompt_tokens", prompt_tokens, who), _count("response_tokens", response_tokens, who)
        return TrajectoryRecord(
            index,
            _metrics(Trajectory(metrics=metrics), who),
            *counts,
            _spans(spans, counts[1], who),
            not_finite=not_finite,
        )
    except UnusableResult:
        raise
    except Exception as error:
        raise UnusableResult(f"{who} can't be read: {type(error).__name__}: {error}") from error


def _count(field: str, value: Any, who: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise UnusableResult(f"{who} has {field} = {_shown(value)}; it must be an integer from 0")


def payload_of(rows: Sequence[Admitted], who: str) -> bytes | None:
    """The half that goes into the payload store; None where there is nothing to keep.

    Raises:
        UnusableResult: `info` holds what can't be stored.
    """
    if not any(row.prompt_ids or row.response_ids or row.text or row.info for row in rows):
        return None
    try:
        wires = [
            _Wire(row.prompt_ids, row.response_ids, row.log_probs, row.text, msgspec.Raw(_packed_info(row.info)))
            for row in rows
        ]
        return msgspec.msgpack.encode(wires)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UnusableResult(f"{who} has info or text that can't be stored: {error}") from error


def restored(records: Sequence[TrajectoryRecord], payload: bytes | None) -> tuple[Trajectory, ...]:
    """The trajectories of a session, from its event and its payload."""
    wires = [None] * len(records) if payload is None else _wire_decoder.decode(payload)
    return tuple(
        Trajectory(
            reward=record.metrics.get("reward"),
            metrics=record.metrics,
            spans=record.spans,
            environment=record.environment,
        )
        if wire is None
        else Trajectory(
            prompt_ids=_packed("i", wire.prompt_ids),
            response_ids=_packed("i", wire.response_ids),
            log_probs=_packed("f", wire.log_probs),
            reward=record.metrics.get("reward"),
            metrics=record.metrics,
            spans=record.spans,
            environment=record.environment,
            text=wire.text,
            info=_restored_info(wire.info),
        )
        for record, wire in zip(records, wires, strict=True)
    )


def _packed_info(info: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode(info) if info else _NO_INFO


def _restored_info(raw: msgspec.Raw) -> Any:
    # Its own bytes: it would keep those of the whole payload alive.
    data = bytes(raw)
    return {} if data == _NO_INFO else PackedInfo(data)


def _packed(code: Code, data: bytes) -> Any:
    return Packed(code, data) if data else _NONE
