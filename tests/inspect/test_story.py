"""The life of a group as sentences, with the numbers of the decisions."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from groupstate import Trajectory, open_run
from groupstate.core import events as ev
from groupstate.core.rules import RULES_VERSION, PerDataset, Rules
from groupstate.errors import UnknownGroup
from groupstate.inspect import story as story_module
from groupstate.inspect.about import About
from groupstate.inspect.story import Story, story, story_of
from groupstate.log.reading import read_log

# Notation: one second lies between two events ------------------------------------------------------------


def log(*events: ev.AnyEvent | list[ev.AnyEvent], rules: Rules | None = None) -> list[ev.Record]:
    flat: list[ev.AnyEvent] = [ev.RunStarted("r", (rules or Rules()).to_dict(), RULES_VERSION, 0)]
    for event in events:
        flat.extend(event if isinstance(event, list) else [event])
    return [ev.Record(seq, seq * 1_000_000_000, event) for seq, event in enumerate(flat, 1)]


def submit(name: str, n: int = 1, *, cause: ev.Cause = "submit", **more: Any) -> ev.AnyEvent:
    return ev.GroupSubmitted(name, n, more.pop("partition", ev.TRAIN), more.pop("stamp", 0), 1, cause, **more)


def finish(name: str, session: int = 0, attempt: int = 1, **metrics: float) -> ev.AnyEvent:
    return ev.SessionFinished(name, session, attempt, (ev.TrajectoryRecord(0, metrics),))


def whole(name: str, *values: float, cause: ev.Cause = "submit") -> list[ev.AnyEvent]:
    """A group in which session i finishes with acc of the i-th value."""
    numbers = range(len(values))
    return [
        submit(name, len(values), cause=cause),
        *(ev.SessionStarted(name, i, 1) for i in numbers),
        *(finish(name, i, acc=value) for i, value in enumerate(values)),
        ev.GroupFinished(name),
    ]


def sample(batch: int, *names: str, lag: int = 0) -> list[ev.AnyEvent]:
    request = ev.BatchRequested(batch, ev.TRAIN, len(names), 0)
    return [request, ev.BatchSampled(batch, batch, ev.TRAIN, names, 0, (lag,) * len(names))]


def texts(told: Story) -> list[str]:
    return [step.text for step in told.steps]


def last(records: Iterable[ev.Record], name: str = "a") -> str:
    return story(records, name).steps[-1].text


# Stories -------------------------------------------------------------------------------------------------


def test_the_life_of_a_group_from_its_submission_to_its_commit() -> None:
    records = log(
        submit("a", 2, dataset="math", source_position=4, stamp=0),
        ev.SessionStarted("a", 0, 1, "w1", 3), ev.SessionStarted("a", 1, 1),
        ev.SessionFailed("a", 1, 1, "error", "boom", 0.5), finish("a", 0, acc=1.0),
        ev.SessionStarted("a", 1, 2), finish("a", 1, 2, acc=0.0), ev.GroupFinished("a"),
        ev.WeightsPublished(1), sample(1, "a", lag=1), ev.WeightsPublished(2), ev.BatchReturned(1, "released"),
        whole("b", 1.0), sample(2, "b"), ev.BatchCommitted(2),
        sample(3, "a", lag=1), ev.BatchCommitted(3), ev.ResultFenced("a", 1, 1, "finished", "gone"),
        rules=Rules(lag_max=1, attempts_max=2, filter_metric="acc"),
    )  # fmt: skip
    told = story(records, "a")

    assert texts(told) == [
        "submitted by the user: 2 sessions, partition train, stamp 0, prompt 4 of the source, dataset math",
        "session 0 started, attempt 1 on w1, weight version 3",
        "session 1 started, attempt 1",
        "session 1 failed (error) after 1.000 s: boom; attempt 2 is due in 0.5 s; 0 of 2 sessions have ended",
        "session 0 finished after 3.000 s: 1 trajectory, acc 1; 1 of 2 sessions have ended",
        "session 1 started, attempt 2",
        "session 1 finished after 1.000 s: 1 trajectory, acc 0; 2 of 2 sessions have ended",
        "finished: all 2 sessions finished, 2 trajectories, lag 0 (lag_max 1), acc from 0 to 1 over 2 values "
        "(range 1, tolerance 0)",
        "weight version 1 was published: its lag is 1 (lag_max 1)",
        "sampled into batch 1 of 1 group with lag 1 (lag_max 1) at version 0; the sampler had waited 1.000 s",
        "batch 1 came back untrained (released): finished again, lag 1 (lag_max 1)",
        "sampled into batch 3 of 1 group with lag 1 (lag_max 1) at version 0; the sampler had waited 1.000 s",
        "batch 3 was committed: it is trained on, and has left",
        "a result of session 1 (finished, attempt 1) changed nothing: the group has left the book",
    ]
    assert [told.steps[0].since_s, told.steps[1].since_s, told.steps[1].seq] == [0.0, 1.0, 3]
    assert told.phase == "committed"
    assert told.now == "committed: it has left the book"
    assert told.held_up_by == "session 1 ended last, in attempt 2, 2.000 s after the one before it"
    assert [record.seq for record in filter(About("a"), records)] == [
        step.seq for step in told.steps if step.kind != "weights_published"
    ]


def test_a_group_of_validation_is_not_called_trained_on() -> None:
    requested = ev.BatchRequested(1, ev.VALIDATION, 1, 0)
    sampled = ev.BatchSampled(1, 1, ev.VALIDATION, ("a",), 0, (0,))
    begun = [submit("a", partition=ev.VALIDATION), ev.SessionStarted("a", 0, 1), finish("a"), ev.GroupFinished("a")]

    assert last(log(begun, requested, sampled, ev.BatchCommitted(1))) == (
        "batch 1 was committed: it ended as validation, and has left"
    )


def test_an_eviction_and_the_group_in_its_place() -> None:
    evicted = ev.GroupEvicted("a", ("stale", "zero_variance"), 2, 1, 0.7, "acc")
    rules = Rules(lag_max=1, filter_metric="acc")
    records = log(whole("a", 0.7, 0.7), ev.WeightsPublished(2), evicted, whole("b", 0.7, cause="refill"), rules=rules)

    assert texts(story(records, "a"))[-2:] == [
        "evicted, stale: lag 2 is above lag_max 1; zero_variance: acc is 0.7 in all 2 values "
        "(max - min 0, tolerance 0); it earned 1 refill",
        "group b is submitted in its place",
    ]
    assert (
        story(records, "b").steps[0].text
        == "submitted as a refill for a: 1 session, partition train, stamp 0 at version 2"
    )
    assert story(records, "b").held_up_by == ""


def test_what_was_inferred_from_a_status_is_told_as_observed() -> None:
    told: list[ev.AnyEvent] = [
        submit("a", 2), ev.SessionStarted("a", 0, 1, observed=True), ev.SessionStarted("a", 1, 1, observed=True),
        ev.SessionFinished("a", 0, 1, observed=True), ev.SessionFailed("a", 1, 1, "lost", "gone", observed=True),
        ev.GroupFailed("a"),
    ]  # fmt: skip

    started, finished, failed = texts(story(log(told), "a"))[2:5]
    assert started == "session 1 started, attempt 1, observed"
    assert ", observed: 0 trajectories; " in finished
    assert ", observed: gone; no further attempt; " in failed
    # How long it took isn't known, and nobody submitted it to a run.
    assert " after " not in finished + failed
    assert texts(story(log(told), "a"))[0].startswith("dispatched outside, and listed here first: 2 sessions")
    assert story(log(told), "a").held_up_by == "which session ended last isn't known: they were observed"


@pytest.mark.parametrize(
    ("reason", "rules", "text"),
    [
        ("cancelled", Rules(), "it was given up"),
        ("custom", Rules(selection="mine:pick"), "bad checksum"),
        ("damaged", Rules(), "bad checksum"),
        ("empty", Rules(), "it has no trajectory"),
        ("failed", Rules(), "1 of 2 sessions failed"),
        ("surplus", Rules(), "the batch was full without it"),
        ("too_few", Rules(survivors_min=2), "1 of 2 sessions finished, survivors_min is 2"),
        ("zero_variance", Rules(filter_metric="acc", on_singleton="evict"), "a single value of acc, and on_singleton"),
        ("zero_variance", Rules(filter_metric="f", on_missing="evict"), "0 values of f, and on_missing is 'evict'"),
    ],
)
def test_each_reason_has_its_sentence(reason: ev.EvictReason, rules: Rules, text: str) -> None:
    half: list[ev.AnyEvent] = [
        submit("a", 2), ev.SessionStarted("a", 0, 1), finish("a", 0, acc=1.0),
        ev.SessionFailed("a", 1, 1, "cancelled"), ev.GroupFailed("a"),
    ]  # fmt: skip
    records = log(half, ev.GroupEvicted("a", (reason,), 0, 0, message="bad checksum"), rules=rules)

    assert f"evicted, {reason}: {text}" in last(records)
    assert last(records).endswith("it earned no refill")
    assert "session 1 failed (cancelled) before it began; no further attempt" in texts(story(records, "a"))[3]


def test_trajectories_may_be_what_is_filtered() -> None:
    rules = Rules(filter_metric="acc", per="trajectory")
    rows = (ev.TrajectoryRecord(0, {"acc": 1.0}), ev.TrajectoryRecord(1, {"acc": 1.0}))
    two: list[ev.AnyEvent] = [submit("a"), ev.SessionStarted("a", 0, 1), ev.SessionFinished("a", 0, 1, rows)]
    records = log(two, ev.GroupFinished("a"), ev.GroupEvicted("a", ("zero_variance",), 0, 1), rules=rules)

    assert "acc from 1 to 1 over 2 values" in texts(story(records, "a"))[3]
    assert "zero_variance: acc in all 2 values" in last(records)


@pytest.mark.parametrize(
    ("end", "rules", "text"),
    [
        (ev.GroupFailed("a"), Rules(), "failed: 1 of 2 sessions failed, 1 trajectory, lag 0"),
        (ev.GroupFailed("a", cancelled=True), Rules(), "failed: it was cancelled, 1 trajectory"),
        (
            ev.GroupFinished("a", partial=True),
            Rules(survivors_min=1, filter_metric="f"),
            "finished in part: 1 of 2 sessions finished, survivors_min is 1, 1 trajectory, lag 0, no value of f",
        ),
    ],
)
def test_how_a_group_ended(end: ev.AnyEvent, rules: Rules, text: str) -> None:
    half: list[ev.AnyEvent] = [
        submit("a", 2), ev.SessionStarted("a", 0, 1), ev.SessionStarted("a", 1, 1), finish("a", 0, acc=1.0),
        ev.SessionFailed("a", 1, 1, "timeout"),
    ]  # fmt: skip

    assert last(log(half, end, rules=rules)).startswith(text)


def test_a_rule_of_ones_own_that_gives_no_reason_is_named() -> None:
    records = log(whole("a", 1.0), ev.GroupEvicted("a", ("custom",), 0, 1), rules=Rules(selection="mine:pick"))

    assert "custom: selection mine:pick dropped it" in last(records)


def test_what_holds_for_a_dataset_is_what_is_told() -> None:
    rules = Rules(lag_max=1, filter_metric="acc", datasets={"code": PerDataset(lag_max=3, tolerance=0.5)})
    group: list[ev.AnyEvent] = [
        submit("a", 2, dataset="code"), ev.SessionStarted("a", 0, 1), ev.SessionStarted("a", 1, 1),
        finish("a", 0, acc=1.0), finish("a", 1, acc=0.75), ev.GroupFinished("a"), ev.WeightsPublished(4),
    ]  # fmt: skip
    records = log(group, ev.GroupEvicted("a", ("stale", "zero_variance"), 4, 1), rules=rules)

    assert (
        "lag 0 (lag_max 3), acc from 0.75 to 1 over 2 values (range 0.25, tolerance 0.5)"
        in texts(story(records, "a"))[5]
    )
    assert (
        "stale: lag 4 is above lag_max 3; zero_variance: acc in all 2 values (max - min 0.25, tolerance 0.5)"
        in last(records)
    )


def test_a_deviation_that_rounds_is_told_as_such() -> None:
    rules = Rules(filter_metric="acc", spread="std", tolerance=0.1)
    records = log(whole("a", 0.0, 0.15), ev.GroupEvicted("a", ("zero_variance",), 0, 1), rules=rules)

    assert "zero_variance: the deviation of acc over 2 values is within tolerance 0.1" in last(records)


def test_a_group_of_a_validation_round_says_so() -> None:
    records = log(submit("a", 1, partition="val", validation_round=True))

    assert texts(story(records, "a"))[0].endswith("for a validation round")


def test_a_group_with_spare_sessions_says_how_many_it_needs() -> None:
    rules = Rules(oversample=1)
    records = log(
        submit("a", 2, oversample=1, target_version=4), ev.SessionStarted("a", 0, 1), finish("a", 0, acc=1.0),
        ev.SessionFailed("a", 1, 1, "cancelled"), ev.GroupFinished("a"), rules=rules,
    )  # fmt: skip

    assert "made for version 4, 1 more than it needs" in texts(story(records, "a"))[0]
    assert last(records).startswith("finished: 1 of 2 sessions finished, as many as it needs")


def test_a_group_in_flight_names_the_sessions_that_it_waits_for() -> None:
    records = log(submit("a", 3, cause="admission"), ev.SessionStarted("a", 0, 1), ev.SessionStarted("a", 1, 1),
                  finish("a", 0), ev.RunClosed("closed"))  # fmt: skip
    told = story(records, "a")

    assert told.now == "running for 4.000 s, 1 of 3 sessions have ended"
    assert told.held_up_by == "waits for session 1 (attempt 1, open for 2.000 s) and session 2 (attempt 1, to begin)"
    assert texts(told)[0].startswith("submitted by the rollout's own admission: 3 sessions")
    assert texts(told)[-1] == "the run closed (closed) while it was running"


def test_a_run_that_was_opened_again_and_went_back_to_a_mark() -> None:
    records = log(
        ev.CheckpointMarked(1, 0, 1), ev.WeightsPublished(2), whole("a", 1.0), submit("b", stamp=2),
        ev.SessionStarted("b", 0, 1), sample(1, "a", lag=2), ev.BatchCommitted(1),
        ev.RunRecovered(Rules().to_dict(), RULES_VERSION, 0, 2), ev.RunRewound(1, 2, 0, 2), ev.GroupRequeued("b"),
    )  # fmt: skip

    assert last(records) == "the run went back to mark 1, which undoes the commit: finished again, lag 2"
    assert story(records, "a").now == "finished and sampleable, lag 2"
    assert texts(story(records, "b"))[2:] == [
        "the run was opened again at version 0, lineage 2",
        "the run went back to mark 1, version 0: its lag is 0",
        "started over (no reason given): what it had is dropped, attempt 2 is next",
    ]


def test_where_a_group_can_stand_at_the_end() -> None:
    sampled = log(whole("a", 1.0), sample(1, "a"))
    empty: list[ev.AnyEvent] = [submit("a"), ev.SessionFailed("a", 0, 1, "refused"), ev.GroupFailed("a")]

    assert story(sampled, "a").now == "sampled: batch 1 is with the trainer, neither committed nor returned"
    assert story(log(empty), "a").now == "failure without a trajectory, so it is never sampled"


# Several weight versions ----------------------------------------------------------------------------------


def spanning(*stretches: tuple[int, int], index: int = 0, environment: tuple[tuple[int, int], ...] = ()) -> Any:
    """A trajectory of (tokens, version) one after the other; of version -1 are those of the environment."""
    spans, at = [], 0
    for count, version in stretches:
        if version >= 0:
            spans.append(ev.VersionSpan(at, at + count, version))
        at += count
    return ev.TrajectoryRecord(index, {"acc": 1.0}, 3, at, tuple(spans), environment)


def made(*rows: Any, rules: Rules | None = None, stamp: int = 4, **more: Any) -> list[ev.Record]:
    """A group of one session at weight version 6 that yielded these rows."""
    return log(
        ev.WeightsPublished(stamp), submit("a", stamp=stamp, **more), ev.SessionStarted("a", 0, 1),
        ev.WeightsPublished(6), ev.SessionFinished("a", 0, 1, rows), ev.GroupFinished("a"), rules=rules,
    )  # fmt: skip


def test_a_session_across_versions_says_which_made_which_tokens() -> None:
    told = story(made(spanning((164, 4), (236, 5))), "a")

    assert texts(told)[-2] == (
        "session 0 finished after 2.000 s: 1 trajectory, 400 tokens, tokens 0-163 by version 4, "
        "tokens 164-399 by version 5, acc 1; 1 of 1 sessions have ended"
    )


def test_a_session_of_one_version_stays_short() -> None:
    told = story(made(spanning((9, 5)), spanning((3, 5), index=1)), "a")

    assert ": 2 trajectories, 12 tokens, of version 5, acc 1; " in texts(told)[-2]
    assert "spans" not in texts(told)[-1]
    assert told.versions == ""


def test_what_the_environment_wrote_parts_no_stretch_and_is_counted() -> None:
    row = spanning((10, 4), (5, -1), (10, 4), (5, -1), (10, 5), environment=((10, 15), (25, 30)))
    told = story(made(row), "a")

    assert (
        "40 tokens, tokens 0-24 by version 4, tokens 30-39 by version 5, 10 of them the environment's, acc 1"
        in (texts(told)[-2])
    )


def test_several_trajectories_are_told_apart() -> None:
    told = story(made(spanning((2, 4)), spanning((3, 4), (1, 5), index=1)), "a")

    assert (
        "of trajectory 0 tokens 0-1 by version 4, of trajectory 1 tokens 0-2 by version 4, "
        "of trajectory 1 token 3 by version 5" in texts(told)[-2]
    )


def test_of_many_stretches_the_first_and_the_last_are_named() -> None:
    rows = tuple((1, version) for version in range(9))
    text = texts(story(made(spanning(*rows)), "a"))[-2]

    assert "token 4 by version 4, 3 stretches more, token 8 by version 8, acc" in text
    assert "token 4 by version 4, 1 stretch more, token 6" in texts(story(made(spanning(*rows[:7])), "a"))[-2]
    assert "more" not in texts(story(made(spanning(*rows[:6])), "a"))[-2]


@pytest.mark.parametrize(
    ("basis", "counted"),
    [
        ("dispatch", "3, its stamp"),
        ("first_token", "5, its first token's"),
        ("oldest_token", "4, its oldest token's"),
        ("newest_token", "6, its newest token's"),
    ],
)
def test_a_group_across_versions_says_so_and_what_its_lag_counts_from(basis: Any, counted: str) -> None:
    told = story(made(spanning((1, 5), (1, 4), (1, 6)), rules=Rules(basis=basis), stamp=3), "a")

    assert told.versions == f"it spans versions 4 to 6: its lag counts from {counted}"
    assert texts(told)[-1] == (
        f"finished: all 1 session finished, 1 trajectory, lag {6 - int(counted[0])}, {told.versions}"
    )


def test_a_group_that_is_made_for_a_version_counts_from_that() -> None:
    rules = Rules.in_order(1)
    told = story(made(spanning((1, 4), (1, 5)), rules=rules, target_version=6), "a")

    assert told.versions == "it spans versions 4 to 5: its lag counts from 6, for which it is made"


def test_a_group_in_flight_counts_from_its_stamp_whatever_the_basis() -> None:
    records = log(
        submit("a", 2), ev.SessionStarted("a", 0, 1), ev.SessionFinished("a", 0, 1, (spanning((1, 0), (1, 1)),)),
        rules=Rules(basis="oldest_token"),
    )  # fmt: skip

    assert story(records, "a").versions == (
        "it spans versions 0 to 1: its lag counts from 0, its stamp, until all of it has ended (basis oldest_token)"
    )


def test_a_group_that_the_run_went_back_from_counts_from_the_mark() -> None:
    records = log(
        ev.CheckpointMarked(1, 0, 1), ev.WeightsPublished(4), submit("a", stamp=4), ev.SessionStarted("a", 0, 1),
        ev.SessionFinished("a", 0, 1, (spanning((1, 4), (1, 5)),)), ev.GroupFinished("a"),
        ev.RunRecovered(Rules().to_dict(), RULES_VERSION, 0, 2), ev.RunRewound(1, 2, 0, 2),
    )  # fmt: skip

    assert story(records, "a").versions == (
        "it spans versions 4 to 5: its lag counts from 0, the version that the run went back to"
    )


def test_an_unknown_group_is_refused_with_ids_that_are_near() -> None:
    records = log(submit("math-1"), submit("math-2"))

    with pytest.raises(UnknownGroup, match="did you mean 'math-2' or 'math-1'"):
        story(records, "math-3")
    with pytest.raises(UnknownGroup, match="it submitted 2 groups, such as 'math-1' and 'math-2'"):
        story(records, "?")
    with pytest.raises(UnknownGroup, match="it submitted 0 groups"):
        story(log(), "a")


def test_the_story_of_a_group_that_was_really_driven(driven: Path) -> None:
    told = story(read_log(driven), "g5")

    assert told.steps[-2].text == (
        "evicted, zero_variance: reward is 0.7 in all 2 values (max - min 0, tolerance 0); it earned 1 refill"
    )
    assert told.held_up_by == "session 1 ended last, 0.250 s after the one before it"


# Of a run directory --------------------------------------------------------------------------------------


async def lived(path: Path) -> None:
    async def session(ctx: Any) -> Trajectory:
        return Trajectory(reward=float(ctx.session))

    given: dict[str, Any] = {"source": range(40), "session": session, "group_size": 2, "snapshot_events": 60}
    async with open_run(path, rules=Rules(batch_size=1), durability="os", **given) as run:
        for _ in range(30):
            await run.commit(await run.sample(1))


async def test_of_a_run_with_snapshots_the_same_is_told_and_less_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lived(tmp_path / "run")
    records = list(read_log(tmp_path / "run"))
    groups = [record.event.group_id for record in records if isinstance(record.event, ev.GroupSubmitted)]
    begun: list[int] = []

    def reading(path: Any, first: int) -> Any:
        begun.append(first)
        return read_log(path, first)

    monkeypatch.setattr(story_module, "read_log", reading)
    for group_id in groups:
        assert story_of(tmp_path / "run", group_id) == story(records, group_id)
    assert begun[0] == 1
    assert begun == sorted(begun)
    assert begun[-1] > len(records) / 2

    with pytest.raises(UnknownGroup) as whole:
        story(records, "g400")
    with pytest.raises(UnknownGroup) as told:
        story_of(tmp_path / "run", "g400")
    assert str(told.value) == str(whole.value)
