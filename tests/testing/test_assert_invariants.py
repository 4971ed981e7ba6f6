"""`assert_invariants`: what it takes, and that its text says which invariant, which events and what would be right."""

from pathlib import Path

import pytest

from groupstate import Rules, open_run
from groupstate.core import events as ev
from groupstate.errors import BadInput, NotARun
from groupstate.log.file import FileLog
from groupstate.testing import InvariantBroken, assert_invariants, play

GOOD = ("submit a/1", "start a", "finish a reward=1")


def lies(*events: ev.AnyEvent) -> list[ev.Record]:
    """A true log with these after it."""
    records = list(play(*GOOD).log.read())
    last = records[-1].seq
    return [*records, *(ev.Record(last + at, 0, event) for at, event in enumerate(events, start=1))]


def broken(log: object) -> InvariantBroken:
    with pytest.raises(InvariantBroken) as caught:
        assert_invariants(log)  # type: ignore[arg-type]
    return caught.value


def test_a_true_log_passes_however_it_is_given() -> None:
    story = play(*GOOD)

    assert_invariants(story.log)
    assert_invariants(list(story.log.read()))
    assert_invariants(story.log.read())


async def test_a_folder_passes_too_also_while_it_is_written(tmp_path: Path) -> None:
    async with open_run(tmp_path / "run", rules=Rules(stall_s=0)) as run:
        run.submit("a task", n=1)
        await run.checkpoint()

        assert_invariants(tmp_path / "run")
        assert_invariants(run.ledger.log)
    assert_invariants(str(tmp_path / "run"))


async def test_a_folder_that_lies_is_found(tmp_path: Path) -> None:
    log = FileLog.create(tmp_path / "run", inline=True)
    log.post(lies(ev.GroupFinished("a")))
    await log.aclose()

    error = broken(tmp_path / "run")

    assert error.violations[0].invariant == 2


def test_the_text_names_invariant_events_and_what_would_be_right() -> None:
    error = broken(
        lies(ev.BatchSampled(1, 1, "train", ("a",), 0, (0,)), ev.BatchSampled(2, 2, "train", ("a",), 0, (0,)))
    )

    assert [violation.invariant for violation in error.violations][:1] == [4] or error.violations
    text = str(error)
    assert "invariant 4 is broken: a group is in one batch at most, whole and with a trajectory" in text
    assert "batch 2 takes group 'a', which batch 1 holds since event 6" in text
    assert "     6  batch_sampled" in text
    assert "right would be: a batch takes groups that are whole, sampleable and in no other batch" in text


def test_the_events_that_cannot_all_be_true_are_shown_however_long_ago_they_were() -> None:
    fenced = [ev.ResultFenced("a", 0, 1, "finished", "terminal")] * 20
    text = str(broken(lies(*fenced, ev.GroupFinished("a"))))

    assert "     5  group_finished  a\n" in text
    assert "    26  group_finished  a\n" in text
    assert text.count("result_fenced") == 2 * 5


def test_a_long_list_is_cut_but_not_in_the_attribute() -> None:
    submissions = [ev.GroupSubmitted("a", 1, "train", 0, 1, "submit") for _ in range(9)]

    error = broken(lies(*submissions))

    assert len(error.violations) > 5
    assert f"and {len(error.violations) - 5} more" in str(error)


@pytest.mark.parametrize("given", [7, None, ["no record"]])
def test_what_is_no_log_is_refused(given: object) -> None:
    with pytest.raises(BadInput, match=r"has no invariants; give a log \(run\.ledger\.log, story\.log\)"):
        assert_invariants(given)  # type: ignore[arg-type]


def test_a_folder_that_is_no_run_is_told_as_that(tmp_path: Path) -> None:
    with pytest.raises(NotARun):
        assert_invariants(tmp_path)
