"""Runs in which something went wrong: each command names the cause, to somebody who has only the log."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from groupstate.cli import main
from groupstate.core import events as ev
from groupstate.inspect.checking import checked
from groupstate.inspect.words import in_words
from groupstate.log.reading import read_log
from tests.broken_runs.make import HERE, make
from tests.broken_runs.stories import STORIES


def call(*args: Any) -> Result:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def lines(*args: Any) -> list[str]:
    result = call(*args)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout.splitlines()


def told(*args: Any) -> Any:
    return json.loads(call(*args, "--json").stdout)


def only(kind: str, run: Path) -> list[int]:
    return [int(line.split("\t")[0]) for line in lines("log", run, "--kind", kind)]


def events(run: Path) -> Iterator[str]:
    for record in read_log(run):
        if not isinstance(record.event, ev.RunStarted | ev.RunRecovered):
            yield f"{record.seq} {record.at_ns} {in_words(record.event)}"


@pytest.mark.parametrize("name", STORIES)
def test_they_are_what_their_script_makes(name: str, tmp_path: Path) -> None:
    make(name, tmp_path / name)

    assert list(events(HERE / name)) == list(events(tmp_path / name)), "python -m tests.broken_runs.make"


def test_each_story_is_kept_and_no_other_run() -> None:
    assert {marker.parent.name for marker in HERE.glob("*/run.json")} == set(STORIES)


def test_the_log_of_a_run_that_only_went_badly_is_sound() -> None:
    sound = [name for name in STORIES if name != "double_sample"]

    assert [checked(HERE / name).violations for name in sound] == [()] * len(sound)


# A hang ----------------------------------------------------------------------------------------------

HANG = HERE / "hang"


def test_show_of_a_hang_names_the_group_the_session_and_how_old_the_log_is() -> None:
    out = lines("show", HANG)

    assert any(line.startswith("run\tlast event\t") for line in out)
    assert "why it waits\ttrain\t2 of 3 groups are sampleable" in out
    assert "in flight\tp6\trunning\t0\t5.000 s\t1.000 s\t1\tnone" in out


def test_what_a_hang_waits_for_and_what_would_end_it() -> None:
    seen = told("why", HANG, "--wait", told("show", HANG)["header"]["seq"])

    assert (seen["ended_seq"], seen["ended"]) == (0, "it waits still, at the end of the log")
    assert [(group["group_id"], group["open_sessions"]) for group in seen["at_end"]["in_flight"]] == [("p6", [1])]
    assert seen["at_end"]["unblocked_by"][0].startswith("sessions in flight must end")
    out = lines("why", HANG, "--wait", 41)
    assert any(line.startswith("end\tlast event\t") and line.endswith(" ago") for line in out)
    assert "in flight at the end\tp6\trunning\t0\t1.000 s\tsession 1 open" in out


def test_the_story_of_the_group_that_hangs_names_the_session_that_keeps_it() -> None:
    out = lines("why", HANG, "p6")

    assert "p6\theld up by\twaits for session 1 (attempt 1, open for 5.000 s)" in out
    assert out[-1].startswith("p6\tlast event\t"), "the log says nothing of how long it has been since"


# A straggler -----------------------------------------------------------------------------------------

STRAGGLER = HERE / "straggler"


def test_the_wait_for_a_straggler_names_its_group_and_session() -> None:
    waits = {seq: told("why", STRAGGLER, "--wait", seq) for seq in only("batch_requested", STRAGGLER)}
    (longest,) = [wait for wait in waits.values() if wait["lasted_s"] > 60]

    assert longest["let_go"].endswith("p5; session 0 ended last, 4 min 57 s after the one before it")
    assert [step["sampleable"] for step in longest["steps"]][-2:] == [2, 3]
    assert (longest["let_go_seq"], longest["ended_seq"], longest["lasted_s"]) == (43, 44, 300.0)


def test_the_batch_and_the_story_of_a_straggler_lead_to_it() -> None:
    out = lines("why", STRAGGLER, "--batch", 2)

    assert out[0].endswith("3 groups of 3 sampleable ones, after 5 min 0 s, at version 1; 0 groups in flight")
    assert "batch 2\tits wait\t`why --wait 25` tells what for" in out
    assert lines("why", STRAGGLER, "p5")[-1] == (
        "p5\theld up by\tsession 0 ended last, 4 min 57 s after the one before it"
    )


# A source that ran dry -------------------------------------------------------------------------------

DRY = HERE / "dry_source"


def test_show_says_that_the_source_is_exhausted_and_what_the_filter_took() -> None:
    out = lines("show", DRY)

    assert "run\tsource\t8 prompts drawn, exhausted" in out
    assert "totals\tevicted/zero_variance\t3" in out


def test_the_wait_that_came_to_nothing_names_the_source_and_the_counts() -> None:
    (seq,) = only("batch_request_cancelled", DRY)

    assert told("why", DRY, "--wait", seq)["ended"] == (
        "it raised NotEnoughGroups: the source was exhausted at event 58, 1 of 2 groups were sampleable, 0 in flight; "
        "evicted since the last batch: zero_variance 1"
    )
    assert told("why", DRY, "--wait", seq)["at_end"]["unblocked_by"] == [
        "the source is exhausted, 1 group short: sample a smaller batch"
    ]


def test_the_story_of_a_filtered_group_says_that_no_refill_came() -> None:
    assert "zero_variance: reward is 1 in all 2 values" in "\n".join(lines("why", DRY, "p7"))
    assert not any("in its place" in line for line in lines("why", DRY, "p7"))


# A starved data set ----------------------------------------------------------------------------------

STARVED = HERE / "starved_dataset"


def test_show_and_the_log_name_the_data_set() -> None:
    assert "datasets\tproofs\t15 evicted and 15 submitted" in lines("show", STARVED)
    assert [line.split("\t")[3] for line in lines("log", STARVED, "--kind", "dataset_starved")] == [
        "proofs: none sampled for 2 versions, 1 group open, 7 evicted",
        "proofs: none sampled for 4 versions, 1 group open, 14 evicted",
    ]


def test_the_batches_and_the_stories_say_why_nothing_of_it_is_taken() -> None:
    gone = told("why", STARVED, "--batch", 2)["evicted"]

    assert [group["group_id"] for group in gone] == ["proof2", "proof3", "proof4", "proof5", "proof6"]
    assert {(tuple(group["reasons"]), group["shared_value"]) for group in gone} == {(("zero_variance",), 0.0)}
    assert any("zero_variance: reward is 0 in all 2 values" in line for line in lines("why", STARVED, "proof1"))


# A late write ----------------------------------------------------------------------------------------

LATE = HERE / "late_write"


def test_late_writes_are_counted_and_told_with_their_attempt() -> None:
    assert "totals\tfenced\t2" in lines("show", LATE)
    story = [line.split("\t")[4] for line in lines("why", LATE, "g1")[1:-2]]

    assert "session 0 started, attempt 1 on worker-a" in story
    assert "started over (recovery): what it had is dropped, attempt 2 is next" in story
    assert (
        "a result of session 0 (finished, attempt 1) changed nothing: another attempt is the session's latest" in story
    )
    assert "a result of session 1 (finished, attempt 1) changed nothing: the group has left the book" in story


def test_late_writes_do_not_count() -> None:
    rewards = [
        record.event.trajectories[0].metrics["reward"]
        for record in read_log(LATE)
        if isinstance(record.event, ev.SessionFinished)
    ]

    assert rewards == [0.0, 1.0]
    assert told("why", LATE, "--batch", 1)["taken"][0]["why"] == "finished, 2 of 2 sessions finished"


# A double sample -------------------------------------------------------------------------------------

DOUBLE = HERE / "double_sample"


def test_check_of_a_double_sample_cites_both_batches() -> None:
    result = call("check", DOUBLE)

    assert result.exit_code == 1
    assert result.stdout.splitlines()[:3] == [
        "event 17: invariant 4: batch 2 takes group 'g2', which batch 1 holds since event 15",
        "\tevent 15\tbatch_sampled\tbatch 1 for request 1, train, version 0: g1 g2 (lag 0 0)",
        "\tevent 17\tbatch_sampled\tbatch 2 for request 2, train, version 0: g2 g3 (lag 0 0)",
    ]


def test_the_page_of_a_double_sample_is_written_and_says_where_to_ask_what_is_wrong(tmp_path: Path) -> None:
    result = call("report", DOUBLE, "-o", tmp_path / "page.html")

    assert result.exit_code == 1
    assert (tmp_path / "page.html").is_file()
    assert result.stderr == f"groupstate: 2 things are wrong with this log. `groupstate check {DOUBLE}` says what\n"


def test_why_of_the_second_batch_says_who_holds_the_group() -> None:
    taken = told("why", DOUBLE, "--batch", 2)["taken"]

    assert taken[0]["why"] == "batch 1 holds it already: both can't be, see `groupstate check`"


@pytest.mark.parametrize("command", [["show"], ["why", "g2"], ["why", "--wait", "17"]])
def test_what_replays_the_whole_log_refuses_it_and_names_the_event(command: list[str]) -> None:
    result = call(command[0], DOUBLE, *command[1:])

    assert (result.exit_code, result.stdout) == (2, "")
    assert "event 17 (BatchSampled) can't follow what the log says before it: group 'g2' is sampled" in result.stderr
    assert "`groupstate check` lists everything" in result.stderr
    assert "`groupstate show RUN --at 16` how it stood before" in result.stderr
    assert call("show", DOUBLE, "--at", "16").exit_code == 0
