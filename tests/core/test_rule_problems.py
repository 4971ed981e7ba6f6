"""Rules that contradict themselves are refused by a sentence, and what lies right beside them is taken."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from groupstate.core.rules import Capacity, PerBatch, PerDataset, Rules, Slots, recorded_rules, rules_from_dict
from groupstate.errors import BadSettings

EXACT: dict[str, Any] = {
    "selection": "exact_version",
    "basis": "target_version",
    "lag_max": 0,
    "batch_size": 4,
}
DRAINS: dict[str, Any] = {"mode": "sync", "filter_metric": "acc", "batch_size": 4}
WAIT_0: dict[str, Any] = {"on_stale": "wait", "batch_size": 4}

NEEDS_MODULE = (
    "selection is {!r}; it must be 'oldest_first', 'freshest_first', 'exact_version' or the import path of a function, "
    "'module:function'"
)
TOGETHER = "selection 'exact_version' and basis 'target_version' go together: set both or neither"
NEVER_AGAIN = (
    "selection 'exact_version' needs mode 'async', on_stale 'drop' and lag_max 0: a group whose version has passed "
    "can never be sampled"
)
DEADLOCKS = "on_stale 'wait' with lag_max 0 needs admission 'per_batch': anything else deadlocks"

Row = tuple[dict[str, Any], str, dict[str, Any]]

NUMBERS: list[Row] = [
    # refused, why, what is fine in its place
    ({"requeues_max": -1}, "requeues_max is -1; it must be at least 0", {"requeues_max": 0}),
    ({"oversample": -1}, "oversample is -1; it must be at least 0", {"oversample": 0}),
    ({"refill_multiple": 0}, "refill_multiple is 0; it must be at least 1", {"refill_multiple": 1}),
    ({"share_tolerance": -0.1}, "share_tolerance is -0.1; it must be at least 0", {"share_tolerance": 0}),
    ({"starvation_versions": 0}, "starvation_versions is 0; it must be at least 1", {"starvation_versions": 1}),
    (
        {"session_deadline_s": 0},
        "session_deadline_s is 0.0; it must be above 0 and finite",
        {"session_deadline_s": 1e-9},
    ),
    (
        {"group_deadline_s": float("inf")},
        "group_deadline_s is inf; it must be above 0 and finite",
        {"group_deadline_s": 1e9},
    ),
    (
        {"group_deadline_s": float("nan")},
        "group_deadline_s is nan; it must be above 0 and finite",
        {"group_deadline_s": None},
    ),
]

ADMISSIONS: list[Row] = [
    (
        {"admission": Capacity(lag_max=0)},
        "admission 'capacity' needs batch_size: it counts in batches",
        {"admission": Capacity(lag_max=0), "batch_size": 1},
    ),
]

BATCHES: list[Row] = [
    (
        {**DRAINS, "batch_size": None},
        "sync mode with a filter_metric needs batch_size: its refills are bounded in batches",
        {"mode": "sync"},
    ),
    (
        {"batch_size": 4, "generated_groups_max": 3},
        "generated_groups_max 3 is below batch_size 4, so no batch could ever be filled",
        {"batch_size": 4, "generated_groups_max": 4},
    ),
    (
        {**DRAINS, "refill_multiple": 5},
        "refill_multiple 5 is above the 4 groups that may be in flight",
        {**DRAINS, "refill_multiple": 4},
    ),
    (
        {**DRAINS, "refill_multiple": 9, "in_flight_batches_max": 2},
        "refill_multiple 9 is above the 8 groups that may be in flight",
        {**DRAINS, "refill_multiple": 8, "in_flight_batches_max": 2},
    ),
    (
        {"refill_multiple": 3, "admission": Slots(n=2, ready_max=9)},
        "refill_multiple 3 is above the 2 groups that may be in flight",
        {"refill_multiple": 2, "admission": Slots(n=2)},
    ),
    (
        {"refill_multiple": 3, "admission": Capacity(lag_max=0, in_flight_max=2), "batch_size": 4},
        "refill_multiple 3 is above the 2 groups that may be in flight",
        {"refill_multiple": 3, "admission": Capacity(lag_max=0), "batch_size": 4},
    ),
]

STALE: list[Row] = [
    (
        {"on_stale": "wait"},
        "on_stale 'wait' waits for groups at the lag bound, and lag_max is not set",
        {"on_stale": "wait", "datasets": {"math": PerDataset(lag_max=1)}},
    ),
    (
        {**WAIT_0, "lag_max": 0, "admission": Slots(n=4)},
        DEADLOCKS,
        {**WAIT_0, "lag_max": 0, "admission": PerBatch(warmup=3)},
    ),
    (
        {**WAIT_0, "lag_max": 5, "datasets": {"math": PerDataset(lag_max=0)}, "admission": Capacity(lag_max=1)},
        DEADLOCKS,
        {**WAIT_0, "lag_max": 5, "datasets": {"math": PerDataset(lag_max=1)}, "admission": Capacity(lag_max=1)},
    ),
    (
        {"mode": "sync", "cancel_doomed": True},
        "cancel_doomed needs failure 'refill' in sync mode: with 'keep' a group in flight may be sampled whatever "
        "becomes of it",
        {"mode": "sync", "cancel_doomed": True, "failure": "refill"},
    ),
]

SELECTIONS: list[Row] = [
    ({"selection": "newest"}, NEEDS_MODULE.format("newest"), {"selection": "freshest_first"}),
    ({"selection": "pkg.mod:"}, NEEDS_MODULE.format("pkg.mod:"), {"selection": "pkg.mod:fn"}),
    ({"selection": ":fn"}, NEEDS_MODULE.format(":fn"), {"selection": "rules.py:fn"}),
    ({**EXACT, "basis": "dispatch"}, TOGETHER, EXACT),
    ({"basis": "target_version"}, TOGETHER, {"basis": "newest_token"}),
    ({**EXACT, "mode": "sync"}, NEVER_AGAIN, EXACT),
    ({**EXACT, "on_stale": "wait"}, NEVER_AGAIN, EXACT),
    ({**EXACT, "lag_max": None}, NEVER_AGAIN, EXACT),
    ({**EXACT, "lag_max": 1}, NEVER_AGAIN, EXACT),
    (
        {**EXACT, "datasets": {"math": PerDataset(lag_max=0)}},
        NEVER_AGAIN,
        {**EXACT, "datasets": {"math": PerDataset(tolerance=0.1)}},
    ),
    (
        {**EXACT, "batch_size": None},
        "selection 'exact_version' needs batch_size: so many groups are made for each weight version",
        EXACT,
    ),
]


def shares(*values: float | None) -> dict[str, Any]:
    return {"datasets": {f"d{number}": PerDataset(share=value) for number, value in enumerate(values)}}


DATASETS: list[Row] = [
    (shares(0.7, 0.4), "the shares of the datasets add up to 1.1; it must be at most 1", shares(0.6, 0.4)),
]

NO_AGE = (
    "bounds nothing in sync mode, where no group is evicted or awaited for its age: leave it out, or set mode 'async'"
)
ASYNC_EVICTS = (
    "empty {!r} is for sync mode: async mode evicts every failed group, and one without a trajectory for one refill; "
    "leave it out, or take 'keep_finished'"
)

CONTRADICTIONS: list[Row] = [
    ({"mode": "sync", "lag_max": 1}, f"lag_max {NO_AGE}", {"mode": "sync"}),
    ({"mode": "sync", "lag_max": 1, "on_stale": "wait"}, f"lag_max {NO_AGE}", {"lag_max": 1, "on_stale": "wait"}),
    (
        {"mode": "sync", "datasets": {"math": PerDataset(lag_max=1)}},
        f"datasets['math'] has lag_max, which {NO_AGE}",
        {"mode": "sync", "datasets": {"math": PerDataset(share=0.5)}},
    ),
    ({"empty": "drop"}, ASYNC_EVICTS.format("drop"), {"mode": "sync", "empty": "drop"}),
    ({"empty": "keep"}, ASYNC_EVICTS.format("keep"), {"empty": "refill"}),
    ({"empty": "keep_all"}, ASYNC_EVICTS.format("keep_all"), {"empty": "keep_finished"}),
    (
        {"in_flight_batches_max": 2},
        "in_flight_batches_max bounds the refills of sync mode; in async mode admission bounds what is in flight, such "
        "as Slots(n=...)",
        {"mode": "sync", "in_flight_batches_max": 2},
    ),
    (
        {"session_deadline_s": 100.0, "group_deadline_s": 10.0},
        "session_deadline_s 100 is above group_deadline_s 10, and a group's time begins first, so no session could "
        "ever come to its own deadline",
        {"session_deadline_s": 10.0, "group_deadline_s": 10.0},
    ),
]

ALL = CONTRADICTIONS + NUMBERS + ADMISSIONS + BATCHES + STALE + SELECTIONS + DATASETS


@pytest.mark.parametrize(("wrong", "why", "right"), ALL, ids=str)
def test_what_is_wrong_is_named_and_what_is_right_beside_it_is_taken(
    wrong: dict[str, Any], why: str, right: dict[str, Any]
) -> None:
    with pytest.raises(BadSettings) as refused:
        Rules(**wrong)

    rules = Rules(**right)

    assert str(refused.value) == why
    assert {name: getattr(rules, name) for name in right} == right


@pytest.mark.parametrize(("wrong", "why", "right"), CONTRADICTIONS, ids=str)
def test_a_log_may_hold_what_nobody_may_write_any_more(wrong: dict[str, Any], why: str, right: dict[str, Any]) -> None:
    recorded = recorded_rules(wrong)

    assert {name: getattr(recorded, name) for name in wrong} == wrong
    assert recorded_rules(recorded.to_dict()) == recorded
    with pytest.raises(BadSettings) as refused:
        rules_from_dict(wrong, "run.toml")
    assert str(refused.value) == f"run.toml: {why}"


@pytest.mark.parametrize("wrong", [{"lag_maxx": 1}, {"lag_max": "1"}, {"on_stale": "wait"}], ids=str)
def test_what_nothing_could_run_under_is_refused_in_a_log_too(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadSettings):
        recorded_rules(wrong)


HARMLESS: list[dict[str, Any]] = [
    {"wait_gates": "each"},
    {"per": "trajectory", "spread": "std", "tolerance": 0.5, "on_singleton": "evict", "on_missing": "keep"},
    {"datasets": {"math": PerDataset(tolerance=0.5)}},
    {"failure": "refill"},
    {"mode": "sync", "in_flight_batches_max": 3},
    {"retry_delay_s": 5.0},
    {"share_tolerance": 0.5},
]


@pytest.mark.parametrize("settings", HARMLESS, ids=str)
def test_how_something_is_done_that_is_off_may_be_said(settings: dict[str, Any]) -> None:
    assert {name: getattr(Rules(**settings), name) for name in settings} == settings


PARTS: list[tuple[Callable[..., Any], dict[str, Any], str, dict[str, Any]]] = [
    # refused where it is made, why, what is fine in its place
    (PerBatch, {"warmup": -1}, "PerBatch: warmup is -1; it must be at least 0", {"warmup": 0}),
    (PerBatch, {"warmups": 2}, "PerBatch has no setting 'warmups'; did you mean 'warmup'?", {"warmup": 2}),
    (Slots, {"n": 0}, "Slots: n is 0; it must be at least 1", {"n": 1}),
    (Slots, {"n": "4"}, "Slots: n is '4'; it must be an integer", {"n": 4}),
    (Slots, {"n": 1, "ready_max": -1}, "Slots: ready_max is -1; it must be at least 0", {"n": 1, "ready_max": 0}),
    (Slots, {"n": 4, "ready": 3}, "Slots has no setting 'ready'; did you mean 'ready_max'?", {"n": 4, "ready_max": 3}),
    (Slots, {"ready_max": 1}, "Slots needs n: Slots(n=...)", {"n": 1, "ready_max": 1}),
    (Capacity, {"lag_max": -1}, "Capacity: lag_max is -1; it must be at least 0", {"lag_max": 0}),
    (
        Capacity,
        {"lag_max": 0, "in_flight_max": 0},
        "Capacity: in_flight_max is 0; it must be at least 1",
        {"lag_max": 0, "in_flight_max": 1},
    ),
    (PerDataset, {"weight": 1}, "PerDataset has no setting 'weight'; known are lag_max, share, tolerance", {}),
    (PerDataset, {"share": -0.1}, "PerDataset: share is -0.1; it must be from 0 to 1", {"share": 0.0}),
    (PerDataset, {"share": 1.1}, "PerDataset: share is 1.1; it must be from 0 to 1", {"share": 1.0}),
    (PerDataset, {"share": float("nan")}, "PerDataset: share is nan; it must be from 0 to 1", {"share": None}),
    (PerDataset, {"lag_max": -1}, "PerDataset: lag_max is -1; it must be at least 0", {"lag_max": 0}),
    (PerDataset, {"tolerance": -1}, "PerDataset: tolerance is -1.0; it must be at least 0", {"tolerance": 0.0}),
    (
        PerDataset,
        {"tolerance": float("inf")},
        "PerDataset: tolerance is inf; it must be finite and at least 0",
        {"tolerance": 9.0},
    ),
    (Rules, {"lag_maxx": 1}, "Rules has no setting 'lag_maxx'; did you mean 'lag_max'?", {"lag_max": 1}),
]


@pytest.mark.parametrize(("make", "wrong", "why", "right"), PARTS, ids=str)
def test_what_is_wrong_by_itself_is_refused_where_it_is_made(
    make: Callable[..., Any], wrong: dict[str, Any], why: str, right: dict[str, Any]
) -> None:
    with pytest.raises(BadSettings) as refused:
        make(**wrong)

    made = make(**right)

    assert str(refused.value) == why
    assert {name: getattr(made, name) for name in right} == right


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: Slots(4, 2, 1), "Slots: Extra positional arguments provided"),
        (lambda: Slots(4, n=4), "Slots: Argument 'n' given by name and position"),
    ],
)
def test_values_without_a_name_are_taken_in_order_or_refused(call: Callable[[], Any], why: str) -> None:
    assert Slots(4, 2) == Slots(n=4, ready_max=2)
    with pytest.raises(BadSettings) as refused:
        call()

    assert str(refused.value) == why


@pytest.mark.parametrize("kind", [Rules, PerBatch, Slots, Capacity, PerDataset])
def test_a_constructor_shows_its_settings(kind: Any) -> None:
    assert list(inspect.signature(kind).parameters) == list(kind.__struct_fields__)


def test_shares_that_add_up_to_one_but_for_rounding_are_taken() -> None:
    nearly = [0.1] * 9 + [0.1 + 1e-12]
    assert sum(nearly) > 1
    assert len(Rules(**shares(*nearly)).datasets) == 10


def test_without_a_bound_of_its_own_a_dataset_has_the_runs() -> None:
    rules = Rules(
        lag_max=3,
        tolerance=0.5,
        datasets={"math": PerDataset(lag_max=0, tolerance=0.0), "code": PerDataset(share=0.5)},
    )

    assert [rules.lag_bound(name) for name in ("math", "code", "other")] == [0, 3, 3]
    assert [rules.tolerance_for(name) for name in ("math", "code", "other")] == [0.0, 0.5, 0.5]
    assert rules.lag_classes == {"math"}


def test_a_bound_of_one_dataset_alone_drops_its_groups_in_async_mode() -> None:
    bounded = {"datasets": {"math": PerDataset(lag_max=0)}}

    assert Rules(**bounded).drops_stale
    assert not recorded_rules({"mode": "sync", **bounded}).drops_stale
    assert Rules(on_stale="wait", **bounded).waits_for_stale
