"""Events as the plain model tells them, so that the two can be compared."""

from groupstate.core import events as ev
from groupstate.testing.plain.run import Told


def told(event: ev.AnyEvent) -> Told:
    """What the model has to say of an event."""
    kind = type(event).__name__
    fields = _FIELDS.get(kind)
    if fields is not None:
        return (kind, *(getattr(event, field) for field in fields))
    assert isinstance(event, ev.AdmissionHeld), f"the model knows no {kind}"
    return kind, bool(event.reason)


_FIELDS = {
    "WeightsPublished": ("weight_version",),
    "SourceExhausted": (),
    "RunRecovered": ("weight_version",),
    "DatasetStarved": ("dataset", "versions", "open_groups", "evicted"),
    "GroupSubmitted": (
        "group_id", "size", "partition", "weight_version", "cause", "dataset", "source_position", "target_version",
        "oversample",
    ),
    "GroupFinished": ("group_id", "partial"),
    "GroupFailed": ("group_id", "cancelled"),
    "GroupEvicted": ("group_id", "reasons", "lag", "credit", "shared_value"),
    "GroupRequeued": ("group_id", "by_rule"),
    "RefillForfeited": ("count", "reason"),
    "SessionStarted": ("group_id", "session", "attempt"),
    "SessionFinished": ("group_id", "session", "attempt"),
    "SessionFailed": ("group_id", "session", "attempt", "failure", "retry_in_s"),
    "ResultFenced": ("group_id", "session", "attempt", "result", "reason"),
    "BatchRequested": ("request", "partition", "size"),
    "BatchRequestCancelled": ("request", "reason"),
    "BatchSampled": ("batch", "request", "partition", "group_ids", "lags"),
    "BatchCommitted": ("batch",),
    "BatchReturned": ("batch", "reason"),
}  # fmt: skip


def difference(real: list[Told], plain: list[Told]) -> str:
    same = next((i for i, (a, b) in enumerate(zip(real, plain, strict=False)) if a != b), min(len(real), len(plain)))
    return f"after {real[:same]}\nthe library recorded {real[same:]}\nand the model expected {plain[same:]}"
