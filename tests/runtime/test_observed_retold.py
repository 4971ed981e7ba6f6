"""The same history told by statuses and by sessions: the same evictions, the same batches."""

import itertools
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import groupstate as gs
from groupstate.core import events as ev
from groupstate.errors import SampleError
from groupstate.log.memory import MemoryLog
from groupstate.runtime.observed import Reported, ReportedRow, StatusFeed
from tests.runtime.outside import Outside

pytestmark = pytest.mark.usefixtures("no_event_loop")


RULES = [
    gs.Rules(lag_max=1),
    gs.Rules(lag_max=1, filter_metric="reward", survivors_min=1),
    gs.Rules(empty_session="allow", filter_metric="reward"),
    gs.Rules(mode="sync"),
    gs.Rules(mode="sync", failure="refill", empty_session="allow"),
    gs.Rules(mode="sync", filter_metric="reward", batch_size=2),
    gs.Rules(basis="oldest_token", lag_max=1),
    gs.Rules(lag_max=1, on_stale="wait"),
]


@attrs.define
class Pair:
    """One history, told by statuses (`out`) and by the sessions themselves (`direct`)."""

    out: Outside
    direct: StatusFeed
    names: Iterator[str] = attrs.field(factory=lambda: (f"g_{n}" for n in itertools.count()))

    def submit(self) -> None:
        """A new group; only what becomes of its sessions is told in two ways."""
        name = next(self.names)
        report = Reported(status="pending", stamp=self.direct.book.weight_version)
        self.direct._submit(name, report)
        self.direct.ledger.settle()
        self.out.listing[name] = report
        self.out.look()

    def start(self, name: str) -> None:
        for session in range(2):
            self.direct.ledger.start(name, session)
        self.out.report(name, "running", stamp=self.out.listing[name].stamp)

    def end(self, name: str, outcomes: list[Any], order: list[int]) -> None:
        """Each session's rewards, or None where it failed."""
        version = self.direct.book.weight_version
        rows = {
            (session, index): ReportedRow(metrics={"reward": reward}, response_tokens=2, versions=(version, version))
            for session, rewards in enumerate(outcomes)
            for index, reward in enumerate(rewards or ())
        }
        for session in order:
            rewards = outcomes[session]
            if rewards is None:
                self.direct.ledger.fail(name, session, 1, "error", "boom")
            else:
                span = (ev.VersionSpan(0, 2, version),)
                result = [gs.Trajectory(reward=r, response_ids=[1, 1], spans=span) for r in rewards]
                self.direct.ledger.finish(name, session, 1, result)
        status = "failure" if None in outcomes else "finished"
        self.out.report(name, status, stamp=self.out.listing[name].stamp, rows=rows)

    def sample(self, size: int) -> None:
        told = [self._sampled(feed, size) for feed in (self.direct, self.out.feed)]
        assert told[0] == told[1]

    @staticmethod
    def _sampled(feed: StatusFeed, size: int) -> Any:
        try:
            batch = feed.sample_now(size)
        except SampleError as error:
            return str(error)
        if batch is not None:
            feed.commit(batch)
        # Why a session of a failed group has no trajectory is not in a status.
        return batch and (batch.group_ids, batch.lags, {k: v for k, v in batch.metrics.items() if "failed" not in k})

    def take(self) -> None:
        assert self.direct.take_refills() == self.out.feed.take_refills()

    def compare(self) -> None:
        told = [
            (
                {name: str(group.phase) for name, group in book.groups.items()},
                book.departed,
                [group.group_id for group in book.ready()],
                [attrs.astuple(credit) for credit in book.credits],
            )
            for book in (self.direct.book, self.out.feed.book)
        ]
        assert told[0] == told[1]

    def evictions(self) -> tuple[list[Any], list[Any]]:
        kinds = (ev.GroupEvicted, ev.BatchSampled)
        records = self.direct.ledger.log.read()
        return [r.event for r in records if isinstance(r.event, kinds)], self.out.events(*kinds)


OUTCOMES = st.none() | st.lists(st.sampled_from([0.0, 1.0]), max_size=2)


@given(st.data())
def test_statuses_and_sessions_tell_the_same(data: st.DataObject) -> None:
    rules = data.draw(st.sampled_from(RULES))
    direct = StatusFeed.begin(MemoryLog(), rules, group_size=2)
    pair = Pair(Outside(rules), direct)
    for _ in range(data.draw(st.integers(1, 25), "steps")):
        listing, groups = pair.out.listing, direct.book.groups
        waiting = [name for name in listing if listing[name].status == "pending"]
        running = [name for name in listing if listing[name].status == "running" and name in groups]
        step = data.draw(st.sampled_from(["submit", "start", "end", "end", "sample", "publish", "take"]), "step")
        if step == "submit":
            pair.submit()
        elif step == "start" and waiting:
            pair.start(data.draw(st.sampled_from(waiting)))
        elif step == "end" and running:
            outcomes = data.draw(st.lists(OUTCOMES, min_size=2, max_size=2), "outcomes")
            order = data.draw(st.permutations([0, 1]), "order")
            pair.end(data.draw(st.sampled_from(running)), outcomes, order)
        elif step == "sample":
            pair.sample(data.draw(st.integers(1, 2)))
        elif step == "publish":
            for feed in (direct, pair.out.feed):
                feed.ledger.publish(feed.book.weight_version + 1)
        elif step == "take":
            pair.take()
        pair.compare()
    told, observed = pair.evictions()
    assert told == observed
    pair.out.check()
