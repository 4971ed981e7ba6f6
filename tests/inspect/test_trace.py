"""A run as a trace: valid in the format, true to the log, whole or not at all."""

import gzip
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner, Result
from hypothesis import given

import groupstate as gs
from groupstate.cli import main
from groupstate.core import events as ev
from groupstate.core.book import Book
from groupstate.errors import BadInput, LogError
from groupstate.inspect.lives import Listener, Lives
from groupstate.inspect.replay import book_at
from groupstate.inspect.trace import RUN, TRAINER, trace_events, write_trace
from groupstate.log.reading import beginning, read_log
from groupstate.simulate.loop import EPOCH_NS
from groupstate.testing import strategies
from tests.inspect.trace_format import problems

HISTORIES = Path(__file__).parents[1] / "histories" / "v1"
STORIES = sorted(path.name for path in HISTORIES.iterdir() if path.is_dir())
START = ev.RunStarted("run", {}, 1, 0)

Trace = dict[str, Any]
Keep = Callable[..., Path]


def records_of(*events: ev.AnyEvent, step_ns: int = 1_000_000_000) -> list[ev.Record]:
    return [ev.Record(seq, EPOCH_NS + seq * step_ns, event) for seq, event in enumerate(events, 1)]


def submitted(group_id: str, size: int = 1, partition: str = "train") -> ev.GroupSubmitted:
    return ev.GroupSubmitted(group_id, size, partition, 0, 1, "submit", "math")


def finished(group_id: str, session: int = 0, attempt: int = 1) -> ev.SessionFinished:
    return ev.SessionFinished(group_id, session, attempt, (ev.TrajectoryRecord(0, {"reward": 1.0}, 3, 40),))


def life(group_id: str) -> list[ev.AnyEvent]:
    """A group of one session, up to its end."""
    return [submitted(group_id), ev.SessionStarted(group_id, 0, 1, "w"), finished(group_id), ev.GroupFinished(group_id)]


def trace_of(records: list[ev.Record], base: Book | None = None, **options: Any) -> list[Trace]:
    found = list(trace_events(records, base, **options))
    assert problems({"traceEvents": found}) == []
    return found


def named(events: list[Trace], name: str) -> Trace:
    (found,) = (event for event in events if event["name"] == name and event["ph"] != "M")
    return found


def call(*args: Any) -> Result:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


# The format ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tracks", ["group", "lane"])
@pytest.mark.parametrize("name", STORIES)
def test_the_trace_of_any_run_is_valid(name: str, tracks: Any) -> None:
    base, start = beginning(HISTORIES / name)

    assert trace_of(list(read_log(HISTORIES / name, start)), base, tracks=tracks)


@given(strategies.logs())
def test_the_trace_of_any_history_is_valid(records: list[ev.Record]) -> None:
    for tracks in ("group", "lane"):
        assert trace_of(records, tracks=tracks)


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([{"ph": "X", "ts": 1, "dur": 3}, {"ph": "X", "ts": 2, "dur": 3}], "x at 2 overlaps x"),
        ([{"ph": "B", "ts": 1}], "traceEvents/0: "),
        ([{"ph": "X", "ts": 1, "dur": -1}], "traceEvents/0: "),
        ([{"ph": "i", "ts": 1}], "traceEvents/0: "),
    ],
)
def test_what_breaks_the_format_is_found(events: list[Trace], problem: str) -> None:
    common = {"pid": 1, "tid": 1, "name": "x", "cat": "c", "args": {}}
    names = [{"ph": "M", "pid": 1, "tid": 1, "ts": 0, "name": kind, "args": {"name": "n"}}
             for kind in ("process_name", "thread_name")]  # fmt: skip

    found = problems({"traceEvents": [*(common | event for event in events), *names]})
    assert len(found) == 1
    assert found[0].startswith(problem)


@pytest.mark.parametrize("name", STORIES)
def test_the_counts_are_those_of_the_book_at_every_event(name: str) -> None:
    base, start = beginning(HISTORIES / name)
    lives, book = Lives(Listener(), base), beginning(HISTORIES / name)[0] or Book()
    for record in read_log(HISTORIES / name, start):
        lives.feed(record, record.at_ns)
        book.apply(record)

        assert {name: life.phase for name, life in lives.groups.items()} == {g.group_id: g.phase for g in
                                                                              book.groups.values()}  # fmt: skip
        assert (set(lives.waiting), set(lives.batches)) == (set(book.requests), set(book.batches))
        # Beside these only what a way back to a mark could bring back is held.
        assert {life.group_id for _, _, lives in lives._commits for life in lives} == set(book.aside)
        for partition in book.partitions():
            assert lives.in_flight[partition] == book.in_flight_count(partition)
            assert lives.sampleable[partition] == book.ready_count(partition)


# What it tells ---------------------------------------------------------------------------------------


def test_a_session_lies_on_its_track_with_what_it_yielded() -> None:
    events = trace_of(records_of(START, *life("a")))
    (session,) = (event for event in events if event.get("cat") == "session")
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}

    assert (session["name"], session["ts"], session["dur"]) == ("finished", 2e6, 1e6)
    assert session["args"] == {
        "group": "a", "session": 0, "attempt": 1, "seq": 3, "end_seq": 4, "worker": "w", "trajectories": 1,
        "tokens": 40, "metrics": {"reward": 1.0},
    }  # fmt: skip
    assert names[session["pid"], session["tid"]] == "session 0"
    assert processes[session["pid"]] == "a"


def test_a_retry_is_a_failed_attempt_a_wait_and_another_attempt() -> None:
    failed = ev.SessionFailed("a", 0, 1, "error", "boom\nat line 3", 1.0)
    events = trace_of(records_of(START, *life("a")[:2], failed, ev.SessionStarted("a", 0, 2), finished("a", 0, 2)))
    told = [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == 2 and e["pid"] >= 10]

    assert told == [("error", 2e6, 1e6), ("waits for a retry", 3e6, 1e6), ("finished, attempt 2", 4e6, 1e6)]
    assert named(events, "error")["args"]["message"] == "boom at line 3"
    assert named(events, "error")["args"]["retry_in_s"] == 1.0


def test_phases_lie_one_after_the_other_within_the_group() -> None:
    sampled = ev.BatchSampled(1, 1, "train", ("a",), 0, (0,))
    events = trace_of(records_of(START, *life("a"), ev.BatchRequested(1, "train", 1, 0), sampled, ev.BatchCommitted(1)))
    phases = [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "phase"]
    whole = named(events, "a")

    assert [name for name, _, _ in phases] == ["pending", "running", "finished", "sampled"]
    assert all(stop == start for (_, _, stop), (_, start, _) in pairwise(phases))
    assert (whole["ts"], whole["ts"] + whole["dur"]) == (phases[0][1], phases[-1][2])
    assert whole["args"] == {
        "group": "a", "seq": 2, "size": 1, "partition": "train", "dataset": "math", "cause": "submit", "stamp": 0,
        "end": "committed",
    }  # fmt: skip


def test_a_batch_has_its_groups_and_arrows_from_them() -> None:
    sampled = ev.BatchSampled(7, 1, "train", ("b", "a"), 3, (1, 2))
    events = trace_of(
        records_of(START, *life("a"), *life("b"), ev.BatchRequested(1, "train", 2, 3), sampled, ev.BatchCommitted(7))
    )
    batch, wait = named(events, "batch 7"), named(events, "waits for 2 groups")

    assert (batch["pid"], wait["pid"]) == (TRAINER, TRAINER)
    assert (wait["ts"] + wait["dur"], wait["args"]["end"]) == (batch["ts"], "batch 7")
    assert (batch["args"]["groups"], batch["args"]["lags"]) == (["b", "a"], [1, 2])
    assert [e["pid"] for e in events if e["ph"] == "s"] == [11, 10]
    assert {(e["pid"], e["ts"]) for e in events if e["ph"] == "f"} == {(TRAINER, batch["ts"])}


def test_an_eviction_says_why() -> None:
    evicted = ev.GroupEvicted("a", ("stale", "zero_variance"), 4, 1, 0.5, "reward")
    events = trace_of(records_of(START, *life("a"), evicted))

    told = named(events, "evicted: stale, zero_variance")
    assert told["args"] == {
        "group": "a", "seq": 6, "lag": 4, "credit": 1, "message": "", "metric": "reward", "shared_value": 0.5,
    }  # fmt: skip


def test_weights_are_an_instant_a_span_and_a_counter() -> None:
    events = trace_of(records_of(START, ev.WeightsPublished(3), ev.RunClosed()))

    assert (named(events, "published 3")["ph"], named(events, "published 3")["ts"]) == ("i", 1e6)
    assert named(events, "version 0")["dur"] == 1e6
    counted = [(e["ts"], e["args"]["version"]) for e in events if e["name"] == "weight"]
    assert counted == [(0.0, 0), (1e6, 3)]


def test_counters_follow_the_groups() -> None:
    events = trace_of(records_of(START, *life("a"), *life("b")[:3], ev.GroupEvicted("a", ("stale",), 1, 0)))

    def values(name: str) -> list[int]:
        return [event["args"]["groups"] for event in events if event["name"] == name]

    assert values("in flight: train") == [1, 0, 1]
    assert values("sampleable: train") == [0, 1, 0]


def test_a_restart_shows_where_the_process_went_and_where_the_next_one_came() -> None:
    again = ev.RunRecovered({}, 1, 4, 2, 17)
    requeued = ev.GroupRequeued("a", "recovery")
    records = records_of(START, *life("a")[:2], ev.BatchRequested(1, "train", 1, 0), again, requeued, ev.RunClosed("x"))
    events = trace_of(records)
    first, second = (named(events, f"opening {number}") for number in (1, 2))

    assert (first["dur"], first["args"]["end"]) == (3e6, "its process was gone; this is the last that it wrote")
    assert (second["ts"], second["args"]["end"]) == (4e6, "closed")
    assert (named(events, "opened again")["ts"], named(events, "opened again")["args"]["torn_bytes"]) == (4e6, 17)
    assert named(events, "waits for 1 group")["args"]["end"] == "lost"
    assert named(events, "waits for 1 group")["dur"] == 0
    assert named(events, "requeued")["args"]["message"] == "recovery"
    assert named(events, "version 4")["args"]["by"] == "recovered"


def test_what_is_open_ends_with_the_log_and_is_marked(tmp_path: Path) -> None:
    records = records_of(
        START, *life("a"), *life("b")[:2], ev.BatchRequested(1, "train", 1, 0),
        ev.BatchSampled(1, 1, "train", ("a",), 0, (0,)), ev.BatchRequested(2, "train", 1, 0), ev.AdmissionHeld("full"),
    )  # fmt: skip
    events = trace_of(records)
    cut = {e["name"]: e["ts"] + e["dur"] for e in events if e["ph"] == "X" and e["args"].get("open_at_end")}

    assert sorted(cut) == [
        "a", "b", "batch 1", "full", "open", "opening 1", "running", "sampled", "version 0", "waits for 1 group",
    ]  # fmt: skip
    assert set(cut.values()) == {(len(records) - 1) * 1e6}
    assert write_trace(records, tmp_path / "t.json").open_at_end == len(cut)


def test_a_late_result_lies_with_its_session_or_among_those_that_have_left() -> None:
    late = ev.ResultFenced("a", 0, 1, "finished", "terminal")
    gone = ev.ResultFenced("a", 0, 1, "finished", "gone")
    events = trace_of(records_of(START, *life("a"), late, ev.GroupEvicted("a", ("stale",), 1, 0), gone))

    assert (named(events, "fenced: terminal")["pid"], named(events, "fenced: terminal")["tid"]) == (10, 2)
    assert named(events, "fenced: gone")["pid"] == RUN


def test_lanes_are_taken_again() -> None:
    records = records_of(START, *life("a"), ev.GroupEvicted("a", ("stale",), 1, 0), *life("b"), *life("c"))
    groups = [e for e in trace_of(records, tracks="lane") if e.get("cat") == "group" and e["ph"] == "X"]
    pids = {event["name"]: event["pid"] for event in groups}

    assert pids == {"a": 10, "b": 10, "c": 11}


def test_waits_that_overlap_lie_on_two_tracks() -> None:
    waits = [ev.BatchRequested(1, "train", 1, 0), ev.BatchRequested(2, "val", 2, 0), ev.BatchRequestCancelled(1)]
    events = trace_of(records_of(START, *waits, ev.BatchRequestCancelled(2)))

    assert named(events, "waits for 1 group")["tid"] != named(events, "waits for 2 groups")["tid"]


def test_a_clock_that_went_back_moves_what_follows_on() -> None:
    records = records_of(START, *life("a"))
    back = [*records[:3], *(ev.Record(r.seq, r.at_ns - 10**10, r.event) for r in records[3:])]
    events = trace_of(back)

    assert named(events, "the clock went back by 9.000 s")["args"] == {"seq": 4, "seconds": 9.0}
    assert [e["ts"] for e in events if e["ph"] == "X" and e["name"] == "finished"] == [2e6, 3e6]


def test_committed_groups_that_come_back_are_told_twice() -> None:
    events = trace_of(list(read_log(HISTORIES / "rollout")))
    begun = [event["name"] for event in events if event.get("cat") == "group" and event["ph"] == "X"]

    assert len(begun) > len(set(begun))


# Parts of a run --------------------------------------------------------------------------------------


def test_a_part_of_a_run_begins_with_what_was_open(driven: Path) -> None:
    whole = trace_of(list(read_log(driven)))
    records = list(read_log(driven))
    middle = len(records) // 2
    part = trace_of(records[middle:], book_at(records[:middle]))

    def groups(events: list[Trace]) -> dict[str, tuple[float, float]]:
        return {e["name"]: (e["ts"], e["dur"]) for e in events if e.get("cat") == "group" and e["ph"] == "X"}

    assert groups(part).keys() < groups(whole).keys()
    assert groups(part).items() <= groups(whole).items()


def test_a_run_whose_beginning_is_gone_is_told_from_its_snapshot(tmp_path: Path) -> None:
    result = call("trace", HISTORIES / "compacted", "-o", tmp_path / "t.json", "--json")

    assert result.exit_code == 0
    assert "events before 104 are gone" in result.stderr
    assert json.loads(result.stdout)["first_seq"] == 104
    assert problems(json.loads((tmp_path / "t.json").read_bytes())) == []


def test_a_run_that_is_being_written_is_told_as_far_as_it_is_durable(tmp_path: Path) -> None:
    path, seen = tmp_path / "run", list[int]()

    async def write() -> None:
        async with gs.open_run(path, group_size=1) as run:
            run.submit("the prompt").start(0).finish(gs.Trajectory(reward=1.0))
            await run.ledger.log.durable(run.book.last_seq)
            seen.append(run.book.last_seq)
            for name in ("trace.json", "again.json.gz"):
                written = await anyio.to_thread.run_sync(lambda name=name: call("trace", path, "-o", tmp_path / name))
                assert written.exit_code == 0
            tables = await anyio.to_thread.run_sync(lambda: call("export", path, "--parquet", tmp_path / "tables"))
            assert tables.exit_code == 0 or "pyarrow" in tables.stderr

    anyio.run(write)
    trace = json.loads((tmp_path / "trace.json").read_bytes())
    assert trace["otherData"]["last_seq"] == seen[0]
    assert problems(trace) == []


def test_a_file_system_without_hard_links_will_do(
    driven: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(source: Any, target: Any) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr("groupstate.inspect.writing.os.link", no_link)
    write_trace(read_log(driven), tmp_path / "t.json")

    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["t.json"]


# The command -----------------------------------------------------------------------------------------


def test_the_command_writes_a_file_that_is_valid(driven: Path, tmp_path: Path) -> None:
    result = call("trace", driven, "-o", tmp_path / "t.json")
    whole = json.loads((tmp_path / "t.json").read_bytes())

    assert result.exit_code == 0
    assert problems(whole) == []
    assert f"trace\ttrace events\t{len(whole['traceEvents'])}, " in result.stdout
    assert whole["otherData"]["last_seq"] == len(list(read_log(driven)))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_name_with_gz_is_packed_and_the_same_each_time(driven: Path, tmp_path: Path) -> None:
    for name in ("a.json.gz", "b.json.gz"):
        call("trace", driven, "-o", tmp_path / name)
    call("trace", driven, "-o", tmp_path / "plain.json")
    packed = (tmp_path / "a.json.gz").read_bytes()

    assert gzip.decompress(packed) == (tmp_path / "plain.json").read_bytes()
    assert packed == (tmp_path / "b.json.gz").read_bytes()


def test_from_and_to_bound_the_events(driven: Path, tmp_path: Path) -> None:
    result = call("trace", driven, "-o", tmp_path / "t.json", "--from", 10, "--to", 20, "--json")

    told = json.loads(result.stdout)
    assert (told["first_seq"], told["last_seq"]) == (10, 20)


def test_a_file_that_is_there_is_replaced_only_if_asked(driven: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    out.write_text("mine")
    refused = call("trace", driven, "-o", out)

    assert (refused.exit_code, out.read_text()) == (2, "mine")
    assert "t.json is there already" in refused.stderr
    assert call("trace", driven, "-o", out, "--force").exit_code == 0
    assert problems(json.loads(out.read_bytes())) == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--from", "9999"], "there is no event 9998: the log has events 1 to"),
        (["--from", "9", "--to", "8"], "event 8 (--to) comes before event 9 (--from)"),
        (["-o", "nowhere/t.json"], "nowhere/t.json can't be written: No such file"),
    ],
)
def test_what_cant_be_done_is_said(
    driven: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("trace", driven, "-o", "t.json", *options)

    assert result.exit_code == 2
    assert text in result.stderr
    assert not (tmp_path / "t.json").exists()


def test_an_empty_run_is_refused(kept: Keep, tmp_path: Path) -> None:
    result = call("trace", kept(), "-o", tmp_path / "t.json")

    assert result.exit_code == 2
    assert "has no event yet: nothing to write" in result.stderr
    with pytest.raises(BadInput, match="no events to make a trace of"):
        write_trace([], tmp_path / "t.json")


def test_a_damaged_run_leaves_no_file(driven: Path, tmp_path: Path) -> None:
    segment = min((driven / "log").glob("*.seg"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    out = tmp_path / "out"
    out.mkdir()
    result = call("trace", driven, "-o", out / "t.json")

    assert result.exit_code == 2
    assert "is damaged at byte" in result.stderr
    assert list(out.iterdir()) == []


def test_a_log_that_can_not_be_is_an_error_that_names_the_event() -> None:
    with pytest.raises(LogError, match=r"event 2 \(SessionStarted\) is about something that the log doesn't have"):
        list(trace_events(records_of(START, ev.SessionStarted("a", 0, 1))))
