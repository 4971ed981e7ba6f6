"""A run's numbers are what its events say, at any moment, from any thread."""

import sys
import threading
from collections import Counter
from typing import Any

import pytest

from groupstate.core import events as ev
from groupstate.core.phases import IN_FLIGHT
from groupstate.core.rules import Rules
from groupstate.integrations import counting
from groupstate.integrations.counting import Figures
from groupstate.integrations.figures import METRICS, Distribution
from groupstate.simulate.drawn import drawn_plan
from groupstate.simulate.simulator import simulate
from groupstate.testing.notation import Story

from .recount import RECOVERY, Recount, Retold, counted, steps

KINDS = {metric.name: metric.kind for metric in METRICS}
EVERY = 41
"""Steps from one comparison to the next."""


def total(figures: Figures, name: str) -> Any:
    """Values that aren't zero, by their labels."""
    return {labels: value for labels, value in figures.read().values[name].items() if value}


def gauges(retold: Retold) -> dict[str, Any]:
    """Some of the gauges, from every group that is there."""
    book = retold.ledger.book
    groups = list(book.groups.values())
    lags = [book.lag(group) for group in groups if group.phase in IN_FLIGHT and group.partition == "train"]
    return {
        "groups": Counter((group.partition, group.phase.value) for group in groups),
        "open": Counter(group.partition for group in groups for each in group.sessions if each.state == "open"),
        "lag in flight": max(lags, default=0),
    }


def shown(figures: Figures) -> dict[str, Any]:
    values = figures.read().values
    return {
        "groups": +Counter(values["groupstate_groups"]),
        "open": +Counter({labels[0]: count for labels, count in values["groupstate_sessions_in_flight"].items()}),
        "lag in flight": values["groupstate_oldest_lag_versions"]["train", "in_flight"],
    }


@pytest.mark.parametrize("seed", [0, 3, 8])
def test_the_numbers_of_a_simulated_run_are_those_of_its_events(seed: int) -> None:
    """Through crashes, rewinds, retries and requeues. Counting begins anew with each opening, and half-way."""
    records = simulate(drawn_plan(seed)).records
    retold, recount = Retold(records[0].event), Recount()  # type: ignore[arg-type]
    figures, before, recovering, compared = None, Counter[Any](), False, 0
    for number, step in enumerate(steps(records)):
        recovering = isinstance(step[0].event, ev.RunRecovered) or (recovering and isinstance(step[0].event, RECOVERY))
        if figures is not None and recovering:
            figures.detach()
            figures = None
        elif figures is None and not recovering and retold.ledger.book.run_id and number % 3 == 0:
            figures, before = Figures(retold), Counter(recount.totals)
        retold.take(step)
        for record in step:
            recount.take(record)
        if figures is not None and number % EVERY == 0:
            since = Counter(recount.totals)
            since.subtract(before)
            found = counted(figures.read(), KINDS)
            assert tokens_less(found) == tokens_less(+since)
            assert shown(figures) == gauges(retold)
            compared += 1

    assert compared > 10


def tokens_less(totals: Counter[Any]) -> dict[Any, int]:
    """Sums of durations are rounded to a float's precision of seconds."""
    return {key: round(value, -3) if key[-1] == "total" else value for key, value in totals.items()}


# Small stories --------------------------------------------------------------------------------------------


def test_what_was_there_before_the_counting_is_no_count_of_it() -> None:
    story = Story().tell("submit a/2", "start a", "finish a reward=1.0", "submit b/2", "start b.0", "wait 3")

    figures = Figures(story)
    story.tell("evict a zero_variance", "finish b.0 reward=0.5")

    assert total(figures, "groupstate_groups_submitted") == {}
    assert total(figures, "groupstate_groups_evicted") == {("train",): 1}
    assert total(figures, "groupstate_sessions_finished") == {(): 1}
    assert total(figures, "groupstate_groups_in_flight") == {("train",): 1}


def test_an_attempt_that_never_began_has_no_duration() -> None:
    """The book still has the times of the attempt before."""
    story = Story(rules=Rules(attempts_max=3), controlled=False).tell("submit a/2", "start a.0")
    figures = Figures(story)

    story.tell("wait 5", "fail a.0 error retryable", "wait 5", "fail a.0 cancelled", "fail a.1 cancelled")

    failed = figures.read().values["groupstate_session_seconds"]["train", "failed"]
    assert isinstance(failed, Distribution)
    assert (failed.count, failed.total) == (1, 5.0)
    assert total(figures, "groupstate_session_failures") == {("train", "error"): 1, ("train", "cancelled"): 2}


def test_each_attempt_that_failed_has_a_duration_of_its_own() -> None:
    story = Story(rules=Rules(attempts_max=3), controlled=False).tell("submit a/1", "start a", "wait 2")
    story.tell("fail a error retryable")
    figures = Figures(story)

    story.tell("wait 100", "start a", "wait 5", "fail a error retryable", "wait 100", "start a", "wait 7", "fail a")

    failed = figures.read().values["groupstate_session_seconds"]["train", "failed"]
    assert isinstance(failed, Distribution)
    assert (failed.count, failed.total) == (2, 12.0)


def test_starts_are_listened_to_only_while_an_attempt_is_due_again() -> None:
    """Most starts are nobody's business. A counting that begins meanwhile knows of it too."""
    story = Story(rules=Rules(attempts_max=5), controlled=False).tell("submit a/2", "start a")
    first = Figures(story)

    def listening() -> int:
        return len(story.ledger.listeners.get(ev.SessionStarted, ()))

    assert listening() == 0
    story.tell("wait 1", "fail a.0 error retryable", "fail a.1 error retryable")
    second = Figures(story)
    assert listening() == 2
    story.tell("start a.0", "wait 3", "fail a.1 cancelled")
    assert listening() == 0
    story.tell("fail a.0 error retryable")
    assert listening() == 2

    for figures, durations in ((first, (3, 5.0)), (second, (1, 3.0))):
        failed = figures.read().values["groupstate_session_seconds"]["train", "failed"]
        assert isinstance(failed, Distribution)
        assert (failed.count, failed.total) == durations


def test_a_group_that_ends_with_what_it_has_is_partial() -> None:
    story = Story(rules=Rules(survivors_min=1), controlled=False)
    figures = Figures(story)

    story.tell("submit a/2", "start a", "wait 2", "finish a.0 reward=1", "fail a.1")

    assert total(figures, "groupstate_groups_ended") == {("train", "partial"): 1}
    finished = figures.read().values["groupstate_session_seconds"]["train", "finished"]
    assert isinstance(finished, Distribution)
    assert (finished.count, finished.total) == (1, 2.0)


def test_a_failed_group_that_starts_over_is_counted_once() -> None:
    story = Story()
    figures = Figures(story)

    story.tell("submit a/2", "start a", "wait 3", "finish a.0 reward=1", "fail a.1", "requeue a")

    finished = figures.read().values["groupstate_session_seconds"]["train", "finished"]
    assert isinstance(finished, Distribution)
    assert (finished.count, finished.total) == (1, 3.0)
    assert total(figures, "groupstate_groups_ended") == {("train", "failed"): 1}
    assert total(figures, "groupstate_groups_requeued") == {("train",): 1}


def test_a_clock_that_is_set_back_lowers_no_sum() -> None:
    story = Story().tell("submit a/1", "start a")
    figures = Figures(story)

    story.now_ns -= 10_000_000_000
    story.tell("finish a reward=1.0")

    finished = figures.read().values["groupstate_session_seconds"]["train", "finished"]
    assert isinstance(finished, Distribution)
    assert (finished.counts[0], finished.total) == (1, 0.0)


def test_many_durations_are_sorted_in_and_stay_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "LOOSE_MAX", 3)
    story = Story()
    figures = Figures(story)

    for number in range(5):
        story.tell(f"submit g{number}/2", f"start g{number}", "wait 2", f"finish g{number} reward=1.0")

    finished = figures.read().values["groupstate_session_seconds"]["train", "finished"]
    assert isinstance(finished, Distribution)
    assert (finished.count, finished.total) == (10, 20.0)


def test_every_metric_has_a_value_from_the_start_with_its_labels() -> None:
    values = Figures(Story()).read().values

    assert list(values) == [metric.name for metric in METRICS]
    for metric in METRICS:
        assert values[metric.name]
        assert all(len(labels) == len(metric.labels) for labels in values[metric.name])
        for value in values[metric.name].values():
            assert isinstance(value, Distribution) == (metric.kind == "histogram")


def test_detached_it_counts_no_more() -> None:
    story = Story()
    figures = Figures(story)
    figures.detach()
    figures.detach()

    story.tell("submit a/1")

    assert not any(story.ledger.listeners.values())


def test_a_run_that_is_stuck_in_a_step_gives_the_last_whole_numbers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(counting, "ANSWER_S", 0.0)
    story = Story().tell("submit a/1")
    figures = Figures(story)
    story.tell("submit b/1")
    assert figures.read().seq == 3

    # Posted and never applied, as by a log that fails half-way.
    story.log.post([ev.Record(4, story.now_ns, ev.SessionStarted("a", 0, 1))])

    assert [figures.read().seq, figures.read().seq] == [3, 3]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_numbers_between_which_something_happened_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "ANSWER_S", 0.0)
    story = Story().tell("submit a/1")
    figures = Figures(story)
    meanwhile = ["submit b/1"]

    def disturbed(partition: str) -> int:
        if meanwhile:
            story.tell(meanwhile.pop())
        return 0

    figures._count_sampleable = disturbed

    reading = figures.read()
    assert reading.seq == story.book.last_seq
    assert reading.values["groupstate_groups_in_flight"]["train",] == 2


def test_a_reading_by_the_recording_thread_waits_for_the_end_of_the_step() -> None:
    """The last session's end and its group's are one step."""
    story = Story().tell("submit a/1", "start a")
    figures, asked = Figures(story), counting._Asked()
    figures._asked.append(asked)

    story.tell("fail a")

    assert asked.reading is not None
    assert asked.reading.seq == story.book.last_seq
    assert asked.reading.values["groupstate_groups_ended"]["train", "failed"] == 1


def test_what_goes_wrong_in_a_reading_is_no_matter_of_recording(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(counting, "ANSWER_S", 0.0)
    story = Story()
    figures, asked = Figures(story), counting._Asked()

    def broken(partition: str) -> int:
        raise KeyError("an index that is torn")

    figures._count_sampleable = broken
    figures._asked.append(asked)
    story.tell("submit a/1", "start a", "fail a")

    assert isinstance(asked.problem, KeyError)
    assert figures.read().seq == 1
    assert "an index that is torn" in caplog.text


def test_another_thread_reads_whole_numbers_while_events_are_recorded() -> None:
    """Each group is counted in one phase, and what was submitted is there or has left, in every single reading."""
    story = Story(replays=False)
    figures = Figures(story)
    done, wrong, readings, events = threading.Event(), [], 0, set()

    def read() -> None:
        nonlocal readings
        while not done.is_set():
            try:
                values = figures.read().values
                live = sum(values["groupstate_groups"].values())
                submitted = values["groupstate_groups_submitted"]["train",]
                evicted = values["groupstate_groups_evicted"]["train",]
                ended = sum(values["groupstate_groups_ended"].values())
                in_flight = values["groupstate_groups_in_flight"]["train",]
                if live + evicted != submitted or ended + in_flight != submitted:
                    wrong.append((live, evicted, submitted, ended, in_flight))
                readings += 1
                events.add(values["groupstate_events"][()])
            except Exception as error:
                wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=read)
    thread.start()
    try:
        for number in range(300):
            group = f"g{number}"
            for event in (
                ev.GroupSubmitted(group, 2, "train", 0, 1, "submit"),
                *(ev.SessionStarted(group, session, 1) for session in range(2)),
                *(ev.SessionFinished(group, session, 1) for session in range(2)),
                ev.GroupEvicted(group, ("zero_variance",), 0, 0),
            ):
                story.ledger.record(event)
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)

    assert wrong == []
    assert readings > 10
    assert len(events) > 5
