"""What was undone and what was validation stand apart in `stats`, and every sum adds up."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import groupstate as gs
from groupstate.cli import main
from groupstate.core import events as ev
from groupstate.core.folding import replayed
from groupstate.core.phases import Phase
from groupstate.core.rules import RULES_VERSION
from groupstate.inspect.stats import stats
from groupstate.inspect.tallies import REQUEUED, UNDONE, Fates, Stats
from groupstate.log.file import FileLog
from groupstate.simulate.loop import EPOCH_NS, VirtualLoop, run_virtual

Kept = Callable[..., Path]
STARTED = ev.RunStarted("r", {}, RULES_VERSION, 0, library="0.1")


def recorded(events: list[ev.AnyEvent]) -> list[ev.Record]:
    return [ev.Record(seq, EPOCH_NS, event) for seq, event in enumerate(events, 1)]


def lines(*args: Any) -> list[list[str]]:
    """The cells of what the command says."""
    result = CliRunner().invoke(main, ["stats", *map(str, args)])
    assert result.exit_code == 0, result.output
    return [line.split("\t") for line in result.stdout.splitlines()]


def rows(section: str, *args: Any) -> list[list[str]]:
    return [cells for title, *cells in lines(*args) if title == section]


def intervals(run: Path, *columns: str) -> list[list[str]]:
    """The cells of these columns, version by version."""
    heads = next(cells for title, *cells in lines(run, "--by", 1) if title == "# intervals")
    return [[cells[heads.index(name)] for name in columns] for cells in rows("intervals", run, "--by", 1)]


def ended(name: str, *, tokens: int = 10, partition: str = ev.TRAIN) -> list[ev.AnyEvent]:
    """A group of one session, from its submission to its end."""
    row = ev.TrajectoryRecord(0, {"reward": 1.0}, 3, tokens)
    return [
        ev.GroupSubmitted(name, 1, partition, 0, 1, "submit"), ev.SessionStarted(name, 0, 1),
        ev.SessionFinished(name, 0, 1, (row,)), ev.GroupFinished(name),
    ]  # fmt: skip


def committed(name: str, batch: int, *, partition: str = ev.TRAIN) -> list[ev.AnyEvent]:
    sampled = ev.BatchSampled(batch, batch, partition, (name,), 0, (0,))
    return [ev.BatchRequested(batch, partition, 1, 0), sampled, ev.BatchCommitted(batch)]


class Drawn:
    """A run that is drawn step by step, and goes back to marks; its book says what can happen next."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.book = replayed([])
        self.records: list[ev.Record] = []
        self.batch = 0
        self.add(STARTED)

    def add(self, *events: ev.AnyEvent) -> None:
        for event in events:
            seq = len(self.records) + 1
            self.records.append(ev.Record(seq, EPOCH_NS + seq, event))
            self.book.apply(self.records[-1])

    def one_of(self, phase: Phase, partition: str = "") -> str | None:
        """A group in this phase; None where there is none."""
        found = [g for g in self.book.groups.values() if g.phase == phase and partition in ("", g.partition)]
        return self.draw(st.sampled_from(sorted(g.group_id for g in found))) if found else None

    def submit(self) -> None:
        """With one session it ends, with two it is under way."""
        name, partition = f"g{len(self.records)}", self.draw(st.sampled_from([ev.TRAIN, ev.VALIDATION]))
        events = ended(name, tokens=self.draw(st.integers(0, 9)), partition=partition)
        if self.draw(st.booleans()):
            events = [replace(events[0], size=2), *events[1:-1]]
        self.add(*events)

    def commit(self) -> None:
        if name := self.one_of(Phase.FINISHED):
            self.batch += 1
            self.add(*committed(name, self.batch, partition=self.book.groups[name].partition))

    def train(self) -> None:
        self.submit()
        self.commit()

    def evict(self) -> None:
        if name := self.one_of(Phase.FINISHED, ev.TRAIN):
            self.add(ev.GroupEvicted(name, ("stale",), 1, 1))

    def start_over(self) -> None:
        if name := self.one_of(Phase.RUNNING):
            self.add(ev.GroupRequeued(name, "why not"))

    def publish(self) -> None:
        self.add(ev.WeightsPublished(self.book.weight_version + 1, self.book.lineage))

    def mark(self) -> None:
        self.add(ev.CheckpointMarked(self.book.last_mark + 1, self.book.weight_version, self.book.lineage))

    def go_back(self) -> None:
        if self.book.marks:
            mark = self.draw(st.sampled_from(self.book.marks))
            self.add(ev.RunRecovered({}, RULES_VERSION, self.book.weight_version, self.book.lineage))
            self.add(ev.RunRewound(mark.mark, mark.seq, mark.weight_version, self.book.lineage + 1))


@st.composite
def runs(draw: st.DrawFn) -> list[ev.Record]:
    run = Drawn(draw)
    run.mark()
    steps = [run.train, run.train, run.submit, run.commit, run.evict, run.start_over, run.publish, run.mark]
    for step in draw(st.lists(st.sampled_from([*steps, run.go_back, run.go_back]), min_size=5, max_size=30)):
        step()
    return run.records


def seen_from(records: list[ev.Record], cut: int, by: int | None = None) -> Stats:
    """What is counted where the first events are gone."""
    return stats(records[cut:], replayed(records[:cut]) if cut else None, by=by)


CUTS = st.floats(0, 1, exclude_max=True)


# What was undone -----------------------------------------------------------------------------------------


@given(runs(), CUTS, st.integers(1, 3))
def test_nothing_is_counted_below_zero(records: list[ev.Record], part: float, by: int) -> None:
    seen = seen_from(records, int(part * len(records)), by)

    for interval in seen.intervals:
        counters = (interval.totals, interval.validation, interval.validation_tokens, interval.thrown_tokens)
        counts = [count for counter in counters for count in counter.values()]
        assert min(0, *counts, interval.trained_tokens, interval.undone_tokens) == 0
    assert min((fates.committed for kinds in seen.survival.values() for fates in kinds.values()), default=0) >= 0


@given(runs(), st.integers(1, 3))
def test_commits_are_those_of_the_book_whatever_was_undone(records: list[ev.Record], by: int) -> None:
    whole, book = stats(records, by=by).whole, replayed(records)

    for name in ("committed", "committed/train", "committed/val", "batches_committed"):
        assert whole.totals[name] == book.totals[name]


@given(runs(), CUTS)
def test_what_comes_back_from_before_the_first_event_is_counted_as_what_was_there(
    records: list[ev.Record], part: float
) -> None:
    cut = int(part * len(records))
    base, whole = replayed(records[:cut]), seen_from(records, cut).whole
    marks = [record.event.mark_seq for record in records[cut:] if isinstance(record.event, ev.RunRewound)]
    back = [group for group in base.aside.values() if group.last_seq > min(marks, default=group.last_seq)]

    there = sum(
        row.response_tokens for g in [*base.groups.values(), *back] for s in g.sessions for row in s.trajectories
    )
    held = seen_from(records, cut).held_tokens
    ended = whole.trained_tokens + whole.validation_tokens["committed"]
    thrown = whole.thrown_tokens.total() + whole.validation_tokens[REQUEUED]
    assert there + whole.totals["response_tokens"] == ended + thrown + held


def gone_back() -> list[ev.AnyEvent]:
    """One group is committed before the mark, two are behind it, of which one is committed again."""
    return [
        STARTED, *ended("a"), *committed("a", 1), ev.CheckpointMarked(1, 0, 1),
        ev.WeightsPublished(1), *ended("b"), *committed("b", 2), ev.WeightsPublished(2), *ended("c"),
        *committed("c", 3), ev.RunRecovered({}, RULES_VERSION, 2, 1), ev.RunRewound(1, 9, 0, 2), *committed("b", 4),
    ]  # fmt: skip


def test_what_was_undone_stands_in_the_interval_in_which_it_was_committed(kept: Kept) -> None:
    run = kept(*gone_back())

    assert intervals(run, "lineage", "versions", "trained on", "undone", "trained", "tokens undone") == [
        ["1", "0", "1", "0", "10", "0"],
        ["1", "1", "0", "1", "0", "10"],
        ["1", "2", "0", "1", "0", "10"],
        ["2", "0", "1", "0", "10", "0"],
    ]
    assert ["trained on", "2 (66.7%)"] in rows("groups", run)
    assert ["commits undone by going back", "2"] in rows("groups", run)


def test_a_run_that_never_went_back_has_no_columns_for_it(kept: Kept) -> None:
    heads = next(cells for title, *cells in lines(kept(*gone_back()[:-4])) if title == "# intervals")

    assert [name for name in heads if "undone" in name] == []


def test_that_a_commit_before_the_first_event_was_undone_is_not_counted() -> None:
    records = recorded(gone_back())
    seen = stats(records[-5:], replayed(records[:-5]))

    assert (seen.whole.totals["committed"], seen.whole.totals[UNDONE], seen.live) == (1, 0, {"finished": 1})
    assert seen.survival["cause"] == {"submit": Fates(1)}


# What was validation -------------------------------------------------------------------------------------


@given(runs(), st.integers(1, 3))
def test_groups_and_tokens_of_each_partition_add_up(records: list[ev.Record], by: int) -> None:
    seen = stats(records, by=by)
    whole, totals, validation = seen.whole, seen.whole.totals, seen.whole.validation
    live, held = sum(seen.validation_live.values()), seen.validation_held_tokens
    dropped = whole.validation_tokens[REQUEUED]

    assert validation["submitted"] == validation["committed"] + live
    assert validation["response_tokens"] == whole.validation_tokens["committed"] + dropped + held
    training = totals["submitted"] - validation["submitted"]
    assert training == totals["committed/train"] + totals["evicted"] + sum(seen.live.values()) - live
    generated = totals["response_tokens"] - validation["response_tokens"]
    assert generated == whole.trained_tokens + whole.thrown_tokens.total() + seen.held_tokens - held


@given(runs())
def test_what_was_trained_on_is_what_survived(records: list[ev.Record]) -> None:
    seen = stats(records)

    for kinds in seen.survival.values():
        assert sum(fates.committed for fates in kinds.values()) == seen.whole.totals["committed/train"]
    assert seen.whole.totals["committed/val"] == seen.whole.validation["committed"]
    assert replayed(records).totals["committed/val"] == seen.whole.validation["committed"]


@pytest.fixture
def validated(tmp_path: Path) -> Path:
    """One group of two sessions of 10 tokens is trained on; fifty are validation, with 1,000 tokens a session."""
    path = tmp_path / "validated"

    async def session(ctx: gs.SessionContext) -> gs.Trajectory:
        tokens = 1_000 if ctx.prompt.content == "v" else 10
        return gs.Trajectory(response_ids=[1] * tokens, reward=float(ctx.session))

    async def main(loop: VirtualLoop) -> None:
        log = FileLog.create(path, inline=True, durability="os", now_ns=loop.clock_ns)
        given = {"source": ["p"], "session": session, "group_size": 2, "clock_ns": loop.clock_ns}
        async with gs.open_run(log=log, **given) as run:
            await run.commit(await run.sample(1))
            await run.validate(["v"] * 50)

    run_virtual(main)
    return path


def test_validation_is_not_trained_on(validated: Path) -> None:
    groups, tokens = rows("groups", validated), rows("tokens", validated)

    assert groups == [
        ["submitted", "51"],
        ["... for validation", "50"],
        ["trained on", "1 (100.0%)"],
        ["thrown away", "0 (0.0%)"],
        ["ended as validation", "50 (100.0%)"],
    ]
    assert tokens == [
        ["generated", "100020", "100.0%"],
        ["... for validation", "100000", "100.0%"],
        ["trained on", "20", "0.0%"],
        ["ended as validation", "100000", "100.0%"],
    ]
    assert [row[1:3] for row in rows("survival by reward", validated)] == [["1", "1"]]


def test_an_interval_says_how_much_of_it_was_validation(validated: Path) -> None:
    names = ("submitted", "for validation", "trained on", "ended as validation")
    tokens = ("tokens", "tokens for validation", "trained")

    assert intervals(validated, *names) == [["51", "50", "1", "50"]]
    assert intervals(validated, *tokens) == [["100020", "100000", "20"]]


def test_json_has_validation_beside_the_totals(validated: Path) -> None:
    result = CliRunner().invoke(main, ["stats", str(validated), "--json"])
    whole = json.loads(result.stdout)["whole"]

    assert whole["trained_tokens"] == 20
    assert whole["validation"] == {"committed": 50, "response_tokens": 100_000, "submitted": 50}
    assert whole["validation_tokens"] == {"committed": 100_000}


def test_validation_that_is_live_started_over_or_came_back_is_told_apart(kept: Kept) -> None:
    begun = [replace(event, size=2) if isinstance(event, ev.GroupSubmitted) else event for event in whole_of("b")[:-1]]
    run = kept(
        STARTED, ev.CheckpointMarked(1, 0, 1), *whole_of("a"), *committed("a", 1, partition=ev.VALIDATION), *begun,
        ev.GroupRequeued("b", "why not"), ev.RunRecovered({}, RULES_VERSION, 0, 1), ev.RunRewound(1, 2, 0, 2),
    )  # fmt: skip

    assert rows("groups", run) == [
        ["submitted", "2"],
        ["... for validation", "2"],
        ["trained on", "0"],
        ["thrown away", "0"],
        ["validation undone by going back", "1"],
        ["live validation, finished", "1"],
        ["live validation, pending", "1"],
        ["started over", "1"],
    ]
    assert rows("tokens", run) == [
        ["generated", "20", "100.0%"],
        ["... for validation", "20", "100.0%"],
        ["of validation that started over", "10", "50.0%"],
        ["of live validation", "10", "50.0%"],
    ]


def whole_of(name: str) -> list[ev.AnyEvent]:
    return ended(name, partition=ev.VALIDATION)
