"""What is reported of a group: its size, partition, versions and rows, and what of it can't be true."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import groupstate as gs
from groupstate.core import events as ev
from groupstate.errors import BadInput
from groupstate.runtime.observed import Reported, ReportedRow, RowKey
from groupstate.runtime.reported import split_key
from tests.runtime.outside import Make, warnings

pytestmark = pytest.mark.usefixtures("no_event_loop")

# Sizes, partitions, versions -------------------------------------------------------------------------------


def test_a_reported_size_counts_before_the_configured_one(outside: Make) -> None:
    assert outside().report("g", "pending", size=3).feed.book.group("g").size == 3


@pytest.mark.parametrize(("fields", "rewards"), [({}, (0.0, 1.0, 0.5)), ({"size": 3}, (0.0, 1.0))])
def test_more_sessions_than_the_group_has_are_one_warning(
    outside: Make, caplog: Any, fields: dict[str, Any], rewards: tuple[float, ...]
) -> None:
    out = outside().report("g", "running")
    for _ in range(3):
        out.report("g", "finished", *rewards, **fields)

    assert len(warnings(caplog)) == 1
    assert (out.phase("g"), out.feed.book.group("g").trajectory_count) == ("finished", 2)


def test_validation_groups_are_sampled_as_they_are(outside: Make) -> None:
    out = outside(gs.Rules(filter_metric="reward")).report("v", "finished", 1.0, 1.0, partition="val")

    batch = out.feed.sample_now(1, partition="val")
    assert batch is not None
    assert batch.group_ids == ["v"]


@pytest.mark.parametrize(
    ("tokens", "versions", "spans"),
    [
        (4, (2, 5), [(0, 3, 2), (3, 4, 5)]),
        (4, (3, 3), [(0, 4, 3)]),
        (1, (2, 5), [(0, 1, 2)]),
        (0, (2, 5), []),
        (4, None, []),
    ],
)
def test_oldest_and_newest_version_stand_for_the_spans(
    outside: Make, tokens: int, versions: Any, spans: list[tuple[int, int, int]]
) -> None:
    row = ReportedRow(prompt_tokens=3, response_tokens=tokens, versions=versions)
    out = outside(group_size=1).report("g", "finished", rows={(0, 0): row})

    (kept,) = out.events(ev.SessionFinished)[0].trajectories
    assert [(span.start, span.stop, span.weight_version) for span in kept.spans] == spans
    assert (kept.prompt_tokens, kept.response_tokens) == (3, tokens)


def test_the_basis_reads_the_reported_versions(outside: Make) -> None:
    out = outside(gs.Rules(basis="oldest_token", lag_max=1), group_size=1, version=4)
    row = ReportedRow(response_tokens=2, versions=(2, 4))
    out.report("g", "finished", rows={(0, 0): row}, stamp=4)

    assert out.evicted() == {"g": ("stale",)}


@pytest.mark.parametrize(
    "row",
    [
        ReportedRow(metrics={"reward": float("nan")}),
        ReportedRow(metrics=[1.0]),  # type: ignore[arg-type]
        ReportedRow(prompt_tokens=-1),
        ReportedRow(response_tokens="6"),  # type: ignore[arg-type]
        ReportedRow(response_tokens=True),
        ReportedRow(response_tokens=2, spans=(ev.VersionSpan(0, 3, 1),)),
        ReportedRow(response_tokens=2, versions=(5, 2)),
        ReportedRow(response_tokens=2, versions=(5,)),  # type: ignore[arg-type]
        ReportedRow(response_tokens="2", versions=(2, 5)),  # type: ignore[arg-type]
        ReportedRow(response_tokens=2, versions=("2", 5)),  # type: ignore[arg-type]
        ReportedRow(prompt_tokens=2**70),
        {"reward": 1.0},
    ],
)
def test_an_unusable_trajectory_costs_its_session_and_no_other_group(outside: Make, caplog: Any, row: Any) -> None:
    out = outside(gs.Rules(mode="sync"))
    out.listing["h"] = Reported(status="finished", stamp=0, rows={(0, 0): ReportedRow(), (1, 0): row})
    out.report("g", "finished", 0.0, 1.0)

    assert [event.failure for event in out.events(ev.SessionFailed)] == ["refused"]
    assert (out.phase("h"), out.phase("g")) == ("failure", "finished")
    assert len(warnings(caplog)) == 1


def test_a_value_that_is_no_number_may_be_left_out_and_noted(outside: Make) -> None:
    rows = {(0, 0): ReportedRow(not_finite=("reward",)), (1, 0): ReportedRow(metrics={"reward": 1.0})}
    out = outside(gs.Rules(filter_metric="reward"))
    out.listing["g"] = Reported(status="finished", stamp=0, rows=rows)

    assert out.look().feed.sampleable() == ["g"]
    assert [row.not_finite for event in out.events(ev.SessionFinished) for row in event.trajectories] == [
        ("reward",),
        (),
    ]


def test_metrics_that_raise_are_unusable(outside: Make) -> None:
    class Broken(dict[str, float]):
        def keys(self) -> Any:
            raise ZeroDivisionError("a lazy value")

        def __iter__(self) -> Any:
            raise ZeroDivisionError("a lazy value")

    out = outside(group_size=1).report("g", "finished", rows={(0, 0): ReportedRow(metrics=Broken(reward=1.0))})

    assert "ZeroDivisionError: a lazy value" in out.events(ev.SessionFailed)[0].message


# What can't be true ----------------------------------------------------------------------------------------


def test_a_status_that_goes_backwards_is_passed_over_with_one_warning(outside: Make, caplog: Any) -> None:
    out = outside().report("g", "running")
    for status in ("pending", "pending", "running"):
        out.report("g", status)
    out.report("g", "finished", 0.0, 1.0)
    for status in ("running", "running", "finished"):
        out.report("g", status, 0.0, 1.0)

    assert out.phase("g") == "finished"
    assert len(warnings(caplog)) == 2
    assert "was running" in warnings(caplog)[0]
    assert "it is finished" in warnings(caplog)[1]


@pytest.mark.parametrize("malformed", [None, Reported(status="running", stamp=0, rows=7)])  # type: ignore[arg-type]
def test_a_group_whose_report_loses_its_form_stays_as_it_is_until_it_has_one_again(
    outside: Make, malformed: Any
) -> None:
    out = outside().report("a", "running")
    before = out.records
    out.listing["a"] = malformed

    assert out.look().look().records == before
    assert out.report("a", "finished", 1.0, 0.0).phase("a") == "finished"


@pytest.mark.parametrize(
    ("group_id", "fields"),
    [
        ("g", {"status": "done"}),
        ("g", {"status": None}),
        ("g", {"stamp": "3"}),
        ("g", {"stamp": True}),
        ("g", {"stamp": 2**64}),
        ("g", {"size": 0}),
        ("g", {"size": "2"}),
        ("g", {"size": 10**9}),
        ("g", {"partition": "test"}),
        ("g", {"rows": [1]}),
        ("g", {"rows": {"g_0_0": ReportedRow()}}),
        ("g", {"rows": {(0, -1): ReportedRow()}}),
        ("g", {"rows": {(0,): ReportedRow()}}),
        ("", {}),
        (7, {}),
        ("half a pair \ud800", {}),
    ],
)
def test_what_is_malformed_is_passed_over_with_one_warning(
    outside: Make, caplog: Any, group_id: Any, fields: dict[str, Any]
) -> None:
    out = outside()
    for _ in range(3):
        out.report(group_id, "finished", 0.0, 1.0, **fields)
    out.report("other", "finished", 0.0, 1.0)

    assert list(out.feed.book.groups) == ["other"]
    assert len(warnings(caplog)) == 1
    assert out.remove(group_id).evicted() == {}


def test_what_is_no_report_at_all_is_passed_over(outside: Make, caplog: Any) -> None:
    out = outside()
    out.listing = {"g": ("finished", 3)}

    assert out.look().feed.book.groups == {}
    assert "must be a Reported" in warnings(caplog)[0]


def test_a_tag_that_is_put_right_is_taken(outside: Make) -> None:
    out = outside().report("g", "running").report("g", "finished", 0.0, 1.0, stamp=None)
    assert out.phase("g") == "running"

    assert out.report("g", "finished", 0.0, 1.0).phase("g") == "finished"


# Keys ------------------------------------------------------------------------------------------------------


@given(st.text(min_size=1), st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_key_is_split_from_the_right(group_id: str, session: int, index: int) -> None:
    assert split_key(f"{group_id}_{session}_{index}") == RowKey(group_id, session, index)


@pytest.mark.parametrize(
    "text", ["", "a", "a_1", "_1_2", "a_b_1", "a_1_b", "a_-1_2", "a_1_", "a_²_1", "a_1_" + "9" * 99]
)
def test_what_is_no_key_is_an_error(text: str) -> None:
    with pytest.raises(BadInput, match="must be"):
        split_key(text)
