"""What every event log promises, held against each of them."""

import asyncio

import pytest

from groupstate.core.events import (
    EVENT_TYPES,
    BatchSampled,
    GroupEvicted,
    PayloadRef,
    Record,
    RunStarted,
    SessionFinished,
    TrajectoryRecord,
    VersionSpan,
)
from groupstate.errors import DamagedPayload, LogError, LogFailed
from groupstate.log.file import FileLog
from groupstate.log.memory import MemoryLog

from .scenes import seqs, submitted, weights


@pytest.fixture(params=["memory", "file", "file inline"])
async def log(request, tmp_path):
    made = (
        MemoryLog() if request.param == "memory" else FileLog.create(tmp_path / "run", inline="inline" in request.param)
    )
    yield made
    try:
        await made.aclose()
    except LogFailed:
        pass


async def test_a_new_log_is_empty(log):
    assert (log.last_seq, log.durable_seq, list(log.read())) == (0, 0, [])


async def test_what_was_posted_can_be_read_at_once(log):
    log.post(weights(1, 3))

    assert log.last_seq == 3
    assert list(log.read()) == weights(1, 3)


async def test_waiting_makes_what_was_posted_durable(log):
    log.post(weights(1, 2))
    await log.durable(2)

    assert log.durable_seq == 2
    assert list(log.read()) == weights(1, 2)


async def test_a_part_can_be_read(log):
    for first in range(1, 20, 3):
        log.post(weights(first, 3))
    await log.durable(12)

    assert seqs(log.read(5, 9)) == [5, 6, 7, 8]
    assert seqs(log.read(20)) == [20, 21]
    assert seqs(log.read(14, 14)) == []
    assert seqs(log.read(22)) == []
    assert seqs(log.read(3, 100)) == list(range(3, 22))


async def test_reading_shows_the_log_as_it_was_when_it_was_asked(log):
    log.post(weights(1, 2))
    reading = log.read()
    log.post(weights(3, 2))
    await log.durable(4)

    assert seqs(reading) == [1, 2]


async def test_an_event_comes_back_as_it_was(log):
    spans = (VersionSpan(0, 3, 7), VersionSpan(3, 5, 8))
    trajectory = TrajectoryRecord(0, {"reward": 0.5, "huge": 1e300}, 3, 5, spans, ((1, 2),))
    events = [
        RunStarted("run", {"batch": {"size": 3}, "filter": None}, 1, 0),
        SessionFinished("g7", 1, 2, (trajectory,), PayloadRef(1, 10, 77)),
        GroupEvicted("g7", ("stale", "failed"), 3, 1, shared_value=0.25, metric="reward", message="é\n"),
        BatchSampled(1, 1, "train", ("g1", "g2"), 3, (0, 1)),
    ]
    records = [Record(seq, 10**18 + seq, event) for seq, event in enumerate(events, 1)]
    log.post(records)
    await log.durable(4)

    assert list(log.read()) == records


async def test_every_kind_of_event_is_told_apart():
    tags = [kind.__struct_config__.tag for kind in EVENT_TYPES]

    assert len(set(tags)) == len(tags)


async def test_an_event_that_could_not_be_read_back_is_refused_and_nothing_is_posted(log):
    log.post(weights(1))
    with pytest.raises(LogError, match="a post of GroupSubmitted, WeightsPublished could not be read back"):
        log.post([*weights(2), submitted(3, "not a reference")])
    log.post(weights(2))
    await log.durable(2)

    assert list(log.read()) == weights(1, 2)


async def test_an_event_that_cannot_be_encoded_is_refused(log):
    with pytest.raises(LogError, match="a post of RunStarted could not be read back"):
        log.post([Record(1, 1, RunStarted("run", {"key": object()}, 1, 0))])

    assert log.last_seq == 0


async def test_a_wrong_number_is_a_fault_of_the_program(log):
    with pytest.raises(AssertionError, match="record 2 was posted where 1 is next"):
        log.post(weights(2))


async def test_posting_nothing_changes_nothing(log):
    log.post([])

    assert log.last_seq == 0


async def test_what_is_durable_needs_no_wait(log):
    log.post(weights(1, 2))
    await log.durable(2)
    await log.durable(1)
    await log.durable(0)


async def test_an_event_can_be_waited_for_before_it_is_posted(log):
    waiter = asyncio.ensure_future(log.durable(2))
    await asyncio.sleep(0)
    log.post(weights(1))
    await log.durable(1)
    assert not waiter.done()
    log.post(weights(2))
    await waiter

    assert log.durable_seq == 2


async def test_cancelling_one_waiter_leaves_the_others_waiting(log):
    waiters = [asyncio.ensure_future(log.durable(1)) for _ in range(3)]
    await asyncio.sleep(0)
    waiters[1].cancel()
    log.post(weights(1))
    results = await asyncio.gather(*waiters, return_exceptions=True)

    assert [type(result) for result in results] == [type(None), asyncio.CancelledError, type(None)]


async def test_a_cancelled_wait_does_not_take_the_event_back(log):
    log.post(weights(1))
    waiter = asyncio.ensure_future(log.durable(1))
    waiter.cancel()
    await asyncio.wait([waiter])
    log.post(weights(2))
    await log.durable(2)

    assert seqs(log.read()) == [1, 2]


async def test_many_tasks_can_wait_at_once(log):
    async def one(seq):
        log.post(weights(seq))
        await log.durable(seq)
        return log.durable_seq >= seq

    assert all(await asyncio.gather(*(one(seq) for seq in range(1, 101))))


async def test_closing_keeps_what_was_posted(log):
    log.post(weights(1, 5))
    await log.aclose()

    assert log.durable_seq == 5
    await log.durable(5)


async def test_closing_twice_is_closing_once(log):
    await log.aclose()
    await log.aclose()


async def test_a_closed_log_refuses_posts(log):
    await log.aclose()
    with pytest.raises(LogFailed, match="closed"):
        log.post(weights(1))

    assert log.last_seq == 0


async def test_a_closed_log_refuses_waits_for_what_will_not_come(log):
    log.post(weights(1))
    await log.aclose()
    with pytest.raises(LogFailed, match="closed"):
        await log.durable(2)


async def test_closing_tells_those_who_wait_for_what_will_not_come(log):
    waiter = asyncio.ensure_future(log.durable(1))
    await asyncio.sleep(0)
    await log.aclose()
    with pytest.raises(LogFailed, match="closed"):
        await waiter


async def test_a_log_says_what_it_is(log):
    log.post(weights(1))
    await log.aclose()

    assert "events=1" in repr(log)
    assert "closed" in repr(log)


# Payloads ------------------------------------------------------------------------------------------------


async def test_a_payload_can_be_read_before_and_after_it_is_written(log):
    ref = log.payloads.put(b"tokens")
    assert log.payloads.get(ref) == b"tokens"
    log.post([submitted(1, ref)])
    await log.durable(1)

    assert log.payloads.get(ref) == b"tokens"
    assert (ref.key, ref.length) == (1, 6)


async def test_an_empty_payload_is_a_payload(log):
    ref = log.payloads.put(b"")
    log.post([submitted(1, ref)])
    await log.durable(1)

    assert log.payloads.get(ref) == b""


async def test_a_payload_is_copied_when_it_is_put(log):
    data = bytearray(b"tokens")
    ref = log.payloads.put(data)
    data[:] = b"changed"

    assert log.payloads.get(ref) == b"tokens"


@pytest.mark.parametrize("written", [False, True])
async def test_a_freed_payload_is_gone(log, written):
    ref, other = log.payloads.put(b"tokens"), log.payloads.put(b"others")
    if written:
        log.post([submitted(1, ref)])
        await log.durable(1)
    log.payloads.free([ref, PayloadRef(99, 1, 1)])
    log.payloads.free([ref])
    with pytest.raises(DamagedPayload, match=r"payload 1 is not in .*: it was freed"):
        log.payloads.get(ref)

    assert log.payloads.get(other) == b"others"


@pytest.mark.parametrize("written", [False, True])
async def test_a_reference_that_does_not_fit_is_refused(log, written):
    ref = log.payloads.put(b"tokens")
    if written:
        log.post([submitted(1, ref)])
        await log.durable(1)
    for wrong in (PayloadRef(ref.key, ref.length + 1, ref.crc), PayloadRef(ref.key, ref.length, ref.crc ^ 1)):
        with pytest.raises(DamagedPayload, match="isn't what its event says"):
            log.payloads.get(wrong)
    with pytest.raises(DamagedPayload, match="is not in"):
        log.payloads.get(PayloadRef(ref.key + 1, ref.length, ref.crc))


async def test_keeping_some_payloads_frees_the_rest(log):
    refs = [log.payloads.put(bytes([number])) for number in range(5)]
    log.post([submitted(1, refs[0])])
    await log.durable(1)
    log.payloads.free([refs[0]])

    assert log.payloads.keep_only({refs[1].key, refs[3].key}) == 2
    assert log.payloads.get(refs[3]) == b"\3"
    with pytest.raises(DamagedPayload):
        log.payloads.get(refs[2])
