"""What was undone stands apart in `stats`, and every sum adds up."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from groupstate.cli import main
from groupstate.core import events as ev
from groupstate.core.folding import replayed
from groupstate.core.phases import Phase
from groupstate.core.rules import RULES_VERSION
from groupstate.inspect.stats import stats
from groupstate.inspect.tallies import UNDONE, Fates, Stats
from groupstate.simulate.loop import EPOCH_NS

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
        assert min(0, *interval.totals.values(), interval.trained_tokens, interval.undone_tokens) == 0
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
    assert there + whole.totals["response_tokens"] == whole.trained_tokens + whole.thrown_tokens.total() + held


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
