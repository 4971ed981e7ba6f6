"""Every call of a logger in the source: names are constants, values have known names, and nothing private is said."""

from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from groupstate import RetryableError, Rules, Trajectory, open_run
from groupstate.core import events as ev
from groupstate.errors import SampleError
from groupstate.testing.notation import Story
from tools.log_events import PART, Said, calls, said

WHO = {"group", "session", "attempt", "seq"}
COUNTS = {
    *("count", "credit", "evicted", "lag", "lineage", "open_groups", "position", "reported", "requeued", "retried"),
    *("servers_left", "submitted", "torn_bytes", "versions", "weight_version", "engine_version", "run_version"),
    *(
        "deadline_s",
        "dropped_count",
        "failed_count",
        "finished",
        "groups",
        "keys",
        "logged_count",
        "queued",
        "returncode",
    ),
}
NAMES = {
    *(
        "call",
        "dataset",
        "kind",
        "known",
        "path",
        "reason",
        "reasons",
        "result",
        "selection",
        "signal",
        "source",
        "url",
    ),
    *("instead", "key", "log", "option", "other", "part", "partition", "tracker", "version"),
}
TEXTS = {"consequence", "error", "explanation", "help", "problem", "text", "value"}
"""May hold what a session, a prompt or a server said: only in warnings and errors."""

SECRET = "what only the prompt knows"


def problems(call: Said, others: list[Said]) -> list[str]:
    keys, found = set(call.keys), []
    if call.event is None:
        return ["its name isn't a constant"]
    if unknown := keys - WHO - COUNTS - NAMES - TEXTS:
        found.append(f"unknown values: {', '.join(sorted(unknown))}")
    if "session" in keys and not {"group", "attempt"} <= keys:
        found.append("a session without its group and attempt")
    if call.level == "info" and keys & TEXTS:
        found.append(f"text below a warning: {', '.join(sorted(keys & TEXTS))}")
    for other in others:
        if other.event == call.event and (other.level, set(other.keys)) != (call.level, keys):
            found.append(f"another event of this name in {other.where}")
    return found


def test_every_event_has_one_name_known_values_and_says_who() -> None:
    every = said()

    assert len(every) > 40
    assert {call.where: found for call in every if (found := problems(call, every))} == {}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('log.info(f"{a} failed")', "its name isn't a constant"),
        ('log.info("x", gruop=1)', "unknown values: gruop"),
        ('log.info("x", **who)', "unknown values: **"),
        ('log.warning("x", group=1, session=1)', "a session without its group and attempt"),
        ('log.info("x", error=1)', "text below a warning: error"),
        ('log.warning("x", group=1)', "another event of this name in elsewhere"),
    ],
)
def test_a_call_that_breaks_a_rule_is_noticed(line: str, problem: str) -> None:
    (call,) = calls(line, "here")

    assert problems(call, [Said("elsewhere", "info", "x", ())])[:1] == [problem]


def test_the_list_of_events_is_up_to_date() -> None:
    text = PART.page.read_text(encoding="utf-8")

    assert PART.rewritten(text) == text, "run `make docs`"


async def test_what_is_said_of_a_run_in_which_much_fails_says_who_and_nothing_private() -> None:
    async def session(ctx: Any) -> Trajectory:
        if ctx.session == 0 and ctx.attempt == 1:
            raise RetryableError(SECRET)
        if ctx.session == 1:
            raise ValueError(SECRET)
        return Trajectory(reward=float(ctx.session), text=SECRET)

    rules = Rules(attempts_max=2, retry_delay_s=0, failure="refill")
    try:
        with capture_logs() as heard:
            async with open_run(rules=rules, source=[SECRET] * 3, session=session, group_size=3) as run:
                with pytest.raises(SampleError):
                    await run.sample(1, timeout_s=60)
                run.ledger.fail("g1", 1, 1, "error", SECRET)
                records = {record.seq: record.event for record in run.ledger.log.read()}
    finally:
        structlog.reset_defaults()

    names = {entry["event"] for entry in heard}
    assert {"session failed", "group evicted", "source exhausted", "result fenced"} <= names
    for entry in heard:
        if entry["log_level"] == "info":
            assert SECRET not in str(entry)
    kinds = {"session failed": ev.SessionFailed, "group evicted": ev.GroupEvicted, "result fenced": ev.ResultFenced}
    for entry in heard:
        if entry["event"] in kinds:
            event: Any = records[entry["seq"]]
            assert isinstance(event, kinds[entry["event"]])
            assert event.group_id == entry["group"]
            assert "session" not in entry or (event.session, event.attempt) == (entry["session"], entry["attempt"])


def test_a_failed_session_that_ends_its_group_says_its_own_event() -> None:
    story = Story().tell("submit a/1", "start a")
    try:
        with capture_logs() as heard:
            story.tell("fail a")
    finally:
        structlog.reset_defaults()

    (entry,) = heard
    assert (entry["event"], entry["seq"], story.book.last_seq) == ("session failed", 4, 5)
