"""What `diff` tells of two places is what two replays tell, and each change is at the event that made it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from groupstate.cli import main
from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.folding import replayed
from groupstate.core.rules import RULES_VERSION
from groupstate.errors import BadInput
from groupstate.inspect.diff import Diff, Version, compared, diff
from groupstate.log.file import FileLog
from groupstate.testing import strategies

Kept = Callable[..., Path]
STARTED = ev.RunStarted("r", {"lag_max": 1}, RULES_VERSION, 0, library="0.1")


def call(*args: Any) -> Result:
    result = CliRunner().invoke(main, ["diff", *map(str, args)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def phase_of(book: Book, group_id: str) -> str:
    group = book.groups.get(group_id)
    return str(group.phase if group is not None else book.departed.get(group_id, ""))


def checked(before: Book, after: Book, found: Diff, records: list[ev.Record]) -> None:
    """Hold it against the two books, and each group's change against the books around its event."""
    ids = {*before.groups, *before.departed, *after.groups, *after.departed}
    expected = {g: (phase_of(before, g), phase_of(after, g)) for g in ids}
    assert {change.group_id: (change.before, change.after) for change in found.groups} == {
        group_id: phases for group_id, phases in expected.items() if phases[0] != phases[1]
    }
    for change in found.groups:
        assert change.seq is not None
        assert phase_of(replayed(records[: change.seq - 1]), change.group_id) != change.after
        assert phase_of(replayed(records[: change.seq]), change.group_id) == change.after
        assert before.last_seq < change.seq <= after.last_seq
    totals = {name: (before.totals[name], after.totals[name]) for name in {*before.totals, *after.totals}}
    assert found.totals == {name: (was, now) for name, (was, now) in totals.items() if was != now}
    assert {
        b.batch for b in found.batches if b.now == "with the trainer"
    } == after.batches.keys() - before.batches.keys()
    assert {w.request for w in found.waits if w.now == "waits"} == set(after.requests)
    steps = {what: sum(c.count for c in found.credits if c.what == what) for what in ("earned", "spent", "forfeited")}
    assert found.owed[1] - found.owed[0] == steps["earned"] - steps["spent"] - (
        after.totals["forfeited"] - before.totals["forfeited"]
    )
    assert sum(found.kinds.values()) == after.last_seq - before.last_seq


@given(strategies.logs(), st.data())
def test_the_changes_are_those_between_the_books(records: list[ev.Record], data: st.DataObject) -> None:
    first = data.draw(st.integers(1, len(records)))
    last = data.draw(st.integers(first, len(records)))
    before, after = replayed(records[:first]), replayed(records[:last])

    checked(before, after, compared(before, after, records[first:last]), records)


@given(strategies.logs(), st.data())
def test_without_the_events_between_the_ends_tell_the_same_as_far_as_they_can(
    records: list[ev.Record], data: st.DataObject
) -> None:
    first = data.draw(st.integers(1, len(records)))
    before, after = replayed(records[:first]), replayed(records)
    whole, ends = compared(before, after, records[first:]), compared(before, after, None)

    assert (whole.read, ends.read) == (True, False)
    assert (ends.totals, ends.phases, ends.owed) == (whole.totals, whole.phases, whole.owed)
    live = {c.group_id: c for c in whole.groups if c.group_id in after.groups}
    for change in ends.groups:
        if change.group_id in live:
            known = live[change.group_id]
            assert (change.before, change.after) == (known.before, known.after)
            assert change.seq in (None, known.seq)
        else:
            assert (change.after, change.seq) == ("left", None)
    assert {c.group_id for c in ends.groups} == {
        c.group_id for c in whole.groups if c.before not in ("", "committed") or c.group_id in live
    }


RUN = (
    STARTED,
    ev.GroupSubmitted("a", 1, ev.TRAIN, 0, 1, "submit"),
    ev.GroupSubmitted("b", 1, ev.TRAIN, 0, 1, "submit"),
    ev.SessionStarted("a", 0, 1),
    ev.BatchRequested(1, ev.TRAIN, 1, 0),  # 5
    ev.SessionFinished("a", 0, 1, (ev.TrajectoryRecord(0, {"reward": 1.0}, 3, 7),)),
    ev.GroupFinished("a"),
    ev.BatchSampled(1, 1, ev.TRAIN, ("a",), 0, (0,)),
    ev.WeightsPublished(1),
    ev.BatchCommitted(1),  # 10
    ev.SessionFailed("b", 0, 1, "error", "boom"),
    ev.GroupFailed("b"),
    ev.GroupEvicted("b", ("failed", "stale"), 1, 1),
    ev.BatchRequested(2, ev.TRAIN, 1, 1),
    ev.GroupSubmitted("c", 1, ev.TRAIN, 1, 1, "refill"),  # 15
    ev.RunRecovered({"lag_max": 4}, RULES_VERSION, 1, 2),
    ev.BatchRequested(3, ev.TRAIN, 1, 1),
    ev.BatchRequestCancelled(3, "timed out"),
    ev.BatchRequested(4, ev.TRAIN, 1, 1),
    ev.RunClosed("done"),  # 20
)


def test_what_happened_between_is_told_with_its_events(kept: Kept) -> None:
    found = diff(kept(*RUN), 3, 20)

    assert [(c.group_id, c.before, c.after, c.seq, c.why) for c in found.groups] == [
        ("a", "pending", "committed", 10, "batch 1"),
        ("b", "pending", "evicted", 13, "failed and stale, lag 1"),
        ("c", "", "pending", 15, "by refill"),
    ]
    assert found.versions == (Version(9, 1, 1, "published"), Version(16, 1, 2, "opened"))
    assert [(b.batch, b.sampled_seq, b.ended_seq, b.now) for b in found.batches] == [(1, 8, 10, "committed")]
    assert [(w.request, w.begun_seq, w.ended_seq, w.waited_s, w.now) for w in found.waits] == [
        (1, 5, 8, 3.0, "batch 1"),
        (2, 14, 16, 2.0, "gone with its process"),
        (3, 17, 18, 1.0, "cancelled: timed out"),
        (4, 19, None, 1.0, "waits"),
    ]
    assert [(c.seq, c.what, c.count, c.about) for c in found.credits] == [
        (13, "earned", 1, "b"), (15, "spent", 1, "c"),
    ]  # fmt: skip
    assert [(r.seq, r.setting, r.before, r.after) for r in found.rules] == [(16, "lag_max", 1, 4)]
    assert [(o.seq, o.kind) for o in found.others] == [(16, "run_recovered"), (20, "run_closed")]
    assert (found.seconds, found.owed) == (17.0, (0, 0))


def test_a_wait_and_a_batch_that_were_there_before_end_between(kept: Kept) -> None:
    run = kept(*RUN)

    assert [(w.request, w.begun_seq, w.ended_seq, w.waited_s) for w in diff(run, 6, 9).waits] == [(1, 5, 8, 3.0)]
    assert [(b.batch, b.sampled_seq, b.ended_seq) for b in diff(run, 9, 12).batches] == [(1, 8, 10)]


def test_far_apart_only_the_ends_are_compared(kept: Kept) -> None:
    run = kept(*RUN)
    found = diff(run, 6, 17, read_max=10)

    assert not found.read
    assert [(c.group_id, c.after, c.seq) for c in found.groups] == [
        ("c", "pending", 15),
        ("a", "left", None),
        ("b", "left", None),
    ]
    assert [(w.request, w.now, w.waited_s) for w in found.waits] == [(1, "ended", None), (3, "waits", 0.0)]
    assert [(r.setting, r.seq) for r in found.rules] == [("lag_max", None)]
    assert [b.now for b in diff(run, 9, 17, read_max=0).batches] == ["no longer with it"]
    assert [(b.now, b.sampled_seq) for b in diff(run, 2, 9, read_max=0).batches] == [("with the trainer", 8)]
    assert [c.seq for c in diff(run, 2, 9, read_max=0).groups if c.group_id == "a"] == [8]
    assert [c.seq for c in diff(run, 2, 7, read_max=0).groups if c.group_id == "a"] == [7]


def test_a_place_and_itself_differ_in_nothing(kept: Kept) -> None:
    found = diff(kept(*RUN), 9, 9)

    assert (found.groups, found.totals, found.phases, found.waits, found.kinds) == ((), {}, {}, (), {})


def test_places_in_the_wrong_order_are_refused(kept: Kept) -> None:
    with pytest.raises(BadInput, match="event 3 comes before event 9; give the earlier place first"):
        diff(kept(*RUN), 9, 3)


# The command ---------------------------------------------------------------------------------------------


def test_the_command_tells_it_in_sections(kept: Kept) -> None:
    out = call(kept(*RUN), "3").stdout.splitlines()

    assert "diff\tbetween\t17 events, 17.000 s" in out
    assert "diff\tleft\t1 committed, 1 evicted" in out
    assert "left\tb\ttrain\tpending to evicted\t13\tfailed and stale, lag 1" in out
    assert "entered\tc\ttrain\tpending\t15\tby refill" in out
    assert "totals\tevicted/stale\t0\t1\t+1" in out
    assert "totals\ttrain groups pending\t2\t1\t-1" in out
    assert "versions\t9\t1\t1\tpublished" in out
    assert "waits\t4\ttrain\t1\t19\t\t1.000 s\twaits" in out
    assert "rules\t16\tlag_max\t1\t4" in out
    assert "credits\t13\tearned\t1\tb" in out
    assert any(line.startswith("also\t20\trun_closed") for line in out)


def test_the_command_takes_places_of_every_kind_and_gives_json(kept: Kept) -> None:
    run = kept(*RUN)
    found = json.loads(call(run, "version:1", "+15s", "--json").stdout)

    assert (found["first"]["seq"], found["last"]["seq"]) == (16, 16)
    assert json.loads(call(run, "version:1/1", "22:13:33", "--json").stdout)["kinds"] == {
        "batch_committed": 1, "session_failed": 1, "group_failed": 1, "group_evicted": 1,
    }  # fmt: skip
    owed = call(run, "12", "13").stdout.splitlines()
    assert "totals\trefills owed\t0\t1\t+1" in owed


def test_long_lists_are_cut_in_text_and_whole_in_json(tmp_path: Path) -> None:
    log = FileLog.create(tmp_path / "run", inline=True, durability="os")
    events = [STARTED, *(ev.GroupSubmitted(f"g{n}", 1, ev.TRAIN, 0, 1, "submit") for n in range(60))]
    log.post([ev.Record(seq, seq, event) for seq, event in enumerate(events, 1)])
    out = call(tmp_path / "run", 1).stdout

    assert "entered\tand 20 more, see --json" in out
    assert len(json.loads(call(tmp_path / "run", 1, "--json").stdout)["groups"]) == 60


def test_the_command_says_that_too_much_lies_between(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groupstate.cli.traveling.diff", lambda run, a, b: diff(run, a, b, read_max=1))

    assert "diff\tnot read\ttoo many events lie between" in call(kept(*RUN), 6, 17).stdout
    assert "waits\t1\ttrain\t1\t5\t\t?\tended" in call(kept(*RUN, name="again"), 6, 17).stdout
