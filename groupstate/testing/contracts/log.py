"""What every event log promises.

class TestMine(LogContract):
    @pytest_asyncio.fixture
    async def log(self):
        log = MyLog(...)
        yield log
        await log.aclose()

    async def reopened(self, log):
        await log.aclose()
        return MyLog(...)          # of the same records
"""

import asyncio
from collections.abc import Iterable

import pytest

from groupstate.core.events import (
    AnyEvent,
    BatchSampled,
    GroupEvicted,
    GroupSubmitted,
    PayloadRef,
    Record,
    RunStarted,
    SessionFinished,
    TrajectoryRecord,
    VersionSpan,
    WeightsPublished,
)
from groupstate.errors import LogError, LogFailed
from groupstate.log.port import EventLog
from groupstate.testing.contracts.base import Contract


def weights(first_seq: int, count: int = 1) -> list[Record]:
    """`count` records, numbered from `first_seq`."""
    return [Record(seq, 1000 + seq, WeightsPublished(seq)) for seq in range(first_seq, first_seq + count)]


def submitted(seq: int, prompt: PayloadRef) -> Record:
    """A record that names a payload."""
    return Record(seq, 1000 + seq, GroupSubmitted(f"g{seq}", 2, "train", 0, 1, "submit", prompt=prompt))


def seqs(records: Iterable[Record]) -> list[int]:
    return [record.seq for record in records]


class LogContract(Contract):
    """The tests of an event log. A subclass, or its module, has a fixture `log` that gives a new one."""

    async def reopened(self, log: EventLog) -> EventLog:
        """The log as its records are found again, after it was closed. Without it such tests are skipped."""
        pytest.skip("this log is gone with its process")

    async def test_a_new_log_is_empty(self, log: EventLog) -> None:
        assert (log.last_seq, log.durable_seq, list(log.read())) == (0, 0, [])

    async def test_what_was_posted_can_be_read_at_once(self, log: EventLog) -> None:
        log.post(weights(1, 3))

        assert log.last_seq == 3
        assert list(log.read()) == weights(1, 3)

    async def test_waiting_makes_what_was_posted_durable(self, log: EventLog) -> None:
        log.post(weights(1, 2))
        await log.durable(2)

        assert log.durable_seq == 2
        assert list(log.read()) == weights(1, 2)

    async def test_a_part_can_be_read(self, log: EventLog) -> None:
        for first in range(1, 20, 3):
            log.post(weights(first, 3))
        await log.durable(12)

        assert seqs(log.read(5, 9)) == [5, 6, 7, 8]
        assert seqs(log.read(20)) == [20, 21]
        assert seqs(log.read(14, 14)) == []
        assert seqs(log.read(22)) == []
        assert seqs(log.read(3, 100)) == list(range(3, 22))

    async def test_reading_shows_the_log_as_it_was_when_it_was_asked(self, log: EventLog) -> None:
        log.post(weights(1, 2))
        reading = log.read()
        log.post(weights(3, 2))
        await log.durable(4)

        assert seqs(reading) == [1, 2]

    async def test_an_event_comes_back_as_it_was(self, log: EventLog) -> None:
        spans = (VersionSpan(0, 3, 7), VersionSpan(3, 5, 8))
        trajectory = TrajectoryRecord(0, {"reward": 0.5, "huge": 1e300}, 3, 5, spans, ((1, 2),))
        events: list[AnyEvent] = [
            RunStarted("run", {"batch": {"size": 3}, "filter": None}, 1, 0),
            SessionFinished("g7", 1, 2, (trajectory,), PayloadRef(1, 10, 77)),
            GroupEvicted("g7", ("stale", "failed"), 3, 1, shared_value=0.25, metric="reward", message="é\n"),
            BatchSampled(1, 1, "train", ("g1", "g2"), 3, (0, 1)),
        ]
        records = [Record(seq, 10**18 + seq, event) for seq, event in enumerate(events, 1)]
        log.post(records)
        await log.durable(4)

        assert list(log.read()) == records

    async def test_an_event_that_could_not_be_read_back_is_refused_and_nothing_is_posted(self, log: EventLog) -> None:
        log.post(weights(1))
        with pytest.raises(LogError):
            log.post([*weights(2), submitted(3, "not a reference")])  # type: ignore[arg-type]
        log.post(weights(2))
        await log.durable(2)

        assert list(log.read()) == weights(1, 2)

    async def test_an_event_that_cannot_be_encoded_is_refused(self, log: EventLog) -> None:
        with pytest.raises(LogError):
            log.post([Record(1, 1, RunStarted("run", {"key": object()}, 1, 0))])

        assert log.last_seq == 0

    async def test_a_wrong_number_is_a_fault_of_the_program(self, log: EventLog) -> None:
        with pytest.raises(AssertionError):
            log.post(weights(2))

    async def test_posting_nothing_changes_nothing(self, log: EventLog) -> None:
        log.post([])

        assert log.last_seq == 0

    async def test_what_is_durable_needs_no_wait(self, log: EventLog) -> None:
        log.post(weights(1, 2))
        await log.durable(2)
        await log.durable(1)
        await log.durable(0)

    async def test_an_event_can_be_waited_for_before_it_is_posted(self, log: EventLog) -> None:
        waiter = asyncio.ensure_future(log.durable(2))
        await asyncio.sleep(0)
        log.post(weights(1))
        await log.durable(1)
        assert not waiter.done()
        log.post(weights(2))
        await waiter

        assert log.durable_seq == 2

    async def test_cancelling_one_waiter_leaves_the_others_waiting(self, log: EventLog) -> None:
        waiters = [asyncio.ensure_future(log.durable(1)) for _ in range(3)]
        await asyncio.sleep(0)
        waiters[1].cancel()
        log.post(weights(1))
        results = await asyncio.gather(*waiters, return_exceptions=True)

        assert [type(result) for result in results] == [type(None), asyncio.CancelledError, type(None)]

    async def test_a_cancelled_wait_does_not_take_the_event_back(self, log: EventLog) -> None:
        log.post(weights(1))
        waiter = asyncio.ensure_future(log.durable(1))
        waiter.cancel()
        await asyncio.wait([waiter])
        log.post(weights(2))
        await log.durable(2)

        assert seqs(log.read()) == [1, 2]

    async def test_many_tasks_can_wait_at_once(self, log: EventLog) -> None:
        async def one(seq: int) -> bool:
            log.post(weights(seq))
            await log.durable(seq)
            return log.durable_seq >= seq

        assert all(await asyncio.gather(*(one(seq) for seq in range(1, 101))))

    async def test_closing_keeps_what_was_posted(self, log: EventLog) -> None:
        log.post(weights(1, 5))
        await log.aclose()

        assert log.durable_seq == 5
        await log.durable(5)

    async def test_closing_twice_is_closing_once(self, log: EventLog) -> None:
        await log.aclose()
        await log.aclose()

    async def test_a_closed_log_refuses_posts(self, log: EventLog) -> None:
        await log.aclose()
        with pytest.raises(LogFailed):
            log.post(weights(1))

        assert log.last_seq == 0

    async def test_a_closed_log_refuses_waits_for_what_will_not_come(self, log: EventLog) -> None:
        log.post(weights(1))
        await log.aclose()
        with pytest.raises(LogFailed):
            await log.durable(2)

    async def test_closing_tells_those_who_wait_for_what_will_not_come(self, log: EventLog) -> None:
        waiter = asyncio.ensure_future(log.durable(1))
        await asyncio.sleep(0)
        await log.aclose()
        with pytest.raises(LogFailed):
            await waiter

    async def test_a_payload_is_there_before_the_event_that_names_it(self, log: EventLog) -> None:
        ref = log.payloads.put(b"tokens")
        log.post([submitted(1, ref)])
        await log.durable(1)

        assert log.payloads.get(ref) == b"tokens"

    async def test_what_was_durable_is_there_when_it_is_opened_again(self, log: EventLog) -> None:
        ref = log.payloads.put(b"tokens")
        records = [*weights(1, 2), submitted(3, ref)]
        log.post(records)
        await log.durable(3)
        again = await self.reopened(log)

        assert list(again.read()) == records
        assert (again.last_seq, again.durable_seq) == (3, 3)
        assert again.payloads.get(ref) == b"tokens"
        await again.aclose()

    async def test_a_log_that_is_opened_again_goes_on_where_it_ended(self, log: EventLog) -> None:
        ref = log.payloads.put(b"tokens")
        log.post([*weights(1, 2), submitted(3, ref)])
        await log.durable(3)
        again = await self.reopened(log)
        other = again.payloads.put(b"others")
        again.post([submitted(4, other)])
        await again.durable(4)

        assert other.key == ref.key + 1
        assert seqs(again.read()) == [1, 2, 3, 4]
        await again.aclose()
