"""The events as a format: what is written can be read, by this version and by later ones."""

import ast
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from groupstate.core import events as ev

REF = ev.PayloadRef(3, 20, 123456)
ROW = ev.TrajectoryRecord(0, {"reward": 0.5, "acc": 1.0}, 4, 6, (ev.VersionSpan(0, 6, 2),), ((1, 2), (4, 5)), ("len",))

FULL: list[ev.AnyEvent] = [
    ev.RunStarted("r", {"mode": "async", "admission": {"kind": "slots", "n": 2}}, 1, 7, 2, "0.1.0", 42),
    ev.WeightsPublished(8, 2),
    ev.SourceExhausted("list", 10),
    ev.AdmissionHeld("lag"),
    ev.CheckpointMarked(1, 8, 2, "step-100"),
    ev.RunRecovered({"mode": "sync"}, 1, 8, 3, 17, "0.1.0"),
    ev.RunRewound(1, 40, 8, 3, True),
    ev.RunClosed("SIGTERM"),
    ev.DatasetStarved("math", 4, 2, 7),
    ev.SourceOpened("list", "ListSource", {"size": 10, "epochs": None, "shuffle_seed": 7}),
    ev.GroupSubmitted("math_1", 4, "train", 7, 2, "refill", "math", 9, REF, 100, 8, 1, True),
    ev.GroupFinished("math_1", True),
    ev.GroupFailed("math_1", True),
    ev.GroupEvicted("math_1", ("stale", "zero_variance"), 3, 2, 0.7, "acc", "why"),
    ev.GroupRequeued("math_1", "recovery", True, 3),
    ev.RefillForfeited(2, "batch full"),
    ev.SessionStarted("math_1", 1, 2, "worker-3", 7, True),
    ev.SessionFinished("math_1", 1, 2, (ROW, ev.TrajectoryRecord(1)), REF, True),
    ev.SessionFailed("math_1", 1, 2, "timeout", "too slow", 4.0, True),
    ev.ResultFenced("math_1", 1, 2, "finished", "gone"),
    ev.BatchRequested(1, "train", 8, 7),
    ev.BatchRequestCancelled(1, "timeout"),
    ev.BatchSampled(1, 1, "train", ("math_1", "b"), 7, (0, 1)),
    ev.BatchCommitted(1),
    ev.BatchReturned(1, "released"),
]
"""One of each kind, every field set to something other than its default."""

SPARE: list[ev.AnyEvent] = [
    ev.RunStarted("r", {}, 1, 7),
    ev.WeightsPublished(8),
    ev.SourceExhausted(),
    ev.AdmissionHeld("lag"),
    ev.CheckpointMarked(1, 8, 2),
    ev.RunRecovered({}, 1, 8, 3),
    ev.RunRewound(1, 40, 8, 3),
    ev.RunClosed(),
    ev.DatasetStarved("math", 4),
    ev.SourceOpened("list"),
    ev.GroupSubmitted("g", 4, "train", 7, 2, "submit"),
    ev.GroupFinished("g"),
    ev.GroupFailed("g"),
    ev.GroupEvicted("g", ("stale",), 3, 2),
    ev.GroupRequeued("g"),
    ev.RefillForfeited(2, "batch full"),
    ev.SessionStarted("g", 1, 2),
    ev.SessionFinished("g", 1, 2),
    ev.SessionFailed("g", 1, 2, "error"),
    ev.ResultFenced("g", 1, 2, "failed", "attempt"),
    ev.BatchRequested(1, "train", 8, 7),
    ev.BatchRequestCancelled(1),
    ev.BatchSampled(1, 1, "train", ("g",), 7, (0,)),
    ev.BatchCommitted(1),
    ev.BatchReturned(1),
]
"""One of each kind with the required fields alone: what the oldest log could hold."""

FIRST_FIELDS: dict[str, tuple[int, str]] = {
    "RunStarted": (1, "run_id rules rules_version weight_version lineage library seed"),
    "WeightsPublished": (2, "weight_version lineage"),
    "SourceExhausted": (3, "source position"),
    "AdmissionHeld": (4, "reason"),
    "CheckpointMarked": (5, "mark weight_version lineage name"),
    "RunRecovered": (6, "rules rules_version weight_version lineage torn_bytes library"),
    "RunRewound": (7, "mark mark_seq weight_version lineage"),
    "RunClosed": (8, "reason"),
    "DatasetStarved": (9, "dataset versions open_groups evicted"),
    "SourceOpened": (10, "name kind details"),
    "GroupSubmitted": (
        20,
        "group_id size partition weight_version lineage cause dataset source_position prompt prompt_length "
        "target_version oversample validation_round",
    ),
    "GroupFinished": (21, "group_id partial"),
    "GroupFailed": (22, "group_id cancelled"),
    "GroupEvicted": (23, "group_id reasons lag credit shared_value metric message"),
    "GroupRequeued": (24, "group_id reason by_rule weight_version"),
    "RefillForfeited": (25, "count reason"),
    "SessionStarted": (40, "group_id session attempt worker weight_version"),
    "SessionFinished": (41, "group_id session attempt trajectories payload"),
    "SessionFailed": (42, "group_id session attempt failure message retry_in_s"),
    "ResultFenced": (43, "group_id session attempt result reason"),
    "BatchRequested": (60, "request partition size weight_version"),
    "BatchRequestCancelled": (61, "request reason"),
    "BatchSampled": (62, "batch request partition group_ids weight_version lags"),
    "BatchCommitted": (63, "batch"),
    "BatchReturned": (64, "batch reason"),
}
"""Tag and fields of each kind, in the order of the arrays. Appending to a line is allowed, nothing else."""

FIRST_PARTS = {
    ev.PayloadRef: "key length crc",
    ev.VersionSpan: "start stop weight_version",
    ev.TrajectoryRecord: "index metrics prompt_tokens response_tokens spans environment",
    ev.Record: "seq at_ns event",
}


def name_of(value: Any) -> str:
    return type(value).__name__


def read_back(records: list[ev.Record]) -> list[ev.Record]:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(records), type=list[ev.Record])


def test_every_kind_has_an_example_here() -> None:
    kinds = {kind.__name__ for kind in ev.EVENT_TYPES}

    assert kinds == {name_of(event) for event in FULL} == {name_of(event) for event in SPARE} == set(FIRST_FIELDS)


@pytest.mark.parametrize("event", [*FULL, *SPARE], ids=name_of)
def test_an_event_reads_back_as_it_was_written(event: ev.AnyEvent) -> None:
    records = [ev.Record(1, 1_700_000_000_000_000_000, event)]

    assert read_back(records) == records


def test_a_mixed_log_reads_back_in_order() -> None:
    records = [ev.Record(seq, seq * 1_000, event) for seq, event in enumerate(FULL, 1)]

    assert read_back(records) == records


@pytest.mark.parametrize("event", FULL, ids=name_of)
def test_no_example_leaves_a_field_at_its_default(event: ev.AnyEvent) -> None:
    fields = msgspec.structs.fields(type(event))
    at_default = [field.name for field in fields if getattr(event, field.encode_name) == field.default]

    assert at_default == []


@pytest.mark.parametrize("group_id", ["a_b_0_1", "a/b", "a:b", "a.1", "two\nlines", "é中🙂", " ", "\x00"])
def test_a_group_id_is_kept_byte_for_byte(group_id: str) -> None:
    records = [ev.Record(1, 0, ev.GroupRequeued(group_id))]

    assert read_back(records)[0].event == ev.GroupRequeued(group_id)


def test_tags_are_unique() -> None:
    tags = [kind.__struct_config__.tag for kind in ev.EVENT_TYPES]

    assert len(set(tags)) == len(tags)
    assert all(isinstance(tag, int) for tag in tags)


@pytest.mark.parametrize("kind", ev.EVENT_TYPES, ids=lambda kind: kind.__name__)
def test_a_kind_keeps_its_tag_and_its_first_fields_in_their_places(kind: type[ev.Event]) -> None:
    tag, names = FIRST_FIELDS[kind.__name__]
    first = tuple(names.split())

    assert kind.__struct_config__.tag == tag
    assert kind.__struct_fields__[: len(first)] == first


@pytest.mark.parametrize("part", FIRST_PARTS, ids=lambda part: part.__name__)
def test_a_part_keeps_its_first_fields_in_their_places(part: type[ev.Stored]) -> None:
    first = tuple(FIRST_PARTS[part].split())

    assert part.__struct_fields__[: len(first)] == first


@pytest.mark.parametrize("kind", ev.EVENT_TYPES, ids=lambda kind: kind.__name__)
def test_a_field_that_was_appended_has_a_default(kind: type[ev.Event]) -> None:
    first = len(FIRST_FIELDS[kind.__name__][1].split())
    appended = msgspec.structs.fields(kind)[first:]

    assert [field.name for field in appended if field.required] == []


@pytest.mark.parametrize("event", SPARE, ids=name_of)
def test_an_old_log_with_fewer_fields_reads_with_the_defaults(event: ev.AnyEvent) -> None:
    required = sum(field.required for field in msgspec.structs.fields(type(event)))
    array = msgspec.msgpack.decode(msgspec.msgpack.encode(event))
    old = msgspec.msgpack.encode([[1, 0, array[: 1 + required]]])

    assert msgspec.msgpack.decode(old, type=list[ev.Record]) == [ev.Record(1, 0, event)]


@pytest.mark.parametrize("event", FULL, ids=name_of)
def test_a_later_log_with_more_fields_can_be_read_by_this_version(event: ev.AnyEvent) -> None:
    array = msgspec.msgpack.decode(msgspec.msgpack.encode(event))
    later = msgspec.msgpack.encode([[1, 0, [*array, "a field of the future"]]])

    assert msgspec.msgpack.decode(later, type=list[ev.Record]) == [ev.Record(1, 0, event)]


def test_a_kind_that_is_not_known_is_an_error_and_not_skipped() -> None:
    strange = msgspec.msgpack.encode([[1, 0, [99, "g"]]])
    with pytest.raises(msgspec.ValidationError, match="99"):
        msgspec.msgpack.decode(strange, type=list[ev.Record])


@pytest.mark.parametrize("event", FULL, ids=name_of)
def test_an_event_cannot_be_edited(event: ev.AnyEvent) -> None:
    field = type(event).__struct_fields__[0]
    with pytest.raises(AttributeError):
        setattr(event, field, getattr(event, field))


def test_every_kind_of_one_group_is_a_group_event() -> None:
    about_one = {kind for kind in ev.EVENT_TYPES if "group_id" in kind.__struct_fields__}

    assert set(get_args(ev.GroupEvent)) == about_one


OBVIOUS = """
    attempt batch cause count credit dataset event failure group_id group_ids index kind lag lags library lineage
    mark mark_seq message metric metrics name partial partition payload position prompt prompt_tokens
    reason reasons request response_tokens result rules rules_version run_id seed session size source start stop
    target_version torn_bytes trajectories weight_version worker
"""
"""Fields whose names say it, or whose type's own docstring does."""


def undocumented() -> list[str]:
    """Fields without a docstring beneath them, over all structs of the module."""
    tree = ast.parse(Path(ev.__file__).read_text())
    found = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            for this, below in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(this, ast.AnnAssign) and isinstance(this.target, ast.Name):
                    documented = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                    if not documented:
                        found.append(f"{node.name}.{this.target.id}")
    return found


def test_every_field_is_documented_or_obvious() -> None:
    unclear = [field for field in undocumented() if field.split(".")[1] not in OBVIOUS.split()]

    assert unclear == []
