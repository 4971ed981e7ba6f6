"""Simulated runs of all kinds, asked about batches and waits: what is told agrees with the log at every event."""

import contextlib
from collections.abc import Sequence

import pytest

from groupstate.core import events as ev
from groupstate.errors import BadInput
from groupstate.inspect.batch_story import batch_story
from groupstate.inspect.wait_story import wait_story
from groupstate.simulate.drawn import drawn_plan
from groupstate.simulate.simulator import simulate

SEEDS = range(10)
ASKED = 6
"""Batches of each run that are asked about."""


@pytest.fixture(scope="module", params=SEEDS)
def records(request: pytest.FixtureRequest) -> Sequence[ev.Record]:
    return simulate(drawn_plan(request.param).changed(hours=0.05)).records


def batches(records: Sequence[ev.Record]) -> list[ev.Record]:
    every = [record for record in records if isinstance(record.event, ev.BatchSampled)]
    return every[:: max(1, len(every) // ASKED)]


def test_the_order_that_is_told_is_that_of_every_batch(records: Sequence[ev.Record]) -> None:
    for record in batches(records):
        told = batch_story(records, record.event.batch)
        why = {group.why.split(":")[0] for group in told.passed_over}

        assert tuple(group.group_id for group in told.taken) == record.event.group_ids
        assert tuple(group.lag for group in told.taken) == record.event.lags
        assert why <= {"behind the last one taken", "kept for the validation round that submitted it"} or all(
            text.startswith("made for version") for text in why
        )
        assert told.sampleable == len(told.taken) + len(told.passed_over) + sum(one.with_it for one in told.evicted)


def test_a_batch_and_its_wait_tell_the_same_and_what_let_it_go(records: Sequence[ev.Record]) -> None:
    for record in batches(records):
        told = batch_story(records, record.event.batch)
        wait = wait_story(records, told.request_seq)

        assert (wait.ended_seq, wait.lasted_s) == (record.seq, told.waited_s)
        if wait.lasted_s:
            assert wait.request_seq < wait.let_go_seq < wait.ended_seq
            assert wait_story(records, record.seq).at_end.sampleable >= wait.size


def test_whoever_waits_at_an_event_is_told_of(records: Sequence[ev.Record]) -> None:
    told = {}
    for record in records[:: max(1, len(records) // 20)]:
        with contextlib.suppress(BadInput):  # nobody waited
            told[record.seq] = wait_story(records, record.seq)

    assert told
    for seq, wait in told.items():
        assert wait.request_seq <= seq
        assert wait.ended_seq == 0 or wait.ended_seq >= seq
        assert wait.then.needed or wait.ended_seq == seq
