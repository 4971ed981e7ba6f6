"""Every kind of event has words, and nothing that comes out of a log can break a line or a terminal."""

import pytest

from groupstate.core import events as ev
from groupstate.core.near import near
from groupstate.errors import BadInput
from groupstate.inspect.words import (
    KINDS,
    as_object,
    in_words,
    joined,
    kind_named,
    kind_of,
    name_of,
    one_line,
    span_of,
    time_of,
)

ROW = ev.TrajectoryRecord(0, {"reward": 0.5}, 2, 3, (ev.VersionSpan(0, 2, 4), ev.VersionSpan(2, 3, 5)))

WORDS = [
    (ev.RunStarted("r1", {}, 1, 3, library="0.1", seed=7), "run r1, version 3, seed 7, groupstate 0.1"),
    (ev.WeightsPublished(4, 2), "version 4, lineage 2"),
    (ev.SourceExhausted("sums", 1), "sums gave 1 prompt"),
    (ev.SourceExhausted(), "the source gave 0 prompts"),
    (ev.AdmissionHeld("a group is at the bound"), "a group is at the bound"),
    (ev.AdmissionHeld(""), "no longer"),
    (ev.DatasetStarved("math", 4, 1, 7), "math: none sampled for 4 versions, 1 group open, 7 evicted"),
    (ev.SourceOpened("sums"), "sums"),
    (
        ev.SourceOpened("sums", "ListSource", {"size": 9, "epochs": 2, "shuffle_seed": None}),
        "sums, a ListSource: size 9, epochs 2 and shuffle_seed None",
    ),
    (ev.CheckpointMarked(1, 4, 2, "best"), "mark 1 'best', version 4, lineage 2"),
    (ev.CheckpointMarked(1, 4, 2), "mark 1, version 4, lineage 2"),
    (ev.RunRecovered({}, 1, 4, 2, torn_bytes=9), "version 4, lineage 2, 9 bytes of an interrupted commit cut"),
    (ev.RunRecovered({}, 1, 4, 2), "version 4, lineage 2"),
    (ev.RunRewound(1, 30, 4, 2), "to mark 1 at event 30, version 4, lineage 2"),
    (
        ev.RunRewound(1, 30, 4, 2, evicts=True),
        "to mark 1 at event 30, version 4, lineage 2, groups that ended since are evicted",
    ),
    (ev.RunClosed("done"), "done"),
    (ev.GroupSubmitted("a", 1, "train", 0, 1, "submit"), "a: 1 session, train, version 0, by submit"),
    (
        ev.GroupSubmitted("a", 2, "val", 0, 1, "admission", "math", 3, target_version=8, oversample=1),
        "a: 2 sessions, val, version 0, by admission, prompt 3 of the source, dataset math, for version 8, "
        "1 more than it needs",
    ),
    (
        ev.GroupSubmitted("a", 1, "val", 4, 1, "submit", validation_round=True),
        "a: 1 session, val, version 4, by submit, for a validation round",
    ),
    (ev.GroupFinished("a"), "a"),
    (ev.GroupFinished("a", partial=True), "a: partial"),
    (ev.GroupFailed("a", cancelled=True), "a: cancelled"),
    (ev.GroupFailed("a"), "a"),
    (ev.GroupEvicted("a", ("failed", "stale"), 2, 1), "a: failed and stale, lag 2, 1 refill"),
    (
        ev.GroupEvicted("a", ("zero_variance",), 0, 2, 0.7, "acc", "all the same"),
        "a: zero_variance, lag 0, acc 0.7 throughout, 2 refills: all the same",
    ),
    (ev.GroupRequeued("a", "recovery"), "a: recovery"),
    (ev.GroupRequeued("a", "dispatched anew", weight_version=3), "a: dispatched anew, stamp 3"),
    (ev.RefillForfeited(2, "batch full"), "2 refills: batch full"),
    (ev.SessionStarted("a", 0, 2, "w3", 4), "a/0: attempt 2, worker w3, version 4"),
    (ev.SessionStarted("a", 0, 1), "a/0: attempt 1"),
    (ev.SessionFinished("a", 0, 1, (ROW,)), "a/0: attempt 1, 1 trajectory, 3 tokens, of version 4 and 5, reward 0.5"),
    (ev.SessionFinished("a", 0, 1), "a/0: attempt 1, 0 trajectories"),
    (
        ev.SessionFinished("a", 0, 1, (ev.TrajectoryRecord(0, {"len": 3.0}, not_finite=("acc",)),)),
        "a/0: attempt 1, 1 trajectory, len 3, no number: acc",
    ),
    (ev.SessionStarted("a", 0, 1, observed=True), "a/0: attempt 1, observed"),
    (ev.SessionFinished("a", 0, 1, observed=True), "a/0: attempt 1, observed, 0 trajectories"),
    (ev.SessionFailed("a", 0, 1, "lost", "gone", observed=True), "a/0: attempt 1, observed, lost: gone"),
    (ev.SessionFailed("a", 0, 1, "timeout"), "a/0: attempt 1, timeout"),
    (ev.SessionFailed("a", 0, 1, "error", "boom\nbang", 0.5), "a/0: attempt 1, error, again in 0.5 s: boom bang"),
    (
        ev.ResultFenced("a", 0, 1, "finished", "gone"),
        "a/0: attempt 1, finished, changed nothing: the group has left the book",
    ),
    (ev.BatchRequested(1, "train", 4, 2), "request 1: 4 groups of train, version 2"),
    (ev.BatchRequestCancelled(1, "timeout"), "request 1: timeout"),
    (
        ev.BatchSampled(1, 2, "train", ("a", "b"), 3, (0, 1)),
        "batch 1 for request 2, train, version 3: a b (lag 0 1)",
    ),
    (ev.BatchCommitted(1), "batch 1"),
    (ev.BatchReturned(1, "released"), "batch 1: released"),
    (ev.BatchReturned(1), "batch 1: no reason given"),
]


@pytest.mark.parametrize(("event", "words"), WORDS)
def test_an_event_in_words(event: ev.AnyEvent, words: str) -> None:
    assert in_words(event) == words


def test_every_kind_is_in_the_table_above() -> None:
    assert {type(event) for event, _ in WORDS} == set(ev.EVENT_TYPES)


def test_a_record_as_an_object_has_every_field_by_name() -> None:
    found = as_object(ev.Record(7, 99, ev.SessionFinished("a", 0, 1, (ROW,), ev.PayloadRef(1, 2, 3))))

    assert found == {
        "seq": 7,
        "at_ns": 99,
        "kind": "session_finished",
        "group_id": "a",
        "session": 0,
        "attempt": 1,
        "trajectories": [
            {
                "index": 0,
                "metrics": {"reward": 0.5},
                "prompt_tokens": 2,
                "response_tokens": 3,
                "spans": [
                    {"start": 0, "stop": 2, "weight_version": 4},
                    {"start": 2, "stop": 3, "weight_version": 5},
                ],
                "environment": [],
                "not_finite": [],
            }
        ],
        "payload": {"key": 1, "length": 2, "crc": 3},
        "observed": False,
    }


@pytest.mark.parametrize("name", ["group_evicted", "GroupEvicted", "Group-Evicted", "GROUP_EVICTED"])
def test_a_kind_is_known_by_several_spellings(name: str) -> None:
    assert kind_named(name) is ev.GroupEvicted


def test_an_unknown_kind_is_refused_with_the_near_ones() -> None:
    with pytest.raises(BadInput, match="did you mean 'group_evicted'"):
        kind_named("group_evictd")
    with pytest.raises(BadInput, match="known: run_started, weights_published"):
        kind_named("?")

    assert kind_of(ev.RunClosed()) == "run_closed"
    assert len(KINDS) == len(ev.EVENT_TYPES)


def test_text_from_a_log_stays_on_its_line() -> None:
    assert one_line("a\tb\r\n\x1b[2Jc\u202e d") == "a b [2Jc d"
    assert one_line("x" * 400, 10) == "xxxxxxx..."


@pytest.mark.parametrize(
    ("group_id", "shown"), [("math/7_1", "math/7_1"), ("a b", "'a b'"), ("a\tb", "'a\\tb'"), ("Grüße", "Grüße")]
)
def test_an_id_that_would_be_torn_apart_is_quoted(group_id: str, shown: str) -> None:
    assert name_of(group_id) == shown


def test_times_and_lists() -> None:
    assert time_of(1_700_000_000_123_999_999) == "2023-11-14T22:13:20.123Z"
    assert [span_of(s) for s in (0.25, 75, 7322)] == ["0.250 s", "1 min 15 s", "2 h 2 min"]
    assert [span_of(s) for s in (172_740, 172_800, 1e6)] == ["47 h 59 min", "2 d 0 h", "11 d 13 h"]
    assert [joined(words) for words in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]


def test_near_names_are_few_and_may_be_none() -> None:
    assert near("g12", ["g1", "g2", "x"]) == "did you mean 'g2' or 'g1'?"
    assert near("abc", ["xyz"]) == ""


def test_capital_letters_make_no_name_another() -> None:
    assert near("Async", ["sync", "async"]) == "did you mean 'async' or 'sync'?"
    assert near("g7", ["G7", "h8"]) == "did you mean 'G7'?"
