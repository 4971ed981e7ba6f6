"""The only writer of the log: order, atomicity, and what a failed write leaves."""

import asyncio
import signal

import anyio
import pytest

from groupstate import Rules, Trajectory, open_run
from groupstate.core import events as ev
from groupstate.core.folding import replayed
from groupstate.errors import DuplicateGroup, IllegalTransition, LogFailed, Unsupported, WeightVersionError
from groupstate.log.memory import MemoryLog
from groupstate.runtime.ledger import CANCELLED, Ledger
from groupstate.runtime.opening import _need_asyncio
from groupstate.runtime.recovery import start
from groupstate.simulate.loop import run_virtual
from tests.runtime.scenes import events, opened, ready, virtual


def ledger(**rules: object) -> Ledger:
    """A ledger with a group `g` of two sessions, both under way."""
    made = Ledger(MemoryLog(), Rules(**rules), clock_ns=iter(range(1, 1_000_000)).__next__)
    start(made, run_id="r", weight_version=0, seed=0)
    made.record(ev.GroupSubmitted("g", 2, "train", 0, 1, "submit"))
    made.start("g", 0)
    made.start("g", 1)
    return made


def test_the_last_end_and_the_terminal_event_are_one_post():
    made = ledger()
    posts = []
    original = made.log.post
    made.log.post = lambda records: (posts.append([type(r.event).__name__ for r in records]), original(records))

    for session in (0, 1):
        made.finish("g", session, 1, Trajectory(reward=1.0))

    assert posts == [["SessionFinished"], ["SessionFinished", "GroupFinished"]]


def waiting() -> Ledger:
    """A ledger with a group `w` of three sessions, none of them under way."""
    made = ledger()
    made.record(ev.GroupSubmitted("w", 3, "train", 0, 1, "submit"))
    return made


def test_sessions_that_begin_together_are_one_post_of_one_time():
    made = waiting()
    posts = []
    original = made.log.post
    made.log.post = lambda records: (posts.append(list(records)), original(records))

    assert made.start_all("w", version=3)

    assert [[record.event for record in post] for post in posts] == [
        [ev.SessionStarted("w", session, 1, "", 3) for session in range(3)]
    ]
    assert len({record.at_ns for record in posts[0]}) == 1
    assert [session.state for session in made.book.group("w").sessions] == ["open"] * 3


def test_a_requeued_group_begins_with_the_attempts_that_are_due():
    made = waiting()
    made.record(ev.GroupRequeued("w"))

    assert made.start_all("w")

    assert [session.attempt for session in made.book.group("w").sessions] == [2, 2, 2]


@pytest.mark.parametrize(
    "step",
    [
        lambda made: made.start("w", 1),
        lambda made: made.fail("w", 1, None, "error"),
        lambda made: made.end("w", CANCELLED),
    ],
    ids=["one began", "one has ended", "all have ended"],
)
def test_sessions_do_not_begin_together_where_not_all_of_them_wait(step):
    made = waiting()
    step(made)
    before = made.book.digest(), made.log.last_seq

    assert not made.start_all("w")

    assert (made.book.digest(), made.log.last_seq) == before


def test_sessions_of_a_group_that_has_left_do_not_begin():
    made = waiting()

    assert not made.start_all("nobody")


@pytest.mark.parametrize("where", ["observers", "listeners"])
def test_what_an_observer_raises_is_raised_once_the_book_is_as_the_log_has_it(where):
    made = waiting()
    seen = []

    def note(record):
        seen.append(record.seq)
        raise RuntimeError(f"at {record.seq}")

    if where == "observers":
        made.observers.append(note)
    else:
        made.listen(note, [ev.SessionStarted])
    before = made.log.last_seq

    with pytest.raises(RuntimeError, match=rf"^at {before + 1}\b") as raised:
        made.start_all("w")

    assert raised.value.__notes__ == [f"then RuntimeError was raised too: at {before + more}" for more in (2, 3)]
    assert seen == [before + 1, before + 2, before + 3]
    assert made.book.digest() == replayed(made.log.read()).digest()
    made.observers.clear()
    made.unlisten(note, [ev.SessionStarted])
    assert made.finish("w", 0, None, Trajectory(reward=1.0)) is None


def test_an_interrupt_within_a_post_is_not_lost_behind_an_error():
    made = waiting()
    faults = iter([RuntimeError("broken"), KeyboardInterrupt(), RuntimeError("broken again")])

    def note(record):
        raise next(faults)

    made.observers.append(note)

    with pytest.raises(KeyboardInterrupt):
        made.start_all("w")

    assert made.book.last_seq == made.log.last_seq


def test_an_event_that_cannot_happen_is_refused_before_it_is_written():
    made = ledger()
    before = made.book.digest(), made.log.last_seq

    with pytest.raises(IllegalTransition):
        made.record(ev.GroupEvicted("g", ("stale",), 0, 1))
    with pytest.raises(DuplicateGroup):
        made.record(ev.GroupSubmitted("g", 2, "train", 0, 1, "submit"))

    assert (made.book.digest(), made.log.last_seq) == before


async def test_a_write_that_fails_leaves_the_book_where_it_was():
    made = ledger()
    made.finish("g", 0, 1, Trajectory(reward=1.0))
    before = made.book.digest()
    await made.log.aclose()

    with pytest.raises(LogFailed):
        made.finish("g", 1, 1, Trajectory(reward=1.0))

    assert made.book.digest() == before
    assert made.book.group("g").phase == "running"


def test_a_listener_hears_of_its_kinds_alone_after_the_observers():
    made, told = ledger(), []
    made.observers.append(lambda record: told.append(("observer", type(record.event).__name__)))

    def listener(record: ev.Record) -> None:
        told.append(("listener", type(record.event).__name__))

    made.listen(listener, (ev.SessionFinished, ev.GroupFinished))
    made.finish("g", 0, 1, Trajectory(reward=1.0))
    made.unlisten(listener, (ev.SessionFinished, ev.WeightsPublished))
    made.finish("g", 1, 1, Trajectory(reward=1.0))

    ends = ["SessionFinished", "SessionFinished", "GroupFinished"]
    assert [name for who, name in told if who == "observer"] == ends
    assert [name for who, name in told if who == "listener"] == ["SessionFinished", "GroupFinished"]
    assert told[:2] == [("observer", "SessionFinished"), ("listener", "SessionFinished")]


def test_a_listener_that_stops_listening_costs_no_other_its_event():
    made, told = ledger(), []

    def once(record: ev.Record) -> None:
        told.append("once")
        made.unlisten(once, (ev.SessionFinished,))

    made.listen(once, (ev.SessionFinished,))
    made.listen(lambda record: told.append("always"), (ev.SessionFinished,))
    for session in (0, 1):
        made.finish("g", session, 1, Trajectory(reward=1.0))

    assert told == ["once", "always", "always"]


def test_a_step_is_whole_once_everybody_was_told_of_all_of_it():
    made, seen = ledger(), []
    made.observers.append(lambda record: seen.append((made.whole_seq, record.seq)))

    for session in (0, 1):
        made.finish("g", session, 1, Trajectory(reward=1.0))

    assert seen == [(4, 5), (5, 6), (5, 7)]
    assert made.whole_seq == made.log.last_seq == 7


def test_observers_see_each_record_after_it_was_applied():
    made = ledger()
    seen = []
    made.observers.append(lambda record: seen.append((type(record.event).__name__, made.book.last_seq == record.seq)))

    for session in (0, 1):
        made.finish("g", session, 1, Trajectory(reward=1.0))

    assert seen == [("SessionFinished", True), ("SessionFinished", True), ("GroupFinished", True)]


def test_results_may_come_without_an_attempt_and_then_mean_the_one_that_is_due():
    made = ledger()

    assert made.finish("g", 0, None, Trajectory(reward=1.0)) is None
    assert made.fail("g", 1, None, "error") is None
    assert made.book.group("g").phase == "failure"


def test_the_payload_is_stored_before_the_event_that_names_it():
    made = ledger()

    made.finish("g", 0, 1, Trajectory(text="hello", reward=1.0))

    (event,) = [record.event for record in made.log.read() if isinstance(record.event, ev.SessionFinished)]
    assert b"hello" in made.log.payloads.get(event.payload)


def test_publishing_raises_the_version_and_never_lowers_it():
    made = ledger()
    made.publish(3)
    made.publish(3)

    with pytest.raises(WeightVersionError, match=r"below the current version 3 of lineage 1.*resume_at=mark"):
        made.publish(2)

    published = [record.event for record in made.log.read() if isinstance(record.event, ev.WeightsPublished)]
    assert [event.weight_version for event in published] == [3]


def test_a_short_message_is_kept_as_it_is_and_a_long_one_cut():
    made = ledger()
    made.fail("g", 0, 1, "error", "x" * 2000)
    made.fail("g", 1, 1, "error", "x" * 2001)

    messages = [session.message for session in made.book.group("g").sessions]
    assert messages[0] == "x" * 2000
    assert messages[1].endswith("x ... (cut)")
    assert len(messages[1]) <= 2000


def test_no_delay_is_promised_for_a_group_that_is_given_up():
    made = ledger(attempts_max=5)
    made.endings["g"] = CANCELLED

    made.fail("g", 0, 1, "error", retryable=True)

    assert made.book.group("g").sessions[0].state == "failed"


def test_a_requeue_does_not_use_up_tries():
    made = ledger(attempts_max=2)
    made.record(ev.GroupRequeued("g", "asked for"))
    made.start("g", 0)
    made.fail("g", 0, 2, "error", retryable=True)

    assert made.book.group("g").sessions[0].state == "waiting"


def test_a_requeue_gives_back_tries_that_were_used_up_before_it():
    made = ledger(attempts_max=2, retry_delay_s=4)
    made.fail("g", 0, 1, "error", retryable=True)
    made.record(ev.GroupRequeued("g", "asked for"))
    made.fail("g", 0, 3, "error", retryable=True)

    assert made.book.group("g").sessions[0].state == "waiting"
    delays = [r.event.retry_in_s for r in made.log.read() if isinstance(r.event, ev.SessionFailed)]
    assert delays == [4, 4]


@virtual
async def test_the_log_of_a_busy_run_tells_the_same_three_times(loop):
    async with opened(loop, rules=Rules(filter_metric="reward", lag_max=1)) as run:
        for step in range(1, 4):
            ready(run, f"a{step}", f"b{step}", n=2)
            await run.commit(await run.sample(1, weight_version=step))
        records = list(run.ledger.log.read())

    assert len({replayed(records).digest() for _ in range(3)}) == 1


def test_the_same_run_writes_the_same_log():
    async def drive(loop):
        async def session(ctx):
            await anyio.sleep(1 + (ctx.session * 7 + ctx.prompt.content) % 5)
            if ctx.prompt.content % 4 == 3:
                raise ValueError("no")
            return Trajectory(reward=float(ctx.session % 2) if ctx.prompt.content % 3 else 1.0)

        rules = Rules(filter_metric="reward", lag_max=1)
        async with opened(loop, rules=rules, source=range(200), session=session, group_size=4) as run:
            for step in range(6):
                batch = await run.sample(3, weight_version=step)
                for group in list(run.book.in_phase("running"))[:2]:
                    run.cancel(group.group_id)
                await run.commit(batch)
            for group in list(run.book.in_phase("running"))[:1]:
                run.requeue(group.group_id)
            await anyio.sleep(2)
        return list(run.ledger.log.read())

    first, *others = [run_virtual(drive) for _ in range(4)]

    assert all(other == first for other in others)


@virtual
async def test_a_new_log_begins_with_its_rules_and_seed(loop):
    rules = Rules(lag_max=3)
    async with opened(loop, rules=rules, seed=7, weight_version=2) as run:
        (begin,) = events(run)

    assert (begin.rules, begin.seed, begin.weight_version, begin.lineage) == (rules.to_dict(), 7, 2, 1)


# The loop and the platform ----------------------------------------------------------------------------


def test_outside_of_asyncio_the_text_says_how_to_start():
    with pytest.raises(Unsupported, match=r"runs on asyncio.*backend='asyncio'"):
        _need_asyncio()


def test_under_another_event_loop_a_run_cannot_be_opened():
    async def main() -> None:
        await open_run().__aenter__()

    # What trio's loop looks like to asyncio: a coroutine that is driven by somebody else.
    with pytest.raises(Unsupported):
        main().send(None)


async def test_a_platform_without_its_signals_is_refused(monkeypatch):
    assert asyncio.get_running_loop()
    monkeypatch.delattr(signal, "SIGKILL")

    with pytest.raises(Unsupported, match="Linux or macOS"):
        _need_asyncio()
