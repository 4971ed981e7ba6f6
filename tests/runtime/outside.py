"""A system outside that lists statuses, and a feed that looks at it."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

import groupstate as gs
from groupstate.core import events as ev
from groupstate.core.folding import replayed
from groupstate.core.invariants import violations
from groupstate.log.memory import MemoryLog
from groupstate.runtime.observed import Reported, ReportedRow, StatusFeed


class Outside:
    """The system outside: what it lists, and a feed that looks at it."""

    def __init__(
        self,
        rules: gs.Rules | None = None,
        *,
        group_size: int = 2,
        log: Any = None,
        version: int = 0,
        restamps: bool = False,
    ) -> None:
        self.log = log or MemoryLog()
        self.restamps = restamps
        self.rules = rules or gs.Rules()
        self.group_size = group_size
        self.listing: dict[Any, Any] = {}
        self.feed = self._begin(version)

    def _begin(self, version: int | None = None) -> StatusFeed:
        clock = lambda: self.log.last_seq * 1_000  # noqa: E731
        return StatusFeed.begin(
            self.log,
            self.rules,
            group_size=self.group_size,
            weight_version=version,
            restamps=self.restamps,
            clock_ns=clock,
        )

    def again(self) -> None:
        """The process died and another goes on."""
        self.feed = self._begin()

    def report(self, group_id: Any, status: Any, /, *rewards: Any, **fields: Any) -> "Outside":
        """List a group and look; `rewards` are those of its sessions, one trajectory each, None for none."""
        rows = {
            (session, 0): ReportedRow(metrics={"reward": reward})
            for session, reward in enumerate(rewards)
            if reward is not None
        }
        self.listing[group_id] = Reported(**{"status": status, "stamp": 0, "rows": rows, **fields})
        return self.look()

    def remove(self, *group_ids: str) -> "Outside":
        for group_id in group_ids:
            del self.listing[group_id]
        return self.look()

    def look(self) -> "Outside":
        self.feed.observe(self.listing)
        return self

    @property
    def records(self) -> list[ev.Record]:
        return list(self.log.read())

    def events(self, *kinds: type[ev.Event]) -> list[Any]:
        return [record.event for record in self.records if isinstance(record.event, kinds or ev.Event)]

    def phase(self, group_id: str) -> str:
        live = self.feed.book.groups.get(group_id)
        return str(live.phase if live else self.feed.book.departed.get(group_id))

    def evicted(self) -> dict[str, tuple[str, ...]]:
        return {event.group_id: event.reasons for event in self.events(ev.GroupEvicted)}

    def check(self) -> None:
        assert [str(violation) for violation in violations(self.records)] == []
        assert replayed(self.records).state() == self.feed.book.state()


Make = Callable[..., Outside]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
