"""The settings: their defaults, what they refuse, and what follows from a combination of them."""

import tomllib
from typing import Any, get_args

import msgspec
import numpy as np
import pytest

from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.book_changes import BASES
from groupstate.core.rules import (
    Basis,
    Capacity,
    PerBatch,
    PerDataset,
    Rules,
    Slots,
    known_rules,
    recorded_rules,
    rules_from_dict,
)
from groupstate.errors import BadSettings, UnsupportedLog
from groupstate.testing.notation import play


def test_everything_that_evicts_or_waits_is_off_by_default() -> None:
    rules = Rules()

    assert (rules.mode, rules.lag_max, rules.filter_metric, rules.survivors_min) == ("async", None, None, None)
    assert not rules.drops_stale
    assert not rules.waits_for_stale
    assert not rules.drains


def test_rules_come_from_what_a_toml_file_holds() -> None:
    text = """
    mode = "sync"
    batch_size = 64
    filter_metric = "acc"
    tolerance = 0
    empty = "drop"
    admission = { kind = "slots", n = 128, ready_max = 64 }
    """

    assert rules_from_dict(tomllib.loads(text)) == Rules(
        mode="sync",
        batch_size=64,
        filter_metric="acc",
        tolerance=0.0,
        empty="drop",
        admission=Slots(n=128, ready_max=64),
    )


@pytest.mark.parametrize(
    ("table", "admission"),
    [
        ({"kind": "per_batch"}, PerBatch(warmup=1)),
        ({"kind": "per_batch", "warmup": 3}, PerBatch(warmup=3)),
        ({"kind": "slots", "n": 8}, Slots(n=8, ready_max=0)),
        ({"kind": "capacity", "lag_max": 2}, Capacity(lag_max=2)),
    ],
)
def test_each_kind_of_admission_is_a_table_with_its_kind(table: dict[str, Any], admission: Any) -> None:
    assert rules_from_dict({"batch_size": 4, "admission": table}).admission == admission


def test_no_settings_are_the_defaults() -> None:
    assert rules_from_dict({}) == Rules()


@pytest.mark.parametrize("rules", [Rules(), Rules(lag_max=2, filter_metric="acc", admission=Slots(n=2))])
def test_rules_come_back_from_what_the_log_keeps(rules: Rules) -> None:
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(rules.to_dict()))

    assert rules_from_dict(kept) == rules


def test_a_run_writes_its_rules_down_and_a_replay_has_them() -> None:
    rules = Rules(lag_max=3)

    assert play(rules=rules).book.rules == rules.to_dict()


@pytest.mark.parametrize(
    ("key", "near"),
    [("lag_maxx", "lag_max"), ("batchsize", "batch_size"), ("filter", "filter_metric"), ("on_stales", "on_stale")],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(key: str, near: str) -> None:
    with pytest.raises(BadSettings) as refused:
        rules_from_dict({key: 1})

    assert str(refused.value) == f"rules has no setting {key!r}; did you mean {near!r}?"


def test_an_unknown_key_that_is_near_to_nothing_gets_the_whole_list() -> None:
    with pytest.raises(BadSettings) as refused:
        rules_from_dict({"qqqq": 1}, "settings.toml: rules")

    known = ", ".join(sorted(Rules.__struct_fields__))
    assert str(refused.value) == f"settings.toml: rules has no setting 'qqqq'; known are {known}"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"mode": "sink"}, "rules: mode is 'sink'; it must be 'async' or 'sync'"),
        ({"mode": "Async"}, "rules: mode is 'Async'; it must be 'async' or 'sync' (did you mean 'async'?)"),
        ({"mode": None}, "rules: mode is None; it must be 'async' or 'sync'"),
        ({"batch_size": "8"}, "rules: batch_size is '8'; it must be an integer or None"),
        ({"batch_size": True}, "rules: batch_size is True; it must be an integer or None"),
        ({"lag_max": 1.5}, "rules: lag_max is 1.5; it must be an integer or None"),
        ({"lag_max": 7.0}, "rules: lag_max is 7.0; it must be an integer or None"),
        ({"filter_metric": 3}, "rules: filter_metric is 3; it must be a string or None"),
        ({"cancel_doomed": "no"}, "rules: cancel_doomed is 'no'; it must be true or false"),
        ({"stall_s": object}, "rules: stall_s is <class 'object'>; it must be a number"),
        (
            {"admission": "slots"},
            "rules: admission is 'slots'; it must be a table, { kind = \"slots\", n = ... }; in Python Slots(n=...)",
        ),
        (
            {"admission": 4},
            'rules: admission is 4; it must be a table, { kind = "per_batch" } or { kind = "slots", n = ... } or '
            '{ kind = "capacity", lag_max = ... }; in Python PerBatch() or Slots(n=...) or Capacity(lag_max=...)',
        ),
        ({"admission": {"kind": "slots", "m": 1}}, "rules: admission has no setting 'm'; known are n, ready_max"),
        ({"admission": {"kind": "slots"}}, "rules: admission: Slots needs n: Slots(n=...)"),
        ({"admission": {"kind": "slots", "n": "4"}}, "rules: admission: Slots: n is '4'; it must be an integer"),
        (
            {"admission": {"n": 1}},
            "rules: admission has no kind; kinds are 'per_batch', 'slots', 'capacity'",
        ),
        ({"admission": {"kind": "slot", "n": 1}}, "rules: admission has kind 'slot'; did you mean 'slots'?"),
        (
            {"datasets": {"a": 0.5}},
            "rules: datasets['a'] is 0.5; it must be a PerDataset or a table of its settings",
        ),
        ({"datasets": {"a": {"shar": 1}}}, "rules: datasets['a'] has no setting 'shar'; did you mean 'share'?"),
        (
            {"datasets": {"a": {"share": "x"}}},
            "rules: datasets['a']: PerDataset: share is 'x'; it must be a number or None",
        ),
        (
            {"datasets": ["a"]},
            "rules: datasets is ['a']; it must be a table of names, each with a PerDataset or a table of its settings",
        ),
    ],
)
def test_a_wrong_type_is_refused_with_its_place(data: dict[str, Any], text: str) -> None:
    with pytest.raises(BadSettings) as refused:
        rules_from_dict(data)

    assert str(refused.value) == text


LEAST: dict[str, float] = {
    "batch_size": 1,
    "lag_max": 0,
    "tolerance": 0,
    "survivors_min": 1,
    "attempts_max": 1,
    "retry_delay_s": 0,
    "in_flight_batches_max": 1,
    "generated_groups_max": 1,
    "eviction_streak_max": 1,
    "stall_s": 0,
}


@pytest.mark.parametrize("name", LEAST)
def test_a_number_below_its_least_is_refused(name: str) -> None:
    with pytest.raises(BadSettings) as refused:
        Rules(**{name: LEAST[name] - 1})

    shown = LEAST[name] - 1
    assert str(refused.value) in {
        f"{name} is {value!r}; it must be at least {LEAST[name]}" for value in (shown, float(shown))
    }


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"batch_size": np.int64(4)}, 4),
        ({"tolerance": np.float32(0.5)}, 0.5),
        ({"stall_s": 5}, 5.0),
        ({"admission": {"kind": "slots", "n": 4}}, Slots(n=4)),
        ({"datasets": {"a": {"share": 1}}}, {"a": PerDataset(share=1.0)}),
        ({"datasets": {"a": PerDataset(lag_max=1)}}, {"a": PerDataset(lag_max=1)}),
    ],
)
def test_values_as_settings_files_and_numpy_have_them_are_kept_as_a_log_can_hold_them(given: Any, kept: Any) -> None:
    (name,) = given
    value = getattr(Rules(**given), name)

    assert value == kept
    assert type(value) is type(kept)


@pytest.mark.parametrize("name", LEAST)
def test_the_least_itself_is_taken(name: str) -> None:
    assert getattr(Rules(**{name: LEAST[name]}), name) == LEAST[name]


@pytest.mark.parametrize("name", ["tolerance", "retry_delay_s", "stall_s"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_refused(name: str, value: float) -> None:
    with pytest.raises(BadSettings, match=f"{name} is {value}; it must be finite and at least 0"):
        Rules(**{name: value})


def test_a_file_with_a_number_out_of_bounds_is_refused_alike() -> None:
    with pytest.raises(BadSettings, match="lag_max is -1; it must be at least 0"):
        rules_from_dict({"lag_max": -1})


def test_sync_mode_with_a_filter_needs_the_batch_size_that_bounds_its_refills() -> None:
    with pytest.raises(BadSettings, match="sync mode with a filter_metric needs batch_size"):
        Rules(mode="sync", filter_metric="acc")

    assert Rules(mode="sync", filter_metric="acc", batch_size=4).drains
    assert not Rules(mode="sync").drains
    assert not Rules(filter_metric="acc").drains


@pytest.mark.parametrize("admission", [Slots(n=4), Capacity(lag_max=1)])
def test_wait_at_bound_zero_is_refused_for_any_admission_but_per_batch(admission: Any) -> None:
    with pytest.raises(BadSettings, match="on_stale 'wait' with lag_max 0 needs admission 'per_batch'"):
        Rules(on_stale="wait", lag_max=0, batch_size=4, admission=admission)

    assert Rules(on_stale="wait", lag_max=1, batch_size=4, admission=admission).waits_for_stale


@pytest.mark.parametrize("admission", [None, PerBatch(), PerBatch(warmup=0)])
def test_wait_at_bound_zero_goes_with_per_batch(admission: Any) -> None:
    assert Rules(on_stale="wait", lag_max=0, admission=admission).waits_for_stale


def test_capacity_needs_the_batch_size_that_it_multiplies_by() -> None:
    with pytest.raises(BadSettings, match="batch_size"):
        Rules(admission=Capacity(lag_max=1))


@pytest.mark.parametrize("admission", [Slots(n=2, ready_max=9), Capacity(lag_max=9, in_flight_max=2)], ids=repr)
def test_refills_in_multiples_that_never_find_places_enough_are_refused(admission: Any) -> None:
    with pytest.raises(BadSettings, match="refill_multiple 3 is above the 2 groups that may be in flight"):
        Rules(batch_size=4, admission=admission, refill_multiple=3)

    assert Rules(batch_size=4, admission=admission, refill_multiple=2).admission == admission


@pytest.mark.parametrize(
    ("fields", "drops", "waits"),
    [
        ({"lag_max": 0}, True, False),
        ({"lag_max": 2}, True, False),
        ({"lag_max": 2, "on_stale": "wait"}, False, True),
        ({}, False, False),
        ({"mode": "sync", "lag_max": 2}, False, False),
        ({"mode": "sync", "lag_max": 2, "on_stale": "wait"}, False, False),
    ],
    ids=str,
)
def test_the_lag_bound_drops_or_waits_in_async_mode_alone(fields: dict[str, Any], drops: bool, waits: bool) -> None:
    rules = recorded_rules(fields)

    assert (rules.drops_stale, rules.waits_for_stale) == (drops, waits)


@pytest.mark.parametrize(
    ("fields", "evicts"),
    [
        ({}, True),
        ({"failure": "keep"}, True),
        ({"mode": "sync"}, False),
        ({"mode": "sync", "failure": "refill"}, True),
    ],
    ids=str,
)
def test_failures_are_evicted_in_async_mode_or_where_the_rules_say_refill(fields: dict[str, Any], evicts: bool) -> None:
    assert Rules(**fields).evicts_failed() is evicts


def test_admission_is_one_batch_ahead_in_async_mode_and_none_in_sync_mode() -> None:
    assert Rules().admission_rule == PerBatch(warmup=1)
    assert Rules(mode="sync").admission_rule == PerBatch(warmup=0)
    assert Rules(mode="sync", admission=Slots(n=3)).admission_rule == Slots(n=3)


@pytest.mark.parametrize(
    ("fields", "bound"),
    [({}, 24), ({"batch_size": 4}, 32), ({"batch_size": 4, "eviction_streak_max": 5}, 5)],
    ids=str,
)
def test_the_streak_bound_is_eight_batches_unless_it_is_set(fields: dict[str, Any], bound: int) -> None:
    assert Rules(**fields).streak_bound(demand=3) == bound


def test_rules_cannot_be_edited() -> None:
    rules = Rules()
    with pytest.raises(AttributeError):
        rules.lag_max = 3  # type: ignore[misc]


def test_changed_rules_are_the_same_but_for_what_is_named() -> None:
    rules = Rules(lag_max=3, batch_size=2)

    assert rules.changed(batch_size=5) == Rules(lag_max=3, batch_size=5)
    assert rules.changed() == rules


@pytest.mark.parametrize("read", [recorded_rules, rules_from_dict])
def test_a_refusal_begins_with_what_was_read(read: Any) -> None:
    with pytest.raises(BadSettings, match=r"^rules has no setting 'lagmax'; did you mean 'lag_max'"):
        read({"lagmax": 3})
    with pytest.raises(BadSettings, match=r"^rules: lag_max "):
        read({"lag_max": "half"})
    with pytest.raises(BadSettings, match=r"^the rules of run 7: lag_max "):
        read({"lag_max": "half"}, "the rules of run 7")


# Of other versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "known"),
    [
        ({}, {"lag_max": 3, "batch_size": 2}),
        ({"patience": 3}, {"lag_max": 3, "batch_size": 2}),
        ({"on_stale": "age", "patience": 3}, {"lag_max": 3, "batch_size": 2}),
        ({"lag_max": "half"}, {"batch_size": 2}),
        ({"on_stale": "age", "mode": "tidal"}, {}),
    ],
    ids=str,
)
def test_for_looking_rules_are_read_as_far_as_this_version_knows_them(
    more: dict[str, Any], known: dict[str, Any]
) -> None:
    assert known_rules({"lag_max": 3, "batch_size": 2, **more}) == Rules(**known)


def test_the_book_knows_what_the_rules_can_count_lag_from() -> None:
    assert set(get_args(Basis)) == BASES


def test_a_book_refuses_what_it_would_keep_in_another_order_and_stays_as_it_was() -> None:
    book, before = Book(), Book().state()
    with pytest.raises(
        UnsupportedLog, match=r"count lag from 'median_token'.*: a newer one wrote it. Open it with that"
    ):
        book.apply(ev.Record(1, 0, ev.RunStarted("r", {"basis": "median_token"}, 1, 7)))

    assert book.state() == before


def test_the_version_of_the_rules_is_that_of_the_latest_opening() -> None:
    book = Book()
    book.apply(ev.Record(1, 0, ev.RunStarted("r", {}, 2, 7)))
    assert book.rules_version == 2
    book.apply(ev.Record(2, 0, ev.RunRecovered({}, 3, 7, 2)))
    assert book.rules_version == 3
