"""Why a batch holds its groups: taken, passed over, not ready, evicted, with the numbers of each."""

from typing import Any

import pytest

from groupstate import Drop, Select
from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.core.folding import replayed
from groupstate.core.rules import RULES_VERSION, Capacity, Rules
from groupstate.errors import LogError, UnknownBatch
from groupstate.inspect.batch_story import BatchStory, batch_story, summary
from groupstate.testing.notation import Story, play


def picky(book: Book, rules: Rules, request: Any) -> list[Drop | Select]:
    """The youngest groups; what is long is dropped."""
    ids = [group.group_id for group in book.ready()][::-1]
    long = [Drop(name, "custom", "too long") for name in ids if name.startswith("long")]
    rest = [name for name in ids if not name.startswith("long")]
    return [*long, Select(rest[: request.size])] if len(rest) >= request.size else list(long)


SYNC = Rules(mode="sync", batch_size=2, filter_metric="acc", in_flight_batches_max=2)
ASYNC = Rules(lag_max=1, filter_metric="acc")


def done(name: str, *values: float) -> list[str]:
    return [f"start {name}", *(f"finish {name}.{number} acc={value}" for number, value in enumerate(values))]


def group(name: str, *values: float, more: str = "") -> list[str]:
    return [f"submit {name}/{len(values)} {more}".strip(), *done(name, *values)]


def told(story: Story, batch: int = 1) -> BatchStory:
    return batch_story(story.log.read(), batch)


def ids(groups: Any) -> list[str]:
    return [one.group_id for one in groups]


# What was taken --------------------------------------------------------------------------------------


def test_the_order_is_told_with_the_version_and_the_event_that_it_is_made_of() -> None:
    story = play(
        *group("young", 0, 1), *group("old", 0.25, 0.75, more="stamp=2"), *group("late", 0, 1), "publish 3", "sample 2",
        rules=Rules(lag_max=5, filter_metric="acc"), weight_version=3,
    )  # fmt: skip
    seen = told(story)

    assert [(one.group_id, one.version, one.submitted_seq, one.lag, one.lag_max) for one in seen.taken] == [
        ("old", 2, 8, 1, 5),
        ("young", 3, 2, 0, 5),
    ]
    assert seen.taken[0].ended_seq == 13
    assert seen.taken[0].why == (
        "finished, 2 of 2 sessions finished, acc from 0.25 to 0.75 over 2 values (range 0.5, tolerance 0)"
    )
    assert [(one.group_id, one.why) for one in seen.passed_over] == [
        ("late", "behind the last one taken: version 3, submitted at event 14")
    ]
    assert seen.order == "the oldest weight version first (its stamp), then in the order of submission"


def test_the_demand_and_its_wait_are_told() -> None:
    story = play(
        "submit a/1", "submit b/1", "start a", "start b", "wait 1", "sample 2", "wait 2.5", "finish a.0 acc=1",
        "wait 4", "finish b.0 acc=0", rules=Rules(),
    )  # fmt: skip
    seen = told(story)

    assert (seen.seq, seen.request, seen.request_seq, seen.demand, seen.waited_s) == (11, 1, 6, 2, 6.5)
    assert (seen.sampleable, seen.in_flight, seen.older_requests) == (2, 0, ())
    assert summary(seen) == "2 groups of 2 sampleable ones, after 6.500 s, at version 0; 0 groups in flight"


def test_freshest_first_passes_over_what_is_older() -> None:
    rules = Rules(lag_max=5, selection="freshest_first")
    story = play(*group("old", 1.0), "publish 1", *group("new", 1.0), "sample 1", rules=rules)
    seen = told(story)

    assert (ids(seen.taken), ids(seen.passed_over)) == (["new"], ["old"])
    assert seen.passed_over[0].why == "behind the last one taken: version 0, submitted at event 2"
    assert seen.order.startswith("the newest weight version first")


def test_a_group_made_for_another_version_is_not_for_this_batch() -> None:
    rules = Rules(selection="exact_version", basis="target_version", lag_max=0, batch_size=1)
    story = play(
        "submit now/1 target=0", "submit later/1 target=1", *done("now", 1.0), *done("later", 1.0), "sample 1",
        rules=rules,
    )  # fmt: skip

    assert told(story).passed_over[0].why == "made for version 1, and the batch is of version 0"
    assert told(story).selection == "exact_version"


def test_a_rule_of_the_runs_own_says_what_it_takes_and_drops() -> None:
    rules = Rules(selection="my:picky")
    names = ("a", "long1", "b", "c")
    story = play(*(line for name in names for line in group(name, 1.0)), "sample 2", rules=rules, selection=picky)
    seen = told(story)

    assert (ids(seen.taken), ids(seen.passed_over)) == (["c", "b"], ["a"])
    assert seen.passed_over[0].why == "my:picky did not select it"
    assert [(one.group_id, one.with_it, one.why) for one in seen.evicted] == [
        ("long1", True, "custom: too long; it earned 1 refill")
    ]
    assert "a rule of the run's own" in seen.order


def test_what_a_rule_dropped_in_an_earlier_decision_was_not_evicted_with_the_batch() -> None:
    lines = ["sample 2", *(line for name in ("long1", "b", "c") for line in group(name, 1.0))]
    seen = told(play(*lines, rules=Rules(selection="my:picky"), selection=picky))

    assert [(one.group_id, one.with_it) for one in seen.evicted] == [("long1", False)]


def test_validation_takes_what_has_ended_and_waits_for_nothing_else() -> None:
    lines = [*group("v1", 1.0, more="partition=val"), "submit v2/1 partition=val", "submit t/1"]
    seen = told(play(*lines, "sample 1 partition=val", rules=Rules(selection="freshest_first")))

    assert (seen.partition, seen.selection, ids(seen.taken), ids(seen.not_ready)) == ("val", "oldest_first", ["v1"], [])
    assert seen.order.startswith("validation takes the oldest weight version first")


def test_a_round_of_validation_keeps_its_groups() -> None:
    records = log(
        ev.GroupSubmitted("mine", 1, "val", 0, 1, "submit", validation_round=True), *ends("mine"),
        ev.GroupSubmitted("v", 1, "val", 0, 1, "submit"), *ends("v"),
        ev.BatchRequested(1, "val", 1, 0), ev.BatchSampled(1, 1, "val", ("v",), 0, (0,)),
    )  # fmt: skip

    assert batch_story(records, 1).passed_over[0].why == "kept for the validation round that submitted it"


def test_a_batch_that_isnt_in_the_rules_order_is_said_to_be_so() -> None:
    records = log(
        *whole("a"), *whole("b"), ev.BatchRequested(1, "train", 1, 0), ev.BatchSampled(1, 1, "train", ("b",), 0, (0,))
    )

    assert "or the log isn't in the rules' order" in batch_story(records, 1).passed_over[0].why


def test_a_group_whose_batch_came_back_keeps_its_lag() -> None:
    lines = [*group("a", 1.0), "publish 1", "sample 1", "publish 2", "release 1", "sample 1"]
    seen = told(play(*lines, rules=Rules(lag_max=2)), 2)

    assert seen.taken[0].lag == 1
    assert seen.taken[0].why.endswith("its batch came back, so it keeps the lag that it was sampled with")


def test_a_partial_group_is_called_so() -> None:
    story = play("submit a/2", "start a", "finish a.0 acc=1", "fail a.1", "sample 1", rules=Rules(survivors_min=1))

    assert told(story).taken[0].why == "partial, 1 of 2 sessions finished"


# What was not ready ----------------------------------------------------------------------------------


def test_what_the_order_would_have_put_first_is_told_with_what_it_waits_for() -> None:
    story = play(
        "submit slow/2", "start slow", "finish slow.0 acc=1", *group("a", 0, 1), "submit new/1", "wait 3", "sample 1",
        rules=ASYNC,
    )  # fmt: skip
    (slow,) = told(story).not_ready

    assert (slow.group_id, slow.ended_seq) == ("slow", 0)
    assert slow.why == "running: waits for session 1 (attempt 1, open for 3.000 s)"


def test_a_group_without_a_row_is_told_while_it_is_there() -> None:
    records = log(
        ev.GroupSubmitted("none", 1, "train", 0, 1, "submit"), ev.SessionFailed("none", 0, 1, "error"),
        ev.GroupFailed("none"), *whole("a"), ev.BatchRequested(1, "train", 1, 0),
        ev.BatchSampled(1, 1, "train", ("a",), 0, (0,)),
    )  # fmt: skip

    assert [(one.group_id, one.why) for one in batch_story(records, 1).not_ready] == [("none", "failure, no row")]


# What was evicted ------------------------------------------------------------------------------------


def test_the_surplus_was_evicted_with_it_and_the_filtered_before() -> None:
    lines = [line for name in ("a", "b", "c", "d") for line in (f"submit {name}/2", f"start {name}")]
    story = play(
        *lines, "sample 2", *(f"finish b.{i} acc=1" for i in range(2)),
        *(f"finish {name}.{i} acc={i}" for name in ("a", "c", "d") for i in range(2)), rules=SYNC, source=["r1", "r2"],
        group_size=2,
    )  # fmt: skip
    story.tell(*done("r1", 0, 1), *done("r2", 0, 1))
    seen = told(story)

    assert ids(seen.taken) == ["a", "c"]
    assert [(one.group_id, one.reasons, one.with_it, one.credit) for one in seen.evicted] == [
        ("b", ("zero_variance",), False, 2),
        ("d", ("surplus",), True, 0),
        ("r1", ("surplus",), True, 0),
        ("r2", ("surplus",), True, 0),
    ]
    assert (
        seen.evicted[0].why == "zero_variance: acc is 1 in all 2 values (max - min 0, tolerance 0); it earned 2 refills"
    )
    assert seen.evicted[0].shared_value == 1.0
    assert seen.evicted[1].why == "surplus: the batch was full without it; it earned no refill"
    assert seen.sampleable == 5


def test_evictions_belong_to_the_batch_that_follows_them() -> None:
    lines = [*group("flat", 1, 1), *group("a", 0, 1), "sample 1", *group("flat2", 1, 1), *group("b", 0, 1), "sample 1"]
    story = play(*lines, rules=ASYNC)

    assert [ids(told(story, batch).evicted) for batch in (1, 2)] == [["flat"], ["flat2"]]


# What became of it -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "seq", "text"),
    [
        ([], 0, "it is with the trainer, neither committed nor returned"),
        (["commit 1"], 8, "it was committed at event 8"),
        (["release 1"], 8, "it came back untrained at event 8 (told so)"),
    ],
)
def test_what_became_of_a_batch(lines: list[str], seq: int, text: str) -> None:
    seen = told(play(*group("a", 1.0), "sample 1", *lines, rules=Rules()))

    assert (seen.fate_seq, seen.fate) == (seq, text)


def test_a_commit_that_was_undone_is_told() -> None:
    lines = [*group("a", 1.0), "mark", "sample 1", "commit 1", "recover at=1"]
    seen = told(play(*lines, rules=Rules()))

    assert seen.fate == "it was committed at event 9, and the run went back to mark 1 at event 11"
    kept = play(*group("a", 1.0), "sample 1", "commit 1", "mark", "recover at=1", rules=Rules())
    assert told(kept).fate == "it was committed at event 8"


# What can't be told ----------------------------------------------------------------------------------


def test_a_batch_that_there_is_not_names_the_last() -> None:
    story = play(*group("a", 1.0), "sample 1", rules=Rules())

    with pytest.raises(UnknownBatch, match="batch 7: it was never sampled; the log's last one is batch 1"):
        told(story, 7)
    with pytest.raises(UnknownBatch, match="the log has no batch yet"):
        told(play("submit a/1"), 1)


def test_behind_a_beginning_that_is_gone_what_is_left_is_told() -> None:
    story = play(*group("a", 1.0), "sample 1", *group("b", 1.0), "sample 1", rules=Rules())
    base, rest = replayed(story.log.read(stop=9)), list(story.log.read(9))

    with pytest.raises(UnknownBatch, match="was sampled at event 7, with groups a, and what there was to choose from"):
        batch_story(rest, 1, base)
    base = replayed(story.log.read(stop=9))
    seen = batch_story(rest, 2, base)
    assert (ids(seen.taken), seen.told_from) == (["b"], 9)
    gone = replayed(play(*group("a", 1.0), "sample 1", "commit 1", rules=Rules()).log.read())
    with pytest.raises(UnknownBatch, match="batch 1: it was sampled, and what there was"):
        batch_story([], 1, gone)


def test_a_request_that_is_not_told_leaves_the_demand_to_the_batch() -> None:
    records = log(*whole("a"), ev.BatchSampled(1, 1, "train", ("a",), 0, (0,)))
    seen = batch_story(records, 1)

    assert (seen.request_seq, seen.demand) == (0, 1)
    assert "for a request that isn't told" in summary(seen)


def test_a_batch_that_can_not_be_says_what_it_takes() -> None:
    records = log(
        *whole("a"), *whole("gone"), ev.GroupSubmitted("open", 1, "train", 0, 1, "submit"),
        ev.GroupEvicted("gone", ("failed",), 0, 0), ev.BatchRequested(1, "train", 1, 0),
        ev.BatchSampled(1, 1, "train", ("a",), 0, (0,)), ev.BatchRequested(2, "train", 4, 0),
        ev.BatchSampled(2, 2, "train", ("a", "gone", "never", "open"), 0, (0, 0, 0, 0)),
        ev.BatchRequested(3, "train", 1, 0), ev.BatchSampled(3, 3, "train", (), 0, ()),
    )  # fmt: skip

    assert [one.why for one in batch_story(records, 2).taken] == [
        "batch 1 holds it already: both can't be, see `groupstate check`",
        "it was evicted before",
        "it was never submitted",
        "it is pending: waits for session 0 (attempt 1, to begin); see `groupstate check`",
    ]
    with pytest.raises(LogError, match="event 15"):
        batch_story(records, 3)


def test_a_capacity_of_admission_changes_nothing_in_the_choice() -> None:
    rules = Rules(batch_size=1, admission=Capacity(lag_max=1))

    assert ids(told(play(*group("a", 1.0), "sample 1", rules=rules)).taken) == ["a"]


# Notation for logs by hand ---------------------------------------------------------------------------


def log(*events: ev.AnyEvent) -> list[ev.Record]:
    started = ev.RunStarted("r", Rules().to_dict(), RULES_VERSION, 0)
    return [ev.Record(seq, seq * 1_000_000_000, event) for seq, event in enumerate([started, *events], 1)]


def ends(name: str) -> list[ev.AnyEvent]:
    row = (ev.TrajectoryRecord(0, {"acc": 1.0}),)
    return [ev.SessionStarted(name, 0, 1), ev.SessionFinished(name, 0, 1, row), ev.GroupFinished(name)]


def whole(name: str) -> list[ev.AnyEvent]:
    return [ev.GroupSubmitted(name, 1, "train", 0, 1, "submit"), *ends(name)]
